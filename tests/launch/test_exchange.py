"""Do `ranktape export`, `ranktape import` and folders in place of runs answer as every other command does?"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from ranktape.analyze.cli import cli as analyze
from ranktape.analyze.group import RanktapeGroup
from ranktape.storage import open_run
from tests.analyze.pt_files import legacy_file, save
from tests.analyze.runs import model_tensors, store

COMMANDS = {name: f"ranktape.launch.exchange:{name}_command" for name in ("export", "import")}


def invoke(*words: str | Path) -> Result:
    """A command in this process; what it did not expect to happen is raised."""
    group = RanktapeGroup("ranktape", lazy=COMMANDS)
    group.add_command(analyze)
    return CliRunner().invoke(group, list(map(str, words)), catch_exceptions=False)


def answer(*words: str | Path) -> str:
    """What a command that must succeed without a complaint wrote to stdout."""
    result = invoke(*words)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def complaint(*words: str | Path, code: int) -> str:
    """The one line of a command that must fail."""
    result = invoke(*words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.count("\n") == 1
    return result.stderr.strip()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Files of two iterations of one rank."""
    for iteration in (0, 1):
        for counter, name in enumerate(("input", "weight")):
            legacy_file(tmp_path / "files", torch.randn(4, 8), iteration=iteration, counter=counter, tensor_name=name)
    return tmp_path / "files"


def test_a_run_goes_out_and_comes_back(tmp_path: Path) -> None:
    run = store(tmp_path / "run", model_tensors(num_layers=1))
    told = answer("export", run.url, tmp_path / "files", "--layer-type", "linear", "--operation", "forward")
    assert told == f"3 files written to {tmp_path / 'files'}, 1.536 kB of values\n"
    again = answer("export", run.url, tmp_path / "files", "--layer-type", "linear", "--operation", "forward")
    assert again.endswith("0 B of values; 3 were already there\n")
    told = answer("import", tmp_path / "files", tmp_path / "again")
    assert told.startswith(f"3 tensors stored in {tmp_path / 'again'}, 1.536 kB; minimum met: 1 of 1")
    assert answer("import", tmp_path / "files", tmp_path / "again").startswith("everything was already stored; minimum")
    assert len(open_run(tmp_path / "again").select()) == 3


def test_every_analyze_command_takes_a_folder(files: Path, tmp_path: Path) -> None:
    rows = json.loads(answer("analyze", "ls", files, "--json"))["rows"]
    assert len(rows) == 4
    assert len(json.loads(answer("analyze", "overflow", files, "--iteration", "1", "--json"))["rows"]) == 2
    assert len(json.loads(answer("analyze", "sweep", files, "--tensor-name", "weight", "--json"))["rows"]) == 2
    plot = tmp_path / "plot.png"
    result = invoke("analyze", "plot", files, "--format", "fp4_e2m1", "-o", plot)
    assert (result.exit_code, result.stdout) == (0, f"{plot}\n")
    one = next(files.iterdir())
    assert len(json.loads(answer("analyze", "sweep", one, "--json"))["rows"]) == 1


def test_what_is_left_out_is_named_on_stderr(files: Path, tmp_path: Path) -> None:
    broken = next(files.iterdir())
    broken.write_bytes(b"nothing")
    save(files / "model.pt", torch.zeros(1))
    result = invoke("analyze", "ls", files)
    assert result.exit_code == 1
    assert "model.pt" in result.stderr.splitlines()[0]
    assert result.stderr.splitlines()[1].startswith(f"Error: {broken} was not written by torch.save")
    result = invoke("analyze", "ls", files, "--skip-unreadable", "--json")
    assert (result.exit_code, len(json.loads(result.stdout)["rows"])) == (0, 3)
    assert broken.name in result.stderr
    assert "have unknown names" in complaint("import", files, tmp_path / "run", code=1)
    result = invoke("import", files, tmp_path / "run", "--skip-unreadable")
    assert result.exit_code == 0
    assert result.stdout.startswith("3 tensors stored")
    assert result.stderr.count("left out: ") == 2


def test_mistakes_are_one_line(files: Path, tmp_path: Path) -> None:
    assert "there is nothing at" in complaint("import", tmp_path / "nowhere", tmp_path / "run", code=1)
    answer("import", files, tmp_path / "run")
    legacy_file(files, torch.zeros(2), iteration=5)
    assert complaint("import", files, tmp_path / "run", code=1).endswith(
        "add --overwrite to delete it, or choose another URL"
    )
    assert answer("import", files, tmp_path / "run", "--overwrite").startswith("5 tensors stored")
    assert "no records match --rank 3" in complaint("export", tmp_path / "run", tmp_path / "out", "--rank", "3", code=1)
    high = legacy_file(files, torch.zeros(2), rank=99_999)
    assert f"{high.name} has rank 99999" in complaint("import", files, tmp_path / "high", code=2)
    assert "far above" in invoke("import", files, tmp_path / "high", "--skip-unreadable").stderr
    assert "is not a path" in complaint("analyze", "ls", "x" * 5000, code=2)
    assert "is not a path" in complaint("import", "x" * 5000, tmp_path / "long", code=2)
    assert "is the output of an embedding" in complaint(
        "export", tmp_path / "run", tmp_path / "out", "--form", "layers", code=1
    )
    os.truncate(next((tmp_path / "run").rglob("c.*")), 3)
    assert "Error: " in complaint("export", tmp_path / "run", tmp_path / "out2", code=1)
    assert "no complete iteration" not in complaint("analyze", "ls", tmp_path / "nowhere", code=1)


def test_a_folder_without_a_readable_file_says_so(tmp_path: Path) -> None:
    legacy_file(tmp_path / "files", torch.zeros(2)).write_bytes(b"")
    result = invoke("analyze", "ls", tmp_path / "files", "--skip-unreadable")
    assert result.exit_code == 1
    assert "has no file that can be read" in result.stderr
