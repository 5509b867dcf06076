"""Knows the process of a launch whose training is recorded, and says there what goes well and what fails."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from ranktape.capture.console import write_line

OWNER = "RANKTAPE_OWNER_PID"
"""Variable that names it; the processes that it starts find it in their environment and stand aside."""

LAUNCHED = "RANKTAPE_LAUNCHED"
"""Variable in which the launcher says which process it is."""

LAUNCHED_WITH = "RANKTAPE_LAUNCHED_WITH"
"""Variable in which it says what it records (`autostart.Order`), once all files and variables are read.

It is for its own capture alone: one that the script begins, or another launch, has what its user has set.
"""

HEAD_START_SECONDS = 3.0
"""How long the other ranks leave the word to rank 0.

A mistake on the command line is met by every rank. torchrun ends the group as soon as rank 0 has gone,
so the same line does not appear N times; where only one rank has the trouble, it still speaks.
"""


def stand_aside() -> None:
    """From now on neither this process nor one that it starts begins a capture by itself."""
    os.environ[OWNER] = str(os.getpid())


def global_rank() -> int:
    """The rank of this process: by torch.distributed where that knows it, else by the environment, else 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def restarts() -> tuple[int, int]:
    """How many times torchrun has restarted the group of workers, and how many times it will yet if this one fails."""
    done, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return done, max(0, most - done)


def say(message: str) -> None:
    """Write one line on stderr, from rank 0 only."""
    if global_rank() == 0:
        write_line(one_line(message))


def complain(message: str) -> None:
    """Write one line on stderr of what went wrong; any rank but the first names itself."""
    rank = global_rank()
    prefix = "" if rank == 0 else f"[rank {rank}] "
    # A process that ends may have closed its stderr, or have none: there is nobody to tell.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        write_line(f"error: {prefix}{one_line(message)}")


def report(message: str) -> None:
    """Say why this process ends: one line on stderr, and the same line in torchrun's summary.

    Rank 0 speaks at once, the others after `HEAD_START_SECONDS`, if they still live.
    """
    line = one_line(message)
    if global_rank() != 0:
        time.sleep(HEAD_START_SECONDS)
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The layout that torch.distributed.elastic reads. Without `py_callstack` it prints the message alone.
        document = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
        # Where the file cannot be written, the line on stderr still says all.
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps(document), encoding="utf-8")
    complain(line)


def one_line(text: str) -> str:
    """The text without its line breaks, and without what a terminal would take as commands."""
    # Not at the top: a help page does without what it needs.
    from ranktape.storage.places.failures import printable

    return printable(" ".join(text.split()))
