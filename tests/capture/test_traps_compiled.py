"""Is a compiled model recorded like any other in captured iterations, and as fast as before in all others?

Hooks that come after the first compilation are ignored by compiled code, a compiled class stands for its next instance,
and what a hook does may be optimised away: each kind of compilation is trained in one capture, which records some of
its iterations. A backend of our own counts how often compiled code ran.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from ranktape.capture import Capture
from ranktape.storage import Run, open_run
from tests.capture.verify import verify_run

# dynamo meets deprecated parts of torch itself, and imports them again.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.alone,  # dynamo counts for the whole process what it has compiled, and gives up: not after other tests
]

WIDTH = 8
NUM_BLOCKS = 10
"""More than dynamo compiles of one function before it gives up (8)."""
STEPS = 3
CAPTURED = (1,)
"""Iterations of each training; before them the model has been compiled, and after them it runs compiled again."""


@dataclass(slots=True)
class Runs:
    """How often compiled code ran."""

    count: int = 0

    def backend(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        """A compiler that counts."""

        def run(*args: Any) -> Any:
            self.count += 1
            return graph(*args)

        run._boxed_call = False  # type: ignore[attr-defined]  # what torch's own backends say
        return run


RUNS = Runs()
BACKENDS: dict[str, Any] = {
    "dynamo": RUNS.backend,
    "aot": aot_autograd(fw_compiler=RUNS.backend),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query = self.query(hidden).unsqueeze(1)
        attended = F.scaled_dot_product_attention(query, 2 * query, query.sin()).squeeze(1)
        return hidden + self.out(attended)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks, run by `segment(block, hidden)`."""

    def __init__(self, *, number: int = 2, segment: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(number))
        self.segment = segment

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden) if self.segment is None else self.segment(block, hidden)
        return hidden


def checkpointed(block: nn.Module, hidden: torch.Tensor) -> Any:
    return checkpoint(block, hidden, use_reentrant=False)


@dataclass(frozen=True, slots=True)
class Kind:
    """A way of compiling."""

    compile: Callable[[Model, Any], Callable[[torch.Tensor], torch.Tensor]]
    """Gives what is called in place of the model."""
    make: Callable[[], Model] = field(default=Model)


