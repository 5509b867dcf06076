"""Gathers what is known of all records of a selection before anything is judged: who they are, and their metrics.

One pass over the digests, which are small and kept; every kind of finding is then a question to columns of numbers: is
this far from those that should be like it? It is asked of many groups of peers at once: `groups` holds a whole number
for each value, and values with the same one are peers. Values are finite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
    "source",
    "module",
    "layer_type",
    "layer_idx",
    "operation",
    "phase",
    "component",
    "quant_type",
    "tensor_name",
    "mode",
)
"""What tells one place of the model from another, over ranks, iterations, microbatches and calls."""

COUNTS = {name: f"overflow.{name}.count" for name in ("nan", "inf", "underflow", "zero")}
"""Counts against the limits of the type that is looked at, and the metrics that they are."""

METRICS = (
    *("elements", "absmax", "rms", "norm", "minimum", "maximum", "smallest_nonzero", "log2_range"),
    *COUNTS.values(),
)
"""Metrics that findings ask of every record: no numbers that occur have to be looked at for them."""


class Samples(NamedTuple):
    """Every sample of every record that has some: its record, its number in that, and its largest finite magnitude."""

    record: Codes
    number: Codes
    absmax: Floats
    """NaN where it has none."""


class Survey:
    """The records of a selection, as columns with one element for each.

    Values are read of records alone that were never asked about.
    """

    def __init__(self, records: Records, *, view: View | None = None, engine: Engine | None = None) -> None:
        self._view, self._engine = view or View.COMPUTE, engine
        self._field_codes: dict[str, Codes] = {}
        self.records = records
        """The selection."""
        self.fields: dict[str, NDArray[Any]] = {name: records.column(name) for name in ("source", *IDENTITY, "counter")}
        """What of the catalogue every finding may ask for."""
        self.dtypes = np.array(viewed_dtypes(records, view=self._view), object)
        """What the values were looked at as."""
        self.is_floating = _mask(self.dtypes, lambda name: dtype_row(name).is_floating or dtype_row(name).is_complex)
        """Whether the elements are real or complex floating point numbers: of others nothing is judged."""
        self.is_gradient = _mask(self.fields["tensor_name"], lambda name: name.startswith("grad"))
        """Whether a record holds a gradient."""
        self.is_weight = _mask(self.fields["tensor_name"], is_parameter)
        """Whether a record holds a parameter of the model, which no sample and no other layer has a part in."""
        self.is_mask = additive_masks(records)
        """Whether -Inf is meant in a record: it is an additive mask, or scores that one was added to."""
        self.sites = self.codes(*SITE)
        """The same number for records of one place of the model."""
        self.roles = self._roles()
        """The same number for records of places that differ in the layer alone."""
        self.times, self._captured = _times(self.fields)
        """Number of the captured iteration, in order of attempts and iterations."""
        self.order = _order(self.fields)
        """The order of execution within the rank's iteration, from 0."""
        self.num_ranks = _num_ranks(self.sites, self.fields["rank"])
        """How many ranks have records of the same place."""
        self.has_many_ranks = np.unique(self.fields["rank"]).size > 1
        """Whether there is more than one rank."""
        self.has_many_quant_types = len(set(self.fields["quant_type"].tolist())) > 1
        """Whether quantised and other tensors are side by side, as in collections of several trainings."""
        self.has_many_stacks = len(stacks_of(records)) > 1
        """Whether layers are of several stacks, so that a number alone does not name one."""
        known = numbers_of(records, METRICS, view=self._view, engine=engine)
        self.metrics = {name: known.column(name) for name in METRICS}
        """Every one of `METRICS`; NaN where there is none."""
        self.counts = {name: self.metrics[metric].astype(np.int64) for name, metric in COUNTS.items()}
        self.counts["captured_inf"] = records.column("overflow.inf.count").astype(np.int64)
        """Those of `COUNTS`; `captured_inf`: infinities before values were rounded to what was computed with."""
        self.samples = Samples(known.owners, known.places, known.of_samples("absmax"))
        """Samples of all records."""

    def __len__(self) -> int:
        """How many records there are."""
        return len(self.sites)

    def codes(self, *names: str) -> Codes:
        """The same number for records that agree in those fields."""
        for name in names:
            if name not in self._field_codes:
                self._field_codes[name] = codes_of(self.fields[name])
        return codes_of(*(self._field_codes[name] for name in names))

    def asked(self, name: str, mask: Mask) -> Floats:
        """One of `NUMBERS` that few records are asked for: of those in the mask, and 0 of all others."""
        found, places = np.zeros(len(self)), np.flatnonzero(mask)
        if places.size:
            known = numbers_of(self.records.take(places.tolist()), [name], view=self._view, engine=self._engine)
            found[places] = known.column(name)
        return found

    def _roles(self) -> Codes:
        """Places of one role have the same path but for the number of the layer; outside of the stack there is none."""
        modules, layers = (self.fields[name] for name in ("module", "layer_idx"))
        pairs = self.codes("module", "layer_idx")
        _, firsts = np.unique(pairs, return_index=True)
        roles = np.array([role_of(str(modules[first]), int(layers[first])) for first in firsts.tolist()], dtype=object)
        others = self.codes(*(name for name in SITE if name not in {"module", "layer_idx"}))
        return codes_of(roles[pairs], layers < 0, others)

    def episodes(self, mask: Mask) -> Codes:
        """For each captured iteration with a record in the mask a number, equal where none without one is between.

        -1 for iterations without one.
        """
        has_some = np.zeros(len(self._captured), dtype=bool)
        has_some[self.times[mask]] = True
        begins = has_some & ~np.concatenate(([False], has_some[:-1]))
        return np.where(has_some, np.cumsum(begins) - 1, -1)

    @functools.cached_property
    def skipped_times(self) -> Mask:
        """For each captured iteration whether a gradient scaler skipped its step; of those alone with what is lost."""
        found, reader = np.zeros(len(self._captured), dtype=bool), self.records.reader
        # A scaler looks at no mask.
        lost = (self.counts["nan"] > 0) | ((self.counts["inf"] > 0) & ~self.is_mask)
        if not isinstance(reader, RunReader) or not lost.any():
            return found
        times, firsts = np.unique(self.times[lost], return_index=True)
        places = [
            (self.records[place].location.group.partition("/")[0], int(self.fields["iteration"][place]))
            for place in np.flatnonzero(lost)[firsts].tolist()
        ]
        found[times] = [bool(ranks) for ranks in for_each(lambda one: read_skipped_ranks(reader.backend, *one), places)]
        return found

    def when(self, place: int) -> tuple[int, int, int]:
        """When a record was made: its attempt, its iteration, and the order within its rank."""
        return int(self.fields["attempt"][place]), int(self.fields["iteration"][place]), int(self.order[place])

    def shares(self, counts: NDArray[Any]) -> Floats:
        """The part of all elements; 0 for tensors without any."""
        found: Floats = counts / np.maximum(self.metrics["elements"], 1)
        return found

    def by_site(self, mask: Mask, badness: NDArray[Any]) -> Iterator[Codes]:
        """The records of a mask, those of one place together, the worst first and equal ones in order."""
        chosen = np.flatnonzero(mask)
        yield from (chosen[part] for part in members_of(self.sites[chosen], -badness[chosen]))

    def middle_samples(self) -> Floats:
        """For each record the absmax that is the median of its samples, in binades; NaN of less than three of them."""
        found = np.full(len(self), np.nan)
        sizes = binades(self.samples.absmax)
        known = np.flatnonzero(np.isfinite(sizes))
        records = self.samples.record[known]
        chosen = sizes_of(records) >= _MIN_MIDDLE
        found[records[chosen]] = medians_of(records[chosen], sizes[known[chosen]])
        return found


