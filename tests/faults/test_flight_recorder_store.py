"""Is what a flight recorder holds stored whole, or named as lost, where the store, the disk or a process fails?

Real writer processes, and a trainer without torch.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.capture.flight.held import ROOM_FOR_NEXT
from ranktape.capture.flight.training import Room
from ranktape.capture.staging.ring_file import Counter, SlotKind
from ranktape.errors import RunNotFoundError
from ranktape.launch.exchange import push_command
from ranktape.storage import IterationState, open_run
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.places.urls import open_backend
from tests.capture.light import Gate, LightTrainer, check_arrays, tensors
from tests.exhaustive import exhaustive, exhaustive_but
from tests.faults.programs import flight_apart
from tests.faults.recording import wait_for_problem, wait_until_settled
from tests.faults.test_disk import disk as disk  # noqa: PLC0414  (a fixture)
from tests.launch.processes import Ended, torchrun
from tests.s3 import S3Server
from tests.waiting import until

SECONDS = 60.0
APART = Path(flight_apart.__file__)


def armed(url: Path | str, *, last: int = 2, **options: Any) -> LightTrainer:
    """A training with a flight recorder that stores no iteration after the one in which something happens."""
    return LightTrainer(url, **{"record_last": last, "budget_nbytes": 64 << 20, **options})


def stage(trainer: LightTrainer, *iterations: int) -> None:
    for iteration in iterations:
        trainer.stage(iteration, tensors(iteration))


def wait_until_taken(trainer: LightTrainer) -> None:
    """Until the writer holds all that was staged: it has looked at the ring since."""
    ring, deadline = trainer.process.ring, time.monotonic() + SECONDS
    for _ in range(2):  # it may have been about to look
        ring.set_counter(Counter.ASLEEP, 0)
        while not ring.counter(Counter.ASLEEP):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def check_stored(url: Path, *iterations: int) -> None:
    """That these iterations are complete, no others, every bit of them, and that nothing is damaged."""
    assert open_run(url).iterations == list(iterations)
    for iteration in iterations:
        check_arrays(open_run(url).select(iteration=iteration), tensors(iteration))
    assert not [one.text() for one in check_run(open_backend(str(url)), deep=True).findings if one.is_error]


class TestStores:
    def test_a_full_disk_costs_what_does_not_fit_and_the_next_trigger_stores_again(self, disk: Path) -> None:
        url, ballast = disk / "run", disk / "ballast"
        trainer = armed(url)
        stage(trainer, 0, 1, 2)
        ballast.write_bytes(bytes(12 << 20))
        trainer.trigger(2)
        problem = wait_for_problem(trainer, about="is not stored by rank 0")
        assert str(url) in problem
        # Where there is room before the last of them has failed, two are stored, and the disk holds no five.
        wait_until_settled(trainer, 3)
        ballast.unlink()
        stage(trainer, 3, 4, 5)
        trainer.trigger(5)
        words = trainer.close()
        assert words["state"] == "closed"
        lost = {
            one.iteration: one.missing for one in open_run(url).status() if one.state is not IterationState.COMPLETE
        }
        assert lost
        assert all("No space left" in text for missing in lost.values() for text in missing.values()), lost
        assert {3, 4, 5} <= set(open_run(url).iterations)
        for iteration in open_run(url).iterations:
            check_arrays(open_run(url).select(iteration=iteration), tensors(iteration))
        assert [one.iteration for one in open_run(url).triggers()] == [2, 5]

    def test_what_a_full_disk_does_not_take_waits_for_a_push(self, disk: Path, tmp_path: Path) -> None:
        url, ballast = disk / "run", disk / "ballast"
        trainer = armed(url, spill_dir=str(tmp_path / "spill"))
        stage(trainer, 0, 1, 2)
        ballast.write_bytes(bytes(18 << 20))
        trainer.trigger(2)
        wait_for_problem(trainer, about="ranktape push")
        trainer.close()
        ballast.unlink()
        pushed = CliRunner().invoke(push_command, [str(tmp_path / "spill")], catch_exceptions=False)
        assert pushed.exit_code == 0, pushed.output
        check_stored(url, 0, 1, 2)


@pytest.mark.s3
@exhaustive("make test has outages in tests/capture/test_outage.py")
def test_a_store_that_is_dead_when_something_happens_takes_it_later(s3_server: S3Server) -> None:
    gate = Gate(s3_server.storage_options["endpoint_url"])
    url = s3_server.new_url()
    trainer = armed(url, storage_options={**s3_server.storage_options, "endpoint_url": gate.endpoint_url})
    try:
        stage(trainer, 0, 1, 2)
        wait_until_taken(trainer)
        gate.is_refusing = True
        trainer.trigger(2)
        stage(trainer, 3, 4, 5, 6, 7)
        time.sleep(2)
    finally:
        gate.is_refusing = False
        words = trainer.close()
        gate.close()
    assert words.get("problem") is None, words
    run = open_run(url, storage_options=s3_server.storage_options)
    assert run.iterations == [0, 1, 2, 3]
    assert [one.iteration for one in run.triggers()] == [2]


class TestWriters:
    def test_one_that_is_killed_while_armed_is_followed_by_one_that_holds_the_same(self, tmp_path: Path) -> None:
        trainer = armed(tmp_path / "run")
        iteration = 0
        # More often than a capture outlives that stores nothing: a recorder that is armed for days stores nothing.
        for _ in range(5):
            stage(trainer, iteration, iteration + 1, iteration + 2)
            iteration += 3
            wait_until_taken(trainer)
            trainer.kill_writer()
        trainer.trigger(iteration - 1)
        assert trainer.close()["state"] == "closed"
        check_stored(tmp_path / "run", iteration - 3, iteration - 2, iteration - 1)

    @pytest.mark.parametrize("judged", [None, 1])
    def test_what_was_staged_after_two_were_killed_is_held(self, tmp_path: Path, judged: int | None) -> None:
        trainer = armed(tmp_path / "run")
        stage(trainer, 0)
        wait_until_taken(trainer)
        trainer.kill_writer()
        trainer.lose_writer()
        stage(trainer, 1, 2, 3)
        if judged is not None:  # as if the second had been killed by what it judged
            trainer.process.ring.set_counter(Counter.JUDGING, judged + 1)
        trainer.process.keep_alive()
        trainer.trigger(3)
        assert trainer.close()["state"] == "closed"
        check_stored(tmp_path / "run", *(iteration for iteration in (1, 2, 3) if iteration != judged))
        states = [one.state for one in open_run(tmp_path / "run").status()]
        assert states[0] is (IterationState.COMPLETE if judged is None else IterationState.PARTIAL)

    @pytest.mark.parametrize("num_stored", [1, 3, 5])
    @exhaustive_but("3", reason="one moment is in make test")
    def test_one_that_is_killed_while_it_stores_loses_nothing_in_silence(self, tmp_path: Path, num_stored: int) -> None:
        trainer = armed(tmp_path / "run")
        stage(trainer, 0, 1, 2)
        wait_until_taken(trainer)
        trainer.trigger(2)
        folder = tmp_path / "run" / trainer.words["attempt"] / "rank_00000"
        deadline = time.monotonic() + 2 * SECONDS
        while len(list(folder.glob("iter_*/large*/c.0.0"))) < num_stored:
            assert time.monotonic() < deadline
        trainer.kill_writer()
        stage(trainer, 3, 4, 5, 6, 7)
        # The room of what was killed with it comes back.
        while trainer.process.ring.pending_nbytes > 4 * (5 << 20):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        trainer.trigger(7)
        assert trainer.close()["state"] == "closed"
        run = open_run(tmp_path / "run")
        statuses = {one.iteration: one for one in run.status()}
        assert list(statuses) == [0, 1, 2, 3, 5, 6, 7]
        assert {5, 6, 7} <= set(run.iterations)
        for iteration in run.iterations:
            check_arrays(run.select(iteration=iteration), tensors(iteration))
        for one in statuses.values():
            assert one.state is IterationState.COMPLETE or one.missing, one
        assert not [one.text() for one in check_run(open_backend(run.url), deep=True).findings if one.is_error]


def test_values_are_given_up_where_the_ring_is_small_and_statistics_stay(tmp_path: Path) -> None:
    """12 MiB for iterations of 4: of the oldest, histograms or statistics; of the newest, values."""
    trainer = armed(tmp_path / "run", last=6, budget_nbytes=12 << 20)
    for iteration in range(9):
        stage(trainer, iteration)
        wait_until_taken(trainer)
    trainer.trigger(8)
    assert trainer.close()["state"] == "closed"
    run = open_run(tmp_path / "run")
    assert run.iterations == list(range(2, 9))
    keeps = [
        {record.keep for record in run.select(iteration=iteration, module="large.*")} for iteration in run.iterations
    ]
    assert keeps[-1] == {"values"}
    assert "values" not in keeps[0]
    for iteration in run.iterations:
        expected = tensors(iteration)
        records = run.select(iteration=iteration)
        assert sorted(records.column("module")) == sorted(expected)
        for record in records:
            values = expected[record.module]
            if record.keep == "values":
                assert record.read().tobytes() == values.tobytes()
            elif record.keep == "histogram":
                assert int(record.histogram()[:65536].sum()) == values.size
            else:
                assert record.statistics().absmax == np.abs(values).max()
                assert record.statistics().num_elements == values.size


def test_room_for_the_next_iteration_is_made_before_it_comes(tmp_path: Path) -> None:
    nbytes = sum(array.nbytes for array in tensors(0).values())
    trainer = armed(tmp_path / "run", last=6, budget_nbytes=12 << 20)
    for iteration in range(5):
        stage(trainer, iteration)
        until(lambda: trainer.process.ring.free_nbytes >= nbytes)
    assert trainer.close()["state"] == "closed"


def test_an_iteration_that_found_no_room_is_skipped_with_the_reason(tmp_path: Path) -> None:
    trainer = armed(tmp_path / "run")
    stage(trainer, 0)
    trainer.process.ring.put(SlotKind.SKIP, {"iteration": 1, "reason": "no room"}, timeout_seconds=SECONDS)
    stage(trainer, 2)
    trainer.trigger(2)
    assert trainer.close()["state"] == "closed"
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 2]
    assert [(one.iteration, one.state) for one in run.status()][1] == (1, IterationState.SKIPPED)


def test_more_room_than_was_too_little_is_tried_at_once() -> None:
    room = Room()
    assert room.may_suffice(10)
    room.was_too_small()
    assert [room.may_suffice(free_nbytes) for free_nbytes in (10, 9, 11)] == [False, False, True]


def test_all_values_are_held_in_the_budget_that_a_plan_says(tmp_path: Path) -> None:
    largest = max(array.nbytes for array in tensors(0).values()) + 1024
    iteration = sum(array.nbytes + 1024 for array in tensors(0).values())
    trainer = armed(tmp_path / "run", last=2, budget_nbytes=int(iteration * (2 + 1 + ROOM_FOR_NEXT)) + largest)
    for number in range(12):
        stage(trainer, number)
        wait_until_taken(trainer)
    trainer.trigger(11)
    assert trainer.close()["state"] == "closed"
    check_stored(tmp_path / "run", 9, 10, 11)


@pytest.mark.s3
@exhaustive("a store that is dead for longer than an iteration is held for nothing")
def test_the_other_ranks_learn_what_happened_while_the_store_is_dead(tmp_path: Path, s3_server: S3Server) -> None:
    """From the launch's own store: by the time that the run's store answers they would have let go of it."""
    gate = Gate(s3_server.storage_options["endpoint_url"])
    url, own = s3_server.new_url(), s3_server.storage_options
    options = json.dumps({**own, "endpoint_url": gate.endpoint_url})
    ended: list[Ended] = []
    train = threading.Thread(target=lambda: ended.append(torchrun(APART, url, options, tmp_path, cwd=tmp_path)))
    train.start()
    try:
        deadline = time.monotonic() + SECONDS
        while not _has_begun(url, own):
            assert time.monotonic() < deadline, ended
            time.sleep(0.2)
        time.sleep(3)  # some iterations are held
        gate.is_refusing = True
        (tmp_path / "now").touch()
        # Longer than iterations are held for others that may have something to say, and more of them.
        time.sleep(45)
    finally:
        gate.is_refusing = False
        (tmp_path / "end").touch()
        train.join()
        gate.close()
    assert ended[0].returncode == 0, ended[0].stderr
    run = open_run(url, storage_options=own)
    [trigger] = run.triggers()
    assert trigger.rank == 1
    window = [*range(trigger.iteration - flight_apart.LAST, trigger.iteration + 2)]
    assert set(window) <= set(run.iterations), run.status()


def _has_begun(url: str, options: dict[str, Any]) -> bool:
    try:
        return not open_run(url, storage_options=options).verdict().final
    except RunNotFoundError:
        return False
