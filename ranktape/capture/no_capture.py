"""What stands for a capture where none was asked for?"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self


class NoCapture:
    """Stands for a capture where none was asked for: nothing is attached, nothing is recorded."""

    is_recording = False
    """Always: nothing is stored."""

    def __enter__(self) -> Self:
        """Nothing."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing."""

    def step(self, iteration: int | None = None) -> None:
        """Nothing."""

    def set_sample_ids(self, sample_ids: Any) -> None:
        """Nothing."""
