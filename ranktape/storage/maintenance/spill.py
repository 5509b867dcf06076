"""Where does an iteration go that the store cannot take?

Into a directory of the host, under the keys that it would have had: the rest of its tensors, its commit and its
marker. What the store had taken of it before stays there. So the store never holds a commit whose tensors are
elsewhere, and `ranktape push` (`push.py`) later brings the rest.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ranktape.errors import StorageError, UnreachableError
from ranktape.storage.format.group_documents import read_document
from ranktape.storage.format.layout import document_key
from ranktape.storage.places.backend import ForwardingBackend
from ranktape.storage.places.local import LocalBackend

if TYPE_CHECKING:
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.places.backend import Buffer
    from ranktape.storage.places.retry import RetryingBackend

Result = TypeVar("Result")

MANIFEST = re.compile(r"rank_(\d+)\.spill\.json")
"""The name of the file, beside the groups of an attempt, that says whose they are."""

SPILLED_KEY = "spilled"
"""The attribute of a rank's marker that says where the iteration waits; what the store has of it is still needed."""

PROBE_SECONDS = 10.0
"""Once the store has failed it is asked no more often than this."""

_PROBE_TIMEOUT_SECONDS = 5.0

_ITERATION = re.compile(r"(?:rank_\d+|commits)/iter_(\d+)/")


class SpillingBackend(ForwardingBackend):
    """The store of one rank, with a directory for what it cannot take; a `Backend`.

    A write that fails, after all that was tried, goes into the directory, and so does what follows of its
    iteration.
    """

    def __init__(self, backend: RetryingBackend, *, directory: Path, attempt: Attempt, rank: int) -> None:
        """Prepare; the directory is made when it is needed.

        Raises:
            StorageError: the store cannot be read.
        """
        self.url = backend.url
        self.is_shared = backend.is_shared
        self.place = f"{socket.gethostname()}:{directory.absolute()}"
        """The host and the directory, for people."""
        self._backend = backend
        self._probing = backend.with_deadline(timeout_seconds=_PROBE_TIMEOUT_SECONDS)
        self._spill = LocalBackend(str(directory))
        self._manifest = directory / attempt.path / f"rank_{rank:05d}.spill.json"
        self._words = {
            "url": backend.url,
            "attempt": attempt.path,
            "rank": rank,
            "host": socket.gethostname(),
        }
        self._prefix = f"{attempt.path}/"
        self._attempt_key = document_key(attempt.path)
        self._attempt_document = read_document(backend, attempt.path)
        self._lock = threading.Lock()
        self._reasons: dict[int | None, str] = {}
        self._ask_again_at: float | None = None
        self._is_unflushed = False

    def why_spilled(self, iteration: int) -> str | None:
        """Why an iteration, or a part of it, is in the directory; None where it is not."""
        return self._reasons.get(iteration)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Write an object into the store, or else into the directory."""
        iteration = self._iteration_of(key)
        if iteration is None or iteration not in self._reasons:
            try:
                # Rather asked in vain than an iteration kept from a store that is there again.
                self._reach(lambda backend: self._put(backend, key, parts), is_urgent=True)
            except StorageError as error:
                self._note(iteration, str(error))
            else:
                return
        self._spill.put(key, parts)

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        """The bytes of an object in the store; None where there is none.

        The attempt's document counts as there as long as the store does not say otherwise.
        """
        try:
            return self._reach(lambda backend: backend.get(key, max_nbytes=max_nbytes))
        except StorageError:
            if key != self._attempt_key:
                raise
            return self._attempt_document

    def flush(self) -> None:
        """Make what was written survive a loss of power, here and there."""
        try:
            self._reach(lambda backend: backend.flush())
        except StorageError:
            # No commit goes to the store before it could be flushed: the next one, too, goes into the directory, and
            # bringing it to the store compares all that the store has of it.
            self._is_unflushed = True
        if self._reasons:
            self._spill.flush()

    def forward(self, work: Callable[[RetryingBackend], Result]) -> Result:
        """Of all other verbs: what the store answers."""
        return work(self._backend)

    def _put(self, backend: RetryingBackend, key: str, parts: Sequence[Buffer]) -> None:
        if self._is_unflushed:
            backend.flush()
            self._is_unflushed = False
        backend.put(key, parts)

    def _reach(self, work: Callable[[RetryingBackend], Result], *, is_urgent: bool = False) -> Result:
        """What the store answers; once it has failed it is asked briefly, and now and then unless it is urgent."""
        with self._lock:
            was_down = self._ask_again_at is not None
            if self._ask_again_at is not None:
                if time.monotonic() < self._ask_again_at and not is_urgent:
                    raise UnreachableError(f"{self.url} does not answer: it is asked again soon")
                self._ask_again_at = time.monotonic() + PROBE_SECONDS
        try:
            if was_down:
                self._probing.get(self._attempt_key)
            result = work(self._backend)
        except StorageError:
            with self._lock:
                self._ask_again_at = time.monotonic() + PROBE_SECONDS
            raise
        with self._lock:
            self._ask_again_at = None
        return result

    def _note(self, iteration: int | None, reason: str) -> None:
        with self._lock:
            is_new = iteration not in self._reasons
            self._reasons.setdefault(iteration, reason)
        if is_new:
            # Each time: what was there may have been brought to the store, and the file with it.
            self._write_manifest()

    def _write_manifest(self) -> None:
        key = f"{self._prefix}{self._manifest.name}"
        self._spill.put(key, [json.dumps({**self._words, "written": time.time()}, indent=1).encode()])

    def _iteration_of(self, key: str) -> int | None:
        match = _ITERATION.match(key.removeprefix(self._prefix))
        return int(match[1]) if match else None


def read_manifest(path: Path) -> dict[str, Any]:
    """What the file of a spill says: `url`, `attempt`, `rank`, `host`.

    Raises:
        StorageError: it cannot be read, or is none.
    """
    try:
        words = json.loads(path.read_text())
        return {name: kind(words[name]) for name, kind in _FIELDS.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path} is not the file of a spill ({error!r}): remove it, or give another folder"
        ) from error


_FIELDS: dict[str, type[Any]] = {"url": str, "attempt": str, "rank": int, "host": str}
