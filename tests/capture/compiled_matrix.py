"""Which wrappings of a compiled model does the matrix of support have, and what is recorded of each?"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ranktape.capture import Capture
from ranktape.storage import Record, open_run

WIDTH, HEADS, VOCABULARY, LENGTH, NUM_STEPS, CAPTURED = 16, 2, 16, 4, 3, 1
RECORDED: dict[str, Any] = {"select": "layer_type=linear,attention,embedding", "layers": "all"}
"""What is recorded inside of compiled graphs."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query = self.query(self.norm(hidden)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, 2 * query, query.sin(), is_causal=True)
        between = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return between + self.down(F.gelu(self.up(between)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A small GPT, whose layers may be checkpointed."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.is_checkpointed = is_checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.is_checkpointed else layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


Step = Callable[[torch.Tensor], torch.Tensor]
"""Makes of tokens a loss whose backward pass has run."""
Compile = Callable[..., Any]
"""`torch.compile`, or what leaves everything as it is."""


def stepping(called: Callable[..., Any], *, backward: Callable[[], Any] = contextlib.nullcontext) -> Step:
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = called(tokens).square().mean()
        with backward():
            loss.backward()
        return loss  # type: ignore[no-any-return]

    return step


def by_layers(model: Model, compile_: Compile) -> Model:
    for place, layer in enumerate(model.layers):
        model.layers[place] = compile_(layer)
    return model


def whole(model: Model, compile_: Compile) -> Step:
    return stepping(compile_(model))


def in_place(model: Model, compile_: Compile) -> Step:
    if compile_ is torch.compile:
        model.compile()
    return stepping(model)


def per_layer(model: Model, compile_: Compile) -> Step:
    return stepping(by_layers(model, compile_))


def ddp_around(model: Model, compile_: Compile) -> Step:
    return stepping(DistributedDataParallel(compile_(model)))


def ddp_inside(model: Model, compile_: Compile) -> Step:
    return stepping(compile_(DistributedDataParallel(model)))


def fsdp2(model: Model, compile_: Compile) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in by_layers(model, compile_).layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepping(model)


def tensor_parallel(model: Model, compile_: Compile) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return stepping(compile_(model))


def compiled_autograd(model: Model, compile_: Compile) -> Step:
    is_compiled = compile_ is torch.compile
    enable = functools.partial(torch._dynamo.compiled_autograd._enable, torch.compile(backend="inductor"))
    return stepping(compile_(model), backward=enable if is_compiled else contextlib.nullcontext)


def whole_step(model: Model, compile_: Compile) -> Step:
    return compile_(stepping(model))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Wrapping:
    """A way in which a model is compiled and wrapped."""

    make_step: Callable[[Model, Compile], Step]
    make: Callable[[], Model] = Model


checkpointed = functools.partial(Model, is_checkpointed=True)

WRAPPINGS = {
    "torch.compile(model)": Wrapping(whole),
    "model.compile()": Wrapping(in_place),
    "each layer": Wrapping(per_layer),
    "checkpoint inside": Wrapping(whole, checkpointed),
    "checkpoint around": Wrapping(per_layer, checkpointed),
    "DDP around": Wrapping(ddp_around),
    "DDP inside": Wrapping(ddp_inside),
    "FSDP2": Wrapping(fsdp2),
    "TP": Wrapping(tensor_parallel),
    "compiled autograd": Wrapping(compiled_autograd),
    "whole step": Wrapping(whole_step),
}

Losses = list[str]


def train(wrapping: Wrapping, url: Path | None, *, is_compiled: bool, **options: Any) -> Losses:
    """Some steps, one of them captured where there is a URL."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = wrapping.make()
    step = wrapping.make_step(model, torch.compile if is_compiled else lambda called: called)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context: Any = contextlib.nullcontext()
    if url is not None:
        context = Capture(url, start_at=CAPTURED, min_iterations=1, **options)
    losses = []
    with context:
        for _ in range(NUM_STEPS):
            losses.append(float(step(torch.randint(VOCABULARY, (2, LENGTH))).detach()).hex())
            optimizer.step()
            optimizer.zero_grad()
    torch._dynamo.reset()
    return losses


def site_of(record: Record) -> str:
    """The column of the matrix."""
    kind = "layer outputs" if record.component == "hidden" else record.layer_type
    return f"{kind} {record.operation}"


def count_tensors(url: Path) -> Counter[str]:
    """How many tensors of each site were recorded; each is there once."""
    records = list(open_run(url).select())
    names = [(one.module, one.layer_type, one.operation, one.tensor_name, one.microbatch, one.call) for one in records]
    assert len(set(names)) == len(names)
    return Counter(map(site_of, records))
