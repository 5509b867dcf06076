"""Does a commit say which tensors an iteration should have had, and why some are not there?"""

from __future__ import annotations

import dataclasses
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.capture.expected import MAX_ALL_FORMS, MAX_PLACES, MAX_REASONS, Expected
from ranktape.capture.passes.tracker import Call
from ranktape.capture.sites import RecordForm
from ranktape.capture.source import Source, TensorRole
from ranktape.storage import IterationStatus, open_run
from ranktape.storage.format.attempt import read_attempts
from ranktape.storage.format.commit import read_commit
from ranktape.storage.format.record_info import Mode, Operation
from ranktape.storage.places.urls import open_backend
from tests.capture.trainings import Made, captured

WIDTH = 8


def linear(*, bias: bool = False) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


def train(model: nn.Module, url: Path, *, steps: int = 1, **options: Any) -> list[IterationStatus]:
    """Capture every step of a training of this model; what the run says of the iterations."""
    return captured(model, url, steps, shape=(4, WIDTH), model=model, **options).status()


def silent(status: IterationStatus) -> dict[str, str]:
    return status.silent_sites.get(0, {})


def experts() -> Made:
    """One expert has all the tokens, one is skipped in the second iteration, and one never runs."""
    calls: list[int] = []

    def run(model: Any, hidden: torch.Tensor) -> Any:
        calls.append(1)
        hidden = model.experts[0](model.first(hidden))
        return model.experts[1](hidden) if len(calls) == 1 else hidden

    return Made(run, first=linear(), experts=nn.ModuleList(linear() for _ in range(3)))


def test_a_module_that_was_not_called_is_one_line(tmp_path: Path) -> None:
    first, second = train(experts(), tmp_path / "run", steps=2)
    assert silent(first) == {"experts.2": "its module was not called"}
    assert silent(second) == {
        "experts.1": "its module was not called",
        "experts.2": "its module was not called",
    }
    # Of the first layer no gradient of the input is computed; of what did not run the input's need is not known.
    assert (first.num_expected, first.num_recorded, first.num_missing) == (5 + 6 + 6 + 5, 5 + 6 + 6, 5)
    assert second.num_missing == 10
    backend = open_backend(tmp_path / "run")
    (attempt,) = read_attempts(backend)
    for iteration, num_missing in ((0, 5), (1, 10)):
        assert read_commit(backend, attempt.path, 0, iteration).num_missing == num_missing


def tangle() -> Made:
    """Layers that lose their gradients in every way there is."""

    def run(model: Any, hidden: torch.Tensor) -> Any:
        hidden = model.used(hidden)
        model.unused(hidden)
        with torch.no_grad():
            model.watched(hidden)
        return model.frozen(hidden) + model.up(model.down(hidden)) + model.detached(hidden).detach()

    layers = {name: linear() for name in ("used", "detached", "unused", "watched", "frozen")}
    layers["frozen"].requires_grad_(requires_grad=False)
    return Made(run, **layers, down=nn.Linear(WIDTH, 2, bias=False), up=nn.Linear(2, WIDTH, bias=False))


def test_every_missing_gradient_has_its_reason(tmp_path: Path) -> None:
    (status,) = train(tangle(), tmp_path / "run")
    no_backward = "no backward pass reached it"
    without = "it ran without gradients, as under torch.no_grad or in an autograd.Function"
    gradients = "grad_output, grad_input, grad_weight"
    missing = {place: (set(place.split(" ", 1)[1].split(", ")), reason) for place, reason in silent(status).items()}
    assert {place.split(" ")[0]: found for place, found in missing.items()} == {
        "detached": (set(gradients.split(", ")), no_backward),
        "unused": (set(gradients.split(", ")), no_backward),
        "watched": (set(gradients.split(", ")), without),
    }
    # A frozen layer between others has gradients of its input and output, and none of its weight: nothing is missing.
    names = open_run(tmp_path / "run").select(module="frozen").column("tensor_name")
    assert sorted(names) == ["grad_input", "grad_output", "input", "output", "weight"]


def test_a_branch_of_which_one_call_has_no_gradient_is_not_whole(tmp_path: Path) -> None:
    def run(model: Any, hidden: torch.Tensor) -> Any:
        model.shared(hidden)
        return model.shared(hidden)

    (status,) = train(Made(run, shared=linear()), tmp_path / "run")
    assert silent(status) == {"shared grad_weight, grad_output": "no backward pass reached 1 of its 2 calls"}


