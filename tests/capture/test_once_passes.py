"""Are training and evaluation told apart, do microbatches keep their numbers, and do iterations end when they ought?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.capture.passes.tracker import Call, Frame, Tracker
from ranktape.errors import CaptureError
from ranktape.storage import Records, open_run
from ranktape.storage.format.record_info import Mode
from tests.capture.verify import verify_run
from tests.exhaustive import exhaustive_but

WIDTH = 8


class Net(nn.Module):
    """Two layers; fails where it is told to, between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, *, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(hidden))
        if self.fails:
            raise ValueError("a batch that is too long")
        return self.second(hidden)  # type: ignore[no-any-return]


def batch(size: int) -> torch.Tensor:
    """Some samples."""
    return torch.randn(size, WIDTH)


def places(records: Records, **conditions: Any) -> list[tuple[int, ...]]:
    """Iteration, microbatch, call and batch size of each input of the first layer."""
    found = records.select(module="first", tensor_name="input", **conditions)
    return sorted((one.iteration, one.microbatch, one.call, one.shape[0]) for one in found)


@pytest.fixture
def model() -> Net:
    """The same each time."""
    torch.manual_seed(0)
    return Net()


def evaluate(model: Net, *sizes: int) -> None:
    """Passes of a validation."""
    model.eval()
    with torch.no_grad():
        for size in sizes:
            model(hidden=batch(size))
    model.train()


def train_with_validation(model: Net) -> Iterator[None]:
    """A sanity check, then iterations of two microbatches, with a validation between these and after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_function = nn.MSELoss()
    evaluate(model, 5, 2)
    for _ in range(2):
        optimizer.zero_grad()
        loss_function(model(hidden=batch(3)), torch.zeros(3, WIDTH)).backward()
        evaluate(model, 5, 2)
        with torch.no_grad():
            model(hidden=batch(1))  # in training mode, but no training
        loss_function(model(hidden=batch(4)), torch.zeros(4, WIDTH)).backward()
        optimizer.step()
        yield
        evaluate(model, 6)


def test_evaluation_is_marked_and_has_numbers_of_its_own(tmp_path: Path, model: Net) -> None:
    with Capture(tmp_path / "run", select={"mode": ("train", "eval")}, min_iterations=2) as capture:
        for number, _ in enumerate(train_with_validation(model), start=1):
            assert capture.iteration == number
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1]
    train = run.select(mode="train")
    assert places(train) == [(0, 0, 0, 3), (0, 1, 0, 4), (1, 0, 0, 3), (1, 1, 0, 4)]
    evaluation = run.select(mode="eval")
    assert places(evaluation) == [
        *((0, microbatch, 0, size) for microbatch, size in enumerate((5, 2, 5, 2, 1))),
        *((1, microbatch, 0, size) for microbatch, size in enumerate((6, 5, 2, 1))),
    ]
    assert set(evaluation.column("operation")) == {"forward"}
    sizes = {(one.sample_dim, one.batch_size) for one in evaluation.select(tensor_name="output")}
    assert sizes == {(0, size) for size in (1, 2, 5, 6)}
    counts = verify_run(train)
    assert counts == {"output": 8, "grad_input": 4, "grad_weight": 8}


def test_without_being_asked_for_evaluation_is_neither_recorded_nor_counted(tmp_path: Path, model: Net) -> None:
    with Capture(tmp_path / "run", model=model, min_iterations=2) as capture:
        for number, _ in enumerate(train_with_validation(model), start=1):
            assert capture.iteration == number
    records = open_run(tmp_path / "run").select()
    assert set(records.column("mode")) == {"train"}
    assert places(records) == [(0, 0, 0, 3), (0, 1, 0, 4), (1, 0, 0, 3), (1, 1, 0, 4)]
    assert verify_run(records) == {"output": 8, "grad_input": 4, "grad_weight": 8}


@pytest.mark.parametrize("steps_by_hand", [False, True])
def test_in_inference_each_forward_is_an_iteration(tmp_path: Path, model: Net, *, steps_by_hand: bool) -> None:
    torch.compile(lambda one: one + 1, backend="eager")(torch.ones(1))  # something else in the process is compiled
    model.eval()
    given = model if steps_by_hand else None
    with Capture(
        tmp_path / "run", model=given, select={"mode": ("eval",)}, start_at=1, every=2, min_iterations=3
    ) as capture:
        for size in range(1, 8):
            with torch.inference_mode():
                model(hidden=batch(size))
            if steps_by_hand:
                capture.step()
        assert not any(part._forward_hooks for part in (model.first, model.second))
    verdict = capture.close()
    assert verdict.met, verdict.message()
    run = open_run(tmp_path / "run")
    assert run.iterations == [1, 3, 5]
    assert places(run.select(), mode="eval") == [(number, 0, 0, number + 1) for number in (1, 3, 5)]
    assert verify_run(run) == {"output": 6}


def test_the_last_forward_is_complete_when_the_capture_ends(tmp_path: Path) -> None:
    # A layer alone is its own model, and is left and entered by hooks that change its arguments.
    layer = nn.Linear(WIDTH, WIDTH).eval()
    inputs = [batch(2).requires_grad_() for _ in range(3)]
    with Capture(tmp_path / "run", select={"mode": ("eval",)}, min_iterations=3) as capture:
        for one in inputs:
            layer(one)
    assert capture.close().met
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1, 2]
    found = sorted(run.select(tensor_name="input"), key=lambda record: record.iteration)
    assert [torch.equal(record.tensor(), one) for record, one in zip(found, inputs, strict=True)] == [True] * 3


def test_iterations_may_end_with_the_next_forward_in_a_training_too(tmp_path: Path, model: Net) -> None:
    with Capture(tmp_path / "run", advance_on="forward", min_iterations=3):
        for size in (2, 3, 4):
            nn.MSELoss()(model(hidden=batch(size)), torch.zeros(size, WIDTH)).backward()
            model.zero_grad()
    run = open_run(tmp_path / "run")
    assert places(run.select()) == [(0, 0, 0, 2), (1, 0, 0, 3), (2, 0, 0, 4)]
    assert verify_run(run) == {"output": 6, "grad_input": 3, "grad_weight": 6}


class Nested(nn.Module):
    """A layer inside of two calls of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, *, depth: int = 1) -> torch.Tensor:
        for _ in range(2 * depth):
            hidden = self(hidden, depth=depth - 1)
        return self.layer(hidden)  # type: ignore[no-any-return]


