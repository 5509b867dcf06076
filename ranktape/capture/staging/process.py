"""How does the trainer start its writer process, hear from it, and wait for it?"""

from __future__ import annotations

import dataclasses
import json
import os
import site
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ranktape
from ranktape import errors
from ranktape.capture.staging.ring import RingProducer
from ranktape.capture.staging.ring_file import SlotKind
from ranktape.errors import CaptureError

if TYPE_CHECKING:
    from ranktape.capture.writing.writer_config import WriterConfig

MODULE = "ranktape.capture.writer"
"""What the process runs."""

_OURS = ("RANKTAPE_", "TENSOR_SAVE", "TORCH", "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "PYTORCH")
"""Beginnings of variables that steer capture or a rank, and that the writer must not inherit."""

_FOR_THE_STORE = "RANKTAPE_STORAGE_CLIENT"
"""The variable that chooses how a store is spoken to: the writer must choose as the trainer does."""

_SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

_PROGRESS_SECONDS = 1.0

_LAST = frozenset({"closed", "failed"})
"""States after which the writer only exits."""

_EXIT_SECONDS = 10.0

_MAX_TOLD = 4
_MAX_CHARACTERS = 300
"""Ranks that are told of with a reason, and the length of one."""

_LEFT_BEHIND: list[subprocess.Popen[bytes]] = []
"""Writers that outlived their capture: whoever lets go of a running child is warned of it."""


class WriterProcess:
    """The writer of this rank, with the ring to it."""

    def __init__(self, *, host_budget_nbytes: int, ring_path: Path | None = None) -> None:
        """Make the ring, in memory where no path is given; `start` starts the process.

        Raises:
            CaptureError: there is no room for the ring.
        """
        self.ring = RingProducer(host_budget_nbytes, is_alive=self.is_alive, path=ring_path)
        self._process: subprocess.Popen[bytes] | None = None
        self._reason = ""
        # A file without a name keeps what a crashing writer says; a pipe would stop it once it is full.
        self._stderr = os.memfd_create("ranktape-writer-stderr") if hasattr(os, "memfd_create") else None

    def start(self, config: WriterConfig) -> None:
        """Start the process in a session of its own, so that a signal to the trainer's group does not reach it.

        Raises:
            CaptureError: the system starts no process.
        """
        descriptors = (self.ring.file.descriptor, self.ring.wake_read)
        # -P: a file beside the user's script must not be imported in place of a library.
        command = [sys.executable, "-P", "-m", MODULE, *(str(descriptor) for descriptor in descriptors)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr if self._stderr is not None else subprocess.DEVNULL,
                pass_fds=descriptors,
                env=writer_environment(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            raise CaptureError(f"the writer process cannot be started: {error}") from error
        # The reading end stays open here too: a wake-up call to a writer that is gone must not raise SIGPIPE.
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(config)).encode())
            self._process.stdin.close()
        except BrokenPipeError:
            return  # the process ended at once; `poll_ready` reports how

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def poll_ready(self) -> dict[str, Any] | None:
        """The writer's words once it is ready; None while it starts.

        Raises:
            RanktapeError: it could not start; the class and the text are the writer's.
        """
        alive = self.is_alive()
        words = self.ring.hear() or {}
        if words.get("state") == "failed":
            kind = getattr(errors, str(words.get("kind")), CaptureError)
            raise kind(str(words.get("error")))
        if words.get("state") == "ready":
            if words.get("cut"):
                raise CaptureError("the list of iterations is longer than a writer can tell: lower --max-iterations")
            return words
        if not alive:
            raise CaptureError(f"the writer process ended while it started: {self.last_line()}")
        return None

    def last_line(self) -> str:
        """The last line that the process wrote on its stderr; how it ended, where it wrote none."""
        text = b""
        if self._stderr is not None:
            size = os.fstat(self._stderr).st_size
            text = os.pread(self._stderr, 1 << 16, max(0, size - (1 << 16)))
        lines = text.decode(errors="replace").strip().splitlines()
        code = None if self._process is None else self._process.returncode
        return lines[-1] if lines else f"exit code {code}"

    def put(self, kind: SlotKind, header: dict[str, Any], *, timeout_seconds: float) -> None:
        """Tell the writer something, in order with the tensors.

        Raises:
            CaptureError: there was no room in time, or the writer is gone.
        """
        self.ring.put(kind, header, timeout_seconds=timeout_seconds)

    def finish(self, *, reason: str, timeout_seconds: float, on_progress: Callable[[int, str], None]) -> dict[str, Any]:
        """Say that the capture is over and wait until the writer has stored everything; its last words.

        Args:
            reason: Why the capture is over.
            timeout_seconds: Longest wait; the writer goes on without us after it.
            on_progress: Called about each second with the bytes still to store and the writer's state.
        """
        self._reason = reason
        self.ring.finish({"reason": reason})
        deadline = time.monotonic() + timeout_seconds
        next_progress = time.monotonic() + _PROGRESS_SECONDS
        words: dict[str, Any] = {}
        while True:
            alive = self.is_alive()
            words = self.ring.hear() or words
            if words.get("state") in _LAST or not alive:
                return words
            now = time.monotonic()
            if now > deadline:
                return {**words, "state": "late"}
            if now > next_progress:
                next_progress = now + _PROGRESS_SECONDS
                on_progress(self.ring.pending_nbytes, str(words.get("state")))
            time.sleep(0.02)

    def tell_of_given_up(self, ranks: Mapping[int, str]) -> None:
        """Say, while `finish` waits, which ranks record nothing, each with the reason: they are not waited for."""
        # There is a page of room for them: what many ranks say is mostly the same.
        told = {
            str(rank): text[:_MAX_CHARACTERS] if number < _MAX_TOLD else ""
            for number, (rank, text) in enumerate(ranks.items())
        }
        self.ring.say({"reason": self._reason, "given_up": told})

    def close(self, *, has_captured: bool = True) -> None:
        """Let go of the process and of the pipes to it; a writer that still works goes on.

        Where nothing was captured, what outlives the processes of the ring is removed.
        """
        if not has_captured and self.ring.path is not None:
            self.ring.path.unlink(missing_ok=True)
        if self._process is not None:
            try:
                self._process.wait(_EXIT_SECONDS if (self.ring.hear() or {}).get("state") in _LAST else 0)
            except subprocess.TimeoutExpired:
                _LEFT_BEHIND.append(self._process)
        self.ring.close()
        if self._stderr is not None:
            os.close(self._stderr)


def writer_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What the writer inherits: no rank, no settings of a capture, one thread for each library."""
    kept = {
        name: value
        for name, value in environment.items()
        if name.startswith(_FOR_THE_STORE) or not name.startswith(_OURS)
    }
    root = str(Path(ranktape.__file__).parents[1])
    installed = {*site.getsitepackages(), site.getusersitepackages()}
    if root not in installed and root not in kept.get("PYTHONPATH", "").split(os.pathsep):
        kept["PYTHONPATH"] = os.pathsep.join(path for path in (root, kept.get("PYTHONPATH")) if path)
    return kept | _SINGLE_THREADED
