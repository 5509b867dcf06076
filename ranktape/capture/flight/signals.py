"""Lets a signal ask a flight recorder to store what it holds: SIGUSR1; and SIGTERM where the program handles it.

A handler only counts: the writer process looks. A process that SIGTERM simply ends needs none, as its writer sees that.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]


class Signals:
    """The handlers that are in place."""

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        """Put handlers in place, if this is the main thread; no other one may."""
        self._on_signal = on_signal
        self._replaced: list[tuple[signal.Signals, Any, _Handler]] = []
        if threading.current_thread() is not threading.main_thread():
            return
        self._wrap(signal.SIGUSR1)
        if callable(signal.getsignal(signal.SIGTERM)):
            self._wrap(signal.SIGTERM)

    def stop(self) -> None:
        """Put the program's own handlers back, where it has not put others there since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before, own in self._replaced:
            if signal.getsignal(number) is own:
                signal.signal(number, before)
        self._replaced.clear()

    def _wrap(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if before is signal.SIG_IGN or (before is not signal.SIG_DFL and not callable(before)):
            return

        def handle(caught: int, frame: FrameType | None) -> None:
            self._on_signal(caught)
            if callable(before):
                before(caught, frame)

        signal.signal(number, handle)
        self._replaced.append((number, before, handle))
