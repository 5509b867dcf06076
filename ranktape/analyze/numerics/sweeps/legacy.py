"""Reproduces the values and metrics of the legacy tool.

The tensor has one scale, a power of two with a fractional exponent, and all arithmetic is bfloat16: every operation is
computed in float32, and its result is rounded to bfloat16. A value x is divided by the scale, rounded to the format
with ties away from zero, and multiplied by the scale; each of the three results is rounded. Sums over these values are
float64, while those of the tool were float32 and depended on its number of threads.

It differs from the other modes as follows:

* The tensor is cast to bfloat16 first.
* The exponent of the format's largest value is taken as 2**(exponent bits - 1) - 1: 7 instead of 8 for fp8_e4m3, 3
  instead of 4 for fp6_e3m2, 1 instead of 2 for fp6_e2m3 and fp4_e2m1. The first level is therefore twice as coarse as
  necessary. The last level aligns the smallest value with the smallest normal one. If the first exponent is below the
  last, the two are swapped. A given first exponent of 10 and a given last exponent of -10 count as not given.
* "Underflow" counts nonzero elements below the smallest subnormal value, "flush to zero" nonzero elements below the
  smallest normal value, and "overflow" elements above the largest value. Ratios are of all elements, including NaN and
  infinities. Subnormal values are not actually flushed to zero.
* The logarithm that gives the exponents is rounded to bfloat16: above 2.87e38 it becomes 128, and the result is NaN. A
  value just below half of the smallest subnormal one rounds up to that, because one half is added to it in bfloat16.
* Squares were computed in float32: they are infinite for errors beyond 1.8e19, and inaccurate or 0 for errors below
  1e-19. The recommendation of the tool for such tensors is unknown, as `legacy_note` reports.
* The composite score compares absolute errors, with 1e-10 added to the divisor. For small tensors, such as gradients,
  it depends only on cosine and PSNR. If a level has no error, the scores are NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ranktape.analyze.numerics.formats import FORMATS, Format, Rounding
from ranktape.analyze.numerics.histograms.histogram import Histogram, count_values
from ranktape.analyze.numerics.pieces import pieces
from ranktape.analyze.numerics.sweeps.metrics import Level, levels_of
from ranktape.analyze.numerics.sweeps.options import NUM_LEVELS, SweepOptions, scale_of
from ranktape.analyze.numerics.sweeps.sums import CHUNK, SUMS, Sums
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import dtype_row

LEGACY_FORMATS = tuple(FORMATS[name] for name in ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1"))
"""The formats of the legacy tool."""

UNSET_EXPONENTS = (10, -10)
"""The defaults of the tool's `--max-scale-exp` and `--min-scale-exp`, which it treats as not given."""

SWAMP = 1e-10
"""Number that the tool's score adds to each divisor."""

BEYOND_EXPONENT = 128
"""The exponent of the first power of two beyond float32."""

_BFLOAT16 = dtype_row("bfloat16").numpy_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyLevel(Level):
    """A level with the metrics of the legacy tool in addition to those of all modes."""

    original_overflow_count: int
    """Number of elements above the format's largest value after division by the scale, infinities included."""
    original_overflow_ratio: float
    """`original_overflow_count` over the number of all elements."""
    original_underflow_count: int
    """Number of nonzero elements below the format's smallest subnormal value after division by the scale."""
    original_underflow_ratio: float
    """`original_underflow_count` over the number of all elements."""
    original_flush_count: int
    """Number of nonzero elements below the smallest normal value, which the tool reports as flushed to zero."""
    original_flush_ratio: float
    """`original_flush_count` over the number of all elements."""
    relative_error_percent: float
    """`relative_error` in percent."""
    original_score: float
    """Composite score of the tool, which may be NaN."""


def to_bfloat16(values: ArrayLike) -> NDArray[np.float32]:
    """Round values to bfloat16, ties to even, and return them as float32 in the same shape.

    Wider numbers are rounded to float32 first. NaN and infinities are unchanged, and values that round to beyond the
    largest bfloat16 number become infinite.
    """
    return _halves(values).astype(np.float32)


