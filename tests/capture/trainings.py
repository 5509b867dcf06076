"""How do the tests of capture train, and which laws hold of every training that is captured?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.storage import Record, Records, Run, open_run
from tests.capture.verify import verify_run

WIDTH, BATCH, LENGTH, VOCABULARY = 16, 3, 5, 50


class Made(nn.Module):
    """A model of some parts, with a forward that is given as a function of the model and its inputs."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, *inputs, **named)


def linear(**options: Any) -> nn.Linear:
    """A layer as wide as the batches."""
    return nn.Linear(WIDTH, WIDTH, **options)


def parameter(*shape: int) -> nn.Parameter:
    """A parameter of random numbers, by default a square one as wide as the batches."""
    return nn.Parameter(torch.randn(shape or (WIDTH, WIDTH)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained on what."""

    make: Callable[[], nn.Module]
    """Gives the model."""
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, batch: model(batch).square().mean()
    """What is minimised."""
    batch: Callable[[], torch.Tensor] = lambda: torch.randn(BATCH, LENGTH, WIDTH)
    """Gives a batch."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the capture."""
    step: Callable[[nn.Module, int], None] | None = None
    """Computes the gradients of a step of this number, in place of a loss of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training came to, without and with a capture."""

    run: Run
    model: nn.Module
    """The captured model after it."""
    plain: list[dict[str, torch.Tensor]]
    """The gradients of each step without a capture, and at the end the weights."""
    is_equal: bool
    """Whether losses, gradients and weights are the same, bit for bit."""


def train(task: Task, capture: Capture | None, *, steps: int) -> tuple[list[dict[str, torch.Tensor]], nn.Module]:
    """Train from a fixed seed; the loss and the gradients of each step and the weights at the end, and the model."""
    torch.manual_seed(0)
    model = task.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[dict[str, torch.Tensor]] = []
    with capture or contextlib.nullcontext():
        for number in range(steps):
            optimizer.zero_grad()
            own: dict[str, torch.Tensor] = {}
            if task.step is not None:
                task.step(model, number)
            else:
                loss = task.loss(model, task.batch())
                loss.backward()
                own = {"loss": loss.detach()}
            grads = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
            found.append(grads | own)
            optimizer.step()
    return [*found, {name: one.detach() for name, one in model.named_parameters()}], model


def train_twice(task: Task, url: Path, *, steps: int = 2) -> Trained:
    """Train without a capture and with one of every step."""
    plain, _ = train(task, None, steps=steps)
    found, model = train(task, Capture(url, min_iterations=steps, **task.options), steps=steps)
    is_equal = all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(plain, found, strict=True)
    )
    return Trained(run=open_run(url), model=model, plain=plain, is_equal=is_equal)


def lawful(
    task: Task, url: Path, counts: Mapping[str, int] | None = None, *, steps: int = 2, silent: Any = frozenset()
) -> Trained:
    """Train twice, and assert the laws.

    Gradients, losses and weights are those without a capture; each tensor is there once; products agree when they are
    computed again, as often as `counts` says of a step where it is given; and what is missing is `silent`: by place the
    reason, or the places alone.
    """
    trained = train_twice(task, url, steps=steps)
    assert trained.is_equal, "the training is not the same"
    assert trained.run.iterations == list(range(steps))
    fields = ("iteration", "mode", "module", "layer_type", "operation", "phase", "tensor_name", "microbatch", "call")
    records = trained.run.select()
    keys = list(zip(*map(records.column, fields), strict=True)) if len(records) else []
    assert len(set(keys)) == len(keys), "a tensor is there twice"
    reasons = missing(trained.run)
    assert (reasons if isinstance(silent, dict) else set(reasons)) == silent
    found = verify_run(trained.run)
    if counts is not None:
        assert found == {name: steps * count for name, count in counts.items()}
    return trained


def products(outputs: int, grad_inputs: int | None = None, **others: int) -> dict[str, int]:
    """The counts of linear layers that all have a gradient of their weight."""
    grads = outputs if grad_inputs is None else grad_inputs
    return {"output": outputs, "grad_weight": outputs, "grad_input": grads} | others


def attentions(number: int) -> dict[str, int]:
    """The counts of attentions."""
    return {f"attention {name}": number for name in ("output", "grad_query", "grad_key", "grad_value")}


def missing(run: Run) -> dict[str, str]:
    """What is missing in any iteration and on any rank, by place with the reason."""
    return {place: why for one in run.status() for sites in one.silent_sites.values() for place, why in sites.items()}


def only(records: Run | Records, **filters: Any) -> Record:
    """The one record that these filters leave."""
    [record] = records.select(**filters)
    return record


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
