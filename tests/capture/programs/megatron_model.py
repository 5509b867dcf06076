"""Trainings of one Megatron-core model on two ranks, each without a capture and with one.

megatron_model.py OUT VARIANT...: every rank writes the exact bits of each training to OUT, and each capture its run.

Megatron-core wants a GPU for its device and its generators of random numbers; the CPU stands for both here.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from ranktape.capture import Capture, get_layer_hidden_states

STEPS = 2
MICROBATCHES = 2
VOCABULARY = 32
LENGTH = 8
BATCH = 3
OPTIONS: dict[str, Any] = {"host_budget_nbytes": 32 << 20, "layers": "all", "select": "layer_type=linear,attention"}
"""Of every capture."""


class NoTracker:
    """In place of the generators of the GPU: there is no dropout."""

    def fork(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True


def stand_in_for_a_gpu() -> None:
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    megatron_random._CUDA_RNG_STATE_TRACKER = NoTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    megatron_random._get_all_rng_states = lambda: (None, None, None)
    megatron_random._set_all_rng_states = lambda *_: None
    # Its own class refuses pieces of sequences, because nobody would add up the gradients of its weights.
    WrappedTorchNorm.__new__ = lambda _, config, hidden_size, eps: torch.nn.LayerNorm(hidden_size, eps)  # noqa: ARG005


def make_model(*, num_ranks: int, is_sequence_split: bool, is_checkpointed: bool, shares: bool) -> GPTModel:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=num_ranks)
    torch.manual_seed(0)
    recompute: dict[str, Any] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    config = TransformerConfig(
        **(recompute if is_checkpointed else {}),
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=32,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=num_ranks,
        sequence_parallel=is_sequence_split,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=shares,
        position_embedding_type="rope",
    )
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.constant_(parameter, 0.25)  # zeros would hide a bias that is missing
    return model


def train(variant: str, *, capture: Capture | None) -> list[str]:
    """Train from a fixed seed; every loss, gradient and weight of this rank, in their exact bits."""
    is_reduced = variant == "ddp"
    model: Any = make_model(
        num_ranks=1 if variant in {"alone", "shared", "ddp"} else 2,
        is_sequence_split=variant == "sequence",
        is_checkpointed=variant in {"checkpointed", "ddp"},
        shares=variant == "shared",
    )
    if is_reduced:
        model = DistributedDataParallel(config=model.config, ddp_config=DistributedDataParallelConfig(), module=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    bits: list[str] = []
    with capture or contextlib.nullcontext():
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step + is_reduced * 10 * dist.get_rank())
            optimizer.zero_grad()
            if is_reduced:
                model.zero_grad_buffer()
            for _ in range(MICROBATCHES):
                tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
                loss = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous()).mean()
                loss.backward()
                bits.append(loss.item().hex())
            if is_reduced:
                model.finish_grad_sync()
                for parameter in model.parameters():
                    parameter.grad = parameter.main_grad
            for parameter in model.parameters():
                if getattr(parameter, "sequence_parallel", False):
                    dist.all_reduce(parameter.grad)  # as Megatron does before its optimizer
            bits += [bits_of(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
            optimizer.step()
        bits += [bits_of(parameter) for parameter in model.parameters()]
    parallel_state.destroy_model_parallel()
    return bits


def bits_of(tensor: torch.Tensor) -> str:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes().hex()


def main(out: Path, variants: list[str]) -> None:
    dist.init_process_group("gloo")
    stand_in_for_a_gpu()
    for variant in variants:
        plain = train(variant, capture=None)
        has_master = variant != "shared"
        options = OPTIONS if has_master else OPTIONS | {"select": "layer_type=linear,attention,embedding"}
        capture = Capture(out / f"{variant}.run", min_iterations=STEPS, with_master=has_master, **options)
        captured = train(variant, capture=capture)
        num_states = len(get_layer_hidden_states() or ())
        document = json.dumps({"plain": plain, "captured": captured, "num_states": num_states})
        (out / f"{variant}.rank{dist.get_rank()}.json").write_text(document)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
