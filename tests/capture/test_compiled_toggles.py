"""How often is anything compiled while a capture comes and goes: once more for each region, and plain code never?"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.capture.compiled_models import Model, Step, Trained, by_blocks, train, whole
from tests.exhaustive import exhaustive

pytestmark = pytest.mark.filterwarnings("ignore")  # dynamo meets deprecated parts of torch itself

NUM_STEPS = 21
CAPTURED = tuple(range(1, NUM_STEPS, 2))
"""Every other step: 20 toggles."""
NUM_LAYERS = 12
"""More than dynamo compiles of one function before it gives up (8)."""


def compilations() -> Counter[str]:
    """What has been compiled so far: by dynamo, by AOT autograd, and by inductor or taken from its cache."""
    asked = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
    return Counter(
        frames=counters["frames"]["ok"],
        graphs=counters["stats"]["unique_graphs"],
        autograd=counters["aot_autograd"]["total"],
        inductor=sum(counters["inductor"][name] for name in asked),
    )


@dataclass(frozen=True, slots=True)
class Compiled:
    """A training, and what was compiled in its steps."""

    trained: Trained
    steps: list[Counter[str]]

    def compiled_in(self, steps: range | tuple[int, ...]) -> Counter[str]:
        """What was compiled in some steps together."""
        return sum((self.steps[step] for step in steps), Counter())


def counted(compile_: Callable[[Model], Step], url: Path | None = None, **options: Any) -> Compiled:
    """A training of some steps, of which every other is captured where there is a URL."""
    found: list[Counter[str]] = []

    def compile_counting(model: Model) -> Step:
        step = compile_(model)

        def count(ids: torch.Tensor) -> torch.Tensor:
            before = compilations()
            loss = step(ids)
            found.append(compilations() - before)
            return loss

        return count

    # A region that is compiled too often raises here, where it would run eagerly.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        trained = train(compile_counting, url, captured=CAPTURED, **options)
    return Compiled(trained, found)


LAYERS = functools.partial(Model, number=NUM_LAYERS)
CHANGING = tuple(8 - step // 2 % 4 for step in range(NUM_STEPS))
"""Tokens of each step; a length that is new comes in a plain step, and in a captured one after it."""
_LONG = pytest.mark.exhaustive("as the others, compiled in other ways")


@pytest.mark.parametrize(
    ("compile_", "make", "lengths"),
    [
        pytest.param(by_blocks, LAYERS, None, id="each layer"),
        pytest.param(whole, LAYERS, None, id="whole, fullgraph", marks=_LONG),
        pytest.param(functools.partial(by_blocks, dynamic=True), LAYERS, CHANGING, id="dynamic, layers", marks=_LONG),
        pytest.param(functools.partial(whole, dynamic=True), Model, CHANGING, id="dynamic, whole", marks=_LONG),
        pytest.param(whole, Model, CHANGING, id="lengths that become dynamic", marks=_LONG),
        pytest.param(functools.partial(whole, mode="reduce-overhead"), Model, None, id="reduce-overhead", marks=_LONG),
        pytest.param(functools.partial(whole, mode="max-autotune"), Model, None, id="max-autotune", marks=_LONG),
        pytest.param(functools.partial(by_blocks, mode="max-autotune"), LAYERS, None, id="tuned layers", marks=_LONG),
    ],
)
@exhaustive("make test counts compilations in tests/capture/test_compiled_graphs.py")
def test_a_capture_that_comes_and_goes_compiles_each_region_once_more(
    compile_: Callable[[Model], Step], make: Callable[[], Model], lengths: tuple[int, ...] | None, tmp_path: Path
) -> None:
    shared: dict[str, Any] = {"make": make, "lengths": lengths or (8,) * NUM_STEPS}
    plain = counted(compile_, **shared)
    seen = counted(compile_, tmp_path / "run", **shared)
    wanted = plain.compiled_in(range(NUM_STEPS))
    assert wanted["graphs"], "the training is compiled"
    assert seen.compiled_in(range(0, NUM_STEPS, 2)) == wanted, "plain steps compile what they compile without a capture"
    assert seen.compiled_in(CAPTURED) <= wanted
    if lengths is None:
        assert not seen.compiled_in(range(2, NUM_STEPS)), "all is compiled with the first captured step"
    assert seen.trained.equals(plain.trained)
