"""Gives the values of the names in a condition, for each record or group that a rule is about."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.sweep_measure import Asked, sweep_records
from ranktape.analyze.engine.values import View
from ranktape.analyze.findings.find import find
from ranktape.analyze.findings.finding import KINDS as FINDING_KINDS
from ranktape.analyze.findings.finding import Finding, Severity
from ranktape.analyze.findings.replicas import parse_placements, placed_copies
from ranktape.analyze.identity import SAMPLE
from ranktape.analyze.metrics.counts import Places, find_places
from ranktape.analyze.metrics.gather import Groups, group_digests
from ranktape.analyze.metrics.metric import METRICS, count_names, parse_metric
from ranktape.analyze.metrics.target import KINDS, Target
from ranktape.analyze.numerics.sweeps.metrics import LOSSLESS
from ranktape.analyze.numerics.sweeps.metrics import METRICS as SWEPT_METRICS
from ranktape.analyze.numerics.sweeps.options import SweepOptions, resolve
from ranktape.analyze.questions.swept import parse_jobs
from ranktape.errors import RanktapeError, UsageError
from ranktape.storage import Records
from ranktape.storage.format.record_info import EXTREMES
from ranktape.storage.places.failures import printable
from ranktape.storage.records.records import KNOWN_COLUMNS

REPLICAS = "replicas.differing"
"""How many copies of a record hold other bits than it does; 0 where most hold the same."""

FINDINGS = tuple(f"findings.{part}" for part in ("total", *Severity, *FINDING_KINDS))
"""How many findings begin at a record: all of them, those of a severity, those of a kind."""

MAX_SAID = 3
"""Findings that the notes of a rule name."""

LOSSES = (*SWEPT_METRICS, "overflow_ratio", "underflow_ratio", "flushed_ratio", "exponent")
"""What can be asked of the recommended level of a sweep: `sqnr.mxfp8`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOperand:
    """What a name stands for."""

    name: str
    """The name, as it is written."""
    origin: Literal["counts", "digest", "sweep", "replicas", "findings", "field"]
    """What is beyond limits, a metric of values, what a format loses with the recommended scale, the checksums of
    copies, what stands out, or what the catalogue says of the record."""
    part: str = ""
    """Of counts their kind, of a sweep the metric, of findings their severity or kind."""
    is_ratio: bool = False
    """Of a count, whether it is one of all elements."""
    format: str = ""
    """Of a sweep the format."""

    @property
    def has_limits(self) -> bool:
        """Whether it depends on the limits that values are counted against."""
        return self.needs_format or (self.origin == "counts" and self.part in {"upper", "lower", "total", "underflow"})

    @property
    def needs_format(self) -> bool:
        """Whether against the limits of the dtype there is nothing to count."""
        return self.origin == "counts" and self.part in {"flushed", "spoiled"}


def parse_operand(name: str) -> RuleOperand:
    """What a name stands for.

    Raises:
        UsageError: nothing; the message names what is like it.
    """
    if name in _COUNTS:
        return _COUNTS[name]
    if name == REPLICAS:
        return RuleOperand(name=name, origin="replicas")
    if name in FINDINGS:
        return RuleOperand(name=name, origin="findings", part=name.partition(".")[2])
    if name in METRICS or re.fullmatch(r"p\d+(\.\d+)?", name):
        return RuleOperand(name=parse_metric(name).name, origin="digest")
    if name in KNOWN_COLUMNS or name == SAMPLE:
        return RuleOperand(name=name, origin="field")
    part, dot, format_name = name.partition(".")
    if dot and part in LOSSES:
        resolve(format_name, options=SweepOptions())
        return RuleOperand(name=name, origin="sweep", part=part, format=format_name)
    known = [
        *_COUNTS,
        REPLICAS,
        *FINDINGS,
        *METRICS,
        *KNOWN_COLUMNS,
        *(f"{loss}.{format_name or 'mxfp8'}" for loss in LOSSES),
    ]
    near = [one for one in known if f".{name}." in f".{one}."]
    near += difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(dict.fromkeys(near[:3]))}?" if near else f"use one of {', '.join(METRICS)}"
    raise UsageError(f"no metric or field {printable(repr(name))}: {hint}")


