"""Does what the store did not take wait in the directory, whole, and come into the run by a push?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.capture.staging.ring_file import Counter
from ranktape.errors import AccessDeniedError, DataError, NoSpaceError, StorageError, UnreachableError
from ranktape.launch.exchange import push_command as command
from ranktape.storage import IterationState, open_run
from ranktape.storage.format.attempt import Launch
from ranktape.storage.format.progress import write_verdict
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.copy import find_spills, push_spill
from ranktape.storage.maintenance.finding import Repair
from ranktape.storage.maintenance.repair import repair_run
from ranktape.storage.places.backend import Buffer
from ranktape.storage.places.local import LocalBackend
from ranktape.storage.places.urls import RetryingBackend
from ranktape.storage.recording.start import begin_attempt
from ranktape.storage.recording.writer import RankWriter, SpillDirectory
from tests.capture.light import check_arrays, tensors
from tests.capture.test_storing import Bench, Moody
from tests.runs import describe


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A rank that spills."""
    one = Bench(tmp_path, block_timeout_seconds=0.3, spill_dir=tmp_path / "spill")
    yield one
    one.stop()


def spill_one(bench: Bench, error: type[StorageError] = UnreachableError) -> None:
    """Iteration 0 is stored, iteration 1 waits in the directory, from the middle of it on."""
    bench.put(0, tensors(0))
    bench.wait_for(lambda: bench.committer.num_committed == 1)
    put, num_puts = bench.store.put, 0

    def refuse_later(*args: object) -> None:
        nonlocal num_puts
        num_puts += 1
        if num_puts == 3:
            bench.store.error = error
        put(*args)  # type: ignore[arg-type]

    bench.store.put = refuse_later  # type: ignore[assignment, method-assign]
    bench.put(1, tensors(1))
    bench.wait_for(lambda: bench.ring.counter(Counter.SETTLED) == 2)
    bench.store.put = put  # type: ignore[method-assign]
    bench.store.error = None


@pytest.mark.parametrize("error", [UnreachableError, NoSpaceError, AccessDeniedError])
def test_an_iteration_that_spilled_waits_and_is_pushed(bench: Bench, tmp_path: Path, error: type[StorageError]) -> None:
    spill_one(bench, error)
    assert f"{tmp_path / 'spill'} for 'ranktape push'" in bench.words["problem"]
    bench.close()
    bench.check(0, tensors(0))
    write_verdict(bench.store, attempt=bench.attempt)
    status = open_run(bench.url).status()[1]
    assert status.state is IterationState.PARTIAL
    assert "waits in" in status.missing[0]
    assert f"{tmp_path / 'spill'}" in status.missing[0]
    result = CliRunner().invoke(command, [str(tmp_path / "spill"), "--json"], catch_exceptions=False)
    [pushed] = json.loads(result.stdout)["spills"]
    assert (pushed["pushed"]["iterations"], pushed["pushed"]["finished"]) == ([1], [1])
    run = open_run(bench.url)
    assert run.iterations == [0, 1]
    assert run.verdict().complete == [0, 1]
    check_arrays(run.select(iteration=1), tensors(1))
    assert not list((tmp_path / "spill").iterdir())
    again = CliRunner().invoke(command, [str(tmp_path / "spill")], catch_exceptions=False)
    assert (again.exit_code, again.stdout) == (0, f"there is nothing to push in {tmp_path / 'spill'}\n")
    mistyped = CliRunner().invoke(command, [str(tmp_path / "spil")])
    assert "is not a directory: give the --spill-dir" in str(mistyped.exception)


def test_the_store_never_has_a_commit_whose_tensors_are_elsewhere(bench: Bench) -> None:
    spill_one(bench)
    bench.close()
    group = bench.url / bench.attempt.path / "rank_00000" / "iter_00000001"
    assert list(group.rglob("c.*")), "a part of the iteration had reached the store"
    assert not (group / "zarr.json").exists()


