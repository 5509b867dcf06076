"""Waits for what another thread or process does, and fails a test that would wait for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 60.0
"""Longer than anything takes on a loaded machine."""

Found = TypeVar("Found")


def until(
    find: Callable[[], Found], *, seconds: float = PATIENCE_SECONDS, said: Callable[[], object] = lambda: None
) -> Found:
    """What a function gives, as soon as it gives something; where it does not in time, an assertion shows `said`."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < deadline, said()
        time.sleep(0.02)
    return found
