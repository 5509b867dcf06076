"""Parses the limits of `--trigger`, and checks each tensor of a flight recorder for NaN, infinities and these limits.

A limit is a condition on metrics of one tensor, and the records to which it applies, both as in `--where`:
`absmax > 448 where tensor_name == 'input'`. It is parsed once, before the training starts.

A condition that persists triggers once; it re-arms after an iteration in which it is false.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.capture.settings.rules import FIELDS
from ranktape.capture.settings.setting import is_given
from ranktape.errors import UsageError, nearest
from ranktape.fields import field_names
from ranktape.storage.format.live import TriggerKind
from ranktape.storage.format.record_info import EXTREMES, TALLY_KINDS
from ranktape.storage.query.columns import Column, StringColumn
from ranktape.storage.query.filters import split_rule
from ranktape.storage.query.where import Where, parse_where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ranktape.storage.format.record_info import RecordInfo
    from ranktape.storage.format.statistics import Statistics

_WHERE = (
    *("module", "layer_type", "layer_idx", "layer_stack", "operation", "phase", "component", "tensor_name"),
    *("microbatch", "call", "mode", "dtype", "counter"),
)
"""The fields that identify the tensor of a hit."""

_TEXTS = frozenset(field_names(lambda field: field.kind.name in {"TEXT", "JSON"}))


OF_STATISTICS = (
    *("absmax", "minimum", "maximum", "mean", "mean_magnitude", "variance", "std", "rms", "norm"),
    *("skewness", "kurtosis"),
)
"""The metrics of the finite values."""

OF_OVERFLOW = (
    *(f"overflow.{kind}.{what}" for kind in TALLY_KINDS for what in ("count", "ratio")),
    *(f"overflow.{name}" for name in (*EXTREMES, "total", "ratio")),
)
"""The metrics at the limits of the dtype, infinities included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTrigger:
    """A limit of metrics, and the tensors to which it applies."""

    text: str
    """The limit as it was given, with single spaces."""
    condition: Where
    """The expression on a tensor's metrics that triggers if it is true."""
    where: Where | None
    """The expression that selects tensors by their fields; None for all tensors."""


def read_site_triggers(values: Any) -> tuple[SiteTrigger, ...]:
    """The limits of the option; semicolons separate those of one text.

    Raises:
        UsageError: a limit is not valid.
    """
    texts: Sequence[Any] = values if isinstance(values, list | tuple) else [values]
    return tuple(_read(rule) for text in texts if is_given(text) for rule in _split(str(text)))


_PART = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^;'"]+|.""", re.DOTALL)


def _split(text: str) -> list[str]:
    """The rules between semicolons; a semicolon inside quotes does not separate."""
    rules = [""]
    for part in _PART.findall(text):
        if part == ";":
            rules.append("")
        else:
            rules[-1] += part
    return rules


def _read(text: str) -> SiteTrigger:
    try:
        check, selection = split_rule(text)
        condition = parse_where(check)
        where = None if selection is None else parse_where(selection)
        for name in condition.names:
            if name not in (*OF_STATISTICS, *OF_OVERFLOW):
                hint = nearest(name, (*OF_STATISTICS, *OF_OVERFLOW))
                raise UsageError(f"{name!r} is no metric that is known of every tensor: {hint}")
        known = (*FIELDS, "iteration")
        for name in () if where is None else where.names:
            if name not in known:
                hint = nearest(name, known)
                raise UsageError(f"{name!r} is no field that is known when a tensor is captured: {hint}")
    except UsageError as error:
        raise UsageError(f"--trigger {text!r:.80}: {error}") from error
    return SiteTrigger(text=" ".join(text.split()), condition=condition, where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A tensor that contains NaN or infinities, or exceeds a limit."""

    kind: TriggerKind
    """Kind of the trigger."""
    text: str
    """Description in one sentence."""
    where: Mapping[str, Any]
    """The fields that identify the tensor."""
    metric: str
    """Name of the metric."""
    value: float | None
    """Value of the metric; None if it is not finite."""
    rule: str
    """Identifies the rule. Only the first hit of a rule in an iteration counts."""


def site_text(where: Mapping[str, Any]) -> str:
    """The name of a tensor in messages, such as `layers.5.mlp.up forward post output`."""
    name = where.get("module") or f"layer {where.get('layer_idx')} {where.get('layer_type')}"
    return f"{name} {where.get('operation')} {where.get('phase')} {where.get('tensor_name')}"


def judge(triggers: Sequence[SiteTrigger], info: RecordInfo, statistics_of: Callable[[], Statistics]) -> Iterator[Hit]:
    """The hits of a tensor. `statistics_of` is called only if a limit needs the statistics of its finite values."""
    where = {name: getattr(info, name) for name in _WHERE}
    total = max(1, int(np.prod(info.shape, dtype=np.int64)))
    for kind, tally in ((TriggerKind.NAN, info.overflow.nan), (TriggerKind.INF, info.overflow.inf)):
        if tally.count:
            share = f"{tally.count} of {total} values of" if total > 1 else "the"
            is_what = f"{'are' if total > 1 else 'is'} {'NaN' if kind is TriggerKind.NAN else 'infinite'}"
            metric = f"overflow.{kind.value}.count"
            text = f"{share} {site_text(where)} {is_what}"
            yield Hit(kind=kind, text=text, where=where, metric=metric, value=float(tally.count), rule=kind.value)
    for trigger in triggers:
        if trigger.where is not None and not trigger.where.mask(functools.partial(_field, info))[0]:
            continue
        values: dict[str, float] = {}

        def metric_of(name: str, /, *, values: dict[str, float] = values) -> Column:
            value = _of_overflow(info, name) if name in OF_OVERFLOW else getattr(statistics_of(), name)
            values[name] = np.nan if value is None else float(value)
            return np.array([values[name]])

        if trigger.condition.mask(metric_of)[0]:
            first = trigger.condition.names[0]
            shown = ", ".join(f"{name} = {value:.6g}" for name, value in values.items())
            text = f"{site_text(where)} has {shown} ({trigger.text})"
            value = values[first] if np.isfinite(values[first]) else None
            yield Hit(kind=TriggerKind.METRIC, text=text, where=where, metric=first, value=value, rule=trigger.text)


def _of_overflow(info: RecordInfo, name: str) -> Any:
    value: Any = info
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _field(info: RecordInfo, name: str, /) -> Column:
    assert name in FIELDS, "checked when the capture began"
    value: Any = int(np.prod(info.shape, dtype=np.int64)) if name == "numel" else getattr(info, name)
    if name in _TEXTS:
        return StringColumn.of([None if value is None else str(value)])
    return np.array([np.nan if value is None else value])
