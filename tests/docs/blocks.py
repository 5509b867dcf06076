"""What are the examples of a page, and do they run as they stand?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.launch.processes import forking_variables


def blocks_of(text: str) -> list[tuple[str, str]]:
    """The examples of a page, each with its language: those for a shell, and those in Python."""
    return re.findall(r"```(sh|python)\n(.*?)```", text, re.DOTALL)


def run_block(language: str, source: str, *, folder: Path) -> subprocess.CompletedProcess[str]:
    """An example of a page, which must succeed, in a process of its own; ranks are forked where torch is imported."""
    command = ["bash", "-euo", "pipefail", "-c"] if language == "sh" else [sys.executable, "-c"]
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **forking_variables(), "PATH": path}
    done = subprocess.run([*command, source], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{source}\n{done.stdout}{done.stderr}"
    return done
