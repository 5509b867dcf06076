"""Keeps failures inside a capture from stopping the training."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from ranktape.capture.source import Source, TensorRole
from ranktape.errors import CaptureError

OnFailure = Callable[[Exception, "Source | None", "TensorRole | None"], None]
"""A function of an exception and the source and role at which it was raised, which are None if there is none."""


class StrictCaptureError(CaptureError):
    """A failure inside a strict capture, which stops the training. It passes through all guards."""


class Guard:
    """A context that reports exceptions and suppresses them, so that they do not stop the training.

    It has no state for the code in it, so it can be entered repeatedly and by several threads.
    """

    __slots__ = ("_on_failure", "_role", "_source")

    def __init__(self, on_failure: OnFailure, source: Source | None = None, role: TensorRole | None = None) -> None:
        """`source` and `role` are passed to `on_failure`. An exception that `on_failure` raises leaves the context."""
        self._on_failure = on_failure
        self._source = source
        self._role = role

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Report and suppress an exception, except interrupts, exits and `StrictCaptureError`."""
        if not isinstance(error, Exception) or isinstance(error, StrictCaptureError):
            return False
        self._on_failure(error, self._source, self._role)
        return True


def getattr_or_default(module: object, name: str, default: Any = None) -> Any:
    """An attribute of a user's object; the default if it does not exist or if reading it raises an exception."""
    try:
        return getattr(module, name, default)
    except Exception:  # noqa: BLE001  # a property may raise anything
        return default


def failure_text(error: BaseException) -> str:
    """The message about an exception: the text of a `CaptureError`, otherwise the class and the text. Never fails."""
    if isinstance(error, CaptureError):
        return str(error)
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001  # `__str__` of any exception may fail
        text = ""
    return f"{type(error).__name__}: {text[:_SHOWN]}" if text else type(error).__name__


_SHOWN = 300
"""Maximum length of the text of other exceptions, in characters. Messages of torch can be pages long."""
