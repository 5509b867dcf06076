"""Are the last iterations of all ranks in the store when something goes wrong on one of them, whatever it is?"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from ranktape.analyze.findings.find import find
from ranktape.launch.run_status import status
from ranktape.storage import IterationState, Run, open_run
from ranktape.storage.format.attempt import read_attempts
from ranktape.storage.format.documents import read_attributes
from ranktape.storage.format.layout import verdict_path
from ranktape.storage.format.live import MAX_STORED, TriggerKind
from ranktape.storage.places.urls import open_backend
from tests.exhaustive import exhaustive, exhaustive_but
from tests.faults.programs.flight import (
    FAULTY_ITERATION,
    FAULTY_RANK,
    LAST,
    NUM_BEFORE_DEATH,
    NUM_IN_FLOOD,
    NUM_ITERATIONS,
)
from tests.launch.processes import CHECKOUT, torchrun

NUM_RANKS = 4
SECONDS = 60.0
PROGRAM = Path(__file__).parent / "programs" / "flight.py"
BEFORE = list(range(FAULTY_ITERATION - LAST, FAULTY_ITERATION))

pytestmark = pytest.mark.timeout(240)


def closed(url: Path) -> Run:
    """The run once all writers have ended: they outlive the trainers."""
    deadline = time.monotonic() + SECONDS
    while not open_run(url).verdict().final:
        assert time.monotonic() < deadline, open_run(url).status()
        time.sleep(0.2)
    return open_run(url)


def values_per_rank(run: Run, iteration: int) -> list[int]:
    records = run.select(iteration=iteration, layer_type="linear")
    return [len(records.select(rank=rank)) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize(
    ("fault", "kind", "signal"),
    [
        ("exception", TriggerKind.EXCEPTION, ""),
        ("sigterm", TriggerKind.DEATH, "SIGTERM"),
        ("sigkill", TriggerKind.DEATH, "SIGKILL"),
        ("segfault", TriggerKind.DEATH, "SIGSEGV"),
    ],
)
@exhaustive_but("exception-exception-", "sigkill-death-SIGKILL", reason="an exception and a kill are in make test")
def test_the_last_iterations_of_all_ranks_are_stored_when_one_dies(
    tmp_path: Path, fault: str, kind: TriggerKind, signal: str
) -> None:
    # How a process ended can be read until its parent has waited for it (as the server that forks ranks does at once),
    # and from Linux 6.15 on after that.
    is_forked = fault != "segfault"
    ended = torchrun(PROGRAM, tmp_path / "run", fault, cwd=tmp_path, num_ranks=NUM_RANKS, is_forked=is_forked)
    assert ended.returncode != 0
    run = closed(tmp_path / "run")
    assert run.iterations == [*BEFORE, FAULTY_ITERATION], ended.stderr
    whole = values_per_rank(run, FAULTY_ITERATION - 1)
    assert whole == [whole[0]] * NUM_RANKS
    assert [values_per_rank(run, iteration) for iteration in BEFORE] == [whole] * LAST
    # Of the iteration in which it died it has the forward, and what is missing has a reason.
    last = values_per_rank(run, FAULTY_ITERATION)
    assert 0 < last[FAULTY_RANK] < whole[0]
    statuses = {one.iteration: one for one in run.status()}
    cut_off = statuses[FAULTY_ITERATION]
    assert cut_off.state is IterationState.PARTIAL
    assert "cut off" in str(cut_off.silent_sites[FAULTY_RANK])
    assert re.fullmatch(r"cut off: .+, after 12 of 23 expected tensors", cut_off.missing[FAULTY_RANK])
    assert cut_off.num_missing
    assert all(statuses[iteration].state is IterationState.COMPLETE for iteration in BEFORE)
    assert run.verdict().complete == BEFORE
    assert all(statuses[iteration].num_missing == 0 for iteration in BEFORE)
    triggers = [one for one in run.triggers() if one.rank == FAULTY_RANK]
    assert [(one.kind, one.iteration) for one in triggers] == [(kind, FAULTY_ITERATION)]
    if not is_forked:
        assert triggers[0].signal == signal
    first, *_ = run.triggers()
    places = [(record.iteration, record.rank) for record in run.select()]
    of_rank = [row for row, place in enumerate(places) if place == (first.iteration, first.rank)]
    finding = find(run.select())[0]
    assert finding.places == tuple(of_rank or range(len(places)))[:-9:-1]
    if fault == "exception":
        assert finding.evidence.endswith("; ValueError: the data are wrong")
        assert triggers[0].text == "ValueError: the data are wrong"
        assert 'raise ValueError("the data are wrong")' in triggers[0].traceback


def test_ranks_that_wait_in_a_collective_for_one_that_hangs_are_stored(tmp_path: Path) -> None:
    ended = torchrun(PROGRAM, tmp_path / "run", "hang", cwd=tmp_path, num_ranks=NUM_RANKS)
    assert ended.returncode != 0
    run = closed(tmp_path / "run")
    assert run.iterations == [*BEFORE, FAULTY_ITERATION], ended.stderr
    whole = values_per_rank(run, FAULTY_ITERATION - 1)
    assert whole == [whole[0]] * NUM_RANKS
    # The others' collective timed out; the one that hung was ended by the launcher.
    kinds = {one.rank: one.kind for one in run.triggers()}
    assert TriggerKind.EXCEPTION in {kind for rank, kind in kinds.items() if rank != FAULTY_RANK}
    assert {one.iteration for one in run.triggers()} == {FAULTY_ITERATION}


def test_a_nan_on_one_rank_stores_the_iterations_around_it_on_all(tmp_path: Path) -> None:
    ended = torchrun(PROGRAM, tmp_path / "run", "nan", cwd=tmp_path, num_ranks=NUM_RANKS)
    assert ended.returncode == 0, ended.stderr
    run = closed(tmp_path / "run")
    around = [*BEFORE, FAULTY_ITERATION, FAULTY_ITERATION + 1]
    assert set(run.iterations) >= set(around), run.status()
    counts = [values_per_rank(run, iteration) for iteration in around]
    assert counts == [[counts[0][0]] * NUM_RANKS] * len(around)
    first = run.triggers()[0]
    assert (first.kind, first.rank, first.iteration) == (TriggerKind.NAN, FAULTY_RANK, FAULTY_ITERATION)
    assert (first.where["module"], first.where["tensor_name"], first.value) == ("0", "input", 1.0)
    [index] = find(run.select())[0].places
    record = list(run.select())[index]
    where = (record.iteration, record.rank, record.module, record.tensor_name, record.operation)
    assert where == (FAULTY_ITERATION, FAULTY_RANK, "0", "input", "forward")


@exhaustive("make test kills ranks and writers one by one")
def test_a_run_is_continued_at_once_where_a_rank_died_with_its_writer(tmp_path: Path) -> None:
    ended = torchrun(PROGRAM, tmp_path / "run", "both", cwd=tmp_path, num_ranks=NUM_RANKS)
    assert ended.returncode != 0
    began = time.monotonic()
    ended = torchrun(PROGRAM, tmp_path / "run", "nan", "resume", cwd=tmp_path, num_ranks=NUM_RANKS)
    assert ended.returncode == 0, ended.stderr
    assert time.monotonic() - began < 120  # far less than --finish-timeout-seconds
    first, second = (status for status in closed(tmp_path / "run").status() if status.iteration == FAULTY_ITERATION)
    assert f"rank {FAULTY_RANK}" in first.lacks(max_named=NUM_RANKS)
    assert (second.attempt, second.state) == (1, IterationState.COMPLETE)


@exhaustive("make test kills ranks and writers one by one")
def test_rank_0_is_told_of_a_rank_that_no_writer_closes(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = torchrun(PROGRAM, tmp_path / "run", "closing", cwd=tmp_path, num_ranks=NUM_RANKS)
    assert time.monotonic() - began < 120  # far less than --finish-timeout-seconds
    assert f"[rank {FAULTY_RANK}] the writer process ended: killed by SIGKILL" in ended.stderr
    closed(tmp_path / "run")
    backend = open_backend(str(tmp_path / "run"))
    verdict = read_attributes(backend, verdict_path(read_attempts(backend)[-1].path))
    assert verdict is not None
    assert "its writer process ended: killed by SIGKILL" in verdict["problems"][f"rank {FAULTY_RANK}"]


@exhaustive("make test has single triggers")
def test_a_flood_of_triggers_stores_a_bounded_number_of_iterations_and_hides_nothing(tmp_path: Path) -> None:
    ended = torchrun(PROGRAM, tmp_path / "run", "flood", cwd=tmp_path, num_ranks=NUM_RANKS)
    assert ended.returncode != 0
    run = closed(tmp_path / "run")
    *first, repeated, death = (one for one in run.triggers() if one.rank == FAULTY_RANK)
    assert [one.iteration for one in first] == list(range(MAX_STORED))
    # What is not stored is told: one trigger counts them all.
    assert not repeated.is_stored
    assert (repeated.iteration, repeated.last_iteration) == (MAX_STORED, NUM_IN_FLOOD - 1)
    assert repeated.count == NUM_IN_FLOOD - MAX_STORED
    # Another kind of trigger is stored by all ranks all the same.
    assert (death.kind, death.iteration) == (TriggerKind.DEATH, NUM_BEFORE_DEATH)
    begun = [one.iteration for one in run.status()]
    assert begun == [*range(MAX_STORED + 1), *range(NUM_BEFORE_DEATH - LAST, NUM_BEFORE_DEATH + 1)]
    assert set(begun[:-1]) <= set(run.iterations), run.status()
    note = f"user: {first[0].message()}, and {MAX_STORED - 1} more until iteration {MAX_STORED - 1}"
    assert note in status(str(tmp_path / "run")).table().notes
    assert run.verdict().num_triggers == sum(one.count for one in run.triggers()) >= NUM_IN_FLOOD + 1


@pytest.mark.parametrize("fault", ["user", "none"])
@exhaustive("make test has an armed process in which nothing happens, and triggers of every kind")
def test_what_nothing_happened_in_is_not_stored(tmp_path: Path, fault: str) -> None:
    ended = torchrun(PROGRAM, tmp_path / "run", fault, cwd=tmp_path, num_ranks=NUM_RANKS)
    assert ended.returncode == 0, ended.stderr
    run = closed(tmp_path / "run")
    verdict = run.verdict()
    assert verdict.met
    if fault == "none":
        assert run.status() == []
        assert verdict.message() == "flight recorder: no trigger occurred, and no iteration is stored"
        return
    assert run.iterations == [*BEFORE, FAULTY_ITERATION, FAULTY_ITERATION + 1]
    assert [one.text for one in run.triggers()] == ["the validation fell"]
    assert max(run.iterations) < NUM_ITERATIONS


SCRIPT = CHECKOUT / "examples" / "overflow_story.py"
OVERFLOW, DEATH = 137, 140


@pytest.mark.slow
@pytest.mark.timeout(240)
@exhaustive("make test has each trigger in tests/faults/test_flight_recorder.py")
def test_the_story_of_the_page(tmp_path: Path) -> None:
    launcher = ("-m", "ranktape.launch", "--capture", "runs/story", "--record-last", "4")
    ended = torchrun(*launcher, SCRIPT, cwd=tmp_path)
    assert ended.returncode != 0
    assert f"FloatingPointError: the loss is nan in step {DEATH}" in ended.stderr
    closed(tmp_path / "runs" / "story")
    run = open_run(tmp_path / "runs" / "story")
    assert run.iterations == list(range(OVERFLOW - 4, DEATH + 1))
    assert run.verdict().complete == list(range(OVERFLOW - 4, DEATH))
    first, *others = run.triggers()
    assert (first.kind, first.iteration, first.rank) == (TriggerKind.INF, OVERFLOW, 1)
    assert f"FloatingPointError: the loss is nan in step {DEATH}" in {one.text for one in others}
    finding = find(run.select())[0]
    assert finding.kind == "triggered"
    where = {name: finding.where[name] for name in ("iteration", "rank", "layer_idx", "module", "operation", "phase")}
    assert where == {
        "iteration": OVERFLOW,
        "rank": 1,
        "layer_idx": 5,
        "module": "layers.5.up",
        "operation": "forward",
        "phase": "post",
    }
    [place] = finding.places
    record = list(run.select())[place]
    assert (record.module, record.tensor_name, record.iteration, record.rank) == ("layers.5.up", "output", OVERFLOW, 1)
