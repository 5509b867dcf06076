"""Ends a worker process at once, and leaves nothing half-written.

The process that started it ends it (SIGTERM), on Ctrl-C too; the worker ends as soon as it is told, unless it is
writing: then after the object that it writes. When its parent is gone it ends by itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from types import FrameType

_EXIT_CODE = 128 + signal.SIGTERM


class _State:
    """Of this process."""

    num_writing = 0
    """Threads that write an object just now."""
    is_told = False
    """Whether it is to end after that."""
    is_worker = False
    """Whether another process started it for work."""


def become_worker(environment: Mapping[str, str]) -> None:
    """Make this process one that ends when it is told to, or when its parent does; what each worker begins with.

    Args:
        environment: That of the parent, which may have changed since the server was started that forks workers.
    """
    _State.is_worker = True
    os.environ.update(environment)
    # Ctrl-C reaches every process of the terminal: the parent alone decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_with, args=(parent.sentinel,), daemon=True).start()


def is_worker() -> bool:
    """Whether this process does work for another one of this machine."""
    return _State.is_worker


@contextlib.contextmanager
def no_leaving() -> Iterator[None]:
    """Around what must not be left half done; a worker that is told to end does so behind it."""
    _State.num_writing += 1
    try:
        yield
    finally:
        _State.num_writing -= 1
        if _State.is_told and not _State.num_writing:
            os._exit(_EXIT_CODE)


def _leave(_number: int = 0, _frame: FrameType | None = None) -> None:
    _State.is_told = True
    if not _State.num_writing:
        os._exit(_EXIT_CODE)


def _leave_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    _leave()
