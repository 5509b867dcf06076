"""Does a recording name a disk that is full or has become read-only, and keep what it had stored?

On a file system of 20 MB that the test mounts itself, where it may.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranktape.storage.format.progress import IterationState
from tests.capture.light import LightTrainer
from tests.faults.recording import check_whole, stage, status_of, wait_for_commit, wait_for_problem, wait_until_settled

PROMPT_SECONDS = 40.0
"""Less than a store is waited for."""
BALLAST_NBYTES = 7 << 20


@pytest.fixture
def disk() -> Iterator[Path]:
    """An empty file system of 20 MB.

    Not below `tmp_path`: one that a killed test leaves there could not be deleted, and every later run would fail.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranktape-disk-"))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"a file system of its own takes root's rights: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
    folder.rmdir()


def test_a_full_disk_costs_the_iteration_that_does_not_fit(disk: Path) -> None:
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(BALLAST_NBYTES))
    url = str(disk / "run")
    trainer = LightTrainer(url, budget_nbytes=64 << 20)
    stage(trainer, 0)
    wait_for_commit(url, 0)
    stage(trainer, 1)
    # Two iterations on their way at once race for what is free.
    wait_for_commit(url, 1)
    began = time.monotonic()
    stage(trainer, 2)
    problem = wait_for_problem(trainer, about="iteration 2 ")
    assert time.monotonic() - began < PROMPT_SECONDS
    assert url in problem
    assert "--spill-dir" in problem
    ballast.unlink()
    stage(trainer, 3)
    trainer.close()
    status = status_of(url, 2)
    assert status.state is not IterationState.COMPLETE
    assert "full" in status.missing[0] or "space" in status.missing[0], status
    check_whole(url, [0, 1, 3])


def test_what_is_stored_of_an_iteration_makes_room_for_the_reason_why_it_failed(disk: Path) -> None:
    url, ballast = str(disk / "run"), disk / "ballast"
    trainer = LightTrainer(url, budget_nbytes=64 << 20)
    ballast.touch()
    # One large tensor fits: at one of these sizes it leaves no page of the disk for a document.
    for iteration, num_pages in enumerate(range(-1, 6)):
        disk_state = os.statvfs(disk)
        free_nbytes = disk_state.f_bavail * disk_state.f_bsize + ballast.stat().st_size
        ballast.write_bytes(bytes(free_nbytes - (2 << 20) - num_pages * disk_state.f_bsize))
        stage(trainer, iteration)
        wait_until_settled(trainer, iteration + 1)
        assert "No space left" in status_of(url, iteration).missing[0]
    ballast.unlink()
    trainer.close()


def test_a_disk_that_became_read_only_is_named_at_once(disk: Path) -> None:
    url = str(disk / "run")
    trainer = LightTrainer(url)
    stage(trainer, 0)
    wait_for_commit(url, 0)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    began = time.monotonic()
    stage(trainer, 1)
    problem = wait_for_problem(trainer, about="iteration 1")
    assert time.monotonic() - began < PROMPT_SECONDS
    assert "read-only" in problem.lower()
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    stage(trainer, 2)
    trainer.close()
    check_whole(url, [0, 2])
