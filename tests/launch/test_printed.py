"""Nothing that a stranger wrote into a store commands the terminal of who asks about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ranktape.launch.cli import cli
from ranktape.storage.format.layout import Mark
from tests.storage.whole_run import whole_run

EVIL = "\x1b]0;owned\x07"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a terminal's commands in the names of objects and in what documents say."""
    path = tmp_path_factory.mktemp("printed") / "run"
    _, attempt, writers = whole_run(str(path), iterations=(0,), close=False)
    writers[0].mark(7, mark=Mark.FAILED, attributes={"reason": EVIL})
    writers[0].close(reason=EVIL)
    for place in (path, path / attempt.path, path / attempt.path / "rank_00000" / "iter_00000000"):
        (place / f"{EVIL}.partial").write_text("x")
        (place / EVIL).write_text("x")
    (path.parent / EVIL).mkdir()
    (path.parent / EVIL / "zarr.json").write_text('"ranktape"')
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["check", "RUN"],
        ["check", "RUN", "--deep", "--json"],
        ["repair", "RUN", "--dry-run", "--min-age", "0"],
        ["status", "RUN"],
        ["runs", "PLACE"],
        ["cp", "RUN", "TARGET"],
        ["cp", "RUN", "TARGET", "--json"],
        ["analyze", "ls", "RUN"],
        ["export", "RUN", "FOLDER"],
        ["import", "PLACE", "IMPORTED"],
    ],
    ids=" ".join,
)
def test_what_a_stranger_wrote_does_not_command_the_terminal(hostile: Path, tmp_path: Path, words: list[str]) -> None:
    places = {"RUN": hostile, "PLACE": hostile.parent} | {
        name: tmp_path / name for name in ("TARGET", "FOLDER", "IMPORTED")
    }
    answer = CliRunner().invoke(cli, [str(places.get(word, word)) for word in words])
    assert answer.exception is None or isinstance(answer.exception, SystemExit), answer.exception
    assert not {letter for letter in answer.output if not letter.isprintable()} - {"\n"}, answer.output
    if "--json" in words:
        json.loads(answer.stdout)
    if words[0] in {"check", "repair", "runs", "status"}:
        assert "owned" in answer.output