def test_what_runs_only_in_evaluation_is_told_from_what_never_runs(tmp_path: Path) -> None:
    def run(model: Any, hidden: torch.Tensor) -> Any:
        return model.body(hidden) if model.training else model.head(model.body(hidden))

    model = Made(run, body=linear(), head=linear(), rest=linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Capture(tmp_path / "run", model=model):
        model(torch.randn(4, WIDTH)).sum().backward()
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, WIDTH))
        model.train()
        optimizer.step()
    (status,) = open_run(tmp_path / "run").status()
    assert silent(status) == {
        "head": "it ran only in passes that are not recorded",
        "rest": "its module was not called",
    }


def test_what_was_not_selected_is_not_missing(tmp_path: Path) -> None:
    (status,) = train(experts(), tmp_path / "run", select={"tensor_name": ("input",), "module": ("first", "experts.0")})
    assert silent(status) == {}
    assert (status.num_expected, status.num_recorded) == (2, 2)


def test_an_iteration_in_which_nothing_ran_is_complete_and_says_so(tmp_path: Path) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Capture(tmp_path / "run", model=nn.Sequential(model), min_iterations=2, advance_on="step") as capture:
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
        capture.step()
        capture.step()
    first, second = open_run(tmp_path / "run").status()
    assert (first.num_missing, silent(second)) == (0, {"0": "its module was not called"})


def source(module: str, layer_type: str = "linear") -> Source:
    return Source(module=module, layer_type=layer_type, layer_idx=-1, component="linear")


def role(name: str, operation: Operation = Operation.FORWARD) -> TensorRole:
    return TensorRole(operation=operation, phase="pre", tensor_name=name)


def call(microbatch: int = 0, index: int = 0) -> Call:
    return Call(iteration=0, microbatch=microbatch, index=index, compute_dtype="float32", batch_size=None)


def test_thousands_of_silent_modules_stay_a_small_document() -> None:
    expected = Expected()
    expected.begin()
    for number in range(10 * MAX_PLACES):
        expected.attach(source(f"experts.{number}"), [role("input"), role("output")])
    for number in range(2 * MAX_REASONS):
        expected.refuse(source(f"odd.{number}"), role("input"), f"its shape is {number}")
    end = expected.end()
    named = [place for place, reason in end["silent_sites"].items() if reason == "its module was not called"]
    assert named[:2] == ["experts.0", "experts.1"]
    assert named[-1] == f"and {9 * MAX_PLACES} more"
    assert len(end["silent_sites"]) <= MAX_PLACES + MAX_REASONS + 1
    assert end["silent_sites"][f"and {MAX_REASONS + 1} more: other reasons"] == "other reasons"
    assert end["num_missing"] == end["num_expected"] == 2 * 10 * MAX_PLACES + 2 * MAX_REASONS


def test_a_function_that_ran_before_is_expected_again() -> None:
    expected, attention = Expected(), source("attend", "attention")
    for _ in range(2):
        expected.begin()
        expected.called(attention)
        expected.site(attention, role("query")).seen.add(call().key)
        assert expected.end()["num_missing"] == 0
    expected.begin()
    assert expected.end()["silent_sites"] == {"attend forward pre query": "its function was not called"}


def test_two_kinds_of_layers_in_one_module_are_told_apart() -> None:
    expected = Expected()
    expected.begin()
    for kind in ("linear", "hidden"):
        expected.attach(source("layers.0", kind), [role("input"), role("output")])
    assert list(expected.end()["silent_sites"]) == ["layers.0 (linear)", "layers.0 (hidden)"]


