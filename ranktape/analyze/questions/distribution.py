"""Shows the distribution of the values of a selection, or of each of its groups.

As bins of equal width, of the values or of values normalised to [0, 1]; as binades; in comparison with the normal
distribution; and by exponent, in comparison with the range of formats. All numbers are computed from digests, for which
each record is read once, if it is not cached.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.numbers import group_digests
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import group_records, words
from ranktape.analyze.numerics.digest import Digest, finite
from ranktape.analyze.numerics.distributions import (
    NARROW_FORMATS,
    Bins,
    FormatRange,
    aligned_exponent,
    binades,
    fit_normal,
    format_range,
    linear_bins,
    log2_bins,
)
from ranktape.analyze.numerics.formats import Format, parse_format
from ranktape.analyze.questions.stats import view_text
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage import Records
from ranktape.storage.format.record_info import Keep

MAX_BINS = 1 << 16
"""Maximum number of bins: the number of values of a 16-bit type."""

MAX_PER_BINADE = 256
"""Maximum number of bins in a binade: twice the number of bfloat16 values in it."""


class DistributionKind(enum.StrEnum):
    """The kind of distribution to show: the choices of `--kind`."""

    LINEAR = "linear"
    """Bins of equal width."""
    NORMALISED = "normalised"
    """Bins of equal width of (x - minimum) / (maximum - minimum), which ranges from 0 to 1."""
    LOG2 = "log2"
    """Magnitudes in binades, or in equal parts of binades."""
    EXPONENTS = "exponents"
    """The number of values for each power of two, and the formats that represent them."""
    FORMATS = "formats"
    """The effect of each format on the values, without a scale and with the largest value aligned."""
    NORMAL = "normal"
    """The normal distribution with the same mean and standard deviation, and the distance to it."""
    QQ = "qq"
    """Quantiles in comparison with those of that normal distribution."""


_OWNERS = {
    "bins": (DistributionKind.LINEAR, DistributionKind.NORMALISED),
    "per_binade": (DistributionKind.LOG2,),
    "points": (DistributionKind.QQ,),
    "format": (DistributionKind.EXPONENTS, DistributionKind.FORMATS),
}
"""The kinds for which each argument is valid."""


def distribution(
    records: Records,
    *,
    kind: Literal["linear", "normalised", "log2", "exponents", "formats", "normal", "qq"]
    | DistributionKind
    | None = None,
    bins: int | None = None,
    per_binade: int | None = None,
    points: int | None = None,
    format: str | Sequence[str] = (),  # noqa: A002 - the option's name
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> Table:
    """Show the distribution of the values of a selection, or of each group of `by`, with one row for each bin.

    NaN and infinities are in no bin, and zeros are in no binade; a note has their numbers. A group without finite
    values has rows only for the kinds formats and normal. Complex values are counted by the larger of their parts.
    Records that store only statistics are left out, and a note has their number. For tensors wider than 16 bits with
    many distinct values, distributions are approximate (within 2^-10); their binades are exact.

    Args:
        kind: Bins of values, of values scaled to [0, 1], or of binades; powers of two; effects of formats; distance
            from a normal distribution; quantiles against it. Default: log2, with `bins` linear.
        bins (N): Bins of equal width [64].
        per_binade (N): Bins in each binade [1].
        points (N): Quantiles [101].
        format (NAME): Only this format: fp8_e4m3, ...; repeatable.

    Raises:
        DataError: a record's bytes are missing or damaged.
        NoRecordsError: of no record values were kept.
        StorageError: the store cannot be read.
        UnknownFieldError: `by` names no field of a record.
        UsageError: there is no such kind or format, or a number is out of its range.
    """
    if kind is not None and kind not in list(DistributionKind):
        raise UsageError(f"kind {str(kind)!r} is not known: use one of {', '.join(DistributionKind)}")
    default = DistributionKind.LOG2 if bins is None else DistributionKind.LINEAR
    chosen = default if kind is None else DistributionKind(kind)
    options = _options(chosen, bins=bins, per_binade=per_binade, points=points, formats=words(format))
    answer, chosen_view = ANSWERS[chosen], view or View.COMPUTE
    stored = records.where(f"keep != '{Keep.STATISTICS}'")
    if not len(stored):
        raise NoRecordsError("no record stores values or a histogram: statistics contain no distribution")
    groups = group_records(stored, by=by)
    *keys, count = groups.columns
    heads = list(groups.heads)
    tables: list[list[tuple[Any, ...]]] = [[] for _ in heads]
    counts, is_exact, is_complex = Counter[str](), True, False
    for number, digest in group_digests(stored, groups, view=chosen_view, engine=engine):
        tables[number] = [(*heads[number], *row) for row in answer.rows(digest, options)]
        counts.update({kind: getattr(digest.tallies, kind) for kind in ("nan", "inf", "zero")})
        is_exact, is_complex = is_exact and digest.is_exact, is_complex or "complex" in digest.dtype
    return Table(
        title=f"{answer.title}, {view_text(chosen_view)}",
        columns=(*keys, replace(count, is_key=True), *answer.columns),
        rows=tuple(row for rows in tables for row in rows),
        notes=tuple(_notes(counts, num_without=len(records) - len(stored), is_exact=is_exact, is_complex=is_complex)),
        is_whole=True,
    )


def _options(
    kind: DistributionKind, *, bins: int | None, per_binade: int | None, points: int | None, formats: Sequence[str]
) -> Options:
    """The options of a kind, with defaults. Raises an error for an option of another kind."""
    for name, value in {"bins": bins, "per_binade": per_binade, "points": points, "format": formats or None}.items():
        if value is not None and kind not in _OWNERS[name]:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} does not apply to --kind {kind}: it is for {' and '.join(_OWNERS[name])}")
    return Options(
        bins=_checked("bins", 64 if bins is None else bins, most=MAX_BINS),
        per_binade=_checked("per_binade", 1 if per_binade is None else per_binade, most=MAX_PER_BINADE),
        points=_checked("points", 101 if points is None else points, most=MAX_BINS),
        formats=tuple(map(_holder, formats or NARROW_FORMATS)),
    )


def _checked(name: str, number: int, *, most: int) -> int:
    if not 1 <= number <= most:
        raise UsageError(f"{name}={number} is not allowed: give a number from 1 to {most}")
    return number


def _holder(name: str) -> Format:
    row = parse_format(name)
    if not row.is_signed:
        names = ", ".join(NARROW_FORMATS)
        raise UsageError(f"format {name!r} is a format of scales, not of values: use one of {names}")
    return row


def _notes(counts: Mapping[str, int], *, num_without: int, is_exact: bool, is_complex: bool) -> Iterator[str]:
    yield f"{counts['nan']} NaN and {counts['inf']} Inf are in no bin; {counts['zero']} values are zero"
    if num_without:
        yield f"{num_without} records are left out: they store only statistics"
    if not is_exact:
        yield "many values wider than 16 bits: cumulative shares are within 2^-10 of the exact ones"
    if is_complex:
        yield "complex values are counted by the larger of their parts"


Rows = Iterator[tuple[Any, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of all kinds."""

    bins: int
    """Maximum number of bins of equal width."""
    per_binade: int
    """Number of bins in each binade."""
    points: int
    """Number of quantiles."""
    formats: tuple[Format, ...]
    """The formats to compare with."""


