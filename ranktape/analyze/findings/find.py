"""Gives what is wrong in a run, and where: the question that the first screen of a report answers."""

from __future__ import annotations

import functools

import numpy as np

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View
from ranktape.analyze.findings.apart import channels, layer_differs, rank_differs, sample_outlier
from ranktape.analyze.findings.causes import with_consequences
from ranktape.analyze.findings.finding import Finding, Severity, merged
from ranktape.analyze.findings.lost import lost, saturated, too_wide, underflow, unused, zero
from ranktape.analyze.findings.replicas import replica_differs
from ranktape.analyze.findings.survey import Survey
from ranktape.storage import Records
from ranktape.storage.format.attempt import read_attempts
from ranktape.storage.format.live import Trigger, read_triggers
from ranktape.storage.records.run import RunReader

DETECTORS = (
    *(lost, saturated, zero, unused, underflow, too_wide),
    *(sample_outlier, rank_differs, replica_differs, layer_differs),
)
"""What looks at every survey; `channels` reads every value once more."""


def find(
    records: Records, *, view: View | None = None, engine: Engine | None = None, with_channels: bool = False
) -> list[Finding]:
    """What is wrong and what stands out, the worst first; one finding for each cause.

    NaN and infinities are findings; all other metrics are of finite values. Records of whole numbers are judged by the
    bits of their copies alone. Where histograms or statistics were kept, nothing is known of single samples and
    channels. No records, no findings.

    Every value is read once, unless it is known from an earlier question; with `with_channels` once more.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: of a record values were kept that are rounded already, and are to be looked at as they were seen.
    """
    if len(records.sources) > 1:
        # What one source recorded is no peer, and no cause, of what another one did.
        parts = records.by_source()
        ask = functools.partial(find, view=view, engine=engine, with_channels=with_channels)
        return merged([(part, one) for part in parts for one in ask(part.records)])
    if not len(records):
        return []
    survey = Survey(records, view=view, engine=engine)
    detectors = (*DETECTORS, channels) if with_channels else DETECTORS
    return [*_triggered(records), *with_consequences(survey, [one for detect in detectors for one in detect(survey)])]


MAX_FOLLOWING = 20
"""Later triggers that are named as consequences."""

_MAX_PLACES = 8
"""Records that stand for a trigger that no single one showed: the last ones of its rank."""

_OF_PLACE = ("module", "layer_type", "layer_idx", "layer_stack", "operation", "phase", "component", "tensor_name")


def _triggered(records: Records) -> list[Finding]:
    """The first trigger that the records are about, with those after it as its consequences; none for other runs."""
    reader = records.reader
    if not isinstance(reader, RunReader):
        return []
    triggers = [one for attempt in read_attempts(reader.backend) for one in read_triggers(reader.backend, attempt)]
    held = set(np.unique(records.column("iteration")).tolist())
    about = sorted((one for one in triggers if one.iteration in held), key=lambda one: one.order)
    if not about:
        return []
    first, *others = about
    where = {name: first.where[name] for name in _OF_PLACE if name in first.where}
    following = [f"{one.kind}: {one.message()}" for one in others[:MAX_FOLLOWING]]
    if len(others) > MAX_FOLLOWING:
        following.append(f"and {len(others) - MAX_FOLLOWING} more triggers")
    place = f"iteration {first.iteration}, rank {first.rank}:"
    evidence = f"{first.kind}, for which the flight recorder stored what it held"
    if first.traceback:
        evidence += f"; {' '.join(first.traceback.strip().splitlines()[-1].split())}"
    return [
        Finding(
            kind="triggered",
            severity=Severity.HIGH,
            score=float("inf"),
            title=f"{place} {first.text}",
            evidence=evidence,
            where=where | {"iteration": first.iteration, "rank": first.rank},
            places=_trigger_places(records, first),
            place=place,
            metric=first.metric,
            value=first.value,
            consequences=tuple(following),
            command=f"ranktape analyze trace RUN --iteration {first.iteration} --rank {first.rank}",
        )
    ]


def _trigger_places(records: Records, trigger: Trigger) -> tuple[int, ...]:
    """The record that showed it; where none did, the last ones of its rank and iteration, else of all."""
    is_there = (records.column("iteration") == trigger.iteration) & (records.column("rank") == trigger.rank)
    rows = np.flatnonzero(is_there)
    if len(rows) and (counter := trigger.where.get("counter")) is not None:
        exact = rows[records.column("counter")[rows] == counter]
        if len(exact):
            return tuple(exact.tolist())
    if not len(rows):
        rows = np.arange(len(records))
    return tuple(rows[-_MAX_PLACES:][::-1].tolist())
