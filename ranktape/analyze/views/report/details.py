"""Counts which values occur in the records of a page, and tries what each format would make of them.

Of every record, or of records together where there are too many, the page knows how many magnitudes lie in each
binade, and the signal to noise ratio in some formats at scales around the usual one.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ranktape.analyze.engine.digests import digests
from ranktape.analyze.engine.sheet import SheetForm, SheetRow, sheet_of
from ranktape.analyze.engine.sweep_measure import Job, sweep_one
from ranktape.analyze.metrics.target import is_sweepable
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sums import sums_of_pairs
from ranktape.analyze.questions.swept import parse_jobs
from ranktape.analyze.views.report.columns import Merge, PageMetric, packed
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.engine.cache import Payload
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.numerics.digest import Digest
    from ranktape.analyze.numerics.formats import Format
    from ranktape.storage import Record, Records

MAX_BUNDLES = 20_000
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
        return f"report_sweep_{self.view}_{'-'.join(job.scheme.name for job in self.jobs)}"

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
            if sweep.is_lossless:
                row[:] = math.inf
        return {"sqnr": found}


_NUM_FIRST = 3
"""Numbers of a row of `DigestDetails` before the ratios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestDetails:
    """Makes rows of what the page knows of digests: whether values are known, and exactly; the energy; ratios.

    The energy is a logarithm of the sum of squares, minus infinity where there is none. The ratios in dB are those of
    each format, at each offset. The parts are binades and how many magnitudes lie in each.
    """

    elements: tuple[Format, ...]
    """The formats, which have one scale."""
    view: View
    """Which numbers are judged."""

    @property
    def form(self) -> SheetForm:
        """What the rows are kept as."""
        formats = hashlib.blake2b(repr(self.elements).encode(), digest_size=8).hexdigest()
        width = _NUM_FIRST + len(self.elements) * len(OFFSETS)
        return SheetForm(name=f"report_details_{formats}_{self.view}", width=width, part_width=2)

    def __call__(self, records: Records, *, engine: Engine) -> Iterator[SheetRow]:
        """The row of each record."""
        yield from map(self._row, digests(records, view=self.view, engine=engine))

    def _row(self, digest: Digest) -> SheetRow:
        first = [digest.has_values, digest.is_exact]
        ratios = np.full((len(self.elements), len(OFFSETS)), math.nan)
        is_magnitude = np.isfinite(digest.values) & (digest.values != 0)
        values, counts = digest.values[is_magnitude], digest.counts[is_magnitude]
        if not values.size:
            if digest.has_values and digest.tallies.zero and is_sweepable(digest.dtype):
                ratios[:] = math.inf  # of zeros nothing is lost
            return SheetRow([*first, -math.inf, *ratios.reshape(-1).tolist()])
        exponents, places = np.unique(np.frexp(values)[1] - 1, return_inverse=True)
        parts = np.stack([exponents, np.bincount(places, weights=counts)], axis=1).astype(np.float64)
        if not is_sweepable(digest.dtype):
            return SheetRow([*first, -math.inf, *ratios.reshape(-1).tolist()], parts)
        largest = float(np.abs(values).max())
        scaled = np.ldexp(values, -math.frexp(largest)[1])
        energy = math.log2(float((counts * scaled**2).sum())) + 2 * math.frexp(largest)[1]
        for row, element in zip(ratios, self.elements, strict=True):
            steps = np.array(OFFSETS, dtype=np.float64) + element.largest_alignment(largest)
            sums = sums_of_pairs(values, counts=counts, exponents=steps, target=element)
            with np.errstate(divide="ignore"):
                row[:] = -10 * np.log10(sums.squared_error_L / sums.squared)
        return SheetRow([*first, energy, *ratios.reshape(-1).tolist()], parts)


class _Binades(NamedTuple):
    """How many magnitudes lie in each binade, of bundles of records."""

    firsts: NDArray[np.int64]
    """Of each bundle the first binade; 0 where there is none."""
    lengths: NDArray[np.int64]
    """How many binades it has."""
    counts: NDArray[np.int64]
    """The counts in all of them."""

    @classmethod
    def of(cls, bundles: NDArray[np.int64], exponents: NDArray[Any], counts: NDArray[Any], *, num: int) -> _Binades:
        """Of counts of binades, and the bundle of each."""
        exponents = exponents.astype(np.int64)
        lows, highs = np.full(num, np.iinfo(np.int64).max), np.full(num, np.iinfo(np.int64).min)
        np.minimum.at(lows, bundles, exponents)
        np.maximum.at(highs, bundles, exponents)
        is_there = highs >= lows
        lengths = np.where(is_there, highs - np.where(is_there, lows, 0) + 1, 0)
        starts = np.cumsum(lengths) - lengths
        together = np.zeros(int(lengths.sum()), dtype=np.int64)
        np.add.at(together, starts[bundles] + exponents - lows[bundles], counts.astype(np.int64))
        return cls(np.where(is_there, lows, 0), lengths, together)


