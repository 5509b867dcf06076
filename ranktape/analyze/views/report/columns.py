"""Gives the columns of numbers of a page: which metrics it shows, of records and samples, and how JSON holds them.

Every column is base64 of little-endian numbers, of the narrowest type that holds them: whole numbers exactly, others
with the 24 bits of a float32, which is seven digits. First come the first bytes of all numbers, then the second ones,
and so on: those that are like one another, which compresses better. A column of one value is that value.
"""

from __future__ import annotations

import base64
import enum
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ranktape.analyze.findings.survey import medians_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.metrics.numbers import RecordNumbers

Packed = dict[str, Any]
"""What JSON holds of a column: `type`, and `data` or `value`."""

_INTEGERS = (np.dtype("u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("i1"), np.dtype("<i2"), np.dtype("<i4"))
_SMALLEST, _LARGEST = 1e-38, 3e38
"""Magnitudes that a float32 holds with all of its digits."""


def packed(values: Sequence[float | None] | NDArray[Any]) -> Packed:
    """A column as JSON holds it; NaN for None, infinities as they are."""
    known = values if isinstance(values, np.ndarray) else [math.nan if value is None else value for value in values]
    column = np.array(known, dtype=np.float64)
    if column.size and np.all((column == column[0]) | (np.isnan(column) & np.isnan(column[0]))):
        value = float(column[0])
        infinite = "Infinity" if value > 0 else "-Infinity"
        return {"type": "same", "value": None if math.isnan(value) else infinite if math.isinf(value) else value}
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
    """What the metric of several records is, for the page's script: counts over elements, or one of theirs."""

    RATIO, LARGEST, SMALLEST, MEDIAN = "ratio", "largest", "smallest", "median"


class PageMetric(NamedTuple):
    """A metric of the page; a magnitude is positive and compared as a ratio, on a logarithmic scale."""

    name: str
    """Its name in `ranktape.analyze.metrics.metric`; `sqnr.` and a format for what a format makes of it."""
    head: str
    """What people read."""
    merge: Merge
    is_magnitude: bool = False
    unit: str = ""

    @property
    def source(self) -> str:
        """The metric of which the page holds a column: of a ratio the count."""
        if self.merge is not Merge.RATIO:
            return self.name
        return "overflow.total" if self.name == "overflow.ratio" else self.name.removesuffix(".ratio") + ".count"

    def to_json(self, column: NDArray[np.float64]) -> dict[str, Any]:
        """The metric with its column, as the page's script knows it."""
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
"""The metrics, in the order of the page's menu; what formats make of the tensors comes after them."""


SAMPLE_METRICS = ("overflow.ratio", "overflow.underflow.ratio", "absmax", "std", "mean", "norm")
"""What the page knows of each sample."""

MAX_SAMPLES = 200_000
"""Samples of all records together; of more, the records whose samples differ most are kept."""


class SampleColumns:
    """The metrics of samples."""

    def __init__(self, known: RecordNumbers) -> None:
        """Take those of all records."""
        self._sizes = known.sample_sizes
        elements = np.maximum(1, known.of_samples("num_elements"))
        made = {
            "overflow.ratio": (known.of_samples("upper") + known.of_samples("lower")) / elements,
            "overflow.underflow.ratio": known.of_samples("underflow") / elements,
        }
        self._columns = {name: made[name] if name in made else known.of_samples(name) for name in SAMPLE_METRICS}
        self._owners = known.owners

    @property
    def num_records(self) -> int:
        """Records that have samples."""
        return int((self._sizes > 0).sum())

    def to_json(self, *, first: Collection[int], limit: int = MAX_SAMPLES) -> tuple[dict[str, Any], int]:
        """The metrics as columns, and of how many records; those of `first` before others."""
        places = np.flatnonzero(self._sizes)
        order = places[np.lexsort((places, -self._spreads()[places], ~np.isin(places, list(first))))]
        kept = np.sort(order[np.cumsum(self._sizes[order]) <= limit])
        chosen = np.isin(self._owners, kept)
        document = {
            "records": packed(kept),
            "length": packed(self._sizes[kept]),
            "count": len(kept),
            "metrics": {name: packed(column[chosen]) for name, column in self._columns.items()},
        }
        return document, len(kept)

    def _spreads(self) -> NDArray[np.float64]:
        """For each record the largest magnitude of its samples over their median; 0 where there is none."""
        found = np.zeros(self._sizes.size)
        is_known = np.isfinite(self._columns["absmax"])
        owners, sizes = self._owners[is_known], self._columns["absmax"][is_known]
        middles = medians_of(owners, sizes)
        is_positive = middles > 0
        np.maximum.at(found, owners[is_positive], sizes[is_positive] / middles[is_positive])
        return found
