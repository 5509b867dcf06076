"""Every table about files names the file of each row, and none about a run does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ranktape.analyze import compare, ls, overflow, stats, sweep, trace
from ranktape.analyze.cli import cli
from ranktape.analyze.legacy import import_folder, open_folder
from ranktape.analyze.table import Table
from ranktape.storage import Records, open_run
from tests.analyze.pt_files import legacy_file, save

TABLES: dict[str, Callable[[Records], Table]] = {
    "ls": ls,
    "stats": stats,
    "stats --per-sample": lambda records: stats(records, per_sample=True),
    "stats --neighbours": lambda records: stats(records, neighbours=True),
    "trace": trace,
    "trace --sample": lambda records: trace(records, sample=0),
    "overflow": overflow,
    "overflow --per-sample": lambda records: overflow(records, per_sample=True),
    "sweep": lambda records: sweep(records, format="fp8_e4m3"),
    "sweep --levels": lambda records: sweep(records, format="fp8_e4m3", with_levels=True),
    "compare": lambda records: compare(records, records),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two layers of one sample each."""
    for layer in (0, 1):
        legacy_file(tmp_path / "files", torch.randn(4, 8), layer_idx=layer, counter=layer, sample_idx=0)
    return tmp_path / "files"


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_rows_about_files_name_them(folder: Path, tmp_path: Path, make: Callable[[Records], Table]) -> None:
    files = make(open_folder(folder).select())
    named = {path.name: int(path.name.split("_L")[1][0]) for path in folder.iterdir()}
    assert files.rows
    for row in files.records():
        assert named[row["file"]] == row["layer_idx"]
    assert ".pt" not in files.to_text()
    assert ".pt" in files.to_text(wide=True)
    import_folder(open_folder(folder), str(tmp_path / "run"))
    run = make(open_run(tmp_path / "run").select())
    assert {column.name for column in files.columns} - {column.name for column in run.columns} <= {"file", "b.file"}
    assert "file" not in {column.name for column in run.columns}


def test_either_side_of_a_comparison_may_be_files(folder: Path, tmp_path: Path) -> None:
    import_folder(open_folder(folder), str(tmp_path / "run"))
    run, files = open_run(tmp_path / "run").select(), open_folder(folder).select()
    names = files.column("site").tolist()
    assert compare(files, run).column("file") == names
    table = compare(run, files)
    assert table.column("b.file") == names
    assert "file" not in {column.name for column in table.columns}


def test_where_overflow_begins_the_file_is_named(folder: Path) -> None:
    path = legacy_file(folder, torch.tensor([1.0, float("inf")]), layer_idx=1, counter=9)
    rows = overflow(open_folder(folder).select(), first=True).records()
    assert [row["first.file"] for row in rows if row["affected"]] == [path.name]


def answer(*words: str | Path) -> Any:
    """The document of a command."""
    result = CliRunner().invoke(cli, [*map(str, words), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_files_and_a_run_are_swept_together(folder: Path, tmp_path: Path) -> None:
    import_folder(open_folder(folder), str(tmp_path / "run"))
    rows = answer("sweep", tmp_path / "run", folder, "--format", "fp8_e4m3")["rows"]
    assert [row["file"] for row in rows] == [None, None, *open_folder(folder).select().column("site").tolist()]


def test_a_file_of_any_name_is_named(tmp_path: Path) -> None:
    save(tmp_path / "tensör.pt", torch.randn(2, 4))
    assert [row["file"] for row in answer("sweep", tmp_path, "--format", "fp8_e4m3")["rows"]] == ["tens%C3%B6r.pt"]


def test_the_list_says_how_to_see_the_files(folder: Path) -> None:
    result = CliRunner().invoke(cli, ["ls", str(folder)])
    assert "2 records, 256 B; --wide names the file of each" in result.stdout
    assert ".pt" not in result.stdout


def test_a_frame_has_the_files(folder: Path) -> None:
    pytest.importorskip("pandas")
    records = open_folder(folder).select(layer_idx=1)
    frame = records.to_pandas()
    assert frame["file"].tolist() == records.column("site").tolist()
    assert str(frame["file"].dtype) == "string"
    assert ls(records).to_pandas()["file"].tolist() == frame["file"].tolist()
