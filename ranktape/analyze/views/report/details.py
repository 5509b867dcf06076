"""Counts which values occur in the records of a page, and tries what each format would make of them.

Of every record, or of records together where there are too many, the page knows how many magnitudes lie in each
binade, and the signal to noise ratio in some formats at scales around the usual one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ranktape.analyze.engine.sweep_measure import Job, sweep_one
from ranktape.analyze.metrics.target import is_sweepable, sweepable
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sums import sums_of_pairs
from ranktape.analyze.questions.swept import parse_jobs
from ranktape.analyze.views.report.columns import Merge, PageMetric, packed
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.engine.cache_object import Payload
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.digest import Digest
    from ranktape.storage import Record, Records

MAX_BUNDLES = 10_000
"""Records, or groups of records, of which the page holds histograms of their own."""

MAX_SWEPT_NBYTES, MAX_SWEPT = 1_000_000_000, 10_000
"""Bytes and records that are read for scales of blocks: less than a minute's work. One of each site comes first."""

OFFSETS = tuple(range(-10, 11))
"""Exponents by which scales differ from the usual one: the block's rule, or where the largest value just fits."""

_SITE_FIELDS = (
    *("source", "module", "layer_idx", "layer_type", "operation", "phase"),
    *("component", "quant_type", "tensor_name", "dtype", "mode"),
)
"""What tells one place of the model from another; where there are too many, the first are given up first."""

_DECIBELS_PER_DOUBLING = 10 * math.log10(2)
_LOSSLESS, _UNKNOWN = 32_767, -32_768
"""What stands for an infinite ratio, and for none, among hundredths of a decibel."""


class Bundles(NamedTuple):
    """Which records share a histogram: for each its bundle, how many there are, and what those of one agree in.

    `together` is empty where each has its own.
    """

    of: NDArray[np.int64]
    num: int
    together: str


