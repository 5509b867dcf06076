"""Checks, repairs, copies, prunes and lists runs; `Work` reports the progress."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], object]
"""A callback that receives the number of finished items and the number of known items."""


class Work:
    """Counts items of work and reports each finished one."""

    def __init__(self, tell: OnProgress | None, num_known: int = 0) -> None:
        self._tell = tell
        self._num_done = 0
        self.num_known = num_known
        """Number of known items."""

    def step(self) -> None:
        """Count a finished item."""
        self._num_done += 1
        if self._tell is not None:
            self._tell(self._num_done, self.num_known)
