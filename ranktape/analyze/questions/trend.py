"""Follows metrics over the iterations, for each group of records.

All records of a group in one iteration are treated as one tensor: those of all ranks, microbatches and calls, unless
these are fields of the group. The slope is the median of the slopes between all pairs of iterations (Sen 1968), which
is robust against outliers. The jump is the step between captured iterations with the largest change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.metrics import Metric, parse_metric
from ranktape.analyze.engine.numbers import group_metrics
from ranktape.analyze.engine.values import View
from ranktape.analyze.findings.survey import SITE
from ranktape.analyze.identity import group_columns, group_records, with_stacks, words
from ranktape.analyze.table import Column, Kind, Table, TableRows, number_cells
from ranktape.errors import UsageError
from ranktape.storage import Records
from ranktape.storage.records.records import SOURCE

_DETAILS = ("component", "quant_type", "mode", "layer_type")


def trend(
    records: Records,
    *,
    metric: str | Sequence[str] = ("absmax",),
    summary: bool = False,
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> Table:
    """Follow metrics over the iterations, for each tensor of the model or for each group of `by`.

    Ranks, microbatches and calls are combined unless `by` names these fields. A metric that is undefined (without
    finite values, or if only statistics are stored) is left empty, and so are changes from or to it. Changes are
    differences, and also factors in binades if both values are positive. A group with a single iteration has no slope.

    Args:
        metric (NAME): Metric to follow, such as absmax, std, p99.9 or overflow.ratio; repeatable.
        summary: Show one row for each group: first and last value, slope, largest jump.

    Raises:
        DataError: a record's bytes are missing or damaged.
        StorageError: the store cannot be read.
        UnknownFieldError: `by` names no field of a record.
        UsageError: there is no such metric, or `by` names the iteration.
    """
    if "iteration" in by:
        raise UsageError(
            "by 'iteration' is not allowed: a trend is over iterations; leave it out, or use 'ranktape analyze stats'"
        )
    chosen = [parse_metric(name) for name in words(metric)]
    if not chosen:
        raise UsageError("a trend needs a metric: give one, such as absmax")
    fields = course_fields(records, by)
    groups = group_records(records, by=(*fields, "iteration"))
    numbers = group_metrics(records, groups, chosen, view=view or View.COMPUTE, engine=engine)
    metrics_of_groups = list(TableRows([number_cells(numbers.column(one.name), kind=one.kind) for one in chosen]))
    courses: dict[tuple[Any, ...], list[int]] = {}
    for number, key in enumerate(groups.keys):
        courses.setdefault(tuple(key[field] for field in fields), []).append(number)
    iterations = [int(key["iteration"]) for key in groups.keys]
    heads = list(TableRows(groups.heads.columns[: len(set(fields))], size=len(groups.keys)))
    rows, summaries = [], []
    for members in courses.values():
        for place, number in enumerate(members):
            before = metrics_of_groups[members[place - 1]] if place else (None,) * len(chosen)
            cells = [cell for pair in zip(before, metrics_of_groups[number], strict=True) for cell in _step(*pair)]
            rows.append((*heads[number], iterations[number], groups.sizes[number], *cells))
        times = [iterations[number] for number in members]
        for column, one in enumerate(chosen):
            values = [metrics_of_groups[number][column] for number in members]
            summaries.append((*heads[members[0]], one.name, len(members), *_ends(times, values)))
    named = ", ".join(one.name for one in chosen)
    if summary:
        columns = (*_group_columns(fields), *_SUMMARY)
        return Table(title=f"how {named} changes over the iterations", columns=columns, rows=tuple(summaries))
    columns = (*_group_columns(fields), *_COURSE, *(column for one in chosen for column in _metric_columns(one)))
    return Table(title=f"{named} over the iterations", columns=columns, rows=tuple(rows))


def course_fields(records: Records, by: Sequence[str] = ()) -> tuple[str, ...]:
    """The fields that identify a course. Several attempts in the selection have separate courses."""
    fields = with_stacks(by, records) or tuple(name for name in SITE if name != SOURCE or len(records.sources) > 1)
    has_several = len(set(records.column("attempt").tolist())) > 1
    return (*fields, "attempt") if has_several and "attempt" not in fields else fields


_TWO = 2

_COURSE = (
    Column(name="iteration", kind=Kind.INTEGER, is_key=True),
    Column(name="records", kind=Kind.INTEGER),
)

_SUMMARY = (
    Column(name="metric", kind=Kind.TEXT, is_key=True),
    Column(name="iterations", kind=Kind.INTEGER),
    Column(name="first", kind=Kind.FLOAT),
    Column(name="last", kind=Kind.FLOAT),
    Column(name="last_over_first", kind=Kind.FLOAT, head="last / first"),
    Column(name="slope", kind=Kind.FLOAT, unit="per iteration"),
    Column(name="binade_slope", kind=Kind.FLOAT, unit="binades per iteration", head="slope in", is_detail=True),
    Column(name="kendall_z", kind=Kind.FLOAT, head="Kendall z"),
    Column(name="jump", kind=Kind.FLOAT, head="largest jump"),
    Column(name="jump_binades", kind=Kind.FLOAT, unit="binades", head="jump in"),
    Column(name="jump_iteration", kind=Kind.INTEGER, head="at iteration"),
)


def _group_columns(fields: Sequence[str]) -> tuple[Column, ...]:
    return tuple(
        replace(column, is_detail=column.name in _DETAILS and len(fields) >= len(SITE) - 1)
        for column in group_columns(fields)[:-1]
    )


def _metric_columns(one: Metric) -> tuple[Column, ...]:
    return (
        one.column(),
        Column(name=f"{one.name}.change", kind=Kind.FLOAT, head=f"{one.head} change", is_detail=True),
        Column(name=f"{one.name}.binades", kind=Kind.FLOAT, unit="binades", head=f"{one.head} change in"),
    )


def _step(before: float | None, now: float | None) -> tuple[float | None, ...]:
    """The metric, its difference to the previous one, and the factor in binades."""
    if before is None or now is None:
        return now, None, None
    return now, now - before, _binades(before, now)


def _binades(before: float, now: float) -> float | None:
    is_known = before > 0 and now > 0 and math.isfinite(before) and math.isfinite(now)
    return math.log2(now) - math.log2(before) if is_known else None


def _ends(times: Sequence[int], values: Sequence[float | None]) -> tuple[Any, ...]:
    """The cells of `_SUMMARY` for a course, without the metric and the number of iterations."""
    known = [(time, float(value)) for time, value in zip(times, values, strict=True) if value is not None]
    if not known:
        return (None,) * (len(_SUMMARY) - 2)
    first, last = known[0][1], known[-1][1]
    finite = [(time, value) for time, value in known if math.isfinite(value)]
    jump, factor, iteration = _jump(known)
    slope, log_slope, score = _slopes(finite)
    return first, last, last / first if first else None, slope, log_slope, score, jump, factor, iteration


def _slopes(known: Sequence[tuple[int, float]]) -> tuple[float | None, ...]:
    """The slope per iteration, in the metric's own unit and in binades, and the significance of its sign."""
    if len(known) < _TWO:
        return None, None, None
    times, values = np.array([time for time, _ in known]), np.array([value for _, value in known])
    in_binades = sen_slope(times, np.log2(values)) if (values > 0).all() else None
    return sen_slope(times, values), in_binades, kendall_z(values)


