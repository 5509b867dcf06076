"""Runs Python's command line in a fork of the server (`server.py`), as if it were this process.

It is started as the interpreter would be, with `FORKING_SERVER=SOCKET` set, and imports next to nothing. Signals are
passed on, and it ends as the fork ends. Options that only a new interpreter can take are left to one.
"""

import json
import os
import signal
import socket
import struct
import sys

PASSED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


def main(interpreter: str, words: list[str]) -> None:
    """Have it run; does not return."""
    rest = words[1:] if words[:1] == ["-u"] else words
    if not rest or (rest[0].startswith("-") and rest[0] not in {"-m", "-c"}):
        os.execv(interpreter, [interpreter, *words])  # noqa: S606  (that it is this process)
    # The pid is known only after the request: what comes meanwhile waits.
    signals = [getattr(signal, name) for name in PASSED]
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    umask = os.umask(0)
    request = {
        "words": words,
        "cwd": os.getcwd(),  # noqa: PTH109  (pathlib takes longer to import than all of this)
        "umask": umask,
        "parent": os.getppid(),
        "environment": dict(os.environ),
    }
    data = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ["FORKING_SERVER"])
    connection.sendall(struct.pack("i", len(data)))
    socket.send_fds(connection, [data[:1]], [0, 1, 2])
    connection.sendall(data[1:])
    (pid,) = struct.unpack("i", connection.recv(4))
    for number in signals:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    (status,) = struct.unpack("i", connection.recv(4))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


main(os.environ["FORKING_INTERPRETER"], sys.argv[1:])
