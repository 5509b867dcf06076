"""A writer that is killed is followed by another one, and nothing is lost with it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from ranktape.errors import CaptureError
from ranktape.storage import IterationState, open_run
from tests.capture.light import LightTrainer, check_whole, tensors
from tests.exhaustive import sampled
from tests.waiting import until


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
            trainer.lose_writer()
    assert trainer.close()["state"] == "closed"
    check_whole(tmp_path / "run", expected)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_writer_killed_in_the_middle_of_an_iteration(tmp_path: Path, *, is_damaged: bool) -> None:
    # The large ones lie before the small ones in the ring: their room is free as soon as they are stored.
    arrays = dict(sorted(tensors(0).items()))
    trainer = LightTrainer(tmp_path / "run", max_iterations=9)
    trainer.stage(0, arrays, ends=False)
    folder = tmp_path / "run" / trainer.words["attempt"] / "rank_00000" / "iter_00000000"
    until(lambda: len(list(folder.glob("large*/zarr.json"))) == 2 and trainer.process.ring.pending_nbytes <= 1 << 20)
    trainer.lose_writer()
    if is_damaged:
        damaged = next(folder.glob("large.1*/c.*"))
        content = bytearray(damaged.read_bytes())
        content[1000] ^= 1
        damaged.write_bytes(content)
    trainer.process.keep_alive()
    trainer.end(0, arrays)
    assert trainer.close()["state"] == "closed"
    if is_damaged:
        [status] = open_run(tmp_path / "run").status()
        assert status.state is IterationState.PARTIAL
        assert "1 of 10 tensors are neither stored nor in the ring" in status.missing[0]
        return
    check_whole(tmp_path / "run", {0: arrays})


def test_what_was_staged_after_two_writers_were_killed_is_stored(tmp_path: Path) -> None:
    trainer = LightTrainer(tmp_path / "run", max_iterations=9, budget_nbytes=64 << 20)
    trainer.stage(0, tensors(0))
    until(lambda: open_run(tmp_path / "run").iterations == [0])
    trainer.stop_writer()
    trainer.stage(1, tensors(1))
    trainer.kill_writer()
    trainer.lose_writer()
    for iteration in (2, 3):
        trainer.stage(iteration, tensors(iteration))
    trainer.process.keep_alive()
    trainer.stage(4, tensors(4))
    assert trainer.close()["state"] == "closed"
    # What the killed ones had at work may have killed them.
    check_whole(tmp_path / "run", {iteration: tensors(iteration) for iteration in (0, 2, 3, 4)})
    states = {one.iteration: one.state for one in open_run(tmp_path / "run").status()}
    assert states.pop(1) is IterationState.PARTIAL
    assert set(states.values()) == {IterationState.COMPLETE}


def test_killed_again_and_again_the_capture_ends_and_says_why(tmp_path: Path) -> None:
    trainer = LightTrainer(tmp_path / "run", max_iterations=9)
    trainer.stage(0, tensors(0))
    until(lambda: open_run(tmp_path / "run").iterations == [0])
    trainer.stop_writer()
    trainer.stage(1, tensors(1))
    trainer.kill_writer()
    trainer.lose_writer()
    # As the first one may have been killed by what it had at work, the second one gives that up.
    trainer.process.keep_alive()
    until(lambda: trainer.hear().get("state") == "ready")
    trainer.lose_writer()
    with pytest.raises(CaptureError, match=r"ended 3 times without storing an iteration \(killed by") as caught:
        trainer.process.keep_alive()
    words = trainer.process.finish(reason=f"disabled: {caught.value}", timeout_seconds=60, on_progress=lambda *_: None)
    trainer.process.close()
    assert words["state"] == "closed"
    check_whole(tmp_path / "run", {0: tensors(0)})
    statuses = open_run(tmp_path / "run").status()
    assert [status.state for status in statuses] == [IterationState.COMPLETE, IterationState.PARTIAL]
    assert "without storing an iteration (iteration 1: killed by SIGKILL" in statuses[1].missing[0]
