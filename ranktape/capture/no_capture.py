"""Gives what stands for a capture where none was asked for, so that a script needs no second way."""

from __future__ import annotations

import contextlib
from typing import Any


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
