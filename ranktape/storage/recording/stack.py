"""Keeps the small tensors that wait to be written together, and says which of them go into one array.

A small tensor costs the store as much as a large one when it is an object of its own. Those of one dtype, shape
and layout are therefore kept until there are many of them, or their iteration ends. Nothing is copied: what is
kept stays where it is, and is given back when it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranktape.storage.format.record_info import Keep, RecordInfo

if TYPE_CHECKING:
    import numpy as np

    from ranktape.storage.format.catalogue import CatalogueEntry

STACK_BELOW_NBYTES = 2 << 20
"""Tensors smaller than this are stacked, where nobody says otherwise."""

MAX_STACK_NBYTES = 32 << 20
"""A stack is written once it is that large."""

MAX_STACK_RECORDS = 8192
"""And once it has that many tensors."""

MAX_HELD_NBYTES = 64 << 20
"""All stacks of a writer are written once they are that large together."""

STORE_CONCURRENCY = 8
"""Stacks, and tensors with an object of their own, that a rank sends at the same time, where nobody says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A small tensor that waits."""

    array: np.ndarray[Any, Any]
    """Its values."""
    info: RecordInfo
    """Its identity, with its checksum."""
    site: str
    """Its path below the iteration."""
    release: Callable[[], None]
    """To be called when the values are not needed any more."""


@dataclass(slots=True)
class Pending:
    """What was written of an iteration that is not committed yet, and the small tensors of it that wait."""

    taken: set[str] = field(default_factory=set)
    """The paths of tensors, from before they are written."""
    entries: list[CatalogueEntry] = field(default_factory=list)
    """The tensors that are written."""
    held: dict[tuple[Any, ...], list[HeldTensor]] = field(default_factory=dict)
    """The tensors that wait, by what those of one array must have in common."""
    held_nbytes: int = 0
    """Bytes of their values."""
    num_stacks: int = 0
    """Stacks that were begun to be written."""
    num_busy: int = 0
    """Threads that are writing stacks."""
    failure: Exception | None = None
    """Why a stack could not be written."""
    why_spilled: str | None = None
    """Why the spill directory takes what is written of it; None where the store does."""

    def hold(self, item: HeldTensor) -> list[HeldTensor] | None:
        """Keep a tensor; its stack, when it is full and to be written."""
        info = item.info
        # The statistics of all tensors are alike, and far smaller than the documents of arrays of their own.
        is_alike = info.keep == Keep.STATISTICS
        form = (info.dtype, info.shape, info.layout, item.array.dtype, info.nbytes)
        key = (info.keep,) if is_alike else (info.keep, *form)
        stack = self.held.setdefault(key, [])
        stack.append(item)
        self.held_nbytes += item.array.nbytes
        if len(stack) < MAX_STACK_RECORDS and len(stack) * item.array.nbytes < MAX_STACK_NBYTES:
            return None
        return self._take(key)

    def take_all(self) -> list[list[HeldTensor]]:
        """All stacks, to be written."""
        return [self._take(key) for key in list(self.held)]

    def _take(self, key: tuple[Any, ...]) -> list[HeldTensor]:
        stack = self.held.pop(key)
        self.held_nbytes -= len(stack) * stack[0].array.nbytes
        return stack
