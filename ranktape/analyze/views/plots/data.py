"""Gathers what all plots of a selection need to know, in one pass over its digests.

Of each record a row of metrics; of each kind of tensor the distribution of all its values; of layers
and ranks how many values lie in each binade; of samples their metrics. What is kept does not grow with the tensors'
sizes, and but for the rows not with their number.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.digests import merge_digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View, viewed_dtype
from ranktape.analyze.identity import places_of, quant_types, sample_names
from ranktape.analyze.metrics.gather import gather
from ranktape.analyze.metrics.metric import METRICS
from ranktape.analyze.metrics.target import Target, one_target
from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.analyze.replays.calls import RecordedCalls, calls_of
from ranktape.analyze.replays.replayed import Replayed, replay_calls
from ranktape.analyze.views.plots.tallies import HIGHEST, LOWEST, SampleMetrics, binade_counts
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
"""Fields whose values make kinds of tensors: of each kind the distribution of all values is kept."""

MAX_CELLS = 256
"""Kinds of tensors at most: where there are more, the last of the fields do not count."""

SITE_FIELDS = (
    *("iteration", "rank", "microbatch", "call", "mode", "module", "layer_type", "layer_idx"),
    *("operation", "phase", "component", "tensor_name", "shape"),
)
"""What is the same of a tensor that was recorded in two quant types; modules may be named otherwise."""

COMPARED = (("hifp8", "hif8", "hifloat8"), ("mxfp8", "mxfp8_e4m3", "mxfp8_e5m2"))
"""Tags of the two quant types that the legacy tool compares."""

COUNTS = ("num_elements", "upper", "lower", "underflow", "flushed", "nan", "inf", "zero")
"""What is counted in each row, against the limits of the dtype or of the format that was asked for."""

OF_DIGEST: Mapping[str, Callable[[Digest], float | None]] = {
    **{name: METRICS[name].of for name in ("mean", "std", "variance", "minimum", "maximum", "absmax")},
    **{name: METRICS[name].of for name in ("skewness", "kurtosis", "log2_range")},
    # With infinities.
    "extreme": METRICS["overflow.absmax"].of,
    # The deviation of several records together follows from it.
    "num_finite": lambda digest: digest.statistics.num_finite,
}
"""Metrics that each row has, and how they follow from a digest."""


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
        """Take the records of numbers that formats are sought for; those of integers and bool are left out.

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
        """In which products are computed again."""
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
        """Of each record the place of its value in `values_of` the field."""
        return self._coded(field)[1]

    def _coded(self, field: str) -> tuple[list[Any], NDArray[np.int64]]:
        if field not in self._codes:
            column = self.column(field).tolist()
            values = sorted(set(column), key=lambda value: (value is None, 0 if value is None else value))
            places = {value: place for place, value in enumerate(values)}
            self._codes[field] = values, np.array([places[value] for value in column], dtype=np.int64)
        return self._codes[field]

    def combined(self, *fields: str) -> tuple[list[tuple[Any, ...]], NDArray[np.int64]]:
        """The combinations of values of fields that occur, in order, and of each record which it has."""
        columns = np.stack([self.codes(field) for field in fields], axis=1)
        rows, numbers = np.unique(columns, axis=0, return_inverse=True)
        known = [self.values_of(field) for field in fields]
        keys = [tuple(values[code] for values, code in zip(known, row, strict=True)) for row in rows.tolist()]
        return keys, numbers.reshape(-1)

    @functools.cached_property
    def kinds(self) -> tuple[list[tuple[Any, ...]], NDArray[np.int64]]:
        """The kinds of tensors, as values of `CELL_FIELDS`, and of each record which it is of; from the catalogue."""
        lengths = range(len(CELL_FIELDS), 0, -1)
        found = (self.combined(*CELL_FIELDS[:length]) for length in lengths)
        return next(one for one, length in zip(found, lengths, strict=True) if len(one[0]) <= MAX_CELLS or length == 1)

    @functools.cached_property
    def passed(self) -> DataPass:
        """What one pass over the values finds; the first time it is asked for, every record is read.

        Raises:
            DataError: a record's bytes are missing or damaged.
            StorageError: the store cannot be read.
            UsageError: of a record values were kept that are rounded already, and are to be looked at as seen.
        """
        found = DataPass(self)
        found.metrics |= gather(self.records, OF_DIGEST, view=self.view, engine=self._engine, on_digest=found.add)
        found.close()
        return found

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
        """A metric of `OF_DIGEST` or `COUNTS` for each record; NaN where there is none."""
        return self.passed.metrics[name]

    def share(self, *names: str) -> NDArray[np.float64]:
        """What part of each record's elements is counted under names of `COUNTS`; 0 of an empty tensor."""
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

    def partition(self, *fields: str, **chosen: Any) -> Hashable:
        """The same for fields that put the same records together, whatever their values are called."""
        numbers = np.where(self.mask(**chosen), self.combined(*fields)[1], -1)
        # By the order in which groups come.
        _, firsts, places = np.unique(numbers, return_index=True, return_inverse=True)
        return (numbers < 0).tobytes(), firsts[places].tobytes()

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
        """Places of records that are the same tensor in both quant types, by `SITE_FIELDS`, values kept of both.

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

    def mask(self, **fields: Any) -> NDArray[np.bool_]:
        """Which records have those values in their fields; a list holds alternatives."""
        found = np.ones(len(self), dtype=bool)
        for field, value in fields.items():
            known, codes = self._coded(field)
            found &= np.isin(codes, [place for place, one in enumerate(known) if one in _listed(value)])
        return found


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | set | tuple) else [value]


class Binades:
    """Counts of finite magnitudes by binade, [2^e, 2^(e+1)) for an exponent e, by operation and layer."""

    def __init__(self, data: PlotData) -> None:
        self._operations, self._num_values = data.values_of("operation"), len(data.values_of("layer_idx"))
        self._row_of = data.codes("operation") * self._num_values + data.codes("layer_idx")
        # Zeros, and what is not finite, are behind the binades.
        self._counts = np.zeros((len(self._operations) * self._num_values, HIGHEST - LOWEST + 3))

    def add(self, index: int, digest: Digest) -> None:
        """Add the values of the record in that place."""
        row = self._counts[self._row_of[index]]
        row[:-2] += binade_counts(digest)
        row[-2:] += digest.tallies.zero, digest.tallies.nan + digest.tallies.inf

    def shares(self, operation: str, *, with_zeros: bool = False) -> NDArray[np.float64]:
        """For each layer, in order, the part of all its elements in each binade.

        With zeros in a column of their own behind. NaN where no record is, or no value is known.
        """
        start = self._operations.index(operation) * self._num_values
        counts = self._counts[start : start + self._num_values]
        total = counts.sum(axis=1, keepdims=True)
        wanted = counts[:, : -1 if with_zeros else -2]
        return np.where(total > 0, wanted / np.maximum(1, total), np.nan)


class DataPass:
    """What one pass over the digests of a selection leaves."""

    def __init__(self, data: PlotData) -> None:
        self._target = data.target
        self._kinds = data.kinds[1].tolist()
        self.metrics: dict[str, NDArray[np.float64]] = {name: np.full(len(data), math.nan) for name in COUNTS}
        """One number for each record, NaN where there is none: of `COUNTS` and, after the pass, of `OF_DIGEST`."""
        self.cells: dict[int, Digest] = {}
        """The distribution of each kind of tensor of which values are known."""
        self._pending: dict[int, list[Digest]] = {}
        self.binades = Binades(data)
        """How many values lie in each binade, for each operation and layer."""
        self.samples = SampleMetrics(data.records, layers=data.column("layer_idx").tolist())
        """Metrics of samples."""
        self.num_without_values = 0
        """Records of which statistics alone were kept."""
        self.num_rounded = 0
        """Records whose values are known as a quantile summary."""

    def add(self, index: int, digest: Digest) -> None:
        """Take in the digest of the record in that place."""
        tallies = digest.tallies
        if self._target is not None:
            tallies = digest.count(self._target.limits(largest=tallies.largest_finite))
        for name in COUNTS:
            if digest.has_values or self._target is None or name in {"num_elements", "nan", "inf", "zero"}:
                self.metrics[name][index] = getattr(tallies, name)
        self.samples.add(index, digest)
        if not digest.has_values:
            self.num_without_values += 1
            return
        self.num_rounded += not digest.is_exact
        self.binades.add(index, digest)
        kind = self._kinds[index]
        waiting = self._pending.setdefault(kind, [])
        waiting.append(digest)
        held = self.cells[kind].values.size if kind in self.cells else 0
        # Each value is merged a few times at most, however many records there are.
        if sum(one.values.size for one in waiting) > 4 * max(held, 1 << 14):
            self._merge(kind)

    def close(self) -> None:
        """Merge what is still waiting."""
        for kind in list(self._pending):
            self._merge(kind)

    def _merge(self, kind: int) -> None:
        parts = [*([self.cells[kind]] if kind in self.cells else []), *self._pending.pop(kind)]
        self.cells[kind] = merge_digests(parts)


DEFAULT_FORMAT = "fp8_e4m3"
"""Against which overflow and underflow are drawn where no format is named."""


def default_target(records: Records) -> Target | None:
    """That format with a scale for each tensor.

    None where everything was captured in types of eight bits, whose own limits count then. A wider type holds nearly
    everything that a training computes: plots against its own limits would be empty.
    """
    names = set(records.column("dtype").tolist())
    return one_target(DEFAULT_FORMAT) if any(dtype_row(name).itemsize > 1 for name in names) else None
