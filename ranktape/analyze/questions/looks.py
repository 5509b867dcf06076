"""Gives the columns and the rows of each way to look at a distribution."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.digests.digest import finite
from ranktape.analyze.numerics.distributions.bins import Bins, linear_bins, log2_bins
from ranktape.analyze.numerics.distributions.normal_fit import fit_normal
from ranktape.analyze.numerics.distributions.occupancy import HeldRange, Occupancy, aligned_exponent, held_by, occupancy
from ranktape.analyze.table import Column, Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.digests.digest import Digest
    from ranktape.analyze.numerics.formats import Format

Rows = Iterator[tuple[Any, ...]]


class Look(enum.StrEnum):
    """What is shown of a distribution: the choices of `--kind`."""

    LINEAR = "linear"
    """Bins of equal width."""
    NORMALISED = "normalised"
    """Bins of equal width of (x - minimum) / (maximum - minimum), which is from 0 to 1."""
    LOG2 = "log2"
    """Magnitudes in octaves, or in equal parts of octaves."""
    EXPONENTS = "exponents"
    """How many values each power of two has, and which formats hold them."""
    FORMATS = "formats"
    """What each format does to the values, without a scale and with the largest value aligned."""
    NORMAL = "normal"
    """The normal distribution of the same mean and standard deviation, and how far it is."""
    QQ = "qq"
    """Quantiles beside those of that normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookOptions:
    """What can be said about a look."""

    bins: int
    """Bins of equal width, at most."""
    per_octave: int
    """Bins in each octave."""
    points: int
    """Quantiles."""
    formats: tuple[Format, ...]
    """Which formats may hold the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAnswer:
    """What a look makes of a digest."""

    title: str
    """What it shows."""
    columns: tuple[Column, ...]
    """Of its table."""
    rows: Callable[[Digest, LookOptions], Rows]
    """Of one digest; none where there is nothing to show."""


def _column(name: str, kind: Kind, head: str = "", *, is_detail: bool = False) -> Column:
    return Column(name=name, kind=kind, head=head, is_detail=is_detail)


_COUNT = (_column("count", Kind.INTEGER), _column("ratio", Kind.RATIO, "of all in bins"))
_EDGES = (_column("lower", Kind.FLOAT, "from"), _column("upper", Kind.FLOAT, "to"))
_RELATIVE = _column("relative_density", Kind.FLOAT, "of the largest")


def _linear(digest: Digest, options: LookOptions) -> Rows:
    bins = linear_bins(digest, options.bins)
    return _zipped(bins.edges[:-1], bins.edges[1:], bins.counts, bins.ratio(), bins.density(), bins.relative_density())


def _normalised(digest: Digest, options: LookOptions) -> Rows:
    numbers = finite(digest)
    # NaN, where there is no value, is equal to nothing.
    if not numbers.minimum < numbers.maximum:
        return iter(())
    bins = linear_bins(digest, options.bins)
    # In halves: the difference of two numbers may be beyond all of them.
    places = (bins.edges / 2 - numbers.minimum / 2) / (numbers.maximum / 2 - numbers.minimum / 2)
    density = bins.ratio() / np.diff(places)
    return _zipped(
        places[:-1],
        places[1:],
        bins.edges[:-1],
        bins.edges[1:],
        bins.counts,
        bins.ratio(),
        bins.density(),
        density,
        bins.relative_density(),
    )


def _log2(digest: Digest, options: LookOptions) -> Rows:
    bins: Bins = log2_bins(digest, options.per_octave)
    return _zipped(
        bins.edges[:-1],
        bins.edges[1:],
        bins.counts,
        bins.num_negative,
        bins.ratio(),
        bins.density(),
        bins.relative_density(),
    )


def _exponents(digest: Digest, options: LookOptions) -> Rows:
    occupied = occupancy(digest)
    aligned = [_aligned(occupied, row) for row in options.formats]
    unscaled = [held_by(occupied, row) for row in options.formats]
    total = max(1, occupied.num_elements)
    for exponent, count in zip(occupied.exponents.tolist(), occupied.counts.tolist(), strict=True):
        if not count:
            continue
        lower, upper = np.ldexp(1.0, exponent), np.ldexp(1.0, exponent + 1) if exponent < _TOP else np.inf
        held = (_with_all_bits(exponent, aligned), _with_fewer(exponent, aligned), _with_all_bits(exponent, unscaled))
        yield (exponent, float(lower), float(upper), count, count / total, *held)


_TOP = 1023
"""The exponent of the largest float64."""


def _aligned(occupied: Occupancy, row: Format) -> HeldRange:
    return held_by(occupied, row, aligned_exponent(occupied, row) or 0)


def _with_all_bits(exponent: int, held: list[HeldRange]) -> list[str]:
    return [one.format for one in held if one.lowest_normal_exponent <= exponent <= one.highest_exponent]


def _with_fewer(exponent: int, held: list[HeldRange]) -> list[str]:
    return [one.format for one in held if one.lowest_exponent <= exponent < one.lowest_normal_exponent]


def _formats(digest: Digest, options: LookOptions) -> Rows:
    occupied = occupancy(digest)
    for row in options.formats:
        yield (row.name, "none", *_held_cells(held_by(occupied, row)))
        exponent = aligned_exponent(occupied, row)
        if exponent is not None:
            yield (row.name, "aligned", *_held_cells(held_by(occupied, row, exponent)))


def _held_cells(held: HeldRange) -> tuple[Any, ...]:
    total = max(1, held.num_elements)
    counts = [getattr(held, kind) for kind in _FATES]
    cells = [cell for count in counts for cell in (count, count / total)]
    ends = (held.scale_exponent, held.highest_exponent, held.lowest_normal_exponent, held.lowest_exponent)
    return (*ends, *cells)


_FATES = {
    "above": "above",
    "normal": "with all bits",
    "subnormal": "with fewer",
    "flushed": "flushed",
    "zero": "zero",
    "nan": "NaN",
    "inf": "Inf",
}
"""What becomes of a value, and what text writes above it."""


def _normal(digest: Digest, options: LookOptions) -> Rows:
    fit = fit_normal(digest, num_points=options.points)
    known = None if "complex" in digest.dtype else digest.statistics
    skewness, kurtosis = (None, None) if known is None else (known.skewness, known.kurtosis)
    yield (
        fit.num_values,
        fit.mean,
        fit.std,
        skewness,
        kurtosis,
        fit.ks_distance,
        fit.ks_p_value,
        fit.qq_correlation,
    )


def _qq(digest: Digest, options: LookOptions) -> Rows:
    fit = fit_normal(digest, num_points=options.points)
    return _zipped(fit.probabilities, fit.theoretical, fit.observed)


def _zipped(*columns: NDArray[Any]) -> Rows:
    return zip(*(column.tolist() for column in columns), strict=True)


ANSWERS: Mapping[Look, LookAnswer] = {
    Look.LINEAR: LookAnswer(
        title="histogram",
        columns=(*_EDGES, *_COUNT, _column("density", Kind.FLOAT), _RELATIVE),
        rows=_linear,
    ),
    Look.NORMALISED: LookAnswer(
        title="histogram, normalised to [0, 1],",
        columns=(
            _column("normalised.lower", Kind.FLOAT, "from"),
            _column("normalised.upper", Kind.FLOAT, "to"),
            _column("lower", Kind.FLOAT, "value from"),
            _column("upper", Kind.FLOAT, "value to"),
            *_COUNT,
            _column("density", Kind.FLOAT, "raw density"),
            _column("normalised.density", Kind.FLOAT, "density"),
            _RELATIVE,
        ),
        rows=_normalised,
    ),
    Look.LOG2: LookAnswer(
        title="histogram in octaves",
        columns=(
            *_EDGES,
            _COUNT[0],
            _column("negative", Kind.INTEGER, "of them negative"),
            _COUNT[1],
            Column(name="density", kind=Kind.FLOAT, unit="per octave"),
            _RELATIVE,
        ),
        rows=_log2,
    ),
    Look.EXPONENTS: LookAnswer(
        title="powers of two",
        columns=(
            _column("exponent", Kind.INTEGER),
            *_EDGES,
            _COUNT[0],
            _column("ratio", Kind.RATIO, "of all"),
            _column("normal_in", Kind.LIST, "aligned: all bits in"),
            _column("subnormal_in", Kind.LIST, "fewer bits in"),
            _column("unscaled.normal_in", Kind.LIST, "without a scale: all bits in", is_detail=True),
        ),
        rows=_exponents,
    ),
    Look.FORMATS: LookAnswer(
        title="what formats hold",
        columns=(
            _column("format", Kind.TEXT),
            _column("scale", Kind.TEXT),
            _column("scale_exponent", Kind.INTEGER, "scale 2^"),
            _column("highest_exponent", Kind.INTEGER, "holds up to 2^"),
            _column("lowest_normal_exponent", Kind.INTEGER, "with all bits from 2^"),
            _column("lowest_exponent", Kind.INTEGER, "from 2^"),
            *(
                column
                for fate, head in _FATES.items()
                for column in (
                    _column(f"{fate}.count", Kind.INTEGER, f"{head} count", is_detail=True),
                    _column(f"{fate}.ratio", Kind.RATIO, head),
                )
            ),
        ),
        rows=_formats,
    ),
    Look.NORMAL: LookAnswer(
        title="normal fit",
        columns=(
            _column("finite", Kind.INTEGER),
            _column("mean", Kind.FLOAT),
            _column("std", Kind.FLOAT),
            _column("skewness", Kind.FLOAT),
            _column("kurtosis", Kind.FLOAT),
            _column("ks_distance", Kind.FLOAT, "KS distance"),
            _column("ks_p_value", Kind.FLOAT, "its p value"),
            _column("qq_correlation", Kind.COSINE, "QQ correlation"),
        ),
        rows=_normal,
    ),
    Look.QQ: LookAnswer(
        title="quantiles beside those of the normal fit",
        columns=(
            _column("probability", Kind.FLOAT),
            _column("theoretical", Kind.FLOAT, "of the fit"),
            _column("observed", Kind.FLOAT, "of the values"),
        ),
        rows=_qq,
    ),
}
"""What each look shows."""