class Details:
    """Collects histograms and sweeps, one digest after the other."""

    def __init__(self, bundles: Bundles, *, num_records: int, formats: Sequence[str], view: View) -> None:
        """Nothing yet.

        Raises:
            UsageError: a format is not known, or has no room for a scale.
        """
        self.bundles = bundles
        self.view, self.targets = view, parse_jobs(formats)
        self._binades = _Binades.of(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0), num=bundles.num)
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

    def add_records(self, records: Records, *, engine: Engine) -> None:
        """Take in what is known of the digest of each record.

        Raises:
            DataError: a record's bytes are missing or damaged.
            StorageError: the store cannot be read.
        """
        tensor = self._in_order(with_blocks=False)
        elements = tuple(self.targets[number].scheme.element for number in tensor)
        measure = DigestDetails(elements=elements, view=self.view)
        sheet = sheet_of(records, measure.form, functools.partial(measure, engine=engine), engine=engine)
        has_values, is_exact, self._log2_energy = (sheet.numbers[:, place] for place in range(_NUM_FIRST))
        self.num_without_values, self.num_rounded = int((has_values == 0).sum()), int((is_exact == 0).sum())
        exponents, counts = sheet.parts.T
        self._binades = _Binades.of(self.bundles.of[sheet.owners], exponents, counts, num=self.bundles.num)
        places = np.flatnonzero(np.isfinite(self._log2_energy))
        for place, number in enumerate(tensor):
            first = _NUM_FIRST + place * len(OFFSETS)
            ratios = sheet.numbers[:, first : first + len(OFFSETS)]
            self.usual[number] = ratios[:, OFFSETS.index(0)]
            self._take(number, places, ratios[places])

    def add_block_sweeps(self, records: Records, *, first: Sequence[int], engine: Engine) -> None:
        """Try the scales of blocks on as many records as `MAX_SWEPT_NBYTES` allows; `first` come first.

        Raises:
            DataError: a record's bytes are missing or damaged.
            StorageError: the store cannot be read.
        """
        with_blocks = self._in_order(with_blocks=True)
        places = np.flatnonzero([is_sweepable(dtype) for dtype in records.column("dtype").tolist()])
        if not with_blocks or not places.size:
            return
        options = SweepOptions(max_scale_exp=OFFSETS[-1], min_scale_exp=OFFSETS[0])
        jobs = tuple(self.targets[number]._replace(options=options) for number in with_blocks)
        measure = BlockSweepMeasure(jobs=jobs, view=self.view)
        sizes = records.column("nbytes")
        if sizes[places].sum() > MAX_SWEPT_NBYTES or places.size > MAX_SWEPT:
            # As many as may be read: those of findings, then one of each site, then another of each.
            is_first = np.zeros(len(records), dtype=bool)
            is_first[list(first)] = True
            again = occurrences(_codes(records, fields=_SITE_FIELDS))
            order = places[np.lexsort((places, again[places], ~is_first[places]))][:MAX_SWEPT]
            places = np.sort(order[np.cumsum(sizes[order]) <= MAX_SWEPT_NBYTES])

        def compute(chosen: Records) -> Iterator[SheetRow]:
            found = engine.map(measure, list(chosen), sizes=chosen.column("nbytes").tolist())
            return (SheetRow(payload["sqnr"].reshape(-1).tolist()) for payload in found)

        form = SheetForm(name=measure.name, width=len(jobs) * len(OFFSETS))
        sheet = sheet_of(records.take(places.tolist()), form, compute, engine=engine)
        for number, ratios in zip(with_blocks, np.split(sheet.numbers, len(jobs), axis=1), strict=True):
            is_known = ~np.isnan(ratios).any(axis=1) & np.isfinite(self._log2_energy[places])
            self.usual[number, places] = ratios[:, OFFSETS.index(0)]
            self._take(number, places[is_known], ratios[is_known])
        self.num_not_read = int(np.isfinite(self._log2_energy).sum() - np.isfinite(self._log2_energy[places]).sum())

    def _in_order(self, *, with_blocks: bool) -> list[int]:
        """The places of the formats with blocks or without, in an order in which they need not be given."""
        meant = [number for number, job in enumerate(self.targets) if (job.mode is not SweepMode.TENSOR) is with_blocks]
        return sorted(meant, key=lambda number: repr(self.targets[number]))

    def _take(self, number: int, places: NDArray[np.int64], ratios: NDArray[Any]) -> None:
        """Add the ratios in dB of records in a format to those of their bundles, in the order of the records."""
        bundles, energy = self.bundles.of[places], self._log2_energy[places]
        np.logaddexp2.at(self._signal[number], bundles, energy)
        np.logaddexp2.at(self._noise[number], bundles, energy[:, None] - ratios / _DECIBELS_PER_DOUBLING)

    def ratios(self) -> list[tuple[PageMetric, NDArray[np.float64]]]:
        """What each format makes of each record at the usual scale, as metrics of the page: the worst of several."""
        names = [job.scheme.name for job in self.targets]
        metrics = [PageMetric(f"sqnr.{name}", f"SQNR in {name}", Merge.SMALLEST, unit="dB") for name in names]
        return list(zip(metrics, self.usual, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Everything as columns, for the page's script."""
        return {
            "of": packed(self.bundles.of),
            "count": self.bundles.num,
            "together": self.bundles.together,
            "first": packed(self._binades.firsts),
            "length": packed(self._binades.lengths),
            "counts": packed(self._binades.counts),
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
