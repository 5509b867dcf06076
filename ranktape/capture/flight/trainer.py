"""The training process as its writer sees it: whether it lives, and how it ended."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
from pathlib import Path

_EXIT_CODE = -1
"""The last of the fields of /proc/PID/stat: the status that a parent gets from `wait`."""

_INFO = struct.Struct("<QQ11Ii")
"""What Linux tells of a process behind a descriptor: what of it is known, ..., the status."""

_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_HAS_STATUS = 1 << 3


class Trainer:
    """The process that started this one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._descriptor: int | None = None
        self._status: int | None = None
        try:
            # Not all systems have it; there it is seen a little later that this process has another parent.
            self._descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError):
            self._descriptor = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What can be read from once it has ended."""
        return () if self._descriptor is None else (self._descriptor,)

    def has_ended(self) -> bool:
        """Whether it has ended, be it that nobody has asked for its exit code yet."""
        if self._descriptor is None or not select.select([self._descriptor], [], [], 0)[0]:
            return False
        if self._status is None:
            self._status = self._read_status()
        return True

    def ending(self) -> str | None:
        """How it ended, as far as this system tells: `killed by SIGKILL`; None for an exit code of 0."""
        self.has_ended()
        status = self._status
        if status is None or status < 0:
            return "how it ended is not known"
        if os.WIFSIGNALED(status):
            return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        code = os.waitstatus_to_exitcode(status)
        return f"exit code {code}" if code else None

    def _read_status(self) -> int:
        """What its parent gets, or got; -1 where that is not known any more."""
        waiting = self._read_waiting()
        return self._read_reaped() if waiting < 0 else waiting

    def _read_reaped(self) -> int:
        """Of one for whose end its parent has waited; Linux 6.15 remembers it."""
        assert self._descriptor is not None
        asked = _INFO.pack(_HAS_STATUS, *[0] * 13)
        try:
            known, *_, status = _INFO.unpack(fcntl.ioctl(self._descriptor, _GET_INFO, asked))
        except OSError:
            return -1
        return int(status) if known & _HAS_STATUS else -1

    def _read_waiting(self) -> int:
        """Of one for whose end nobody has waited yet."""
        try:
            text = Path(f"/proc/{self._pid}/stat").read_text()
            name_end = text.rindex(")")
            fields = text[name_end + 2 :].split()
            # A number that is used again by another process is not in this state.
            return int(fields[_EXIT_CODE]) if fields[0] in {"Z", "X"} else -1
        except (OSError, ValueError):
            return -1