def mixed() -> Made:
    """Its layers compute in different dtypes."""

    def run(model: Any, hidden: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.body(hidden)
        return model.head(hidden.float())

    return Made(run, body=linear(bias=True), head=linear(bias=True))


@pytest.mark.parametrize(
    "select",
    [
        {"compute_dtype": "bfloat16"},
        {"where": "tensor_name == 'output' or microbatch == 7"},
        {"where": "mode == 'eval' or tensor_name == 'output'", "mode": ("train", "eval")},
        {"where": "microbatch == 7 and phase == 'pre' or tensor_name == 'output'"},
        {"where": "dtype == 'float32'"},
    ],
)
def test_gradients_that_are_left_out_by_their_call_are_not_missing(tmp_path: Path, select: dict[str, Any]) -> None:
    (status,) = train(mixed(), tmp_path / "run", select=select)
    assert silent(status) == {}
    assert status.num_records > 0
    assert status.num_missing == 0
    assert status.num_expected is not None
    assert 0 < status.num_expected <= status.num_records


@pytest.mark.parametrize(
    ("num_calls", "excused", "seen"),
    [
        pytest.param(3, [call(0)], [call(1)], id="others were left out"),
        pytest.param(2, [], [call(0), dataclasses.replace(call(1), mode=Mode.EVAL)], id="seen in an evaluation"),
    ],
)
def test_a_gradient_of_a_call_that_is_wanted_is_missing(num_calls: int, excused: list[Call], seen: list[Call]) -> None:
    expected, layer, grad = Expected(), source("layer"), role("grad_input", Operation.BACKWARD)
    expected.begin()
    expected.called(layer)
    site = expected.site(layer, grad)
    site.hooked.update(call(index).key for index in range(num_calls))
    for one in excused:
        expected.excuse(layer, grad, one)
    site.seen.update(one.key for one in seen)
    (reason,) = expected.end()["silent_sites"].values()
    assert reason == "no backward pass reached 1 of its 2 calls"


def test_nothing_is_missing_in_inference(tmp_path: Path) -> None:
    model = nn.Sequential(linear(), nn.ReLU(), linear())
    with Capture(
        tmp_path / "run", model=model, select={"mode": "eval"}, advance_on="step", min_iterations=2
    ) as capture:
        for step in range(2):
            if step:
                model.train()(torch.randn(4, WIDTH))  # not recorded, and not missing
            with torch.no_grad():
                model.eval()(torch.randn(4, WIDTH))
            capture.step()
    rows = open_run(tmp_path / "run").status()
    assert [status.iteration for status in rows] == [0, 1]
    for status in rows:
        assert silent(status) == {}
        assert status.num_missing == 0
        assert status.num_records == status.num_expected
    # The weights are stored with the first of them.
    assert [status.num_records for status in rows] == [6, 4]


INPUT = role("input")


def test_a_source_of_which_an_iteration_has_nothing_is_forgotten_and_what_is_disabled_stays() -> None:
    expected = Expected()
    gone, kept, broken = (source(f"part{number}") for number in range(3))
    expected.begin()
    expected.site(gone, INPUT).seen.add(call().key)
    sites = [expected.site(one, INPUT) for one in (gone, kept)]
    expected.disable(broken, INPUT, "it broke")
    for _ in range(3):
        expected.end()
        expected.begin()
        expected.attach(kept, [INPUT])
    assert expected.site(gone, INPUT) is not sites[0]
    assert expected.site(kept, INPUT) is not sites[1], "it was attached only after an iteration without it"
    site = expected.site(kept, INPUT)
    summary = expected.end()
    expected.begin()
    assert expected.site(kept, INPUT) is site
    assert expected.site(broken, INPUT).is_disabled
    assert summary["silent_sites"] == {
        "part1 forward pre input": "its module was not called",
        "part2 forward pre input": "disabled after an error: it broke",
    }


def test_what_is_disabled_is_missing_in_an_iteration_that_does_not_select_it_too() -> None:
    expected, broken = Expected(), source("broken")
    expected.begin()
    expected.disable(broken, INPUT, "it broke")
    expected.excuse(broken, INPUT)
    assert expected.end()["silent_sites"] == {"broken forward pre input": "disabled after an error: it broke"}


def test_the_forms_of_all_sites_together_are_bounded() -> None:
    expected = Expected()
    form = RecordForm(header="{", keep="values", nbytes=4, kept_nbytes=4, sample_dim=None, places=None)
    sites = [expected.site(source(f"part{number}"), INPUT) for number in range(1000)]
    for number in range(MAX_ALL_FORMS):
        assert expected.keep_form(sites[number % len(sites)], number, form) is form
    assert sum(len(site.forms) for site in sites) == MAX_ALL_FORMS
    expected.keep_form(sites[0], "one more", form)
    assert sum(len(site.forms) for site in sites) == 1


def test_the_end_of_an_iteration_takes_steps_in_proportion_to_its_sources() -> None:
    def num_steps(num_sources: int) -> int:
        expected = Expected()
        for number in range(num_sources):
            expected.attach(source(f"part{number}"), [INPUT])
        steps = 0

        def count(_frame: FrameType, _event: str, _argument: object) -> None:
            nonlocal steps
            steps += 1

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            expected.end()
        finally:
            sys.setprofile(before)
        return steps

    assert num_steps(400) < 2.5 * num_steps(200)


def test_an_iteration_begins_while_other_threads_meet_new_sources() -> None:
    expected = Expected()
    interval = sys.getswitchinterval()

    def meet() -> None:
        for number in range(5000):
            expected.attach(source(f"part{number}"), [INPUT])

    thread = threading.Thread(target=meet)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        while thread.is_alive():
            expected.begin()
            expected.end()
    finally:
        thread.join()
        sys.setswitchinterval(interval)
