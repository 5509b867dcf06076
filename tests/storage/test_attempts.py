"""Do attempts, iterations and verdicts follow from what the ranks committed, and whose is a run?"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import zarr

from ranktape.errors import (
    CaptureError,
    RunExistsError,
    RunFormatError,
    UsageError,
)
from ranktape.storage import IterationState, open_run
from ranktape.storage.format.attempt import Launch
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.progress import open_iteration, read_progress, write_verdict
from ranktape.storage.recording.start import join_attempt
from tests.runs import complete, start
from tests.storage.test_run import write_iterations, write_tensors
from tests.storage.whole_run import record, whole_run
from tests.storage.wrapped import wrapped


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where the run lies."""
    return str(tmp_path / "run")


def test_an_uncommitted_rank_hides_the_iteration(url: str) -> None:
    backend, attempt, writers = start(url, world_size=2, min_iterations=1)
    open_iteration(backend, attempt=attempt, iteration=5)
    for rank, writer in enumerate(writers):
        write_tensors(writer, rank=rank, iteration=5)
    writers[0].commit(5, expected=[], silent_sites={})
    run = open_run(url)
    assert run.iterations == []
    assert len(run.select()) == 0
    assert read_progress(backend, attempt).ready() == []
    [status] = run.status()
    assert (status.state, status.committed_ranks) == (IterationState.OPEN, [0])
    assert status.missing == {1: "has not committed yet"}
    writers[1].mark(5, mark=Mark.FAILED, attributes={"reason": "the training process died"})
    [status] = open_run(url).status()
    assert (status.state, status.missing) == (IterationState.PARTIAL, {1: "the training process died"})
    assert not open_run(url).verdict().met
    assert "iteration 5 is partial (rank 1: the training process died)" in open_run(url).verdict().message()


def test_a_skipped_iteration_is_hidden_and_named(url: str) -> None:
    backend, attempt, writers = start(url, world_size=2)
    open_iteration(backend, attempt=attempt, iteration=5)
    writers[0].commit(5, expected=[], silent_sites={})
    writers[1].mark(5, mark=Mark.SKIPPED, attributes={"reason": "no room"})
    [status] = open_run(url).status()
    assert (status.state, status.missing) == (IterationState.SKIPPED, {1: "no room"})


def test_a_verdict_ends_the_waiting(url: str) -> None:
    backend, attempt, writers = start(url, world_size=2, min_iterations=2)
    open_iteration(backend, attempt=attempt, iteration=5)
    writers[0].commit(5, expected=[], silent_sites={})
    writers[0].close(reason="the training ended after 6 iterations")
    verdict = write_verdict(backend, attempt=attempt)
    assert (verdict.met, verdict.final, verdict.complete) == (False, True, [])
    assert "rank 1: never reported" in verdict.message()
    assert "the training ended after 6 iterations" in verdict.message()
    assert open_run(url).verdict() == verdict


def test_two_finishers_leave_one_commit(url: str) -> None:
    backend, attempt, writers = start(url)
    write_tensors(writers[0])
    writers[0].commit(0, expected=["a"], silent_sites={"a": "its hook did not fire"})
    finish_iteration(backend, attempt=attempt, iteration=0)
    commit = Path(url) / attempt.path / "iterations/iter_00000000/zarr.json"
    first = commit.read_bytes()
    finish_iteration(backend, attempt=attempt, iteration=0)
    assert commit.read_bytes() == first
    assert open_run(url).status()[0].silent_sites == {0: {"a": "its hook did not fire"}}


def test_a_foreign_run_is_refused_resumed_or_overwritten(url: str) -> None:
    write_iterations(url)
    with pytest.raises(RunExistsError, match=r"--resume .* --overwrite"):
        start(url, launch_id="another")
    assert open_run(url).iterations == [10, 20]
    _, attempt, _ = start(url, launch_id="another", resume=True)
    assert (attempt.number, attempt.completed) == (1, (10, 20))
    start(url, launch_id="a third", overwrite=True)
    assert open_run(url).iterations == []


def test_the_same_launch_resumes_by_itself(url: str) -> None:
    write_iterations(url)
    backend, attempt, [writer] = start(url, restart=1)
    assert attempt.number == 1
    write_tensors(writer, iteration=20, count=1)
    complete(backend, attempt, [writer], iteration=20)
    run = open_run(url)
    # The latest attempt of each iteration, unless asked for all.
    assert len(run.select(iteration=20)) == 1
    assert len(run.select(iteration=10)) == 6
    assert len(run.select(iteration=20, attempt="0-9")) == 7


