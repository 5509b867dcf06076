"""A captured training ends where torch alone would wait for ever for the end of a process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ranktape.storage import open_run
from tests.exhaustive import exhaustive

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import time

from ranktape.capture import Capture
from tests.capture.programs.gloo_hang import PART, train

with Capture(sys.argv[1]):
    train()
    train(has_optimizer=True)
    whole = train(has_optimizer=True)  # another group, in an iteration that is not captured
    # A process that ends while gloo still works may be aborted, whoever holds the group.
    while whole[-1] != PART[-1]:
        time.sleep(0.1)
print("ended")
"""
"""Without the capture none of the trainings ends: `programs/gloo_hang.py` says why."""


@exhaustive("five trainings in a row")
def test_no_captured_training_waits_for_ever_for_the_end_of_its_process_group(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    assert open_run(tmp_path / "run").iterations == [0]
