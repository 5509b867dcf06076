"""Gives what is wrong, and the ranks, layers, samples and channels that stand out from their peers.

A rank is compared with the other ranks at the same place and time; a layer with those around it; a sample with all
others at its place; a channel with the others of its tensor. The thresholds and their reasons are in
`ranktape.analyze.findings.thresholds`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ranktape.analyze.engine.engine import Engine, next_step, steps
from ranktape.analyze.engine.values import View
from ranktape.analyze.findings import rows
from ranktape.analyze.findings.apart import outlying_channels
from ranktape.analyze.findings.causes import Family, families_of
from ranktape.analyze.findings.find import all_findings
from ranktape.analyze.findings.survey import Survey
from ranktape.analyze.findings.thresholds import ROBUST_Z
from ranktape.analyze.identity import words
from ranktape.analyze.metrics.metric import METRICS, is_percentile, parse_metric
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import UsageError
from ranktape.storage import Records

ACROSS = ("rank", "layer", "sample", "channel")
"""What can stand out."""

_SIGNED = ("mean", "minimum", "maximum", "skewness", "overflow.minimum", "overflow.maximum")

_COLUMNS = (
    Column(name="cause", kind=Kind.INTEGER),
    Column(name="follows", kind=Kind.TEXT, head=""),
    Column(name="severity", kind=Kind.TEXT),
    *rows.COLUMNS,
)


def outliers(
    records: Records,
    *,
    across: str | Sequence[str] = (),
    metric: str | None = None,
    threshold: float = 3.5,
    view: View | None = None,
    engine: Engine | None = None,
) -> Table:
    """Name the ranks, layers, samples and channels of a run that stand out from their peers.

    Each cause is followed by what is alike at other places, and by its consequences: what was computed from it, with
    nothing clean between. Copies that differ between ranks are told by their checksums. Causes come worst first; notes
    say the first in words, and how to go on. NaN and infinities are told whatever is compared; metrics are those of
    finite values. What has no size (zero, nothing finite) is compared with nothing. A run of one rank has no rank that
    differs, one of two layers no layer, and of records without samples, or whose values were not kept, no sample and no
    channel is known.

    Args:
        across (WHAT): Only these: rank, layer, sample, channel; repeatable.
        metric (NAME): Compare ranks and layers by this, which has no sign: std, overflow.ratio; absmax and rms by
            default. Samples and channels are compared by absmax, and are left out where it is another.
        threshold (Z): Robust z, (x - median) / (1.4826 MAD), from which on something stands out; the smallest factors
            grow with it.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: a choice, a metric or a threshold is not allowed.
    """
    peers = words(across)
    chosen = _checked(peers, metric)
    if not (math.isfinite(threshold) and threshold > 0):
        raise UsageError(f"threshold {threshold:g} is not allowed: give a positive number, such as {ROBUST_Z:g}")
    notes = _notes(records, chosen, metric)
    if not len(records):
        return Table(title="what stands out from its peers", columns=_COLUMNS, rows=(), notes=notes)
    metrics = () if metric is None else (metric,)
    families: list[Family] = []
    has_channels = "channel" in chosen and metric in {None, "absmax"}
    with steps(len(records.sources) * (1 + has_channels)):
        for part in records.by_source():
            next_step()
            known = Survey(part.records, view=view, engine=engine)
            found = list(all_findings(known, across=peers, metrics=metrics, threshold=threshold))
            if has_channels:
                next_step()
                found.extend(outlying_channels(known, view=view, engine=engine, threshold=threshold))
            here = families_of(known, found)
            for one in (one for family in here for one in family.members):
                one.finding = one.finding.in_source(part) if len(records.sources) > 1 else one.finding
            families += here
    families.sort(key=lambda one: one.order)
    return Table(
        title=f"what is wrong, and what stands out from its peers by a robust z of {threshold:g} and more",
        columns=_COLUMNS,
        rows=tuple(_rows(families)),
        notes=(*notes, *_said(families, records.reader.url)),
    )


def _rows(families: Sequence[Family]) -> Iterator[tuple[Any, ...]]:
    """A row for each cause, and below it one for each finding that is alike or follows."""
    for number, family in enumerate(families, start=1):
        yield (number, "", family.severity.value, *rows.cells(family.root.finding))
        for word, others in (("alike", family.alike), ("follows", family.following)):
            for one in others:
                yield (number, word, one.finding.severity.value, *rows.cells(one.finding))


def _said(families: Sequence[Family], url: str) -> tuple[str, ...]:
    """The worst in words, and how to go on."""
    if not families:
        return ("nothing stands out",)
    worst = families[0].root.finding
    return f"worst: {worst.title}; {worst.evidence}", f"look closer: {worst.command_in(url)}"


def _checked(across: Sequence[str], metric: str | None) -> tuple[str, ...]:
    """What is to stand out: all, unless some are named."""
    for one in across:
        if one not in ACROSS:
            nearest = difflib.get_close_matches(one, ACROSS, n=1) or ACROSS
            raise UsageError(f"across {one!r} is not allowed: use {' or '.join(nearest)}")
    if metric is not None and (parse_metric(metric).name in _SIGNED or is_percentile(metric)):
        sizes = [one for one in METRICS if one not in _SIGNED and not is_percentile(one)]
        raise UsageError(
            f"metric {metric!r} may be negative, and outliers are told by factors: use one of {', '.join(sizes)}"
        )
    return tuple(dict.fromkeys(across)) or ACROSS


def _notes(records: Records, across: Sequence[str], metric: str | None) -> tuple[str, ...]:
    notes = []
    without = [one for one in across if one in {"sample", "channel"} and metric not in {None, "absmax"}]
    if without:
        notes.append(f"not compared by {metric}: {' and '.join(without)}, which are compared by absmax")
    num_kept = int((records.column("keep") != "values").sum()) if len(records) else 0
    if num_kept and {"sample", "channel"} & (set(across) - set(without)):
        notes.append(f"of {num_kept} records no values were kept: nothing is known of their samples and channels")
    return tuple(notes)
