"""Counts the kinds of numbers that a tensor holds for a sweep, and reads it in groups that share a scale."""

# Shapes: O = before the axis, B = blocks, E = elements of a group, I = after the axis, G = groups.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.histograms.block_histogram import BlockHistogram
from ranktape.analyze.numerics.histograms.histogram import AnyArray, Histogram, own_limits, pattern_values, scan
from ranktape.analyze.numerics.pieces import Box, boxes, by_memory, grouped_shape, in_batches, pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """How many numbers of each kind there are, and the ends of those that metrics are made of."""

    num_elements: int
    """Elements of any kind."""
    nan: int
    """Elements that are not a number; in no metric."""
    inf: int
    """Infinities; in no metric."""
    zero: int
    """Zeros of either sign, but for those that are spoiled."""
    spoiled: int = 0
    """Finite elements of blocks that hold NaN or an infinity, and so become NaN themselves; in no metric."""
    minimum: float | None = None
    """Smallest finite value; None where there is none, or where counts that know no signs were kept."""
    maximum: float | None = None
    """Largest finite value; None where `minimum` is."""
    largest: float
    """Largest magnitude that is neither spoiled nor infinite; 0 where no such number differs from zero."""
    smallest: float
    """The smallest of them that is not zero; 0 where there is none."""

    @property
    def is_lossless(self) -> bool:
        """Whether all numbers are zeros: any format holds them, at any scale."""
        return self.num_elements > 0 and not (self.largest or self.nan or self.inf or self.spoiled)

    @property
    def note(self) -> str:
        """What is unusual; empty for an ordinary tensor."""
        num_finite = self.num_elements - self.nan - self.inf
        if self.num_elements == 0:
            return "empty"
        if num_finite == 0:
            return "no finite number"
        if num_finite == self.spoiled:
            return "NaN or Inf in every block"
        if self.largest:
            left_out = "blocks with NaN or Inf left out" if self.spoiled else "NaN or Inf left out"
            return left_out if num_finite < self.num_elements else ""
        if num_finite == self.num_elements:
            return "all zero: exact at any scale"
        return "no finite number other than zero"


def population_of_values(array: AnyArray) -> Population:
    """What an array of any record's real type with at least one dimension holds; no copy of the whole is made."""
    limits = own_limits(array.dtype)
    in_order, _ = by_memory(array, axis=0)
    kinds: list[tuple[float, ...]] = []
    ends: list[tuple[float, float]] = []
    for piece in pieces(in_order, axis=0, block_size=1):
        found = scan(piece, limits=limits)
        smallest = math.inf if found.smallest_nonzero is None else found.smallest_nonzero
        counts = found.num_elements, found.nan, found.inf, found.zero, 0
        kinds.append((*counts, found.largest_finite or 0.0, smallest))
        finite = piece[np.isfinite(piece)] if found.inf else None
        if finite is not None and finite.size:
            ends.append((float(finite.min()), float(finite.max())))
        elif finite is None and found.minimum is not None and found.maximum is not None:
            ends.append((found.minimum, found.maximum))
    return dataclasses.replace(
        population_of_parts(kinds),
        minimum=min((low for low, _ in ends), default=None),
        maximum=max((high for _, high in ends), default=None),
    )


def population_of_histogram(histogram: Histogram) -> Population:
    """What the array holds that was counted."""
    values, counts = histogram.pairs()
    is_finite = np.isfinite(values)
    finite = values[is_finite]
    magnitudes = np.abs(finite)
    ordinary = magnitudes[magnitudes > 0]
    num_elements = int(counts.sum())
    nan = int(counts[np.isnan(values)].sum())
    return Population(
        num_elements=num_elements,
        nan=nan,
        inf=num_elements - nan - int(counts[is_finite].sum()),
        zero=int(counts[values == 0].sum()),
        minimum=float(finite.min()) if finite.size else None,
        maximum=float(finite.max()) if finite.size else None,
        largest=float(ordinary.max(initial=0.0)),
        smallest=float(ordinary.min()) if ordinary.size else 0.0,
    )


def population_of_blocks(histogram: BlockHistogram) -> Population:
    """What the array holds whose blocks were counted; of signs nothing is known."""
    patterns = histogram.magnitudes
    values = pattern_values(histogram.dtype)
    ordinary = patterns[patterns > 0]
    return Population(
        num_elements=histogram.num_elements,
        nan=histogram.nan,
        inf=histogram.inf,
        spoiled=histogram.spoiled,
        zero=histogram.zero_elements + int(histogram.counts[patterns == 0].sum()),
        # Magnitudes are in the order of their patterns.
        largest=float(values[ordinary.max()]) if ordinary.size else 0.0,
        smallest=float(values[ordinary.min()]) if ordinary.size else 0.0,
    )


