"""Does an iteration advance once, whatever steps in it, and when that was asked for otherwise, then?

Most need no run: a clock is given what a training does, and counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranktape.capture import Capture
from ranktape.capture.passes.clock import Clock, ForwardClock
from ranktape.capture.settings.options import CaptureOptions
from ranktape.storage import IterationState, open_run


class Counter:
    """Counts the iterations that a clock ends."""

    def __init__(self, advance_on: Any = "optimizer") -> None:
        self.count = 0
        self.notes: list[str] = []
        self.clock = Clock(
            CaptureOptions(advance_on=advance_on),
            on_step=self._tick,
            on_skip=lambda _: None,
            on_forward=lambda *_: None,
            on_late=lambda *_: None,
            on_note=self.notes.append,
        )

    def _tick(self) -> None:
        self.count += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clock.stop()


def backward(model: nn.Module, *, scale: float = 1.0) -> torch.Tensor:
    """Gradients for a step."""
    loss: torch.Tensor = model(torch.ones(2, 4)).sum() * scale
    loss.backward()
    return loss


@pytest.fixture
def model() -> nn.Module:
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_model_that_is_traced_or_recomputed_starts_no_forward_pass(model: nn.Module) -> None:
    started: list[nn.Module] = []
    clock = ForwardClock(lambda module, _: started.append(module), on_late=lambda module, _: started.append(module))
    clock.watch(model)
    batch = torch.ones(2, 4, requires_grad=True)
    torch.jit.trace(model, batch, check_trace=False)  # whose check would be a pass
    assert (started, clock.is_running) == ([], False)
    recomputed = checkpoint(model, batch, use_reentrant=False)
    assert started == [model]
    recomputed.sum().backward()
    assert (started, clock.is_running) == ([model], False)


def test_a_scaler_that_is_switched_off_changes_nothing(model: nn.Module) -> None:
    optimizer = sgd(model)
    with Counter() as counter:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        backward(model)
        scaler.step(optimizer)
        scaler.update()
        assert counter.count == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it imports
def test_an_optimizer_that_wraps_another_advances_once(model: nn.Module) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    store = dist.HashStore()  # type: ignore[attr-defined]  # torch documents it under this name
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with Counter() as counter:
            for ticks in (1, 2, 3):
                backward(model)
                optimizer.step()
                assert counter.count == ticks
        with Counter("optimizer:0") as counter:
            optimizer.step()
            assert counter.count == 1
    finally:
        dist.destroy_process_group()


def test_a_subclass_that_steps_through_its_base_advances_once(model: nn.Module) -> None:
    class Careful(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    optimizer = Careful(model.parameters(), lr=0.1)
    plain = sgd(model)
    with Counter() as counter:
        for ticks in (1, 2):
            optimizer.step()
            plain.step()
            assert counter.count == ticks


def test_a_closure_that_runs_several_forwards_is_one_step(model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    num_forwards = 0

    def closure() -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += 1
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    with Counter() as counter:
        optimizer.step(closure)
        assert counter.count == 1
    assert num_forwards > 1


class Fused:
    """Optimizers that step in the backward pass, one for each parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.num_steps = 0
        self.optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: torch.Tensor) -> None:
        self.num_steps += 1
        self.optimizers[parameter].step()  # type: ignore[index]  # it is one of the parameters


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_optimizers_that_step_in_the_backward_pass_advance_once_and_at_its_end(*, use_reentrant: bool | None) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(value: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(layers.children()):
            is_segment = use_reentrant is not None and number in {1, 2}
            value = checkpoint(layer, value, use_reentrant=use_reentrant) if is_segment else layer(value)
        return value

    fused = Fused(layers)
    counts_in_backward: list[int] = []
    with Counter() as counter:
        next(layers.parameters()).register_hook(lambda _: counts_in_backward.append(counter.count))
        for ticks in (1, 2, 3):
            forward(torch.ones(2, 4)).sum().backward()
            assert counter.count == ticks
    assert fused.num_steps == 3 * 8
    assert counts_in_backward == [0, 1, 2]


def test_a_schedulers_first_step_and_its_wrapping_advance_nothing_of_their_own(model: nn.Module) -> None:
    optimizer = sgd(model)
    with Counter() as counter:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        assert counter.count == 0
        for ticks in (1, 2):
            backward(model)
            optimizer.step()
            scheduler.step()
            assert counter.count == ticks


def gan_steps() -> Iterator[tuple[torch.optim.Optimizer, torch.optim.Optimizer]]:
    """The optimizers of a judge and of a generator, which steps after each second step of the judge."""
    judge, generator = sgd(nn.Linear(4, 4)), sgd(nn.Linear(4, 4))
    for _ in range(3):
        judge.step()
        judge.step()
        generator.step()
        yield judge, generator


def test_the_optimizer_that_is_named_by_its_place_advances() -> None:
    with Counter("optimizer:1") as second, Counter("optimizer:0") as first, Counter("step") as by_hand:
        for ticks, _ in enumerate(gan_steps(), start=1):
            assert (second.count, first.count, by_hand.count) == (ticks, 2 * ticks, 0)


def test_the_optimizer_that_is_given_advances(model: nn.Module) -> None:
    own, other = sgd(model), sgd(model)
    with Counter(own) as counter:
        other.step()
        assert counter.count == 0
        other.step()
        own.step()
        assert counter.count == 1
    fused = Fused(model)
    with Counter(fused.optimizers[next(model.parameters())]) as counter:
        backward(model)
        backward(model)
        assert counter.count == 2


def test_an_optimizer_that_never_steps_is_named_with_those_that_do(model: nn.Module) -> None:
    with Counter("optimizer:2") as counter:
        sgd(model).step()
        torch.optim.AdamW(model.parameters()).step()
        assert counter.clock.explain() == (
            "optimizer:2, which --advance-on names, never stepped; in the order of their first steps "
            "optimizer:0 is SGD, optimizer:1 is AdamW: name one of them, or call capture.step() after each iteration"
        )
    with Counter(sgd(model)) as counter:
        way_out = (
            "give --advance-on forward, which ends one with each forward, or call capture.step() after each iteration"
        )
        assert counter.clock.explain() == f"no optimizer stepped: {way_out}"
        assert counter.clock.explain(1) == f"no optimizer stepped in 1 training pass: {way_out}"


@pytest.fixture
def _nothing_compiled() -> None:
    """Where something was compiled, no pass is counted before an iteration is captured."""
    torch.compiler.reset()


@pytest.mark.usefixtures("_nothing_compiled")
@pytest.mark.parametrize("options", [{}, {"start_at": 1}, {"start_at": 3, "every": 2}])
def test_where_nobody_steps_the_message_says_so_whichever_iteration_is_the_first(
    options: dict[str, Any], model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Capture(tmp_path / "run", min_iterations=2, **options):
        for _ in range(6):
            backward(model)
    text = capsys.readouterr().err
    assert "the training ended in iteration 0: no optimizer stepped in 6 training passes: give --advance-on" in text
    assert "--start-at" not in text


@pytest.mark.usefixtures("_nothing_compiled")
def test_a_training_that_never_runs_is_told_so_whichever_iteration_is_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Capture(tmp_path / "run", start_at=1):
        pass
    assert "the training ended before its first pass in training mode" in capsys.readouterr().err


def test_an_optimizer_that_steps_beside_another_in_each_iteration_is_named_once(
    model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = model.children()
    first, second = sgd(one), torch.optim.AdamW(other.parameters())
    with Capture(tmp_path / "run", min_iterations=2, max_iterations=4):
        for _ in range(4):
            backward(model)
            first.step()
            second.step()
    [line] = [line for line in capsys.readouterr().err.splitlines() if "optimizer:1" in line]
    assert line == (
        "ranktape: AdamW (optimizer:1) steps, too: SGD (optimizer:0) ends the iteration, and what runs after its step "
        "belongs to the next one; --advance-on optimizer:1 lets the other one end it"
    )


def test_an_optimizer_that_takes_the_place_of_another_is_not_named() -> None:
    with Counter() as both:
        for _ in gan_steps():
            pass
    one, other = sgd(nn.Linear(4, 4)), sgd(nn.Linear(4, 4))
    with Counter() as replaced:
        for optimizer in [one] * 5 + [other] * 5:
            optimizer.step()
    [note] = both.notes
    assert not replaced.notes
    assert "SGD (optimizer:1) steps, too" in note


@pytest.mark.parametrize("skipped", ["step", "backward and step"])
def test_passes_that_merge_as_the_script_skips_its_step_are_told_of_once(
    skipped: str, model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = sgd(model)
    with Capture(tmp_path / "run", min_iterations=4):
        for is_bad in (False, False, True, False, True, False):
            loss = model(torch.ones(2, 4)).sum()
            if skipped == "step" or not is_bad:
                loss.backward()
            if not is_bad:
                optimizer.step()
    [line] = [line for line in capsys.readouterr().err.splitlines() if "training passes" in line]
    assert line == (
        "ranktape: iteration 2 has 2 training passes, where iteration 0 had 1: no optimizer stepped between them, as "
        "where a script skips its step; the iteration holds them all"
    )


def test_of_accumulation_with_a_rest_and_of_an_optimizer_in_between_nothing_is_said(
    model: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer, other = sgd(model), sgd(model)
    with Capture(tmp_path / "run", min_iterations=5):
        for num_passes in (4, 4, 2, 4):
            for _ in range(num_passes):
                backward(model)
            optimizer.step()
        for _ in range(2):
            for _ in range(4):
                backward(model)
            other.step()
        optimizer.step()
    assert "training passes" not in capsys.readouterr().err


def test_one_step_without_a_pass_before_it_ends_no_iteration_and_a_second_one_does(
    model: nn.Module, tmp_path: Path
) -> None:
    optimizer = sgd(model)
    reached = []
    with Capture(tmp_path / "run", min_iterations=2, max_iterations=9) as capture:
        for has_pass in (True, False, False, True, True):
            if has_pass:
                backward(model)
            optimizer.step()
            reached.append(capture.iteration)
    assert reached == [1, 1, 2, 3, 4]


class Checkpointed:
    """A training that keeps its state in a file, and begins with what it finds there."""

    def __init__(self, checkpoint: Path) -> None:
        torch.manual_seed(0)
        self._checkpoint = checkpoint
        self._model = nn.Linear(8, 8)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self.step = 0
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    @property
    def weight(self) -> torch.Tensor:
        return self._model.weight.detach().clone()

    def train(self, until: int) -> None:
        while self.step < until:
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.step))
            self._model(inputs).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.step += 1
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "step": self.step}
        torch.save(state, self._checkpoint)


def weights(url: Path) -> dict[int, torch.Tensor]:
    return {record.iteration: record.tensor() for record in open_run(url).select(tensor_name="weight")}


def test_a_run_goes_on_where_the_checkpoint_was_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = tmp_path / "run"
    undisturbed, expected = Checkpointed(tmp_path / "unused"), {}
    for step in (10, 20, 30, 40):
        undisturbed.train(step)
        expected[step] = undisturbed.weight
    first = Checkpointed(tmp_path / "checkpoint")
    with Capture(url, start_at=10, every=10, max_iterations=4):
        first.train(25)
    capsys.readouterr()
    second = Checkpointed(tmp_path / "checkpoint")
    with Capture(url, start_at=10, every=10, max_iterations=4, resume=True, first_iteration=second.step):
        second.train(45)
    assert open_run(url).iterations == [10, 20, 30, 40]
    assert "cannot be captured" not in capsys.readouterr().err
    assert all(torch.equal(found, expected[iteration]) for iteration, found in weights(url).items())


def test_what_is_past_is_not_planned_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Capture(tmp_path / "run", start_at=10, every=10, min_iterations=2, first_iteration=45) as capture:
        Checkpointed(tmp_path / "checkpoint").train(30)
    assert capture.close().met
    assert open_run(tmp_path / "run").iterations == [50, 60]
    said = capsys.readouterr().err
    assert "iterations 10, 20 come before --first-iteration 45 and cannot be captured: 50, 60 will be" in said


def test_by_default_the_first_step_is_the_first_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Capture(tmp_path / "run", min_iterations=3, first_iteration=100):
        Checkpointed(tmp_path / "checkpoint").train(5)
    assert open_run(tmp_path / "run").iterations == [100, 101, 102]
    assert "cannot be captured" not in capsys.readouterr().err


def test_a_step_over_wanted_iterations_skips_them(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    with Capture(tmp_path / "run", min_iterations=3, every=2) as capture:
        for following in (1, 2, 7):
            model(torch.randn(2, 8)).sum().backward()
            capture.step(following)
    skipped = open_run(tmp_path / "run").status()[-1]
    assert (skipped.iteration, skipped.state) == (4, IterationState.SKIPPED)
    assert skipped.missing == {0: "the training went from iteration 2 to 7"}