@dataclass(frozen=True, slots=True)
class KindTable:
    """The table that a kind creates from a digest."""

    title: str
    """Title of the distribution."""
    columns: tuple[Column, ...]
    """The columns of the table."""
    rows: Callable[[Digest, Options], Rows]
    """The rows for one digest; none if there is nothing to show."""


def _columns(*texts: str) -> tuple[Column, ...]:
    """One column for each text `name kind head`. A leading dot marks a detail."""
    columns = []
    for text in texts:
        name, kind, *head = text.removeprefix(".").split(" ", 2)
        columns.append(Column(name=name, kind=Kind(kind), head=" ".join(head), is_detail=text.startswith(".")))
    return tuple(columns)


def _linear(digest: Digest, options: Options) -> Rows:
    bins = linear_bins(digest, options.bins)
    return _zipped(bins.edges[:-1], bins.edges[1:], bins.counts, bins.ratio(), bins.density(), bins.relative_density())


def _normalised(digest: Digest, options: Options) -> Rows:
    numbers = finite(digest)
    # Without values, these are NaN, and the comparison is false.
    if not numbers.minimum < numbers.maximum:
        return iter(())
    bins = linear_bins(digest, options.bins)
    # Divided by 2, because the difference of two numbers may overflow.
    places = (bins.edges / 2 - numbers.minimum / 2) / (numbers.maximum / 2 - numbers.minimum / 2)
    density = bins.ratio() / np.diff(places)
    edges = (places[:-1], places[1:], bins.edges[:-1], bins.edges[1:])
    return _zipped(*edges, bins.counts, bins.ratio(), bins.density(), density, bins.relative_density())


def _log2(digest: Digest, options: Options) -> Rows:
    bins: Bins = log2_bins(digest, options.per_binade)
    counts = (bins.counts, bins.num_negative, bins.ratio())
    return _zipped(bins.edges[:-1], bins.edges[1:], *counts, bins.density(), bins.relative_density())


def _exponents(digest: Digest, options: Options) -> Rows:
    bins = log2_bins(digest)
    aligned = [format_range(digest, row, aligned_exponent(digest, row) or 0) for row in options.formats]
    unscaled = [format_range(digest, row) for row in options.formats]
    total = max(1, digest.tallies.num_elements)
    for exponent, count in zip(binades(bins).tolist(), bins.counts.tolist(), strict=True):
        if not count:
            continue
        lower, upper = np.ldexp(1.0, exponent), np.ldexp(1.0, exponent + 1) if exponent < _TOP else np.inf
        held = (_with_all_bits(exponent, aligned), _with_fewer(exponent, aligned), _with_all_bits(exponent, unscaled))
        yield (exponent, float(lower), float(upper), count, count / total, *held)


