"""Does a run stay what its own launch made it, when the writers of an earlier one come late?"""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ranktape.errors import CaptureError, DataError, RunNotFoundError, StorageError
from ranktape.storage import open_run
from ranktape.storage.format.attempt import Attempt, IterationPlan, read_plan, write_plan
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.progress import open_iteration, read_progress, write_verdict
from ranktape.storage.places.backend import Backend
from ranktape.storage.recording.writer import STACK_BELOW_NBYTES, RankWriter
from tests.runs import describe, start, write_run

OLD = np.full((4, 4), 7.0, np.float32)
NEW = np.full((4, 4), 1.0, np.float32)

GONE = r"the run at .*run was replaced or deleted while it was recorded"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def record(backend: Backend, attempt: Attempt, writers: list[RankWriter], *, iteration: int = 0) -> None:
    """One complete iteration of the new values."""
    open_iteration(backend, attempt=attempt, iteration=iteration)
    for rank, writer in enumerate(writers):
        writer.write(NEW, info=describe(NEW, iteration=iteration, rank=rank))
        writer.commit(iteration, expected=["a"], silent_sites={})
    finish_iteration(backend, attempt=attempt, iteration=iteration)


@pytest.mark.parametrize("how", ["overwritten", "removed by hand"])
def test_late_writers_change_nothing_of_the_run_in_their_place(url: str, how: str) -> None:
    old_backend, old_attempt, old_writers = start(url, world_size=2, launch_id="old")
    old_writers[0].write(OLD, info=describe(OLD, iteration=0))
    old_writers[0].commit(0, expected=["a"], silent_sites={})
    if how == "removed by hand":
        shutil.rmtree(url)
    backend, attempt, writers = start(url, world_size=2, launch_id="new", overwrite=how == "overwritten")
    assert (attempt.number, old_attempt.number) == (0, 0)
    # The new run is half way when the old one's writers come.
    open_iteration(backend, attempt=attempt, iteration=0)
    writers[0].write(NEW, info=describe(NEW))
    writers[0].commit(0, expected=["a"], silent_sites={})
    writers[1].write(NEW, info=describe(NEW, rank=1))
    time.sleep(1.1)  # tensors are written without a look for so long
    large = np.ones(STACK_BELOW_NBYTES, np.uint8)
    with pytest.raises(StorageError, match=GONE):
        old_writers[1].write(large, info=describe(large, rank=1))
    old_writers[1].write(OLD, info=describe(OLD, rank=1))
    for iteration, writer in ((1, old_writers[0]), (0, old_writers[1])):
        with pytest.raises(StorageError, match=GONE):
            writer.commit(iteration, expected=[], silent_sites={})
        with pytest.raises(StorageError, match=GONE):
            writer.mark(0, mark=Mark.FAILED, attributes={"reason": "late"})
        with pytest.raises(StorageError, match=GONE):
            writer.close(reason="late")
    with pytest.raises(StorageError, match=GONE):
        open_iteration(old_backend, attempt=old_attempt, iteration=3)
    with pytest.raises(StorageError, match=GONE):
        finish_iteration(old_backend, attempt=old_attempt, iteration=0)
    with pytest.raises(StorageError, match=GONE):
        write_plan(old_backend, attempt=old_attempt, plan=IterationPlan(iterations=(9,), is_done=True))
    with pytest.raises(RunNotFoundError, match=GONE):
        write_verdict(old_backend, attempt=old_attempt)
    progress = read_progress(backend, attempt)
    assert (sorted(progress.opened), sorted(progress.closed)) == ([0], [])
    assert progress.marks == {0: {0: Mark.COMMITTED}}
    assert read_plan(backend, attempt=attempt) is None
    writers[1].commit(0, expected=["a"], silent_sites={})
    finish_iteration(backend, attempt=attempt, iteration=0)
    run = open_run(url)
    assert run.iterations == [0]
    assert [record.read().tolist() for record in run.select()] == [NEW.tolist()] * 2
    assert not run.verdict().final


def test_what_passes_between_the_look_and_the_write_lands_beside_the_new_run(url: str) -> None:
    """The race that no check closes: the old writer looked, the run was replaced, then it wrote."""
    old_backend, old_attempt, _ = start(url, launch_id="old")
    old_backend.delete("")
    key = f"{old_attempt.path}/commits/iter_00000000/rank_00000.committed/zarr.json"
    debris = f"{old_attempt.path}/rank_00000/iter_00000000/a/c.0.0"
    for name in (key, debris, f"{old_attempt.path}/verdict/zarr.json", f"{old_attempt.path}/plan/zarr.json"):
        old_backend.put(name, [b"late"])
    # What it left does not keep a new run from its place either.
    backend, attempt, writers = start(url, launch_id="new")
    record(backend, attempt, writers)
    assert old_attempt.path != attempt.path
    run = open_run(url)
    assert [status.attempt for status in run.status()] == [0]
    assert [record.read().tolist() for record in run.select()] == [NEW.tolist()]
    start(url, launch_id="third", overwrite=True)
    assert backend.list_keys(old_attempt.path) == []


