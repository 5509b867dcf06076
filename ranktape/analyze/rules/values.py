"""Gives the values of the names in a condition, for each record or group that a rule is about."""

from __future__ import annotations

import difflib
import enum
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.engine.sweep_measure import sweep_records
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import SAMPLE
from ranktape.analyze.metrics.counts import EXTREMES, KINDS
from ranktape.analyze.metrics.gather import Groups, group_digests
from ranktape.analyze.metrics.metric import METRICS, parse_metric
from ranktape.analyze.metrics.places import Places, find_places
from ranktape.analyze.numerics.sweeps.metrics import METRICS as SWEPT_METRICS
from ranktape.analyze.numerics.sweeps.options import SweepOptions, resolve
from ranktape.analyze.questions.swept import jobs_of, parse_request
from ranktape.errors import RanktapeError, UsageError
from ranktape.storage.format.catalogue import COLUMNS
from ranktape.storage.places.failures import printable
from ranktape.storage.records.placement import AxisKind, parse_placement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.metrics.target import Target
    from ranktape.storage import Record, Records


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """The records or groups that a rule is about, and the values of its names."""

    places: Places
    """The records, or their samples."""
    groups: list[tuple[dict[str, Any], NDArray[np.int64]]]
    """For each row its key and its places; the key is empty where rows are records."""
    columns: dict[str, NDArray[Any]]
    """For each name its values: numbers, NaN where there is none, or text as objects."""


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

    Counts of a group are those of all its elements, figures those of all its values. Of what a format loses, and of
    copies that differ, a group has those of its worst record.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UsageError: what was kept of a record does not answer the question; a field differs within groups; samples are
            asked for what is known of whole records alone.
        UnknownFieldError: `by` names no field of a record.
    """
    origins = {operand.origin for operand in operands}
    if SAMPLE in by and not origins <= {Origin.COUNTS, Origin.FIELD}:
        names = [operand.name for operand in operands if operand.origin not in {Origin.COUNTS, Origin.FIELD}]
        raise UsageError(f"{', '.join(names)} is known of whole records, not of samples: leave sample out of by")
    seen = view or (View.COMPUTE if targets else View.SEEN)
    places = find_places(records, targets, by=by, view=seen, engine=engine)
    groups = places.groups(by) if by else [({}, np.array([place])) for place in range(len(places.owners))]
    judged = view or View.COMPUTE
    columns: dict[str, NDArray[Any]] = {}
    columns |= _digest_values(
        records, [one for one in operands if one.origin is Origin.DIGEST], groups, view=judged, engine=engine
    )
    swept = [one for one in operands if one.origin is Origin.SWEEP]
    columns |= _swept_values(records, swept, groups, view=judged, engine=engine)
    for operand in operands:
        if operand.origin is Origin.COUNTS:
            columns[operand.name] = _counted_values(places, operand, groups)
        elif operand.origin is Origin.REPLICAS:
            differing = differing_copies(records)
            columns[operand.name] = np.array([_most(differing[members]) for _, members in groups])
        elif operand.origin is Origin.FIELD:
            columns[operand.name] = _field_values(places, operand.name, groups, by=by)
    return Judged(places=places, groups=groups, columns=columns)


def differing_copies(records: Records) -> NDArray[np.float64]:
    """For each record how many copies of its part hold other bits; 0 where most of them hold the same, or none is.

    NaN where ranks held copies and no other of them is in the selection.

    Raises:
        DataError: a placement is damaged.
        StorageError: the store cannot be read.
    """
    found = np.zeros(len(records))
    columns = (records.column(name).tolist() for name in ("iteration", "attempt", "rank", "site"))
    places = {key: place for place, key in enumerate(zip(*columns, strict=True))}
    for view in records.assemble(replicas="ignore"):
        parts: dict[tuple[int | None, ...], list[Record]] = {}
        num_copies = 1
        for record in view.records:
            placement = parse_placement(record.info)
            if placement is not None:
                sizes = [axis.size for axis in placement.axes if axis.kind is AxisKind.REPLICATE]
                num_copies = math.prod(sizes)
                parts.setdefault(placement.fixed(AxisKind.REPLICATE), []).append(record)
        for copies in parts.values():
            bits = [(record.shape, record.checksum) for record in copies]
            counts = Counter(bits)
            for record, ours in zip(copies, bits, strict=True):
                others = len(copies) - counts[ours]
                place = places[record.iteration, record.attempt, record.rank, record.location.site]
                found[place] = 0 if counts[ours] > others else others
                if len(copies) == 1 and num_copies > 1:
                    found[place] = math.nan
    return found


def _counted_values(
    places: Places, operand: RuleOperand, groups: Sequence[tuple[Any, NDArray[np.int64]]]
) -> NDArray[Any]:
    (counts,) = places.counts
    if groups and not groups[0][0]:
        values, elements = counts[operand.part], counts["elements"]
    else:
        rows = [places.together(counts, members) for _, members in groups]
        values, elements = (np.array([row[name] for row in rows]) for name in (operand.part, "elements"))
    return values / np.maximum(elements, 1) if operand.is_ratio else values


def _field_values(
    places: Places, name: str, groups: Sequence[tuple[dict[str, Any], NDArray[np.int64]]], *, by: Sequence[str]
) -> NDArray[Any]:
    if by and name not in by:
        raise UsageError(f"{name} may differ within the groups by {', '.join(by)}: name it in by, or in where")
    if not by:
        return places.records.column(name)[places.owners]
    values = [key[name] for key, _ in groups]
    if name == SAMPLE or any(isinstance(value, str) for value in values):
        return np.array([value if value is None else str(value) for value in values], dtype=object)
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _digest_values(
    records: Records,
    operands: Sequence[RuleOperand],
    groups: Sequence[tuple[Any, NDArray[np.int64]]],
    *,
    view: View,
    engine: Engine | None,
) -> dict[str, NDArray[Any]]:
    if not operands:
        return {}
    numbers = np.zeros(len(records), dtype=np.int64)
    for row, (_, members) in enumerate(groups):
        numbers[members] = row
    grouped = Groups(
        keys=tuple(key for key, _ in groups),
        sizes=tuple(members.size for _, members in groups),
        numbers=tuple(numbers.tolist()),
    )
    columns = {operand.name: np.full(len(groups), math.nan) for operand in operands}
    for row, digest in group_digests(records, grouped, view=view, engine=engine):
        for name, column in columns.items():
            value = parse_metric(name).of(digest)
            column[row] = math.nan if value is None else value
    return columns


def _swept_values(
    records: Records,
    operands: Sequence[RuleOperand],
    groups: Sequence[tuple[Any, NDArray[np.int64]]],
    *,
    view: View,
    engine: Engine | None,
) -> dict[str, NDArray[Any]]:
    """The figures of the recommended levels; NaN where a tensor needs no scale."""
    if not operands:
        return {}
    formats = list(dict.fromkeys(operand.format for operand in operands))
    # Two names may be one format.
    jobs = [jobs_of(parse_request(name, view=view))[0] for name in formats]
    found = {operand.name: np.full(len(records), math.nan) for operand in operands}
    for place, sweeps in enumerate(sweep_records(records, [jobs] * len(records), view=view, engine=engine)):
        if isinstance(sweeps, RanktapeError):
            raise sweeps
        for operand in operands:
            level = sweeps[formats.index(operand.format)].recommended
            if level is not None:
                found[operand.name][place] = getattr(level, operand.part)
    return {
        operand.name: np.array(
            [_worst(found[operand.name][members], is_low=operand.is_worst_if_low) for _, members in groups]
        )
        for operand in operands
    }


def _most(differing: NDArray[np.float64]) -> float:
    """The most copies that differ; not known where none is seen to, and some are not known."""
    most = _worst(differing)
    return math.nan if most == 0 and np.isnan(differing).any() else most


def _worst(values: NDArray[np.float64], *, is_low: bool = False) -> float:
    """The lowest or the highest of those that are known."""
    known = values[~np.isnan(values)]
    if not known.size:
        return math.nan
    return float(known.min() if is_low else known.max())


REPLICAS = "replicas.differing"
"""How many copies of a record hold other bits than it does; 0 where most hold the same."""

LOSSES = (*SWEPT_METRICS, "overflow_ratio", "underflow_ratio", "flushed_ratio", "exponent")
"""What can be asked of the recommended level of a sweep: `sqnr.mxfp8`."""


class Origin(enum.Enum):
    """Where a value comes from."""

    COUNTS = "counts"
    """What is beyond limits: from the catalogue, or against a format from digests."""
    DIGEST = "digest"
    """A figure of single values."""
    SWEEP = "sweep"
    """What a format loses with the recommended scale."""
    REPLICAS = "replicas"
    """The checksums of copies."""
    FIELD = "field"
    """What the catalogue says of the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOperand:
    """What a name stands for."""

    name: str
    """The name, as it is written."""
    origin: Origin
    """Where its values come from."""
    part: str = ""
    """Of counts their kind, of a sweep the figure."""
    is_ratio: bool = False
    """Of a count, whether it is one of all elements."""
    format: str = ""
    """Of a sweep the format."""

    @property
    def has_limits(self) -> bool:
        """Whether it depends on the limits that values are counted against."""
        return self.origin is Origin.COUNTS and self.part in {
            "upper",
            "lower",
            "total",
            "underflow",
            "flushed",
            "spoiled",
        }

    @property
    def needs_format(self) -> bool:
        """Whether against the limits of the dtype there is nothing to count."""
        return self.origin is Origin.COUNTS and self.part in {"flushed", "spoiled"}

    @property
    def is_worst_if_low(self) -> bool:
        """Of a sweep, whether the lowest value of a group is its worst."""
        return self.part in SWEPT_METRICS and not SWEPT_METRICS[self.part].is_error


