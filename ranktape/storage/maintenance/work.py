"""Tells how far a long piece of work is, and bounds the memory that its threads hold together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnProgress = Callable[[int, int], object]
"""Called with the pieces of work that are done and all that are known."""

BUDGET_NBYTES = 256 << 20
"""Bytes of objects held in memory at once; one that is larger is held alone."""


class Work:
    """Pieces of work, of which each that is done is told of."""

    def __init__(self, tell: OnProgress | None, num_known: int = 0) -> None:
        self._tell = tell
        self._num_done = 0
        self.num_known = num_known
        """All of them, as far as is known by now."""

    def step(self) -> None:
        """One more is done."""
        self._num_done += 1
        if self._tell is not None:
            self._tell(self._num_done, self.num_known)


class MemoryBudget:
    """Bytes that several threads may hold together; one that needs more than all of them holds them alone."""

    def __init__(self, nbytes: int = BUDGET_NBYTES) -> None:
        self._nbytes = nbytes
        self._num_taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Hold so many bytes; waits for others to give theirs back."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_taken or self._num_taken + nbytes <= self._nbytes)
            self._num_taken += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._num_taken -= nbytes
                self._changed.notify_all()