def _counts() -> dict[str, RuleOperand]:
    found = [RuleOperand(name="elements", origin="counts", part="elements")]
    for kind in KINDS:
        count, ratio = count_names(kind)
        found.append(RuleOperand(name=count, origin="counts", part=kind))
        found.append(RuleOperand(name=ratio, origin="counts", part=kind, is_ratio=True))
    found += [RuleOperand(name=f"overflow.{name}", origin="counts", part=name) for name in EXTREMES]
    return {operand.name: operand for operand in found}


_COUNTS = _counts()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """The records or groups that a rule is about, and the values of its names."""

    records: Records
    """Those that the rule selects."""
    places: Places
    """The records, or their samples."""
    groups: Sequence[tuple[dict[str, Any], NDArray[np.int64]]]
    """For each row its key and its places; the key is empty where rows are records."""
    by: Sequence[str]
    """The fields that groups are made by."""
    view: View
    """Which numbers are judged."""
    engine: Engine | None
    """What reads them."""
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """For each name its values: numbers, NaN where there is none, or text as objects."""
    notes: list[str] = field(default_factory=list)
    """What is to be said of these values."""

    def worst(self, values: NDArray[np.float64], *, is_low: bool = False) -> NDArray[np.float64]:
        """Of each group the lowest or the highest value of a record that is known."""
        ends = np.fmin if is_low else np.fmax
        return np.array([ends.reduce(values[members]) for _, members in self.groups], dtype=np.float64)


def values_of(
    records: Records,
    operands: Sequence[RuleOperand],
    *,
    by: Sequence[str],
    targets: Sequence[Target],
    view: View | None,
    engine: Engine | None,
) -> Judged:
    """The values of names, of what the catalogue knows without reading anything.

    Counts of a group are those of all its elements, metrics those of all its values. Of what a format loses, and of
    copies that differ, a group has those of its worst record.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: what was kept of a record does not answer the question; a field differs within groups; samples are
            asked for what is known of whole records alone.
        UnknownFieldError: `by` names no field of a record.
    """
    whole = [one.name for one in operands if one.origin not in {"counts", "field"}]
    if SAMPLE in by and whole:
        raise UsageError(f"{', '.join(whole)} is known of whole records, not of samples: leave sample out of by")
    places = find_places(records, targets, by=by, view=view or (View.COMPUTE if targets else View.SEEN), engine=engine)
    groups = places.groups() if by else [({}, np.array([place])) for place in range(len(places.owners))]
    judged = Judged(records=records, places=places, groups=groups, by=by, view=view or View.COMPUTE, engine=engine)
    for origin, values in _VALUES.items():
        wanted = [one for one in operands if one.origin == origin]
        if wanted:
            judged.columns.update(values(judged, wanted))
    return judged


def _digest_values(judged: Judged, operands: Sequence[RuleOperand]) -> dict[str, NDArray[Any]]:
    numbers = np.zeros(len(judged.records), dtype=np.int64)
    for row, (_, members) in enumerate(judged.groups):
        numbers[members] = row
    grouped = Groups(
        keys=tuple(key for key, _ in judged.groups),
        sizes=tuple(members.size for _, members in judged.groups),
        numbers=tuple(numbers.tolist()),
    )
    columns = {operand.name: np.full(len(judged.groups), math.nan) for operand in operands}
    for row, digest in group_digests(judged.records, grouped, view=judged.view, engine=judged.engine):
        for name, column in columns.items():
            value = parse_metric(name).of(digest)
            column[row] = math.nan if value is None else value
    return columns


def _swept_values(judged: Judged, operands: Sequence[RuleOperand]) -> dict[str, NDArray[Any]]:
    """The metrics of the recommended levels; `LOSSLESS` of zeros, NaN of other tensors without levels."""
    records, view = judged.records, judged.view
    formats = list(dict.fromkeys(operand.format for operand in operands))
    # Two names may be one format.
    jobs: Asked = {None: [parse_jobs(name)[0] for name in formats]}
    found = {operand.name: np.full(len(records), math.nan) for operand in operands}
    for place, sweeps in enumerate(sweep_records(records, [jobs] * len(records), view=view, engine=judged.engine)):
        if isinstance(sweeps, RanktapeError):
            raise sweeps
        for operand in operands:
            sweep = sweeps[None][formats.index(operand.format)]
            if sweep.recommended is not None:
                found[operand.name][place] = getattr(sweep.recommended, operand.part)
            elif sweep.is_lossless:
                found[operand.name][place] = LOSSLESS.get(operand.part, math.nan)
    is_low = {one.name: one.part in SWEPT_METRICS and not SWEPT_METRICS[one.part].is_error for one in operands}
    return {name: judged.worst(values, is_low=is_low[name]) for name, values in found.items()}


