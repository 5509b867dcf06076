"""Follows one sample or one call through the model.

Steps are in the order in which the rank recorded them: forward, then backward, for each microbatch. Each rank and
iteration is a separate path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.metrics import parse_metric
from ranktape.analyze.engine.numbers import additive_masks, record_metrics
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import identity_columns, identity_rows, words
from ranktape.analyze.questions.stats import combine_samples, sample_metrics
from ranktape.analyze.table import Column, Kind, Table, number_cells, values_of
from ranktape.errors import NoRecordsError
from ranktape.storage import Records
from ranktape.storage.records.records import SOURCE

SHOWN = ("mean", "std", "absmax", "norm")
"""The metrics of a step that are shown by default."""

_MARKS = ("overflow.nan.count", "overflow.inf.count")


def trace(
    records: Records,
    *,
    sample: str | int | None = None,
    metric: str | Sequence[str] = (),
    view: View | None = None,
    engine: Engine | None = None,
) -> Table:
    """Follow a sample, a call or a microbatch through the model, in execution order.

    Each rank and iteration has its own sequence of steps; --rank and --iteration select one. With `sample`, records
    without that sample (weights, and records without stored values) are left out, and a note has their number. The
    change is that of absmax since the previous step, in binades. The column "first" marks the steps at which NaN, Inf
    and overflow first appear.

    Args:
        sample (ID): Follow this sample, given by its ID, or by its index if samples have no IDs.
        metric (NAME): Metric to show for each step, such as std or overflow.ratio; repeatable. Default: mean, std,
            absmax and norm.

    Raises:
        DataError: a record's bytes are missing or damaged.
        NoRecordsError: no record has such a sample.
        StorageError: the store cannot be read.
        UsageError: there is no such metric, or not of samples.
    """
    names = words(metric)
    named = [parse_metric(name) for name in (names if sample is None else sample_metrics(names)) or SHOWN]
    chosen = tuple(dict.fromkeys(one.name for one in named))
    steps = _steps(records, sample=sample, metrics=chosen, view=view or View.COMPUTE, engine=engine)
    identities = identity_rows(records)
    order = _order(records)
    ordered = sorted(steps, key=lambda step: order[step[0]])
    if sample is not None and not ordered:
        raise NoRecordsError(_no_sample(records, sample))
    rows, state = [], _PathState()
    captured, is_mask = records.column("overflow.inf.count").tolist(), additive_masks(records).tolist()
    for number, (position, index, metrics) in enumerate(ordered):
        num_captured = None if is_mask[position] else int(captured[position])
        change, first = state.step(order[position][:4], metrics, captured_inf=num_captured)
        cells = tuple(metrics[name] for name in chosen)
        rows.append((number, *identities[position], index, *cells, change, first))
    left_out = len(records) - len(rows)
    return Table(
        title="path through the model" if sample is None else f"path of sample {sample} through the model",
        columns=(
            Column(name="step", kind=Kind.INTEGER),
            *identity_columns(records),
            Column(name="sample_index", kind=Kind.INTEGER, is_key=True, is_detail=True),
            *(parse_metric(name).column() for name in chosen),
            Column(name="absmax.binades", kind=Kind.FLOAT, unit="binades", head="absmax change in"),
            Column(name="first", kind=Kind.TEXT, head="first"),
        ),
        rows=tuple(rows),
        notes=(
            (f"{left_out} records are left out: they do not have this sample, or no values are stored",)
            if left_out
            else ()
        ),
    )


def _order(records: Records) -> list[tuple[int, ...]]:
    """The sort key of each record: source, attempt, iteration, rank, and the order of recording."""
    columns = (records.column(name).tolist() for name in ("attempt", "iteration", "rank", "counter"))
    sources = {name: number for number, name in enumerate(records.sources)}
    numbers = [sources[name] for name in records.column(SOURCE).tolist()]
    keys = zip(numbers, *columns, strict=True)
    return [(*map(int, key), place) for place, key in enumerate(keys)]


def _steps(
    records: Records, *, sample: int | str | None, metrics: Sequence[str], view: View, engine: Engine | None
) -> list[tuple[int, int | None, Mapping[str, float | None]]]:
    """For each step, the index of the record, the index of the sample in it, and the metrics."""
    wanted = [parse_metric(name) for name in dict.fromkeys((*metrics, "absmax", *_MARKS))]
    known = record_metrics(records, wanted if sample is None else (), view=view, engine=engine)
    columns_by_name = known.columns
    steps: list[tuple[int, int | None]] = [(place, None) for place in range(len(records))]
    if sample is not None:
        sizes_and_ids = zip(known.sample_sizes.tolist(), records.column("sample_ids").tolist(), strict=True)
        indices = [_index(count, sample, identifiers=json.loads(text)) for count, text in sizes_and_ids]
        steps = [(place, index) for place, index in enumerate(indices) if index is not None]
        starts = np.cumsum(known.sample_sizes) - known.sample_sizes
        rows = [starts[place] + index for place, index in enumerate(indices) if index is not None]
        columns_by_name = combine_samples(known.samples[rows], np.arange(len(rows))) if rows else {}
    columns = [values_of(number_cells(columns_by_name[one.name], kind=one.kind)) for one in wanted] if steps else []
    names = [one.name for one in wanted]
    values = zip(*columns, strict=True)
    return [(*step, dict(zip(names, row, strict=True))) for step, row in zip(steps, values, strict=True)]


def _index(count: int, sample: int | str, *, identifiers: list[Any] | None) -> int | None:
    """The index of a sample in a record: by its identifier if there are identifiers, otherwise by its index."""
    if identifiers is not None:
        texts = [str(one) for one in identifiers[:count]]
        return texts.index(str(sample)) if str(sample) in texts else None
    is_index = isinstance(sample, int) or str(sample).isdecimal()
    return int(sample) if is_index and 0 <= int(sample) < count else None


class _PathState:
    """The state of the path of one rank in one iteration."""

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._before: float | None = None
        self._seen: set[str] = set()

    def step(
        self, key: tuple[int, ...], metrics: Mapping[str, float | None], *, captured_inf: int | None
    ) -> tuple[float | None, str]:
        """The change of absmax since the previous step, in binades, and what occurs for the first time.

        `captured_inf` is None for a mask, in which infinities are intended.
        """
        if key != self._key:
            self._key, self._before, self._seen = key, None, set()
        now, before = metrics["absmax"], self._before
        self._before = now
        num_infinite = 0 if captured_inf is None else metrics["overflow.inf.count"] or 0
        kinds = {
            "NaN": bool(metrics["overflow.nan.count"]),
            "Inf": bool(num_infinite) and bool(captured_inf),
            "overflow": num_infinite > 0 and not captured_inf,
        }
        new = [kind for kind, occurs in kinds.items() if occurs and kind not in self._seen]
        self._seen.update(new)
        is_known = now is not None and before is not None and now > 0 and before > 0
        change = math.log2(now) - math.log2(before) if is_known else None  # type: ignore[arg-type]  # both are known
        return change, " ".join(new)


def _no_sample(records: Records, sample: int | str) -> str:
    """The reason that no record has a sample, and the samples that exist."""
    if all(text == "null" for text in records.column("sample_ids").tolist()):
        sizes = [int(size) for size in records.column("batch_size").tolist() if not math.isnan(size)]
        if sizes:
            return f"no record has sample {sample}: batches have up to {max(sizes)} samples, counted from 0"
        return f"no record has sample {sample}: the sample dimension is unknown, or no values are stored"
    identifiers = sorted({str(one) for text in records.column("sample_ids").tolist() for one in json.loads(text) or []})
    return f"no record has sample {sample}: identifiers are {', '.join(identifiers[:8])}, {len(identifiers)} in all"
