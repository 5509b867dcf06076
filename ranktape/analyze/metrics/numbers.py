"""Gives every metric of many records as columns, and of their samples; what is kept of these is read at once."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.digest_measure import digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.sheet import Sheet, SheetForm, SheetRow, answer_of, record_keys_of, sheet_of
from ranktape.analyze.engine.values import View
from ranktape.analyze.metrics.gather import Groups, merged_digests
from ranktape.analyze.metrics.masks import additive_masks
from ranktape.analyze.metrics.metric import METRICS, PERCENTILES, count_names
from ranktape.analyze.metrics.target import parse_targets
from ranktape.analyze.numerics.digest import SAMPLE_METRICS, Digest
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.table import Kind
from ranktape.storage import Records

NARROW_FORMAT = "fp8_e5m2"
"""The 8-bit format with the widest range: what it flushes even with a scale of its own, no other holds."""

_GRID_TOLERANCE = 2.0**-6
"""What rounding after a scale may take from the ratio of two numbers."""

_COARSE_BITS = 4
"""Significant bits of fp8_e4m3, the most that an 8-bit floating-point format has."""

_MIN_COARSE = 8
"""Magnitudes of so few bits that differ: fewer may come from a loss, as the multiples of 1/16 of a mean."""

_SATURATING = {"float8_e4m3fn": "fp8_e4m3"}
"""Types whose conversions end at the largest number, and the formats that say which that is."""


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


def _coarse(digest: Digest) -> float:
    magnitudes = np.abs(digest.values).astype(np.float64)
    mantissas = np.frexp(magnitudes)[0] * 2**_COARSE_BITS
    is_coarse = (mantissas == np.floor(mantissas)) & np.isfinite(magnitudes) & (magnitudes > 0)
    is_varied = np.unique(magnitudes[is_coarse]).size >= _MIN_COARSE
    return float(digest.counts[is_coarse].sum()) if is_varied else 0.0


def _flushed(digest: Digest) -> float:
    """The part of nonzero values that is zero in the format when the largest one is scaled to its largest number."""
    if not digest.has_values:
        return np.nan
    (target,) = parse_targets(NARROW_FORMAT, Scaling.TENSOR)
    tallies = digest.tallies
    nonzero = max(1, tallies.num_elements - tallies.zero - tallies.nan)
    return digest.count(target.limits(largest=tallies.largest_finite)).flushed / nonzero


_QUANTILES = {f"p{percent}": Fraction(percent) / 100 for percent in PERCENTILES}

_OF: dict[str, Callable[[Digest], float | None]] = {
    **{name: one.of for name, one in METRICS.items() if name not in _QUANTILES},
    "saturated": _saturated,
    "floored": _floored,
    "coarse": _coarse,
    "flushed": _flushed,
    "is_exact": lambda digest: digest.is_exact,
    "has_percentiles": lambda digest: digest.has_values and "complex" not in digest.dtype,
    "has_values": lambda digest: digest.has_values,
}

NUMBERS = (*_OF, *_QUANTILES)
"""What is kept of each record: every metric that has a name, and what findings know of a digest beside these."""


def row_of(digest: Digest) -> SheetRow:
    """What is kept of a digest."""
    numbers = [one(digest) for one in _OF.values()]
    has_percentiles = digest.has_values and "complex" not in digest.dtype
    known = digest.quantiles([*_QUANTILES.values()]) if has_percentiles else [None] * len(_QUANTILES)
    parts = None
    if digest.samples is not None:
        parts = np.stack([digest.samples[name] for name in SAMPLE_METRICS], axis=1)
    return SheetRow([*numbers, *known], parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordNumbers:
    """`NUMBERS` of many records, or of groups of them."""

    sheet: Sheet
    """A column for each."""

    def column(self, name: str) -> NDArray[np.float64]:
        """One number for each record, NaN where there is none."""
        found: NDArray[np.float64] = self.sheet.numbers[:, NUMBERS.index(name)]
        return found

    def cells(self, name: str) -> list[Any]:
        """The same as Python has it, None where there is none; counts are whole."""
        is_whole = name in METRICS and METRICS[name].kind is Kind.INTEGER
        return self.sheet.cells(NUMBERS.index(name), is_whole=is_whole)

    def of_samples(self, name: str) -> NDArray[np.float64]:
        """One of `SAMPLE_METRICS` of the samples of all records."""
        found: NDArray[np.float64] = self.sheet.parts[:, SAMPLE_METRICS.index(name)]
        return found


def form_of(view: View) -> SheetForm:
    """What rows of `NUMBERS` are kept as."""
    return SheetForm(name=f"numbers_{view}", width=len(NUMBERS), part_width=len(SAMPLE_METRICS))


def numbers_of(records: Records, *, view: View, engine: Engine | None = None) -> RecordNumbers:
    """What is known of each record; digests are looked at of those alone that were never asked about.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: of a record values were kept that are rounded already, and are to be looked at as they were seen.
    """
    used = engine or Engine()
    compute = functools.partial(_rows, view=view, engine=used)
    sheet = sheet_of(records, form_of(view), compute, engine=used)
    # What is kept of a record does not know the others, of which it depends what a mask is.
    (masks,) = np.nonzero(additive_masks(records))
    if masks.size:
        numbers, parts = sheet.numbers.copy(), sheet.parts.copy()
        inf = numbers[masks, NUMBERS.index("overflow.inf.count")]
        for kind in ("total", "lower"):
            count, ratio = (NUMBERS.index(name) for name in count_names(kind))
            numbers[masks, count] -= inf
            numbers[masks, ratio] = numbers[masks, count] / np.maximum(1, numbers[masks, NUMBERS.index("elements")])
        if parts.size:
            of_masks = np.isin(sheet.owners, masks)
            parts[of_masks, SAMPLE_METRICS.index("lower")] -= parts[of_masks, SAMPLE_METRICS.index("inf")]
        sheet = dataclasses.replace(sheet, numbers=numbers, parts=parts)
    return RecordNumbers(sheet=sheet)


def _rows(records: Records, *, view: View, engine: Engine) -> Iterator[SheetRow]:
    yield from map(row_of, digests(records, view=view, engine=engine))


def numbers_of_groups(records: Records, groups: Groups, *, view: View, engine: Engine | None = None) -> RecordNumbers:
    """What is known of each group of records as if it were one; of samples nothing is said. Raises as `numbers_of`."""
    used = engine or Engine()
    if len(groups.keys) == len(records):
        known = numbers_of(records, view=view, engine=used).sheet.numbers
        order = np.argsort(groups.numbers)
        return RecordNumbers(sheet=Sheet(numbers=known[order], sizes=np.zeros_like(order), parts=np.zeros((0, 0))))

    def compute() -> list[SheetRow]:
        rows = {number: row_of(one).numbers for number, one in merged_digests(records, groups, view=view, engine=used)}
        return [SheetRow(rows[number]) for number in range(len(groups.keys))]

    about = [*record_keys_of(records), *map(str, groups.numbers)] if used.use_cache else []
    return RecordNumbers(sheet=answer_of(records.reader, about, form_of(view), compute, engine=used))
