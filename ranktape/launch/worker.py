"""Knows one process of a launch, whose training is recorded, and how it says that it failed."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ranktape.capture.console import write_line

OWNER = "RANKTAPE_OWNER_PID"
"""Variable that names it; the processes that it starts find it in their environment and stand aside."""

LAUNCHED = "RANKTAPE_LAUNCHED"
"""Variable in which the launcher says what it records, to ranks that its script starts: JSON."""


def stand_aside() -> None:
    """From now on neither this process nor one that it starts begins a capture by itself."""
    os.environ[OWNER] = str(os.getpid())


HEAD_START_SECONDS = 3.0
"""How long the other ranks leave the word to rank 0.

A mistake on the command line is met by every rank. torchrun ends the group as soon as rank 0 has gone,
so the same line does not appear N times; where only one rank has the trouble, it still speaks.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One process of a launch, as torchrun's environment describes it; alone, where there is none."""

    rank: int
    """Global rank."""
    restart_count: int
    """How many times torchrun has restarted the group, from 0."""
    max_restarts: int
    """How many times it may."""
    error_file: Path | None
    """Where torchrun looks for the reason of a failure."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Worker:
        """The process that these environment variables describe."""
        error_file = environment.get("TORCHELASTIC_ERROR_FILE")
        return cls(
            rank=int(environment.get("RANK", "0")),
            restart_count=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
            max_restarts=int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")),
            error_file=Path(error_file) if error_file else None,
        )

    @property
    def is_last_attempt(self) -> bool:
        """Whether torchrun gives up, rather than train again, when this process fails."""
        return self.restart_count >= self.max_restarts

    def say(self, message: str) -> None:
        """Write one line on stderr, from rank 0 only."""
        if self.rank == 0:
            write_line(one_line(message))

    def complain(self, message: str) -> None:
        """Write one line on stderr of what went wrong; any rank but the first names itself."""
        prefix = "" if self.rank == 0 else f"[rank {self.rank}] "
        # A process that ends may have closed its stderr, or have none: there is nobody to tell.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            write_line(f"error: {prefix}{one_line(message)}")

    def report(self, message: str) -> None:
        """Say why this process ends: one line on stderr, and the same line in torchrun's summary.

        Rank 0 speaks at once, the others after `HEAD_START_SECONDS`, if they still live.
        """
        line = one_line(message)
        if self.rank != 0:
            time.sleep(HEAD_START_SECONDS)
        self._write_error_file(line)
        self.complain(line)

    def _write_error_file(self, line: str) -> None:
        if self.error_file is None:
            return
        # The layout that torch.distributed.elastic reads. Without `py_callstack` it prints the message alone.
        document = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
        # Where the file cannot be written, the line on stderr still says all.
        with contextlib.suppress(OSError):
            self.error_file.write_text(json.dumps(document), encoding="utf-8")


def one_line(text: str) -> str:
    """The text without its line breaks, and without what a terminal would take as commands."""
    # Not at the top: a help page does without what it needs.
    from ranktape.storage.places.failures import printable

    return printable(" ".join(text.split()))
