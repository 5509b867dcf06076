"""Gathers what all plots of a selection need to know, in one pass over its digests.

Of each record a row of metrics; of each kind of tensor the distribution of all its values; of layers how many values
lie in each binade; of samples their largest magnitude. Nothing that is kept grows with the sizes of tensors, and only
the rows and the samples grow with the number of records.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.digests import digest_columns, merge_digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.metrics import METRICS
from ranktape.analyze.engine.numbers import additive_masks
from ranktape.analyze.engine.target import Target, one_target
from ranktape.analyze.engine.values import View, viewed_dtype
from ranktape.analyze.identity import SampleName, places_of, quant_types, sample_names
from ranktape.analyze.numerics.digest import SAMPLE_METRICS
from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.analyze.replays.calls import RecordedCalls, calls_of
from ranktape.analyze.replays.replayed import Replayed, replay_calls
from ranktape.analyze.views.plots.style import plain
from ranktape.errors import NoRecordsError
from ranktape.storage.format.dtypes import dtype_row
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digest import Digest, Digests
    from ranktape.storage import Records

CELL_FIELDS = (
    *("quant_type", "dtype", "operation", "layer_type"),
    *("phase", "component", "batch_size", "tensor_name"),
)
"""Fields whose values make kinds of tensors: of each kind the distribution of all values is known."""

MAX_CELLS = 256
"""Kinds of tensors at most: where there are more, the last of the fields do not count."""

SITE_FIELDS = (
    *("iteration", "rank", "microbatch", "call", "mode", "module", "layer_type", "layer_idx"),
    *("operation", "phase", "component", "tensor_name", "shape"),
)
"""Fields that are the same for a tensor that was recorded in two quant types; modules may be named otherwise."""

COMPARED = (("hifp8", "hif8", "hifloat8"), ("mxfp8", "mxfp8_e4m3", "mxfp8_e5m2"))
"""Tags of the two quant types that the legacy tool compares."""

COUNTS = ("num_elements", "upper", "lower", "underflow", "flushed", "nan", "inf", "zero")
"""Counts of each record, against the limits of the dtype or of the format that was asked for."""

OF_DIGESTS = (
    *("mean", "std", "variance", "minimum", "maximum", "absmax", "skewness", "kurtosis", "log2_range"),
    *("overflow.absmax", "finite"),
)
"""Metrics of each record; `overflow.absmax` includes infinities."""

LOWEST, HIGHEST = -160, 135
"""Exponents of the first and the last binade, which hold what lies beyond them too; float32 has those in between."""

NUM_BINADES = HIGHEST - LOWEST + 1

MAX_COLUMNS = 4096
"""Samples that are kept apart: where ranks have more, those in one place of their batches are one."""


class PlotData:
    """A selection of records of floating-point or complex numbers, and what is known of them.

    Columns of the catalogue are there at once; the first question about values reads every record once.
    """

    def __init__(
        self,
        records: Records,
        *,
        target: Target | None = None,
        view: View | None = None,
        recipes: Sequence[Recipe] = (),
        engine: Engine | None = None,
    ) -> None:
        """Take the records of floating-point and complex numbers; those of integers and bool are left out.

        Raises:
            NoRecordsError: there are no others.
        """
        names = set(records.column("dtype").tolist())
        wanted = sorted(name for name in names if dtype_row(name).is_floating or dtype_row(name).is_complex)
        self.records = records.select(dtype=wanted) if len(wanted) < len(names) else records
        """Those that are drawn."""
        self.num_left_out = len(records) - len(self.records)
        """Records of integers and bool."""
        if not len(self.records):
            raise NoRecordsError(
                f"nothing can be drawn: all {len(records)} records are of {', '.join(sorted(names))}, and plots are "
                "of floating-point numbers; 'ranktape analyze stats' answers for others"
            )
        self.target = target
        """The format whose limits count, and its scale; those of the elements' own type if None."""
        self.view = view or View.COMPUTE
        """Which numbers are judged."""
        self.recipes = tuple(recipes)
        """The recipes in which products are computed again."""
        self._engine = engine or Engine()
        self._columns: dict[str, NDArray[Any]] = {}
        self._codes: dict[str, tuple[list[Any], NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return len(self.records)

    def column(self, field: str) -> NDArray[Any]:
        """A field of all records; `dtype` is that of the values that are judged, numbers that are missing are None.

        `layer_idx` is the place of the layer, a `LayerPlace`; `quant_type` tells sources apart, too (`quant_types`).
        """
        if field not in self._columns:
            values = self.records.column(field)
            if field == "dtype":
                pairs = zip(values.tolist(), self.records.column("compute_dtype").tolist(), strict=True)
                names = [viewed_dtype(dtype=dtype, compute_dtype=compute, view=self.view) for dtype, compute in pairs]
                values = np.array(names, dtype=object)
            elif field == "quant_type":
                values = quant_types(self.records)
            elif field == "layer_idx":
                values = np.array(places_of(self.records), dtype=object)
            elif values.dtype.kind == "f":
                whole = [None if math.isnan(value) else int(value) for value in values.tolist()]
                values = np.array(whole, dtype=object)
            self._columns[field] = values
        return self._columns[field]

    def values_of(self, field: str) -> list[Any]:
        """The values of a field that occur, in order; a missing one is the last."""
        return self._coded(field)[0]

    def codes(self, field: str) -> NDArray[np.int64]:
        """For each record the index of its value in `values_of` the field."""
        return self._coded(field)[1]

    def _coded(self, field: str) -> tuple[list[Any], NDArray[np.int64]]:
        if field not in self._codes:
            column = self.column(field).tolist()
            values = sorted(set(column), key=lambda value: (value is None, 0 if value is None else value))
            places = {value: place for place, value in enumerate(values)}
            self._codes[field] = values, np.array([places[value] for value in column], dtype=np.int64)
        return self._codes[field]

    def combined(self, *fields: str) -> tuple[list[tuple[Any, ...]], NDArray[np.int64]]:
        """The combinations of values of fields that occur, in order, and for each record the index of its own."""
        columns = np.stack([self.codes(field) for field in fields], axis=1)
        rows, numbers = np.unique(columns, axis=0, return_inverse=True)
        known = [self.values_of(field) for field in fields]
        keys = [tuple(values[code] for values, code in zip(known, row, strict=True)) for row in rows.tolist()]
        return keys, numbers.reshape(-1)

    @functools.cached_property
    def kinds(self) -> tuple[list[tuple[Any, ...]], NDArray[np.int64]]:
        """The kinds of tensors, as values of `CELL_FIELDS`, and for each record the index of its own."""
        lengths = range(len(CELL_FIELDS), 0, -1)
        found = (self.combined(*CELL_FIELDS[:length]) for length in lengths)
        return next(one for one, length in zip(found, lengths, strict=True) if len(one[0]) <= MAX_CELLS or length == 1)

    def mask(self, **fields: Any) -> NDArray[np.bool_]:
        """Which records have those values in their fields; a list holds alternatives."""
        found = np.ones(len(self), dtype=bool)
        for field, value in fields.items():
            known, codes = self._coded(field)
            found &= np.isin(codes, [place for place, one in enumerate(known) if one in _listed(value)])
        return found

    def partition(self, *fields: str, **chosen: Any) -> Hashable:
        """Equal for fields that put the same records together, in the same order of groups."""
        numbers = np.where(self.mask(**chosen), self.combined(*fields)[1], -1)
        _, firsts, places = np.unique(numbers, return_index=True, return_inverse=True)
        return (numbers < 0).tobytes(), firsts[places].tobytes()

    def operations(self) -> list[str]:
        """Forward, then the others."""
        return sorted(self.values_of("operation"), key=lambda name: (name != "forward", name))

    def gradient_names(self) -> list[str]:
        """The names of tensors that are gradients."""
        return [name for name in self.values_of("tensor_name") if name.startswith("grad_")]

    def kept_samples(self) -> set[tuple[Any, int]]:
        """Samples of tensors whose values were kept, by name and rank."""
        kept = (self.records.column("keep") == Keep.VALUES).tolist()
        rows = zip(sample_names(self.records), self.records.column("rank").tolist(), kept, strict=True)
        return {(name, rank) for names, rank, is_kept in rows if is_kept for name in names}

    def two_quant_types(self) -> tuple[str, str] | None:
        """HiFP8 and MXFP8 where both are there, else the two with the most records; None where there is one alone."""
        counts = Counter(self.column("quant_type").tolist())
        ours = [[name for name in counts if name.lower() in names] for names in COMPARED]
        if ours[0] and ours[1]:
            return ours[0][0], ours[1][0]
        if len(counts) < 2:  # noqa: PLR2004 - a pair
            return None
        first, second = sorted(sorted(counts), key=lambda name: -counts[name])[:2]
        return first, second

    def matched(self, types: tuple[str, str]) -> list[tuple[int, int]]:
        """Indices of records that are the same tensor in both quant types, by `SITE_FIELDS`, values kept of both.

        Of several with one identity in a quant type the first is taken.
        """
        fields = [self.column(field).tolist() for field in SITE_FIELDS]
        found: list[dict[Any, int]] = [{}, {}]
        kept = self.records.column("keep").tolist()
        rows = zip(zip(*fields, strict=True), self.column("quant_type").tolist(), kept, strict=True)
        for index, (site, quant_type, keep) in enumerate(rows):
            if quant_type in types and keep == Keep.VALUES:
                found[types.index(quant_type)].setdefault(site, index)
        return [(index, found[1][site]) for site, index in found[0].items() if site in found[1]]

    @functools.cached_property
    def passed(self) -> DataPass:
        """What one pass over the digests finds; the first time it is asked for, every record is read.

        Raises:
            DataError: a record's bytes are missing or damaged.
            StorageError: the store cannot be read.
            UsageError: of a record values were kept that are rounded already, and are to be looked at as seen.
        """
        found = DataPass(self)
        is_mask = additive_masks(self.records)
        for columns in digest_columns(self.records, view=self.view, engine=self._engine, is_mask=is_mask):
            found.add(columns)
        found.close()
        return found

    @functools.cached_property
    def samples(self) -> SampleColumns:
        """Every sample of the selection. Raises as `passed`."""
        return SampleColumns(self)

    @functools.cached_property
    def calls(self) -> RecordedCalls:
        """The calls of layers whose products can be computed again; from the catalogue."""
        return calls_of(self.records)

    @functools.cached_property
    def replayed(self) -> Replayed:
        """What the recipes make of the products; the first time it is asked for, operands are read.

        Raises:
            DataError: a record's bytes are missing or damaged.
            StorageError: the store cannot be read.
        """
        return replay_calls(self.records, self.recipes, engine=self._engine)

    def metric(self, name: str) -> NDArray[np.float64]:
        """One of `OF_DIGESTS` or `COUNTS` for each record; NaN where there is none."""
        return self.passed.metrics[name]

    def share(self, *names: str) -> NDArray[np.float64]:
        """The part of each record's elements that is counted under names of `COUNTS`; 0 for an empty tensor."""
        counted = sum((self.metric(name) for name in names), start=np.zeros(len(self)))
        return np.asarray(counted / np.maximum(1, self.metric("num_elements")))

    def distribution(self, **fields: Any) -> Digest | None:
        """All values of the records whose fields, some of `CELL_FIELDS`, have one of the values that are given.

        None where no record has them.
        """
        wanted = [(CELL_FIELDS.index(field), _listed(value)) for field, value in fields.items()]
        chosen = [
            self.passed.cells[index]
            for index, kind in enumerate(self.kinds[0])
            if index in self.passed.cells
            and all((kind[place] if place < len(kind) else None) in values for place, values in wanted)
        ]
        return merge_digests(chosen) if chosen else None

    def binade_shares(self, operation: str, *, with_zeros: bool = False) -> NDArray[np.float64]:
        """For each layer, in order, the part of all its elements in each binade.

        With zeros in a last column of their own. NaN where no record is, or no value is known.
        """
        number, num_layers = self.values_of("operation").index(operation), len(self.values_of("layer_idx"))
        counts = self.passed.binades[number * num_layers : (number + 1) * num_layers]
        total = counts.sum(axis=1, keepdims=True)
        wanted = counts[:, : -1 if with_zeros else -2]
        return np.where(total > 0, wanted / np.maximum(1, total), np.nan)

    def pooled(self, name: str, groups: NDArray[np.int64], *, num_groups: int) -> NDArray[np.float64]:
        """A metric of all records of each group together, for `groups` that number each record's, negative for none.

        Shares (`SHARES`) are of all elements of the group, `std` is of all its finite values; other metrics are the
        largest of a record. NaN where a group has no record, or none of which it is known.
        """
        inside = groups >= 0
        places = groups[inside]

        def total(values: NDArray[np.float64]) -> NDArray[np.float64]:
            added = np.bincount(places, weights=np.nan_to_num(values[inside]), minlength=num_groups)
            return added.astype(np.float64)

        if name in SHARES:
            counted = sum((self.metric(one) for one in SHARES[name]), start=np.zeros(len(self)))
            is_known = ~np.isnan(counted)
            elements = total(np.where(is_known, self.metric("num_elements"), 0.0))
            return np.where(total(is_known.astype(float)) > 0, total(counted) / np.maximum(1, elements), np.nan)
        if name == "std":
            sizes, own = self.metric("finite"), self.metric("mean")
            count = total(sizes)
            with np.errstate(over="ignore", invalid="ignore"):
                mean = total(sizes * own) / np.maximum(1, count)
                shifts = np.where(inside, own - mean[np.maximum(groups, 0)], 0.0)
                moment = total(sizes * (self.metric("std") ** 2 + shifts**2))
                return np.where(count > 0, np.sqrt(moment / np.maximum(1, count)), np.nan)
        return largest_of(self.metric(name), groups, num_groups=num_groups)


SHARES: Mapping[str, Sequence[str]] = {
    "overflow": ("upper", "lower"),
    **{name: (name,) for name in ("upper", "lower", "underflow", "flushed", "nan", "zero")},
}
"""Parts of a record's elements, and the counts that each is made of."""


def largest_of(values: NDArray[np.float64], groups: NDArray[np.int64], *, num_groups: int) -> NDArray[np.float64]:
    """The largest of the values of each group, NaN where there is none; negative groups are left out."""
    found = np.full(num_groups, np.nan)
    np.fmax.at(found, groups[groups >= 0], values[groups >= 0])
    return found


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | set | tuple) else [value]


class DataPass:
    """What one pass over the digests of a selection leaves."""

    def __init__(self, data: PlotData) -> None:
        num_layers = len(data.values_of("layer_idx"))
        self._target, self._kinds = data.target, data.kinds[1].tolist()
        self._rows = data.codes("operation") * num_layers + data.codes("layer_idx")
        self._start = 0
        self.metrics = {name: np.full(len(data), math.nan) for name in (*COUNTS, *OF_DIGESTS)}
        """One number for each record, NaN where there is none."""
        self.cells: dict[int, Digest] = {}
        """The distribution of each kind of tensor of which values are known."""
        self._waiting: dict[int, list[Digest]] = defaultdict(list)
        self.binades = np.zeros((len(data.values_of("operation")) * num_layers, NUM_BINADES + 2))
        """For each operation and layer how many finite values lie in each binade, [2^e, 2^(e+1)) for an exponent e; how
        many are zero; and how many are not finite."""
        self.sample_sizes = np.zeros(len(data), dtype=np.int64)
        """Samples of each record."""
        self._samples: list[NDArray[np.float64]] = []
        self.num_without_values = 0
        """Records of which statistics alone were kept."""
        self.num_rounded = 0
        """Records whose values are known as a quantile summary."""

    def add(self, columns: Digests) -> None:
        """Take in the digests of the next records."""
        part = slice(self._start, self._start + len(columns))
        self._start = part.stop
        has_values = columns.has_values
        for name in OF_DIGESTS:
            self.metrics[name][part] = METRICS[name].of_columns(columns)
        for name in COUNTS:
            self.metrics[name][part] = columns.tally(name)
        if self._target is not None:
            counted = columns.count(*self._target.limits_of(columns.end("largest_finite")))
            for name, counts in counted.items():
                self.metrics[name][part] = np.where(has_values, counts, math.nan)
        self.sample_sizes[part] = np.maximum(0, columns.sample_sizes)
        self._samples.append(columns.samples)
        self.num_without_values += int((~has_values).sum())
        self.num_rounded += int((has_values & ~columns.is_exact).sum())
        rows = self._rows[part]
        _add_binades(self.binades, np.repeat(rows, columns.sizes), columns.values, columns.counts)
        np.add.at(self.binades[:, -2], rows[has_values], columns.tally("zero")[has_values])
        lost = columns.tally("nan") + columns.tally("inf")
        np.add.at(self.binades[:, -1], rows[has_values], lost[has_values])
        for place in np.flatnonzero(has_values).tolist():
            kind = self._kinds[part.start + place]
            waiting = self._waiting[kind]
            waiting.append(columns.digest(place))
            held = self.cells[kind].values.size if kind in self.cells else 0
            # Each value is merged a few times at most, however many records there are.
            if sum(one.values.size for one in waiting) > 4 * max(held, 1 << 14):
                self._merge(kind)

    def close(self) -> None:
        """Merge what is still waiting."""
        for kind in list(self._waiting):
            self._merge(kind)

    def _merge(self, kind: int) -> None:
        parts = [*([self.cells[kind]] if kind in self.cells else []), *self._waiting.pop(kind)]
        self.cells[kind] = merge_digests(parts)

    def of_samples(self, name: str) -> NDArray[np.float64]:
        """One of `SAMPLE_METRICS` for each sample of each record."""
        column = SAMPLE_METRICS.index(name)
        return np.concatenate([samples[:, column] for samples in self._samples])


def _add_binades(
    binades: NDArray[np.float64], rows: NDArray[np.int64], values: NDArray[np.float64], counts: NDArray[np.int64]
) -> None:
    """Count finite values other than zero in rows of binades."""
    is_wanted = np.isfinite(values) & (values != 0)
    # frexp has mantissas from 0.5 to 1, and is exact for subnormals too.
    places = np.clip(np.frexp(values[is_wanted])[1] - 1, LOWEST, HIGHEST) - LOWEST
    cells = rows[is_wanted] * binades.shape[1] + places
    binades += np.bincount(cells, weights=counts[is_wanted], minlength=binades.size).reshape(binades.shape)


def binade_counts(digest: Digest) -> NDArray[np.float64]:
    """How many finite magnitudes other than zero lie in each binade from `LOWEST` to `HIGHEST`."""
    found = np.zeros((1, NUM_BINADES))
    _add_binades(found, np.zeros(digest.values.size, dtype=np.int64), digest.values, digest.counts)
    return found.reshape(-1)


def exponents() -> NDArray[np.int64]:
    """The exponent of each binade."""
    return np.arange(LOWEST, HIGHEST + 1)


def filled(counts: NDArray[np.float64]) -> slice:
    """From the first binade that holds anything, in any row, to the last; all empty ones give a few about 2^0."""
    held = np.flatnonzero(counts.reshape(-1, counts.shape[-1]).any(axis=0))
    return slice(int(held[0]), int(held[-1]) + 1) if held.size else slice(-LOWEST - 2, -LOWEST + 3)


class SampleColumns:
    """Every sample of a selection, as columns.

    A sample is known by the id that the user gave it; without ids by its rank and its index in the batch, as ranks have
    batches of their own.
    """

    def __init__(self, data: PlotData) -> None:
        records, found = data.records, data.passed
        owners = np.repeat(np.arange(len(data)), found.sample_sizes)
        names, ranks = sample_names(records), records.column("rank").tolist()
        has_ids = [
            text != "null" and not _are_indices(own)
            for text, own in zip(records.column("sample_ids").tolist(), names, strict=True)
        ]
        unnamed = {
            (rank, one)
            for own, rank, is_named in zip(names, ranks, has_ids, strict=True)
            if not is_named
            for one in own
        }
        self.is_by_rank = len({rank for rank, _ in unnamed}) > 1 and len(unnamed) <= MAX_COLUMNS
        """Whether samples without ids are told apart by their rank."""
        keys: list[tuple[int | None, SampleName]] = [
            (ranks[place] if self.is_by_rank and not has_ids[place] else None, name)
            for place in np.flatnonzero(found.sample_sizes).tolist()
            for name in names[place]
        ]
        self.keys = sorted(set(keys), key=lambda key: (key[0] is None, key[0] or 0, isinstance(key[1], str), key[1]))
        """Rank, or None, and id or index of each sample: by rank and index, then by id; numbers before words."""
        columns = {key: column for column, key in enumerate(self.keys)}
        self._columns = np.array([columns[key] for key in keys], dtype=np.int64)
        self._operations, self._layers = data.codes("operation")[owners], data.codes("layer_idx")[owners]
        self._operation_names, self._num_layers = data.values_of("operation"), len(data.values_of("layer_idx"))
        self._absmax, self._has_nan = found.of_samples("absmax"), found.of_samples("nan") > 0
        medians = np.full(len(data), np.nan)
        for place, own in enumerate(np.split(self._absmax, np.cumsum(found.sample_sizes)[:-1])):
            if np.isfinite(own).any():
                medians[place] = np.nanmedian(own)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log2(self._absmax) - np.log2(medians[owners])
        self._logs = np.where(np.isfinite(logs), logs, np.nan)

    def labels(self) -> tuple[list[str], str]:
        """What samples are called, and the label of an axis of them: the user's ids, or rank and index, or index."""
        names = [plain(one, max_letters=12) if rank is None else f"{rank}:{one}" for rank, one in self.keys]
        return names, "rank : place in the batch" if self.is_by_rank else "sample"

    def _cells(self, operation: str) -> NDArray[np.int64]:
        cells = self._layers * len(self.keys) + self._columns
        return np.where(self._operations == self._operation_names.index(operation), cells, -1)

    def grid(self, operation: str) -> NDArray[np.float64]:
        """The largest finite magnitude of each layer and sample; NaN if there is none."""
        size = self._num_layers * len(self.keys)
        return largest_of(self._absmax, self._cells(operation), num_groups=size).reshape(self._num_layers, -1)

    def has_nan(self, operation: str) -> NDArray[np.bool_]:
        """For each layer and sample whether values are NaN."""
        found = np.zeros(self._num_layers * len(self.keys), dtype=bool)
        cells = self._cells(operation)[self._has_nan]
        found[cells[cells >= 0]] = True
        return found.reshape(self._num_layers, -1)

    def ratios(self, operation: str) -> NDArray[np.float64]:
        """For each sample mean, lowest and highest log2 of its absmax over the median sample's of the tensor.

        NaN where nothing is known.
        """
        chosen = (self._operations == self._operation_names.index(operation)) & ~np.isnan(self._logs)
        columns, logs = self._columns[chosen], self._logs[chosen]
        low, high = np.full(len(self.keys), np.inf), np.full(len(self.keys), -np.inf)
        np.minimum.at(low, columns, logs)
        np.maximum.at(high, columns, logs)
        counts = np.bincount(columns, minlength=len(self.keys))
        means = np.bincount(columns, weights=logs, minlength=len(self.keys)) / np.maximum(1, counts)
        return np.where(counts[:, np.newaxis] > 0, np.stack([means, low, high], axis=1), np.nan)


def _are_indices(names: Sequence[SampleName]) -> bool:
    """Whether names may be indices in a batch: of all of it, or of one sample that was saved alone."""
    return list(names) == list(range(len(names))) or (len(names) == 1 and isinstance(names[0], int))


DEFAULT_FORMAT = "fp8_e4m3"
"""The format whose overflow and underflow are drawn where none is named."""


def default_target(records: Records) -> Target | None:
    """That format with a scale for each tensor.

    None where everything was captured in types of eight bits, whose own limits count then. A wider type holds nearly
    everything that a training computes: plots against its own limits would be empty.
    """
    names = set(records.column("dtype").tolist())
    return one_target(DEFAULT_FORMAT) if any(dtype_row(name).itemsize > 1 for name in names) else None
