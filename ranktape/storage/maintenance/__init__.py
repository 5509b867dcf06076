"""Checks, repairs, copies, prunes and lists runs; `Work` tells how far one of these is."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], object]
"""Called with the pieces of work that are done and all that are known."""


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
