"""What there is in a process without a capture: one that waits for the training, and one that records nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

begin_waiting: Callable[[int], None] | None = None
"""Begins the capture that waits for the training, with the number of its first iteration; None where none waits."""


class NoCapture(contextlib.AbstractContextManager["NoCapture"]):
    """Stands for a capture where none was asked for: nothing is attached, nothing is recorded."""

    is_recording = False
    """Always: nothing is stored."""

    def __exit__(self, *_: object) -> None:
        """Nothing."""

    def step(self, iteration: int | None = None) -> None:
        """Nothing."""

    def set_sample_ids(self, sample_ids: Any) -> None:
        """Nothing."""

    def trigger(self, why: str) -> None:
        """Nothing."""