def _jump(known: Sequence[tuple[int, float]]) -> tuple[Any, ...]:
    """The largest step, by factor if all values are positive: its size, its factor in binades, and its iteration."""
    steps = [(two[1] - one[1], _binades(one[1], two[1]), two[0]) for one, two in itertools.pairwise(known)]
    if not steps:
        return None, None, None
    is_by_factor = all(factor is not None for _, factor, _ in steps)
    return max(steps, key=lambda step: abs((step[1] or 0.0) if is_by_factor else step[0]))


def kendall_z(values: NDArray[np.float64]) -> float:
    """Significance of a rise (positive) or fall of values, in standard deviations under random order.

    S = sum of sign(x_j - x_i) over i < j has variance n (n - 1) (2 n + 5) / 18 if the order is random, without ties.
    """
    count = values.size
    signs = np.sign(values[None, :] - values[:, None])[np.triu_indices(count, k=1)].sum()
    if not signs:
        return 0.0
    return float((signs - np.sign(signs)) / math.sqrt(count * (count - 1) * (2 * count + 5) / 18))


def sen_slope(times: NDArray[np.int64], values: NDArray[np.float64]) -> float:
    """The median of the slopes between all pairs; NaN for fewer than two values."""
    first, second = np.triu_indices(values.size, k=1)
    if not first.size:
        return math.nan
    return float(np.median((values[second] - values[first]) / (times[second] - times[first])))
