"""A writer that is killed is followed by another one, and nothing is lost with it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranktape.capture.staging.ring_file import SlotKind
from ranktape.errors import CaptureError
from ranktape.storage import IterationState, open_run
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.places.urls import open_backend
from tests.capture.light import LightTrainer, tensors
from tests.exhaustive import sampled

PATIENCE_SECONDS = 60.0


def kill(trainer: LightTrainer) -> None:
    assert trainer.process._process is not None
    os.kill(trainer.process._process.pid, signal.SIGKILL)
    trainer.process._process.wait()


def wait_until_ready(trainer: LightTrainer) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while trainer.hear().get("state") != "ready":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_whole(url: Path, expected: dict[int, dict[str, np.ndarray[Any, Any]]]) -> None:
    """That these iterations are complete, no others, bit for bit, and that a check finds no error."""
    run = open_run(url)
    assert run.iterations == sorted(expected)
    for iteration, arrays in expected.items():
        records = run.select(iteration=iteration)
        assert sorted(records.column("module")) == sorted(arrays)
        for record in records:
            assert record.read().tobytes() == arrays[record.module].tobytes()
    report = check_run(open_backend(str(url)), deep=True)
    assert not [finding.text() for finding in report.findings if finding.is_error]


@pytest.mark.parametrize("seed", sampled(range(4), keep=1))
def test_killed_at_any_moment_nothing_is_lost(tmp_path: Path, seed: int) -> None:
    moments = np.random.default_rng(seed)
    trainer = LightTrainer(tmp_path / "run", max_iterations=9, budget_nbytes=12 << 20)
    expected = {iteration: tensors(iteration, num_small=40, num_large=4) for iteration in range(6)}
    for iteration, arrays in expected.items():
        # The ring is smaller than two iterations: the training waits for the writer that follows.
        trainer.stage(iteration, arrays)
        if iteration in {1, 4}:
            time.sleep(moments.uniform(0, 0.3))
            kill(trainer)
    assert trainer.close()["state"] == "closed"
    check_whole(tmp_path / "run", expected)


def test_a_writer_killed_in_the_middle_of_an_iteration(tmp_path: Path) -> None:
    trainer = LightTrainer(tmp_path / "run", max_iterations=9)
    arrays = tensors(0)
    trainer.stage(0, arrays, ends=False)
    # What is freed is stored: the next writer takes it over.
    folder = tmp_path / "run" / trainer.words["attempt"] / "rank_00000" / "iter_00000000"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list(folder.glob("large*/zarr.json"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kill(trainer)
    trainer.process.keep_alive()
    end = {"iteration": 0, "num_tensors": len(arrays), "expected": sorted(arrays), "silent_sites": {}}
    trainer.process.ring.put(SlotKind.END, end, timeout_seconds=60)
    assert trainer.close()["state"] == "closed"
    check_whole(tmp_path / "run", {0: arrays})


def test_killed_again_and_again_the_capture_ends_and_says_why(tmp_path: Path) -> None:
    trainer = LightTrainer(tmp_path / "run", max_iterations=9)
    trainer.stage(0, tensors(0))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while open_run(tmp_path / "run").iterations != [0]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stop(trainer)
    trainer.stage(1, tensors(1))
    kill(trainer)
    trainer.process.keep_alive()
    kill(trainer)
    # As the first one may have been killed by what is in the ring, the second one gives that up.
    trainer.process.keep_alive()
    wait_until_ready(trainer)
    kill(trainer)
    with pytest.raises(CaptureError, match=r"ended 3 times without storing an iteration \(killed by") as caught:
        trainer.process.keep_alive()
    words = trainer.process.finish(reason=f"disabled: {caught.value}", timeout_seconds=60, on_progress=lambda *_: None)
    trainer.process.close()
    assert words["state"] == "closed"
    check_whole(tmp_path / "run", {0: tensors(0)})
    statuses = open_run(tmp_path / "run").status()
    assert [status.state for status in statuses] == [IterationState.COMPLETE, IterationState.PARTIAL]
    assert "without storing an iteration (iteration 1: killed by SIGKILL" in statuses[1].missing[0]


def stop(trainer: LightTrainer) -> None:
    """The writer takes nothing more."""
    assert trainer.process._process is not None
    os.kill(trainer.process._process.pid, signal.SIGSTOP)