def test_a_model_that_calls_itself_twice_runs_one_forward(tmp_path: Path) -> None:
    nested = Nested()
    with Capture(tmp_path / "run", advance_on="forward", min_iterations=2) as capture:
        for number in range(3):
            nested(batch(2)).sum().backward()
            assert capture.iteration == number
    outputs = open_run(tmp_path / "run").select(tensor_name="output")
    assert sorted((record.iteration, record.call) for record in outputs) == [
        (it, call) for it in range(2) for call in range(3)
    ]


def test_a_step_that_a_scaler_skips_ends_an_iteration_that_says_so(tmp_path: Path, model: Net) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Capture(tmp_path / "run", with_master=True, min_iterations=3) as capture:
        for number, factor in enumerate((1.0, float("inf"), 1.0, float("nan")), start=1):
            weight = model.first.weight.detach().clone()
            optimizer.zero_grad()
            scaler.scale(model(hidden=batch(2)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            assert capture.iteration == number
            assert torch.equal(model.first.weight, weight) == (factor != 1.0)
    assert torch.amp.GradScaler.step.__qualname__ == "GradScaler.step"
    assert not hasattr(torch.amp.GradScaler.step, "__wrapped__")
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1, 2]
    assert places(run.select()) == [(number, 0, 0, 2) for number in range(3)]
    reasons = [set(status.silent_sites.get(0, {}).values()) for status in run.status()]
    assert reasons == [set(), {"the gradient scaler skipped the optimizer's step: a gradient was not finite"}, set()]
    assert set(run.select(tensor_name="master_weight").column("iteration")) == {0, 2}
    assert [status.step_skipped_ranks for status in run.status()] == [[], [0], []]


def gan(generator: nn.Module, judge: nn.Module) -> Iterator[None]:
    """Iterations in which the judge steps before the generator's loss is computed."""
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (judge, generator)]
    for _ in range(3):
        made = generator(batch(4))
        judge(made.detach()).mean().backward()
        optimizers[0].step()
        judge(made).mean().backward()
        optimizers[1].step()
        yield