def legacy_histogram(numbers: NDArray[Any] | Histogram) -> Histogram:
    """The histogram of a tensor after the tool's cast to bfloat16.

    Raises:
        UsageError: the dtype is not one of records.
    """
    if isinstance(numbers, Histogram):
        if numbers.dtype == _BFLOAT16:
            return numbers
        values, occurrences = numbers.pairs()
        merged = np.zeros(1 << 16, dtype=np.int64)
        np.add.at(merged, _halves(values).view(np.uint16), occurrences)
        return Histogram(dtype=_BFLOAT16, counts=merged)
    if numbers.dtype.itemsize <= _BFLOAT16.itemsize:
        return legacy_histogram(count_values(numbers))
    parts = (np.ravel(piece) for piece in pieces(np.atleast_1d(numbers), axis=0, block_size=1))
    chunks = (part[start : start + CHUNK] for part in parts for start in range(0, part.size, CHUNK))
    return sum(map(count_values, map(_halves, chunks)), start=count_values(np.zeros(0, dtype=_BFLOAT16)))


def legacy_result(values: ArrayLike, *, target: Format, exponent: float) -> NDArray[np.float64]:
    """The results of the tool for values, after a cast to bfloat16, at one level, in the same shape.

    NaN and infinities are unchanged, and zeros lose their sign. Values above 2.87e38 after the division become NaN.
    """
    return _table(to_bfloat16(values), target=target, exponent=exponent).result


def legacy_levels(histogram: Histogram, *, target: Format, options: SweepOptions) -> tuple[LegacyLevel, ...]:
    """The levels for the exponents of the tool; none if there is no nonzero finite number.

    `histogram` is a result of `legacy_histogram`. Levels at which a finite number becomes infinite or NaN have infinite
    errors and a cosine of 0.

    Raises:
        UsageError: the tool does not support the format or the rounding.
    """
    check_legacy(target, options=options)
    values, counts = histogram.pairs()
    magnitudes = np.abs(values)
    ordinary = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    if not ordinary.size:
        return ()
    # Logarithms are exact, because the rounding of the tool's logarithms near powers of two is unknown.
    first = float(math.frexp(float(ordinary.max()))[1] - 2 ** (target.exponent_bits - 1))
    last = float(math.frexp(float(ordinary.min()))[1] - 1 - target.emin)
    unset_first, unset_last = UNSET_EXPONENTS
    if options.max_scale_exp is not None and options.max_scale_exp != unset_first:
        first = float(options.max_scale_exp)
    if options.min_scale_exp is not None and options.min_scale_exp != unset_last:
        last = float(options.min_scale_exp)
    exponents = np.linspace(max(first, last), min(first, last), options.num_levels or NUM_LEVELS)
    tables = [_table(magnitudes.astype(np.float32), target=target, exponent=float(exponent)) for exponent in exponents]
    sums = _sums(magnitudes, counts=counts, tables=tables, target=target)
    levels = levels_of(sums, exponents=exponents.tolist())
    original_scores = _original_scores(levels)
    return tuple(
        _with_originals(level, table=table, counts=counts, target=target, score=score)
        for level, table, score in zip(levels, tables, original_scores, strict=True)
    )


def legacy_note(levels: Sequence[Level], *, largest: float) -> str:
    """A note that the tool may have chosen another level if its float32 squares overflow or underflow; else empty."""
    limits = np.finfo(np.float32)
    smallest = float(limits.smallest_normal)
    if largest**2 <= float(limits.max) and not any(0 < level.mse < smallest for level in levels):
        return ""
    what = "overflow" if largest > 1 else "vanish"
    return f"the original's squares in float32 {what}: it may have chosen another level"


def check_legacy(target: Format, *, options: SweepOptions) -> None:
    """Check that the tool supports a format and a rounding.

    Raises:
        UsageError: the tool does not support them.
    """
    if target not in LEGACY_FORMATS:
        allowed = ", ".join(allowed.name for allowed in LEGACY_FORMATS)
        raise UsageError(f"format {target.name!r} is not allowed with --sweep-mode legacy: give one of {allowed}")
    if options.rounding not in {None, Rounding.AWAY}:
        raise UsageError(
            f"--rounding {options.rounding} is not allowed with --sweep-mode legacy, "
            "which rounds ties away: leave it out"
        )


class _Rounded(NamedTuple):
    """Values at one level, in their order."""

    scaled: NDArray[np.float32]
    """The values after division by the scale."""
    result: NDArray[np.float64]
    """The values after rounding and multiplication by the scale."""


def _table(values: NDArray[np.float32], *, target: Format, exponent: float) -> _Rounded:
    # The tool's scale is a float64 that operations with bfloat16 convert to float32: 0 or infinite if far from 1.
    with np.errstate(all="ignore"):
        scale = np.float32(scale_of(exponent))
        scaled = to_bfloat16(values / scale)
        result = to_bfloat16(_rounded(scaled, target=target) * scale)
    return _Rounded(scaled, result.astype(np.float64))


