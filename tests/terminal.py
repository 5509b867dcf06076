"""What does a command write where its stdout is a terminal?"""

from __future__ import annotations

import errno
import os
import pty
import re
import subprocess
import sys

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What colours text and moves the cursor."""


def on_terminal(*words: str, columns: int = 100, term: str = "xterm") -> str:
    """The text that `python WORDS` writes to a terminal of that width, with its codes."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": term}
    with subprocess.Popen([sys.executable, *words], stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 65536):
                text += part
        except OSError as error:
            if error.errno != errno.EIO:  # so Linux says that the other end is closed, and all of it is read
                raise
        os.close(ours)
        assert process.stderr is not None
        said = process.stderr.read().decode()
    assert process.returncode == 0, said
    return text.decode().replace("\r\n", "\n")


def answered(*words: str, columns: int = 100) -> list[str]:
    """The lines that `ranktape analyze WORDS` shows on such a terminal."""
    return CODES.sub("", on_terminal("-m", "ranktape.analyze", *words, columns=columns)).splitlines()
