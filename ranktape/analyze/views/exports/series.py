"""Gathers what other programs draw over the iterations: metrics and histograms of each place, and pictures of plots.

All records of a place in one iteration are taken as one tensor, as `trend` takes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.metrics import parse_metric
from ranktape.analyze.engine.numbers import group_digests
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import group_records
from ranktape.analyze.numerics.bins import linear_bins, log2_bins
from ranktape.analyze.numerics.digest import Digest, finite
from ranktape.analyze.questions.trend import course_fields
from ranktape.analyze.views.plots.data import PlotData, default_target
from ranktape.analyze.views.plots.table import Plot
from ranktape.errors import NoRecordsError, UsageError
from ranktape.fields import INT_FIELDS
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.engine.engine import Engine
    from ranktape.storage import Records

METRICS = (
    *("absmax", "rms", "std"),
    *(f"overflow.{kind}" for kind in ("ratio", "underflow.ratio", "zero.ratio", "nan.ratio")),
)
"""The metrics that are exported where none is named."""

PICTURES = ("overflow", "layer_binades")
"""The plots that go along where none is named, if the selection has something for them."""

NUM_BINS = 64
"""Bins of equal width."""

MAX_BINS = 512
"""Bins at most: W&B refuses more. Only float64 has so many binades; they are then counted together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BinnedValues:
    """Finite values in bins: each is counted where it lies, and none is drawn from another histogram."""

    edges: NDArray[np.float64]
    """One more than there are bins, ascending."""
    counts: NDArray[np.int64]
    """Values in each bin."""
    sum: float
    """Of the values that are counted, on the axis of the bins."""
    sum_squares: float
    """The same of their squares."""

    @property
    def num_values(self) -> int:
        """Values in all bins."""
        return int(self.counts.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One place of the model, or one group, in one iteration."""

    place: str
    """What it is called: the same in every iteration, and unlike all others."""
    iteration: int
    """The training step."""
    timestamp: float
    """When the last of its records was captured, in seconds since the epoch."""
    metrics: Mapping[str, float]
    """Each metric that there is."""
    values: BinnedValues | None
    """Finite values in bins of equal width; None where none was kept, or no histogram was asked for."""
    binades: BinnedValues | None
    """Their magnitudes in binades: edges are powers of two, as exponents. Zeros are in none."""


def points(
    records: Records,
    *,
    metrics: Sequence[str] = (),
    has_histograms: bool = True,
    by: Sequence[str] = (),
    view: View | None = None,
    engine: Engine | None = None,
) -> list[Point]:
    """What is known of each place, or of each group of `by`, in each iteration: by iteration, then by place.

    A metric that is not there (of nothing finite, of statistics that were kept) is missing.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UnknownFieldError: `by` names no field of a record.
        UsageError: there is no such metric, or `by` names the iteration.
    """
    if "iteration" in by:
        raise UsageError("by 'iteration' is not allowed: what is exported goes along it; leave it out")
    chosen = [parse_metric(name) for name in dict.fromkeys(metrics or METRICS)]
    fields = course_fields(records, by)
    groups = group_records(records, by=(*fields, "iteration"))
    names = place_names([{field: key[field] for field in fields} for key in groups.keys], is_whole=bool(by))
    timestamps = np.zeros(len(groups.keys))
    np.maximum.at(timestamps, np.array(groups.numbers, dtype=np.int64), records.column("timestamp"))
    found = []
    for number, digest in group_digests(records, groups, view=view or View.COMPUTE, engine=engine):
        known = ((one.name, one.of(digest)) for one in chosen)
        point = Point(
            place=names[number],
            iteration=int(groups.keys[number]["iteration"]),
            timestamp=float(timestamps[number]),
            metrics={name: float(value) for name, value in known if value is not None},
            values=_values(digest) if has_histograms else None,
            binades=_binades(digest) if has_histograms else None,
        )
        found.append((number, point))
    return [point for _, point in sorted(found, key=lambda pair: (pair[1].iteration, pair[0]))]


def place_names(keys: Sequence[Mapping[str, Any]], *, is_whole: bool) -> list[str]:
    """What groups are called that are not equal in some field; with `is_whole` by all fields, else by as few as tell.

    The module and the tensor come first.
    """
    fields = list(keys[0]) if keys else []
    chosen = fields if is_whole else [field for field in ("module", "tensor_name") if field in fields]
    rest = [field for field in fields if field not in chosen]
    num_places = len({tuple(key.values()) for key in keys})

    def num_told(named: Sequence[str]) -> int:
        return len({tuple(key[field] for field in named) for key in keys})

    while num_told(chosen) < num_places:
        # The field that tells most of them apart; of equals the first.
        best = max(rest, key=lambda field: num_told([*chosen, field]))
        chosen = [*chosen, best]
        rest.remove(best)
    return ["/".join(_word(field, key[field]) for field in chosen) or "all" for key in keys]


def _word(field: str, value: Any) -> str:
    if value is None or value == "":
        return f"no {field}"
    number = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{field} {number}" if field in INT_FIELDS or isinstance(value, float) else printable(number)


def _values(digest: Digest) -> BinnedValues | None:
    bins, numbers = linear_bins(digest, NUM_BINS), finite(digest)
    if not bins.counts.size:
        return None
    return BinnedValues(edges=bins.edges, counts=bins.counts, **_sums(numbers.values, numbers.counts))


def _binades(digest: Digest) -> BinnedValues | None:
    bins, numbers = log2_bins(digest), finite(digest)
    if not bins.counts.size:
        return None
    is_nonzero = numbers.values != 0
    first = round(math.log2(bins.edges[0]))
    step = -(-bins.counts.size // MAX_BINS)
    counts = np.add.reduceat(bins.counts, np.arange(0, bins.counts.size, step))
    # The upper end of the last binade may be beyond all numbers; its exponent is not.
    edges = first + step * np.arange(counts.size + 1, dtype=np.float64)
    sums = _sums(np.log2(np.abs(numbers.values[is_nonzero])), numbers.counts[is_nonzero])
    return BinnedValues(edges=edges, counts=counts, **sums)


def _sums(values: NDArray[np.float64], counts: NDArray[np.int64]) -> dict[str, float]:
    # Beyond all numbers is infinite here, as in what reads it.
    with np.errstate(over="ignore"):
        return {"sum": float(values @ counts), "sum_squares": float(values**2 @ counts)}


def pictures(
    records: Records,
    *,
    kinds: Sequence[Plot],
    must_be_there: bool = True,
    view: View | None = None,
    engine: Engine | None = None,
) -> dict[str, bytes]:
    """For each plot a picture of the whole selection, as the bytes of a PNG.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        NoRecordsError: nothing is there that plots are drawn of, and it must be there.
        UsageError: the selection has nothing for a plot that must be there.
    """
    from ranktape.analyze.views.plots.style import plot_bytes

    if not kinds:
        return {}
    try:
        data = PlotData(records, target=default_target(records), view=view, engine=engine)
    except NoRecordsError:
        if must_be_there:
            raise
        return {}
    drawn = {}
    for kind in kinds:
        reason = kind.missing(data)
        if reason and must_be_there:
            raise UsageError(f"--kind {kind.name} cannot be drawn: {reason}")
        if not reason:
            drawn[kind.name] = plot_bytes(kind.draw(data))
    return drawn
