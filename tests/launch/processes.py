"""Processes for the tests of the doors: real ones, with a deadline, most of them forked where torch is imported."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.forking.forked import FOLDER, WRITER, start_server

CHECKOUT = Path(__file__).parents[2]

PLAIN = CHECKOUT / "examples" / "train_plain.py"
"""A training script that knows nothing of us."""

DEADLINE_SECONDS = 240
"""Longer than any of them takes on a loaded machine."""

GRACE_SECONDS = 40
"""torchrun gives its ranks 30."""

# What a surrounding torchrun has set must not reach the processes under test; and where nothing is buffered, `print`
# writes the end of a line apart: lines of ranks that share a stream would be woven together.
_FOREIGN = (
    "PYTHONUNBUFFERED",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "TORCHELASTIC_",
    "MASTER_",
    "RANKTAPE_",
    "TENSOR_SAVE",
)

Ended = subprocess.CompletedProcess[str]


@functools.cache
def forking_variables() -> dict[str, str]:
    """With these a torchrun forks its ranks where torch is imported: they lead `tests/forking/python` to its server."""
    return {
        "FORKING_SERVER": start_server("torch.distributed.launcher.api", "torch.utils.data", "torch._dynamo"),
        "FORKING_WRITERS": start_server(*WRITER),
        "FORKING_INTERPRETER": sys.executable,
        "PYTHON_EXEC": str(FOLDER / "python"),
    }


def _own_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}


def python(
    *words: str | Path,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    deadline: float = DEADLINE_SECONDS,
    is_forked: bool = True,
) -> Ended:
    """Run Python with these words; returns when the process has ended.

    It is forked where torch is imported already, and so are the ranks of a torchrun, unless the import is what matters.
    """
    forking = forking_variables() if is_forked else {}
    paths = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [forking.get("PYTHON_EXEC", sys.executable), *map(str, words)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        # One thread for each rank, as torchrun would have it.
        env={
            **_own_environment(),
            **forking,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        },
        start_new_session=True,
    )
    with process:
        try:
            stdout, stderr = process.communicate(timeout=deadline)
        except BaseException:
            # Ranks have sessions of their own: torchrun ends them, if it is asked to end and not killed.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def torchrun(
    *words: str | Path,
    cwd: Path,
    num_ranks: int = 2,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    deadline: float = DEADLINE_SECONDS,
    is_forked: bool = True,
) -> Ended:
    """Run these words under torchrun on this machine; returns when all ranks have ended."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", *options)
    return python(*launcher, *words, cwd=cwd, env=env, deadline=deadline, is_forked=is_forked)


def own_lines(ended: Ended) -> list[str]:
    """What we said on stderr."""
    return [line for line in ended.stderr.splitlines() if line.startswith("ranktape: ")]


def errors(ended: Ended) -> list[str]:
    """What we said on stderr that went wrong."""
    prefix = "ranktape: error: "
    return [line.removeprefix(prefix) for line in own_lines(ended) if line.startswith(prefix)]