def parse_operand(name: str) -> RuleOperand:
    """What a name stands for.

    Raises:
        UsageError: nothing; the message names what is like it.
    """
    if name in _COUNTS:
        return _COUNTS[name]
    if name == REPLICAS:
        return RuleOperand(name=name, origin=Origin.REPLICAS)
    if name in METRICS or re.fullmatch(r"p\d+(\.\d+)?", name):
        return RuleOperand(name=parse_metric(name).name, origin=Origin.DIGEST)
    if name in COLUMNS or name == SAMPLE:
        return RuleOperand(name=name, origin=Origin.FIELD)
    part, dot, format_name = name.partition(".")
    if dot and part in LOSSES:
        resolve(format_name, options=SweepOptions())
        return RuleOperand(name=name, origin=Origin.SWEEP, part=part, format=format_name)
    known = [*_COUNTS, REPLICAS, *METRICS, *COLUMNS, *(f"{loss}.{format_name or 'mxfp8'}" for loss in LOSSES)]
    near = [one for one in known if f".{name}." in f".{one}."]
    near += difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(dict.fromkeys(near[:3]))}?" if near else f"use one of {', '.join(METRICS)}"
    raise UsageError(f"no figure or field {printable(repr(name))}: {hint}")


def _counts() -> dict[str, RuleOperand]:
    found = [RuleOperand(name="elements", origin=Origin.COUNTS, part="elements")]
    for kind in KINDS:
        names = f"overflow.{kind}.count", f"overflow.{kind}.ratio"
        for name, is_ratio in zip(
            ("overflow.total", "overflow.ratio") if kind == "total" else names, (False, True), strict=True
        ):
            found.append(RuleOperand(name=name, origin=Origin.COUNTS, part=kind, is_ratio=is_ratio))
    found += [RuleOperand(name=f"overflow.{name}", origin=Origin.COUNTS, part=name) for name in EXTREMES]
    return {operand.name: operand for operand in found}


_COUNTS = _counts()
