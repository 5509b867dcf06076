"""Which ranks, layers, samples and channels stand out from their peers, and with which evidence?

A rank is compared with the other ranks at the same place and time; a layer with those around it; a sample with all
others at its place; a channel with the others of its tensor. The thresholds and their reasons are in
`ranktape.analyze.findings.thresholds`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ranktape.analyze.figures import FIGURES, figure, is_percentile
from ranktape.analyze.findings.causes import Event, families_of
from ranktape.analyze.findings.channels import outlying_channels
from ranktape.analyze.findings.layers import differing_layers
from ranktape.analyze.findings.ranks import differing_ranks
from ranktape.analyze.findings.replicas import differing_replicas
from ranktape.analyze.findings.samples import outlying_samples
from ranktape.analyze.findings.sign import place_of, where_of
from ranktape.analyze.findings.survey import survey
from ranktape.analyze.findings.thresholds import ROBUST_Z
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.findings.sign import Sign
    from ranktape.analyze.findings.survey import Survey
    from ranktape.analyze.values import View
    from ranktape.storage import Records

ACROSS = ("rank", "layer", "sample", "channel")
"""What can stand out."""

_SIGNED = ("mean", "minimum", "maximum", "skewness", "overflow.minimum", "overflow.maximum")

_COLUMNS = (
    Column(name="cause", kind=Kind.INTEGER),
    Column(name="follows", kind=Kind.TEXT, head=""),
    Column(name="severity", kind=Kind.TEXT),
    Column(name="kind", kind=Kind.TEXT),
    Column(name="where", kind=Kind.TEXT),
    Column(name="iteration", kind=Kind.INTEGER, is_detail=True),
    Column(name="ranks", kind=Kind.LIST, is_detail=True),
    Column(name="layer_idx", kind=Kind.INTEGER, is_detail=True),
    Column(name="layer_type", kind=Kind.TEXT, is_detail=True),
    Column(name="module", kind=Kind.TEXT, is_detail=True),
    Column(name="operation", kind=Kind.TEXT, is_detail=True),
    Column(name="tensor_name", kind=Kind.TEXT, is_detail=True),
    Column(name="sample", kind=Kind.TEXT, is_detail=True),
    Column(name="channel", kind=Kind.INTEGER, is_detail=True),
    Column(name="records", kind=Kind.INTEGER),
    Column(name="figure", kind=Kind.TEXT),
    Column(name="value", kind=Kind.FLOAT),
    Column(name="expected", kind=Kind.FLOAT, head="median of peers"),
    Column(name="deviation", kind=Kind.FLOAT, head="robust z"),
    Column(name="octaves", kind=Kind.FLOAT),
    Column(name="evidence", kind=Kind.TEXT, is_detail=True),
)


def outliers(
    records: Records,
    *,
    across: Sequence[str] = (),
    figure_name: str | None = None,
    threshold: float = ROBUST_Z,
    view: View | None = None,
    engine: Engine | None = None,
) -> Table:
    """What stands out from its peers: a row for each place, rank, sample or channel.

    Causes come worst first, each with what follows from it.

    NaN and infinities are left out of figures: `find` is about them too. What has no size (zero, nothing finite) is
    compared with nothing. A run of one rank has no rank that differs, one of two layers no layer, and of records
    without samples, or whose values were not kept, no sample and no channel is known.

    Args:
        records: The selection.
        across: Any of `ACROSS`; all by default.
        figure_name: A figure that has no sign, which ranks and layers are compared by: absmax and RMS by default.
            Samples and channels are compared by absmax, and are left out where it is another.
        threshold: The robust z from which on something stands out; the smallest factors grow with it.
        view: Which values are judged; rounded to what the operation computed in by default.
        engine: Where values are read and counted.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: a choice, a figure or a threshold is not allowed.
    """
    chosen = _checked_across(across)
    if figure_name is not None:
        _check_figure(figure_name)
    if not (math.isfinite(threshold) and threshold > 0):
        raise UsageError(f"threshold {threshold:g} is not allowed: give a positive number, such as {ROBUST_Z:g}")
    notes = _notes(records, chosen, figure_name)
    if not len(records):
        return Table(title="what stands out from its peers", columns=_COLUMNS, rows=(), notes=notes)
    known = survey(records, view=view, engine=engine, figures=() if figure_name is None else (figure_name,))
    signs = list(_signs(known, across=chosen, figure_name=figure_name, threshold=threshold, view=view, engine=engine))
    rows: list[tuple[Any, ...]] = []
    for number, (root, following) in enumerate(families_of(known, signs), start=1):
        rows.append(_row(known, root, number=number, follows=""))
        rows.extend(_row(known, event, number=number, follows="follows") for event in following)
    return Table(
        title=f"what stands out from its peers by a robust z of {threshold:g} and more",
        columns=_COLUMNS,
        rows=tuple(rows),
        notes=notes if rows else (*notes, "nothing stands out"),
    )


def _checked_across(across: Sequence[str]) -> tuple[str, ...]:
    for one in across:
        if one not in ACROSS:
            nearest = difflib.get_close_matches(one, ACROSS, n=1) or ACROSS
            raise UsageError(f"across {one!r} is not allowed: use {' or '.join(nearest)}")
    return tuple(dict.fromkeys(across)) or ACROSS


def _check_figure(name: str) -> None:
    figure(name)
    if name in _SIGNED or is_percentile(name):
        sizes = [one for one in FIGURES if one not in _SIGNED and not is_percentile(one)]
        raise UsageError(
            f"figure {name!r} may be negative, and outliers are told by factors: use one of {', '.join(sizes)}"
        )


def _notes(records: Records, across: Sequence[str], figure_name: str | None) -> tuple[str, ...]:
    notes = []
    without = [one for one in across if one in {"sample", "channel"} and figure_name not in {None, "absmax"}]
    if without:
        notes.append(f"not compared by {figure_name}: {' and '.join(without)}, which are compared by absmax")
    num_kept = int((records.column("keep") != "values").sum()) if len(records) else 0
    if num_kept and {"sample", "channel"} & (set(across) - set(without)):
        notes.append(f"of {num_kept} records no values were kept: nothing is known of their samples and channels")
    return tuple(notes)


def _signs(
    known: Survey,
    *,
    across: Sequence[str],
    figure_name: str | None,
    threshold: float,
    view: View | None,
    engine: Engine | None,
) -> Iterator[Sign]:
    named = {} if figure_name is None else {"figures": (figure_name,)}
    is_absmax = figure_name in {None, "absmax"}
    if "rank" in across:
        yield from differing_ranks(known, threshold=threshold, **named)
        yield from differing_replicas(known)
    if "layer" in across:
        yield from differing_layers(known, threshold=threshold, **named)
    if "sample" in across and is_absmax:
        yield from outlying_samples(known, threshold=threshold)
    if "channel" in across and is_absmax:
        yield from outlying_channels(known, view=view, engine=engine, threshold=threshold)


def _row(known: Survey, event: Event, *, number: int, follows: str) -> tuple[Any, ...]:
    sign = event.sign
    where, judged = where_of(known, sign), sign.judgement
    return (
        number,
        follows,
        sign.severity.value,
        sign.kind,
        place_of(known, sign),
        where.get("iteration"),
        sorted(int(rank) for rank in sign.ranks),
        where.get("layer_idx"),
        where.get("layer_type"),
        where.get("module"),
        where.get("operation"),
        where.get("tensor_name"),
        sign.extra.get("sample"),
        sign.extra.get("channel"),
        len(sign.positions),
        *((None,) * 5 if judged is None else _judged(judged)),
        sign.evidence,
    )


def _judged(judged: Any) -> tuple[Any, ...]:
    return judged.figure, judged.value, judged.expected, judged.deviation, judged.octaves
