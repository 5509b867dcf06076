"""Does the status say how far each iteration is, and name what is missing?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ranktape.launch.cli import cli
from ranktape.launch.run_status import COUNTED, RunStatus, status, summary_line, verdict_line
from ranktape.storage import IterationState, IterationStatus, RunVerdict
from ranktape.storage.format.progress import ProgressCache, judge, open_iteration, read_verdict, write_verdict
from ranktape.storage.places.backend import nbytes_text
from ranktape.storage.places.local import LocalBackend
from tests.storage.whole_run import record, tensors, whole_run


def iteration_status(iteration: int, **fields: Any) -> IterationStatus:
    """An iteration of two ranks of which only rank 0 has committed anything."""
    usual: dict[str, Any] = {
        "attempt": 0,
        "state": IterationState.PARTIAL,
        "expected_ranks": [0, 1],
        "committed_ranks": [0],
        "missing": {1: "its process ended"},
        "silent_sites": {},
        "num_records": 0,
        "nbytes": 0,
    }
    return IterationStatus(iteration=iteration, **(usual | fields))


STATUSES = [
    iteration_status(
        2,
        state=IterationState.COMPLETE,
        committed_ranks=[0, 1],
        missing={},
        silent_sites={rank: {"layers.0.query grad_input": "no gradient"} for rank in (0, 1)},
        num_records=12,
        nbytes=3_000_000,
        num_expected=14,
        num_recorded=12,
        num_missing=2,
        compiled="in its graphs",
    ),
    iteration_status(4),
]

UNMET = RunVerdict(met=False, required=2, complete=[2], missing=["iteration 4 is partial (rank 1: gone)"], final=True)
MET = RunVerdict(met=True, required=1, complete=[2], missing=[], final=False)


def test_the_table_has_one_row_for_each_iteration_and_the_verdict_below() -> None:
    table = RunStatus(run="runs/x", iterations=STATUSES, verdict=UNMET).table()
    assert table.column("state") == ["complete", "partial"]
    assert table.column("committed") == [2, 1]
    assert table.column("expected") == [2, 2]
    assert table.column("size") == [3_000_000, 0]
    assert table.column("missing") == ["", "rank 1: its process ended"]
    assert table.column("tensors") == ["12 of 14", ""]
    assert table.notes == (
        COUNTED,
        "compiled code was recorded in its graphs (iterations 2)",
        "not recorded (no gradient): layers.0.query grad_input",
        "minimum not met: 1 of 2 guaranteed iterations are stored complete; iteration 4 is partial (rank 1: gone)",
    )
    assert "3 MB" in table.to_text()


def test_what_waits_for_its_commit_alone_is_told_without_empty_parentheses() -> None:
    waiting = dataclasses.replace(STATUSES[1], state=IterationState.OPEN, committed_ranks=[0, 1], missing={})
    (missing,) = RunStatus(run="x", iterations=[waiting], verdict=None).table().column("missing")
    assert missing == "every rank has committed it, its iteration commit is not written yet"
    verdict = judge([waiting], required=1, final=False)
    assert verdict.missing == [f"iteration 4 is open ({missing})"]
    message = judge([], required=0, final=True).message()
    assert message == "minimum met: 0 of 0 guaranteed iterations are stored complete"


def test_programs_get_everything_by_name() -> None:
    document = RunStatus(run="runs/x", iterations=STATUSES, verdict=UNMET).to_json()
    assert document["run"] == "runs/x"
    assert document["iterations"][1]["missing"] == {1: "its process ended"}
    assert document["iterations"][0]["silent_sites"][1] == {"layers.0.query grad_input": "no gradient"}
    assert [document["iterations"][0][name] for name in ("num_expected", "num_recorded", "num_missing")] == [14, 12, 2]
    assert document["verdict"]["missing"] == UNMET.missing


def test_a_run_without_iterations_has_a_status() -> None:
    table = RunStatus(run="runs/x", iterations=[], verdict=None).table()
    assert table.rows == ()
    assert "minimum not known" in table.to_text()
    nothing: dict[str, Any] = {"disabled": {}, "troubles": {}, "triggers": [], "verdict": None}
    empty = {"run": "runs/x", "iterations": [], **nothing}
    assert RunStatus(run="runs/x", iterations=[], verdict=None).to_json() == empty


def test_a_capture_that_failed_inside_is_told_whatever_the_verdict() -> None:
    disabled = dict.fromkeys(range(6), "capture disabled itself in iteration 3: the ring failed")
    table = RunStatus(run="x", iterations=[], verdict=MET, disabled=disabled).table()
    assert table.notes[0] == (
        "capture disabled itself in iteration 3: the ring failed (rank 0; rank 1; rank 2; rank 3; and 2 more)"
    )
    assert RunStatus(run="x", iterations=[], verdict=MET, disabled=disabled).to_json()["disabled"] == disabled


def test_an_open_run_may_still_change_its_verdict() -> None:
    assert (
        verdict_line(MET)
        == "minimum met: 1 of 1 guaranteed iterations are stored complete (2) (so far: the run is not closed)"
    )
    assert verdict_line(UNMET) == UNMET.message()


def test_many_missing_ranks_are_counted_in_text_and_all_named_in_json() -> None:
    ranks = range(10)
    many = iteration_status(0, expected_ranks=[*ranks], committed_ranks=[], missing=dict.fromkeys(ranks, "not yet"))
    (missing,) = RunStatus(run="x", iterations=[many], verdict=None).table().column("missing")
    assert missing == "rank 0: not yet; rank 1: not yet; rank 2: not yet; rank 3: not yet; and 6 more"
    assert len(RunStatus(run="x", iterations=[many], verdict=None).to_json()["iterations"][0]["missing"]) == 10


def test_what_a_run_holds_is_what_is_complete(tmp_path: Path) -> None:
    whole_run(tmp_path / "run", iterations=(0,), close=False)
    # A training that was started once more takes an iteration once more.
    backend, attempt, writers = whole_run(tmp_path / "run", iterations=(0,), close=False, restart=1)
    record(backend, attempt, writers[:1], iteration=10, finish=False)
    nbytes = sum(array.nbytes for rank in (0, 1) for array, _ in tensors(0, rank))
    assert f"run has 1 iteration of 2 ranks, {nbytes_text(nbytes)}: " in summary_line(backend, url=backend.url)


def test_a_run_is_followed_until_it_is_closed(tmp_path: Path) -> None:
    backend, attempt, writers = whole_run(tmp_path / "run", iterations=(0,), close=False)
    lines: list[str] = []

    def note(line: str) -> None:
        lines.append(line)
        if len(lines) == 1:
            record(backend, attempt, writers, iteration=10)
            write_verdict(backend, attempt=attempt)

    found = status(str(tmp_path / "run"), follow=True, interval=0.05, on_line=note)
    assert found.verdict is not None
    assert found.verdict.final
    assert [line.partition(", 12 records")[0] for line in lines] == [
        "iteration 0: complete, 2 of 2 ranks",
        "iteration 10: complete, 2 of 2 ranks",
    ]


def test_a_complete_iteration_is_read_once_by_who_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, attempt, writers = whole_run(tmp_path / "run", iterations=(0, 10), close=False)
    read: list[str] = []
    get, list_keys = LocalBackend.get, LocalBackend.list_keys

    def noted_get(self: LocalBackend, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        read.append(key)
        return get(self, key, max_nbytes=max_nbytes)

    def noted_list(self: LocalBackend, prefix: str) -> list[str]:
        read.append(f"{prefix}/")
        return list_keys(self, prefix)

    monkeypatch.setattr(LocalBackend, "get", noted_get)
    monkeypatch.setattr(LocalBackend, "list_keys", noted_list)
    seen = ProgressCache()
    first = read_verdict(backend, seen=seen)
    assert f"{attempt.path}/commits/" in read
    read.clear()
    open_iteration(backend, attempt=attempt, iteration=20)
    second = read_verdict(backend, seen=seen)
    assert [key for key in read if "/commits/iter" in key and key.endswith("/")] == [
        f"{attempt.path}/commits/iter_00000020/"
    ]
    assert not [key for key in read if "/iterations/iter" in key]
    assert first is not None
    assert second is not None
    assert second[1][:2] == first[1]
    record(backend, attempt, writers, iteration=20)
    third = read_verdict(backend, seen=seen)
    assert third is not None
    assert third == read_verdict(backend)


def test_what_is_followed_leaves_stdout_to_the_answer(tmp_path: Path) -> None:
    whole_run(tmp_path / "run")
    result = CliRunner().invoke(cli, ["status", str(tmp_path / "run"), "--follow", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["verdict"]["final"]
    assert result.stderr.count(": complete, ") == 2
