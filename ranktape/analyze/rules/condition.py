"""Tells of which rows a condition holds, of which it does not, and of which it cannot be told.

A missing metric compares as unknown, and `and`, `or` and `not` make of it what they make of a truth that nobody knows
(Kleene, 1938): `a < 1 or b < 1` holds where a is 0, whether there is a b or not. A comparison with None is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ranktape.storage.query import columns
from ranktape.storage.query.columns import Comparison, Mask
from ranktape.storage.query.where import Compare, Condition, Either, Every, Field, Like, Not, OneOf

Columns: TypeAlias = Mapping[str, "np.ndarray[Any, Any]"]
"""A column for each name in the condition: numbers, NaN where there is none, or text as objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What is known of each row; neither is where it cannot be told."""

    holds: Mask
    """It holds."""
    fails: Mask
    """It does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One comparison of a condition, and the rows of which it is to blame."""

    metric: str
    """What was compared."""
    limit: str
    """How it should have compared, and with what."""
    comparison: Comparison | None = None
    """The same as one of six; None for lists and patterns."""
    bound: float | None = None
    """The number it should have compared with; None where it is none."""
    rows: Mask
    """Where it did not, and was needed to."""


def judge(condition: Condition, source: Columns, *, num_rows: int) -> Truth:
    """Whether a condition holds, for each row.

    Raises:
        UsageError: a field that holds text meets a number, or the other way round.
    """
    if isinstance(condition, Not):
        inner = judge(condition.condition, source, num_rows=num_rows)
        return Truth(holds=inner.fails, fails=inner.holds)
    if isinstance(condition, Every | Either):
        parts = [judge(part, source, num_rows=num_rows) for part in condition.conditions]
        holds, fails = [part.holds for part in parts], [part.fails for part in parts]
        if isinstance(condition, Every):
            return Truth(holds=np.all(holds, axis=0), fails=np.any(fails, axis=0))
        return Truth(holds=np.any(holds, axis=0), fails=np.all(fails, axis=0))
    found = condition.mask(source.__getitem__, num_rows)
    unknown = np.zeros(num_rows, dtype=np.bool_)
    for name in _compared(condition):
        unknown |= columns.missing(source[name])
    return Truth(holds=found & ~unknown, fails=~found & ~unknown)


def faults(condition: Condition, source: Columns, rows: Mask, *, is_wanted: bool = True) -> Iterator[Fault]:
    """For each comparison in a condition that does not hold in `rows`, those of them of which it is to blame.

    In a row that fails are to blame: of `and` all that do not hold, of `or` all of them.
    """
    if isinstance(condition, Not):
        yield from faults(condition.condition, source, rows, is_wanted=not is_wanted)
    elif isinstance(condition, Every | Either):
        for part in condition.conditions:
            truth = judge(part, source, num_rows=rows.size)
            is_right = truth.holds if is_wanted else truth.fails
            yield from faults(part, source, rows & ~is_right, is_wanted=is_wanted)
    elif isinstance(condition, Compare):
        right = condition.right
        comparison = condition.comparison if is_wanted else _OPPOSITES[condition.comparison]
        is_number = isinstance(right, int | float) and not isinstance(right, bool)
        yield Fault(
            metric=condition.left.name,
            limit=f"{comparison.value} {right.name if isinstance(right, Field) else _literal(right)}",
            comparison=comparison,
            bound=float(right) if is_number else None,  # type: ignore[arg-type]  # it is a number
            rows=rows,
        )
    else:
        assert isinstance(condition, OneOf | Like), "every kind of condition is one of these"
        what = (
            f"in [{', '.join(map(_literal, condition.values))}]"
            if isinstance(condition, OneOf)
            else f"like {condition.pattern!r}"
        )
        yield Fault(metric=condition.field.name, limit=f"{'' if is_wanted else 'not '}{what}", rows=rows)


def _compared(condition: Condition) -> list[str]:
    """The fields whose missing values leave it unknown."""
    if isinstance(condition, Compare):
        sides = () if condition.right is None else (condition.left, condition.right)
        return [one.name for one in sides if isinstance(one, Field)]
    assert isinstance(condition, OneOf | Like), "every kind of condition is one of these"
    return [] if isinstance(condition, OneOf) and None in condition.values else [condition.field.name]


_OPPOSITES = {
    Comparison.EQUAL: Comparison.DIFFERENT,
    Comparison.DIFFERENT: Comparison.EQUAL,
    Comparison.BELOW: Comparison.AT_LEAST,
    Comparison.AT_LEAST: Comparison.BELOW,
    Comparison.ABOVE: Comparison.AT_MOST,
    Comparison.AT_MOST: Comparison.ABOVE,
}


def _literal(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)
