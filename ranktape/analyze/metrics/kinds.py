"""Which records of a selection are of which kind of numbers, so that each kind is asked in its own way?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.storage import Records

FIELDS = ("dtype", "compute_dtype", "keep")
"""What makes a kind of numbers."""


def pick(records: Records, is_wanted: Callable[[str, str, str], bool]) -> tuple[NDArray[np.bool_], Records]:
    """For each record whether its dtype, compute dtype and what was kept of it are wanted; and those that are."""
    kinds = list(zip(*(records.column(field).tolist() for field in FIELDS), strict=True))
    wanted = {kind for kind in set(kinds) if is_wanted(*kind)}
    mask = np.array([kind in wanted for kind in kinds], dtype=np.bool_)
    if len(wanted) == len(set(kinds)):
        return mask, records
    if not wanted:
        return mask, records[:0]
    return mask, records.where(" or ".join(map(_expression, sorted(wanted))))


def _expression(kind: tuple[str, ...]) -> str:
    pairs = zip(FIELDS, kind, strict=True)
    return "(" + " and ".join(f"{field} == {_quoted(text)}" for field, text in pairs) + ")"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
