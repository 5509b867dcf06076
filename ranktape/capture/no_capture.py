"""The state of a process without a running capture, and a capture that records nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

begin_waiting: Callable[[int], None] | None = None
"""Starts the capture that is waiting for the training, given its first iteration; None if no capture is waiting."""


class NoCapture(contextlib.AbstractContextManager["NoCapture"]):
    """A capture that records nothing, if none was requested."""

    is_recording = False
    """Always False."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def step(self, iteration: int | None = None) -> None:
        """Do nothing."""

    def set_sample_ids(self, sample_ids: Any) -> None:
        """Do nothing."""

    def trigger(self, why: str) -> None:
        """Do nothing."""
