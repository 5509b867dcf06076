"""Does a capture that fails inside leave the training alone, name what it lost, and end it where that was asked for?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.capture.staging.ring import RingConsumer, RingProducer
from ranktape.capture.staging.ring_file import SlotKind
from ranktape.errors import CaptureError
from ranktape.storage import Run, open_run
from tests.capture.trainings import Made

WIDTH = 8


class Angry(torch.Tensor):
    """A tensor that can be computed with only by who turns its overrides off."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("do not touch")


class AngryGradient(torch.autograd.Function):
    """Passes values on, and gives a gradient that cannot be touched."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].clone().as_subclass(Angry)


class AngryOutput(nn.Linear):
    """Calls no function that could be recorded in its place."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden @ self.weight.T).as_subclass(Angry)


class Refusing(dict[str, Any]):
    """Parameters that the layer itself can read, and others not while it is called."""

    error: BaseException | None = None

    def get(self, name: str, default: Any = None) -> Any:
        if self.error is not None:
            raise self.error
        return super().get(name, default)


class NoWeight(nn.Linear):
    """Its weight cannot be read in the way that others' can."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self._parameters = Refusing(self._parameters)
        self._error = error

    def __call__(self, *args: Any) -> Any:
        self._parameters.error = self._error  # type: ignore[attr-defined]
        try:
            return super().__call__(*args)
        finally:
            self._parameters.error = None  # type: ignore[attr-defined]


def around(middle: nn.Module) -> Made:
    """Between two layers as they should be, one that is as odd as the test has it."""

    def run(model: Any, hidden: torch.Tensor) -> Any:
        hidden = model.middle(model.first(hidden))
        with torch._C.DisableTorchFunctionSubclass():
            hidden = hidden.as_subclass(torch.Tensor)
        return model.last(hidden)

    return Made(run, first=plain(), middle=middle, last=plain())


def plain() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def mapped() -> Made:
    """Its layer sees tensors that stand for a batch of others, which cannot be copied out of there."""
    return Made(lambda model, hidden: torch.func.vmap(model.inner)(hidden), inner=plain())


def gradient_fails() -> Made:
    apply: Any = AngryGradient.apply
    return Made(lambda model, hidden: apply(model.inner(hidden)), inner=plain())


class Secretive(nn.Linear):
    """Answers who asks for an attribute that it does not have with an error of its own."""

    is_made = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not self.is_made:
                raise
            raise RuntimeError(f"nobody asks for {name}") from None


def secretive() -> Secretive:
    made = Secretive(WIDTH, WIDTH, bias=False)
    made.is_made = True
    return made


class Lister(nn.Linear):
    """Takes, and gives, a list that holds itself."""

    def forward(self, hidden: torch.Tensor, context: Any = None) -> torch.Tensor:  # noqa: ARG002
        return super().forward(hidden)


def trained(model: nn.Module, *, steps: int = 2) -> list[str]:
    """Losses of a training, exactly."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def captured(middle: nn.Module, url: Path, **options: Any) -> Run:
    """A run of two iterations; the training is the same as without a capture."""
    expected = trained(around(middle))
    with Capture(url, **{"min_iterations": 2, **options}):
        assert trained(around(middle)) == expected
    return open_run(url)


def armed() -> NoWeight:
    return NoWeight(RuntimeError("no weight for you"))


