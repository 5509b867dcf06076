"""Gives how much of the gradients underflows, and their sizes beside the weights and beside the forward pass.

Counts against a format are given twice: of the gradients as they are, and with one power of two as the scale of each
tensor, the smallest with which its largest value does not exceed the largest of the format.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ranktape.analyze.engine.digests import digests, merge_digests
from ranktape.analyze.engine.values import View
from ranktape.analyze.identity import group_columns, group_row, with_stacks
from ranktape.analyze.metrics.gather import group_records
from ranktape.analyze.metrics.metric import Metric, parse_metric
from ranktape.analyze.metrics.target import SCALINGS, parse_targets
from ranktape.analyze.numerics.digests.digest import push
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import NoRecordsError

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.metrics.target import Target
    from ranktape.analyze.numerics.digests.digest import Digest
    from ranktape.storage import Records

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
    names = [str(name) for name in records.column("tensor_name").tolist()]
    is_gradient = [name.startswith("grad") for name in names]
    if not any(is_gradient):
        raise NoRecordsError("no record holds a gradient: their names begin with 'grad', as in grad_output")
    by_type, by_module = (
        with_stacks(by, records) or default for default in (("layer_type",), ("layer_type", "layer_idx", "module"))
    )
    ranges = _GroupDigests.of(records, by=(*by_type, *([] if "tensor_name" in by_type else ["tensor_name"])))
    passes, weights = _GroupDigests.of(records, by=by_type), _GroupDigests.of(records, by=by_module)
    flushed: dict[tuple[int, str], list[_Flushed | None]] = defaultdict(list)
    found = digests(records, view=view or View.COMPUTE, engine=engine)
    for position, (name, digest) in enumerate(zip(names, found, strict=True)):
        if is_gradient[position]:
            ranges.add(position, "", digest)
            flushed[ranges.key(position, "")].append(_flushed(digest, targets))
        passes.add(position, name, digest)
        if name in _WEIGHTS:
            weights.add(position, name, digest)
    if show == "ranges":
        return _ranges_table(ranges, flushed, targets)
    return _weights_table(weights) if show == "weights" else _passes_table(passes)


_WEIGHTS = ("weight", f"{_PREFIX}weight")


class _GroupDigests:
    """Digests of groups, for each name of a tensor, as far as they were seen."""

    def __init__(self, keys: Sequence[dict[str, Any]], numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._parts: dict[tuple[int, str], list[Digest]] = defaultdict(list)
        self._counts: dict[tuple[int, str], int] = defaultdict(int)
        self.keys = keys
        """The fields of each group."""

    @classmethod
    def of(cls, records: Records, *, by: Sequence[str]) -> _GroupDigests:
        """Nothing yet, of the groups of those fields."""
        groups = group_records(records, by=by)
        return cls(groups.keys, groups.numbers)

    def key(self, position: int, name: str) -> tuple[int, str]:
        """The group of a record, and the name that it is counted under."""
        return self._numbers[position], name

    def add(self, position: int, name: str, digest: Digest) -> None:
        """Take one more record; only a few digests of each group are in memory."""
        key = self.key(position, name)
        self._counts[key] += 1
        parts = self._parts[key]
        push(parts, digest, number=self._counts[key], merge=merge_digests)

    def digest(self, group: int, name: str) -> Digest | None:
        """That of all records of a group under a name; None where there are none."""
        parts = self._parts.get((group, name))
        return None if parts is None else merge_digests(parts) if len(parts) > 1 else parts[0]

    def groups(self, name: str) -> Iterator[tuple[int, dict[str, Any], int]]:
        """The groups that have records under a name, with their fields and how many there are."""
        for number, key in enumerate(self.keys):
            if (number, name) in self._counts:
                yield number, key, self._counts[number, name]

    def names(self, group: int) -> list[str]:
        """The names that a group has records under, in alphabetical order."""
        return sorted(name for number, name in self._counts if number == group)

    def count(self, group: int, name: str) -> int:
        """How many records a group has under a name."""
        return self._counts.get((group, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flushed:
    """What formats make zero of one record, in elements."""

    elements: int
    """All of them."""
    counts: tuple[int, ...]
    """For each target those that are zero in it, and were not before."""


def _flushed(digest: Digest, targets: Sequence[Target]) -> _Flushed | None:
    if not digest.has_values:
        return None
    limits = (target.limits(largest=digest.tallies.largest_finite) for target in targets)
    return _Flushed(elements=digest.tallies.num_elements, counts=tuple(digest.count(one).flushed for one in limits))


def _ranges_table(
    totals: _GroupDigests, flushed: dict[tuple[int, str], list[_Flushed | None]], targets: Sequence[Target]
) -> Table:
    shown = [parse_metric(name) for name in (*SHOWN_METRICS[:2], "norm", "smallest_nonzero", *SHOWN_METRICS[2:])]
    rows = []
    for number, key, count in totals.groups(""):
        digest = totals.digest(number, "")
        assert digest is not None
        parts = flushed[number, ""]
        cells = (one.of(digest) for one in shown)
        rows.append((*group_row(key, num_records=count), *cells, *_flushed_cells(parts, len(targets))))
    columns = [
        Column(
            name=f"flushed.{target.name}{'' if target.scaling is Scaling.NONE else '.scaled'}",
            kind=Kind.RATIO,
            head=f"{target.name} flushes{'' if target.scaling is Scaling.NONE else ', scaled'}",
        )
        for target in targets
    ]
    fields = list(totals.keys[0]) if totals.keys else []
    return Table(
        title="range of gradients: subnormal and zero in their own type, and what formats would make zero",
        columns=(*group_columns(fields), *(one.column() for one in shown), *columns),
        rows=tuple(rows),
        notes=(
            "scaled: with the smallest power of two for each tensor that keeps its largest value within the format",
        ),
    )


def _flushed_cells(parts: Sequence[_Flushed | None], num_targets: int) -> tuple[float | None, ...]:
    """The parts that targets flush; None where values of a record are not known."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return (None,) * num_targets
    elements = max(1, sum(part.elements for part in known))
    return tuple(sum(part.counts[place] for part in known) / elements for place in range(num_targets))


