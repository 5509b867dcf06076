"""Starts the servers that fork processes for tests, and writers of captures in such forks."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

FOLDER = Path(__file__).parent

WRITER = ("ranktape.capture.writer", "ranktape.analyze.numerics.histograms.moments:warm_up")
"""What a writer has done when it is ready."""


@functools.cache
def start_server(*modules: str) -> str:
    """The socket of a server that has imported these modules, which ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="ranktape-forking-")
    path = f"{folder.name}/socket"
    server = subprocess.Popen(
        [sys.executable, FOLDER / "server.py", path, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    owner = os.getpid()

    @atexit.register
    def _end() -> None:
        if os.getpid() == owner:
            server.communicate()
            folder.cleanup()

    return path


class ForkedWriter:
    """A writer process as `subprocess.Popen` would start it, forked where its modules are imported."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: IO[Any],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        """Start it; all forks have sessions of their own."""
        assert command[1:4] == ["-P", "-m", "ranktape.capture.writer"]
        assert start_new_session
        self.returncode: int | None = None
        with Path(os.devnull).open("wb") as nowhere:
            self._connection, self.pid = request(
                start_server(*WRITER),
                words=list(command[2:]),
                environment=env,
                parent=os.getpid(),
                outlives=True,
                descriptors={
                    0: stdin.fileno(),
                    1: nowhere.fileno() if stdout == subprocess.DEVNULL else stdout,
                    2: stderr,
                    **{each: each for each in pass_fds},
                },
            )

    def poll(self) -> int | None:
        """The exit code, negative for a signal, once the process has ended."""
        return self._await(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once the process has ended."""
        code = self._await(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("writer", timeout)
        return code

    def kill(self) -> None:
        """Kill the process."""
        if self.poll() is None:
            os.kill(self.pid, 9)

    def _await(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout)[0]:
            (status,) = struct.unpack("i", self._connection.recv(4))
            self._connection.close()
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def request(path: str, *, descriptors: Mapping[int, int], **asked: Any) -> tuple[socket.socket, int]:
    """Ask a server for a process: the connection that gives its exit status, and its pid.

    Descriptors are those of this process by the numbers that they have in the other.
    """
    asked["environment"] = dict(asked["environment"])
    data = json.dumps({"cwd": os.getcwd(), "descriptors": list(descriptors), **asked}).encode()  # noqa: PTH109  (no Path)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    socket.send_fds(connection, [struct.pack("i", len(data))], list(descriptors.values()))
    connection.sendall(data)
    (pid,) = struct.unpack("i", connection.recv(4))
    return connection, pid
