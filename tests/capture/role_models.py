"""Which models do the tests of roles train, one for each kind of layer and framework?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ranktape.capture import Capture
from ranktape.storage import Run, open_run

WIDTH = 16
BATCH = 3
LENGTH = 5
VOCABULARY = 50


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


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it, as PEFT's LoRA wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, WIDTH, bias=False)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base_layer(hidden) + self.lora_B["default"](self.lora_A["default"](hidden))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Some experts: one has most tokens, one has none, one is not called; others are slices of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.stacked = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = self.before(hidden).flatten(0, 1)
        groups = (tokens[:4], tokens[4:], tokens[:0])
        parts = [expert(group) for expert, group in zip(self.experts, groups, strict=False)]
        joined = torch.cat(parts)
        return F.linear(joined[:7], self.stacked[0]).sum() + F.linear(joined[7:], self.stacked[1]).sum()


class Bare(nn.Module):
    """Layers that are called around their hooks, twice, under two names, by keyword, or not as modules at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.again = self.first
        self.tied = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        around = self.first.forward(hidden)
        twice = self.again(input=self.first(around))
        looked_up = self.tied(torch.arange(LENGTH)) + twice
        return F.linear(looked_up, self.tied.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training came to, without and with a capture."""

    run: Run
    """What was recorded."""
    model: nn.Module
    """The captured model after it."""
    is_equal: bool
    """Whether losses, gradients and weights are the same, bit for bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained on what."""

    make: Callable[[], nn.Module]
    """Gives the model."""
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, batch: model(batch).square().mean()
    """What is minimised."""
    batch: Callable[[], torch.Tensor] = lambda: torch.randn(BATCH, LENGTH, WIDTH)
    """Gives a batch."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the capture."""


def train(task: Task, capture: Capture | None, *, steps: int) -> tuple[list[str], nn.Module]:
    """Train from a fixed seed; the exact losses, and the model."""
    torch.manual_seed(0)
    model = task.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    if capture is not None:
        capture.__enter__()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = task.loss(model, task.batch())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()).hex())
    if capture is not None:
        capture.close()
    return losses, model


def train_twice(task: Task, url: Path, *, steps: int = 2) -> Trained:
    """Train without a capture and with one."""
    plain_losses, plain = train(task, None, steps=steps)
    losses, model = train(task, Capture(url, min_iterations=steps, **task.options), steps=steps)
    is_equal = losses == plain_losses
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        is_equal &= torch.equal(one, other)
        is_equal &= (one.grad is None) == (other.grad is None)
        is_equal &= one.grad is None or (other.grad is not None and torch.equal(one.grad, other.grad))
    return Trained(run=open_run(url), model=model, is_equal=is_equal)
