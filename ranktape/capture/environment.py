"""In what surroundings did a run come about?"""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ranktape

_GIT_TIMEOUT_SECONDS = 5


@cache
def describe_environment() -> dict[str, Any]:
    """Host, versions, program and git revision, for the documents of the run."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "ranktape": ranktape.__version__,
        "program": Path(sys.argv[0]).name,
        "git_revision": _git_revision(),
    }


def _git_revision() -> str | None:
    """The commit of the working directory; None outside of a repository, or without git."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"],  # noqa: S607  (whichever git the user has)
            capture_output=True,
            text=True,
            check=False,
            timeout=_GIT_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git, or a repository on a file system that hangs
        return None
    return result.stdout.strip() or None
