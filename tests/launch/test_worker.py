"""Does a process know its place in the launch, and say why it fails where torchrun and people look?"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ranktape.launch.worker import HEAD_START_SECONDS, Worker


def test_without_torchrun_a_process_is_alone_on_its_last_attempt() -> None:
    worker = Worker.from_environment({})
    assert worker == Worker(rank=0, restart_count=0, max_restarts=0, error_file=None)
    assert worker.is_last_attempt


@pytest.mark.parametrize(("restart_count", "is_last"), [(0, False), (1, False), (2, True)])
def test_the_last_attempt_is_the_one_after_which_torchrun_gives_up(restart_count: int, is_last: bool) -> None:  # noqa: FBT001
    names = {"RANK": "3", "TORCHELASTIC_RESTART_COUNT": str(restart_count), "TORCHELASTIC_MAX_RESTARTS": "2"}
    worker = Worker.from_environment(names)
    assert worker.rank == 3
    assert worker.is_last_attempt is is_last


def test_a_report_is_one_line_and_torchrun_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "error.json"
    Worker.from_environment({"TORCHELASTIC_ERROR_FILE": str(path)}).report("no room:\n  give\tmore")
    captured = capsys.readouterr()
    assert captured.err == "ranktape: error: no room: give more\n"
    assert captured.out == ""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert "traceback : no room: give more\n" in str(ChildFailedError("train", {0: failure}))
    assert abs(failure.timestamp - time.time()) < 60
    assert json.loads(path.read_text())["message"]["message"] == "no room: give more"


def test_an_error_file_that_cannot_be_written_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing" / "error.json"
    Worker.from_environment({"TORCHELASTIC_ERROR_FILE": str(missing)}).report("no room")
    assert capsys.readouterr().err == "ranktape: error: no room\n"


def test_other_ranks_leave_the_word_to_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    worker = Worker.from_environment({"RANK": "2"})
    started = time.monotonic()
    worker.report("only here")
    assert time.monotonic() - started >= HEAD_START_SECONDS
    assert capsys.readouterr().err == "ranktape: error: [rank 2] only here\n"
    worker.say("everywhere")
    assert capsys.readouterr().err == ""
    Worker.from_environment({}).say("everywhere")
    assert capsys.readouterr().err == "ranktape: everywhere\n"