def test_where_the_second_optimizer_ends_the_iteration_no_gradient_is_late(tmp_path: Path) -> None:
    # Each model has a layer before the one whose gradients are counted.
    generator, judge = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    with Capture(tmp_path / "run", advance_on="optimizer:1", min_iterations=2) as capture:
        for number, _ in enumerate(gan(generator, judge), start=1):
            assert capture.iteration == number
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1]
    assert [status.silent_sites for status in run.status()][:2] == [{}, {}]
    for iteration in (0, 1):
        records = run.select(iteration=iteration)
        assert len(records.select(tensor_name="grad_output")) == 2 + 2 * 2
        assert len(records.select(tensor_name="grad_weight")) == 2 + 2 * 2


def test_microbatches_keep_their_numbers_and_their_samples(tmp_path: Path, model: Net) -> None:
    head = nn.Linear(WIDTH, WIDTH)
    model.requires_grad_(requires_grad=False)  # what is frozen is a pass like any other
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    with Capture(tmp_path / "run", min_iterations=2) as capture:
        for iteration in range(2):
            for size in (2, 3, 4):
                capture.set_sample_ids([f"{iteration}.{size}.{place}" for place in range(size)])
                inputs = batch(size)
                if size == 3:
                    model.fails = True
                    with pytest.raises(ValueError, match="too long"):
                        model(hidden=batch(7))
                    model.fails = False
                loss = head(model(hidden=inputs)).square().mean()
                capture.set_sample_ids(None)
                # As autograd does on a device: on another thread.
                thread = threading.Thread(target=loss.backward)
                thread.start()
                thread.join()
            optimizer.step()
    run = open_run(tmp_path / "run")
    for iteration in range(2):
        records = run.select(iteration=iteration)
        # The pass that failed has the first call of its microbatch, and no other number moves.
        assert [place[1:] for place in places(records)] == [(0, 0, 2), (1, 0, 7), (1, 1, 3), (2, 0, 4)]
        second = sorted((one.microbatch, one.call) for one in records.select(module="second", tensor_name="input"))
        assert second == [(0, 0), (1, 1), (2, 0)]
        assert sorted(records.select(tensor_name="grad_weight").column("microbatch")) == [0, 1, 2]
        ids = {one.microbatch: one.sample_ids for one in records.select(module="second", tensor_name="input")}
        assert ids == {place: [f"{iteration}.{place + 2}.{at}" for at in range(place + 2)] for place in range(3)}
    assert verify_run(run)["grad_weight"] == 6


def test_models_that_are_called_one_after_the_other_share_a_microbatch(tmp_path: Path) -> None:
    encoder, decoder = Net(), Net()
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    with Capture(tmp_path / "run"):
        for size in (2, 3):
            memory = encoder(hidden=batch(size))
            (decoder(hidden=memory) + decoder(hidden=2 * memory)).sum().backward()
        optimizer.step()
    records = open_run(tmp_path / "run").select(tensor_name="input")
    found = sorted((one.module, one.microbatch, one.call) for one in records.select(module="*first"))
    assert found == [
        *(("Net1.first", microbatch, call) for microbatch in range(2) for call in range(2)),
        *(("first", microbatch, 0) for microbatch in range(2)),
    ]
    assert verify_run(open_run(tmp_path / "run")) == {"output": 12, "grad_input": 10, "grad_weight": 12}


