"""Which iterations are to be captured in an attempt, as the coordinator announces it to every rank?

The first iterations follow from the options, and every rank knows them. Only when they turn out not to be
enough does the coordinator write a plan; it names iterations that no rank has reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.storage.format import layout
from ranktape.storage.format.attempt import check_attempt
from ranktape.storage.format.group_documents import read_fields, write_group

if TYPE_CHECKING:
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.places.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The iterations of an attempt."""

    iterations: tuple[int, ...]
    """All that are or were to be captured, ascending."""
    is_done: bool
    """Whether capture ends: enough iterations are complete, or no more can be."""
    is_enough: bool = False
    """Whether it ends because enough iterations are complete."""


def write_plan(backend: Backend, *, attempt: Attempt, plan: Plan) -> None:
    """Announce a plan to every rank of an attempt.

    Raises:
        StorageError: the run was deleted or replaced, or cannot be written.
    """
    check_attempt(backend, attempt)
    attributes = {"iterations": list(plan.iterations), "is_done": plan.is_done, "is_enough": plan.is_enough}
    write_group(backend, layout.plan_path(attempt.path), attributes)


def read_plan(backend: Backend, *, attempt: Attempt) -> Plan | None:
    """The plan that was announced last; None where none was.

    Raises:
        DataError: its document is not what was written.
        RunFormatError: it says what no plan does.
        StorageError: the store cannot be read.
    """
    fields = read_fields(backend, layout.plan_path(attempt.path))
    if fields is None:
        return None
    return Plan(
        iterations=fields.integers("iterations"), is_done=fields.flag("is_done"), is_enough=fields.flag("is_enough")
    )
