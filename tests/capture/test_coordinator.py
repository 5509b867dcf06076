"""Does the coordinator close what is whole, ask for more where it is not enough, and judge in the end?"""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranktape.capture.settings.cadence import Cadence
from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.writing.coordinator import QUIET_SECONDS, Coordinator
from ranktape.storage import IterationState, open_run
from ranktape.storage.format.attempt import IterationPlan, RequestedIterations, read_plan
from ranktape.storage.format.documents import write_group
from ranktape.storage.format.layout import Mark, control_path
from ranktape.storage.format.live import Answer, Request, read_answer, write_request
from ranktape.storage.format.progress import open_iteration
from ranktape.storage.maintenance.prune import drop_iteration
from ranktape.storage.places.local import LocalBackend
from tests.exhaustive import exhaustive
from tests.runs import describe, start
from tests.waiting import until


class Watched:
    """A run of two ranks with a coordinator, and a training step that the test sets."""

    def __init__(
        self,
        url: Path,
        *,
        planned: tuple[int, ...],
        target: int,
        timeout_seconds: float = 0.5,
        keep_last: int | None = None,
        cadence: Cadence = Cadence(start=0, every=5),  # noqa: B008  (frozen)
        **options: Any,
    ) -> None:
        self.url = url
        required = target if keep_last is None else 1
        self.backend, self.attempt, self.writers = start(str(url), world_size=2, min_iterations=required, **options)
        self.step = 0
        self.coordinator = Coordinator(
            self.backend,
            attempt=self.attempt,
            options=CaptureOptions(
                min_iterations=required,
                max_iterations=target,
                finish_timeout_seconds=timeout_seconds,
                keep_last=keep_last,
            ),
            cadence=cadence,
            plan=IterationPlan(iterations=planned, is_done=False),
            step=lambda: self.step,
        )
        self.coordinator.start()

    def end(self, iteration: int, *, marks: tuple[Mark, Mark] = (Mark.COMMITTED, Mark.COMMITTED)) -> None:
        """Both ranks have their word on an iteration."""
        open_iteration(self.backend, attempt=self.attempt, iteration=iteration)
        for writer, mark in zip(self.writers, marks, strict=True):
            if mark is Mark.COMMITTED:
                array = np.full((4, 4), iteration, dtype=np.float32)
                writer.write(array, info=describe(array, iteration=iteration, rank=self.writers.index(writer)))
                writer.commit(iteration, expected=[], silent_sites={})
            else:
                writer.mark(iteration, mark=mark, attributes={"reason": f"it was {mark}"})
        self.coordinator.note_commit(iteration)

    @property
    def plan(self) -> IterationPlan | None:
        """What was announced."""
        return read_plan(self.backend, attempt=self.attempt)

    def announced(self) -> IterationPlan:
        """What was announced, as soon as something is."""
        plan = until(lambda: self.plan)
        assert plan is not None
        return plan

    def follow(self, plan: IterationPlan, **options: Any) -> Coordinator:
        """The coordinator that a writer has which takes the place of one that was killed; `kill` comes before."""
        follower = Coordinator(
            self.backend,
            attempt=self.attempt,
            options=CaptureOptions(finish_timeout_seconds=0.5, **options),
            cadence=Cadence(start=0, every=5),
            plan=plan,
            step=lambda: self.step,
            is_successor=True,
        )
        follower.start()
        return follower

    def kill(self) -> None:
        """The coordinator does nothing more."""
        self.coordinator._stop.set()
        self.coordinator._thread.join()

    def close(self) -> None:
        """Both ranks have ended."""
        for writer in self.writers:
            writer.close(reason="the training ended")


def test_whole_iterations_are_closed_and_enough_is_enough(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(10, 15), target=2)
    watched.end(10)
    until(lambda: open_run(watched.url).iterations == [10])
    assert watched.plan is None
    watched.end(15)
    plan = watched.announced()
    assert plan.is_done
    assert plan.is_enough
    watched.close()
    verdict = watched.coordinator.finish()
    assert (verdict.met, verdict.complete, verdict.missing) == (True, [10, 15], [])


