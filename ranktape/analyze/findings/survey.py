"""Collects the columns that findings are computed from, one element per record, and compares records with peers.

All numbers come from digests, which are cached. `groups` has an integer for each value: values with the same integer
are peers. Values are finite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.numbers import additive_masks, record_metrics
from ranktape.analyze.engine.values import View, viewed_dtypes
from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.identity import IDENTITY, role_of, stacks_of
from ranktape.storage import Records
from ranktape.storage.format.commit import read_skipped_ranks
from ranktape.storage.format.documents import for_each
from ranktape.storage.format.dtypes import dtype_row
from ranktape.storage.format.record_info import is_parameter
from ranktape.storage.records.run import RunReader

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
Mask = NDArray[np.bool_]

SITE = (
    *("source", "module", "layer_type", "layer_idx", "operation", "phase", "component", "quant_type"),
    *("tensor_name", "mode"),
)
"""The fields that identify a tensor of the model across ranks, iterations, microbatches and calls."""

COUNTS = {name: f"overflow.{name}.count" for name in ("nan", "inf", "underflow", "zero")}
"""The counts relative to the limits of the computation's dtype, with their metrics."""

METRICS = (
    *("elements", "absmax", "rms", "norm", "minimum", "maximum", "smallest_nonzero", "log2_range"),
    *COUNTS.values(),
)
"""The metrics that are read for every record."""


