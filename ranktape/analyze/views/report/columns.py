"""Computes the numeric columns of a report: metrics of records and samples, histograms, and the SQNR of recipes.

A column is the base64 of little-endian numbers of the narrowest type that can represent them: integers exactly, others
with the 24 bits of a float32, or seven digits. The first bytes of all numbers come first, then the second bytes, and so
on, since similar bytes in sequence compress better. A column with a single distinct value is that value.
"""

from __future__ import annotations

import base64
import enum
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ranktape.analyze.engine.digests import digest_columns
from ranktape.analyze.engine.sweep_measure import Job, sweep_records
from ranktape.analyze.engine.target import is_sweepable
from ranktape.analyze.findings.survey import SITE, group_medians, row_codes
from ranktape.analyze.numerics.products import RECORDED
from ranktape.analyze.numerics.sweeps.options import SweepOptions
from ranktape.analyze.questions.sweep import parse_jobs
from ranktape.analyze.replays.calls import rows_in_selection
from ranktape.errors import RanktapeError
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.numbers import RecordMetrics
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.recipes.recipe import Recipe
    from ranktape.analyze.replays.replayed import Replayed
    from ranktape.storage import Records

_INTEGERS = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("i1"), np.dtype("<i2"), np.dtype("<i4"))
_SMALLEST, _LARGEST = 1e-38, 3e38
"""The range of magnitudes that float32 represents with full precision."""

MAX_SAMPLES = 200_000
"""The largest number of samples of all records. If there are more, records whose samples differ most have priority."""

MAX_HISTOGRAMS = 10_000
"""The largest number of records with histograms: those of findings first, then one of each tensor of the model, then
another of each, and so on."""

MAX_SWEPT, MAX_SWEPT_NBYTES = 2_000, 1_000_000_000
"""The largest number of records on which formats are tried, and of bytes read for it, which takes a few seconds."""

MAX_RECIPE_ROWS = 60
"""The largest number of modules with a row each in the map of recipes. If there are more, each row is a layer."""


def json_number(value: float | None) -> float | str | None:
    """A number as JSON, with infinities as texts that JavaScript's `Number` can read; None for None and NaN."""
    if value is None or math.isnan(value):
        return None
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def packed(values: Sequence[float | None] | NDArray[Any]) -> dict[str, Any]:
    """A column as JSON data: `type`, and `data` or `value`; None becomes NaN, and infinities stay infinite."""
    known = values if isinstance(values, np.ndarray) else [math.nan if value is None else value for value in values]
    column = np.array(known, dtype=np.float64)
    if column.size and np.all((column == column[0]) | (np.isnan(column) & np.isnan(column[0]))):
        return {"type": "same", "value": json_number(float(column[0]))}
    dtype = _narrowest(column)
    planes = column.astype(dtype).view(np.uint8).reshape(column.size, dtype.itemsize).T
    return {"type": dtype.str.lstrip("<|"), "data": base64.b64encode(planes.tobytes()).decode("ascii")}


def _narrowest(column: NDArray[np.float64]) -> np.dtype[Any]:
    if np.isfinite(column).all() and np.array_equal(column, np.rint(column)):
        low, high = column.min(initial=0), column.max(initial=0)
        for dtype in _INTEGERS:
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return dtype
    magnitudes = np.abs(column[np.isfinite(column) & (column != 0)])
    is_held = magnitudes.min(initial=_LARGEST) >= _SMALLEST and magnitudes.max(initial=0) <= _LARGEST
    return np.dtype("<f4") if is_held else np.dtype("<f8")


class Merge(enum.StrEnum):
    """How the page's script combines a metric of several records: counts over elements, or one of the values."""

    RATIO, LARGEST, SMALLEST, MEDIAN = "ratio", "largest", "smallest", "median"


class PageMetric(NamedTuple):
    """A metric of the page. A magnitude is positive; it is compared by ratio, on a logarithmic scale."""

    name: str
    """Name in `ranktape.analyze.engine.metrics`, or `sqnr.` and the name of a format."""
    head: str
    """Displayed name."""
    merge: Merge
    is_magnitude: bool = False
    unit: str = ""

    @property
    def source(self) -> str:
        """The metric whose column the page contains: for a ratio, the count."""
        if self.merge is not Merge.RATIO:
            return self.name
        return "overflow.total" if self.name == "overflow.ratio" else self.name.removesuffix(".ratio") + ".count"

    def to_json(self, column: NDArray[np.float64]) -> dict[str, Any]:
        """The metric with its column, as JSON data for the page's script."""
        about = {"name": self.name, "head": self.head, "unit": self.unit, "merge": self.merge.value}
        return {**about, "isMagnitude": self.is_magnitude, "column": packed(column)}


