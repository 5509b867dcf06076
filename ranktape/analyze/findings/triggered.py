"""Gives what a flight recorder stored its iterations for: that is what began, whatever else stands out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ranktape.analyze.findings.finding import Finding, Severity
from ranktape.storage import Records
from ranktape.storage.format.attempt import read_attempts
from ranktape.storage.format.triggers import Trigger, read_triggers
from ranktape.storage.records.reader import RunReader

KIND = "triggered"

MAX_FOLLOWING = 20
"""Later triggers that are named as consequences."""

_MAX_PLACES = 8
"""Records that stand for a trigger that no single one showed: the last ones of its rank."""

_OF_PLACE = ("module", "layer_type", "layer_idx", "layer_stack", "operation", "phase", "component", "tensor_name")


def triggered(records: Records) -> list[Finding]:
    """The first trigger that the records are about, with those after it as its consequences; none for other runs.

    Raises:
        StorageError: the store cannot be read.
    """
    reader = records.reader
    if not (isinstance(reader, RunReader) and len(records)):
        return []
    attempts = read_attempts(reader.backend)
    found = [one for attempt in attempts for one in read_triggers(reader.backend, attempt)]
    held = set(np.unique(records.column("iteration")).tolist())
    about = sorted((one for one in found if one.iteration in held), key=lambda one: one.order)
    return [_finding(records, about)] if about else []


def _finding(records: Records, triggers: Sequence[Trigger]) -> Finding:
    first, *others = triggers
    where = {name: first.where[name] for name in _OF_PLACE if name in first.where}
    where |= {"iteration": first.iteration, "rank": first.rank}
    following = [f"{one.kind}: {one.message()}" for one in others[:MAX_FOLLOWING]]
    if len(others) > MAX_FOLLOWING:
        following.append(f"and {len(others) - MAX_FOLLOWING} more triggers")
    place = f"iteration {first.iteration}, rank {first.rank}:"
    evidence = f"{first.kind}, for which the flight recorder stored what it held"
    if first.traceback:
        evidence += f"; {' '.join(first.traceback.strip().splitlines()[-1].split())}"
    return Finding(
        kind=KIND,
        severity=Severity.HIGH,
        score=float("inf"),
        title=f"{place} {first.text}",
        evidence=evidence,
        where=where,
        places=_places(records, first),
        place=place,
        metric=first.metric,
        value=first.value,
        consequences=tuple(following),
        command=f"ranktape analyze trace RUN --iteration {first.iteration} --rank {first.rank}",
    )


def _places(records: Records, trigger: Trigger) -> tuple[int, ...]:
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
