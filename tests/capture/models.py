"""Which small models do the tests of capture train?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranktape.capture import Capture
from ranktape.storage import Run, open_run

WIDTH = 16
HEADS = 2
BATCH = 3
LENGTH = 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        query, key, value = (
            part(hidden).view(batch, length, HEADS, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value=value, is_causal=True)
        return self.output(attended.transpose(1, 2).reshape(batch, length, WIDTH))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attended = hidden + self.attention(hidden)
        # In place, right after a captured layer: what was recorded must not change.
        return attended + self.down(input=F.relu_(self.up(attended)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two blocks; with `reentrant` set, each recomputed in the backward pass."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(hidden)
        for layer in self.layers:
            if self.reentrant is None:
                hidden = layer(hidden)
            else:
                hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return hidden


NUM_LINEARS = 1 + 2 * 6
NUM_TENSORS = (
    NUM_LINEARS * 3  # input, weight, output
    + (NUM_LINEARS - 1) * 3  # grad_output, grad_input, grad_weight
    + 2  # the first layer's input needs no gradient
    + 2 * 8  # query, key, value, output and their gradients
)
"""Tensors of one pass of `Net`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How `train` trains."""

    steps: int = 4
    microbatches: int = 1
    reentrant: bool | None = None
    autocast: bool = False


@contextlib.contextmanager
def no_capture() -> Iterator[None]:
    """In place of a capture."""
    yield


def train(training: Training, *, capture: Capture | None = None) -> tuple[list[str], nn.Module]:
    """Train from a fixed seed; the exact losses and the model."""
    torch.manual_seed(0)
    model = Net(reentrant=training.reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with capture or no_capture():
        for _ in range(training.steps):
            optimizer.zero_grad()
            for _ in range(training.microbatches):
                batch = torch.randn(BATCH, LENGTH, WIDTH)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=training.autocast):
                    loss = model(batch).float().square().mean()
                loss.backward()
                losses.append(loss.item().hex())
            optimizer.step()
    return losses, model


def steps(
    model: nn.Module, count: int = 1, *, shape: tuple[int, ...] = (2, 4, WIDTH), optimizers: int = 1
) -> list[str]:
    """The exact losses of some steps of any model, in each of which each optimizer steps once."""
    made = [torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(optimizers)]
    losses = []
    for _ in range(count):
        loss = model(torch.randn(shape)).square().mean()
        loss.backward()
        losses.append(loss.item().hex())
        for optimizer in made:
            optimizer.step()
        model.zero_grad()
    return losses


def captured(net: nn.Module, url: Path, count: int = 1, *, shape: tuple[int, ...] = (2, WIDTH), **options: Any) -> Run:
    """The run of such steps, each of which is guaranteed unless the options say otherwise."""
    with Capture(url, **{"min_iterations": count, **options}):
        steps(net, count, shape=shape)
    return open_run(url)