class Survey:
    """The records of a selection, as columns with one element per record."""

    def __init__(self, records: Records, *, view: View | None = None, engine: Engine | None = None) -> None:
        self.records, self.view, self.engine = records, view or View.COMPUTE, engine or Engine()
        self._field_codes: dict[str, Codes] = {}
        self.fields: dict[str, NDArray[Any]] = {name: records.column(name) for name in ("source", *IDENTITY, "counter")}
        names, ranks = self.fields["tensor_name"], self.fields["rank"]
        self.dtypes = np.array(viewed_dtypes(records, view=self.view), object)
        """The dtypes of the values in the view: by default, those of the computation."""
        self.is_floating = _mask(self.dtypes, lambda name: dtype_row(name).is_floating or dtype_row(name).is_complex)
        """Whether values are real or complex floating point; values of other records are not judged."""
        self.is_gradient = _mask(names, lambda name: name.startswith("grad"))
        self.is_weight = _mask(names, is_parameter)
        self.is_mask = additive_masks(records)
        """Additive masks, and scores with a mask added, in which -Inf is intended."""
        self.sites, self.roles = self.codes(*SITE), self._roles()
        """`sites` is equal for records of one tensor, `roles` for records of tensors that differ only in the layer."""
        self.times = self.codes("attempt", "iteration")
        """Number of the captured iteration from 0, in order of attempts and iterations."""
        self.num_times = int(self.times.max(initial=-1)) + 1
        self.order = _order(row_codes(self.times, ranks), self.fields["counter"])
        """Order of execution within the iteration of the rank, from 0."""
        _, firsts = np.unique(row_codes(self.sites, ranks), return_index=True)
        self.num_ranks = np.bincount(self.sites[firsts], minlength=1)[self.sites]
        """Number of ranks that have records of the same site."""
        self.has_many_ranks = np.unique(ranks).size > 1
        self.has_many_quant_types = len(set(self.fields["quant_type"].tolist())) > 1
        self.has_many_stacks = len(stacks_of(records)) > 1
        metrics = record_metrics(records, METRICS, view=self.view, engine=self.engine)
        self.metrics = {name: metrics.column(name) for name in METRICS}
        """All of `METRICS`; NaN if a record does not have the metric."""
        self.counts = {name: self.metrics[metric].astype(np.int64) for name, metric in COUNTS.items()}
        self.counts["captured_inf"] = records.column("overflow.inf.count").astype(np.int64)
        """All of `COUNTS`, and `captured_inf`: infinities before values were rounded to the computation's dtype."""
        self.sample_records, self.sample_numbers = metrics.owners, metrics.sample_indices
        """The record of each sample, and the sample's index in the record."""
        self.sample_absmax = metrics.sample_column("absmax")

    def __len__(self) -> int:
        """Number of records."""
        return len(self.sites)

    def codes(self, *names: str) -> Codes:
        """The same integer for records that agree in these fields; numeric fields keep their order."""
        for name in names:
            if name not in self._field_codes:
                self._field_codes[name] = row_codes(self.fields[name])
        return row_codes(*(self._field_codes[name] for name in names))

    def masked_metric(self, name: str, mask: Mask) -> Floats:
        """One of `NUMBERS` for the records in the mask; 0 for all others."""
        values, rows = np.zeros(len(self)), np.flatnonzero(mask)
        if rows.size:
            chosen = self.records.take(rows.tolist())
            values[rows] = record_metrics(chosen, [name], view=self.view, engine=self.engine).column(name)
        return values

    def _roles(self) -> Codes:
        modules, layers = self.fields["module"], self.fields["layer_idx"]
        pairs = self.codes("module", "layer_idx")
        _, firsts = np.unique(pairs, return_index=True)
        roles = np.array([role_of(str(modules[first]), int(layers[first])) for first in firsts.tolist()], dtype=object)
        others = self.codes(*(name for name in SITE if name not in {"module", "layer_idx"}))
        return row_codes(roles[pairs], layers < 0, others)

    def episodes(self, mask: Mask) -> Codes:
        """A number for each run of successive captured iterations with records in the mask; -1 for the others."""
        has_some = np.zeros(self.num_times, dtype=bool)
        has_some[self.times[mask]] = True
        begins = has_some & ~np.concatenate(([False], has_some[:-1]))
        return np.where(has_some, np.cumsum(begins) - 1, -1)

    @functools.cached_property
    def skipped_times(self) -> Mask:
        """Whether a gradient scaler skipped the step of each captured iteration; only read if it has NaN or Inf."""
        is_skipped, reader = np.zeros(self.num_times, dtype=bool), self.records.reader
        # A scaler does not check masks.
        lost = (self.counts["nan"] > 0) | ((self.counts["inf"] > 0) & ~self.is_mask)
        if not isinstance(reader, RunReader) or not lost.any():
            return is_skipped
        times, firsts = np.unique(self.times[lost], return_index=True)
        groups = [
            (self.records[row].location.group.partition("/")[0], int(self.fields["iteration"][row]))
            for row in np.flatnonzero(lost)[firsts].tolist()
        ]
        ranks = for_each(lambda group: read_skipped_ranks(reader.backend, *group), groups)
        is_skipped[times] = list(map(bool, ranks))
        return is_skipped

    def when(self, row: int) -> tuple[int, int]:
        """The captured iteration of a record, and its order within the iteration of its rank."""
        return int(self.times[row]), int(self.order[row])

    def shares(self, counts: NDArray[Any]) -> Floats:
        """The counts divided by the number of elements of each record; 0 for empty tensors."""
        ratios: Floats = counts / np.maximum(self.metrics["elements"], 1)
        return ratios

    def by_site(self, mask: Mask, badness: NDArray[Any]) -> Iterator[Codes]:
        """The records of a mask for each site, the worst first; equal ones stay in order."""
        chosen = np.flatnonzero(mask)
        yield from (chosen[part] for part in group_members(self.sites[chosen], -badness[chosen]))

    def numbered(self, name: str, rows: Codes | list[int]) -> str:
        """The ranks, iterations or layers of records as text."""
        return named_numbers(name.removesuffix("_idx"), self.fields[name][rows].tolist())


