"""The trainer's handle to the writer process: starts it, reads its words, restarts it if it is killed, waits for it."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape import errors
from ranktape.capture.staging.ring import RingProducer
from ranktape.capture.staging.ring_file import Counter, unnamed_file
from ranktape.errors import CaptureError
from ranktape.storage.places.backend import available_nbytes

if TYPE_CHECKING:
    from ranktape.capture.settings.cadence import Cadence
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.storage.format.attempt import Launch


MAX_DEFAULT_NBYTES = 512 << 20
"""Largest default budget, in bytes. It is limited because all pages of the ring are accessed at the start."""

MIN_DEFAULT_NBYTES = 64 << 20
"""Smallest default budget, in bytes, however little memory is free."""

_SHARE = 0.25


def default_host_budget_nbytes(*, num_local_ranks: int) -> int:
    """A quarter of the memory that is free in the container and on the host, divided by the ranks of the host.

    It is at least `MIN_DEFAULT_NBYTES` and at most `MAX_DEFAULT_NBYTES`.
    """
    return int(min(MAX_DEFAULT_NBYTES, max(MIN_DEFAULT_NBYTES, available_nbytes() * _SHARE / num_local_ranks)))


MODULE = "ranktape.capture.writer"
"""The module that the process runs."""

_OURS = ("RANKTAPE_", "TENSOR_SAVE", "TORCH", "RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "PYTORCH")
"""Prefixes of environment variables that configure a capture or a rank, and that the writer does not inherit."""

_SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

_PROGRESS_SECONDS = 1.0

_LAST = frozenset({"closed", "failed"})
"""The states after which the writer exits."""

_EXIT_SECONDS = 10.0

_MAX_IN_VAIN = 2
"""How often the writer may be killed in a row without committing an iteration."""

_MAX_NAMED = 4
_MAX_CHARACTERS = 300
"""Largest number of ranks that are reported with a reason, and longest reason, in characters."""

_LEFT_BEHIND: list[subprocess.Popen[bytes]] = []
"""Writers that outlive their capture. They are kept, as Python warns when it deletes the object of a running child."""


_MAX_DEATHS = 8
"""Number of last ends of writers that the run records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterConfig:
    """The configuration that the trainer passes to its writer at the start."""

    url: str
    """URL of the run."""
    rank: int
    """Global rank."""
    trainer_pid: int
    """Process ID of the trainer, whose end ends the capture."""
    launch: Launch
    """The launch, common to all ranks."""
    options: CaptureOptions
    """The options that the writer needs; they may contain secrets of the store."""
    document: Mapping[str, Any]
    """All options without secrets, for the run's document."""
    environment: dict[str, Any]
    """The trainer's host, versions, program and git revision."""
    cadence: Cadence
    """The iterations that may be captured."""
    join_timeout_seconds: float = 60.0
    """Longest wait for rank 0's run to appear."""
    attempt: str | None = None
    """The attempt to continue; None for a new one. The fields below describe the previous writers, all killed."""
    deaths: Sequence[str] = ()
    """How each of them ended."""
    num_in_vain: int = 0
    """Number of the last of them that committed nothing."""
    unsettled: Sequence[tuple[int, int, dict[str, Any]]] = ()
    """The slots of the ends of iterations that are not settled: end, kind and header of each."""

    @property
    def is_first(self) -> bool:
        """Whether its rank acts for all."""
        return self.rank == self.launch.first_rank

    @property
    def gives_up(self) -> bool:
        """Whether the iteration that the last writer was working on is given up, as it may have killed that writer."""
        return self.num_in_vain > 1

    @property
    def gives_all_up(self) -> bool:
        """Whether this is the last writer, which stores nothing more and reports that in the run."""
        return self.num_in_vain > _MAX_IN_VAIN

    @property
    def trouble(self) -> str:
        """A message for the run about the previous writers; empty if there were none."""
        times = "once" if len(self.deaths) == 1 else f"{len(self.deaths)} times"
        return f"its writer was started again {times} ({'; '.join(self.deaths[-_MAX_DEATHS:])})" if self.deaths else ""


