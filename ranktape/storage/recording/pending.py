"""What has been written of an iteration that is not committed yet, and what waits to be?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ranktape.storage.recording.stack import Stacks

if TYPE_CHECKING:
    from ranktape.storage.format.catalogue import Entry


@dataclass(slots=True)
class Pending:
    """What was written of an iteration that is not committed yet."""

    members: dict[str, bytes] = field(default_factory=dict)
    """The documents of its arrays and groups, by their paths below the iteration."""
    taken: set[str] = field(default_factory=set)
    """The paths of tensors, from before they are written."""
    entries: list[Entry] = field(default_factory=list)
    """The tensors that are written."""
    stacks: Stacks = field(default_factory=Stacks)
    """The tensors that are kept."""
    num_stacks: int = 0
    """Stacks that were begun to be written."""
    num_busy: int = 0
    """Threads that are writing stacks."""
    failure: Exception | None = None
    """Why a stack could not be written."""