SHOWN = (
    *(
        PageMetric(f"overflow.{name}ratio", head, Merge.RATIO)
        for name, head in (
            *(("", "overflow"), ("upper.", "upper overflow"), ("lower.", "lower overflow")),
            *(("underflow.", "underflow (subnormal)"), ("nan.", "NaN"), ("inf.", "Inf"), ("zero.", "zeros")),
        )
    ),
    *(PageMetric(name, name, Merge.LARGEST, is_magnitude=True) for name in ("absmax", "rms", "std", "norm")),
    PageMetric("smallest_nonzero", "smallest nonzero", Merge.SMALLEST, is_magnitude=True),
    PageMetric("log2_range", "range", Merge.LARGEST, unit="bits"),
    PageMetric("kurtosis", "kurtosis", Merge.LARGEST, is_magnitude=True),
    PageMetric("skewness", "skewness", Merge.MEDIAN),
    PageMetric("mean", "mean", Merge.MEDIAN),
    PageMetric("minimum", "minimum", Merge.SMALLEST),
    PageMetric("maximum", "maximum", Merge.LARGEST),
    PageMetric("p1", "1st percentile", Merge.MEDIAN),
    PageMetric("p50", "median", Merge.MEDIAN),
    PageMetric("p99", "99th percentile", Merge.MEDIAN),
)
"""The metrics in the order of the page's menu. The SQNR of formats follow."""

SAMPLE_METRICS = ("overflow.ratio", "overflow.underflow.ratio", "absmax", "std", "mean", "norm")
"""The metrics of single samples."""


def sample_columns(known: RecordMetrics, *, first: Collection[int], limit: int = MAX_SAMPLES) -> dict[str, Any]:
    """The metrics of samples as columns, of at most `limit` samples.

    The records in `first` have priority, then those whose samples differ most.
    """
    sizes, owners = known.sample_sizes, known.owners
    num_elements = np.maximum(1, known.sample_column("num_elements"))
    ratios = {
        "overflow.ratio": (known.sample_column("upper") + known.sample_column("lower")) / num_elements,
        "overflow.underflow.ratio": known.sample_column("underflow") / num_elements,
    }
    columns = {name: ratios[name] if name in ratios else known.sample_column(name) for name in SAMPLE_METRICS}
    # For each record, the largest absmax of a sample over the median of its samples.
    spreads = np.zeros(sizes.size)
    is_known = np.isfinite(columns["absmax"])
    middles = group_medians(owners[is_known], columns["absmax"][is_known])
    is_positive = middles > 0
    np.maximum.at(
        spreads, owners[is_known][is_positive], columns["absmax"][is_known][is_positive] / middles[is_positive]
    )
    rows = np.flatnonzero(sizes)
    order = rows[np.lexsort((rows, -spreads[rows], ~np.isin(rows, list(first))))]
    kept = np.sort(order[np.cumsum(sizes[order]) <= limit])
    return {
        "records": packed(kept),
        "length": packed(sizes[kept]),
        "count": len(kept),
        "columns": {name: packed(column[np.isin(owners, kept)]) for name, column in columns.items()},
    }


def rows_by_priority(records: Records, *, first: Sequence[int]) -> NDArray[np.int64]:
    """The rows of at most `MAX_HISTOGRAMS` records in order of priority."""
    is_first = np.zeros(len(records), dtype=bool)
    is_first[list(first)] = True
    sites = row_codes(*(records.column(field) for field in (*SITE, "dtype")))
    # For each record, counts the earlier records of the same site.
    by_site = np.argsort(sites, kind="stable")
    again = np.empty_like(sites)
    again[by_site] = np.arange(len(records)) - np.searchsorted(sites[by_site], sites[by_site])
    return np.lexsort((np.arange(len(records)), again, ~is_first))[:MAX_HISTOGRAMS]


