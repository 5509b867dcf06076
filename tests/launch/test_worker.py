"""A process of a launch knows its place, and says why it fails where torchrun and people look."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ranktape.launch.worker import HEAD_START_SECONDS, global_rank, report, restarts, say


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun."""
    for name in ("RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_a_process_is_alone_on_its_last_attempt() -> None:
    assert (global_rank(), restarts()) == (0, (0, 0))


@pytest.mark.parametrize(("done", "left"), [(0, 2), (1, 1), (2, 0)])
def test_the_last_attempt_is_the_one_after_which_torchrun_gives_up(
    done: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(done))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert (global_rank(), restarts()) == (3, (done, left))


def test_a_report_is_one_line_and_torchrun_prints_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    report("no room:\n  give\tmore")
    captured = capsys.readouterr()
    assert captured.err == "ranktape: error: no room: give more\n"
    assert captured.out == ""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert "traceback : no room: give more\n" in str(ChildFailedError("train", {0: failure}))
    assert abs(failure.timestamp - time.time()) < 60
    assert json.loads(path.read_text())["message"]["message"] == "no room: give more"


def test_an_error_file_that_cannot_be_written_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    report("no room")
    assert capsys.readouterr().err == "ranktape: error: no room\n"


def test_other_ranks_leave_the_word_to_rank_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    started = time.monotonic()
    report("only here")
    assert time.monotonic() - started >= HEAD_START_SECONDS
    assert capsys.readouterr().err == "ranktape: error: [rank 2] only here\n"
    say("everywhere")
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("RANK")
    say("everywhere")
    assert capsys.readouterr().err == "ranktape: everywhere\n"
