"""Does a repair mend what can be mended, and leave alone what was committed and who may be at work?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ranktape.errors import RunNotFoundError
from ranktape.storage import open_run
from ranktape.storage.format.attempt import Attempt
from ranktape.storage.format.documents import write_group
from ranktape.storage.format.progress import open_iteration, write_verdict
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.finding import Repair
from ranktape.storage.maintenance.prune import drop_iteration
from ranktape.storage.maintenance.repair import MIN_AGE_SECONDS, RepairReport, repair_run
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.urls import open_backend
from ranktape.storage.recording.writer import RankWriter
from tests.storage.whole_run import record, tensors, whole_run


def age(path: Path, *, then: float | None = None) -> None:
    """Make everything in a run older: of that time, or as old as a repair wants it."""
    then = time.time() - 2 * MIN_AGE_SECONDS if then is None else then
    for one in path.rglob("*"):
        if one.is_file():
            os.utime(one, (then, then))


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a run."""
    return {str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()}


def mends(report: RepairReport) -> list[Repair | None]:
    """What was done."""
    return [finding.mend for finding in report.done]


COMMIT = "iterations/iter_00000010/zarr.json"
MARKER = "commits/iter_00000010/rank_0000{}.committed/zarr.json"
DAMAGES: dict[str, dict[str, Callable[[bytes], bytes] | None]] = {
    "marker": {MARKER.format(1): None},
    "iteration commit": {COMMIT: None},
    "damaged marker": {MARKER.format(0): lambda _: b""},
    "marker and iteration commit": {MARKER.format(0): None, COMMIT: None},
}
"""Of objects of an attempt: what becomes of their content; None for one that is lost."""


def damage(path: Path, name: str) -> None:
    for pattern, change in DAMAGES[name].items():
        (file,) = path.glob(f"attempt*/{pattern}")
        if change is None:
            file.unlink()
        else:
            file.write_bytes(change(file.read_bytes()))


@pytest.mark.parametrize("name", [*DAMAGES, "marker to another"])
def test_what_follows_from_the_rank_commits_is_restored(path: Path, name: str) -> None:
    backend = open_backend(path)
    values = [record.read().tobytes() for record in open_run(path).select()]
    commits = {key: data for key, data in contents(path).items() if "/rank_" in key and "commits" not in key}
    damage(path, name.removesuffix(" to another"))
    if name == "marker to another":
        # The rank did not know that its commit had arrived.
        (attempt,) = (one.name for one in path.glob("attempt*"))
        write_group(backend, f"{attempt}/commits/iter_00000010/rank_00001.failed", {"reason": "no answer"})
    assert check_run(backend).errors
    before = contents(path)
    planned = repair_run(backend, dry_run=True)
    assert planned.done
    assert contents(path) == before
    report = repair_run(backend)
    assert (report.left, report.young) == ((), ())
    assert planned.done == report.done
    assert check_run(backend, deep=True).findings == []
    run = open_run(path)
    assert run.iterations == [0, 10]
    assert [record.read().tobytes() for record in run.select()] == values
    # The commits themselves are as they were, byte by byte.
    now = contents(path)
    assert {key: now[key] for key in commits} == commits
    assert repair_run(backend).done == ()


def leave_debris(path: Path, backend: Backend, attempt: Attempt, writers: list[RankWriter]) -> None:
    """What a killed writer leaves: an iteration half written, a partial file; and an attempt that did not begin."""
    open_iteration(backend, attempt=attempt, iteration=20)
    for array, info in tensors(20, 0):
        writers[0].write(array, info=info)
    writers[0].flush_stacks()
    (path / attempt.path / "rank_00000" / "1-2-3.partial").write_bytes(b"half")
    backend.put("attempt_001-ab/commits/zarr.json", [b"{}"])


def test_debris_goes_when_it_is_old_and_what_was_committed_stays(tmp_path: Path) -> None:
    path = tmp_path / "run"
    backend, attempt, writers = whole_run(path, close=False)
    whole = contents(path)
    leave_debris(path, backend, attempt, writers)
    young = repair_run(backend)
    assert mends(young) == []
    assert {one.mend for one in young.young} == {Repair.REMOVE_OBJECTS, Repair.REMOVE_UNFINISHED_WRITE}
    age(path, then=0)
    assert mends(repair_run(backend)) == [], "what has no time is no older"
    age(path)
    report = repair_run(backend)
    assert sorted(mends(report), key=str) == [
        Repair.REMOVE_OBJECTS,
        Repair.REMOVE_OBJECTS,
        Repair.REMOVE_UNFINISHED_WRITE,
    ]
    assert report.young == ()
    opened = f"{attempt.path}/commits/iter_00000020/zarr.json"
    assert contents(path) == whole | {opened: (path / opened).read_bytes()}