_TOP = 1023
"""The exponent of the largest float64."""


def _with_all_bits(exponent: int, held: list[FormatRange]) -> list[str]:
    return [one.format for one in held if one.lowest_normal_exponent <= exponent <= one.highest_exponent]


def _with_fewer(exponent: int, held: list[FormatRange]) -> list[str]:
    return [one.format for one in held if one.lowest_exponent <= exponent < one.lowest_normal_exponent]


def _formats(digest: Digest, options: Options) -> Rows:
    for row in options.formats:
        yield (row.name, "none", *_held_cells(format_range(digest, row)))
        exponent = aligned_exponent(digest, row)
        if exponent is not None:
            yield (row.name, "aligned", *_held_cells(format_range(digest, row, exponent)))


def _held_cells(held: FormatRange) -> tuple[Any, ...]:
    total = max(1, held.num_elements)
    counts = [getattr(held, kind) for kind in _FATES]
    cells = [cell for count in counts for cell in (count, count / total)]
    ends = (held.scale_exponent, held.highest_exponent, held.lowest_normal_exponent, held.lowest_exponent)
    return (*ends, *cells)


_FATES = {
    "above": "above",
    "normal": "normal",
    "subnormal": "subnormal",
    "flushed": "flushed",
    "zero": "zero",
    "nan": "NaN",
    "inf": "Inf",
}
"""What a format does to a value, and the heading in text."""


def _normal(digest: Digest, options: Options) -> Rows:
    fit = fit_normal(digest, num_points=options.points)
    known = None if "complex" in digest.dtype else digest.statistics
    skewness, kurtosis = (None, None) if known is None else (known.skewness, known.kurtosis)
    moments = (fit.num_values, fit.mean, fit.std, skewness, kurtosis)
    yield (*moments, fit.ks_distance, fit.ks_p_value, fit.qq_correlation)


def _qq(digest: Digest, options: Options) -> Rows:
    fit = fit_normal(digest, num_points=options.points)
    return _zipped(fit.probabilities, fit.theoretical, fit.observed)


def _zipped(*columns: NDArray[Any]) -> Rows:
    return zip(*(column.tolist() for column in columns), strict=True)


_EDGES = ("lower float from", "upper float to")
_COUNT = ("count integer", "ratio ratio share in bins")
_RELATIVE = "relative_density bar relative density"

ANSWERS: Mapping[DistributionKind, KindTable] = {
    DistributionKind.LINEAR: KindTable(
        "histogram of the values", _columns(*_EDGES, *_COUNT, "density float", _RELATIVE), _linear
    ),
    DistributionKind.NORMALISED: KindTable(
        "histogram of the values, normalised to [0, 1]",
        _columns(
            "normalised.lower float from",
            "normalised.upper float to",
            "lower float value from",
            "upper float value to",
            *_COUNT,
            "density float raw density",
            "normalised.density float density",
            _RELATIVE,
        ),
        _normalised,
    ),
    DistributionKind.LOG2: KindTable(
        "histogram of the values in binades",
        (
            *_columns(*_EDGES, _COUNT[0], "negative integer negative", _COUNT[1]),
            Column(name="density", kind=Kind.FLOAT, unit="per binade"),
            *_columns(_RELATIVE),
        ),
        _log2,
    ),
    DistributionKind.EXPONENTS: KindTable(
        "values by power of two",
        _columns(
            "exponent integer",
            *_EDGES,
            _COUNT[0],
            "ratio ratio share",
            "normal_in list with a scale: normal in",
            "subnormal_in list subnormal in",
            ".unscaled.normal_in list without a scale: normal in",
        ),
        _exponents,
    ),
    DistributionKind.FORMATS: KindTable(
        "values in each format",
        _columns(
            "format text",
            "scale text",
            "scale_exponent integer scale 2^",
            "highest_exponent integer largest 2^",
            "lowest_normal_exponent integer smallest normal 2^",
            "lowest_exponent integer smallest 2^",
            *(
                text
                for fate, head in _FATES.items()
                for text in (f".{fate}.count integer {head} count", f"{fate}.ratio ratio {head}")
            ),
        ),
        _formats,
    ),
    DistributionKind.NORMAL: KindTable(
        "normal distribution fitted to the values",
        _columns(
            "finite integer",
            "mean float",
            "std float",
            "skewness float",
            "kurtosis float",
            "ks_distance float KS distance",
            "ks_p_value float KS p-value",
            "qq_correlation cosine QQ correlation",
        ),
        _normal,
    ),
    DistributionKind.QQ: KindTable(
        "quantiles of the values and of the fitted normal distribution",
        _columns("probability float", "theoretical float fitted", "observed float observed"),
        _qq,
    ),
}
"""The table of each kind."""
