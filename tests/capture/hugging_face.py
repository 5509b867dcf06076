"""Which models of Hugging Face do the tests train? Tiny ones with random weights: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ranktape.capture import Capture

NUM_LAYERS = 2
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4}
WORDS = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**SIZES, **WORDS, "num_key_value_heads": 2}
"""A decoder whose heads share keys and values."""

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", GROUPED),
    "Mixtral": ("ForCausalLM", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3Moe": ("ForCausalLM", GROUPED | EXPERTS | {"num_experts": 4, "head_dim": 8}),
    "GptOss": (
        "ForCausalLM",
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "DeepseekV3": (
        "ForCausalLM",
        GROUPED
        | EXPERTS
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    ),
    "GPT2": (
        "LMHeadModel",
        WORDS
        | {"n_embd": 16, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 32}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "ViT": ("ForImageClassification", SIZES | {"image_size": 8, "patch_size": 4, "num_labels": 3}),
    "Whisper": (
        "ForConditionalGeneration",
        WORDS
        | {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        | {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8, "decoder_start_token_id": 1}
        | {"max_source_positions": 8, "max_target_positions": 8},
    ),
    "T5": (
        "ForConditionalGeneration",
        WORDS | {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0},
    ),
}
"""By the name of the architecture: the rest of the name of its class, and its sizes."""


def tiny(name: str, **changes: Any) -> Any:
    """A model of an architecture, with some of its sizes changed."""
    import transformers

    rest, sizes = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**{**sizes, **changes})
    return getattr(transformers, name + rest)(config)


STACKS = {"t5": ("encoder.block", "decoder.block"), "whisper": ("model.encoder.layers", "model.decoder.layers")}
"""Of each model the lists that hold the 2 layers of its encoder, and the 3 of its decoder."""


def make_two_stacks(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tiny model, and a batch for it."""
    torch.manual_seed(0)
    labels = torch.randint(3, 60, (2, 5))
    if kind == "t5":
        model = tiny("T5", vocab_size=64, num_decoder_layers=3)
        return model, {"input_ids": torch.randint(3, 60, (2, 7)), "labels": labels}
    model = tiny("Whisper", vocab_size=64, decoder_layers=3)
    return model, {"input_features": torch.randn(2, 8, 16), "labels": labels}


def capture_two_stacks(kind: str, url: Path, *, num_iterations: int = 1) -> None:
    """Train a model for some iterations, all of which are captured."""
    model, batch = make_two_stacks(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(url, min_iterations=num_iterations):
        for _ in range(num_iterations):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