def test_a_rank_that_records_nothing_more_ends_the_capture_of_all(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(10, 15), target=2)
    watched.end(10)
    alive, disabled = watched.writers
    disabled.close(reason="capture disabled itself in iteration 12: its writer was killed")
    open_iteration(watched.backend, attempt=watched.attempt, iteration=15)
    alive.commit(15, expected=[], silent_sites={})
    watched.coordinator.note_commit(15)
    # None could be complete that came after it.
    assert watched.announced() == IterationPlan(iterations=(10, 15), is_done=True)
    alive.close(reason="the training ended")
    verdict = watched.coordinator.finish()
    assert (verdict.met, verdict.complete) == (False, [10])
    assert "its writer was killed" in verdict.message()


def test_a_coordinator_that_follows_a_killed_one_finishes_what_that_saw(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(10, 15), target=2)
    watched.kill()
    watched.end(10)
    watched.step = 11
    follower = watched.follow(IterationPlan(iterations=(10, 15), is_done=False), min_iterations=2)
    until(lambda: open_run(watched.url).iterations == [10])
    watched.end(15)
    watched.close()
    assert follower.finish().met


def test_a_rank_that_does_not_come_is_looked_for_less_and_less_often(tmp_path: Path) -> None:
    backend, attempt, _ = start(str(tmp_path / "run"), world_size=2, min_iterations=1)
    looks: list[float] = []

    def given_up() -> dict[int, str]:
        looks.append(time.monotonic())
        return {}

    waiting = Coordinator(
        backend,
        attempt=attempt,
        options=CaptureOptions(finish_timeout_seconds=4.0),
        cadence=Cadence(start=10, every=1),
        plan=IterationPlan(iterations=(10,), is_done=False),
        step=lambda: 10,
        given_up=given_up,
    )
    waiting.start()
    waiting.finish()
    # Four in a second would be 17.
    assert 1 < len(looks) < 10


def test_what_failed_is_made_up_for_by_an_iteration_that_nobody_has_reached(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(10, 15), target=2)
    watched.step = 16
    watched.end(10)
    watched.end(15, marks=(Mark.COMMITTED, Mark.FAILED))
    plan = watched.announced()
    [further] = set(plan.iterations) - {10, 15}
    assert further > watched.step
    assert (further - 10) % 5 == 0
    # A rank that learned of it too late skips it: the next one is named with more notice.
    watched.step = further
    watched.end(further, marks=(Mark.COMMITTED, Mark.SKIPPED))

    until(lambda: len(watched.announced().iterations) == 4)
    plan = watched.announced()
    assert not plan.is_done
    last = max(plan.iterations)
    assert last > further
    watched.end(last)
    watched.close()
    assert watched.coordinator.finish().complete == [10, last]
    states = [status.state for status in open_run(watched.url).status()]
    assert states == [
        IterationState.COMPLETE,
        IterationState.PARTIAL,
        IterationState.SKIPPED,
        IterationState.COMPLETE,
    ]


def test_a_rank_that_never_reports_ends_the_wait(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(0,), target=1)
    open_iteration(watched.backend, attempt=watched.attempt, iteration=0)
    watched.writers[0].commit(0, expected=[], silent_sites={})
    watched.coordinator.note_commit(0)
    watched.writers[0].close(reason="the training ended")
    began = time.monotonic()
    verdict = watched.coordinator.finish()
    assert 0.5 <= time.monotonic() - began < 20
    assert "iteration 0 is partial (rank 1: never reported (its host may be lost))" in verdict.message()


def test_what_a_rank_stores_has_arrived_before_and_when_it_commits(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(0,), target=1)
    watched.kill()

    def arrived() -> list[int] | None:
        return watched.coordinator._count_arrived(watched.coordinator._poll_progress())

    open_iteration(watched.backend, attempt=watched.attempt, iteration=0)
    known = [arrived()]
    for number in range(2):
        array = np.zeros((512, 1024), dtype=np.float32)
        watched.writers[1].write(array, info=describe(array, iteration=0, rank=1, module=f"layers.{number}"))
        known.append(arrived())
    watched.writers[1].commit(0, expected=[], silent_sites={})
    known.append(arrived())
    watched.writers[1].close(reason="the training failed")
    known.append(arrived())
    assert all(one is not None for one in known)
    assert all(one != before for before, one in itertools.pairwise(known)), known
    assert arrived() == known[-1]


