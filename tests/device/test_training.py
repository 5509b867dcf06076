"""Is a training on an accelerator recorded as on the CPU, without waiting for the device, whatever fails on it?"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ranktape.capture
from ranktape.capture import Capture, save_tensor
from ranktape.capture.compiled.operator import TICKETS, tap_operator
from ranktape.capture.hooks.states import get_layer_hidden_states
from ranktape.capture.staging.device import DRIVERS, DeviceStage
from ranktape.capture.staging.ring_file import Counter
from ranktape.storage import Run, open_run
from ranktape.storage.format.live import TriggerKind
from tests.device.accelerator import Accelerator
from tests.device.conftest import SimDriver
from tests.device.models import NUM_STEPS, Training

OPTIONS: dict[str, Any] = {"host_budget_nbytes": 8 << 20, "with_master": True}


def captured(
    url: Path, device: torch.device | str, *, during: Callable[[], object] = lambda: None, **options: Any
) -> torch.Tensor:
    """Train with a capture, and give the losses; `during` is called after each step."""
    training = Training(device)
    with Capture(url, **{"min_iterations": NUM_STEPS, **OPTIONS, **options}):
        during()
        return training.run(after_step=during)


def tensors_of(run: Run) -> dict[tuple[Any, ...], torch.Tensor]:
    names = ("iteration", "microbatch", "call", "module", "operation", "phase", "tensor_name")
    return {tuple(getattr(one, name) for name in names): one.tensor() for one in run.select()}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[Any, ...], torch.Tensor], torch.Tensor]:
    url = tmp_path_factory.mktemp("cpu") / "run"
    losses = captured(url, "cpu", every=2, min_iterations=2)
    return tensors_of(open_run(url)), losses


@pytest.mark.usefixtures("way")
def test_a_training_is_recorded_as_on_the_cpu_and_never_waits(
    sim: Accelerator, tmp_path: Path, truth: tuple[dict[tuple[Any, ...], torch.Tensor], torch.Tensor]
) -> None:
    sim.poison(True)  # noqa: FBT003
    sim.set_delay(kernel_us=20, copy_us=200, is_random=True)
    waits: list[dict[str, int]] = []
    with sim.watching() as watched:
        losses = captured(
            tmp_path / "run", "sim:1", every=2, min_iterations=2, during=lambda: waits.append(watched.here)
        )
    assert waits[0] == waits[-1]  # neither in captured nor in idle steps
    assert torch.equal(losses.cpu(), truth[1])
    found = tensors_of(open_run(tmp_path / "run"))
    assert found.keys() == truth[0].keys()
    assert all(torch.equal(found[key], truth[0][key]) for key in found)
    assert sim.registered_nbytes() == 0


@pytest.mark.usefixtures("way")
def test_the_last_tensors_reach_the_writer_without_a_further_call(sim: Accelerator, tmp_path: Path) -> None:
    training = Training("sim:0")
    with Capture(tmp_path / "run", min_iterations=NUM_STEPS, **OPTIONS) as capture:
        sim.set_delay(kernel_us=20, copy_us=50)
        training.run()
        torch.accelerator.synchronize()
        time.sleep(0.1)
        ring = capture._process.ring
        assert not ring._slots
        assert ring._reserved == ring.counter(Counter.PUBLISHED)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", ["alloc", "launch", "copy", "record", "sync"])
def test_a_device_error_costs_one_record_and_the_commit_names_it(
    kind: str,
    sim: Accelerator,
    tmp_path: Path,
    truth: tuple[dict[tuple[Any, ...], torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, copies = DeviceStage.copy, []

    def copy(self: DeviceStage, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        copies.append(tensor.shape)
        if len(copies) == 20:
            sim.fail_next(kind)
        original(self, tensor, *args, **kwargs)

    monkeypatch.setattr(DeviceStage, "copy", copy)
    losses = captured(tmp_path / "run", "sim:0", every=2, min_iterations=2)
    assert torch.equal(losses.cpu(), truth[1])
    run = open_run(tmp_path / "run")
    found = tensors_of(run)
    assert len(found) == len(truth[0]) - 1
    assert all(torch.equal(found[key], truth[0][key]) for key in found)
    (lost,) = truth[0].keys() - found.keys()
    statuses = {status.iteration: status for status in run.status()}
    assert all(status.state == "complete" for status in statuses.values())
    name = " ".join(lost[3:])
    reasons = statuses[lost[0]].silent_sites[0]
    assert "injected" in reasons[name]
    assert statuses[lost[0]].num_missing == len(reasons)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", ["async", "launch"])
def test_a_sticky_error_reaches_the_user_and_the_recorder_stores(kind: str, sim: Accelerator, tmp_path: Path) -> None:
    training, steps = Training("sim:0"), []

    def fail() -> None:
        steps.append(1)
        if len(steps) == 3:
            sim.fail_next(kind, after=5, sticky=True)
            torch.ones(5, device="sim").mul_(2).add_(1)
            for _ in range(20):
                torch.ones(5, device="sim").sum()
            torch.accelerator.synchronize()

    with (
        pytest.raises(torch.AcceleratorError, match=r"assert|injected"),
        Capture(tmp_path / "run", record_last=2, host_budget_nbytes=8 << 20),
    ):
        training.run(after_step=fail)
    assert Capture.current is None
    run = open_run(tmp_path / "run")
    assert [trigger.kind for trigger in run.triggers()] == [TriggerKind.EXCEPTION]
    assert "AcceleratorError" in run.triggers()[0].text
    assert len({record.iteration for record in run.select()}) >= 2
    sim.reset()
    # The device works again: so does a capture.
    assert torch.isfinite(captured(tmp_path / "next", "sim:0").cpu()).all()
    assert len({record.iteration for record in open_run(tmp_path / "next").select()}) == NUM_STEPS


def test_a_capture_after_a_sticky_error_says_why_it_has_nothing(sim: Accelerator, tmp_path: Path) -> None:
    x = torch.ones(3, device="sim")
    torch.accelerator.synchronize()
    sim.fail_next("async", sticky=True)
    x.add_(1)
    with pytest.raises(torch.AcceleratorError, match="assert"):
        torch.accelerator.synchronize()
    with Capture(tmp_path / "run", manual=True, min_iterations=1, **{**OPTIONS, "with_master": False}) as capture:
        assert save_tensor(x, "mine", "forward", "none", "x") is None
        capture.step()
    (reason,) = open_run(tmp_path / "run").status()[0].missing.values()
    assert "no pinned memory for copies off sim: AcceleratorError" in reason


@pytest.mark.usefixtures("way")
def test_nothing_is_recorded_while_a_graph_is_captured(sim: Accelerator, tmp_path: Path) -> None:
    training = Training("sim:0")
    with Capture(tmp_path / "run", min_iterations=2, host_budget_nbytes=8 << 20):
        training.run()
        torch.accelerator.synchronize()
        time.sleep(0.2)  # no copy is under way
        num = sim.counters()["allocations"]
        sim.begin_graph()
        with torch.no_grad():
            training.model.embed(training.ids[0])
        num_plain = sim.counters()["allocations"] - num
        with torch.no_grad():
            training.model.embed(training.ids[0])
        assert sim.counters()["allocations"] - num == 2 * num_plain
        assert sim.end_graph()


@pytest.mark.usefixtures("way")
def test_two_captures_in_one_process(sim: Accelerator, tmp_path: Path) -> None:
    for name in ("first", "second"):
        captured(tmp_path / name, "sim:0")
        assert sim.registered_nbytes() == 0
    first, second = (tensors_of(open_run(tmp_path / name)) for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.usefixtures("way")
def test_what_changes_after_it_was_recorded(device: torch.device, tmp_path: Path) -> None:
    with Capture(tmp_path / "run", manual=True) as capture:
        for number in range(50):
            tensor = torch.full((1 << 16,), number, device=device, dtype=torch.int32)
            save_tensor(tensor, "mine", "forward", "none", "counted")
            tensor.fill_(-1)
        capture.step()
    for record in open_run(tmp_path / "run").select():
        assert (record.read() == record.call).all()


class Unscaling(torch.optim.Optimizer):
    """Skips its step on the device, as fused optimizers do: they are called in each case."""

    found_inf: torch.Tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad * (1 - self.found_inf))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("record_last", [None, 3])
def test_skipped_steps_of_a_fused_optimizer_are_known_without_waiting(
    sim: Accelerator, tmp_path: Path, record_last: int | None
) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, device="sim"))
    model = torch.nn.Linear(3, 2, device="sim")
    optimizer = Unscaling([parameter, *model.parameters()], {})
    options: dict[str, Any] = {"min_iterations": 3} if record_last is None else {"record_last": record_last}
    with sim.watching() as waits, Capture(tmp_path / "run", host_budget_nbytes=8 << 20, **options) as capture:
        for number in range(3):
            before = waits.here
            model((parameter * number).unsqueeze(0)).sum().backward()
            # As GradScaler does around the step of an optimizer that unscales in its kernel.
            optimizer.found_inf = torch.full((), float(number == 1), device="sim")
            optimizer.step()
            del optimizer.found_inf
            assert waits.here == before
        capture.trigger("the end")
    statuses = {status.iteration: status for status in open_run(tmp_path / "run").status()}
    assert [statuses[number].state for number in range(3)] == 3 * ["complete"]
    assert [statuses[number].step_skipped_ranks for number in range(3)] == [[], [0], []]


@pytest.mark.usefixtures("sim")
def test_layers_are_held_on_the_device_only_for_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = get_layer_hidden_states.__name__
    monkeypatch.delitem(vars(ranktape.capture), name, raising=False)
    captured(tmp_path / "unasked", "sim:0", layers="all", with_master=False)
    assert get_layer_hidden_states() is None
    assert len(open_run(tmp_path / "unasked").select(layer_type="hidden")) == 4 * NUM_STEPS
    getattr(ranktape.capture, name)
    captured(tmp_path / "asked", "sim:0", layers="all", with_master=False)
    states = get_layer_hidden_states()
    assert states is not None
    assert [state.shape for state in states] == 3 * [torch.Size([2, 6, 16])]


def test_the_ring_is_registered_for_the_device_of_the_tensors(
    sim: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(SimDriver):
        registered: list[torch.device]

        def register(self, memory: torch.Tensor, device: torch.device) -> bool:
            self.registered.append(device)
            return super().register(memory, device)

    driver = Watched(sim)
    driver.registered = []
    monkeypatch.setitem(DRIVERS, "sim", driver)
    assert torch.accelerator.current_device_index() == 0  # a script that never calls `set_device`
    captured(tmp_path / "run", "sim:1")
    assert driver.registered == [torch.device("sim:1")]
    assert len(open_run(tmp_path / "run").iterations) == NUM_STEPS


def test_the_operator_of_compiled_graphs_runs_on_any_device(device: torch.device) -> None:
    taken: list[tuple[int, torch.Tensor]] = []
    ticket = torch.tensor(5)
    TICKETS[5] = lambda site, tensor: taken.append((site, tensor))
    try:
        for value in (torch.ones(2, device=device), torch.ones(2, device=device, requires_grad=True)):
            tap_operator()(value, ticket, 3)
            assert taken.pop()[1] is value
        tap_operator()(torch.ones(2, device="meta"), ticket, 3)
        assert not taken
    finally:
        del TICKETS[5]
