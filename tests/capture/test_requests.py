"""What the coordinator makes of requests: what all ranks do, whatever else goes wrong."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ranktape.storage.format.attempt import Asked, IterationPlan
from ranktape.storage.format.documents import write_group
from ranktape.storage.format.layout import Mark, control_path
from ranktape.storage.format.live import Answer, Request, read_answer, write_request
from ranktape.storage.places.local import LocalBackend
from tests.capture.test_coordinator import Watched
from tests.waiting import until

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
    coordinator._started = coordinator._lately = time.monotonic() - 10, 0
    asked = Asked(name="mine", iterations=(10,), num_iterations=1)
    coordinator._plan = IterationPlan(iterations=(0, 10), is_done=False, asked=(asked,))
    for _ in range(2):
        coordinator._refused = set(coordinator._plan.iterations)
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
    coordinator._started = coordinator._lately = time.monotonic() - 10, 0
    coordinator._backend = Slow(str(tmp_path / "run"))
    write_request(watched.backend, attempt=watched.attempt, request=TWO)
    coordinator._next_look = 0.0
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
        iterations=(0, 7, 8), is_done=False, asked=(Asked(name=name, iterations=(7, 8), num_iterations=2),)
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
    assert "selects nothing" in refusals[2]
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
