"""Reads and compares the tensors of pairs in batches: records or assembled tensors, whole or sample by sample."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.comparison.matching import Matching, Parts
from ranktape.analyze.engine.engine import split_by_size
from ranktape.analyze.engine.values import View, read_values, viewed_dtype
from ranktape.analyze.numerics.differences import Differences, compare_parts
from ranktape.storage import Record, Records
from ranktape.storage.format.arrays import MIN_SAMPLE_NBYTES
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import Keep
from ranktape.storage.records.assemble import assemble_records

WHOLE_NBYTES = 1 << 24
"""Tensors up to this size are read whole; larger ones one sample at a time, if each sample can be read alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTensor:
    """One side of a pair: a record, or the parts of one tensor. It can be pickled."""

    records: tuple[Record, ...]
    """The record, or the parts and their copies."""
    is_assembled: bool = False
    """Whether the parts are assembled."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return (
            assemble_records(self.records, replicas="ignore")[0].shape if self.is_assembled else self.records[0].shape
        )

    @property
    def has_values(self) -> bool:
        """Whether the values of all parts are stored."""
        return all(record.keep == Keep.VALUES for record in self.records)

    def read(self, *, view: View) -> NDArray[Any]:
        """The values, in the dtype that `viewed_dtype` gives."""
        if not self.is_assembled:
            return read_values(self.records[0], view=view)
        return self._viewed(assemble_records(self.records, replicas="ignore")[0].read(), view=view)

    def read_sample(self, sample: int, *, view: View) -> NDArray[Any]:
        """The values of one sample."""
        return self._viewed(self.records[0].read(sample), view=view)

    def is_read_by_sample(self) -> bool:
        """Whether the tensor is large, and each of its samples can be read without the others."""
        record = self.records[0]
        if self.is_assembled or record.sample_dim is None or record.location.stack or record.location.group == ".":
            return False
        num_samples = record.shape[record.sample_dim]
        return record.nbytes > WHOLE_NBYTES and record.nbytes // num_samples >= MIN_SAMPLE_NBYTES

    def _viewed(self, values: NDArray[Any], *, view: View) -> NDArray[Any]:
        first = self.records[0]
        dtype = numpy_dtype(viewed_dtype(dtype=first.dtype, compute_dtype=first.compute_dtype, view=view))
        with np.errstate(over="ignore", invalid="ignore"):
            return values if values.dtype == dtype else values.astype(dtype)


PairOfTensors = tuple[ComparedTensor, ComparedTensor, ComparedTensor | None]
"""The reference, the tensor that is compared with it, and the twin of the reference in a second equal run."""


def compare_pairs(pairs: Sequence[PairOfTensors], *, view: View) -> list[tuple[Differences | None, Differences | None]]:
    """For each pair, the differences of b from a and of the twin from a. Only one pair is in memory at a time."""
    return [
        (compare_tensors(a, b, view=view), None if twin is None else compare_tensors(a, twin, view=view))
        for a, b, twin in pairs
    ]


def compare_tensors(a: ComparedTensor, b: ComparedTensor, *, view: View = View.SEEN) -> Differences | None:
    """The differences of b from a; None if the values of one are not stored, or if the shapes differ.

    Both tensors are in memory; of large ones with samples, one sample of each.
    """
    if not (a.has_values and b.has_values and a.shape == b.shape):
        return None
    return compare_parts(_parts(a, b, view=view), shape=a.shape, first_dim=a.records[0].sample_dim)


def _parts(a: ComparedTensor, b: ComparedTensor, *, view: View) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Both tensors in flat parts, sample dimension first; the order of elements does not depend on the parts."""
    dim = a.records[0].sample_dim
    if dim is not None and dim == b.records[0].sample_dim and a.is_read_by_sample() and b.is_read_by_sample():
        for sample in range(a.shape[dim]):
            values = (side.read_sample(sample, view=view) for side in (a, b))
            yield tuple(np.ascontiguousarray(one).reshape(-1) for one in values)  # type: ignore[misc]
        return
    wholes = (side.read(view=view) for side in (a, b))
    yield tuple(  # type: ignore[misc]
        np.ascontiguousarray(whole if not dim else np.moveaxis(whole, dim, 0)).reshape(-1) for whole in wholes
    )


class PairTasks(Sequence[list[PairOfTensors]]):
    """The pairs of a matching in batches, created on access, since a run can have millions of them.

    Small tensors that are stored together are read together. `twins` are the rows in `noise` of the tensor on the first
    side of each pair.
    """

    def __init__(
        self, matching: Matching, *, twins: Sequence[tuple[int, ...] | None] = (), noise: Records | None = None
    ) -> None:
        self._matching, self._twins, self._noise = matching, twins, noise
        nbytes = [records.column("nbytes").tolist() for records in (matching.a, matching.b)]
        sizes = [
            sum(of[row] for of, parts in zip(nbytes, pair, strict=True) for row in parts.rows)
            for pair in matching.pairs
        ]
        self._batches = split_by_size(sizes, max_nbytes=BATCH_NBYTES, max_number=BATCH_SIZE)
        self.sizes = [sum(sizes[batch]) for batch in self._batches]
        """Number of bytes that each batch reads, without the twins."""

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        batch = self._batches[index]
        pairs = self._matching.pairs[batch]
        a = _tensors(self._matching.a, [one for one, _ in pairs])
        b = _tensors(self._matching.b, [other for _, other in pairs])
        twins: Iterator[ComparedTensor | None] = itertools.repeat(None, len(pairs))
        if self._noise is not None:
            rows = self._twins[batch]
            twinned = [
                dataclasses.replace(one, rows=twin_rows)
                for (one, _), twin_rows in zip(pairs, rows, strict=True)
                if twin_rows
            ]
            twin_tensors = iter(_tensors(self._noise, twinned))
            twins = (next(twin_tensors) if twin_rows else None for twin_rows in rows)
        return list(zip(a, b, twins, strict=False))


BATCH_NBYTES = 1 << 25
"""The largest size of a batch, in bytes, unless a single pair is larger."""

BATCH_SIZE = 64
"""The largest number of pairs in a batch."""


def _tensors(records: Records, parts: Sequence[Parts]) -> list[ComparedTensor]:
    """The tensors with records in these rows, which are fetched together."""
    fetched = iter(records.take([row for one in parts for row in one.rows]))
    return [
        ComparedTensor(records=tuple(itertools.islice(fetched, len(one.rows))), is_assembled=one.is_assembled)
        for one in parts
    ]