def test_an_iteration_that_was_cut_off_is_recorded_again(url: str) -> None:
    backend, attempt, writers = whole_run(url, iterations=(0,), close=False, restart=0)
    record(backend, attempt, writers, iteration=10, cut_off="cut off: SIGKILL")
    _, restarted, _ = start(url, restart=1, world_size=2)
    assert restarted.completed == (0,)


def test_a_restart_finishes_what_the_coordinator_left(url: str) -> None:
    _, _, [writer] = start(url)
    writer.commit(7, expected=[], silent_sites={})
    assert open_run(url).iterations == []
    _, attempt, _ = start(url, restart=1)
    assert attempt.completed == (7,)
    assert open_run(url).iterations == [7]


def test_data_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(RunExistsError, match=r"holds no run .*thesis\.tex"):
            start(str(tmp_path), overwrite=overwrite)
    zarr.create_group(tmp_path / "other")
    with pytest.raises(RunFormatError, match="holds a Zarr group, but no run"):
        start(str(tmp_path / "other"), overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


def test_a_rank_that_sees_another_store_says_so(tmp_path: Path) -> None:
    start(str(tmp_path / "run"), world_size=2)
    backend, _, _ = start(str(tmp_path / "elsewhere"), world_size=2)
    launch = Launch(launch_id="launch", restart=7, world_size=2)
    with pytest.raises(CaptureError, match="give a URL that all nodes share"):
        join_attempt(backend, launch=launch, timeout_seconds=0.2)
    found = join_attempt(backend, launch=Launch(launch_id="launch", restart=0, world_size=2), timeout_seconds=0.2)
    assert found.number == 0


def test_a_live_run_is_refreshed(url: str) -> None:
    backend, attempt, [writer] = start(url)
    run = open_run(url)
    assert (run.iterations, run.refresh()) == ([], [])
    for iteration in (3, 4):
        write_tensors(writer, iteration=iteration)
        complete(backend, attempt, [writer], iteration=iteration)
    before = run.select()
    assert run.refresh() == [3, 4]
    assert (len(before), len(run.select()), run.refresh()) == (0, 6, [])


def test_looking_again_sees_what_looking_anew_sees(tmp_path: Path) -> None:
    backend, attempt, writers = start(str(tmp_path / "run"), world_size=2)
    known = read_progress(backend, attempt)
    for iteration in range(6):
        open_iteration(backend, attempt=attempt, iteration=iteration)
        for writer in writers[: 1 + iteration % 2]:
            if iteration == 3:
                writer.mark(iteration, mark=Mark.SKIPPED, attributes={"reason": "no room"})
            else:
                writer.commit(iteration, expected=[], silent_sites={})
        known = read_progress(backend, attempt, known=known)
        assert known == read_progress(backend, attempt)
        for ready in known.ready():
            finish_iteration(backend, attempt=attempt, iteration=ready)
    writers[0].close(reason="done")
    assert read_progress(backend, attempt, known=known) == read_progress(backend, attempt)


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("num_before", range(4))
def test_a_rank_that_is_seen_to_have_ended_is_seen_with_all_that_it_committed(
    url: str, num_before: int, *, is_known: bool
) -> None:
    backend, attempt, [first, last] = start(url, world_size=2)
    open_iteration(backend, attempt=attempt, iteration=0)
    first.commit(0, expected=[], silent_sites={})
    known = read_progress(backend, attempt) if is_known else None
    asked: list[str] = []

    def then(ask: Callable[[str], list[str]], path: str) -> list[str]:
        """What the store answers; before one of its answers the other rank ends."""
        if len(asked) == num_before:
            last.commit(0, expected=[], silent_sites={})
            last.close(reason="done")
        asked.append(path)
        return ask(path)

    watched = wrapped(backend, list_keys=partial(then, backend.list_keys), list_names=partial(then, backend.list_names))
    seen = read_progress(watched, attempt, known=known)
    assert len(asked) > num_before
    assert seen.ready() == [0] or not seen.closed


@pytest.mark.parametrize("url", ["/" + "/".join(["d" * 200] * 19), "memory://bucket/" + "p" * 700])
def test_a_url_below_which_no_key_has_room_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(UsageError, match=r"bytes too long .* give a shorter URL"):
        start(url)


def test_threads_may_read_the_first_documents_of_a_kind_at_once() -> None:
    words = [sys.executable, "-W", "error", str(Path(__file__).parent / "programs" / "first_documents.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "read\n", "")