def test_a_run_is_overwritten_while_it_is_still_being_written(url: str) -> None:
    old_backend, old_attempt, [old_writer] = start(url, launch_id="old")
    errors: list[str] = []
    large = np.ones(STACK_BELOW_NBYTES, np.uint8)
    info = describe(large)

    def drain() -> None:
        try:
            for call in range(2_000):
                old_writer.write(large, info=dataclasses.replace(info, call=call))
        except StorageError as error:
            errors.append(str(error))

    thread = threading.Thread(target=drain)
    thread.start()
    while len(old_backend.list_names(f"{old_attempt.path}/rank_00000/iter_00000000")) < 20:
        time.sleep(0.01)
    backend, attempt, writers = start(url, launch_id="new", overwrite=True)
    record(backend, attempt, writers)
    thread.join(timeout=30)
    assert len(errors) == 1
    assert [record.read().tolist() for record in open_run(url).select()] == [NEW.tolist()]


def test_two_launches_that_resume_at_once_do_not_share_an_attempt(url: str) -> None:
    write_run(url, {0: [[(NEW, describe(NEW))]]})
    _, first, _ = start(url, launch_id="first", resume=True)
    _, second, _ = start(url, launch_id="second", resume=True)
    assert first.path != second.path


def test_a_deleted_run_has_no_verdict(url: str) -> None:
    backend, attempt, _ = start(url)
    shutil.rmtree(url)
    with pytest.raises(RunNotFoundError, match=GONE):
        write_verdict(backend, attempt=attempt)


def test_a_verdict_names_what_the_coordinator_met(url: str) -> None:
    backend, attempt, writers = start(url, min_iterations=1)
    problems = {"iteration 0": "the commit is damaged"}
    verdict = write_verdict(backend, attempt=attempt, problems=problems)
    assert verdict.missing == ["iteration 0: the commit is damaged"]
    assert open_run(url).verdict() == verdict
    record(backend, attempt, writers)
    assert write_verdict(backend, attempt=attempt, problems=problems).missing == []


def test_overwriting_leaves_what_is_not_of_the_run(tmp_path: Path) -> None:
    url = tmp_path / "run"
    write_run(url, {0: [[(NEW, describe(NEW))]]})
    (url / "notes.txt").write_text("mine")
    (url / "attempts").mkdir()
    _, attempt, _ = start(url, launch_id="new", overwrite=True)
    assert sorted(path.name for path in url.iterdir()) == sorted([attempt.path, "attempts", "notes.txt", "zarr.json"])
    assert open_run(url).iterations == []


def test_an_interrupted_overwriting_can_be_done_again(url: str) -> None:
    write_run(url, {0: [[(NEW, describe(NEW))]]})
    _, attempt, _ = start(url, launch_id="resumed", resume=True)
    # One of the two attempts is gone, the run's document is not.
    shutil.rmtree(Path(url) / attempt.path)
    assert start(url, launch_id="new", overwrite=True)[1].completed == ()


def test_two_tensors_of_one_name_are_refused_before_anything_is_written(url: str) -> None:
    backend, attempt, [writer] = start(url)
    writer.write(NEW, info=describe(NEW))
    with pytest.raises(CaptureError, match=r"two tensors of iteration 0 on rank 0 have the name layers\.0\.query"):
        writer.write(OLD, info=describe(OLD))
    writer.commit(0, expected=["a"], silent_sites={})
    finish_iteration(backend, attempt=attempt, iteration=0)
    [stored] = open_run(url).select()
    assert stored.read().tolist() == NEW.tolist()
    # The same name in another iteration is another tensor.
    writer.write(OLD, info=describe(OLD, iteration=1))


def test_an_iteration_without_any_of_its_tensors_is_not_committed(url: str) -> None:
    backend, attempt, [writer] = start(url)
    with pytest.raises(DataError, match="nothing was recorded of 2 expected tensors"):
        writer.commit(0, expected=["a", "b"], silent_sites={"a": "its hook did not fire"})
    assert read_progress(backend, attempt).marks == {}
    assert backend.list_keys(f"{attempt.path}/rank_00000") == ["zarr.json"]
    # A model without anything to record is whole with nothing.
    writer.commit(1, expected=[], silent_sites={})
    assert read_progress(backend, attempt).ready() == [1]
