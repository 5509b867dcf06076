"""Tells how far a number is from those that should be like it, and whether that is far.

All functions work on many groups of peers at once: `groups` holds a whole number for each value, and values with the
same one are peers. Values are finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.findings import thresholds as limit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Codes = NDArray[np.int64]
    Mask = NDArray[np.bool_]


def binades(values: NDArray[Any]) -> Floats:
    """Logarithms to base 2 of what is positive and finite, NaN for the rest."""
    known = np.isfinite(values) & (values > 0)
    found = np.full(values.shape, np.nan)
    np.log2(values, out=found, where=known)
    return found


def codes_of(*columns: NDArray[Any]) -> Codes:
    """One whole number for each row, equal where all columns are; from 0, without gaps, NaN equal to NaN."""
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        if column.dtype == object:
            # Texts are not sorted, which takes longer than all else.
            known: dict[Any, int] = {}
            places = np.fromiter((known.setdefault(one, len(known)) for one in column.tolist()), np.int64, len(column))
        else:
            places = np.unique(column, return_inverse=True)[1].reshape(-1).astype(np.int64)
        pairs = codes * (int(places.max(initial=0)) + 1) + places
        _, codes = np.unique(pairs, return_inverse=True)
    return codes.reshape(-1).astype(np.int64)


def members_of(groups: Codes, *order: NDArray[Any]) -> Iterator[Codes]:
    """For each group where its values are, in the order of those columns."""
    places = np.lexsort((*reversed(order), groups))
    starts = np.flatnonzero(np.diff(groups[places], prepend=-1)) if places.size else places
    yield from (part for part in np.split(places, starts[1:]) if part.size)


def sizes_of(groups: Codes) -> Codes:
    """For each value how many peers it has, itself among them."""
    return np.bincount(groups, minlength=1)[groups] if groups.size else groups


def middles_of(groups: Codes, values: Floats) -> tuple[Floats, Floats]:
    """For each value the two in the middle of its group: of an even number what differs of them, else the same."""
    if not groups.size:
        return values, values
    order = np.lexsort((values, groups))
    sorted_values = values[order]
    labels, starts, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    places = np.searchsorted(labels, groups)
    low, high = sorted_values[starts + (sizes - 1) // 2], sorted_values[starts + sizes // 2]
    return low[places], high[places]


def medians_of(groups: Codes, values: Floats) -> Floats:
    """For each value the median of its group; of an even number the mean of the two in the middle."""
    low, high = middles_of(groups, values)
    found: Floats = (low + high) / 2
    return found


def deviations_of(groups: Codes, values: Floats) -> tuple[Floats, Floats]:
    """For each value how far it is from the median of its group, and the MAD of the group."""
    apart = values - medians_of(groups, values)
    return apart, medians_of(groups, np.abs(apart))


def robust_z(apart: Floats, mads: Floats | float, *, floor: float = limit.MIN_MAD_BINADES) -> Floats:
    """Deviations in MADs that are made comparable to standard deviations, and are at least `floor`."""
    found: Floats = apart / (limit.NORMAL_MAD * np.maximum(mads, floor))
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """A metric along the layers, or the iterations: at each step the middle over ranks and microbatches."""

    records: Codes
    """Those that it is made of."""
    at: Codes
    """The step of each of these."""
    steps: Codes
    """The steps that there are, ascending."""
    values: Floats
    """The metric at each of those: two rows, for the two in the middle of an even number of records. So what one of
    two ranks does, and the other does not share, is none of the step."""

    @property
    def means(self) -> Floats:
        """The median at each step."""
        found: Floats = self.values.mean(axis=0)
        return found

    def at_step(self, step: int) -> Codes:
        """The records of a step."""
        found: Codes = self.records[self.at == step]
        return found


def courses_of(groups: Codes, steps: Codes, values: Floats, *, known: Mask, min_steps: int) -> Iterator[Course]:
    """For each group its course, where it has so many steps; of the records that are known and have a value."""
    records = np.flatnonzero(known & np.isfinite(values))
    at = steps[records].astype(np.int64)
    middles = np.stack(middles_of(codes_of(groups[records], at), values[records]))
    for part in members_of(groups[records], at):
        found, firsts = np.unique(at[part], return_index=True)
        if found.size >= min_steps:
            yield Course(records=records[part], at=at[part], steps=found, values=middles[:, part][:, firsts])