def _counted_values(judged: Judged, operands: Sequence[RuleOperand]) -> dict[str, NDArray[Any]]:
    (counts,) = judged.places.counts
    if judged.by:
        rows = [judged.places.together(counts, members) for _, members in judged.groups]
        counts = {name: np.array([row[name] for row in rows]) for name in counts}
    elements = np.maximum(counts["elements"], 1)
    return {one.name: counts[one.part] / (elements if one.is_ratio else 1) for one in operands}


def _differing_copies(judged: Judged, operands: Sequence[RuleOperand]) -> dict[str, NDArray[Any]]:
    """The most copies that differ; not known where none is seen to, and some are not known."""
    differing = differing_copies(judged.records)
    most = judged.worst(differing)
    is_unknown = [bool(np.isnan(differing[members]).any()) for _, members in judged.groups]
    return {one.name: np.where((most == 0) & np.array(is_unknown, dtype=bool), math.nan, most) for one in operands}


def _found_values(judged: Judged, operands: Sequence[RuleOperand]) -> dict[str, NDArray[Any]]:
    """How many findings begin at each record; of a group those at the record with the most."""
    found = find(judged.records, view=judged.view, engine=judged.engine)
    counts = {one.name: np.zeros(len(judged.records)) for one in operands}
    said: list[Finding] = []
    for finding in found:
        names = [one.name for one in operands if one.part in {"total", finding.severity.value, finding.kind}]
        for name in names:
            np.add.at(counts[name], np.array(finding.places, dtype=np.int64), 1)
        said += [finding] if names else []
    url = judged.records.reader.url
    for finding in said[:MAX_SAID]:
        judged.notes.append(f"{printable(finding.title)}; look closer: {finding.command_in(url)}")
    if len(said) > MAX_SAID:
        judged.notes.append(f"and {len(said) - MAX_SAID} more: see 'ranktape analyze findings'")
    return {name: judged.worst(values) for name, values in counts.items()}


def _field_values(judged: Judged, operands: Sequence[RuleOperand]) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for name in (operand.name for operand in operands):
        if not judged.by:
            found[name] = judged.places.records.column(name)[judged.places.owners]
            continue
        if name not in judged.by:
            raise UsageError(
                f"{name} may differ within the groups by {', '.join(judged.by)}: name it in by, or in where"
            )
        values = [key[name] for key, _ in judged.groups]
        if name == SAMPLE or any(isinstance(value, str) for value in values):
            found[name] = np.array([value if value is None else str(value) for value in values], dtype=object)
        else:
            found[name] = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    return found


_VALUES: dict[str, Callable[[Judged, Sequence[RuleOperand]], dict[str, NDArray[Any]]]] = {
    "digest": _digest_values,
    "sweep": _swept_values,
    "counts": _counted_values,
    "replicas": _differing_copies,
    "findings": _found_values,
    "field": _field_values,
}
"""For each origin the values of its names."""


def differing_copies(records: Records) -> NDArray[np.float64]:
    """For each record how many copies of its part hold other bits; 0 where most of them hold the same, or none is.

    NaN where ranks held copies and no other of them is in the selection.

    Raises:
        DataError: a placement is damaged.
        StorageError: the store cannot be read.
    """
    found = np.zeros(len(records))
    parsed, failure = parse_placements(records)
    if failure is not None:
        raise failure
    bits = list(zip(records.column("checksum").tolist(), records.column("shape").tolist(), strict=True))
    for copies in placed_copies(records, parsed):
        counts = Counter(bits[place] for place in copies)
        for place in copies:
            others = len(copies) - counts[bits[place]]
            is_most = counts[bits[place]] > others
            found[place] = math.nan if len(copies) == 1 else 0 if is_most else others
    return found
