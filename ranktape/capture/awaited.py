"""The capture that waits in this process for its training, for those who have something to record before."""

from __future__ import annotations

from collections.abc import Callable

begin: Callable[[int], None] | None = None
"""Begins it, with the number of its first iteration where nothing else says it; None where no capture waits."""
