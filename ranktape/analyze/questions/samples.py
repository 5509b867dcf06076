"""Gives the statistics of each sample in each record, or of each sample over all records of a group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.metrics import METRICS, count_names, metric_columns, parse_metric
from ranktape.analyze.engine.numbers import digests_without_masks
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import (
    SAMPLE_COLUMN,
    SampleName,
    group_records,
    identity_columns,
    identity_rows,
    sample_names,
)
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import NoRecordsError, UsageError
from ranktape.fields import SAMPLE
from ranktape.storage import Records
from ranktape.storage.format.record_info import TALLY_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What is known of a sample: of one record, or of several together. NaN where there is no such number."""

    num_records: int
    """Records that it is in."""
    counts: tuple[int, ...]
    """Of elements, of finite ones, and of each of `TALLY_KINDS`."""
    mean: float
    """Of the finite values, as everything that follows."""
    spread: float
    """The Euclidean norm of x - mean."""
    norm: float
    """The Euclidean norm."""
    minimum: float
    """The smallest."""
    maximum: float
    """The largest."""
    absmax: float
    """The largest magnitude."""

    def merge(self, other: Sample) -> Sample:
        """Both together."""
        ours, theirs = self.counts[1], other.counts[1]
        apart = other if not ours else self if not theirs else None
        if apart is not None:
            mean, spread = apart.mean, apart.spread
        else:
            # Chan, Golub, LeVeque 1979: from two means to one.
            shift = other.mean - self.mean
            mean = self.mean + shift * theirs / (ours + theirs)
            spread = math.hypot(self.spread, other.spread, shift * math.sqrt(ours * theirs / (ours + theirs)))
        return Sample(
            num_records=self.num_records + other.num_records,
            counts=tuple(map(sum, zip(self.counts, other.counts, strict=True))),
            mean=mean,
            spread=spread,
            norm=math.hypot(self.norm, other.norm),
            minimum=float(np.fmin(self.minimum, other.minimum)),
            maximum=float(np.fmax(self.maximum, other.maximum)),
            absmax=float(np.fmax(self.absmax, other.absmax)),
        )

    def metrics(self) -> dict[str, float | None]:
        """What is known of it, under the names of `METRICS`."""
        elements, num_finite, *tallies = self.counts
        root = math.sqrt(num_finite) or math.nan
        std, rms = self.spread / root, self.norm / root
        numbers = {name: getattr(self, name) for name in ("mean", "minimum", "maximum", "absmax", "norm")}
        numbers |= {"std": std, "variance": std * std, "rms": rms}
        numbers["crest_factor"] = self.absmax / rms if rms else math.nan
        by_kind = dict(zip(TALLY_KINDS, tallies, strict=True))
        by_kind["total"] = by_kind["upper"] + by_kind["lower"]
        counts: dict[str, float | None] = {"elements": elements, "finite": num_finite}
        for kind, count in by_kind.items():
            counts |= dict(zip(count_names(kind), (count, count / max(1, elements)), strict=True))
        return counts | {name: value if math.isfinite(value) else None for name, value in numbers.items()}


_UNKNOWN = dict.fromkeys(("mean", "spread", "minimum", "maximum", "absmax"), math.nan)
_NOTHING = Sample(num_records=0, counts=(0,) * (2 + len(TALLY_KINDS)), norm=0.0, **_UNKNOWN)

SAMPLE_NAMES = tuple(name for name in METRICS if name in _NOTHING.metrics())
"""The metrics that are known of samples, in the order of `METRICS`."""


def sample_stats(
    records: Records,
    *,
    by: Sequence[str],
    metrics: Sequence[str],
    view: View,
    engine: Engine | None,
) -> Table:
    """The metrics of each sample of each record; with `by` those of each sample in each group, over its records.

    `sample` is the user's id, or the index along the dimension of samples where no ids were given; in `by` it names
    the sample too, and is there in any case. Records without samples, as weights, and those of which values were
    not kept, are left out, and counted in a note. Metrics are those of `SAMPLE_NAMES`.

    Raises:
        DataError: a record's bytes are missing or damaged.
        NoRecordsError: no record has samples.
        StorageError: the store cannot be read.
        UnknownFieldError: `by` names no field of a record.
        UsageError: there is no such metric, or not of samples.
    """
    names = sample_metrics(metrics) or SAMPLE_NAMES
    chosen = [METRICS[name] for name in names]
    found = _samples(records, view=view, engine=engine)
    if by:
        columns, rows, places = _grouped(records, found, by=by, names=names)
    else:
        columns, rows, places = _single(records, found, names=names)
    if not rows:
        raise NoRecordsError(
            "no record has samples that can be told apart: their sample_dim is not known, or no values were kept"
        )
    has_ids = any(text != "null" for text in records.column("sample_ids").tolist())
    return Table(
        title="statistics of each sample",
        columns=(*columns, *metric_columns(chosen, are_named=bool(metrics))),
        rows=tuple(rows),
        notes=_notes(len(records) - len(places), by=by, has_ids=has_ids),
    )