def test_a_repair_leaves_what_waits_for_the_rest(bench: Bench, tmp_path: Path) -> None:
    spill_one(bench)
    bench.close()
    write_verdict(bench.store, attempt=bench.attempt)
    report = repair_run(bench.store, min_age_seconds=0)
    assert not [finding for finding in report.done if finding.mend is Repair.REMOVE_OBJECTS]
    [waiting] = [finding for finding in check_run(bench.store).findings if "'ranktape push'" in finding.message]
    assert (waiting.iteration, waiting.rank) == (1, 0)
    [spill] = find_spills(tmp_path / "spill")
    assert push_spill(spill, bench.store, keep=False).iterations == [1]
    assert check_run(bench.store, deep=True).errors == []
    bench.check(1, tensors(1))


def test_the_store_is_used_again_when_it_answers_again(bench: Bench) -> None:
    spill_one(bench)
    bench.put(2, tensors(2))
    bench.close()
    bench.check(2, tensors(2))


def test_an_iteration_of_which_the_flush_failed_waits_and_is_pushed(bench: Bench, tmp_path: Path) -> None:
    flush = bench.store.flush

    def refuse() -> None:
        raise UnreachableError("the store has gone")

    bench.store.flush = refuse  # type: ignore[method-assign]
    bench.put(0, tensors(0))
    bench.wait_for(lambda: bench.ring.counter(Counter.SETTLED) == 1)
    bench.store.flush = flush  # type: ignore[method-assign]
    bench.put(1, tensors(1))
    bench.close()
    assert not (bench.url / bench.attempt.path / "rank_00000" / "iter_00000000" / "zarr.json").exists()
    [spill] = find_spills(tmp_path / "spill")
    report = push_spill(spill, bench.store, keep=False)
    assert (report.iterations, report.finished, report.problems) == ([0], [0, 1], {})
    assert check_run(bench.store, deep=True).errors == []
    for iteration in (0, 1):
        bench.check(iteration, tensors(iteration))


def test_while_the_store_is_away_whole_iterations_go_to_the_directory(bench: Bench, tmp_path: Path) -> None:
    bench.store.error = UnreachableError
    for iteration in range(3):
        bench.put(iteration, tensors(iteration))
    bench.wait_for(lambda: bench.ring.counter(Counter.SETTLED) == 3)
    spilled = open_run(tmp_path / "spill" / bench.attempt.path)
    assert [status.committed_ranks for status in spilled.status()] == [[0]] * 3
    assert not list((bench.url / bench.attempt.path / "rank_00000").glob("iter_*")), "the store was away"
    bench.store.error = None
    bench.close()
    assert f"{tmp_path / 'spill'} for 'ranktape push'" in open_run(bench.url).status()[1].missing[0]
    [spill] = find_spills(tmp_path / "spill")
    report = push_spill(spill, bench.store, keep=False)
    assert (report.iterations, report.finished) == ([0, 1, 2], [0, 1, 2])
    assert not list((tmp_path / "spill").iterdir())
    for iteration in range(3):
        bench.check(iteration, tensors(iteration))


