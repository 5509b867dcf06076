"""Gathers the columns that findings are computed from, one element for each record, and compares records with peers.

Everything comes from the digests, which are kept. `groups` holds a whole number for each value: values with the same
number are peers. Values are finite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.numbers import additive_masks, numbers_of
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
"""The fields that name one tensor of the model, over ranks, iterations, microbatches and calls."""

COUNTS = {name: f"overflow.{name}.count" for name in ("nan", "inf", "underflow", "zero")}
"""Counts against the limits of the type that was computed with, and their metrics."""

METRICS = (
    *("elements", "absmax", "rms", "norm", "minimum", "maximum", "smallest_nonzero", "log2_range"),
    *COUNTS.values(),
)
"""Metrics that are read of every record."""


class Survey:
    """The records of a selection, as columns with one element for each."""

    def __init__(self, records: Records, *, view: View | None = None, engine: Engine | None = None) -> None:
        self.records, self.view, self.engine = records, view or View.COMPUTE, engine or Engine()
        self._field_codes: dict[str, Codes] = {}
        self.fields: dict[str, NDArray[Any]] = {name: records.column(name) for name in ("source", *IDENTITY, "counter")}
        names, ranks = self.fields["tensor_name"], self.fields["rank"]
        self.dtypes = np.array(viewed_dtypes(records, view=self.view), object)
        """The types that values were computed with."""
        self.is_floating = _mask(self.dtypes, lambda name: dtype_row(name).is_floating or dtype_row(name).is_complex)
        """Real and complex floating point numbers: others are not judged."""
        self.is_gradient = _mask(names, lambda name: name.startswith("grad"))
        self.is_weight = _mask(names, is_parameter)
        self.is_mask = additive_masks(records)
        """Additive masks, and scores with a mask: -Inf is meant."""
        self.sites, self.roles = self.codes(*SITE), self._roles()
        """Records of one tensor of the model, and of tensors that differ in the layer alone."""
        self.times = self.codes("attempt", "iteration")
        """Number of the captured iteration, in order of attempts and iterations."""
        self.num_times = int(self.times.max(initial=-1)) + 1
        self.order = _order(codes_of(self.times, ranks), self.fields["counter"])
        """Order of execution within the iteration of the rank, from 0."""
        _, firsts = np.unique(codes_of(self.sites, ranks), return_index=True)
        self.num_ranks = np.bincount(self.sites[firsts], minlength=1)[self.sites]
        """Ranks that have records of the same site."""
        self.has_many_ranks = np.unique(ranks).size > 1
        self.has_many_quant_types = len(set(self.fields["quant_type"].tolist())) > 1
        self.has_many_stacks = len(stacks_of(records)) > 1
        numbers = numbers_of(records, METRICS, view=self.view, engine=self.engine)
        self.metrics = {name: numbers.column(name) for name in METRICS}
        """All of `METRICS`; NaN where there is none."""
        self.counts = {name: self.metrics[metric].astype(np.int64) for name, metric in COUNTS.items()}
        self.counts["captured_inf"] = records.column("overflow.inf.count").astype(np.int64)
        """All of `COUNTS`; `captured_inf`: infinities before values were rounded to what was computed with."""
        self.sample_records, self.sample_numbers = numbers.owners, numbers.places
        """Record of each sample, and its number there."""
        self.sample_absmax = numbers.of_samples("absmax")

    def __len__(self) -> int:
        """Number of records."""
        return len(self.sites)

    def codes(self, *names: str) -> Codes:
        """The same number for records that agree in those fields; in the order of fields that are numbers."""
        for name in names:
            if name not in self._field_codes:
                self._field_codes[name] = codes_of(self.fields[name])
        return codes_of(*(self._field_codes[name] for name in names))

    def asked(self, name: str, mask: Mask) -> Floats:
        """One of `NUMBERS` for the records in the mask; 0 for others."""
        values, places = np.zeros(len(self)), np.flatnonzero(mask)
        if places.size:
            chosen = self.records.take(places.tolist())
            values[places] = numbers_of(chosen, [name], view=self.view, engine=self.engine).column(name)
        return values

    def _roles(self) -> Codes:
        modules, layers = self.fields["module"], self.fields["layer_idx"]
        pairs = self.codes("module", "layer_idx")
        _, firsts = np.unique(pairs, return_index=True)
        roles = np.array([role_of(str(modules[first]), int(layers[first])) for first in firsts.tolist()], dtype=object)
        others = self.codes(*(name for name in SITE if name not in {"module", "layer_idx"}))
        return codes_of(roles[pairs], layers < 0, others)

    def episodes(self, mask: Mask) -> Codes:
        """A number for each captured iteration: -1 without a record in the mask, equal where no such one is between."""
        has_some = np.zeros(self.num_times, dtype=bool)
        has_some[self.times[mask]] = True
        begins = has_some & ~np.concatenate(([False], has_some[:-1]))
        return np.where(has_some, np.cumsum(begins) - 1, -1)

    @functools.cached_property
    def skipped_times(self) -> Mask:
        """Whether a gradient scaler skipped the step of a captured iteration; asked where numbers are lost."""
        is_skipped, reader = np.zeros(self.num_times, dtype=bool), self.records.reader
        # A scaler looks at no mask.
        lost = (self.counts["nan"] > 0) | ((self.counts["inf"] > 0) & ~self.is_mask)
        if not isinstance(reader, RunReader) or not lost.any():
            return is_skipped
        times, firsts = np.unique(self.times[lost], return_index=True)
        groups = [
            (self.records[place].location.group.partition("/")[0], int(self.fields["iteration"][place]))
            for place in np.flatnonzero(lost)[firsts].tolist()
        ]
        ranks = for_each(lambda one: read_skipped_ranks(reader.backend, *one), groups)
        is_skipped[times] = list(map(bool, ranks))
        return is_skipped

    def when(self, place: int) -> tuple[int, int]:
        """When a record was made: its captured iteration, and the order within its rank."""
        return int(self.times[place]), int(self.order[place])

    def shares(self, counts: NDArray[Any]) -> Floats:
        """The counts over the elements of each record; 0 for tensors without any."""
        ratios: Floats = counts / np.maximum(self.metrics["elements"], 1)
        return ratios

    def by_site(self, mask: Mask, badness: NDArray[Any]) -> Iterator[Codes]:
        """The records of a mask for each site, the worst first and equal ones in order."""
        chosen = np.flatnonzero(mask)
        yield from (chosen[part] for part in members_of(self.sites[chosen], -badness[chosen]))

    def numbered(self, name: str, places: Codes | list[int]) -> str:
        """The ranks, iterations or layers of records in words."""
        return named_numbers(name.removesuffix("_idx"), self.fields[name][places].tolist())


def named_numbers(word: str, values: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2` or `ranks 0 to 999 (500 of them)`."""
    known = sorted(set(values))
    if len(known) == 1:
        return f"{word} {known[0]}"
    if len(known) <= 8:  # noqa: PLR2004 - as many as a sentence can name
        return f"{word}s {', '.join(map(str, known))}"
    return f"{word}s {known[0]} to {known[-1]} ({len(known)} of them)"


