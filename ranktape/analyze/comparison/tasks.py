"""Cuts the comparison of many pairs into pieces of work."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from ranktape.analyze.comparison.tensors import ComparedPairOfTensors, ComparedTensor
from ranktape.analyze.engine.values import View

if TYPE_CHECKING:
    from ranktape.analyze.comparison.layouts import Parts
    from ranktape.analyze.comparison.matching import Matching
    from ranktape.storage import Records

BATCH_NBYTES = 1 << 25
"""Bytes of the pairs of one piece of work, unless a single pair has more."""

BATCH_SIZE = 64
"""Pairs of one piece of work at most: small tensors that are stored together are read together."""


class PairTasks(Sequence[tuple[ComparedPairOfTensors, ...]]):
    """The pairs of a matching in batches, made when they are asked for: a run may have millions of them."""

    def __init__(
        self,
        matching: Matching,
        *,
        twins: Sequence[tuple[int, ...] | None] | None,
        noise: Records | None,
        view: View | None,
    ) -> None:
        self._matching = matching
        self._twins = twins
        self._noise = noise
        self._view = view or View.SEEN
        nbytes = [records.column("nbytes").tolist() for records in (matching.a, matching.b)]
        sizes = [
            sum(of[row] for of, parts in zip(nbytes, pair, strict=True) for row in parts.rows)
            for pair in matching.pairs
        ]
        self._starts = [0]
        self.sizes: list[int] = []
        """Bytes that each batch reads, without the twins."""
        total = 0
        for place, size in enumerate(sizes):
            if total and (total + size > BATCH_NBYTES or place - self._starts[-1] >= BATCH_SIZE):
                self._starts.append(place)
                self.sizes.append(total)
                total = 0
            total += size
        self.sizes.append(total)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> tuple[ComparedPairOfTensors, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[ComparedPairOfTensors, ...]]: ...

    def __getitem__(
        self, index: int | slice
    ) -> tuple[ComparedPairOfTensors, ...] | list[tuple[ComparedPairOfTensors, ...]]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        number = index % len(self)
        ends = [*self._starts[1:], len(self._matching.pairs)]
        places = range(self._starts[number], ends[number])
        pairs = [self._matching.pairs[place] for place in places]
        sides = [
            _tensors(self._matching.a, [one for one, _ in pairs]),
            _tensors(self._matching.b, [other for _, other in pairs]),
            self._twins_of(places),
        ]
        return tuple(
            ComparedPairOfTensors(a=a, b=b, twin=twin, view=self._view) for a, b, twin in zip(*sides, strict=True)
        )

    def _twins_of(self, places: Sequence[int]) -> Sequence[ComparedTensor | None]:
        if self._noise is None or self._twins is None:
            return [None] * len(places)
        rows = [self._twins[place] for place in places]
        there = [
            dataclasses.replace(self._matching.pairs[place][0], rows=known)
            for place, known in zip(places, rows, strict=True)
            if known is not None
        ]
        found = iter(_tensors(self._noise, there))
        return [None if known is None else next(found) for known in rows]


def _tensors(records: Records, parts: Sequence[Parts]) -> list[ComparedTensor]:
    """The tensors whose records are at those places; records are fetched together."""
    found = iter(records.take([row for one in parts for row in one.rows]))
    return [
        ComparedTensor(records=tuple(itertools.islice(found, len(one.rows))), is_assembled=one.is_assembled)
        for one in parts
    ]
