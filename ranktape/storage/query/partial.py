"""For which rows can an expression hold, when only some of its fields are known?

What is not known may be anything: a condition on it can hold, and can fail. So the answer is never 'no' where the
expression could hold; it may be 'yes' where it cannot, as for `call > 1 and call < 1`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from ranktape.storage.query.where import Compare, Either, Every, Field, Like, Not, OneOf

if TYPE_CHECKING:
    from ranktape.storage.query.columns import ColumnSource, Mask
    from ranktape.storage.query.where import Condition, Where


def can_hold(where: Where, *, known: Collection[str], source: ColumnSource, num_rows: int) -> Mask:
    """The rows for which the expression can hold; `source` has the columns that are `known`."""
    return _bounds(where.condition, known=known, source=source, num_rows=num_rows)[0]


def _bounds(condition: Condition, *, known: Collection[str], source: ColumnSource, num_rows: int) -> tuple[Mask, Mask]:
    """The rows for which the condition can hold, and those for which it can fail."""

    def of(inner: Condition) -> tuple[Mask, Mask]:
        return _bounds(inner, known=known, source=source, num_rows=num_rows)

    if isinstance(condition, Not):
        holds, fails = of(condition.condition)
        return fails, holds
    if isinstance(condition, Every | Either):
        inner = [of(one) for one in condition.conditions]
        holds_each, fails_each = [holds for holds, _ in inner], [fails for _, fails in inner]
        if isinstance(condition, Every):
            return np.logical_and.reduce(holds_each), np.logical_or.reduce(fails_each)
        return np.logical_or.reduce(holds_each), np.logical_and.reduce(fails_each)
    if all(name in known for name in _names(condition)):
        found = condition.mask(source, num_rows)
        return found, ~found
    anything = np.ones(num_rows, dtype=np.bool_)
    return anything, anything


def _names(condition: Condition) -> list[str]:
    if isinstance(condition, Compare):
        return [side.name for side in (condition.left, condition.right) if isinstance(side, Field)]
    assert isinstance(condition, OneOf | Like)
    return [condition.field.name]