def named_numbers(noun: str, values: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2` or `ranks 0 to 999 (500 of them)`."""
    numbers = sorted(set(values))
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if len(numbers) <= 8:  # noqa: PLR2004 - as many as a sentence can name
        return f"{noun}s {', '.join(map(str, numbers))}"
    return f"{noun}s {numbers[0]} to {numbers[-1]} ({len(numbers)} of them)"


def _mask(names: NDArray[Any], predicate: Callable[[str], bool]) -> Mask:
    by_name = {name: predicate(str(name)) for name in set(names.tolist())}
    return np.array(list(map(by_name.__getitem__, names.tolist())), dtype=bool)


def _order(groups: Codes, counters: NDArray[Any]) -> Codes:
    """The order of execution of each record in its group, from 0: by `counter`, then by row."""
    order = np.lexsort((counters, groups))
    positions = np.empty(groups.size, dtype=np.int64)
    positions[order] = np.arange(groups.size) - np.searchsorted(groups[order], groups[order])
    return positions


def binades(values: NDArray[Any]) -> Floats:
    """Base-2 logarithms of positive finite values; NaN for all others."""
    is_positive = np.isfinite(values) & (values > 0)
    logarithms = np.full(values.shape, np.nan)
    np.log2(values, out=logarithms, where=is_positive)
    return logarithms


def row_codes(*columns: NDArray[Any]) -> Codes:
    """An integer for each row, equal if all columns are equal; from 0, without gaps, NaN equal to NaN."""
    codes, size = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        numbers = _column_codes(column)
        span = int(numbers.max(initial=0)) + 1
        if size * span >= _MAX_CODE:
            codes = np.unique(codes, return_inverse=True)[1].reshape(-1)
            size = int(codes.max(initial=0)) + 1
        codes, size = codes * span + numbers, size * span
    return np.unique(codes, return_inverse=True)[1].reshape(-1).astype(np.int64)


_MAX_CODE = 1 << 62
_MAX_PLAIN = 1 << 20
"""If a column of integers spans less than this, its codes are the values minus the smallest one."""


def _column_codes(column: NDArray[Any]) -> Codes:
    """An integer, 0 or more, for each row, equal if the column is equal; in the order of numeric values."""
    if column.dtype == object:
        # Does not sort texts, which would take longer than everything else.
        codes: dict[Any, int] = {}
        for value in column.tolist():
            if value not in codes:
                codes[value] = len(codes)
        return np.array(list(map(codes.__getitem__, column.tolist())), dtype=np.int64)
    if column.dtype.kind in "bi" and column.size:
        low, high = int(column.min()), int(column.max())
        if high - low < _MAX_PLAIN:
            return column.astype(np.int64) - low
    return np.unique(column, return_inverse=True)[1].reshape(-1).astype(np.int64)


def group_members(groups: Codes, *order: NDArray[Any]) -> Iterator[Codes]:
    """For each group, the indices of its values, sorted by these columns."""
    indices = np.lexsort((*reversed(order), groups))
    starts = np.flatnonzero(np.diff(groups[indices], prepend=-1)) if indices.size else indices
    yield from (part for part in np.split(indices, starts[1:]) if part.size)


def group_sizes(groups: Codes) -> Codes:
    """For each value, the size of its group."""
    return np.bincount(groups, minlength=1)[groups] if groups.size else groups


def group_median_bounds(groups: Codes, values: Floats) -> tuple[Floats, Floats]:
    """For each value, the lower and the upper median of its group; they are equal in groups of odd size."""
    if not groups.size:
        return values, values
    order = np.lexsort((values, groups))
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    sizes = np.diff(starts, append=groups.size)
    middles = np.empty((2, groups.size))
    middles[0, order] = np.repeat(values[order[starts + (sizes - 1) // 2]], sizes)
    middles[1, order] = np.repeat(values[order[starts + sizes // 2]], sizes)
    return middles[0], middles[1]


def group_medians(groups: Codes, values: Floats) -> Floats:
    """For each value, the median of its group; the mean of the two middle values if the size is even."""
    low, high = group_median_bounds(groups, values)
    medians: Floats = (low + high) / 2
    return medians


def group_deviations(groups: Codes, values: Floats) -> tuple[Floats, Floats]:
    """For each value, its difference from the median of its group, and the MAD of the group."""
    deviations = values - group_medians(groups, values)
    return deviations, group_medians(groups, np.abs(deviations))


def robust_z(deviations: Floats, mads: Floats | float, *, floor: float = limit.MIN_MAD_BINADES) -> Floats:
    """Deviations in units of the MAD, which is at least `floor` and is scaled to a standard deviation."""
    scores: Floats = deviations / (limit.NORMAL_MAD * np.maximum(mads, floor))
    return scores