def test_an_attempt_that_may_be_running_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "run"
    backend, attempt, writers = whole_run(path, close=False)
    leave_debris(path, backend, attempt, writers)
    record(backend, attempt, writers, iteration=30, finish=False)
    age(path)
    # One young object is enough for the whole attempt; the attempt without a document is another one.
    (marker,) = path.glob("attempt_000*/commits/iter_00000000/zarr.json")
    marker.touch()
    report = repair_run(backend)
    assert [finding.key for finding in report.done] == ["attempt_001-ab/"]
    assert Repair.FINISH_ITERATION in {finding.mend for finding in report.young}
    assert open_run(path).iterations == [0, 10]
    # Somebody who knows that nothing runs may say so.
    assert Repair.FINISH_ITERATION in mends(repair_run(backend, min_age_seconds=0))
    assert open_run(path).iterations == [0, 10, 30]


def test_an_iteration_that_all_ranks_committed_is_finished_and_the_verdict_follows(path: Path) -> None:
    backend = open_backend(path)
    for pattern in ("iterations/iter_00000010/zarr.json", "verdict/zarr.json"):
        (document,) = path.glob(f"attempt*/{pattern}")
        document.unlink()
    age(path)
    assert mends(repair_run(backend)) == [Repair.FINISH_ITERATION]
    assert open_run(path).iterations == [0, 10]
    assert not open_run(path).verdict().final


def test_a_verdict_that_counts_too_little_is_written_again_with_its_problems(tmp_path: Path) -> None:
    path = tmp_path / "run"
    backend, attempt, writers = whole_run(path, close=False, min_iterations=3)
    record(backend, attempt, writers, iteration=20, finish=False)
    for writer in writers:
        writer.close(reason="the training ended")
    assert not write_verdict(backend, attempt=attempt, problems={"store": "it was full"}).met
    assert mends(repair_run(backend)) == [Repair.FINISH_ITERATION, Repair.WRITE_VERDICT]
    assert open_run(path).verdict().met
    (document,) = path.glob("attempt*/verdict/zarr.json")
    assert b"it was full" in document.read_bytes()
    assert check_run(backend).findings == []


def test_a_damaged_verdict_is_written_again(path: Path) -> None:
    backend = open_backend(path)
    (document,) = path.glob("attempt*/verdict/zarr.json")
    document.write_bytes(b"{")
    assert mends(repair_run(backend)) == [Repair.WRITE_VERDICT]
    assert open_run(path).verdict().met
    assert check_run(backend).findings == []


def test_lost_values_are_left_and_named(path: Path) -> None:
    backend = open_backend(path)
    (values,) = path.glob("attempt*/rank_00000/iter_00000010/large*/c.0.0")
    values.unlink()
    damage(path, "iteration commit")
    report = repair_run(backend, min_age_seconds=0)
    # An iteration whose values are lost is not called complete again.
    assert report.done == ()
    assert [finding.record.partition(",")[0] for finding in report.left] == ["large", ""]
    assert open_run(path).iterations == [0]


def test_a_place_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError):
        repair_run(open_backend(tmp_path))


def test_a_removal_that_was_interrupted_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "run"
    backend, attempt, _ = whole_run(path, iterations=(0, 10, 20))
    drop_iteration(backend, attempt=attempt, iteration=0)
    assert check_run(backend, deep=True).findings == []
    # As it is when the process is lost after the first word.
    write_group(backend, f"{attempt.path}/dropped/iter_00000010", {"removed": False})
    (note,) = check_run(backend).findings
    assert (note.mend, note.iteration) == (Repair.FINISH_REMOVAL, 10)
    assert mends(repair_run(backend)) == [Repair.FINISH_REMOVAL]
    assert check_run(backend).findings == []
    assert open_run(path).iterations == [20]
    assert not list(path.glob("attempt*/rank*/iter_00000010"))
