"""`--check` fails for the rows of which an expression is false, passes what is missing, and names wrong columns."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

from ranktape.analyze import overflow, stats, sweep
from ranktape.analyze.cli import cli
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import UsageError
from ranktape.storage import Run
from tests.analyze.runs import describe_tensor, model_tensors, store

TABLE = Table(
    title="",
    columns=(
        Column(name="name", kind=Kind.TEXT),
        Column(name="count", kind=Kind.INTEGER),
        Column(name="overflow.ratio", kind=Kind.RATIO),
        Column(name="ranks", kind=Kind.LIST),
    ),
    rows=(
        ("one", 2**53 + 1, 0.5, [0, 1]),
        ("two", None, float("nan"), []),
        ("three", 3, None, None),
        (None, 4, float("inf"), [2]),
    ),
)


def test_the_rows_of_which_it_is_false_fail() -> None:
    cases: list[tuple[str, list[str | None]]] = [
        ("count > 3", ["three"]),
        ("count < 3", ["one", "three", None]),
        ("overflow.ratio < 0.4", ["one", None]),
        # Where one side is missing the other one decides.
        ("overflow.ratio < 0.4 and count > 3", ["one", "three", None]),
        ("overflow.ratio < 0.4 or count > 3", []),
        ("not overflow.ratio < 0.4", []),
        ("overflow.ratio is not None", ["two", "three"]),
        ("name in ['one', 'two']", ["three"]),
        ("like(name, 't*')", ["one"]),
        ("ranks != '[0, 1]'", ["one"]),
        ("name == 'one' or ranks == '[2]'", ["two"]),
    ]
    for expression, failed in cases:
        found = TABLE.check(expression)
        assert found.column("name") == failed
        assert found.notes[-1].startswith(f"check {expression}: {len(failed)} of 4 rows fail, {4 - len(failed)} pass")


def test_whole_numbers_are_compared_exactly() -> None:
    whole = Table(title="", columns=TABLE.columns[1:2], rows=((2**53 + 1,), (2**53,)))
    assert whole.check(f"count == {2**53}").rows == ((2**53 + 1,),)
    assert TABLE.check("count > 0").notes[-1].endswith(", 1 of them because a value is missing")


def test_mistakes_are_named() -> None:
    cases: list[tuple[str, str]] = [
        ("overflw.ratio < 1", r"--check: the table has no column 'overflw.ratio': did you mean overflow.ratio\?"),
        ("name < 1", "name holds text and 1 is a number"),
        ("count == 'a'", "count"),
        ("count = 1", "write =="),
        ("__import__('os')", "expected a comparison"),
    ]
    for expression, message in cases:
        with pytest.raises(UsageError, match=message):
            TABLE.check(expression)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two layers, two ranks; of rank 1, layer 1 one output with 12 infinities, one gradient that underflows."""
    tensors = []
    for given, info in model_tensors(num_ranks=2):
        array = given.copy()
        place = (info.rank, info.layer_idx, info.layer_type, info.tensor_name)
        if place == (1, 1, "linear", "output"):
            array.reshape(-1)[:12] = np.inf
        if place == (1, 1, "attention", "grad_query"):
            array = (array.astype(np.float32) * np.float32(2.0**-108)).astype(ml_dtypes.bfloat16)
        fields = {name: getattr(info, name) for name in ("rank", "layer_idx", "layer_type", "operation", "phase")}
        tensors.append(describe_tensor(array, tensor_name=info.tensor_name, **fields))
    return store(tmp_path_factory.mktemp("run"), tensors)


def ask(run: Run, command: str, *words: str) -> Result:
    url = str(run.url).removeprefix("file://")
    return CliRunner().invoke(cli, [command, url, *words], catch_exceptions=False)


def test_what_was_planted_fails(run: Run) -> None:
    (infinite,) = overflow(run.select()).check("overflow.total == 0").records()
    assert (infinite["rank"], infinite["layer_idx"], infinite["tensor_name"]) == (1, 1, "output")
    assert infinite["overflow.total"] == 12
    (small,) = overflow(run.select(tensor_name="grad*")).check("overflow.underflow.ratio < 0.001").records()
    assert (small["rank"], small["tensor_name"]) == (1, "grad_query")
    by_layer = stats(run.select(), by=["layer_idx"], metric=["overflow.total"]).check("overflow.total == 0")
    assert by_layer.column("layer_idx") == [1]
    done = ask(run, "findings", "--check", "severity != 'high'", "--json")
    assert done.exit_code == 3
    assert {row["severity"] for row in json.loads(done.stdout)["rows"]} == {"high"}


def test_the_exit_code_and_every_form(run: Run, tmp_path: Path) -> None:
    passed = ask(run, "overflow", "--check", "overflow.nan.count == 0")
    assert (passed.exit_code, passed.stderr) == (0, "")
    assert "check overflow.nan.count == 0: 0 of " in passed.stdout
    words = ("--check", "overflow.total == 0")
    text = ask(run, "overflow", *words)
    assert text.exit_code == 3
    assert text.stderr == f"Error: 1 of {len(run.select())} rows fail --check 'overflow.total == 0'\n"
    (row,) = csv.DictReader(io.StringIO(ask(run, "overflow", *words, "--csv").stdout))
    assert row["overflow.total"] == "12"
    file = tmp_path / "failed.json"
    assert ask(run, "overflow", *words, "-o", str(file)).exit_code == 3
    assert [row["overflow.total"] for row in json.loads(file.read_text())["rows"]] == [12]
    wrong = ask(run, "overflow", "--check", "overflow.totl == 0")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "did you mean overflow.total?" in wrong.stderr


def test_all_rows_that_fail_are_written(run: Run) -> None:
    """A limit hides rows and not failures."""
    done = ask(run, "stats", "--check", "elements < 0", "--limit", "2", "--json")
    assert done.exit_code == 3
    document = json.loads(done.stdout)
    assert len(document["rows"]) == 2
    assert f"the first 2 of {len(run.select())} rows" in document["notes"]


def test_what_a_format_holds_exactly_fails_no_limit(tmp_path: Path) -> None:
    """A tensor of zeros, as an expert without tokens has, is whole in any format; of NaN alone nothing is known."""
    zeros = np.zeros((4, 32), dtype=np.float32)
    tensors = [describe_tensor(zeros), describe_tensor(zeros * np.nan, layer_idx=1)]
    for format_name in ("mxfp8", "fp8_e4m3", "nvfp4"):
        table = sweep(store(tmp_path / format_name, tensors).select(), format=format_name)
        assert not table.check("sqnr > 20 and cosine > 0.9 and mse < 1e-9").rows
        assert len(table.check("sqnr is not None").rows) >= 1


def test_copies_that_differ_fail(tmp_path: Path) -> None:
    mesh = {"axes": ["dp"], "shape": [4], "ranks": [0, 1, 2, 3]}
    tensors = []
    for rank in range(4):
        array = np.ones((4, 4), dtype=np.float32)
        array.view(np.uint32)[2, 2] ^= rank == 2
        placement: dict[str, Any] = {"mesh": mesh, "coordinates": [rank], "placements": ["replicate"]}
        placement |= {"global_shape": [4, 4], "offset": [0, 0], "partial": False}
        tensors.append(describe_tensor(array, rank=rank, placement=placement, tensor_name="weight"))
    done = ask(store(tmp_path, tensors), "findings", "--check", "kind != 'replica_differs'", "--json")
    assert done.exit_code == 3
    assert [row["ranks"] for row in json.loads(done.stdout)["rows"]] == [[2]]
