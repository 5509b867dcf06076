"""Tries requests again, with growing pauses, until a deadline.

A request that failed for a reason that may pass (`StorageError.is_transient`) is made again after a pause that grows
and is drawn by chance, so that a thousand ranks do not come back in step. The whole of it, pauses and requests, ends
by a deadline. All verbs may be repeated: writing the same object twice is writing it once, and where `create` finds an
object, what lies there tells whose it is.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

from ranktape.errors import StorageError
from ranktape.storage.format.memory import available_nbytes, expect_memory
from ranktape.storage.places.backend import Backend, Deadline, ForwardingBackend, Result, ended_by

TIMEOUT_SECONDS = 30.0
"""How long a call goes on when nobody said anything."""

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_GROWTH = 2.0

_LARGE_NBYTES = 64 << 20
"""Of a range: before more is asked for at once, the memory that is left is looked at."""

_LOOK_SECONDS = 0.25
"""How often `give_up` is asked during a pause."""


class RetryingBackend(ForwardingBackend):
    """A backend that tries again what may succeed later, until a deadline."""

    def __init__(
        self,
        backend: Backend,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        give_up: Callable[[], bool] | None = None,
    ) -> None:
        self.url = backend.url
        self.is_shared = backend.is_shared
        self.failing_since: float | None = None
        """When the first of the failures came that no success has followed yet, by `time.monotonic`."""
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._give_up = give_up

    def with_deadline(
        self, *, timeout_seconds: float | None = None, give_up: Callable[[], bool] | None = None
    ) -> RetryingBackend:
        """The same place with another deadline; it stops trying when `give_up` says so."""
        return RetryingBackend(
            self._backend,
            timeout_seconds=self._timeout_seconds if timeout_seconds is None else timeout_seconds,
            give_up=give_up,
        )

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none; False if there was another one."""
        # An earlier try, of ours or of the client's, may have been done although its answer did not arrive.
        return self.forward(lambda backend: backend.create(key, data) or backend.get(key) == data)

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        """The bytes of an object; None where there is none. Never more than there is memory for."""
        most = available_nbytes() if max_nbytes is None else max_nbytes
        return self.forward(lambda backend: backend.get(key, max_nbytes=most))

    def get_range(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of an object, clipped to what it has; None where there is none."""
        if nbytes > _LARGE_NBYTES:
            expect_memory(min(nbytes, self.size(key) or 0), place=f"{self.url}/{key}")
        return self.forward(lambda backend: backend.get_range(key, start, nbytes))

    def forward(self, work: Callable[[Backend], Result]) -> Result:
        """What `work` makes of the backend below, tried until it succeeds, may not pass, or the deadline is over."""
        deadline = Deadline(self._timeout_seconds)
        begin = time.monotonic()
        pause = _FIRST_PAUSE_SECONDS
        for tries in itertools.count(1):
            try:
                with ended_by(deadline):
                    result = work(self._backend)
            except StorageError as error:
                if not error.is_transient:
                    raise
                if self.failing_since is None:
                    self.failing_since = time.monotonic()
                wake = time.monotonic() + random.uniform(pause / 2, pause)  # noqa: S311  # no secret
                if wake >= deadline.until or not self._waited(wake):
                    if tries > 1:
                        error.args = (f"{error} (tried {tries} times in {time.monotonic() - begin:.0f} s)",)
                    raise
                pause = min(pause * _GROWTH, _LONGEST_PAUSE_SECONDS)
            else:
                self.failing_since = None
                return result
        raise AssertionError("there is no last try")

    def _waited(self, wake: float) -> bool:
        """Wait for the end of a pause; False where the caller gives up."""
        while self._give_up is None or not self._give_up():
            left = wake - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, _LOOK_SECONDS))
        return False