def whole(model: Model, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def in_place(model: Model, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def by_blocks(model: Model, backend: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def after_another(model: Model, backend: Any) -> Any:
    other = torch.compile(Model(), backend=backend)
    other(torch.randn(2, 3, WIDTH)).sum().backward()
    return torch.compile(model, backend=backend)


KINDS = {
    "torch.compile(model)": Kind(whole),
    "model.compile()": Kind(in_place),
    "ten blocks": Kind(by_blocks, functools.partial(Model, number=NUM_BLOCKS)),
    "another instance before": Kind(after_another),
    "a checkpoint inside": Kind(whole, functools.partial(Model, segment=checkpointed)),
    "in a checkpoint": Kind(by_blocks, functools.partial(Model, segment=checkpointed)),
}


@dataclass(slots=True)
class Seen:
    """What became of a training."""

    losses: list[str]
    compiled: list[int]
    """How often compiled code ran in each step."""
    num_graphs: list[int]
    """How many graphs had been made after each step."""


def train(kind: Kind, backend: str, capture: Capture | None) -> Seen:
    """Some steps; the one in the middle is captured."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind.make()
    called = kind.compile(model, BACKENDS[backend])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = Seen([], [], [])
    for _ in range(STEPS):
        before = RUNS.count
        optimizer.zero_grad()
        loss = called(torch.randn(2, 3, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        seen.losses.append(float(loss.detach()).hex())
        seen.compiled.append(RUNS.count - before)
        seen.num_graphs.append(counters["stats"]["unique_graphs"])
        if capture is not None:
            capture.step()
    return seen


CASES = [*((name, "aot") for name in KINDS), ("torch.compile(model)", "dynamo"), ("a checkpoint inside", "dynamo")]


def _iteration(case: tuple[str, str], step: int) -> int:
    return 1 + STEPS * CASES.index(case) + step


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[tuple[str, str], tuple[Seen, Seen]]]:
    """The run, and what each training came to without a capture, and with it."""
    url = tmp_path_factory.mktemp("compiled") / "run"
    plain = {case: train(KINDS[case[0]], case[1], None) for case in CASES}
    first = _iteration(CASES[0], CAPTURED[0])
    with Capture(url, advance_on="step", start=first, every=STEPS, min_iterations=len(CASES)) as capture:
        # Nothing is compiled yet: the first iteration of a capture tells what it will cost.
        Model()(torch.randn(2, 3, WIDTH)).sum().backward()
        capture.step()
        found = {case: train(KINDS[case[0]], case[1], capture) for case in CASES}
    assert capture.close().met
    torch._dynamo.reset()
    return open_run(url), {case: (plain[case], found[case]) for case in CASES}


Trained = tuple[Run, dict[tuple[str, str], tuple[Seen, Seen]]]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_layer_is_recorded_once(case: tuple[str, str], trained: Trained) -> None:
    number = NUM_BLOCKS if case[0] == "ten blocks" else 2
    for step in CAPTURED:
        records = trained[0].select(iteration=_iteration(case, step))
        attention = ("output", "grad_query", "grad_key", "grad_value")
        assert verify_run(records) == {
            "output": 2 * number,
            "grad_weight": 2 * number,
            "grad_input": 2 * number - 1,
            **{f"attention {name}": number for name in attention},
        }
        assert not any("_orig_mod" in name for name in records.column("module"))
        assert set(records.column("call")) == set(records.column("microbatch")) == {0}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_other_iterations_run_what_was_compiled(case: tuple[str, str], trained: Trained) -> None:
    plain, found = trained[1][case]
    assert plain.compiled[0] > 0
    expected = [0 if step in CAPTURED else count for step, count in enumerate(plain.compiled)]
    assert found.compiled == expected
    assert found.num_graphs[-1] - found.num_graphs[0] == plain.num_graphs[-1] - plain.num_graphs[0]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_losses_are_the_same_bit_for_bit(case: tuple[str, str], trained: Trained) -> None:
    # These backends run the operations as they were written: what an optimising one computes may differ.
    plain, found = trained[1][case]
    assert found.losses == plain.losses


@pytest.mark.parametrize("name", ["torch.compile(model)", "ten blocks"])
def test_a_capture_that_records_nothing_leaves_compiled_code_compiled(name: str, tmp_path: Path) -> None:
    plain = train(KINDS[name], "aot", None)
    torch._dynamo.reset()
    # Nothing is compiled when the capture begins.
    with Capture(tmp_path / "run", start=99, advance_on="step") as capture:
        found = train(KINDS[name], "aot", capture)
    assert (found.losses, found.compiled) == (plain.losses, plain.compiled)
    assert found.num_graphs[-1] - found.num_graphs[0] == plain.num_graphs[-1] - plain.num_graphs[0]


def called_in_each(capture: Capture, model: Model, *, is_training: bool, steps: int) -> list[int]:
    """How often compiled code ran in each iteration of a model that is compiled now."""
    called = torch.compile(model.train(is_training), backend=RUNS.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        before = RUNS.count
        with torch.set_grad_enabled(is_training):
            loss = called(torch.randn(2, 3, WIDTH)).square().mean()
        if is_training:
            loss.backward()
            optimizer.step()
        if capture.options.advance_on == "step":
            capture.step()
        found.append(RUNS.count - before)
    return found


@pytest.mark.parametrize(
    ("is_given", "runs_before", "options", "expected"),
    [
        (True, False, {}, [1, 1, 1, 1]),
        (False, False, {}, [1, 1, 1, 1]),
        (True, True, {}, [0, 1, 1, 1]),
        (False, True, {}, [0, 1, 1, 1]),
        (True, False, {"select": "mode=eval"}, [0, 1, 1, 1]),
        (False, False, {"advance_on": "forward"}, [0, 1, 1, 1]),
        (False, False, {"advance_on": "forward", "start": 2, "max_iterations": 1}, [0, 1, 0, 1, 1]),
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
    model = Model()
    chosen: dict[str, Any] = {"advance_on": "step", "start": 99} | options | ({"model": model} if is_given else {})
    with Capture(tmp_path / "run", **chosen) as capture:
        if runs_before:
            model.blocks[0](torch.randn(2, 3, WIDTH))
        is_training = "select" not in options
        assert called_in_each(capture, model, is_training=is_training, steps=len(expected)) == expected
    torch._dynamo.reset()