def _weights_table(totals: _GroupDigests) -> Table:
    rows = []
    for number, key, count in totals.groups(f"{_PREFIX}weight"):
        gradient, weight = totals.digest(number, f"{_PREFIX}weight"), totals.digest(number, "weight")
        assert gradient is not None
        # Of several records the norm grows with their number: the RMS does not.
        sizes = [None if one is None else one.statistics.rms for one in (gradient, weight)]
        norms = [None if one is None else one.statistics.norm for one in (gradient, weight)]
        ratio = sizes[0] / sizes[1] if sizes[0] is not None and sizes[1] else None
        rows.append(
            (
                *group_row(key, num_records=count),
                totals.count(number, "weight"),
                *norms,
                *sizes,
                ratio,
                math.log2(ratio) if ratio else None,
            )
        )
    fields = list(totals.keys[0]) if totals.keys else []
    return Table(
        title="gradients of weights beside the weights",
        columns=(
            *group_columns(fields),
            Column(name="weights", kind=Kind.INTEGER, head="weights", is_detail=True),
            Column(name="norm.gradient", kind=Kind.FLOAT, head="norm of gradient"),
            Column(name="norm.weight", kind=Kind.FLOAT, head="norm of weight"),
            Column(name="rms.gradient", kind=Kind.FLOAT, head="rms of gradient", is_detail=True),
            Column(name="rms.weight", kind=Kind.FLOAT, head="rms of weight", is_detail=True),
            Column(name="norm_ratio", kind=Kind.FLOAT, head="ratio"),
            Column(name="norm_ratio.octaves", kind=Kind.FLOAT, unit="octaves", head="ratio in"),
        ),
        rows=tuple(rows),
        notes=("ratio: of the root mean squares, which is that of the norms of one tensor and its gradient",),
    )


def _passes_table(totals: _GroupDigests) -> Table:
    shown = [parse_metric(name) for name in SHOWN_METRICS]
    rows = []
    for number, key in enumerate(totals.keys):
        names = totals.names(number)
        for name in sorted({name.removeprefix(_PREFIX) for name in names}):
            pair = [totals.digest(number, prefix + name) for prefix in ("", _PREFIX)]
            if pair[1] is None:
                continue
            cells = [cell for one in shown for cell in _beside(one, pair)]
            counts = (totals.count(number, name), totals.count(number, _PREFIX + name))
            rows.append((*group_row(key, num_records=sum(counts))[:-1], name, *counts, *cells))
    fields = list(totals.keys[0]) if totals.keys else []
    columns = [column for one in shown for column in _pair_columns(one)]
    return Table(
        title="the forward pass beside the gradients of the same tensors",
        columns=(
            *group_columns(fields)[:-1],
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
    factor = Column(name=f"{one.name}.octaves", kind=Kind.FLOAT, unit="octaves", head="backward in", is_detail=True)
    return [*columns, factor] if one.name in _WITH_FACTOR else columns


def _beside(one: Metric, pair: Sequence[Digest | None]) -> list[float | None]:
    """The metric of the forward pass, that of the gradient, and how far that is above it in octaves."""
    values = [None if digest is None else one.of(digest) for digest in pair]
    if one.name not in _WITH_FACTOR:
        return values
    forward, backward = values
    return [*values, math.log2(backward) - math.log2(forward) if forward and backward else None]
