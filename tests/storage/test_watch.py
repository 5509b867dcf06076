"""Does a watcher see what each rank has committed, and look no more than it must?"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ranktape.errors import RunNotFoundError
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.progress import open_iteration, write_verdict
from ranktape.storage.maintenance.watch import Snapshot, Watcher
from ranktape.storage.places.urls import open_backend
from tests.runs import start
from tests.storage.whole_run import record, tensors, whole_run
from tests.storage.wrapped import wrapped


def seen(watcher: Watcher) -> Snapshot:
    """A run that is there."""
    snapshot = watcher.look()
    assert snapshot is not None
    return snapshot


def test_a_run_is_seen_as_it_comes_in(tmp_path: Path) -> None:
    backend, attempt, writers = whole_run(str(tmp_path / "run"), iterations=(0,), close=False, min_iterations=2)
    watcher = Watcher(backend)
    first = seen(watcher)
    assert (first.complete, first.required, first.is_met, first.is_closed) == ((0,), 2, False, False)
    assert [(rank.rank, rank.iterations, rank.num_records) for rank in first.ranks] == [(0, (0,), 6), (1, (0,), 6)]
    nbytes = sum(array.nbytes for array, _ in tensors(0, 0))
    assert [rank.nbytes for rank in first.ranks] == [nbytes, nbytes]
    assert (first.num_records, first.nbytes, first.waiting) == (12, 2 * nbytes, {})
    record(backend, attempt, writers[:1], iteration=10, finish=False)
    second = seen(watcher)
    assert second.waiting == {10: (0,)}
    assert (second.num_records, second.nbytes) == (12, 3 * nbytes)
    writers[1].mark(10, mark=Mark.SKIPPED, attributes={"reason": "no room"})
    record(backend, attempt, writers, iteration=20)
    for writer in writers:
        writer.close(reason="end")
    write_verdict(backend, attempt=attempt)
    last = seen(watcher)
    assert (last.complete, last.is_met, last.is_closed) == ((0, 20), True, True)
    assert [(rank.num_lost, rank.is_closed) for rank in last.ranks] == [(0, True), (1, True)]
    assert last.seconds > first.seconds


def test_a_commit_of_a_rank_is_read_once(tmp_path: Path) -> None:
    backend, attempt, writers = whole_run(str(tmp_path / "run"), close=False)
    commits: list[str] = []

    def get(key: str, **limits: Any) -> bytes | None:
        commits.extend([key] * ("/rank_" in key and "/iter_" in key))
        return backend.get(key, **limits)

    watcher = Watcher(wrapped(backend, get=get))
    for num_read in (4, 4):
        watcher.look()
        assert len(commits) == num_read
    record(backend, attempt, writers, iteration=20)
    watcher.look()
    assert len(commits) == 6


def test_a_later_attempt_takes_over_and_earlier_iterations_stay(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    whole_run(url, iterations=(0,), close=False, min_iterations=2)
    watcher = Watcher(open_backend(url))
    before = seen(watcher)
    backend, attempt, writers = start(url, restart=1, world_size=2, min_iterations=2)
    open_iteration(backend, attempt=attempt, iteration=10)
    after = seen(watcher)
    assert (before.attempt, after.attempt) == (0, 1)
    assert (after.complete, after.waiting) == ((0,), {10: ()})
    assert [rank.iterations for rank in after.ranks] == [(), ()]
    assert after.num_records == before.num_records
    record(backend, attempt, writers, iteration=10)
    assert seen(watcher).is_met


def test_a_run_that_is_not_there_or_goes_away_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run"
    watcher = Watcher(open_backend(path))
    with pytest.raises(RunNotFoundError, match="check the URL"):
        watcher.look()
    whole_run(str(path))
    (attempt,) = path.glob("attempt*")
    hidden = tmp_path / "hidden"
    attempt.rename(hidden)
    assert watcher.look() is None
    hidden.rename(attempt)
    seen(watcher)
    shutil.rmtree(path)
    with pytest.raises(RunNotFoundError, match="was deleted while it was watched"):
        watcher.look()
