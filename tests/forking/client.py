"""Runs Python's command line in a fork of the server at FORKING_SERVER, as if it were this process.

A rank's writer is a fork of the one at FORKING_WRITERS. Signals are passed on, and this process ends as the fork ends.
It imports next to nothing. Options that only a new interpreter can take are left to one.
"""

import json
import os
import signal
import socket
import struct
import sys

NUM_STREAMS = 3
PASSED = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]


def main(interpreter: str, words: list[str]) -> None:
    """Have it run; does not return."""
    server = os.environ["FORKING_SERVER"]
    if words[:3] == ["-P", "-m", "ranktape.capture.writer"]:
        server = os.environ["FORKING_WRITERS"]
        words = words[1:]
    if not words or (words[0].startswith("-") and words[0] not in {"-m", "-c", "-u", "-W"}):
        os.execv(interpreter, [interpreter, *words])  # noqa: S606  (that it is this process)
    # The folder is read through one of its own, which is closed by then.
    names = os.listdir("/proc/self/fd")  # noqa: PTH208  (pathlib takes longer to import than all of this)
    descriptors = [int(each) for each in sorted(names, key=int) if os.path.exists(f"/proc/self/fd/{each}")]  # noqa: PTH110
    # The pid is known only after the request: what comes meanwhile waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED)
    asked = {
        "words": words,
        "cwd": os.getcwd(),  # noqa: PTH109  (pathlib takes longer to import than all of this)
        "environment": dict(os.environ),
        "parent": os.getppid(),
        "outlives": False,
        "descriptors": descriptors,
    }
    data = json.dumps(asked).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server)
    socket.send_fds(connection, [struct.pack("i", len(data))], descriptors)
    connection.sendall(data)
    # What one end is read from is at its end when the fork has closed the other.
    for descriptor in descriptors[NUM_STREAMS:]:
        os.close(descriptor)
    (pid,) = struct.unpack("i", connection.recv(4))
    for number in PASSED:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
    (status,) = struct.unpack("i", connection.recv(4))
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        if ended_by != signal.SIGKILL:
            signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)
    os._exit(os.WEXITSTATUS(status))


main(os.environ["FORKING_INTERPRETER"], sys.argv[1:])
