"""Small models, ways of compiling them, and what a capture of some steps came to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from ranktape.capture import Capture
from ranktape.storage import open_run

WIDTH, HEADS, VOCABULARY, TOKENS = 32, 2, 20, 8


class Block(nn.Module):
    """A decoder layer; its products have a bias, or none, and query, key and value share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_up = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = hidden.shape
        normed = self.norm(hidden)
        parts = (part(normed) for part in (self.query, self.key, self.value))
        query, key, value = (one.view(batch, tokens, HEADS, -1).transpose(1, 2) for one in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return hidden + self.down(F.gelu(self.up(self.norm_up(hidden))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A GPT whose head and embedding share a weight."""

    def __init__(self, *, number: int = 2, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(number))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.is_checkpointed = is_checkpointed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.is_checkpointed else block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


Step = Callable[[torch.Tensor], torch.Tensor]
"""Makes of tokens a loss whose backward pass has run."""


def stepping(
    model: nn.Module,
    called: Callable[..., torch.Tensor] | None = None,
    *,
    backward: Callable[[], Any] = contextlib.nullcontext,
) -> Step:
    """A step as written, of what is called in place of the model."""
    forward = model if called is None else called

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(forward(ids).float().flatten(0, 1), ids.flatten())
        with backward():
            loss.backward()
        return loss

    return step


def as_written(model: Model) -> Step:
    return stepping(model)


def whole(model: Model, **options: Any) -> Step:
    return stepping(model, torch.compile(model, fullgraph=True, **options))


def in_place(model: Model, **options: Any) -> Step:
    model.compile(**options)
    return stepping(model)


def by_blocks(model: Model, **options: Any) -> Step:
    for block in model.blocks:
        block.compile(**options)
    return stepping(model)


def with_compiled_autograd(model: Model) -> Step:
    enable = torch._dynamo.compiled_autograd._enable
    return stepping(model, torch.compile(model), backward=lambda: enable(torch.compile(backend="inductor")))


def whole_step(model: Model) -> Step:
    return torch.compile(stepping(model))


@dataclass(slots=True)
class Trained:
    """What became of a training."""

    losses: list[float]
    weights: list[torch.Tensor]
    num_graphs: list[int]
    """Graphs that had been made after each step."""

    def equals(self, other: Trained) -> bool:
        """Whether both had the same losses and weights, bit for bit."""
        pairs = zip(self.weights, other.weights, strict=True)
        return self.losses == other.losses and all(torch.equal(one, another) for one, another in pairs)


def train(
    compile_: Callable[[Model], Step],
    url: Path | None = None,
    *,
    make: Callable[[], Model] = Model,
    dtype: torch.dtype = torch.float32,
    lengths: tuple[int, ...] = (TOKENS,) * 4,
    captured: tuple[int, ...] = (1, 2),
    **options: Any,
) -> Trained:
    """Some steps, of which those are captured where there is a URL."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = make().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context: Any = contextlib.nullcontext()
    if url is not None:
        context = Capture(
            url,
            model=model,
            start_at=captured[0],
            every=captured[1] - captured[0],
            min_iterations=len(captured),
            **options,
        )
    trained = Trained([], [], [])
    step = compile_(model)
    with context:
        for length in lengths:
            loss = step(torch.randint(VOCABULARY, (2, length)))
            trained.losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            trained.num_graphs.append(counters["stats"]["unique_graphs"])
    trained.weights = [one.detach().clone() for one in model.parameters()]
    return trained


def tensors(url: Path, *, iteration: int = 1) -> dict[tuple[Any, ...], Any]:
    """What was recorded of an iteration, by all that names it."""
    names = [
        "module",
        "layer_type",
        "layer_idx",
        "operation",
        "phase",
        "tensor_name",
        "microbatch",
        "call",
        "layout",
        "dtype",
    ]
    records = list(open_run(url).select(iteration=iteration))
    found = {(*(getattr(one, name) for name in names), tuple(one.shape)): one.read() for one in records}
    assert len(found) == len(records), "each is there once"
    return found
