"""Finds what is wrong in a run, and where; the first screen of a report shows the result."""

from __future__ import annotations

import functools

import numpy as np

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.values import View
from ranktape.analyze.findings.causes import merge_consequences
from ranktape.analyze.findings.finding import Finding, Severity, merged
from ranktape.analyze.findings.outliers import channels, layer_differs, rank_differs, sample_outlier
from ranktape.analyze.findings.replicas import replica_differs
from ranktape.analyze.findings.survey import Survey
from ranktape.analyze.findings.value_range import nonfinite, saturated, too_wide, underflow, unused, zero
from ranktape.storage import Records
from ranktape.storage.format.attempt import read_attempts
from ranktape.storage.format.live import Trigger, read_triggers
from ranktape.storage.records.run import RunReader

DETECTORS = (
    *(nonfinite, saturated, zero, unused, underflow, too_wide),
    *(sample_outlier, rank_differs, replica_differs, layer_differs),
)
"""The detectors that always run. `channels` is optional, because it reads every value once more."""


def find(
    records: Records, *, view: View | None = None, engine: Engine | None = None, with_channels: bool = False
) -> list[Finding]:
    """Find what is wrong or far from its peers: one finding for each cause, the worst first.

    NaN and infinities are findings; all other metrics cover finite values only. Records of integers are only checked
    for equal bits among copies. Samples and channels are not judged if only histograms or statistics were stored.
    Without records, the list is empty.

    Every value is read once, unless its digest is cached, and once more if `with_channels` is true.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: the view is of values as captured, but a record stores values that are already rounded.
    """
    if len(records.sources) > 1:
        # Records of one source are neither peers nor causes of those of another.
        parts = records.by_source()
        find_source = functools.partial(find, view=view, engine=engine, with_channels=with_channels)
        return merged([(part, finding) for part in parts for finding in find_source(part.records)])
    if not len(records):
        return []
    survey = Survey(records, view=view, engine=engine)
    detectors = (*DETECTORS, channels) if with_channels else DETECTORS
    findings = [finding for detect in detectors for finding in detect(survey)]
    return [*_triggered(records), *merge_consequences(survey, findings)]


MAX_FOLLOWING = 20
"""The largest number of later triggers that are named as consequences."""

_MAX_ROWS = 8
"""The largest number of records for a trigger that no single record caused: the last ones of its rank."""

_PLACE_FIELDS = ("module", "layer_type", "layer_idx", "layer_stack", "operation", "phase", "component", "tensor_name")


def _triggered(records: Records) -> list[Finding]:
    """The first trigger in the iterations of the records, with later ones as its consequences; empty without any."""
    reader = records.reader
    if not isinstance(reader, RunReader):
        return []
    backend, iterations = reader.backend, set(np.unique(records.column("iteration")).tolist())
    triggers = [trigger for attempt in read_attempts(backend) for trigger in read_triggers(backend, attempt)]
    chosen = [trigger for trigger in triggers if trigger.iteration in iterations]
    matching = sorted(chosen, key=lambda trigger: trigger.order)
    if not matching:
        return []
    first, *others = matching
    where = {name: first.where[name] for name in _PLACE_FIELDS if name in first.where}
    following = [f"{trigger.kind}: {trigger.message()}" for trigger in others[:MAX_FOLLOWING]]
    if len(others) > MAX_FOLLOWING:
        following.append(f"and {len(others) - MAX_FOLLOWING} more triggers")
    place_text = f"iteration {first.iteration}, rank {first.rank}:"
    evidence = f"{first.kind}: the flight recorder stored its contents"
    if first.traceback:
        evidence += f"; {' '.join(first.traceback.strip().splitlines()[-1].split())}"
    return [
        Finding(
            kind="triggered",
            severity=Severity.HIGH,
            score=float("inf"),
            title=f"{place_text} {first.text}",
            evidence=evidence,
            where=where | {"iteration": first.iteration, "rank": first.rank},
            places=_trigger_rows(records, first),
            place=place_text,
            metric=first.metric,
            value=first.value,
            consequences=tuple(following),
            command=f"ranktape analyze trace RUN --iteration {first.iteration} --rank {first.rank}",
        )
    ]


def _trigger_rows(records: Records, trigger: Trigger) -> tuple[int, ...]:
    """The record that caused the trigger, else the last ones of its rank and iteration, else the last ones of all."""
    is_same_moment = (records.column("iteration") == trigger.iteration) & (records.column("rank") == trigger.rank)
    rows = np.flatnonzero(is_same_moment)
    if len(rows) and (counter := trigger.where.get("counter")) is not None:
        exact = rows[records.column("counter")[rows] == counter]
        if len(exact):
            return tuple(exact.tolist())
    if not len(rows):
        rows = np.arange(len(records))
    return tuple(rows[-_MAX_ROWS:][::-1].tolist())
