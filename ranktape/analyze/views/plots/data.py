"""Collects the data for all plots of a selection, in one pass over its digests.

The data are the metrics of each record, the distribution of all values of each kind of tensor, the number of values of
each layer in each binade, and the largest magnitude of each sample. Their size does not depend on the sizes of tensors,
and only the metrics and samples grow with the number of records.
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
from ranktape.analyze.engine.target import Target, parse_target
from ranktape.analyze.engine.values import View, viewed_dtype
from ranktape.analyze.identity import SampleName, places_of, quant_types, sample_names
from ranktape.analyze.numerics.digest import SAMPLE_METRICS
from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.analyze.replays.calls import RecordedCalls, select_calls
from ranktape.analyze.replays.replayed import Replayed, replay_calls
from ranktape.analyze.views.plots.style import plain
from ranktape.errors import NoRecordsError
from ranktape.storage.format.dtypes import dtype_row
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digest import Digest
    from ranktape.storage import Records

CELL_FIELDS = (
    *("quant_type", "dtype", "operation", "layer_type"),
    *("phase", "component", "batch_size", "tensor_name"),
)
"""The fields that define the kinds of tensors. Each kind has a distribution of all its values."""

MAX_CELLS = 256
"""The largest number of kinds. If there are more, the last fields are ignored."""

SITE_FIELDS = (
    *("iteration", "rank", "microbatch", "call", "mode", "module", "layer_type", "layer_idx"),
    *("operation", "phase", "component", "tensor_name", "shape"),
)
"""The fields that identify a tensor that was recorded in two quant types."""

COMPARED = (("hifp8", "hif8", "hifloat8"), ("mxfp8", "mxfp8_e4m3", "mxfp8_e5m2"))
"""The tags of the two quant types that the legacy tool compares."""

COUNTS = ("num_elements", "upper", "lower", "underflow", "flushed", "nan", "inf", "zero")
"""The counts of each record, relative to the limits of the dtype or of the target format."""

OF_DIGESTS = (
    *("mean", "std", "variance", "minimum", "maximum", "absmax", "skewness", "kurtosis", "log2_range"),
    *("overflow.absmax", "finite"),
)
"""The metrics of each record; `overflow.absmax` includes infinities."""

LOWEST, HIGHEST = -160, 135
"""The exponents of the first and the last binade, which also count values beyond them. They include all of float32."""

NUM_BINADES = HIGHEST - LOWEST + 1

MAX_COLUMNS = 4096
"""The largest number of samples that are separated by rank. If there are more, samples with one index are combined."""


class PlotData:
    """The floating-point and complex records of a selection, with their data.

    Columns of the catalogue are available at once; the first access to data about values reads every record once.
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
        """Select the records of floating-point and complex numbers, without those of integers and bool.

        Raises:
            NoRecordsError: there is no such record.
        """
        names = set(records.column("dtype").tolist())
        wanted = sorted(name for name in names if dtype_row(name).is_floating or dtype_row(name).is_complex)
        self.records = records.select(dtype=wanted) if len(wanted) < len(names) else records
        """The records that are drawn."""
        self.num_left_out = len(records) - len(self.records)
        """Number of records of integers and bool."""
        if not len(self.records):
            raise NoRecordsError(
                f"nothing can be drawn: all {len(records)} records have dtype {', '.join(sorted(names))}, but plots "
                "need floating-point numbers; use 'ranktape analyze stats' instead"
            )
        self.target = target
        """The format whose limits apply, with its scale; if None, the limits of the elements' dtype apply."""
        self.view = view or View.COMPUTE
        """The view of the values."""
        self.recipes = tuple(recipes)
        """The recipes in which products are computed again."""
        self._engine = engine or Engine()
        self._columns: dict[str, NDArray[Any]] = {}
        self._codes: dict[str, tuple[list[Any], NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return len(self.records)

    def column(self, field: str) -> NDArray[Any]:
        """A field of all records; `dtype` is that of the view, and missing numbers are None.

        `layer_idx` is a `LayerPosition`, and `quant_type` also distinguishes sources (see `quant_types`).
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
        """The distinct values of a field in order; None is the last."""
        return self._coded(field)[0]

    def codes(self, field: str) -> NDArray[np.int64]:
        """For each record, the index of its value in `values_of(field)`."""
        return self._coded(field)[1]

    def _coded(self, field: str) -> tuple[list[Any], NDArray[np.int64]]:
        if field not in self._codes:
            column = self.column(field).tolist()
            values = sorted(set(column), key=lambda value: (value is None, 0 if value is None else value))
            places = {value: place for place, value in enumerate(values)}
            self._codes[field] = values, np.array([places[value] for value in column], dtype=np.int64)
        return self._codes[field]

    def combined(self, *fields: str) -> tuple[list[tuple[Any, ...]], NDArray[np.int64]]:
        """The distinct combinations of values of fields in order, and for each record the index of its combination."""
        rows, numbers = np.unique(
            np.stack([self.codes(field) for field in fields], axis=1), axis=0, return_inverse=True
        )
        known = [self.values_of(field) for field in fields]
        keys = [tuple(values[code] for values, code in zip(known, row, strict=True)) for row in rows.tolist()]
        return keys, numbers.reshape(-1)

    @functools.cached_property
    def kinds(self) -> tuple[list[tuple[Any, ...]], NDArray[np.int64]]:
        """The kinds of tensors, as values of `CELL_FIELDS`, and for each record the index of its kind."""
        fields: tuple[str, ...] = CELL_FIELDS
        while len((found := self.combined(*fields))[0]) > MAX_CELLS and len(fields) > 1:
            fields = fields[:-1]
        return found

    def mask(self, **fields: Any) -> NDArray[np.bool_]:
        """Whether each record has these values in its fields; a list contains alternatives."""
        found = np.ones(len(self), dtype=bool)
        for field, value in fields.items():
            known, codes = self._coded(field)
            found &= np.isin(codes, [place for place, one in enumerate(known) if one in _listed(value)])
        return found

    def partition(self, *fields: str, **chosen: Any) -> Hashable:
        """A key that is equal for fields that divide the records into the same groups."""
        numbers = np.where(self.mask(**chosen), self.combined(*fields)[1], -1)
        _, firsts, places = np.unique(numbers, return_index=True, return_inverse=True)
        return (numbers < 0).tobytes(), firsts[places].tobytes()

    def operations(self) -> list[str]:
        """The operations, forward first."""
        return sorted(self.values_of("operation"), key=lambda name: (name != "forward", name))

    def gradient_names(self) -> list[str]:
        """The names of tensors that are gradients."""
        return [name for name in self.values_of("tensor_name") if name.startswith("grad_")]

    def kept_samples(self) -> set[tuple[Any, int]]:
        """The samples of tensors with stored values, by name and rank."""
        columns = sample_names(self.records), *(self.records.column(field).tolist() for field in ("rank", "keep"))
        return {
            (name, rank) for names, rank, keep in zip(*columns, strict=True) if keep == Keep.VALUES for name in names
        }

    def two_quant_types(self) -> tuple[str, str] | None:
        """HiFP8 and MXFP8 if both occur, else the two quant types with the most records; None if there is only one."""
        counts = Counter(self.column("quant_type").tolist())
        ours = [[name for name in counts if name.lower() in names] for names in COMPARED]
        if all(ours):
            return ours[0][0], ours[1][0]
        first, second, *_ = *sorted(sorted(counts), key=lambda name: -counts[name]), None
        return None if second is None else (first, second)

    def matched(self, types: tuple[str, str]) -> list[tuple[int, int]]:
        """Pairs of indices of records of a tensor in both quant types, by `SITE_FIELDS`, with stored values.

        If several records of a quant type have the same fields, the first one is used.
        """
        found: list[dict[Any, int]] = [{}, {}]
        columns = (self.column(field).tolist() for field in ("quant_type", "keep", *SITE_FIELDS))
        for index, (quant_type, keep, *site) in enumerate(zip(*columns, strict=True)):
            if quant_type in types and keep == Keep.VALUES:
                found[types.index(quant_type)].setdefault(tuple(site), index)
        return [(index, found[1][site]) for site, index in found[0].items() if site in found[1]]

    @functools.cached_property
    def passed(self) -> DataPass:
        """The results of a pass over the digests; the first access reads every record."""
        return DataPass(self, engine=self._engine)

    @functools.cached_property
    def samples(self) -> SampleColumns:
        """Every sample of the selection."""
        return SampleColumns(self)

    @functools.cached_property
    def calls(self) -> RecordedCalls:
        """The calls of layers whose products can be computed again, according to the catalogue."""
        return select_calls(self.records)

    @functools.cached_property
    def replayed(self) -> Replayed:
        """The products in the recipes; the first access reads the operands."""
        return replay_calls(self.records, self.recipes, engine=self._engine)

    def metric(self, name: str) -> NDArray[np.float64]:
        """One of `OF_DIGESTS` or `COUNTS` for each record; NaN if a record does not have it."""
        return self.passed.metrics[name]

    def _counted(self, names: Sequence[str]) -> NDArray[np.float64]:
        return sum((self.metric(name) for name in names), start=np.zeros(len(self)))

    def share(self, name: str) -> NDArray[np.float64]:
        """One of `SHARES` for each record; 0 for an empty tensor."""
        return np.asarray(self._counted(SHARES[name]) / np.maximum(1, self.metric("num_elements")))

    def distribution(self, **fields: Any) -> Digest | None:
        """The digest of all records with the given values in their fields, which are some of `CELL_FIELDS`.

        None if no such record has values.
        """
        wanted = [(CELL_FIELDS.index(field), _listed(value)) for field, value in fields.items()]
        kinds, known = self.kinds[0], self.passed.cells
        chosen = [
            known[index]
            for index in sorted(known)
            if all(dict(enumerate(kinds[index])).get(place) in values for place, values in wanted)
        ]
        return merge_digests(chosen) if chosen else None

    def binade_shares(self, operation: str, *, with_zeros: bool = False) -> NDArray[np.float64]:
        """For each layer, in order, the share of its elements in each binade.

        If `with_zeros`, the last column has the share of zeros. NaN if a layer has no records with values.
        """
        number, num_layers = self.values_of("operation").index(operation), len(self.values_of("layer_idx"))
        counts = self.passed.binades[number * num_layers : (number + 1) * num_layers]
        total = counts.sum(axis=1, keepdims=True)
        return np.where(total > 0, counts[:, : -1 if with_zeros else -2] / np.maximum(1, total), np.nan)

    def pooled(self, name: str, groups: NDArray[np.int64], *, num_groups: int) -> NDArray[np.float64]:
        """A metric of each group of records; `groups` has the number of each record's group, negative for none.

        Shares (`SHARES`) are relative to all elements of the group, and `std` is that of all its finite values; other
        metrics are the largest of any record. NaN if no record of a group has the metric.
        """
        inside = groups >= 0

        def total(values: NDArray[np.float64]) -> NDArray[np.float64]:
            weights = np.nan_to_num(values[inside])
            return np.bincount(groups[inside], weights=weights, minlength=num_groups).astype(np.float64)

        if name in SHARES:
            counted = self._counted(SHARES[name])
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
"""The shares of a record's elements, with the counts that are added up for each."""


def largest_of(values: NDArray[np.float64], groups: NDArray[np.int64], *, num_groups: int) -> NDArray[np.float64]:
    """The largest value of each group, NaN if it has none; values with a negative group are ignored."""
    found = np.full(num_groups, np.nan)
    np.fmax.at(found, groups[groups >= 0], values[groups >= 0])
    return found


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | set | tuple) else [value]


class DataPass:
    """The results of one pass over the digests of a selection."""

    def __init__(self, data: PlotData, *, engine: Engine) -> None:
        num_layers = len(data.values_of("layer_idx"))
        self.metrics = {name: np.full(len(data), math.nan) for name in (*COUNTS, *OF_DIGESTS)}
        """The metrics by name, with a number for each record, NaN if there is none."""
        self.binades = np.zeros((len(data.values_of("operation")) * num_layers, NUM_BINADES + 2))
        """For each operation and layer, the number of finite values in each binade, [2^e, 2^(e+1)) for an exponent e;
        the last two columns have the numbers of zeros and of values that are not finite."""
        self.num_without_values = 0
        """Number of records that store only statistics."""
        self.num_rounded = 0
        """Number of records whose values are only available as a quantile summary."""
        rows_of, kinds = data.codes("operation") * num_layers + data.codes("layer_idx"), data.kinds[1].tolist()
        parts: defaultdict[int, list[Digest]] = defaultdict(list)
        sizes: Counter[int] = Counter()
        samples, sample_sizes = [], []
        start, is_mask = 0, additive_masks(data.records)
        for columns in digest_columns(data.records, view=data.view, engine=engine, is_mask=is_mask):
            part = slice(start, start + len(columns))
            start, has_values, rows = part.stop, columns.has_values, rows_of[part]
            for name in OF_DIGESTS:
                self.metrics[name][part] = METRICS[name].compute(columns)
            for name in COUNTS:
                self.metrics[name][part] = columns.tally(name)
            if data.target is not None:
                counted = columns.count(*data.target.limits_of(columns.end("largest_finite")))
                for name, counts in counted.items():
                    self.metrics[name][part] = np.where(has_values, counts, math.nan)
            sample_sizes.append(np.maximum(0, columns.sample_sizes))
            samples.append(columns.samples)
            self.num_without_values += int((~has_values).sum())
            self.num_rounded += int((has_values & ~columns.is_exact).sum())
            _add_binades(self.binades, np.repeat(rows, columns.sizes), columns.values, columns.counts)
            for place, lost in ((-2, columns.tally("zero")), (-1, columns.tally("nan") + columns.tally("inf"))):
                np.add.at(self.binades[:, place], rows[has_values], lost[has_values])
            for place in np.flatnonzero(has_values).tolist():
                kind = kinds[part.start + place]
                parts[kind].append(columns.digest(place))
                sizes[kind] += parts[kind][-1].values.size
                # Merges so that each value is merged only a few times, for any number of records.
                if sizes[kind] > 4 * max(parts[kind][0].values.size, 1 << 14):
                    parts[kind], sizes[kind] = [merge_digests(parts[kind])], 0
        self.cells = {kind: merge_digests(own) for kind, own in parts.items()}
        """The distribution of each kind of tensor that has values."""
        self.sample_sizes = np.concatenate(sample_sizes)
        """Number of samples of each record."""
        self.samples = np.concatenate(samples)
        """`SAMPLE_METRICS` of each sample of each record."""


def _add_binades(
    binades: NDArray[np.float64], rows: NDArray[np.int64], values: NDArray[np.float64], counts: NDArray[np.int64]
) -> None:
    """Add finite nonzero values to the rows of binades."""
    is_wanted = np.isfinite(values) & (values != 0)
    # Mantissas of frexp are in [0.5, 1). It is exact for subnormals, too.
    places = np.clip(np.frexp(values[is_wanted])[1] - 1, LOWEST, HIGHEST) - LOWEST
    cells = rows[is_wanted] * binades.shape[1] + places
    binades += np.bincount(cells, weights=counts[is_wanted], minlength=binades.size).reshape(binades.shape)


def binade_counts(digest: Digest) -> NDArray[np.float64]:
    """The number of finite nonzero magnitudes in each binade from `LOWEST` to `HIGHEST`."""
    found = np.zeros((1, NUM_BINADES))
    _add_binades(found, np.zeros(digest.values.size, dtype=np.int64), digest.values, digest.counts)
    return found.reshape(-1)


def exponents() -> NDArray[np.int64]:
    """The exponent of each binade."""
    return np.arange(LOWEST, HIGHEST + 1)


def filled(counts: NDArray[np.float64]) -> slice:
    """The range of binades from the first to the last with a nonzero count in any row; without any, a few about 2^0."""
    held = np.flatnonzero(counts.reshape(-1, counts.shape[-1]).any(axis=0))
    return slice(int(held[0]), int(held[-1]) + 1) if held.size else slice(-LOWEST - 2, -LOWEST + 3)


class SampleColumns:
    """Every sample of a selection, as columns.

    A sample is identified by the ID that the user gave it; without IDs, by its rank and its index in the batch, since
    each rank has its own batches.
    """

    def __init__(self, data: PlotData) -> None:
        records, found = data.records, data.passed
        names, ranks = sample_names(records), records.column("rank").tolist()
        has_ids = [
            text != "null" and not _are_indices(own)
            for text, own in zip(records.column("sample_ids").tolist(), names, strict=True)
        ]
        rows = zip(names, ranks, has_ids, strict=True)
        unnamed = {(rank, one) for own, rank, is_named in rows if not is_named for one in own}
        self.is_by_rank = len({rank for rank, _ in unnamed}) > 1 and len(unnamed) <= MAX_COLUMNS
        """Whether samples without IDs are distinguished by rank."""
        keys: list[tuple[int | None, SampleName]] = [
            (ranks[place] if self.is_by_rank and not has_ids[place] else None, name)
            for place in np.flatnonzero(found.sample_sizes).tolist()
            for name in names[place]
        ]
        self.keys = sorted(set(keys), key=lambda key: (key[0] is None, key[0] or 0, isinstance(key[1], str), key[1]))
        """Rank or None, and ID or index, of each sample: by rank and index, then by ID; numbers before texts."""
        columns = {key: column for column, key in enumerate(self.keys)}
        self._columns = np.array([columns[key] for key in keys], dtype=np.int64)
        owners = np.repeat(np.arange(len(data)), found.sample_sizes)
        self._operations, self._layers = data.codes("operation")[owners], data.codes("layer_idx")[owners]
        self._operation_names, self._num_layers = data.values_of("operation"), len(data.values_of("layer_idx"))
        self._absmax = found.samples[:, SAMPLE_METRICS.index("absmax")]
        self._num_nan = found.samples[:, SAMPLE_METRICS.index("nan")]
        medians = np.full(len(data), np.nan)
        for place, own in enumerate(np.split(self._absmax, np.cumsum(found.sample_sizes)[:-1])):
            if np.isfinite(own).any():
                medians[place] = np.nanmedian(own)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log2(self._absmax) - np.log2(medians[owners])
        self._logs = np.where(np.isfinite(logs), logs, np.nan)

    def labels(self) -> tuple[list[str], str]:
        """The labels of samples (ID, or rank and index, or index), and the label of their axis."""
        names = [plain(one, max_letters=12) if rank is None else f"{rank}:{one}" for rank, one in self.keys]
        return names, "rank : index in the batch" if self.is_by_rank else "sample"

    def _is_of(self, operation: str) -> NDArray[np.bool_]:
        return np.asarray(self._operations == self._operation_names.index(operation))

    def _largest(self, column: NDArray[np.float64], operation: str) -> NDArray[np.float64]:
        shape = self._num_layers, len(self.keys)
        cells = np.where(self._is_of(operation), self._layers * shape[1] + self._columns, -1)
        return largest_of(column, cells, num_groups=shape[0] * shape[1]).reshape(shape)

    def grid(self, operation: str) -> NDArray[np.float64]:
        """The largest finite magnitude of each layer and sample; NaN if there is none."""
        return self._largest(self._absmax, operation)

    def has_nan(self, operation: str) -> NDArray[np.bool_]:
        """For each layer and sample, whether it has NaN."""
        return self._largest(self._num_nan, operation) > 0

    def ratios(self, operation: str) -> NDArray[np.float64]:
        """For each sample, the mean, lowest and highest base-2 logarithm of its absmax over that of the median sample.

        NaN if there is no finite value.
        """
        chosen = self._is_of(operation) & ~np.isnan(self._logs)
        columns, logs, size = self._columns[chosen], self._logs[chosen], len(self.keys)
        low, high = (-largest_of(-logs, columns, num_groups=size), largest_of(logs, columns, num_groups=size))
        counts = np.bincount(columns, minlength=size)
        means = np.bincount(columns, weights=logs, minlength=size) / np.maximum(1, counts)
        return np.stack([np.where(counts > 0, means, np.nan), low, high], axis=1)


def _are_indices(names: Sequence[SampleName]) -> bool:
    """Whether names can be indices in a batch: all of them, or that of one sample that was saved alone."""
    return list(names) == list(range(len(names))) or (len(names) == 1 and isinstance(names[0], int))


DEFAULT_FORMAT = "fp8_e4m3"
"""The format whose overflow and underflow are drawn by default."""


def default_target(records: Records) -> Target | None:
    """The default format, with a scale for each tensor.

    None if all records have 8-bit dtypes, whose own limits apply then. Wider dtypes can represent nearly all values of
    a training, so plots of their own limits would be empty.
    """
    names = set(records.column("dtype").tolist())
    return parse_target(DEFAULT_FORMAT) if any(dtype_row(name).itemsize > 1 for name in names) else None