def signal_name(number: int) -> str:
    """The name of a signal. Python has none for most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _has_console() -> bool:
    """Whether this process has an open stderr."""
    try:
        os.fstat(2)
    except OSError:
        return False
    return True


class WriterProcess:
    """The writer process of this rank, with its ring. It is started again if it is killed."""

    def __init__(self, *, host_budget_nbytes: int) -> None:
        """Create the ring; `start` starts the process.

        Raises:
            CaptureError: the system cannot create or map the ring.
        """
        self.ring = RingProducer(host_budget_nbytes, keep_alive=self.keep_alive)
        self.on_restart: Callable[[str], None] = lambda _: None
        """Called with a message when the process was started again."""
        self._config: WriterConfig | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._last_words: dict[str, Any] = {}
        # A file without a name keeps the output of a crashing writer. A pipe would block it when full.
        self._stderr = unnamed_file("ranktape-writer-stderr")
        self._lock = threading.RLock()
        self._num_committed = 0
        self._num_in_vain = 0

    def start(self, config: WriterConfig) -> None:
        """Start the process in a separate session, so that signals to the trainer's process group do not reach it.

        Raises:
            CaptureError: the process cannot be started.
        """
        descriptors = (self.ring.descriptor, self.ring.wake_read)
        # -P: files next to the user's script cannot be imported instead of a library.
        command = [sys.executable, "-P", "-m", MODULE, *(str(descriptor) for descriptor in descriptors)]
        try:
            # A pipe would block the training until the process reads it.
            with os.fdopen(unnamed_file("ranktape-writer-config"), "wb+") as file:
                pickle.dump(config, file)
                file.seek(0)
                self._process = subprocess.Popen(
                    command,
                    stdin=file,
                    # The console of rank 0, where its writer prints how the run ended if the trainer is killed.
                    stdout=2 if config.is_first and _has_console() else subprocess.DEVNULL,
                    stderr=self._stderr,
                    # The reading end stays open here too, so that waking a writer that is gone raises no SIGPIPE.
                    pass_fds=descriptors,
                    env=writer_environment(os.environ),
                    start_new_session=True,
                )
        except OSError as error:
            raise CaptureError(f"the writer process cannot be started: {error}") from error
        self._config = config

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def keep_alive(self) -> None:
        """Start the process again if it was killed; it continues with the slots in the ring.

        If two writers in a row are killed without a commit, the next one gives up the iteration that they were working
        on, as it may have killed them. If a third one is killed, a last one is started, which only reports that.

        Raises:
            CaptureError: the process ended by itself, or nothing more is recorded.
        """
        if self.is_alive() or os.getpid() != self._owner:
            return
        with self._lock:
            if self._config is None or self._config.attempt is None or self.is_alive():
                return
            words = self.ring.hear() or {}
            if words.get("state") in _LAST or self._num_in_vain > _MAX_IN_VAIN:
                raise CaptureError(f"the writer process ended: {words.get('error') or self.ending()}")
            num_committed = max(self._num_committed, int(words.get("num_committed", 0)))
            if self._config.options.record_last is not None:
                num_committed = self.ring.counter(Counter.SETTLED)  # iterations that it dropped count as well
            self._num_in_vain = 1 if num_committed > self._num_committed else self._num_in_vain + 1
            self._num_committed = num_committed
            ending = self.ending()
            death = f"iteration {self.ring.counter(Counter.STEP)}: {ending}"
            self.start(
                dataclasses.replace(
                    self._config,
                    deaths=[*self._config.deaths, death],
                    num_in_vain=self._num_in_vain,
                    unsettled=self.ring.unsettled(),
                )
            )
            if self._num_in_vain > _MAX_IN_VAIN:
                raise CaptureError(
                    f"the writer process ended {self._num_in_vain} times without storing an iteration ({ending})"
                )
            self.on_restart(f"the writer process ended and was started again ({death})")

    def poll_ready(self) -> dict[str, Any] | None:
        """The writer's words once it is ready; None while it starts.

        Raises:
            RanktapeError: the writer could not start; the class and the message are the writer's.
        """
        alive = self.is_alive()
        words = self.ring.hear() or {}
        if words.get("state") == "failed":
            kind = getattr(errors, str(words.get("kind")), CaptureError)
            raise kind(str(words.get("error")))
        if words.get("state") == "ready":
            if words.get("cut"):
                raise CaptureError("the list of iterations is longer than a writer can tell: lower --max-iterations")
            assert self._config is not None, "it was started"
            self._config = dataclasses.replace(self._config, attempt=str(words["attempt"]))
            return words
        if not alive:
            raise CaptureError(f"the writer process ended while it started: {self.ending()}")
        return None

    def ending(self) -> str:
        """How the process ended: the signal, the last line on its stderr, or its exit code."""
        code = None if self._process is None else self._process.returncode
        if code == -signal.SIGKILL:
            return "killed by SIGKILL, as when memory runs out"
        if code is not None and code < 0:
            return f"killed by {signal_name(-code)}"
        size = os.fstat(self._stderr).st_size
        text = os.pread(self._stderr, 1 << 16, max(0, size - (1 << 16)))
        lines = text.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {code}"

    def finish(
        self,
        *,
        reason: str,
        timeout_seconds: float,
        on_progress: Callable[[int, str], None],
        ended: str = "",
        has_failed: bool = False,
        untold: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """End the capture, wait until the writer has stored everything, and return its last words.

        Args:
            reason: Why the capture is over.
            timeout_seconds: Longest wait; after it, the writer continues without us.
            on_progress: Called about once per second with the bytes that are still to store and the writer's state.
            ended: What ended the training on purpose, for the verdict; empty if nothing did.
            has_failed: Whether the training has failed, so that other ranks may never finish.
            untold: Headers of triggers that cannot pass through the ring.
        """
        self._last_words = {"reason": reason, "ended": ended, "has_failed": has_failed, "untold": list(untold)}
        self.ring.finish(self._last_words)
        deadline = time.monotonic() + timeout_seconds
        next_progress = time.monotonic() + _PROGRESS_SECONDS
        words: dict[str, Any] = {}
        while True:
            is_gone = False
            try:
                self.keep_alive()
            except CaptureError:
                is_gone = not self.is_alive()  # before reading the words, so that its last words are read
            words = self.ring.hear() or words
            if words.get("state") in _LAST or is_gone:
                return words
            now = time.monotonic()
            if now > deadline:
                return {**words, "state": "late"}
            if now > next_progress:
                next_progress = now + _PROGRESS_SECONDS
                on_progress(self.ring.pending_nbytes, str(words.get("state")))
            time.sleep(0.02)

    def tell_of_given_up(self, ranks: Mapping[int, str]) -> None:
        """Tell the writer, while `finish` waits, not to wait for ranks that record nothing, each with the reason."""
        # Only a few reasons, because the room is limited and many ranks mostly have the same reason.
        reasons = {
            str(rank): text[:_MAX_CHARACTERS] if number < _MAX_NAMED else ""
            for number, (rank, text) in enumerate(ranks.items())
        }
        self.ring.say({**self._last_words, "given_up": reasons})

    def close(self) -> None:
        """Release the process and close the ring; a writer that is still working continues."""
        if self._process is not None:
            try:
                self._process.wait(_EXIT_SECONDS if (self.ring.hear() or {}).get("state") in _LAST else 0)
            except subprocess.TimeoutExpired:
                _LEFT_BEHIND.append(self._process)
        self.ring.close()
        os.close(self._stderr)


def writer_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the writer: no rank, no settings of a capture, and single-threaded libraries."""
    kept = {name: value for name, value in environment.items() if not name.startswith(_OURS)}
    root = str(Path(errors.__file__).parents[1])
    installed = {*site.getsitepackages(), site.getusersitepackages()}
    if root not in installed and root not in kept.get("PYTHONPATH", "").split(os.pathsep):
        kept["PYTHONPATH"] = os.pathsep.join(path for path in (root, kept.get("PYTHONPATH")) if path)
    return kept | _SINGLE_THREADED
