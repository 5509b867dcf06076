"""Reads the limits at which a flight recorder stores what it holds: `absmax > 448 where tensor_name == 'input'`.

The language is that of `--where` (`ranktape.storage.query.where`): a condition about metrics of one tensor, and
the records that it is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ranktape.capture.settings.setting import is_given
from ranktape.errors import UsageError, nearest
from ranktape.fields import field_names
from ranktape.storage.format.record_info import EXTREMES, TALLY_KINDS
from ranktape.storage.query.filters import split_rule
from ranktape.storage.query.where import Where, parse_where

OF_STATISTICS = (
    *("absmax", "minimum", "maximum", "mean", "mean_magnitude", "variance", "std", "rms", "norm"),
    *("skewness", "kurtosis"),
)
"""Metrics of the finite values."""

OF_OVERFLOW = (
    *(f"overflow.{kind}.{what}" for kind in TALLY_KINDS for what in ("count", "ratio")),
    *(f"overflow.{name}" for name in (*EXTREMES, "total", "ratio")),
)
"""Metrics at the limits of the dtype, infinities included."""

FIELDS = (*field_names(lambda field: field.is_early), "numel")
"""What a selection may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTrigger:
    """A limit of a metric, and the tensors that it holds for."""

    text: str
    """As it was given."""
    condition: Where
    """What has to hold of a tensor's metrics for something to have happened."""
    where: Where | None
    """What has to hold of its fields; None for all tensors."""


def read_site_triggers(values: Any) -> tuple[SiteTrigger, ...]:
    """The limits that the option gives.

    Raises:
        UsageError: one is no rule, or asks for a metric or a field that is not known when a tensor is captured.
    """
    given: Sequence[Any] = values if isinstance(values, list | tuple) else [values]
    return tuple(_read(str(text)) for text in given if is_given(text))


def _read(text: str) -> SiteTrigger:
    try:
        check, selection = split_rule(text)
        condition = parse_where(check)
        where = None if selection is None else parse_where(selection)
        for name in condition.names:
            if name not in (*OF_STATISTICS, *OF_OVERFLOW):
                hint = nearest(name, (*OF_STATISTICS, *OF_OVERFLOW))
                raise UsageError(f"{name!r} is no metric that is known of every tensor: {hint}")
        for name in () if where is None else where.names:
            if name not in FIELDS:
                hint = nearest(name, FIELDS)
                raise UsageError(f"{name!r} is no field that is known when a tensor is captured: {hint}")
    except UsageError as error:
        raise UsageError(f"--trigger {text!r:.80}: {error}") from error
    return SiteTrigger(text=" ".join(text.split()), condition=condition, where=where)
