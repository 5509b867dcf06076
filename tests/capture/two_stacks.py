"""Which models with an encoder and a decoder do tests capture?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ranktape.capture import Capture

STACKS = {"t5": ("encoder.block", "decoder.block"), "whisper": ("model.encoder.layers", "model.decoder.layers")}
"""Of each model the lists that hold the 2 layers of its encoder, and the 3 of its decoder."""


def make_two_stacks(kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tiny model, and a batch for it."""
    import transformers

    torch.manual_seed(0)
    labels = torch.randint(3, 60, (2, 5))
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=64,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_heads=2,
            num_layers=2,
            num_decoder_layers=3,
            decoder_start_token_id=0,
        )
        model: Any = transformers.T5ForConditionalGeneration(config)
        return model, {"input_ids": torch.randint(3, 60, (2, 7)), "labels": labels}
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=16,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=16,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_layers=3,
        decoder_attention_heads=2,
        decoder_ffn_dim=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = transformers.WhisperForConditionalGeneration(config)
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
