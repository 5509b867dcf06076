"""Does what the store did not take wait in the directory, whole, and come into the run by a push?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from ranktape.capture.staging.ring_file import Counter
from ranktape.errors import AccessDeniedError, NoSpaceError, StorageError, UnreachableError
from ranktape.launch.exchange import push_command as command
from ranktape.storage import IterationState, open_run
from ranktape.storage.format.progress import write_verdict
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.finding import Mend
from ranktape.storage.maintenance.outbox import find_spills, push_spill
from ranktape.storage.maintenance.repair import repair_run
from ranktape.storage.places.backend import Buffer
from ranktape.storage.places.local import LocalBackend
from tests.capture.light import check_arrays, tensors
from tests.capture.test_storing import Bench


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
    assert (again.exit_code, again.stdout) == (0, f"nothing waits in {tmp_path / 'spill'}\n")
    mistyped = CliRunner().invoke(command, [str(tmp_path / "spil")])
    assert "is no directory: give the --spill-dir" in str(mistyped.exception)


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
    assert not [finding for finding in report.done if finding.mend is Mend.REMOVE_OBJECTS]
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


def test_after_a_flush_that_failed_the_store_is_flushed_before_the_commit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, get, flush = bench.store.put, bench.store.get, bench.store.flush
    done: list[str] = []
    is_down = True

    def noted_put(key: str, parts: Sequence[Buffer]) -> None:
        done.append(key)
        put(key, parts)

    def get_again(key: str, *, max_nbytes: int | None = None) -> bytes | None:
        nonlocal is_down
        is_down = False
        return get(key, max_nbytes=max_nbytes)

    def flush_unless_down() -> None:
        if is_down:
            monkeypatch.setattr(bench.store, "get", get_again)
            raise UnreachableError("the store has gone")
        flush()
        done.append("flushed")

    monkeypatch.setattr(bench.store, "put", noted_put)
    monkeypatch.setattr(bench.store, "flush", flush_unless_down)
    bench.put(0, tensors(0))
    bench.wait_for(lambda: bench.committer.num_committed == 1)
    bench.close()
    commit = done.index(f"{bench.attempt.path}/rank_00000/iter_00000000/zarr.json")
    assert done[commit - 1] == "flushed"


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
    assert "stays: iteration 1" in result.stdout
    assert "something of 1 of 1 ranks stays" in str(result.exception)


def test_an_iteration_that_is_being_recorded_is_left_alone(bench: Bench, tmp_path: Path) -> None:
    bench.store.error = UnreachableError
    staged = bench.storer.begin(0)
    bench.storer.run(staged, lambda: _write_one(bench))
    bench.wait_for(staged.futures[0].done)
    bench.store.error = None
    [spill] = find_spills(tmp_path / "spill")
    report = push_spill(spill, bench.store, keep=False)
    assert (report.unfinished, report.iterations) == ([0], [])
    assert find_spills(tmp_path / "spill") == [spill]


def _write_one(bench: Bench) -> None:
    from tests.runs import describe

    array = tensors(0)["large.0"]
    bench.storer.rank_writer.write(array, info=describe(array))


def test_names_in_a_spill_cannot_lead_elsewhere(tmp_path: Path, make_manifest: Callable[..., Path]) -> None:
    make_manifest(attempt="../attempt_000-00000000")
    with pytest.raises(StorageError, match="does not say what its name says"):
        find_spills(tmp_path)
    make_manifest(rank="zero")
    with pytest.raises(StorageError, match="is not the file of a spill"):
        find_spills(tmp_path)
    make_manifest()
    [spill] = find_spills(tmp_path)
    with pytest.raises(StorageError, match="give the run that has by --to"):
        push_spill(spill, LocalBackend(str(tmp_path / "run")), keep=False)


@pytest.fixture
def make_manifest(tmp_path: Path) -> Callable[..., Path]:
    """Writes the file of a spill, with some words changed."""

    def make(**changes: object) -> Path:
        folder = tmp_path / "attempt_000-00000000"
        folder.mkdir(exist_ok=True)
        words = {"url": "run", "attempt": folder.name, "rank": 0, "host": "here", **changes}
        path = folder / "rank_00000.spill.json"
        path.write_text(json.dumps(words))
        return path

    return make