@exhaustive("it waits")
def test_of_a_failed_training_ranks_are_waited_for_while_something_arrives(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(0,), target=1, timeout_seconds=300)
    open_iteration(watched.backend, attempt=watched.attempt, iteration=0)
    alive, dead = watched.writers
    alive.commit(0, expected=[], silent_sites={})
    alive.close(reason="the training failed")
    began = time.monotonic()

    def write() -> None:
        for number in range(3):
            time.sleep(2)
            array = np.zeros((512, 1024), dtype=np.float32)
            dead.write(array, info=describe(array, iteration=0, rank=1, module=f"layers.{number}"))

    thread = threading.Thread(target=write)
    thread.start()
    verdict = watched.coordinator.finish(has_failed=lambda: True)
    thread.join()
    assert QUIET_SECONDS + 5 < time.monotonic() - began < QUIET_SECONDS + 60
    assert "rank 1: never reported" in verdict.message()


def test_the_last_commit_may_come_after_the_training(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(0,), target=1, timeout_seconds=30)
    watched.end(0)
    assert watched.coordinator.finish().met


def test_only_the_last_complete_iterations_are_kept(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(0, 5, 10, 15), target=4, keep_last=2)
    for iteration in (0, 5):
        watched.end(iteration)
    until(lambda: open_run(watched.url).iterations == [0, 5])
    watched.end(10)
    until(lambda: open_run(watched.url).iterations == [5, 10])
    watched.end(15)
    watched.close()
    verdict = watched.coordinator.finish()
    assert (verdict.met, verdict.complete, verdict.missing) == (True, [10, 15], [])
    run = open_run(watched.url)
    assert [(status.iteration, status.state) for status in run.status()] == [
        (0, IterationState.DROPPED),
        (5, IterationState.DROPPED),
        (10, IterationState.COMPLETE),
        (15, IterationState.COMPLETE),
    ]
    assert {record.iteration for record in run.select()} == {10, 15}
    assert not [path for path in watched.url.rglob("iter_00000005/*") if path.is_file() and "dropped" not in path.parts]


def test_there_are_never_more_iterations_than_are_kept(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=tuple(range(0, 30, 5)), target=6, keep_last=2)
    for iteration in range(0, 30, 5):
        watched.end(iteration)
        # At once, however fast they come.
        assert open_run(watched.url).iterations == [number for number in (iteration - 5, iteration) if number >= 0]
        assert len(list(watched.url.glob("*/rank_00000/iter_*"))) <= 2
    watched.close()
    assert watched.coordinator.finish().complete == [20, 25]


def test_iterations_of_earlier_attempts_are_dropped_first(tmp_path: Path) -> None:
    first = Watched(tmp_path / "run", planned=(0, 5), target=2)
    for iteration in (0, 5):
        first.end(iteration)
    first.close()
    assert first.coordinator.finish().complete == [0, 5]
    second = Watched(tmp_path / "run", planned=(10, 15), target=4, keep_last=2, resume=True, launch_id="second")
    second.end(10)
    until(lambda: open_run(second.url).iterations == [5, 10])
    second.close()
    assert second.coordinator.finish().complete == [5, 10]


def test_a_removal_that_was_interrupted_is_never_taken_for_an_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path / "run", planned=(0,), target=1)
    watched.end(0)
    until(lambda: open_run(watched.url).iterations == [0])
    backend = watched.backend
    with monkeypatch.context() as patch:

        def fail(_prefix: str) -> None:
            raise KeyboardInterrupt

        patch.setattr(backend, "delete", fail)
        with pytest.raises(KeyboardInterrupt):
            drop_iteration(backend, attempt=watched.attempt, iteration=0)
    assert open_run(watched.url).iterations == []
    watched.close()
    watched.coordinator.finish()  # it does not make the commit anew
    assert open_run(watched.url).iterations == []
    resumed = Watched(tmp_path / "run", planned=(5,), target=2, keep_last=1, resume=True, launch_id="second")
    resumed.end(5)
    resumed.close()
    assert resumed.coordinator.finish().complete == [5]
    left = [path for path in watched.url.rglob("iter_00000000/**/*") if path.is_file()]
    assert [path.parts[-3:-1] for path in left] == [("dropped", "iter_00000000")]


TWO = Request(num_iterations=2, by="me@here")


def answer_to(watched: Watched, name: str) -> Answer:
    answer = until(lambda: read_answer(watched.backend, attempt=watched.attempt, name=name))
    assert answer is not None
    return answer