def sample_metrics(metrics: Sequence[str]) -> tuple[str, ...]:
    """The metrics of those names, each once.

    Raises:
        UsageError: there is no such metric, or not of samples.
    """
    names = tuple(dict.fromkeys(parse_metric(name).name for name in metrics))
    for name in names:
        if name not in SAMPLE_NAMES:
            raise UsageError(f"metric {name!r} is not known of samples: use one of {', '.join(SAMPLE_NAMES)}")
    return names


_Found = Iterator[tuple[int, int, SampleName, Sample]]
"""Of each sample the place of its record, its index, its name, and what is known of it."""


def _samples(records: Records, *, view: View, engine: Engine | None) -> _Found:
    names = sample_names(records)
    for place, digest in enumerate(digests_without_masks(records, view=view, engine=engine)):
        if digest.samples is not None:
            for index, name in enumerate(names[place]):
                yield place, index, name, sample_of(digest.samples, index)


def sample_of(known: Mapping[str, Any], index: int) -> Sample:
    """The sample of that index, of the metrics that a digest has of all samples of a record."""
    counts = tuple(int(known[name][index]) for name in ("num_elements", "num_finite", *TALLY_KINDS))
    return Sample(
        num_records=1,
        counts=counts,
        spread=float(known["std"][index]) * math.sqrt(counts[1]),
        **{name: float(known[name][index]) for name in ("mean", "norm", "minimum", "maximum", "absmax")},
    )


_Rows = tuple[tuple[Column, ...], list[tuple[Any, ...]], set[int]]
"""Columns that say what a row is about, rows, and the places of the records that have samples."""


def _single(records: Records, found: _Found, *, names: Sequence[str]) -> _Rows:
    identities = identity_rows(records)
    rows, places = [], set()
    for place, index, name, sample in found:
        known = sample.metrics()
        rows.append((*identities[place], str(name), index, *(known[metric] for metric in names)))
        places.add(place)
    index_column = Column(name="sample_index", kind=Kind.INTEGER, is_key=True, is_detail=True)
    return (*identity_columns(records), SAMPLE_COLUMN, index_column), rows, places


def _grouped(records: Records, found: _Found, *, by: Sequence[str], names: Sequence[str]) -> _Rows:
    groups = group_records(records, by=[field for field in by if field != SAMPLE])
    totals: dict[tuple[int, bool, Any], Sample] = {}
    places = set()
    for place, _, name, sample in found:
        # Names may be numbers and texts, between which there is no order.
        key = (groups.numbers[place], isinstance(name, str), name)
        totals[key] = totals.get(key, _NOTHING).merge(sample)
        places.add(place)
    rows, heads = [], list(groups.heads)
    for key in sorted(totals):
        number, _, name = key
        known = totals[key].metrics()
        values = (known[metric] for metric in names)
        rows.append((*heads[number][:-1], str(name), totals[key].num_records, *values))
    *columns, count = groups.columns
    return (*columns, SAMPLE_COLUMN, count), rows, places


def _notes(num_without: int, *, by: Sequence[str], has_ids: bool) -> tuple[str, ...]:
    notes = []
    if num_without:
        notes.append(f"{num_without} records left out: no dimension of samples is known, or no values were kept")
    apart = [field for field in ("iteration", "rank", "microbatch") if field not in by]
    if by and apart and not has_ids:
        notes.append(
            f"samples have no ids, and an index means another sample in each iteration, rank and microbatch: "
            f"to keep them apart add --by {','.join(apart)}"
        )
    return tuple(notes)
