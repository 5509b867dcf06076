"""Gathers what is known of all records of a selection before anything is judged: who they are, and their metrics.

One pass over the digests, which are small and kept; every kind of finding is then a question to columns of numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.values import View, viewed_dtype
from ranktape.analyze.findings.peers import codes_of, medians_of, octaves, sizes_of
from ranktape.analyze.identity import IDENTITY
from ranktape.analyze.layer_stacks import stacks_of
from ranktape.analyze.metrics.gather import gather
from ranktape.analyze.metrics.metric import parse_metric
from ranktape.analyze.metrics.target import parse_targets
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.storage.format.dtypes import dtype_row
from ranktape.storage.format.record_info import is_parameter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.numerics.digests.digest import Digest
    from ranktape.storage import Records

FIELDS = (*IDENTITY, "counter")
"""What of the catalogue every finding may ask for."""

SITE = ("module", "layer_type", "layer_idx", "operation", "phase", "component", "quant_type", "tensor_name", "mode")
"""What tells one place of the model from another, over ranks, iterations, microbatches and calls."""

FIGURES = ("absmax", "rms", "norm", "elements", "smallest_nonzero")
"""The figures that findings ask for, unless others are named."""

COUNTS = ("nan", "inf", "lower", "underflow", "zero")
"""The counts that they ask for, against the limits of the type that is looked at."""

NARROW_FORMAT = "fp8_e5m2"
"""The 8-bit format with the widest range: what it flushes even with a scale of its own, no other holds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """Every sample of every record that has some."""

    record: NDArray[np.int64]
    """Where in the selection its record is."""
    index: NDArray[np.int64]
    """Which sample of the record it is, from 0."""
    absmax: NDArray[np.float64]
    """Its largest finite magnitude; NaN where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Survey:
    """The records of a selection, as columns with one element for each."""

    records: Records
    """The selection."""
    fields: dict[str, NDArray[Any]]
    """The columns of `FIELDS`."""
    figures: dict[str, NDArray[np.float64]]
    """Those of `FIGURES`, and others that were asked for; NaN where there is none."""
    counts: dict[str, NDArray[np.int64]]
    """Those of `COUNTS`, and `captured_inf`: infinities before values were rounded to what was computed with."""
    extremes: NDArray[np.float64]
    """Smallest and largest finite value, in two columns; NaN where there is none."""
    saturated: NDArray[np.int64]
    """Elements that are exactly the largest number of a type without infinities; 0 for other types."""
    floored: NDArray[np.int64]
    """Elements whose magnitude is the smallest that is not zero, if the next one is twice as large, as on the grid of a
    format, or there is no other; else 0."""
    flushed: NDArray[np.float64]
    """Part that `NARROW_FORMAT` makes zero although each tensor has a scale of its own; NaN where values are not
    known."""
    dtypes: NDArray[Any]
    """What the values were looked at as."""
    is_floating: NDArray[np.bool_]
    """Whether the elements are real or complex floating point numbers: of others nothing is judged."""
    sites: NDArray[np.int64]
    """The same number for records of one place of the model."""
    roles: NDArray[np.int64]
    """The same number for records of places that differ in the layer alone."""
    num_ranks: NDArray[np.int64]
    """How many ranks have records of the same place."""
    has_many_ranks: bool
    """Whether there is more than one rank."""
    has_many_quant_types: bool
    """Whether quantised and other tensors are side by side, as in collections of several trainings."""
    has_many_stacks: bool
    """Whether layers are of several stacks, so that a number alone does not name one."""
    order: NDArray[np.int64]
    """The order of execution within the rank's iteration, from 0."""
    is_gradient: NDArray[np.bool_]
    """Whether a record holds a gradient."""
    is_weight: NDArray[np.bool_]
    """Whether a record holds a parameter of the model, which no sample and no other layer has a part in."""
    samples: Samples
    """Samples of all records."""

    def __len__(self) -> int:
        """How many records there are."""
        return len(self.sites)

    def octaves(self, name: str) -> NDArray[np.float64]:
        """A figure as a logarithm to base 2, NaN where it is not positive.

        To counts, and to ratios as the counts that they are of, one is added before: none is 0.
        """
        if not _is_counted(name):
            return octaves(self.figures[name])
        return octaves(self.figures[name] * self._scale(name) + 1)

    def middle_samples(self) -> NDArray[np.float64]:
        """For each record the absmax that is the median of its samples, in octaves; NaN of less than three of them."""
        found = np.full(len(self), np.nan)
        sizes = octaves(self.samples.absmax)
        known = np.flatnonzero(np.isfinite(sizes))
        records = self.samples.record[known]
        chosen = sizes_of(records) >= _MIN_MIDDLE
        found[records[chosen]] = medians_of(records[chosen], sizes[known[chosen]])
        return found

    def figure_at(self, name: str, sizes: float, *, position: int) -> float:
        """The figure of a record that `octaves` would give that number for."""
        value = float(np.exp2(sizes))
        if not _is_counted(name):
            return value
        scale = self._scale(name)
        return (value - 1) / float(scale[position] if isinstance(scale, np.ndarray) else scale)

    def _scale(self, name: str) -> NDArray[np.float64] | float:
        return np.maximum(self.figures["elements"], 1) if name.endswith("ratio") else 1.0