def _rounded(scaled: NDArray[np.float32], *, target: Format) -> NDArray[np.float32]:
    """Round values to the format, with each step in bfloat16."""
    magnitudes = np.abs(scaled)
    logarithms = to_bfloat16(np.log2(np.where(magnitudes == 0, np.float32(1), magnitudes)))
    # 2**128 is infinite both in bfloat16 and in float32.
    exponents = np.clip(np.floor(logarithms), target.emin, BEYOND_EXPONENT)
    powers = np.ldexp(np.float32(1), np.where(np.isnan(exponents), 0, exponents).astype(np.int32))
    units = np.float32(1 << target.mantissa_bits)
    in_units = to_bfloat16(to_bfloat16(magnitudes / powers) * units)
    rounded_units = np.sign(scaled) * np.floor(to_bfloat16(in_units + np.float32(0.5)))
    rounded = to_bfloat16(to_bfloat16(rounded_units / units) * powers)
    clamped = np.clip(rounded, -np.float32(target.maximum), np.float32(target.maximum))
    return np.where(np.isinf(scaled), scaled, clamped)


def _halves(values: ArrayLike) -> NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):  # for numbers beyond float32 and signalling NaN
        return np.asarray(values).astype(np.float32).astype(_BFLOAT16)


def _sums(
    magnitudes: NDArray[np.float64], *, counts: NDArray[np.int64], tables: Sequence[_Rounded], target: Format
) -> Sums:
    is_finite = np.isfinite(magnitudes)
    values, weights = magnitudes[is_finite], counts[is_finite].astype(np.float64)
    is_nonzero = values > 0
    rows = []
    for table in tables:
        scaled, result = table.scaled[is_finite], np.abs(table.result[is_finite])
        is_number = np.isfinite(result)
        error = np.where(is_number, np.abs(values - np.where(is_number, result, 0.0)), np.inf)
        finite_result = np.where(is_number, result, 0.0)
        rows.append(
            {
                "squared_error": (weights * error * error).sum(),
                "absolute_error": (weights * error).sum(),
                "squared_result": (weights * finite_result * finite_result).sum() if is_number.all() else np.inf,
                "product": (weights * finite_result * values).sum(),
                "largest_error": error.max(),
                "overflow": weights[scaled >= target.overflow_start_of(Rounding.AWAY)].sum(),
                "underflow": weights[is_nonzero & (scaled < target.min_normal)].sum(),
                "flushed": weights[is_nonzero & (result == 0)].sum(),
            }
        )
    return Sums(
        shift=0,
        num_finite=int(counts[is_finite].sum()),
        largest=float(values.max()),
        absolute=float((weights * values).sum()),
        squared=float((weights * values * values).sum()),
        **{f"{name}_L": np.array([row[name] for row in rows]) for name in SUMS},
    )


def _original_scores(levels: Sequence[Level]) -> list[float]:
    def normalised(name: str, *, unit: float = 1.0) -> NDArray[np.float64]:
        metrics = unit * np.array([getattr(level, name) for level in levels])
        return np.asarray((metrics - metrics.min()) / (metrics.max() - metrics.min() + SWAMP))

    cosines = np.array([level.cosine for level in levels])
    with np.errstate(invalid="ignore"):  # for infinity - infinity in PSNR
        weighted = (
            0.3 * (1 - normalised("mse"))
            + 0.3 * cosines
            + 0.2 * normalised("psnr")
            + 0.1 * (1 - normalised("mae"))
            + 0.1 * (1 - normalised("relative_error", unit=100.0))
        )
    scores: list[float] = weighted.tolist()
    return scores


def _with_originals(
    level: Level, *, table: _Rounded, counts: NDArray[np.int64], target: Format, score: float
) -> LegacyLevel:
    num_elements = int(counts.sum())
    masks = {
        "overflow": table.scaled > target.maximum,
        "underflow": (table.scaled > 0) & (table.scaled < target.min_subnormal),
        "flush": (table.scaled > 0) & (table.scaled < target.min_normal),
    }
    original_counts = {name: int(counts[mask].sum()) for name, mask in masks.items()}
    originals: dict[str, Any] = {f"original_{name}_count": count for name, count in original_counts.items()}
    originals |= {f"original_{name}_ratio": count / num_elements for name, count in original_counts.items()}
    return LegacyLevel(
        **dataclasses.asdict(level),
        **originals,
        relative_error_percent=100 * level.relative_error,
        original_score=score,
    )
