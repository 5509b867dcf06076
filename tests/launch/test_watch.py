"""Does a watch show what comes in, and end as a script needs it?"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from ranktape.analyze.questions.findings import findings
from ranktape.errors import CheckFoundError, RunNotFoundError
from ranktape.launch.cli import cli
from ranktape.launch.watching import WatchView, _moving_table, _ranks_text, finding_lines, lines, watch
from ranktape.storage import open_run
from ranktape.storage.format.progress import write_verdict
from ranktape.storage.maintenance.watch import RankWatch, Snapshot
from tests.analyze.faulty_runs import Sizes, everywhere, faulty_run
from tests.storage.whole_run import record, whole_run

FAST = 0.05


def invoke(*words: object) -> Result:
    """A command in this process; what it did not expect to happen is raised."""
    return CliRunner().invoke(cli, ["watch", *map(str, words), "--interval", str(FAST)], catch_exceptions=False)


def meanwhile(action: Callable[[], object], *, after_seconds: float = 0.3) -> threading.Thread:
    """Do something while the test goes on."""

    def work() -> None:
        time.sleep(after_seconds)
        action()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def snapshot(**fields: object) -> Snapshot:
    """A run of four ranks, of which two iterations of three are there."""
    values: dict[str, object] = {
        "seconds": 10.0,
        "attempt": 0,
        "ranks": tuple(
            RankWatch(
                rank=rank, iterations=(0, 10), num_records=8, nbytes=4_000_000, num_lost=int(rank == 3), is_closed=False
            )
            for rank in range(4)
        ),
        "waiting": {20: (0, 1, 3)},
        "complete": (0, 10),
        "required": 3,
        "num_records": 32,
        "nbytes": 20_000_000,
        "is_closed": False,
    }
    return Snapshot(**(values | fields))  # type: ignore[arg-type]  # as the tests name them


def test_a_closed_run_is_shown_and_ends_the_watch(tmp_path: Path) -> None:
    whole_run(str(tmp_path / "run"))
    result = invoke(tmp_path / "run")
    assert (result.exit_code, result.stderr) == (0, "")
    first, *middle, last = result.stdout.splitlines()
    assert first == "attempt 0: 2 ranks, 1 iteration guaranteed"
    assert middle == ["iteration 0: complete", "iteration 10: complete"]
    assert last.startswith("2 of 1 guaranteed iterations complete; 24 records, ")
    assert last.endswith("; closed")


def test_a_script_waits_until_the_minimum_is_there(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    backend, attempt, writers = whole_run(url, iterations=(0,), close=False, min_iterations=2)
    thread = meanwhile(lambda: record(backend, attempt, writers, iteration=10))
    result = invoke(url, "--until-complete", "--timeout", 60)
    thread.join()
    assert watch(url, until_complete=True).complete == (0, 10)
    assert result.exit_code == 0
    assert "iteration 10: complete\n2 of 2 guaranteed iterations complete; 24 records, " in result.stdout


def test_a_script_waits_for_records_of_a_run_that_is_not_there_yet(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    thread = meanwhile(lambda: whole_run(url, close=False))
    result = invoke(url, "--min-records", 24, "--timeout", 60)
    thread.join()
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--until-complete",), "after 0.2 s 1 of 2 guaranteed iterations are complete"),
        (("--min-records", "13"), "after 0.2 s 12 of 13 records are in complete iterations"),
        ((), "after 0.2 s the run is not closed"),
    ],
)
def test_the_time_can_be_up(tmp_path: Path, words: tuple[str, ...], match: str) -> None:
    url = str(tmp_path / "run")
    whole_run(url, iterations=(0,), close=False, min_iterations=2)
    result = invoke(url, *words, "--timeout", 0.2)
    assert result.exit_code == 3
    assert result.stderr == f"Error: {match} ({url})\n"


def test_a_run_that_never_appears_is_told(tmp_path: Path) -> None:
    result = invoke(tmp_path / "run", "--timeout", 0.1)
    assert result.exit_code == 3
    assert "after 0.1 s no attempt has begun" in result.stderr
    with pytest.raises(RunNotFoundError):
        watch(tmp_path / "run", interval=FAST)


def test_a_run_that_closes_without_its_minimum_ends_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranktape.launch.watching.RESTART_SECONDS", 0.2)
    backend, attempt, _ = whole_run(str(tmp_path / "run"), iterations=(0,), close=False, min_iterations=2)
    write_verdict(backend, attempt=attempt)
    shown: list[WatchView] = []
    with pytest.raises(CheckFoundError, match=r"is closed, and 1 of 2 guaranteed iterations are complete$"):
        watch(tmp_path / "run", until_complete=True, timeout=60, interval=FAST, on_look=shown.append)
    # A restarted worker group has a while to take it up again.
    assert len(shown) > 1


def test_only_changes_are_lines() -> None:
    before = snapshot(waiting={20: (0,)}, complete=(0,))
    now = snapshot(seconds=12.0)
    view = WatchView(snapshot=now, rate=1_500_000.0)
    assert lines(view, before=before) == [
        "iteration 20: committed by ranks 0-1, 3 (3 of 4)",
        "iteration 10: complete",
        "2 of 3 guaranteed iterations complete; 32 records, 20 MB, 1.5 MB/s",
    ]
    assert lines(view, before=now) == []
    assert lines(WatchView(snapshot=snapshot(is_closed=True)), before=now)[-1].endswith("; closed")
    assert (
        lines(WatchView(snapshot=snapshot(attempt=1)), before=now)[0] == "attempt 1: 4 ranks, 3 iterations guaranteed"
    )


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((), "no rank"), ((4,), "rank 4"), ((0, 1, 2, 5, 7, 8), "ranks 0-2, 5, 7-8")],
)
def test_ranks_are_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert _ranks_text(ranks) == text


def test_a_terminal_gets_a_table() -> None:
    written = io.StringIO()
    console = Console(file=written, width=100)
    console.print(
        _moving_table(WatchView(snapshot=snapshot(), rates={1: 2_000_000.0}, rate=2_000_000.0), title="runs/x")
    )
    table = written.getvalue()
    assert "runs/x" in table
    assert [line.split()[:4] for line in table.splitlines()[2:6]] == [[str(rank), "2", "10", "8"] for rank in range(4)]
    assert "2 MB/s" in table
    assert "1 iteration lost" in table
    assert "not complete: 20 (3 of 4 ranks)" in table
    many = tuple(
        RankWatch(rank=rank, iterations=(), num_records=0, nbytes=0, num_lost=0, is_closed=True) for rank in range(99)
    )
    console.print(_moving_table(WatchView(snapshot=snapshot(ranks=many)), title="runs/x"))
    assert "and 59 more ranks" in written.getvalue()


def test_the_table_moves_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_run(str(tmp_path / "run"))

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    cli.main(["watch", str(tmp_path / "run")], standalone_mode=False)
    assert "committed" in screen.getvalue()
    assert "2 of 1 guaranteed iterations complete" in screen.getvalue()


def test_what_stands_out_is_said_when_an_iteration_is_complete(tmp_path: Path) -> None:
    run = faulty_run(tmp_path / "run", everywhere(1, factor=2.0**9), sizes=Sizes(num_layers=4))
    views: list[WatchView] = []
    watch(run.url, until_complete=True, findings=True, on_look=views.append)
    expected = findings(run.select())
    assert views[-1].findings == expected
    told = finding_lines(expected, before=None)
    assert told[0].startswith(f"finding, {expected.column('severity')[0]}: {expected.column('title')[0]}; next: ")
    assert told[-1] == expected.title
    assert finding_lines(expected, before=findings(run.select(iteration=0))) == []
    shown = Console(file=io.StringIO(), width=60, height=40)
    shown.print(_moving_table(views[-1], title="run"))
    assert isinstance(shown.file, io.StringIO)
    assert max(map(len, shown.file.getvalue().splitlines())) <= 60
    assert expected.title in shown.file.getvalue()
    without: list[WatchView] = []
    watch(run.url, until_complete=True, on_look=without.append)
    assert without[-1].findings is None


def test_a_run_whose_iterations_come_is_looked_at_again(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    backend, attempt, writers = whole_run(url, iterations=(0,), close=False, min_iterations=2)
    thread = meanwhile(lambda: record(backend, attempt, writers, iteration=10), after_seconds=1.0)
    result = invoke(url, "--findings", "--until-complete", "--timeout", 60)
    thread.join()
    assert result.exit_code == 0
    verdicts = [line for line in result.stdout.splitlines() if line.endswith(".") or "stand" in line]
    assert verdicts[-1] == findings(open_run(url).select()).title