class Layer(nn.Module):
    """A layer that Megatron-core's schedules would tell the microbatch."""

    current_microbatch: int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def call_in(tracker: Tracker, model: nn.Module, *, size: int = 2) -> Call:
    """The call of a layer in a pass of the model."""
    tracker.enter(Frame(module=model, path="", layer_idx=-1), (), {"hidden": torch.zeros(size, 3)})
    call = tracker.begin_call("layer", dtype=torch.float32, device_type="cpu")
    tracker.leave(model, torch.zeros(size, 3))
    return call


def place(call: Call) -> tuple[int, int, int | None]:
    return call.microbatch, call.index, call.batch_size


@pytest.fixture
def tracker() -> Tracker:
    """Of an iteration that has just begun."""
    tracker = Tracker(modes=("train", "eval"))
    tracker.reset(3)
    return tracker


def test_the_microbatch_that_a_schedule_writes_onto_the_layers_is_taken(tracker: Tracker) -> None:
    layer = Layer()
    model = nn.Sequential(layer)
    found = []
    # As in one forward, one backward: a backward pass between two forwards says nothing of their microbatches.
    for microbatch in (0, 1, 2, 3):
        layer.current_microbatch = microbatch
        found.append(place(call_in(tracker, model)))
        if microbatch % 2:
            tracker.note_backward()
    assert found == [(microbatch, 0, 2) for microbatch in range(4)]


def test_the_stage_of_a_pipeline_and_the_share_of_its_samples_are_taken(tracker: Tracker) -> None:
    tracker.sample_ids = tuple(range(10))
    model, loss = Layer(), Layer()
    for microbatch in (2, 0, 1):
        with tracker.staged(microbatch, of=3):
            call = call_in(tracker, model)
        assert (call.microbatch, call.index) == (microbatch, 0)
        # Whole batches are split as torch.tensor_split does.
        assert call.sample_ids == tuple(torch.arange(10).tensor_split(3)[microbatch].tolist())
        tracker.note_backward()
        # The loss is a module, too: it belongs to the pass that ran last.
        assert call_in(tracker, loss).microbatch == microbatch


def test_a_long_validation_in_a_training_is_no_training_without_an_end(tracker: Tracker) -> None:
    model = Layer()
    for _ in range(3):
        call_in(tracker, model)
    assert tracker.num_unended == 3
    tracker.reset(4)
    model.eval()
    for _ in range(5):
        call_in(tracker, model)
    assert (tracker.num_unended, tracker.num_passes) == (0, 5)


def test_a_rehearsal_is_no_pass(tracker: Tracker) -> None:
    model = Layer()
    with tracker.rehearsing():
        tracker.enter(Frame(module=model, path="", layer_idx=-1), (torch.zeros(2, 3),), {})
        assert not tracker.is_active
        tracker.leave(model, torch.zeros(2, 3))
    assert tracker.num_passes == 0
    assert place(call_in(tracker, model)) == (0, 0, 2)


def test_a_validation_on_another_thread_changes_nothing_for_the_training(tracker: Tracker) -> None:
    model, other = Layer(), Layer().eval()
    found: list[Call] = []
    tracker.enter(Frame(module=model, path="", layer_idx=-1), (torch.zeros(2, 3),), {})
    thread = threading.Thread(target=lambda: found.append(call_in(tracker, other, size=7)))
    thread.start()
    thread.join()
    call = tracker.begin_call("layer", dtype=torch.float32, device_type="cpu")
    assert (place(call), call.mode) == ((0, 0, 2), Mode.TRAIN)
    assert (place(found[0]), found[0].mode) == ((0, 0, 7), Mode.EVAL)


