"""Until when may the request go on that this thread is waiting for?

Whoever calls a backend says so around the call; the backend bounds each request by it. Without a word of the caller
a request has `REQUEST_SECONDS`. A call of many requests (a listing of a million objects) moves the deadline on with
each of them that is answered: what must not take long is to hear nothing.
"""

from __future__ import annotations

import time
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Self

REQUEST_SECONDS = 30.0
"""What a request may take when nobody said anything."""

_SHORTEST_SECONDS = 0.05
"""A request that is begun at the deadline still gets a moment, so that it fails by its own words."""


class Deadline:
    """Requests of this thread, made within the block, end by `until`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.until = time.monotonic() + seconds
        """A time of `time.monotonic`."""
        self._token: Token[Deadline | None] | None = None

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _current.reset(self._token)

    def move_on(self) -> None:
        """Count from now again."""
        self.until = time.monotonic() + self.seconds


_current: ContextVar[Deadline | None] = ContextVar("ranktape_deadline", default=None)


def seconds_left() -> float:
    """How long a request that begins now may take; never 0."""
    deadline = _current.get()
    return REQUEST_SECONDS if deadline is None else max(deadline.until - time.monotonic(), _SHORTEST_SECONDS)


def answered() -> None:
    """One of the many requests of a call was answered: the next has the whole time again."""
    deadline = _current.get()
    if deadline is not None:
        deadline.move_on()