def survey(
    records: Records, *, view: View | None = None, engine: Engine | None = None, figures: Sequence[str] = ()
) -> Survey:
    """The columns of a selection; values are read of records alone that were never asked about.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: a figure is not known; or of a record values were kept that are rounded already, and are to be
            looked at as they were seen.
    """
    chosen = view or View.COMPUTE
    wanted = [parse_metric(name) for name in dict.fromkeys((*FIGURES, *figures))]
    fields = {name: records.column(name) for name in FIELDS}
    pairs = zip(fields["dtype"].tolist(), fields["compute_dtype"].tolist(), strict=True)
    dtypes = np.array([viewed_dtype(dtype=one, compute_dtype=two, view=chosen) for one, two in pairs], dtype=object)
    samples: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]] = []

    def add(position: int, digest: Digest) -> None:
        if digest.samples is not None:
            absmax = digest.samples["absmax"]
            samples.append((np.full(absmax.size, position), np.arange(absmax.size), absmax))

    of_digest = {f"count of {name}": _count(name) for name in COUNTS} | _OTHERS
    named = {one.name: one.of for one in wanted}
    found = gather(records, named | of_digest, view=chosen, engine=engine, on_digest=add)
    sites = codes_of(*(fields[name] for name in SITE))
    counts = {name: found[f"count of {name}"].astype(np.int64) for name in COUNTS}
    return Survey(
        records=records,
        fields=fields,
        figures={name: found[name] for name in named},
        counts=counts | {"captured_inf": records.column("overflow.inf.count").astype(np.int64)},
        extremes=np.column_stack((found["lowest"], found["highest"])),
        saturated=found["saturated"].astype(np.int64),
        floored=found["floored"].astype(np.int64),
        flushed=found["flushed"],
        dtypes=dtypes,
        is_floating=_is_floating(dtypes),
        sites=sites,
        roles=_roles(fields),
        num_ranks=_num_ranks(sites, fields["rank"]),
        has_many_ranks=np.unique(fields["rank"]).size > 1,
        has_many_quant_types=len(set(fields["quant_type"].tolist())) > 1,
        has_many_stacks=len(stacks_of(records)) > 1,
        order=_order(fields),
        is_gradient=_named(fields["tensor_name"], lambda name: name.startswith("grad")),
        is_weight=_named(fields["tensor_name"], is_parameter),
        samples=_joined(samples),
    )


def _is_counted(name: str) -> bool:
    return name.startswith("overflow.") and name.endswith(("count", "ratio", "total"))


def role_of(module: str, layer_idx: int) -> str:
    """The path of a module with a star in place of the number of its layer; as it is outside of the stack.

    The number is the one that equals the layer, or the first one: stages of a pipeline count their own layers.
    """
    words = module.split(".")
    numbers = [place for place, word in enumerate(words) if re.fullmatch(r"\d+", word, re.ASCII)]
    if layer_idx < 0 or not numbers:
        return module
    same = [place for place in numbers if words[place].lstrip("0") in {str(layer_idx), "" if not layer_idx else "-"}]
    words[(same or numbers)[0]] = "*"
    return ".".join(words)


