"""Says where in a selection the records of calls are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ranktape.analyze.replays.calls import RecordedCalls
    from ranktape.storage import Records

_FIELDS = ("attempt", "iteration", "rank", "module", "tensor_name", "counter")
"""What tells one record of a run from all others."""


def places_in(records: Records, calls: RecordedCalls) -> list[list[int]]:
    """For each call the places of its tensors in a selection, in the order of the call; none of what lies outside."""
    known = {key: place for place, key in enumerate(_keys(records))}
    keys = _keys(calls.records)
    rows = ([row for several in call.rows.values() for row in several] for call in calls.calls)
    return [list(dict.fromkeys(known[keys[row]] for row in some if keys[row] in known)) for some in rows]


def _keys(records: Records) -> list[tuple[Any, ...]]:
    return list(zip(*(records.column(name).tolist() for name in _FIELDS), strict=True))