def test_iterations_that_a_rank_learned_of_too_late_are_made_up_for(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(1000,), target=1)
    name = write_request(watched.backend, attempt=watched.attempt, request=TWO)
    first, second = answer_to(watched, name).iterations
    watched.end(first)
    watched.end(second, marks=(Mark.COMMITTED, Mark.SKIPPED))

    until(lambda: len(watched.announced().asked[0].iterations) == 3)
    last = watched.announced().asked[0].iterations[-1]
    watched.end(last)
    watched.close()
    verdict = watched.coordinator.finish()
    assert verdict.complete == [first, last]
    assert not verdict.met  # what was planned did not come


def test_each_time_that_a_rank_learned_too_late_the_notice_is_longer(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(0,), target=1)
    watched.kill()
    coordinator, watched.step = watched.coordinator, 1000
    # A hundred steps in each of the last ten seconds.
    coordinator._started = coordinator._last_poll = time.monotonic() - 10, 0
    asked = RequestedIterations(name="mine", iterations=(10,), num_iterations=1)
    coordinator._plan = IterationPlan(iterations=(0, 10), is_done=False, asked=(asked,))
    for _ in range(2):
        coordinator._not_recorded = set(coordinator._plan.iterations)
        coordinator._replace_lost()
    _, second, third = coordinator._plan.asked[0].iterations
    assert second > 1000 + 400
    assert third - 1000 == pytest.approx(2 * (second - 1000), rel=0.2)
    watched.close()


class Slow(LocalBackend):
    """A store that has just become slow to read."""

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        time.sleep(0.5)
        return super().get(key, max_nbytes=max_nbytes)


def test_a_store_that_has_become_slow_has_iterations_named_later(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(0,), target=1)
    watched.kill()
    coordinator, watched.step = watched.coordinator, 1000
    coordinator._started = coordinator._last_poll = time.monotonic() - 10, 0
    coordinator._backend = Slow(str(tmp_path / "run"))
    write_request(watched.backend, attempt=watched.attempt, request=TWO)
    coordinator._next_poll_at = 0.0
    coordinator._answer()  # the looks before it were fast
    # Four seconds of notice at less than a hundred steps a second, and twice what it took to read the request.
    assert watched.announced().asked[0].iterations[0] > 1000 + 420
    watched.close()


def test_a_coordinator_that_follows_a_killed_one_asks_for_nothing_twice(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(0,), target=1)
    watched.kill()
    name = write_request(watched.backend, attempt=watched.attempt, request=TWO)
    # The plan was spread, and the answer not written any more.
    plan = IterationPlan(
        iterations=(0, 7, 8),
        is_done=False,
        asked=(RequestedIterations(name=name, iterations=(7, 8), num_iterations=2),),
    )
    watched.step = 3
    follower = watched.follow(plan)
    assert answer_to(watched, name) == Answer(iterations=(7, 8))
    watched.close()
    follower.finish()


def test_what_is_no_request_is_refused_and_nothing_else_happens(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(0,), target=1)
    hostile: dict[str, dict[str, Any]] = {
        "0" * 20: {"num_iterations": 10**9, "settings": {}, "by": ""},
        "1" * 20: {"num_iterations": 0, "settings": {}, "by": ""},
        "2" * 20: {"num_iterations": 1, "settings": {"spill_dir": "/etc"}, "by": ""},
        "3" * 20: {"num_iterations": 1, "settings": {"select": ["x" * 5000]}, "by": ""},
        "4" * 20: {"num_iterations": 1, "settings": {"select": 3}, "by": ""},
        "5" * 20: {"by": ""},
    }
    for name, words in hostile.items():
        write_group(watched.backend, f"{control_path(watched.attempt.path)}/request_{name}", words)
    refusals = [answer_to(watched, name).refusal for name in hostile]
    assert all(refusals)
    assert "is not a setting of a request" in refusals[2]
    assert watched.plan is None
    watched.close()
    watched.coordinator.finish()


def test_what_is_asked_at_the_end_is_refused(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "run", planned=(1000,), target=1)
    watched.kill()
    name = write_request(watched.backend, attempt=watched.attempt, request=TWO)
    watched.close()
    watched.coordinator.finish()
    assert answer_to(watched, name) == Answer(refusal="the training has ended")
