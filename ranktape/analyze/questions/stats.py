"""Gives the statistics of each record, of each group of records, or of each sample.

Every metric comes from the digests: one reading of each record, and none of those that were asked about before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.metrics import METRICS, NUMBERS, is_percentile, metric_columns, parse_metric
from ranktape.analyze.engine.numbers import numbers_of_groups
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import row_groups, words
from ranktape.analyze.questions.neighbours import beside_next
from ranktape.analyze.questions.samples import sample_stats
from ranktape.analyze.table import Coded, Column, Kind, Table, TableRows, number_cells
from ranktape.errors import UsageError
from ranktape.fields import SAMPLE
from ranktape.storage import Records

PRECISION = Column(name="percentiles", kind=Kind.TEXT, head="percentiles are", is_detail=True)
"""How well percentiles are known: `exact`, `within 2^-8` of their value and 2^-10 of their rank, or `unknown`."""


def stats(
    records: Records,
    *,
    metric: str | Sequence[str] = (),
    neighbours: bool = False,
    per_sample: bool = False,
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> Table:
    """Mean, deviation, extremes, moments, percentiles and counts of each record or group.

    Text shows the important metrics; --wide, JSON and CSV show all. Moments and extremes are over finite values (of
    complex values over their magnitudes), percentiles over all numbers, counts over all elements, against the limits of
    the captured dtype. Undefined metrics are missing: the mean of nothing, the skewness of a constant, percentiles of
    complex values or of kept statistics.

    Args:
        metric (NAME): Only these: std, p99.9, overflow.ratio; repeatable.
        neighbours: Each layer beside the next: ratios, distances.
        per_sample: One row for each sample; with --by over the records of a group, as --by sample is over all.

    Raises:
        DataError: a record's bytes are missing or damaged.
        NoRecordsError: no record has samples, or a neighbour.
        StorageError: the store cannot be read.
        UnknownFieldError: `by` names no field of a record.
        UsageError: there is no such metric, or arguments exclude each other.
    """
    look, names = view or View.COMPUTE, words(metric)
    has_samples = per_sample or SAMPLE in by
    if neighbours and has_samples:
        raise UsageError("--neighbours and --per-sample exclude each other: samples are not compared between layers")
    if neighbours and names:
        raise UsageError("--neighbours has metrics of its own: leave out --metric")
    if neighbours:
        return beside_next(records, by=by, view=look, engine=engine)
    if has_samples:
        return sample_stats(records, by=by, metrics=names, view=look, engine=engine)
    chosen = [parse_metric(name) for name in names] or list(METRICS.values())
    groups = row_groups(records, by=by)
    of_state = NUMBERS["has_percentiles"], NUMBERS["is_exact"]
    known = numbers_of_groups(records, groups, [*chosen, *of_state], view=look, engine=engine)
    has_percentiles, is_exact = (known.column(one.name) > 0 for one in of_state)
    precision = Coded(np.where(has_percentiles, np.where(is_exact, 0, 1), 2), [_EXACT, _NEAR, _UNKNOWN])
    cells = [number_cells(known.column(one.name), kind=one.kind) for one in chosen]
    return Table(
        title=f"statistics of the values, {how_seen(look)}",
        columns=(*groups.columns, *metric_columns(chosen, are_named=bool(names)), PRECISION),
        rows=TableRows([*groups.heads.columns, *cells, precision]),
        notes=_notes(precision.codes) if any(is_percentile(one.name) for one in chosen) else (),
    )


_EXACT, _NEAR, _UNKNOWN = "exact", "within 2^-8", "unknown"


def _notes(precision: NDArray[np.int64]) -> tuple[str, ...]:
    """How many rows have percentiles that are not exact; 1 stands for those that are near, 2 for those without any."""
    said = {
        1: "of many values wider than 16 bits: their percentiles are values within 2^-8 of the right ones, "
        "and their ranks within 2^-10",
        2: "complex, or kept as statistics: they have no percentiles",
    }
    counts = np.bincount(precision, minlength=3).tolist()
    return tuple(f"{counts[code]} of {len(precision)} rows are {text}" for code, text in said.items() if counts[code])


def how_seen(view: View) -> str:
    """What a title says of a view."""
    return "as they were captured" if view is View.SEEN else "rounded to what the operation computed in"