def bundles_of(records: Records, *, alone: Sequence[int] = (), limit: int = MAX_BUNDLES) -> Bundles:
    """Each record by itself where `limit` allows, else with those of its place; `alone` stay by themselves anyway."""
    if len(records) <= limit:
        return Bundles(of=np.arange(len(records)), num=len(records), together="")
    fields: tuple[str, ...] = ("iteration", *_SITE_FIELDS)
    of = _codes(records, fields=fields)
    while fields and of.max() >= limit:
        fields = fields[1:]
        of = _codes(records, fields=fields)
    of[list(alone)] = of.max() + 1 + np.arange(len(alone))
    found, of = np.unique(of, return_inverse=True)
    return Bundles(of=of, num=found.size, together=", ".join(fields) or "nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSweepMeasure:
    """Measures what formats with scales of blocks make of a record: SQNR in dB, NaN where nothing can be said.

    One row for each format, one column for each offset.
    """

    jobs: tuple[Job, ...]
    """The formats."""
    view: View
    """Which numbers are judged."""

    @property
    def name(self) -> str:
        """What the cache knows it by."""
        return f"report_sweep_v1_{self.view}_{'-'.join(job.scheme.name for job in self.jobs)}"

    def __call__(self, record: Record) -> Payload:
        """The ratios of one record."""
        found = np.full((len(self.jobs), len(OFFSETS)), math.nan)
        try:
            sweeps = sweep_one(record, self.jobs, view=self.view)
        except UsageError:  # what was kept of this record does not tell
            return {"sqnr": found}
        for row, sweep in zip(found, sweeps, strict=True):
            for level in sweep.levels:
                row[OFFSETS.index(int(level.exponent))] = level.sqnr
        return {"sqnr": found}


class Details:
    """Collects histograms and sweeps, one digest after the other."""

    def __init__(self, bundles: Bundles, *, num_records: int, formats: Sequence[str], view: View) -> None:
        """Nothing yet.

        Raises:
            UsageError: a format is not known, or has no room for a scale.
        """
        self.bundles = bundles
        self.view, self.targets = view, parse_jobs(formats)
        self._binades: list[Counter[int]] = [Counter() for _ in range(bundles.num)]
        # Sums of squares, as logarithms: those of float64 values may be beyond float64.
        self._signal = np.full((len(self.targets), bundles.num), -math.inf)
        self._noise = np.full((*self._signal.shape, len(OFFSETS)), -math.inf)
        self._log2_energy = np.full(num_records, -math.inf)
        self.usual = np.full((len(self.targets), num_records), math.nan)
        """For each format and record the ratio at the usual scale, in dB."""
        self.num_without_values = 0
        """Records of which statistics alone were kept."""
        self.num_rounded = 0
        """Records whose values are known as a quantile summary."""
        self.num_not_read = 0
        """Records that could have been read for scales of blocks, and were not."""

    def add(self, index: int, digest: Digest) -> None:
        """Take in what is known of one record."""
        self.num_without_values += not digest.has_values
        self.num_rounded += not digest.is_exact
        is_magnitude = np.isfinite(digest.values) & (digest.values != 0)
        values, counts = digest.values[is_magnitude], digest.counts[is_magnitude]
        if not values.size:
            return
        exponents, places = np.unique(np.frexp(values)[1] - 1, return_inverse=True)
        found = np.bincount(places, weights=counts).astype(np.int64)
        self._binades[self.bundles.of[index]].update(dict(zip(exponents.tolist(), found.tolist(), strict=True)))
        if not is_sweepable(digest.dtype):
            return
        largest = float(np.abs(values).max())
        scaled = np.ldexp(values, -math.frexp(largest)[1])
        self._log2_energy[index] = math.log2(float((counts * scaled**2).sum())) + 2 * math.frexp(largest)[1]
        for number, (scheme, mode, _) in enumerate(self.targets):
            if mode is SweepMode.TENSOR:
                steps = np.array(OFFSETS, dtype=np.float64) + scheme.element.largest_alignment(largest)
                sums = sums_of_pairs(values, counts=counts, exponents=steps, target=scheme.element)
                with np.errstate(divide="ignore"):
                    self._take(number, index, -10 * np.log10(sums.squared_error_L / sums.squared))

    def add_block_sweeps(self, records: Records, *, first: Sequence[int], engine: Engine) -> None:
        """Try the scales of blocks on as many records as `MAX_SWEPT_NBYTES` allows; `first` come first.

        Raises:
            DataError: a record's bytes are missing or damaged.
            StorageError: the store cannot be read.
        """
        with_blocks = [number for number, (_, mode, _) in enumerate(self.targets) if mode is not SweepMode.TENSOR]
        places = np.flatnonzero([is_sweepable(dtype) for dtype in records.column("dtype").tolist()])
        if not with_blocks or not places.size:
            return
        options = SweepOptions(max_scale_exp=OFFSETS[-1], min_scale_exp=OFFSETS[0])
        jobs = tuple(self.targets[number]._replace(options=options) for number in with_blocks)
        measure = BlockSweepMeasure(jobs=jobs, view=self.view)
        sizes = records.column("nbytes")
        if sizes[places].sum() <= MAX_SWEPT_NBYTES and places.size <= MAX_SWEPT:
            payloads = engine.measure(sweepable(records), measure)
        else:
            # As many as may be read: those of findings, then one of each site, then another of each.
            is_first = np.zeros(len(records), dtype=bool)
            is_first[list(first)] = True
            again = occurrences(_codes(records, fields=_SITE_FIELDS))
            order = places[np.lexsort((places, again[places], ~is_first[places]))][:MAX_SWEPT]
            places = np.sort(order[np.cumsum(sizes[order]) <= MAX_SWEPT_NBYTES])
            payloads = engine.map(measure, [records[index] for index in places.tolist()], sizes=sizes[places].tolist())
        for index, payload in zip(places.tolist(), payloads, strict=True):
            for number, ratios in zip(with_blocks, payload["sqnr"], strict=True):
                if not np.isnan(ratios).any() and math.isfinite(self._log2_energy[index]):
                    self._take(number, index, ratios)
        self.num_not_read = int(np.isfinite(self._log2_energy).sum() - np.isfinite(self._log2_energy[places]).sum())

    def _take(self, number: int, index: int, ratios: NDArray[Any]) -> None:
        """Add the ratios in dB of one record and format to those of its bundle."""
        bundle, energy = self.bundles.of[index], self._log2_energy[index]
        self.usual[number, index] = ratios[OFFSETS.index(0)]
        self._signal[number, bundle] = np.logaddexp2(self._signal[number, bundle], energy)
        noise = energy - ratios / _DECIBELS_PER_DOUBLING
        self._noise[number, bundle] = np.logaddexp2(self._noise[number, bundle], noise)

    def ratios(self) -> list[tuple[PageMetric, NDArray[np.float64]]]:
        """What each format makes of each record at the usual scale, as metrics of the page: the worst of several."""
        names = [job.scheme.name for job in self.targets]
        metrics = [PageMetric(f"sqnr.{name}", f"SQNR in {name}", Merge.SMALLEST, unit="dB") for name in names]
        return list(zip(metrics, self.usual, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Everything as columns, for the page's script."""
        spans = [range(min(binades), max(binades) + 1) if binades else range(0) for binades in self._binades]
        counts = [binades[exponent] for binades, span in zip(self._binades, spans, strict=True) for exponent in span]
        return {
            "of": packed(self.bundles.of),
            "count": self.bundles.num,
            "together": self.bundles.together,
            "first": packed([span.start for span in spans]),
            "length": packed([len(span) for span in spans]),
            "counts": packed(counts),
            "offsets": list(OFFSETS),
            "sweeps": [self._sweep_json(number) for number in range(len(self.targets))],
        }

    def _sweep_json(self, number: int) -> dict[str, Any]:
        scheme, mode, _ = self.targets[number]
        signal = self._signal[number]
        with np.errstate(invalid="ignore"):
            ratios = (signal[:, None] - self._noise[number]) * _DECIBELS_PER_DOUBLING * 100
        hundredths = np.where(np.isnan(ratios), _UNKNOWN, np.clip(ratios, _UNKNOWN + 1, _LOSSLESS))
        return {
            "name": scheme.name,
            "is_block": mode is not SweepMode.TENSOR,
            "log2_signal": packed(np.where(np.isfinite(signal), signal, math.nan)),
            "sqnr": packed(np.rint(hundredths).reshape(-1)),
        }


def _codes(records: Records, *, fields: Sequence[str]) -> NDArray[np.int64]:
    """For each record a number that it shares with those that have the same values of the fields, from 0."""
    of = np.zeros(len(records), dtype=np.int64)
    for field in fields:
        _, codes = np.unique(records.column(field).astype(str), return_inverse=True)
        _, of = np.unique(of * (codes.max(initial=0) + 1) + codes, return_inverse=True)
    return of


def occurrences(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each element how many equal ones come before it."""
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    lengths = np.diff(np.append(starts, len(codes)))
    found = np.empty(len(codes), dtype=np.int64)
    found[order] = np.arange(len(codes)) - np.repeat(starts, lengths)
    return found
