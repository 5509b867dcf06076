"""Which small models do the tests of capture train?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranktape.capture import Capture

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


class Multihead(nn.Module):
    """`nn.MultiheadAttention`, of itself or of another sequence, with or without the weights of its attention."""

    def __init__(self, *, needs_weights: bool, is_crossed: bool = False, width: int | None = None) -> None:
        super().__init__()
        self.needs_weights = needs_weights
        self.before = nn.Linear(WIDTH, WIDTH)
        self.memory = nn.Linear(WIDTH, width or WIDTH) if is_crossed else None
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True, kdim=width, vdim=width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query = self.before(hidden)
        memory = query if self.memory is None else self.memory(hidden)
        attended, _ = self.attention(query, memory, memory, need_weights=self.needs_weights)
        return attended  # type: ignore[no-any-return]


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
