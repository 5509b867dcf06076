"""A run is right about itself, and whole in what it calls complete, whenever its processes are killed.

200 random moments and more (make test has some of them), drawn alike in each run of the tests. After each: a check
names exactly what is there, every value that is called complete is the one recorded, what a process was promised is
kept, and a repair leaves nothing but what is whole.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ceph import CephServer
from tests.exhaustive import exhaustive
from tests.launch.processes import CHECKOUT

PROGRAM = Path(__file__).parent / "programs" / "kill.py"
SECONDS = 560
"""After which one half hangs; on a machine with other work it takes minutes."""

pytestmark = pytest.mark.timeout(SECONDS + 40)

MANY = exhaustive("make test has some moments")


def start(level: str, url: str | Path, *, trials: int, seed: int, options: dict[str, Any]) -> subprocess.Popen[str]:
    words = [level, str(url), "--trials", str(trials), "--seed", str(seed), "--storage-options", json.dumps(options)]
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(PROGRAM), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "HOME": str(Path.home())},
    )


def killed(level: str, url: str | Path, *, trials: int, options: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """What became of each trial; half of them by each of two processes, one for a core."""
    processes = [
        start(level, f"{url}/{half}", trials=trials // 2, seed=2 * trials + half, options=options or {})
        for half in range(2)
    ]
    outcomes = []
    with contextlib.ExitStack() as running:
        for process in processes:
            running.enter_context(process)
            running.callback(process.kill)
        for process in processes:
            out, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, err
            outcomes += [json.loads(line) for line in out.splitlines()]
    assert len(outcomes) == trials + 2  # with one by each process that nobody disturbs
    return outcomes


def check(outcomes: list[dict[str, Any]]) -> None:
    wrong = [outcome for outcome in outcomes if outcome["problems"]]
    assert not wrong, "\n".join(map(json.dumps, wrong))
    promised = [outcome["promised"] for outcome in outcomes]
    assert max(promised) == 8
    # The moments are spread over the recording: before anything is promised, in the middle of it, and after it.
    assert len(set(promised)) > min(2, len(outcomes) // 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "trials"),
    [
        ("ring", 6),
        pytest.param("storage", 90, marks=MANY),
        pytest.param("ring", 54, marks=MANY),
    ],
)
def test_processes_are_killed(level: str, trials: int, tmp_path: Path) -> None:
    check(killed(level, tmp_path, trials=trials))


@pytest.mark.ceph
@exhaustive("make test kills such ranks over a local folder; stores differ in what tests/storage/conformance.py tests")
def test_ranks_that_write_into_an_s3_server_are_killed(ceph_server: CephServer) -> None:
    check(killed("storage", ceph_server.new_url(), trials=10, options=ceph_server.storage_options))
