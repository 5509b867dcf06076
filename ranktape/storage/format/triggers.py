"""Writes and reads what happened in a training, for which its ranks stored the iterations that they held.

A trigger is one small document, written by the rank on which the thing happened, under a name of its own: ranks need
no agreement and no lock. Whoever looks at the names knows which iterations are to be stored.
"""

from __future__ import annotations

from collections.abc import Collection

from ranktape.errors import DataError, RunFormatError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt, check_attempt
from ranktape.storage.format.documents import for_each, read_attributes, write_group
from ranktape.storage.format.trigger import Trigger, TriggerKind
from ranktape.storage.format.validation import Fields
from ranktape.storage.places.backend import Backend

MAX_TEXT = 2000
"""Characters of a text in a trigger."""

MAX_PER_ITERATION = 16
"""Triggers of one rank in one iteration."""


def write_trigger(backend: Backend, *, attempt: Attempt, trigger: Trigger, number: int = 0) -> None:
    """Say to all ranks of an attempt what happened; `number` tells those of one rank and iteration apart.

    Raises:
        StorageError: the run was deleted or replaced, or cannot be written.
    """
    check_attempt(backend, attempt)
    if number == 0:
        write_group(backend, layout.triggers_path(attempt.path), {})
    path = layout.trigger_path(attempt.path, trigger.iteration, trigger.rank, number=number)
    write_group(backend, path, {**trigger.to_json(), "text": trigger.text[:MAX_TEXT]})


def list_triggers(backend: Backend, attempt: Attempt) -> set[str]:
    """The names of an attempt's triggers; one LIST."""
    return {name for name in backend.list_names(layout.triggers_path(attempt.path)) if layout.is_trigger(name)}


def read_triggers(backend: Backend, attempt: Attempt, names: Collection[str] | None = None) -> list[Trigger]:
    """An attempt's triggers, or those of these names, what came first before; damaged ones are passed over."""
    chosen = sorted(list_triggers(backend, attempt) if names is None else names)
    found = for_each(lambda name: _read(backend, attempt, name), chosen)
    return sorted((one for one in found if one is not None), key=lambda one: one.order)


def _read(backend: Backend, attempt: Attempt, name: str) -> Trigger | None:
    try:
        fields = read_attributes(backend, f"{layout.triggers_path(attempt.path)}/{name}")
        return None if fields is None else _parse(fields, attempt)
    except (DataError, RunFormatError):
        return None  # 'ranktape check' names it


def _parse(fields: Fields, attempt: Attempt) -> Trigger:
    kind = fields.text("kind")
    if kind not in set(TriggerKind):
        raise RunFormatError(f"a trigger of the kind {kind!r:.60} is not known to this version")
    return Trigger(
        kind=TriggerKind(kind),
        iteration=fields.integer("iteration"),
        rank=fields.integer("rank"),
        text=fields.text("text"),
        where={**fields.inner("where")},
        metric=fields.text("metric", default=""),
        value=fields.number("value"),
        expected=fields.number("expected"),
        signal=fields.text("signal", default=""),
        traceback=fields.text("traceback", default=""),
        time=fields.number("time") or 0.0,
        attempt=attempt.number,
    )
