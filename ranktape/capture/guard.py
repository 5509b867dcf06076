"""Keeps a defect of ours from ending somebody's training."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from ranktape.capture.source import Source, TensorRole
from ranktape.errors import CaptureError

OnFailure = Callable[[Exception, "Source | None", "TensorRole | None"], None]
"""Called with what was raised, and at which source and role; None where it is not of one."""


class StrictCaptureError(CaptureError):
    """A failure inside of a capture that was asked to end the training with it; passes through all guards."""


class Guard:
    """A context that reports exceptions and swallows them: a defect of ours must not end somebody's training.

    It holds nothing of what runs in it: one is entered again and again, and by several threads.
    """

    __slots__ = ("_on_failure", "_role", "_source")

    def __init__(self, on_failure: OnFailure, source: Source | None = None, role: TensorRole | None = None) -> None:
        """Prepare, for what records of one source, or one role of it; what `on_failure` raises leaves the context."""
        self._on_failure = on_failure
        self._source = source
        self._role = role

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Report an exception; interrupts, exits and what a strict capture raises pass."""
        if not isinstance(error, Exception) or isinstance(error, StrictCaptureError):
            return False
        self._on_failure(error, self._source, self._role)
        return True


def asked(module: object, name: str, default: Any = None) -> Any:
    """An attribute of somebody else's module; the default where it has none, or answers with an error of its own."""
    try:
        return getattr(module, name, default)
    except Exception:  # noqa: BLE001  # a property may fail with anything, and what is asked for need not be there
        return default


def failure_text(error: BaseException) -> str:
    """The message about an exception: our own words, or its kind and its text; never fails."""
    if isinstance(error, CaptureError):
        return str(error)
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001  # somebody else's exception, whose text cannot be had
        text = ""
    return f"{type(error).__name__}: {text[:_SHOWN]}" if text else type(error).__name__


_SHOWN = 300
"""Characters of somebody else's text that are shown: torch's messages can be pages."""