def test_what_is_recorded_by_hand_after_a_validation_belongs_to_the_training(tracker: Tracker) -> None:
    model = Layer()
    call_in(tracker, model)
    tracker.note_backward()
    call_in(tracker, model)
    model.eval()
    with torch.no_grad():
        call_in(tracker, model, size=5)
        by_hand = tracker.free_call(index=0, dtype=torch.float32, device_type="cpu")
        assert (place(by_hand), by_hand.mode) == ((0, 0, 5), Mode.EVAL)
    by_hand = tracker.free_call(index=0, dtype=torch.float32, device_type="cpu")
    assert (place(by_hand), by_hand.mode) == ((1, 0, 2), Mode.TRAIN)


Way = Callable[[nn.Module], Callable[..., Any]]
"""How a module is run: gives what is called for it."""


def called(module: nn.Module) -> Callable[..., Any]:
    return module


def direct(module: nn.Module) -> Callable[..., Any]:
    return module.forward


class Attention(nn.Module):
    """Runs its parts in a way."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.way(self.project)(hidden).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(*heads)
        return self.way(self.out)(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class AttendingLayer(nn.Module):
    """Runs its attention in a way."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.attention = Attention(way)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.way(self.attention)(hidden)  # type: ignore[no-any-return]


class Layered(nn.Module):
    """Runs its layers in a way."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(AttendingLayer(way) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = self.way(layer)(hidden)
        return hidden


def recorded(url: Path, *, inside: Way, outside: Way, is_given: bool) -> tuple[list[float], list[tuple[Any, ...]]]:
    """The losses of a training of two steps with two microbatches, and what is recorded of it."""
    torch.manual_seed(0)
    model = Layered(inside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with Capture(url, min_iterations=2, model=model if is_given else None):
        for _ in range(2):
            for _ in range(2):
                loss = outside(model)(torch.randn(3, 5, WIDTH)).square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    run = open_run(url)
    assert [(status.state, status.silent_sites) for status in run.status()] == [("complete", {})] * 2
    fields = ("iteration", "microbatch", "call", "batch_size", "module", "layer_idx", "tensor_name", "checksum")
    return losses, sorted(tuple(getattr(record, field) for field in fields) for record in run.select())


@pytest.mark.parametrize(
    ("inside", "outside", "model"),
    [
        (direct, called, "given"),
        (called, direct, "given"),
        (direct, direct, "given"),
        (direct, called, "found"),
        (called, direct, "found"),
    ],
    ids=["inside", "outside", "both", "inside, found", "outside, found"],
)
@exhaustive_but("both", "inside, found", reason="two of them are in make test")
def test_forward_that_is_called_directly_is_recorded_as_a_call(
    inside: Way,
    outside: Way,
    model: str,
    tmp_path: Path,
) -> None:
    expected = recorded(tmp_path / "called", inside=called, outside=called, is_given=True)
    assert recorded(tmp_path / "direct", inside=inside, outside=outside, is_given=model == "given") == expected
    assert {place[5] for place in expected[1]} == {0, 1}


def test_where_only_forward_is_called_and_no_model_is_given_that_is_the_reason(tmp_path: Path) -> None:
    model, criterion = Layered(direct), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden = torch.randn(3, 5, WIDTH)
    with Capture(tmp_path / "run"):
        criterion(model.forward(hidden), hidden).backward()
        with pytest.raises(CaptureError, match=r"model\.forward\(x\); call model\(x\), or give the model"):
            optimizer.step()


def test_a_forward_in_a_hook_of_a_gradient_is_not_taken_for_a_recomputation(model: Net, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def penalty(_: torch.Tensor) -> None:
        with torch.enable_grad():
            model(hidden=torch.ones(3, WIDTH)).sum().backward()

    with Capture(tmp_path / "run", model=model, min_iterations=1):
        output = model(hidden=batch(4))
        output.register_hook(penalty)
        output.square().mean().backward()
        optimizer.step()
    records = open_run(tmp_path / "run").select(layer_type="linear")
    assert {one.call for one in records} == {0}
    assert {one.shape[0] for one in records.select(tensor_name=("input", "output", "grad_output"))} == {4}
    verify_run(open_run(tmp_path / "run"))
