"""Does what two killed processes left in a ring come into the run, whole or not at all?"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.capture.staging.ring_file import Words, boot_id, lock_ring
from ranktape.capture.writing.recover import find_rings, recover_ring
from ranktape.errors import CaptureError
from ranktape.launch.exchange import recover_command as command
from ranktape.storage import IterationState, open_run
from ranktape.storage.places.urls import open_backend
from tests.capture.light import LightTrainer, check_arrays, tensors
from tests.waiting import until


def recover(directory: Path, *, trusts_other_boots: bool = False) -> list[Any]:
    """What became of each ring."""
    return [
        recover_ring(path, open_run=open_backend, trusts_other_boots=trusts_other_boots)
        for path in find_rings(directory)
    ]


def check_values(url: Path, iteration: int, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    """That an iteration has every tensor, bit for bit."""
    check_arrays(open_run(url).select(iteration=iteration), expected)


def halted(folder: Path, *iterations: int) -> LightTrainer:
    """A training whose writer takes nothing of these iterations, with a ring in the folder."""
    trainer = LightTrainer(folder / "run", ring_dir=str(folder / "rings"), max_iterations=9)
    trainer.stop_writer()
    for iteration in iterations:
        trainer.stage(iteration, tensors(iteration))
    return trainer


def test_a_clean_end_leaves_no_ring(tmp_path: Path) -> None:
    trainer = LightTrainer(tmp_path / "run", ring_dir=str(tmp_path / "rings"), max_iterations=1)
    [ring] = find_rings(tmp_path / "rings")
    assert ring.stat().st_mode & 0o777 == 0o600
    assert lock_ring(ring) is None
    trainer.stage(0, tensors(0))
    assert trainer.close()["state"] == "closed"
    assert find_rings(tmp_path / "rings") == []
    check_values(tmp_path / "run", 0, tensors(0))


def test_what_the_writer_had_not_taken_is_recovered(tmp_path: Path) -> None:
    trainer = LightTrainer(tmp_path / "run", ring_dir=str(tmp_path / "rings"), max_iterations=3)
    trainer.stage(0, tensors(0))
    until(lambda: 0 in open_run(tmp_path / "run").iterations)
    trainer.stop_writer()
    trainer.stage(1, tensors(1))
    trainer.stage(2, tensors(2), ends=False)
    trainer.abandon()
    [report] = recover(tmp_path / "rings")
    assert (report.remains, report.committed, report.finished) == (None, [1], [1])
    assert "in the middle of the iteration" in report.failed[2]
    assert report.num_tensors == 10
    assert find_rings(tmp_path / "rings") == []
    run = open_run(tmp_path / "run")
    assert [status.state for status in run.status()] == [
        IterationState.COMPLETE,
        IterationState.COMPLETE,
        IterationState.PARTIAL,
    ]
    assert run.verdict().final
    for iteration in (0, 1):
        check_values(tmp_path / "run", iteration, tensors(iteration))


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_moment_an_iteration_is_whole_or_named_as_lost(tmp_path: Path, seed: int) -> None:
    moments = np.random.default_rng(seed)
    trainer = LightTrainer(tmp_path / "run", ring_dir=str(tmp_path / "rings"), max_iterations=9, budget_nbytes=64 << 20)
    expected = {iteration: tensors(iteration, num_small=40, num_large=4) for iteration in range(5)}
    for iteration, arrays in expected.items():
        trainer.stage(iteration, arrays)
    time.sleep(moments.uniform(0, 0.5))
    trainer.abandon()
    [report] = recover(tmp_path / "rings")
    assert report.remains is None
    assert report.failed == {}  # nothing had been freed that was not stored
    assert open_run(tmp_path / "run").iterations == [0, 1, 2, 3, 4]
    for iteration, arrays in expected.items():
        check_values(tmp_path / "run", iteration, arrays)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_was_stored_and_freed_is_taken_over_if_it_is_whole(tmp_path: Path, *, is_damaged: bool) -> None:
    # The large ones lie before the small ones in the ring: their room is free as soon as they are stored.
    arrays = dict(sorted(tensors(0).items()))
    trainer = LightTrainer(tmp_path / "run", ring_dir=str(tmp_path / "rings"), max_iterations=9)
    trainer.stage(0, arrays, ends=False)
    folder = tmp_path / "run" / trainer.words["attempt"] / "rank_00000" / "iter_00000000"
    until(lambda: len(list(folder.glob("large*/zarr.json"))) == 2 and trainer.process.ring.pending_nbytes <= 1 << 20)
    trainer.stop_writer()
    trainer.end(0, arrays)
    trainer.abandon()
    if is_damaged:
        damaged = next(folder.glob("large.1*/c.*"))
        content = bytearray(damaged.read_bytes())
        content[1000] ^= 1
        damaged.write_bytes(content)
    [report] = recover(tmp_path / "rings")
    if is_damaged:
        assert "1 of 10 tensors are neither stored nor in the ring" in report.failed[0]
        return
    assert (report.committed, report.num_tensors) == ([0], 8)
    check_values(tmp_path / "run", 0, arrays)


def test_recovering_can_be_interrupted_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halted(tmp_path, 0).abandon()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_args, **_options: None)
        [report] = recover(tmp_path / "rings")
    assert report.committed == [0]
    [again] = recover(tmp_path / "rings")
    assert (again.committed, again.failed, again.remains) == ([], {}, None)
    check_values(tmp_path / "run", 0, tensors(0))


def test_damaged_arrays_are_taken_from_the_ring_or_counted_as_lost(tmp_path: Path) -> None:
    halted(tmp_path, 0, 1).abandon()
    [ring] = find_rings(tmp_path / "rings")
    # As if the processes had been killed after the first slots of the second iteration were freed: cut its count.
    content = bytearray(ring.read_bytes())
    place = content.rindex(b'"num_tensors": 10')
    content[place : place + 17] = b'"num_tensors": 12'
    ring.write_bytes(content)
    result = CliRunner().invoke(command, [str(tmp_path / "rings")])
    assert "committed: iterations 0 (10 tensors from the ring)" in result.output
    assert "lost: iteration 1: 2 of 12 tensors are neither stored nor in the ring" in result.output
    assert "1 iterations are lost" in str(result.exception)
    check_values(tmp_path / "run", 0, tensors(0))


def test_rings_that_are_not_ours_to_take(tmp_path: Path) -> None:
    trainer = halted(tmp_path, 0)
    result = CliRunner().invoke(command, [str(tmp_path / "rings"), "--json"])
    [ring] = json.loads(result.stdout)["rings"]
    assert ring["remains"] == "its processes still run"
    trainer.process.ring.say({**(json.loads(json.dumps(_about(trainer)))), "boot_id": "another"}, Words.ABOUT)
    trainer.abandon()
    [report] = recover(tmp_path / "rings")
    assert "--trust-other-boots" in report.remains
    assert open_run(tmp_path / "run").iterations == []
    [report] = recover(tmp_path / "rings", trusts_other_boots=True)
    assert report.committed == [0]


def _about(trainer: LightTrainer) -> dict[str, Any]:
    about = trainer.process.ring.hear(Words.ABOUT)
    assert about is not None
    assert about["boot_id"] == boot_id()
    return about


def test_garbage_in_the_directory(tmp_path: Path) -> None:
    (tmp_path / "short.ring").write_bytes(b"x")
    (tmp_path / "long.ring").write_bytes(bytes(4 << 20))
    (tmp_path / "link.ring").symlink_to(tmp_path / "short.ring")
    (tmp_path / "other").write_text("not a ring")
    reports = recover(tmp_path)
    assert [report.path.name for report in reports if report.remains is not None] == [
        "link.ring",
        "long.ring",
        "short.ring",
    ]
    with pytest.raises(CaptureError, match="give the --ring-dir of a capture"):
        find_rings(tmp_path / "nowhere")


def test_a_run_that_is_gone_keeps_the_ring(tmp_path: Path) -> None:
    halted(tmp_path, 0).abandon()
    (tmp_path / "run").rename(tmp_path / "moved")
    [report] = recover(tmp_path / "rings")
    assert "remove it if the run is gone" in report.remains
    (tmp_path / "moved").rename(tmp_path / "run")
    [report] = recover(tmp_path / "rings")
    assert report.committed == [0]
