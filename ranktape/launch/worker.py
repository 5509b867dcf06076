"""Identifies the process whose training is recorded, and prints its messages on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from ranktape.capture.console import write_line

OWNER = "RANKTAPE_OWNER_PID"
"""Variable with the ID of the process that is recorded. The processes that it starts inherit it and record nothing."""

LAUNCHED = "RANKTAPE_LAUNCHED"
"""Variable with the process ID of the launcher."""

LAUNCHED_WITH = "RANKTAPE_LAUNCHED_WITH"
"""Variable with what the launcher records (`autostart.Order`), after all files and variables are read.

It only applies to the launcher's own capture. One that the script starts, or another launch, has its own settings.
"""

HEAD_START_SECONDS = 3.0
"""How long all ranks except rank 0 wait before they report an error.

All ranks find the same mistake on a command line. torchrun ends the group when rank 0 exits, so that the message is not
printed N times. If only another rank has an error, it still reports it.
"""


def disable_autostart() -> None:
    """Prevent this process and those that it starts from starting a capture automatically."""
    os.environ[OWNER] = str(os.getpid())


def global_rank() -> int:
    """The rank of this process: from torch.distributed if it is initialised, else from the environment, else 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def restarts() -> tuple[int, int]:
    """How many times torchrun has restarted the worker group, and how many more times it would."""
    num_done, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return num_done, max(0, most - num_done)


def say(message: str) -> None:
    """Print one line on stderr, on rank 0 only."""
    if global_rank() == 0:
        write_line(to_one_line(message))


def print_error(message: str) -> None:
    """Print one line with an error on stderr; all ranks except rank 0 add their number."""
    rank = global_rank()
    prefix = "" if rank == 0 else f"[rank {rank}] "
    # The process may have no stderr, or have closed it.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        write_line(f"error: {prefix}{to_one_line(message)}")


def report(message: str) -> None:
    """Report why this process ends, in one line on stderr and in torchrun's summary.

    Rank 0 reports at once, the others after `HEAD_START_SECONDS`, unless torchrun has ended them.
    """
    line = to_one_line(message)
    if global_rank() != 0:
        time.sleep(HEAD_START_SECONDS)
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The format of torch.distributed.elastic. Without `py_callstack`, it prints only the message.
        document = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
        # If the file cannot be written, the line on stderr suffices.
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps(document), encoding="utf-8")
    print_error(line)


def to_one_line(text: str) -> str:
    """The text in one line, without control sequences of terminals."""
    # Not at the top, so that help pages are fast.
    from ranktape.storage.places.failures import printable

    return printable(" ".join(text.split()))
