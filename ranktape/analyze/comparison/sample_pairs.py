"""Chooses which elements of two tensors stand for all of them, where each pair of elements is a point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.comparison.tensors import ComparedTensor
from ranktape.analyze.engine.values import View
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.storage import Record


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledPairs:
    """Elements of two tensors of one shape that are at the same places."""

    a: NDArray[np.float64]
    """Of the first; of complex elements the magnitudes."""
    b: NDArray[np.float64]
    """Of the second."""
    places: NDArray[np.int64]
    """Where they are in the tensors laid flat, ascending."""


def sample_pairs(
    a: Record | ComparedTensor, b: Record | ComparedTensor, *, count: int = 10_000, view: View = View.SEEN
) -> SampledPairs:
    """At most `count` pairs of elements, spread over the whole tensors; the same for the same shape and count.

    One place is drawn from each of `count` equal stretches, so that no dimension falls into step with them. NaN and
    infinities are among them where they are met. All elements where there are no more; none of an empty tensor.

    Raises:
        DataError: bytes are missing or damaged.
        StorageError: a store cannot be read.
        UsageError: shapes differ, values were not kept, or the count is negative.
    """
    one, other = (side if isinstance(side, ComparedTensor) else ComparedTensor(records=(side,)) for side in (a, b))
    for side in (one, other):
        if not side.has_values:
            raise UsageError(f"of {side.first!r} the {side.first.keep} were kept, and pairs need the values")
    if one.shape != other.shape:
        raise UsageError(f"{one.first!r} and {other.first!r} have the shapes {list(one.shape)} and {list(other.shape)}")
    if count < 0:
        raise UsageError(f"count={count} is not allowed: give 0 or more")
    places = _places(int(np.prod(one.shape, dtype=np.int64)), count=count)
    return SampledPairs(a=_taken(one, places, view=view), b=_taken(other, places, view=view), places=places)


def _places(num_elements: int, *, count: int) -> NDArray[np.int64]:
    if num_elements <= count:
        return np.arange(num_elements, dtype=np.int64)
    edges = np.arange(count + 1, dtype=np.int64) * num_elements // max(1, count)
    drawn = np.random.default_rng(0).random(count)
    return edges[:-1] + np.floor(drawn * np.diff(edges)).astype(np.int64)


def _taken(tensor: ComparedTensor, places: NDArray[np.int64], *, view: View) -> NDArray[np.float64]:
    taken = tensor.read(view=view).reshape(-1)[places]
    with np.errstate(over="ignore", invalid="ignore"):
        if taken.dtype.kind == "c":
            return np.abs(taken.astype(np.complex128))
        return taken.astype(np.float64)
