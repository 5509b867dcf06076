"""Which runs are replayed in tests: small trainings that are captured, and calls of one layer that are made up."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.replays.replayed import Replayed
from ranktape.capture import Capture
from ranktape.storage import Run, open_run
from tests.analyze.runs import Tensor, describe_tensor, store
from tests.capture.parallel_models import OPTIONS, Recipe, train

if TYPE_CHECKING:
    from numpy.typing import NDArray

DIRECTIONS = {
    "output": ("forward", "post"),
    "grad_output": ("backward", "pre"),
    "grad_input": ("backward", "post"),
    "grad_weight": ("backward", "post"),
}
"""The operation and phase of tensors; those of others are forward and pre."""


def trained(folder: Path, **recipe: Any) -> Run:
    """A training of one process, captured."""
    train(Recipe(**recipe), capture=Capture(folder / "run", min_iterations=2, **OPTIONS))
    return open_run(folder / "run")


def call_arrays(*, tokens: int = 32, inputs: int = 24, outputs: int = 8, seed: int = 0) -> dict[str, NDArray[Any]]:
    """The operands of one call of a linear layer with a bias, and its products in float32."""
    rng = np.random.default_rng(seed)
    shapes = {"input": (tokens, inputs), "weight": (outputs, inputs), "grad_output": (tokens, outputs)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["bias"] = 4 * rng.standard_normal(outputs).astype(np.float32)
    return arrays | {
        "output": arrays["input"] @ arrays["weight"].T + arrays["bias"],
        "grad_input": arrays["grad_output"] @ arrays["weight"],
        "grad_weight": arrays["grad_output"].T @ arrays["input"],
    }


def call_tensors(
    arrays: dict[str, NDArray[Any]], *, without: Collection[str] = (), said: dict[str, Any] | None = None, **fields: Any
) -> list[Tensor]:
    """These as a rank records them; `said` are fields of single tensors, by name."""
    found = []
    for counter, (name, array) in enumerate(arrays.items()):
        operation, phase = DIRECTIONS.get(name, ("forward", "pre"))
        own = {"operation": operation, "phase": phase, "tensor_name": name, "counter": counter}
        found.append(describe_tensor(array, **own | fields | (said or {}).get(name, {})))
    return [tensor for tensor in found if tensor[1].tensor_name not in without]


def one_call(folder: Path, **options: Any) -> Run:
    """A run of one call of one layer."""
    return store(folder / "run", call_tensors(call_arrays(), **options))


def recorded_sqnr(replayed: Replayed) -> dict[str, float]:
    """The smallest SQNR of what was recorded, over all calls, by product."""
    found: dict[str, float] = {}
    for product, recipe, row in zip(replayed.products, replayed.names, replayed.exact, strict=True):
        sqnr = ErrorSums.pooled(row).sqnr
        if recipe == "recorded" and sqnr is not None:
            found[product] = min(sqnr, found.get(product, np.inf))
    return found
