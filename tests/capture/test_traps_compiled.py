"""Is a compiled model recorded like any other in captured iterations, and as fast as before in all others?

Hooks that come after the first compilation are ignored by compiled code, a compiled class stands for its next instance,
and what a hook does may be optimised away. A backend of our own counts how often compiled code ran.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from ranktape.capture import Capture
from tests.capture.compiled_models import (
    TOKENS,
    VOCABULARY,
    Model,
    Step,
    Trained,
    as_written,
    by_blocks,
    in_place,
    stepping,
    tensors,
    train,
)

# dynamo meets deprecated parts of torch itself, and imports them again.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.alone,  # dynamo counts for the whole process what it has compiled, and gives up: not after other tests
]

NUM_BLOCKS = 10
"""More than dynamo compiles of one function before it gives up (8)."""

RUNS: list[None] = []
"""One for each time that compiled code ran."""


def counting(graph: Any, _inputs: Any) -> Callable[..., Any]:
    """A compiler that counts."""

    def run(*args: Any) -> Any:
        RUNS.append(None)
        return graph(*args)

    run._boxed_call = False  # type: ignore[attr-defined]  # what torch's own backends say
    return run


BACKENDS: dict[str, Any] = {"dynamo": counting, "aot": aot_autograd(fw_compiler=counting)}
checkpointed = functools.partial(Model, is_checkpointed=True)


def whole(model: Model, **options: Any) -> Step:
    return stepping(model, torch.compile(model, **options))


def after_another(model: Model, **options: Any) -> Step:
    whole(Model(), **options)(torch.randint(VOCABULARY, (2, TOKENS)))
    return whole(model, **options)


KINDS: dict[str, tuple[Callable[..., Step], Callable[[], Model]]] = {
    "torch.compile(model)": (whole, Model),
    "model.compile()": (in_place, Model),
    "ten blocks": (by_blocks, functools.partial(Model, number=NUM_BLOCKS)),
    "another instance before": (after_another, Model),
    "a checkpoint inside": (whole, checkpointed),
    "in a checkpoint": (by_blocks, checkpointed),
}
CASES = [*((name, "aot") for name in KINDS), ("torch.compile(model)", "dynamo"), ("a checkpoint inside", "dynamo")]


def counted(name: str, backend: str, url: Path | None, captured: tuple[int, int] = (1, 2)) -> tuple[Trained, list[int]]:
    """A training of four steps of a kind, and how often compiled code ran in each."""
    compile_, make = KINDS[name]
    runs: list[int] = []

    def compile_counting(model: Model) -> Step:
        step = compile_(model, backend=BACKENDS[backend])

        def count(ids: torch.Tensor) -> torch.Tensor:
            before = len(RUNS)
            loss = step(ids)
            runs.append(len(RUNS) - before)
            return loss

        return count

    return train(compile_counting, url, make=make, captured=captured), runs


def num_new_graphs(trained: Trained) -> int:
    return trained.num_graphs[-1] - trained.num_graphs[0]


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], Model]], Path]:
    """Gives the run of a model that is not compiled."""

    @functools.cache
    def run(make: Callable[[], Model]) -> Path:
        url = tmp_path_factory.mktemp("eager") / "run"
        train(as_written, url, make=make)
        return url

    return run


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_layer_is_recorded_once_and_other_iterations_run_what_was_compiled(
    case: tuple[str, str], eager: Callable[[Callable[[], Model]], Path], tmp_path: Path
) -> None:
    plain, plain_runs = counted(*case, None)
    found, runs = counted(*case, tmp_path / "run")
    # These backends run the operations as they were written: what an optimising one computes may differ.
    assert found.equals(plain)
    assert plain_runs[0] > 0
    assert runs == [plain_runs[0], 0, 0, plain_runs[3]]
    assert num_new_graphs(found) == num_new_graphs(plain)
    as_expected = eager(KINDS[case[0]][1])
    for iteration in (1, 2):
        assert tensors(tmp_path / "run", iteration=iteration).keys() == tensors(as_expected, iteration=iteration).keys()


@pytest.mark.parametrize("name", ["torch.compile(model)", "ten blocks"])
def test_a_capture_that_records_nothing_leaves_compiled_code_compiled(name: str, tmp_path: Path) -> None:
    plain, plain_runs = counted(name, "aot", None)
    # Nothing is compiled when the capture begins.
    found, runs = counted(name, "aot", tmp_path / "run", captured=(99, 100))
    assert found.equals(plain)
    assert runs == plain_runs
    assert num_new_graphs(found) == num_new_graphs(plain)


@pytest.mark.parametrize(
    ("is_given", "runs_before", "options", "expected"),
    [
        (True, False, {}, [1, 1, 1, 1]),
        (False, False, {}, [1, 1, 1, 1]),
        (True, True, {}, [0, 1, 1, 1]),
        (False, True, {}, [0, 1, 1, 1]),
        (True, False, {"select": "mode=eval"}, [0, 1, 1, 1]),
        (False, False, {"advance_on": "forward"}, [0, 1, 1, 1]),
        (False, False, {"advance_on": "forward", "start_at": 2, "max_iterations": 1}, [0, 1, 0, 1, 1]),
    ],
    ids=str,
)
def test_which_first_iteration_runs_as_written(
    is_given: bool,  # noqa: FBT001
    runs_before: bool,  # noqa: FBT001
    options: dict[str, Any],
    expected: list[int],
    tmp_path: Path,
) -> None:
    torch._dynamo.reset()
    model = Model().train("select" not in options)
    chosen: dict[str, Any] = {"advance_on": "step", "start_at": 99} | options | ({"model": model} if is_given else {})
    ids = torch.randint(VOCABULARY, (2, TOKENS))
    found = []
    with Capture(tmp_path / "run", **chosen) as capture:
        if runs_before:
            model.blocks[0](torch.randn(2, TOKENS, 32))
        called = torch.compile(model, backend=counting)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in expected:
            before = len(RUNS)
            with torch.set_grad_enabled(model.training):
                loss = called(ids).square().mean()
            if model.training:
                loss.backward()
                optimizer.step()
            if capture.options.advance_on == "step":
                capture.step()
            found.append(len(RUNS) - before)
    torch._dynamo.reset()
    assert found == expected
