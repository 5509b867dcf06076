"""Which models with an encoder and a decoder do tests capture?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ranktape.capture import Capture
from tests.capture.hugging_face import tiny

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
