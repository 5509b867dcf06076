"""Gives how much of the gradients underflows, and their sizes beside the weights and beside the forward pass.

Counts against a format are given twice: of the gradients as they are, and with one power of two as the scale of each
tensor, the smallest with which its largest value does not exceed the largest of the format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.engine.engine import Engine, next_step, steps
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import group_columns, group_row, source_fields, with_stacks
from ranktape.analyze.metrics.counts import find_places
from ranktape.analyze.metrics.gather import group_digests, group_records
from ranktape.analyze.metrics.metric import Metric, parse_metric
from ranktape.analyze.metrics.target import SCALINGS, Target, parse_targets
from ranktape.analyze.numerics.digest import Digest
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import NoRecordsError
from ranktape.storage import Records
from ranktape.storage.format.record_info import Keep

FORMATS = ("fp16", "fp8_e5m2", "fp8_e4m3")
"""The formats that gradients are counted against, unless others are named."""

SHOWN_METRICS = ("absmax", "std", "log2_range", "overflow.underflow.ratio", "overflow.zero.ratio")
"""What is shown of gradients, and of both passes."""

_PREFIX = "grad_"


def gradients(
    records: Records,
    *,
    show: Literal["ranges", "weights", "passes"] = "ranges",
    format: str | Sequence[str] = FORMATS,  # noqa: A002 - the option's name
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine | None = None,
) -> Table:
    """Underflow and range of gradients, their norms beside the weights', and the backward pass beside the forward.

    Gradients are the tensors whose name begins with grad. Groups are layer types by default, modules beside weights.
    NaN and infinities are left out of metrics. A ratio to a norm of 0 is missing; so is what is counted against a
    format where statistics alone were kept. A gradient without its forward tensor has a row, with nothing beside it.

    Args:
        show: Underflow and range; norms beside those of the weights; the forward pass beside the backward pass.
        format (NAME): Low-precision format: fp8_e4m3, fp8_e5m2, fp6_e2m3, fp6_e3m2, fp4_e2m1, int8, hif8, nvfp4, bf16,
            fp16. Repeatable; fp16 and both fp8 by default.

    Raises:
        DataError: a record's bytes are missing or damaged.
        NoRecordsError: there is no gradient.
        StorageError: the store cannot be read.
        UnknownFieldError: `by` names no field of a record.
        UsageError: a format is not known, or has no limits of its own.
    """
    targets = parse_targets(format, SCALINGS[:2])
    names = records.column("tensor_name")
    is_gradient = np.array([str(name).startswith("grad") for name in names.tolist()], dtype=bool)
    if not is_gradient.any():
        raise NoRecordsError("no record holds a gradient: their names begin with 'grad', as in grad_output")
    fields = with_stacks(by, records) or (*source_fields(records), *_FIELDS[show])
    seen = view or View.COMPUTE
    if show == "ranges":
        chosen = records.take(np.flatnonzero(is_gradient).tolist())
        return _ranges_table(chosen, fields, targets, view=seen, engine=engine)
    if show == "weights":
        chosen = records.take(np.flatnonzero(np.isin(names.astype(str), _WEIGHTS)).tolist())
        return _weights_table(_Named(chosen, fields, view=seen, engine=engine))
    return _passes_table(_Named(records, fields, view=seen, engine=engine))


_WEIGHTS = ("weight", f"{_PREFIX}weight")

_FIELDS = {
    "ranges": ("layer_type",),
    "weights": ("layer_type", "layer_idx", "module"),
    "passes": ("layer_type",),
}
"""What groups are made by, unless something else is asked for."""


class _Named:
    """For each group the digests of its tensors by their names, and of how many records each is."""

    def __init__(self, records: Records, fields: Sequence[str], *, view: View, engine: Engine | None) -> None:
        self.fields = tuple(fields)
        """What groups are made by."""
        self.groups: dict[tuple[Any, ...], dict[str, tuple[int, Digest]]] = {}
        """By the values of those."""
        groups = group_records(records, by=tuple(dict.fromkeys((*fields, "tensor_name"))))
        for key in groups.keys:
            self.groups.setdefault(tuple(key[field] for field in fields), {})
        for number, digest in group_digests(records, groups, view=view, engine=engine):
            key = groups.keys[number]
            of_group = self.groups[tuple(key[field] for field in fields)]
            of_group[str(key["tensor_name"])] = groups.sizes[number], digest

    def row(self, key: Sequence[Any], *, num_records: int) -> tuple[Any, ...]:
        """The cells that say which group it is, and of how many records."""
        return group_row(dict(zip(self.fields, key, strict=True)), num_records=num_records)


def _ranges_table(
    records: Records, fields: Sequence[str], targets: Sequence[Target], *, view: View, engine: Engine | None
) -> Table:
    shown = [parse_metric(name) for name in (*SHOWN_METRICS[:2], "norm", "smallest_nonzero", *SHOWN_METRICS[2:])]
    groups = group_records(records, by=tuple(dict.fromkeys((*fields, "tensor_name"))))
    rows: list[tuple[Any, ...]] = [()] * len(groups.keys)
    with steps(2):
        next_step()
        flushed = _flushed_parts(records, groups.numbers, len(groups.keys), targets, view=view, engine=engine)
        next_step()
        for number, digest in group_digests(records, groups, view=view, engine=engine):
            rows[number] = (*groups.heads[number], *(one.of(digest) for one in shown), *flushed[number])
    columns = [
        Column(
            name=f"flushed.{target.name}{'' if target.scaling is Scaling.NONE else '.scaled'}",
            kind=Kind.RATIO,
            head=f"{target.name} flushes{'' if target.scaling is Scaling.NONE else ', scaled'}",
        )
        for target in targets
    ]
    return Table(
        title="range of gradients: subnormal and zero in their own type, and what formats would make zero",
        columns=(*groups.columns, *(one.column() for one in shown), *columns),
        rows=tuple(rows),
        notes=(
            "scaled: with the smallest power of two for each tensor that keeps its largest value within the format",
        ),
    )


def _flushed_parts(
    records: Records,
    numbers: Sequence[int],
    num_groups: int,
    targets: Sequence[Target],
    *,
    view: View,
    engine: Engine | None,
) -> list[list[float | None]]:
    """For each group the parts of its elements that targets flush; None where values of a record are not known."""
    has_values = records.column("keep") != Keep.STATISTICS
    of_known = np.array(numbers)[has_values]
    is_unknown = np.bincount(np.array(numbers)[~has_values], minlength=num_groups) > 0
    known = records.take(np.flatnonzero(has_values).tolist())

    def sums(column: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(of_known, weights=column, minlength=num_groups).astype(np.float64)

    counted = find_places(known, targets, view=view, engine=engine).counts if len(known) else ()
    parts = [sums(one["flushed"]) / np.maximum(sums(one["elements"]), 1) for one in counted]
    columns = [[None if gone else part for gone, part in zip(is_unknown, one.tolist(), strict=True)] for one in parts]
    return [list(row) for row in zip(*columns, strict=True)] or [[None] * len(targets)] * num_groups


def _weights_table(named: _Named) -> Table:
    rows = []
    for key, tensors in named.groups.items():
        if _WEIGHTS[1] not in tensors:
            continue
        count, gradient = tensors[_WEIGHTS[1]]
        num_weights, weight = tensors.get(_WEIGHTS[0], (0, None))
        # Of several records the norm grows with their number: the RMS does not.
        sizes = [None if one is None else one.statistics.rms for one in (gradient, weight)]
        norms = [None if one is None else one.statistics.norm for one in (gradient, weight)]
        ratio = sizes[0] / sizes[1] if sizes[0] is not None and sizes[1] else None
        factor = math.log2(ratio) if ratio else None
        rows.append((*named.row(key, num_records=count), num_weights, *norms, *sizes, ratio, factor))
    return Table(
        title="gradients of weights beside the weights",
        columns=(
            *group_columns(named.fields),
            Column(name="weights", kind=Kind.INTEGER, head="weights", is_detail=True),
            Column(name="norm.gradient", kind=Kind.FLOAT, head="norm of gradient"),
            Column(name="norm.weight", kind=Kind.FLOAT, head="norm of weight"),
            Column(name="rms.gradient", kind=Kind.FLOAT, head="rms of gradient", is_detail=True),
            Column(name="rms.weight", kind=Kind.FLOAT, head="rms of weight", is_detail=True),
            Column(name="norm_ratio", kind=Kind.FLOAT, head="ratio"),
            Column(name="norm_ratio.binades", kind=Kind.FLOAT, unit="binades", head="ratio in"),
        ),
        rows=tuple(rows),
        notes=("ratio: of the root mean squares, which is that of the norms of one tensor and its gradient",),
    )


def _passes_table(named: _Named) -> Table:
    shown = [parse_metric(name) for name in SHOWN_METRICS]
    rows = []
    for key, tensors in named.groups.items():
        for name in sorted({name.removeprefix(_PREFIX) for name in tensors}):
            pair = [tensors.get(prefix + name, (0, None)) for prefix in ("", _PREFIX)]
            if pair[1][1] is None:
                continue
            counts = [count for count, _ in pair]
            cells = [cell for one in shown for cell in _beside(one, [digest for _, digest in pair])]
            rows.append((*named.row(key, num_records=0)[:-1], name, *counts, *cells))
    columns = [column for one in shown for column in _pair_columns(one)]
    return Table(
        title="the forward pass beside the gradients of the same tensors",
        columns=(
            *group_columns(named.fields)[:-1],
            Column(name="tensor", kind=Kind.TEXT, is_key=True),
            Column(name="records.forward", kind=Kind.INTEGER, head="forward records", is_detail=True),
            Column(name="records.backward", kind=Kind.INTEGER, head="backward records", is_detail=True),
            *columns,
        ),
        rows=tuple(rows),
    )


_WITH_FACTOR = ("absmax", "std")


def _pair_columns(one: Metric) -> list[Column]:
    columns = [
        Column(name=f"{one.name}.{side}", kind=one.kind, head=f"{one.head} {side}") for side in ("forward", "backward")
    ]
    factor = Column(name=f"{one.name}.binades", kind=Kind.FLOAT, unit="binades", head="backward in", is_detail=True)
    return [*columns, factor] if one.name in _WITH_FACTOR else columns


def _beside(one: Metric, pair: Sequence[Digest | None]) -> list[float | None]:
    """The metric of the forward pass, that of the gradient, and how far that is above it in binades."""
    values = [None if digest is None else one.of(digest) for digest in pair]
    if one.name not in _WITH_FACTOR:
        return values
    forward, backward = values
    return [*values, math.log2(backward) - math.log2(forward) if forward and backward else None]