def _mask(names: NDArray[Any], is_so: Callable[[str], bool]) -> Mask:
    known = {name: is_so(str(name)) for name in set(names.tolist())}
    return np.array(list(map(known.__getitem__, names.tolist())), dtype=bool)


def _order(groups: Codes, counters: NDArray[Any]) -> Codes:
    """Records come in the order of recording; `counter` decides where a selection was put together otherwise."""
    order = np.lexsort((counters, groups))
    found = np.empty(groups.size, dtype=np.int64)
    found[order] = np.arange(groups.size) - np.searchsorted(groups[order], groups[order])
    return found


def binades(values: NDArray[Any]) -> Floats:
    """Logarithms to base 2 of what is positive and finite, NaN for the rest."""
    known = np.isfinite(values) & (values > 0)
    found = np.full(values.shape, np.nan)
    np.log2(values, out=found, where=known)
    return found


def codes_of(*columns: NDArray[Any]) -> Codes:
    """One whole number for each row, equal where all columns are; from 0, without gaps, NaN equal to NaN."""
    codes, size = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        numbers = _numbers_of(column)
        span = int(numbers.max(initial=0)) + 1
        if size * span >= _MAX_CODE:
            codes = np.unique(codes, return_inverse=True)[1].reshape(-1)
            size = int(codes.max(initial=0)) + 1
        codes, size = codes * span + numbers, size * span
    return np.unique(codes, return_inverse=True)[1].reshape(-1).astype(np.int64)


_MAX_CODE = 1 << 62
_MAX_PLAIN = 1 << 20
"""Whole numbers below it are their own codes."""


def _numbers_of(column: NDArray[Any]) -> Codes:
    """A whole number for each row, equal where the column is; not less than 0, in the order of numbers."""
    if column.dtype == object:
        # Texts are not sorted, which takes longer than all else.
        known: dict[Any, int] = {}
        for one in column.tolist():
            if one not in known:
                known[one] = len(known)
        return np.array(list(map(known.__getitem__, column.tolist())), dtype=np.int64)
    if column.dtype.kind in "bi" and column.size:
        low, high = int(column.min()), int(column.max())
        if high - low < _MAX_PLAIN:
            return column.astype(np.int64) - low
    return np.unique(column, return_inverse=True)[1].reshape(-1).astype(np.int64)


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
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    sizes = np.diff(starts, append=groups.size)
    middles = np.empty((2, groups.size))
    middles[0, order] = np.repeat(values[order[starts + (sizes - 1) // 2]], sizes)
    middles[1, order] = np.repeat(values[order[starts + sizes // 2]], sizes)
    return middles[0], middles[1]


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
