"""Every command writes with --json what its schema says (docs/schemas.py), and the schemas know all there is."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # its types are a package of their own

from ranktape.analyze.cli import COMMANDS
from ranktape.launch.cli import cli
from ranktape.storage.records.records import KNOWN_COLUMNS
from tests.analyze.runs import describe_tensor, store
from tests.kernels import load

CHECKOUT = Path(__file__).parents[1]
WAY_OUT = "add a new command or a new option to QUESTIONS in docs/schemas.py"

SCRIPT = load(CHECKOUT / "docs" / "schemas.py")


Refusals = Callable[[Any, str], list[str]]


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of every command, from what it answers about a small run."""
    made: dict[str, dict[str, Any]] = SCRIPT.schemas(SCRIPT.make_runs(tmp_path_factory.mktemp("small")))
    for schema in made.values():
        Draft202012Validator.check_schema(schema)
    return made


@pytest.fixture(scope="module")
def refusals(schemas: dict[str, dict[str, Any]]) -> Refusals:
    """What the schema of a command has against a document."""
    return lambda document, name: refused(document, schemas[name])


def refused(document: Any, schema: dict[str, Any]) -> list[str]:
    """What a schema has against a document."""
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(document)]


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Runs with all that a number can be: NaN, infinities, no element, no dimension, no fraction, several samples."""
    nan = np.array([np.nan, np.inf, -np.inf, 0.0, -1.0, 3e38, 1e-40, 2.5], dtype=np.float32)
    arrays: dict[str, Any] = {
        "hidden": np.stack([nan, nan, nan, nan]),
        "input": np.full((2, 8), np.nan, dtype=ml_dtypes.bfloat16),
        "output": np.zeros((4, 64), dtype=np.float16),
        "weight": np.zeros((0, 8), dtype=np.float32),
        "scale": np.array(np.inf, dtype=np.float64),
        "mask": np.array([True, False]),
        "index": np.arange(5, dtype=np.int64),
        "query": np.linspace(-1, 1, 256, dtype=np.float32).reshape(4, 64),
        "grad_weight": np.array([[np.nan, 1e-30, 0.0, np.inf]] * 4, dtype=ml_dtypes.bfloat16),
    }
    tensors = [
        describe_tensor(
            array,
            rank=rank,
            iteration=iteration,
            tensor_name=name,
            operation=operation,
            layer_idx=layer,
            sample_dim=0 if array.ndim > 1 and len(array) == 4 else None,
            sample_ids=list("abcd") if array.ndim > 1 and len(array) == 4 else None,
            compute_dtype="bfloat16" if name == "hidden" else array.dtype.name,
        )
        for rank in (0, 1)
        for iteration in (0, 10)
        for layer in (0, 1)
        for operation in ("forward", "backward")
        for name, array in arrays.items()
    ]
    folder = tmp_path_factory.mktemp("runs")
    urls = {name: store(folder / name, tensors).url for name in ("RUN", "OTHER")}
    return urls | {"FOLDER": SCRIPT.export_folder(urls["RUN"], folder)}


def test_any_field_of_a_record_may_be_a_column() -> None:
    assert set(SCRIPT.field_cells()) == set(KNOWN_COLUMNS)


def test_every_command_that_writes_json_has_a_schema() -> None:
    assert set(SCRIPT.QUESTIONS) | SCRIPT.NO_TABLE == set(COMMANDS), WAY_OUT
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    with_json = {
        name
        for name, command in commands.items()
        if command is not None and any("--json" in parameter.opts for parameter in command.params)
    }
    assert with_json == set(SCRIPT.other_schemas()), f"{WAY_OUT}; or to other_schemas()"


@pytest.mark.parametrize("name", SCRIPT.QUESTIONS)
def test_answers_about_a_hard_run_are_what_the_schema_says(name: str, hard: dict[str, str], refusals: Refusals) -> None:
    for words in SCRIPT.QUESTIONS[name]:
        assert refusals(SCRIPT.ask(name, words, urls=hard), name) == []


@pytest.mark.parametrize(
    "field", ["overflow.absmax", "sample_dim", "metadata", "shape", "checksum", "overflow.nan.ratio"]
)
def test_groups_by_any_field_are_what_the_schema_says(field: str, hard: dict[str, str], refusals: Refusals) -> None:
    assert refusals(SCRIPT.ask("ls", f"RUN --by {field}", urls=hard), "ls") == []


def written_columns() -> Iterator[tuple[str, str]]:
    """The columns that the sources of the questions name, each with its file; what is put in later is any text."""
    for path in sorted((CHECKOUT / "ranktape" / "analyze").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Column"):
                continue
            for name in (word.value for word in node.keywords if word.arg == "name"):
                if isinstance(name, ast.Constant):
                    yield re.escape(str(name.value)), path.name
                elif isinstance(name, ast.JoinedStr):
                    parts = (
                        re.escape(str(one.value)) if isinstance(one, ast.Constant) else ".+" for one in name.values
                    )
                    yield "".join(parts), path.name


def test_every_column_that_the_sources_name_is_in_a_schema(schemas: dict[str, dict[str, Any]]) -> None:
    known = {column for schema in schemas.values() for column in SCRIPT.columns_in(schema)}
    missing = {
        (pattern, file) for pattern, file in written_columns() if not any(re.fullmatch(pattern, one) for one in known)
    }
    assert missing == set(), WAY_OUT


def test_the_commands_beside_analyze_write_what_their_schemas_say(
    hard: dict[str, str], tmp_path: Path, refusals: Refusals
) -> None:
    run = Path(hard["RUN"])
    broken = store(tmp_path / "broken", [describe_tensor(np.zeros(4, np.float32))])
    shard = next(path for path in Path(broken.url).rglob("c.*") if path.is_file() and "rank_" in str(path))
    shard.write_bytes(shard.read_bytes()[:-1])
    (tmp_path / "rings").mkdir()
    for name, words, code in (
        ("status", [str(run)], 0),
        ("check", [str(run), "--deep"], 0),
        ("check", [broken.url, "--deep"], 3),
        ("repair", [broken.url, "--dry-run"], 3),
        ("runs", [str(run.parent)], 0),
        ("doctor", [str(tmp_path / "place")], 0),
        ("cp", [str(run), str(tmp_path / "copy")], 0),
        ("push", [str(tmp_path / "rings")], 0),
    ):
        done = CliRunner().invoke(cli, [name, *words, "--json"])
        assert done.exit_code == code, done.stderr
        document = json.loads(done.stdout)
        assert refusals(document, name) == []
        if code:
            assert document.get("findings") or document["left"]


def test_a_schema_refuses_what_the_command_does_not_write(hard: dict[str, str], refusals: Refusals) -> None:
    document = SCRIPT.ask("ls", "RUN", urls=hard)
    document["rows"][0]["nbytes"] = "many"
    document["rows"][1]["bytes"] = 3
    document["title"] = None
    assert len(refusals(document, "ls")) == 3