@pytest.mark.parametrize(
    ("make", "place", "reason"),
    [
        (lambda: AngryOutput(WIDTH, WIDTH, bias=False), "middle", "do not touch"),
        (armed, "middle", "no weight for you"),
        (mapped, "middle.inner", ""),
        (gradient_fails, "middle.inner", "do not touch"),
    ],
    ids=["output", "weight", "vmap", "gradient"],
)
def test_a_site_that_fails_is_disabled_and_named_and_the_others_go_on(
    make: Any, place: str, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = captured(make(), tmp_path / "run")
    assert run.iterations == [0, 1]
    for status in run.status():
        reasons = {name: why for name, why in status.silent_sites[0].items() if name.startswith(place)}
        assert reasons
        assert all(reason in why for why in reasons.values()), reasons
        assert not [name for name in status.silent_sites[0] if not name.startswith(place)]
        assert status.num_missing
        assert status.num_recorded == (status.num_expected or 0) - status.num_missing
    assert {"first", "last"} <= set(run.select().column("module"))
    for record in run.select(module=["first", "last"]):
        record.read()
    warnings = [line for line in capfd.readouterr().err.splitlines() if place in line and "nothing more" in line]
    assert len(warnings) == len(set(warnings)) <= 3


def test_a_module_that_answers_no_questions_costs_only_itself(tmp_path: Path) -> None:
    run = captured(secretive(), tmp_path / "run")
    assert run.iterations == [0, 1]
    assert {"first", "last"} <= set(run.select().column("module"))


def test_arguments_that_hold_themselves_are_no_obstacle(tmp_path: Path) -> None:
    def pass_list(model: Any, hidden: torch.Tensor) -> Any:
        context: list[Any] = [hidden]
        context.append(context)
        return model.inner(hidden, context)

    run = captured(Made(pass_list, inner=Lister(WIDTH, WIDTH, bias=False)), tmp_path / "run")
    assert run.iterations == [0, 1]
    assert "middle.inner" in run.select().column("module")


def test_an_output_of_another_kind_is_named(tmp_path: Path) -> None:
    class Wrapping(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> Any:
            return {"text": "none"} if hidden.ndim == 0 else _Box(hidden @ self.weight.T)

    unwrapping = Made(lambda model, hidden: model.inner(hidden).inside, inner=Wrapping(WIDTH, WIDTH, bias=False))
    run = captured(unwrapping, tmp_path / "run")
    assert run.iterations == [0, 1]
    reasons = {name: why for name, why in run.status()[0].silent_sites[0].items() if "middle.inner" in name}
    assert any("_Box" in why for why in reasons.values()), reasons


class _Box:
    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside


@pytest.mark.parametrize("make", [armed, gradient_fails], ids=["forward", "backward"])
def test_a_strict_capture_ends_the_training_with_the_error(make: Any, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"the capture failed at middle.* \(it is strict\)"):
        captured(make(), tmp_path / "run", strict=True)
    verdict = open_run(tmp_path / "run").verdict()
    assert not verdict.met
    assert "the capture failed at middle" in verdict.message()


def test_a_failure_of_the_ring_ends_the_capture_and_the_status_tells_whatever_the_minimum(tmp_path: Path) -> None:
    model = nn.Linear(1024, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"max_iterations": 3, "host_budget_nbytes": 1 << 20, "select": "tensor_name=input"}
    with Capture(tmp_path / "run", **options):
        for batch_size in (4, 1024, 4):
            model(torch.randn(batch_size, 1024)).sum().backward()
            optimizer.step()
    run = open_run(tmp_path / "run")
    assert run.verdict().met
    assert run.iterations == [0]
    assert "capture disabled itself in iteration 1: a tensor of 4194304 bytes does not fit" in run.disabled()[0]
    with (
        pytest.raises(CaptureError, match="does not fit into the host budget"),
        Capture(tmp_path / "strict", strict=True, **options),
    ):
        model(torch.randn(1024, 1024)).sum().backward()


def test_an_interrupt_in_a_hook_is_the_trainings(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Capture(tmp_path / "run"):
        trained(around(NoWeight(KeyboardInterrupt())))
    assert "KeyboardInterrupt" in open_run(tmp_path / "run").verdict().message()


def test_a_slot_that_could_not_be_filled_is_passed_over_wherever_it_lies() -> None:
    # Room for three of them: some lie at the end of the file, and some begin anew at its start.
    producer = RingProducer(1 << 20, keep_alive=lambda: None)
    consumer = RingConsumer(os.dup(producer.descriptor))
    for number in range(20):
        slots = [
            producer.reserve(SlotKind.TENSOR, f'{{"number": {number}}}'.encode(), 300_000, timeout_seconds=1)
            for _ in range(2)
        ]
        slots[0].payload[:4] = b"half"
        producer.cancel(slots[0])
        slots[1].payload[:4] = b"full"
        producer.publish(slots[1])
        slot = consumer.take()
        assert slot is not None
        assert (slot.header, bytes(slot.payload[:4])) == ({"number": number}, b"full")
        assert consumer.take() is None
        consumer.free(slot)
    assert producer.pending_nbytes == 0
    producer.close()
