"""How long a thread goes on trying when the store does not answer.

The backend that the writer stores through asks this each time a request has failed for now (`give_up` of
`RetryingBackend.with_deadline`): what is worth waiting for depends on what the thread is storing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


def _never() -> bool:
    return False


class Patience:
    """Whether the thread that asks is to try no more; a thread that works for another may be given its context."""

    def __init__(self) -> None:
        self._gives_up: ContextVar[Callable[[], bool]] = ContextVar("ranktape_patience", default=_never)

    def __call__(self) -> bool:
        """Whether to give up; never outside of a `while_storing`."""
        return self._gives_up.get()()

    @contextmanager
    def while_storing(self, gives_up: Callable[[], bool]) -> Iterator[None]:
        """In this thread, ask `gives_up` from now on."""
        token = self._gives_up.set(gives_up)
        try:
            yield
        finally:
            self._gives_up.reset(token)


class HeldMemory:
    """Bytes of memory that several threads take and give back."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Take so many bytes; whether they were there."""
        with self._lock:
            if nbytes > self._left:
                return False
            self._left -= nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._left += nbytes