def histograms_of(
    records: Records, rows: NDArray[np.int64], *, view: View, engine: Engine
) -> tuple[dict[str, Any], int, int]:
    """The number of magnitudes in each binade for the records in these rows, as columns for the page's script.

    Also returns the number of records with only statistics, and of those with a quantile summary instead of values.
    """
    kept = np.sort(rows)
    exponents, counts, lengths = [], [], []
    num_without_values = num_rounded = 0
    for known in digest_columns(records.take(kept.tolist()), view=view, engine=engine):
        is_magnitude = np.isfinite(known.values) & (known.values != 0)
        owners = np.repeat(np.arange(len(known)), np.diff(known.starts))[is_magnitude]
        binades = np.frexp(known.values[is_magnitude])[1].astype(np.int64) - 1
        first = int(binades.min(initial=0))
        width = int(binades.max(initial=0)) - first + 1
        cells, places = np.unique(owners * width + binades - first, return_inverse=True)
        exponents.append(cells % width + first)
        counts.append(np.bincount(places, weights=known.counts[is_magnitude], minlength=len(cells)))
        lengths.append(np.bincount(cells // width, minlength=len(known)))
        num_without_values += int((~known.has_values).sum())
        num_rounded += int((~known.is_exact).sum())
    columns = {
        "records": packed(kept),
        "length": packed(np.concatenate(lengths)),
        "count": len(kept),
        "columns": {"exponent": packed(np.concatenate(exponents)), "count": packed(np.concatenate(counts))},
    }
    return columns, num_without_values, num_rounded


def usual_jobs(formats: Sequence[str]) -> list[Job]:
    """The formats with only their default scale: by the rule of blocks, or the power of two for the largest value.

    Raises:
        UsageError: a format is unknown, or cannot use a scale.
    """
    at_rule, at_largest = SweepOptions(max_scale_exp=0, min_scale_exp=0), SweepOptions(num_levels=1)
    return [job._replace(options=at_rule if job.mode.has_offsets else at_largest) for job in parse_jobs(formats)]


def ratios_of(
    records: Records, rows: NDArray[np.int64], *, jobs: Sequence[Job], view: View, engine: Engine
) -> tuple[list[tuple[PageMetric, NDArray[np.float64]]], int]:
    """The signal-to-noise ratio of each format, in dB, as metrics of the page; several records are merged to the worst.

    It is infinite if nothing is lost, and NaN if it is not computed. Formats are tried on the first of these rows, at
    most `MAX_SWEPT` and `MAX_SWEPT_NBYTES`; the number of other records on which they could be tried is also returned.
    """
    can_sweep = np.array([is_sweepable(dtype) for dtype in records.column("dtype").tolist()], dtype=bool)
    wanted = rows[can_sweep[rows]][:MAX_SWEPT]
    kept = np.sort(wanted[np.cumsum(records.column("nbytes")[wanted]) <= MAX_SWEPT_NBYTES])
    columns = np.full((len(jobs), len(records)), math.nan)
    swept = sweep_records(records.take(kept.tolist()), [{None: jobs}] * len(kept), view=view, engine=engine)
    for row, found in zip(kept.tolist(), swept, strict=True):
        if not isinstance(found, RanktapeError):  # it cannot be computed from what this record stores
            columns[:, row] = [
                math.inf if sweep.is_lossless else sweep.levels[0].sqnr if sweep.levels else math.nan
                for sweep in found[None]
            ]
    names = [job.scheme.name for job in jobs]
    metrics = [PageMetric(f"sqnr.{name}", f"SQNR in {name}", Merge.SMALLEST, unit="dB") for name in names]
    return [*zip(metrics, columns, strict=True)], int(can_sweep.sum()) - len(kept)


def matrix_of(
    cells: Mapping[str, Mapping[tuple[str, str], tuple[float | None, float]]],
    columns: Sequence[tuple[str, str]],
    *,
    records: Sequence[Collection[int]],
    bits: Mapping[str, float],
) -> dict[str, Any]:
    """A map for the page's script: for each row, product and recipe, the SQNR and the number of lost values.

    `records` has the records of each row, and `bits` the number of bits per value in each recipe.
    """
    found = [[own.get(column, (None, 0)) for column in columns] for own in cells.values()]
    return {
        "rows": [printable(row) for row in cells],
        "columns": [
            {"product": product, "recipe": printable(name), "bits": bits.get(name), "is_recorded": name == RECORDED}
            for product, name in columns
        ],
        "sqnr": [[json_number(sqnr) for sqnr, _ in own] for own in found],
        "num_lost": [[num_lost for _, num_lost in own] for own in found],
        "records": [*map(list, records)],
    }


def recipe_map(records: Records, replayed: Replayed, recipes: Sequence[Recipe]) -> dict[str, Any] | None:
    """The SQNR of each product of each module in each recipe, for the page's script; None if there are no products."""
    modules = {group.key["module"] for group in replayed.groups(["module"])}
    fields = ["module"] if len(modules) <= MAX_RECIPE_ROWS and modules != {""} else ["layer_idx", "layer_type"]

    def name_of(row: Sequence[Any]) -> str:
        return str(row[0]) if len(row) == 1 else f"layer {row[0]} {row[1]}"

    cells: dict[str, dict[tuple[str, str], tuple[float | None, float]]] = {}
    for group in replayed.groups([*fields, "product", "recipe"]):
        *row, product, recipe = group.key.values()
        cells.setdefault(name_of(row), {})[product, recipe] = group.exact.sqnr, group.exact.num_lost
    if not cells:
        return None
    members: dict[str, set[int]] = {row: set() for row in cells}
    for call, own in zip(replayed.calls.calls, rows_in_selection(records, replayed.calls), strict=True):
        members.get(name_of([call.field(field) for field in fields]), set()).update(own)
    names = [*replayed.recipes, *([RECORDED] if RECORDED in replayed.names else [])]
    columns = [(group.key["product"], recipe) for group in replayed.groups(["product"]) for recipe in names]
    bits = {recipe.name: recipe.bits for recipe in recipes}
    return matrix_of(cells, columns, records=[sorted(own) for own in members.values()], bits=bits)