def _roles(fields: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
    pairs = list(zip(fields["module"].tolist(), fields["layer_idx"].tolist(), strict=True))
    known = {pair: role_of(str(pair[0]), int(pair[1])) for pair in set(pairs)}
    modules = np.array([known[pair] for pair in pairs], dtype=object)
    others = (fields[name] for name in SITE if name not in {"module", "layer_idx"})
    # What is outside of the stack is no layer of any role.
    return codes_of(modules, fields["layer_idx"] < 0, *others)


def _named(names: NDArray[Any], is_so: Callable[[str], bool]) -> NDArray[np.bool_]:
    known = {name: is_so(str(name)) for name in set(names.tolist())}
    return np.array([known[name] for name in names.tolist()], dtype=bool)


def _num_ranks(sites: NDArray[np.int64], ranks: NDArray[Any]) -> NDArray[np.int64]:
    pairs = np.unique(np.column_stack((sites, ranks)), axis=0)
    return np.bincount(pairs[:, 0].astype(np.int64), minlength=1)[sites] if len(sites) else sites


def _order(fields: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
    """Records come in the order of recording; `counter` decides where a selection was put together otherwise."""
    groups = codes_of(fields["attempt"], fields["iteration"], fields["rank"])
    order = np.lexsort((np.arange(groups.size), fields["counter"], groups))
    starts = np.searchsorted(groups[order], groups)
    found = np.empty(groups.size, dtype=np.int64)
    found[order] = np.arange(groups.size)
    return found - starts


def _is_floating(dtypes: NDArray[Any]) -> NDArray[np.bool_]:
    rows = {name: dtype_row(name) for name in set(dtypes.tolist())}
    return np.array([rows[name].is_floating or rows[name].is_complex for name in dtypes.tolist()], dtype=bool)


def _count(name: str) -> Callable[[Digest], float]:
    return lambda digest: float(getattr(digest.tallies, name))


def _saturated(digest: Digest) -> float:
    name = _SATURATING.get(digest.dtype)
    if name is None or not digest.has_values:
        return 0.0
    return float(digest.counts[np.abs(digest.values) == FORMATS[name].maximum].sum())


def _floored(digest: Digest) -> float:
    magnitudes = np.abs(digest.values)
    floor = magnitudes[magnitudes > 0].min(initial=np.inf)
    second = magnitudes[magnitudes > floor].min(initial=np.inf)
    is_grid = math.isinf(second) or math.isclose(second, 2 * floor, rel_tol=_GRID_TOLERANCE)
    return float(digest.counts[magnitudes == floor].sum()) if is_grid else 0.0


def _flushed(digest: Digest) -> float:
    """The part of nonzero values that is zero in the format when the largest one is scaled to its largest number."""
    if not digest.has_values:
        return np.nan
    (target,) = parse_targets(NARROW_FORMAT, Scaling.TENSOR)
    tallies = digest.tallies
    nonzero = max(1, tallies.num_elements - tallies.zero - tallies.nan)
    return digest.count(target.limits(largest=tallies.largest_finite)).flushed / nonzero


_OTHERS: dict[str, Callable[[Digest], float | None]] = {
    "lowest": lambda digest: digest.statistics.minimum,
    "highest": lambda digest: digest.statistics.maximum,
    "saturated": _saturated,
    "floored": _floored,
    "flushed": _flushed,
}
"""What findings know of a digest beside metrics."""

_MIN_MIDDLE = 3
"""Of two samples the median is half way between them."""

_GRID_TOLERANCE = 2.0**-6
"""What rounding after a scale may take from the ratio of two numbers."""

_SATURATING = {"float8_e4m3fn": "fp8_e4m3"}
"""Types whose conversions end at the largest number, and the formats that say which that is."""


def _joined(parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]]) -> Samples:
    if not parts:
        return Samples(record=np.zeros(0, dtype=np.int64), index=np.zeros(0, dtype=np.int64), absmax=np.zeros(0))
    record, index, absmax = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Samples(record=record, index=index, absmax=absmax)