def population_of_parts(parts: Sequence[Sequence[float] | NDArray[np.float64]]) -> Population:
    """All parts together, each a row of `num_elements`, nan, inf, zero, spoiled, largest, smallest."""
    rows = np.array(parts, dtype=np.float64).reshape(-1, 7)
    num_elements, nan, inf, zero, spoiled = (int(column.sum()) for column in rows.T[:5])
    smallest = float(rows[:, 6].min(initial=math.inf))
    return Population(
        num_elements=num_elements,
        nan=nan,
        inf=inf,
        zero=zero,
        spoiled=spoiled,
        largest=float(rows[:, 5].max(initial=0.0)),
        smallest=smallest if math.isfinite(smallest) else 0.0,
    )


BOX = 1 << 16
"""Values in groups that a thread works on at a time."""


class ScaledGroups:
    """An array whose elements share scales in blocks along an axis, or in channels beside it."""

    def __init__(self, array: AnyArray, *, axis: int, is_channel: bool, block_size: int) -> None:
        self._array, self._axis, self.is_channel = array, axis, is_channel
        self._block_size = 1 if is_channel else block_size

    def boxes(self) -> Iterator[Box]:
        """What the array is cut into."""
        return boxes(self._array.shape, axis=self._axis, block_size=self._block_size, box_size=BOX)

    def place(self, box: Box) -> slice | tuple[slice, ...]:
        """Where the groups of a box are among all groups."""
        return box.place[self._axis] if self.is_channel else box.groups

    def rows(self, box: Box) -> NDArray[np.float64]:
        """The magnitudes of a box, one row for each group."""
        with np.errstate(invalid="ignore"):  # signalling NaN
            magnitudes = np.abs(self._array[box.place].astype(np.float64, order="C"))
        order = (1, 0, 2, 3) if self.is_channel else (0, 1, 3, 2)
        num_groups = box.shape_OBEI[1] if self.is_channel else box.size // box.shape_OBEI[2]
        return np.ascontiguousarray(magnitudes.reshape(box.shape_OBEI).transpose(order)).reshape(num_groups, -1)

    def look(self, *, keep: bool, threads: int | None) -> tuple[NDArray[np.float64] | None, float]:
        """The largest magnitude of each group, if they are to be kept, and the largest that is in any metric."""
        shape = grouped_shape(self._array.shape, axis=self._axis, block_size=self._block_size)
        largest = np.zeros(shape[self._axis] if self.is_channel else shape) if keep else None
        largest_of_all = 0.0

        def look(box: Box) -> tuple[Box, NDArray[np.float64]]:
            values_GE = self.rows(box)
            if self.is_channel:
                values_GE[~(values_GE < np.inf)] = 0.0
            return box, values_GE.max(axis=1)

        for box, of_groups in in_batches(look, self.boxes(), threads=threads):
            if largest is None:
                largest_of_all = max(largest_of_all, float(of_groups[of_groups < np.inf].max(initial=0.0)))
            else:
                kept = largest[self.place(box)]
                np.maximum(kept, of_groups.reshape(kept.shape), out=kept)
        if largest is not None:
            largest_of_all = float(largest[largest < np.inf].max(initial=0.0))
        return largest, largest_of_all


def left_out(values_GE: NDArray[np.float64], is_left_out: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Put zeros in place of what is left out; how much there is of each kind, for `population_of_parts`."""
    nan = inf = num_left_out = 0
    if is_left_out.any():
        left_out = values_GE[is_left_out]
        nan, inf = int(np.isnan(left_out).sum()), int(np.isinf(left_out).sum())
        num_left_out = left_out.size
        values_GE[is_left_out] = 0.0
    zero = values_GE.size - np.count_nonzero(values_GE) - num_left_out
    spoiled = num_left_out - nan - inf
    # One less, the bits of a zero are the largest number there is.
    lowest = (values_GE.view(np.uint64) - np.uint64(1)).min()
    smallest = float((lowest + np.uint64(1)).view(np.float64)) if lowest < np.iinfo(np.uint64).max else math.inf
    return np.array([values_GE.size, nan, inf, zero, spoiled, values_GE.max(), smallest])