def test_what_the_directory_has_no_room_for_fails_and_leaves_nothing_there(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.storer.spill is not None
    spill = bench.storer.spill.backend
    put = spill.put

    def refuse_large(key: str, parts: Iterable[Buffer]) -> None:
        if "/c." in key and "catalogue" not in key:
            raise NoSpaceError(f"cannot write {spill.url}/{key}: No space left on device")
        put(key, parts)

    monkeypatch.setattr(spill, "put", refuse_large)
    bench.store.error = UnreachableError
    bench.put(0, tensors(0))
    bench.wait_for(lambda: bench.ring.counter(Counter.SETTLED) == 1)
    bench.store.error = None
    bench.close()
    assert f"cannot write {tmp_path / 'spill'}" in bench.words["problem"]
    assert not list((tmp_path / "spill").rglob("iter_*/c.*"))
    [left] = find_spills(tmp_path / "spill")
    assert push_spill(left, bench.store, keep=False).iterations == []
    assert not list((tmp_path / "spill").iterdir())


def test_two_ranks_share_a_directory(tmp_path: Path) -> None:
    store = RetryingBackend(Moody(str(tmp_path / "run")), timeout_seconds=0.1)
    launch = Launch(launch_id="launch", restart=0, world_size=2)
    about: dict[str, Any] = {"options": {"min_iterations": 1}, "environment": {}}
    attempt = begin_attempt(store, launch=launch, resume=False, overwrite=False, **about)
    spill = SpillDirectory(store, directory=tmp_path / "spill", attempt=attempt)
    writers = [RankWriter(store, attempt=attempt, rank=rank, environment={}, spill=spill) for rank in range(2)]
    store._backend.error = UnreachableError  # type: ignore[attr-defined]
    for rank, writer in enumerate(writers):
        array = np.full((64,), rank, dtype=np.float32)
        writer.open(0)
        writer.write(array, info=describe(array, rank=rank))
        assert "bad mood" in (writer.commit(0, expected=[], silent_sites={}) or "")
        writer.close(reason="done")
    store._backend.error = None  # type: ignore[attr-defined]
    spills = find_spills(tmp_path / "spill")
    assert [one.rank for one in spills] == [0, 1]
    reports = [push_spill(one, store, keep=False) for one in spills]
    assert [(one.iterations, one.finished) for one in reports] == [([0], []), ([0], [0])]
    assert not list((tmp_path / "spill").iterdir())
    assert [float(record.read()[0]) for record in open_run(tmp_path / "run").select(iteration=0)] == [0.0, 1.0]


def test_keeping_repeating_and_interrupting_a_push(bench: Bench, tmp_path: Path) -> None:
    spill_one(bench)
    bench.close()
    [spill] = find_spills(tmp_path / "spill")
    first = push_spill(spill, bench.store, keep=True)
    second = push_spill(spill, bench.store, keep=True)
    assert (first.iterations, second.iterations, second.finished) == ([1], [1], [])
    # As if a push had been ended while it removed what it had brought.
    for path in (tmp_path / "spill").rglob("c.0*"):
        path.unlink()
    third = push_spill(spill, bench.store, keep=False)
    assert (third.iterations, third.problems) == ([1], {})
    assert find_spills(tmp_path / "spill") == []


def test_what_is_damaged_stays_and_is_named(bench: Bench, tmp_path: Path) -> None:
    spill_one(bench)
    bench.close()
    [spill] = find_spills(tmp_path / "spill")
    large = max((tmp_path / "spill").rglob("c.0*"), key=lambda path: path.stat().st_size)
    content = bytearray(large.read_bytes())
    content[100] ^= 1
    large.write_bytes(content)
    report = push_spill(spill, bench.store, keep=False)
    assert report.iterations == []
    assert "checksum" in report.problems[1]
    assert large.exists()
    assert open_run(bench.url).iterations == [0]
    result = CliRunner().invoke(command, [str(tmp_path / "spill")])
    assert "remains: iteration 1" in result.stdout
    assert "iterations of 1 of 1 ranks remain" in str(result.exception)


def test_an_iteration_that_is_being_recorded_is_left_alone(bench: Bench, tmp_path: Path) -> None:
    bench.store.error = UnreachableError
    staged = bench.storer.begin(0)
    bench.storer.run(staged, lambda: _write_one(bench))
    bench.wait_for(lambda: all(future.done() for future in staged.futures))
    bench.store.error = None
    [spill] = find_spills(tmp_path / "spill")
    report = push_spill(spill, bench.store, keep=False)
    assert (report.unfinished, report.iterations) == ([0], [])
    assert find_spills(tmp_path / "spill") == [spill]


def _write_one(bench: Bench) -> None:
    array = tensors(0)["large.0"]
    bench.storer.rank_writer.write(array, info=describe(array))


def test_a_folder_that_is_no_spill_is_named(bench: Bench, tmp_path: Path) -> None:
    spill_one(bench)
    [spill] = find_spills(tmp_path / "spill")
    with pytest.raises(StorageError, match="give the run that has by --to"):
        push_spill(spill, LocalBackend(str(tmp_path / "other")), keep=False)
    document = spill.folder / "zarr.json"
    document.write_text(document.read_text().replace("spilled_from", "spilled_into"))
    with pytest.raises(DataError, match="not what was written there"):
        find_spills(tmp_path / "spill")
    document.unlink()
    with pytest.raises(StorageError, match=r"has no zarr\.json of a run"):
        find_spills(tmp_path / "spill")