def _mask(names: NDArray[Any], is_so: Callable[[str], bool]) -> Mask:
    known = {name: is_so(str(name)) for name in set(names.tolist())}
    return np.array(list(map(known.__getitem__, names.tolist())), dtype=bool)


def _num_ranks(sites: Codes, ranks: NDArray[Any]) -> Codes:
    _, firsts = np.unique(codes_of(sites, ranks), return_index=True)
    return np.bincount(sites[firsts], minlength=1)[sites] if len(sites) else sites


def _times(fields: dict[str, NDArray[Any]]) -> tuple[Codes, NDArray[Any]]:
    pairs = np.column_stack((fields["attempt"], fields["iteration"])).astype(np.int64)
    captured, times = np.unique(pairs, axis=0, return_inverse=True)
    return times.reshape(-1), captured


def _order(fields: dict[str, NDArray[Any]]) -> Codes:
    """Records come in the order of recording; `counter` decides where a selection was put together otherwise."""
    groups = codes_of(fields["attempt"], fields["iteration"], fields["rank"])
    order = np.lexsort((np.arange(groups.size), fields["counter"], groups))
    starts = np.searchsorted(groups[order], groups)
    found = np.empty(groups.size, dtype=np.int64)
    found[order] = np.arange(groups.size)
    return found - starts


_MIN_MIDDLE = 3
"""Of two samples the median is half way between them."""


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
