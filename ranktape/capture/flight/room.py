"""Tells a flight recorder whether the next iteration may find room: what it holds may wait for a store that is dead."""

from __future__ import annotations

import time
from typing import Any

_RETRY_SECONDS = 30.0
"""After which one that had no room for an iteration tries another one, should no room have come."""


class Room:
    """What the trainer knows of the room that the last iterations found."""

    def __init__(self) -> None:
        self.owed: dict[str, Any] | None = None
        """A word on an iteration for which there was no room, either."""
        self._free_nbytes = self._too_little_nbytes = -1
        self._tries_again_at = 0.0

    def may_suffice(self, free_nbytes: int) -> bool:
        """Whether so much may do for an iteration: it is more than what was too little."""
        if free_nbytes <= self._too_little_nbytes and time.monotonic() < self._tries_again_at:
            return False
        self._free_nbytes, self._too_little_nbytes = free_nbytes, -1
        return True

    def was_too_small(self, owed: dict[str, Any] | None = None) -> None:
        """It did not do; a word may be owed."""
        self.owed = owed
        self._too_little_nbytes, self._tries_again_at = self._free_nbytes, time.monotonic() + _RETRY_SECONDS
