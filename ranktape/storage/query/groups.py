"""Which rows hold equal values, in which order do the groups of them come?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Key = tuple[Any, ...]
"""The values of a group, one for each column; None for a missing one."""


def equal_rows(keys: Iterable[Sequence[Any]]) -> list[tuple[Key, list[int]]]:
    """For each group of equal keys, sorted by them, the rows that hold them; a row has a value for each column.

    A missing value (None or NaN) is None, and after all others; text comes after numbers.
    """
    groups: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        known = tuple(None if value != value else value for value in key)  # noqa: PLR0124  (NaN)
        groups.setdefault(known, []).append(row)
    return sorted(groups.items(), key=lambda item: [_order(value) for value in item[0]])


def _order(value: Any) -> tuple[bool, bool, Any]:
    return value is None, isinstance(value, str), 0 if value is None else value
