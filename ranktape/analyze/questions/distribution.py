"""Gives how the values of a selection are distributed, or those of each group of it.

In bins of equal width, of values as they are or normalised to [0, 1]; in octaves; beside the normal distribution; and
by exponent, beside what each format can hold. Every number comes from the digests: one reading of each record, and
none of those that were asked about before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import group_columns, group_row, with_stacks, words
from ranktape.analyze.metrics.gather import group_digests, group_records
from ranktape.analyze.numerics.distributions.occupancy import NARROW_FORMATS
from ranktape.analyze.numerics.formats import Coding, parse_format
from ranktape.analyze.questions.looks import ANSWERS, Look, LookOptions
from ranktape.analyze.questions.stats import how_seen
from ranktape.analyze.table import Column, Table
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.numerics.formats import Format
    from ranktape.storage import Records

MAX_BINS = 1 << 16
"""Bins that a histogram may have: as many as a 16-bit type has values."""

MAX_PER_OCTAVE = 256
"""Bins that an octave may have: twice as many as bfloat16 has values there."""

_OWNERS = {
    "bins": (Look.LINEAR, Look.NORMALISED),
    "per_octave": (Look.LOG2,),
    "points": (Look.QQ,),
    "format": (Look.EXPONENTS, Look.FORMATS),
}
"""The kinds that each argument is for."""


def distribution(
    records: Records,
    *,
    kind: Literal["linear", "normalised", "log2", "exponents", "formats", "normal", "qq"] | Look = "linear",
    bins: int | None = None,
    per_octave: int | None = None,
    points: int | None = None,
    format: str | Sequence[str] = (),  # noqa: A002 - the option's name
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> Table:
    """Show how the values of a selection are distributed, or with `by` those of each group: rows are bins.

    NaN and infinities are in no bin, and a note counts them; zeros are in none of octaves. A group without finite
    values has no rows but for the kinds formats and normal. Of complex values the larger part of each is meant. Records
    of which statistics alone were kept have no values, and are left out; a note counts them. Of many values of more
    than 16 bits the part below any number is known to 2^-10; their octaves are exact.

    Args:
        kind: Bins of values, of values normalised to [0, 1], of octaves; powers of two; what formats hold; distance
            from a normal distribution; quantiles beside its.
        bins (N): Bins of equal width; 64 by default.
        per_octave (N): Bins in each octave; 1 by default.
        points (N): Quantiles; 101 by default.
        format (NAME): Only these formats: fp8_e4m3, hif8, ...; repeatable.

    Raises:
        DataError: a record's bytes are missing or damaged.
        NoRecordsError: of no record values were kept.
        StorageError: the store cannot be read.
        UnknownFieldError: `by` names no field of a record.
        UsageError: there is no such kind or format, or a number is out of its range.
    """
    look = _checked_kind(kind)
    options = _options(look, bins=bins, per_octave=per_octave, points=points, formats=words(format))
    answer, seen = ANSWERS[look], view or View.COMPUTE
    known = records.select(keep=[Keep.VALUES.value, Keep.HISTOGRAM.value])
    if not len(known):
        raise NoRecordsError("of no record values were kept, nor how often each occurs: statistics say nothing of bins")
    fields = with_stacks(by, known)
    groups = group_records(known, by=fields)
    tables: list[list[tuple[Any, ...]]] = [[] for _ in groups.keys]
    counts, is_exact, is_complex = Counter[str](), True, False
    for number, digest in group_digests(known, groups, view=seen, engine=engine):
        head = group_row(groups.keys[number], num_records=groups.sizes[number])
        tables[number] = [(*head, *row) for row in answer.rows(digest, options)]
        counts.update({kind: getattr(digest.tallies, kind) for kind in ("nan", "inf", "zero")})
        is_exact, is_complex = is_exact and digest.is_exact, is_complex or "complex" in digest.dtype
    return Table(
        title=f"{answer.title} of the values, {how_seen(seen)}",
        columns=(*_head_columns(fields), *answer.columns),
        rows=tuple(row for rows in tables for row in rows),
        notes=tuple(_notes(counts, num_without=len(records) - len(known), is_exact=is_exact, is_complex=is_complex)),
        is_whole=True,
    )


def _options(
    look: Look, *, bins: int | None, per_octave: int | None, points: int | None, formats: Sequence[str]
) -> LookOptions:
    """What was asked for, of what the kind has."""
    for name, value in {"bins": bins, "per_octave": per_octave, "points": points, "format": formats or None}.items():
        if value is not None and look not in _OWNERS[name]:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} says nothing about --kind {look}: it is for {' and '.join(_OWNERS[name])}")
    return LookOptions(
        bins=_checked("bins", 64 if bins is None else bins, most=MAX_BINS),
        per_octave=_checked("per_octave", 1 if per_octave is None else per_octave, most=MAX_PER_OCTAVE),
        points=_checked("points", 101 if points is None else points, most=MAX_BINS),
        formats=tuple(map(_holder, formats or NARROW_FORMATS)),
    )


def _checked_kind(kind: Look | str) -> Look:
    if kind not in list(Look):
        raise UsageError(f"kind {str(kind)!r} is not known: use one of {', '.join(Look)}")
    return Look(kind)


def _checked(name: str, number: int, *, most: int) -> int:
    if not 1 <= number <= most:
        raise UsageError(f"{name}={number} is not allowed: give a number from 1 to {most}")
    return number


def _holder(name: str) -> Format:
    row = parse_format(name)
    if row.coding is Coding.EXPONENT:
        names = ", ".join(NARROW_FORMATS)
        raise UsageError(f"format {name!r} is one of scales, and holds no values: give one of {names}")
    return row


def _head_columns(by: Sequence[str]) -> tuple[Column, ...]:
    *keys, count = group_columns(by)
    return (*keys, Column(name=count.name, kind=count.kind, is_key=True))


def _notes(counts: Mapping[str, int], *, num_without: int, is_exact: bool, is_complex: bool) -> Iterator[str]:
    yield f"{counts['nan']} NaN and {counts['inf']} Inf are in no bin; {counts['zero']} values are zero"
    if num_without:
        yield f"{num_without} records left out: of them statistics were kept, and no values"
    if not is_exact:
        yield "many values of more than 16 bits: below any number is 2^-10 of them more, or less, at most"
    if is_complex:
        yield "of complex values the larger part of each is counted"
