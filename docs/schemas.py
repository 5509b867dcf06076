"""Writes a JSON Schema for what each command writes with --json: schemas.py FOLDER (`make docs`).

The columns of `ranktape analyze` are those of its answers about a small run, with every option that adds columns
(`QUESTIONS`); the other documents are the fields of the dataclasses that they are made from. Tests compare what the
commands answer about other runs with these schemas.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import itertools
import json
import re
import sys
import tempfile
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from ranktape.analyze.cli import cli as analyze
from ranktape.analyze.engine.metrics import METRICS
from ranktape.analyze.legacy import export_records
from ranktape.analyze.table import Kind
from ranktape.fields import FieldKind
from ranktape.launch.control import ControlReply
from ranktape.launch.maintain import MachineFinding
from ranktape.storage import open_run
from ranktape.storage.format.live import Trigger
from ranktape.storage.format.progress import IterationStatus, RunVerdict
from ranktape.storage.maintenance.copy import CopyReport, PushReport, SelectionReport
from ranktape.storage.maintenance.finding import CheckFinding
from ranktape.storage.maintenance.prune import PruneReport
from ranktape.storage.maintenance.runs import RunSummary
from ranktape.storage.records.records import KNOWN_COLUMNS
from tests.analyze.runs import Tensor, describe_tensor, model_tensors, store

DIALECT = "https://json-schema.org/draft/2020-12/schema"

QUESTIONS: dict[str, tuple[str, ...]] = {
    "ls": ("RUN", "RUN --by rank", "FOLDER", "RUN OTHER"),
    "overflow": (
        "RUN",
        "RUN --by rank",
        "RUN --format fp8_e4m3",
        "RUN --format fp8_e4m3,fp16 --scaling none,tensor --by rank",
        "RUN --format mxfp8 --scaling block --by rank",
        "RUN --first",
        "RUN OTHER --first",
        "RUN --format fp8_e4m3 --first --by layer_type",
        "RUN --per-sample --format fp8_e4m3",
        "RUN --by sample --format fp8_e4m3",
        "FOLDER --per-sample",
        "FOLDER --first",
    ),
    "stats": (
        "RUN",
        "RUN --metric METRICS,p37.5",
        "RUN --by rank",
        "RUN --neighbours",
        "RUN --neighbours --by rank",
        "RUN --per-sample",
        "RUN --by sample",
        "FOLDER",
        "FOLDER --neighbours",
        "RUN OTHER",
        "RUN FOLDER --neighbours",
    ),
    "distribution": (
        *(f"RUN --kind {kind}" for kind in ("linear", "normalised", "log2", "exponents", "formats", "normal", "qq")),
        "RUN --kind formats --by rank",
        "RUN --kind linear --by rank",
        "RUN OTHER --kind formats",
    ),
    "sweep": (
        "RUN --format fp8_e4m3 --rank 0",
        "RUN --format mxfp8,mxfp4 --rank 0",
        "RUN OTHER --format fp8_e4m3 --sweep-mode legacy --rank 0",
        "RUN --format fp8_e4m3 --levels --rank 0",
        "RUN --format mxfp8,mxfp4 --by layer_type --rank 0",
        "RUN --format fp8_e4m3 --by sample --rank 0",
        "RUN FOLDER --format fp8_e4m3 --rank 0",
    ),
    "findings": ("RUN", "RUN OTHER", "RUN --channels --severity medium", "FOLDER"),
    "trend": (
        "RUN",
        "RUN --metric METRICS,p37.5 --by layer_type",
        "RUN --summary",
        "RUN --summary --by rank",
        "RUN OTHER",
    ),
    "trace": ("RUN", "RUN --metric METRICS,p37.5", "RUN --sample b", "FOLDER", "RUN OTHER"),
    "replay": ("RUN --rank 0", "RUN --rank 0 --by rank", "RUN --rank 0 --show unreplayable", "RUN --target-sqnr 18"),
    "compare": (
        "RUN OTHER",
        "RUN OTHER --by layer_type",
        "RUN OTHER --noise OTHER --in-order",
        "RUN --neighbours --allow-unmatched",
        "RUN --pair rank=0:1 --no-distances --allow-unmatched",
        "FOLDER OTHER --allow-unmatched --iteration 0",
        "OTHER FOLDER --allow-unmatched --iteration 0",
    ),
}
"""For each command that writes a table: what is asked, so that every column it can have is in one of the answers."""

NO_TABLE = {"plot", "report"}
"""Commands of `ranktape analyze` that write no JSON."""

NAMED = {"Trigger": Trigger}
"""Types of fields that their modules import for type checkers alone."""

PERCENTILE = r"p\d+(\.\d+)?"
ANY_NAME: dict[str, str] = {
    "stats": PERCENTILE,
    "trace": PERCENTILE,
    "trend": rf"{PERCENTILE}(\.change|\.binades)?",
}
"""Columns of real numbers whose names say what was asked for, one of many: a percentile, a format."""

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}

REAL: Schema = {"anyOf": [{"type": ["number", "null"]}, {"enum": ["nan", "inf", "-inf"]}]}
"""A real number: JSON has neither NaN nor infinities, and null is a missing one."""

CELLS: dict[str, Schema] = {
    Kind.TEXT: {"type": ["string", "null"]},
    Kind.INTEGER: {"type": ["integer", "null"]},
    Kind.FLOAT: REAL,
    Kind.RATIO: REAL,
    Kind.BAR: REAL,
    Kind.COSINE: REAL,
    Kind.NBYTES: {"type": ["integer", "null"]},
    Kind.LIST: {"type": ["array", "null"]},
}
"""What a field of a row holds, by the kind of its column."""


def field_cells() -> dict[str, Schema]:
    """What a field of a row holds that is a field of records: those that `--by` takes, all of them."""
    whole = {FieldKind.INTEGER, FieldKind.OPTIONAL_INTEGER, FieldKind.CHECKSUM}
    texts = {FieldKind.TEXT, FieldKind.JSON}
    cells = {
        name: CELLS[Kind.INTEGER] if kind in whole else CELLS[Kind.TEXT] if kind in texts else REAL
        for name, kind in KNOWN_COLUMNS.items()
    }
    return cells | {"shape": CELLS[Kind.LIST]}


def make_runs(folder: Path) -> dict[str, str]:
    """Two runs of two ranks and two iterations, and the first as files, by their words in `QUESTIONS`."""
    urls = {}
    for seed, name in enumerate(("RUN", "OTHER")):
        sampled: list[Tensor] = [
            describe_tensor(
                np.random.default_rng([seed, rank, layer]).normal(size=(4, 32)).astype(np.float32),
                iteration=iteration,
                rank=rank,
                layer_idx=layer,
                tensor_name="hidden",
                sample_dim=0,
                sample_ids=["a", "b", "c", "d"],
            )
            for iteration, rank, layer in itertools.product((0, 10), (0, 1), (0, 1))
        ]
        run = store(folder / name.lower(), [*model_tensors(num_ranks=2, iterations=(0, 10), seed=seed), *sampled])
        urls[name] = run.url
    return urls | {"FOLDER": export_folder(urls["RUN"], folder)}


def export_folder(url: str, place: Path) -> str:
    """A run as files."""
    export_records(open_run(url).select(), place / "files")
    return str(place / "files")


def ask(command: str, words: str, *, urls: Mapping[str, str]) -> dict[str, Any]:
    """The document that a command of `ranktape analyze` writes with --json."""
    every = ",".join(METRICS)
    arguments = [command, *(urls.get(word, word.replace("METRICS", every)) for word in words.split()), "--json"]
    done = CliRunner().invoke(analyze, arguments, catch_exceptions=False)
    if done.exit_code:
        raise RuntimeError(f"ranktape analyze {' '.join(arguments)} failed: {done.stderr}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def document_schema(documents: Sequence[Mapping[str, Any]], **of_tables: Any) -> Schema:
    """Of documents that are tables, or that hold some under names of their own beside what is true or false."""
    if "rows" in documents[0]:
        return table_schema(documents, **of_tables)
    return closed(
        **{
            name: {"type": "boolean"}
            if isinstance(value, bool)
            else table_schema([document[name] for document in documents], **of_tables)
            for name, value in documents[0].items()
        }
    )


def table_schema(tables: Sequence[Mapping[str, Any]], *, fields: Mapping[str, Schema], any_name: str | None) -> Schema:
    """Of tables with these columns: rows have no other fields, and have those that all of these tables have.

    Fields of records are there or not, as `--by` says. A column whose name is as `any_name` says may have another.
    """
    columns: dict[str, Schema] = dict(fields)
    for column in itertools.chain.from_iterable(table["columns"] for table in tables):
        if any_name is not None and re.fullmatch(any_name, column["name"]):
            continue
        cell = fields.get(column["name"], CELLS[column["kind"]])
        columns[column["name"]] = cell | ({"description": column["unit"]} if column["unit"] else {})
    names = [[column["name"] for column in table["columns"]] for table in tables]
    row = {
        "type": "object",
        "properties": dict(sorted(columns.items())),
        **({"patternProperties": {f"^{any_name}$": REAL}} if any_name is not None else {}),
        "required": sorted(set(names[0]).intersection(*names[1:]) & set(columns) - set(fields)),
        "additionalProperties": False,
    }
    head = closed(name=TEXT, kind={"enum": [kind.value for kind in Kind]}, unit=TEXT)
    texts = {"type": "array", "items": TEXT}
    return closed(
        title=TEXT, columns={"type": "array", "items": head}, rows={"type": "array", "items": row}, notes=texts
    )


def columns_in(schema: Schema) -> set[str]:
    """The fields of rows that a schema knows, wherever in it a table is."""
    rows = schema.get("properties", {}).get("rows", {}).get("items", {}).get("properties", {})
    inner = [one for one in schema.get("properties", {}).values() if isinstance(one, dict)]
    return set(rows).union(*map(columns_in, inner))


def closed(**properties: Schema) -> Schema:
    """An object with these fields, all of them and no other."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def dataclass_schema(kind: Any, *, without: Sequence[str] = ()) -> Schema:
    """Of a dataclass as `dataclasses.asdict` gives it; what a field is for is said as in the source."""
    hints, told = typing.get_type_hints(kind, localns=NAMED), docstrings(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.name not in without]
    fields = {name: type_schema(hints[name]) for name in names}
    return closed(**{name: {**schema, "description": told[name]} for name, schema in fields.items()})


def docstrings(kind: type) -> dict[str, str]:
    """The text under each field of a class."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in itertools.pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def type_schema(hint: Any) -> Schema:
    """Of a value of a type, as `json.dumps` writes it."""
    plain: dict[Any, Schema] = {
        bool: {"type": "boolean"},
        int: {"type": "integer"},
        float: {"type": "number"},
        str: TEXT,
        Path: TEXT,
        type(None): {"type": "null"},
        Any: {},
    }
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in plain:
        return plain[hint]
    if origin in {types.UnionType, typing.Union}:
        return {"anyOf": [type_schema(one) for one in inner]}
    if origin in {list, tuple}:
        return {"type": "array", "items": type_schema(inner[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": type_schema(inner[1])}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [one.value for one in hint]}
    if dataclasses.is_dataclass(hint):
        return dataclass_schema(hint)
    raise TypeError(f"no schema for {hint}: add it to {__file__}")


def array_of(schema: Schema) -> Schema:
    """An array of such values."""
    return {"type": "array", "items": schema}


def other_schemas() -> dict[str, Schema]:
    """Of the commands beside `ranktape analyze`, by their names."""
    finding = dataclass_schema(CheckFinding, without=["modified"])
    pushed = {"anyOf": [dataclass_schema(PushReport), {"type": "null"}]}
    spill = closed(url=TEXT, attempt=TEXT, rank=COUNT, error={"type": ["string", "null"]}, pushed=pushed)
    return {
        "status": closed(
            run=TEXT,
            iterations=array_of(dataclass_schema(IterationStatus)),
            disabled={"type": "object", "additionalProperties": TEXT},
            troubles={"type": "object", "additionalProperties": TEXT},
            triggers=array_of(dataclass_schema(Trigger)),
            verdict={"anyOf": [dataclass_schema(RunVerdict), {"type": "null"}]},
        ),
        "check": closed(
            run=TEXT,
            deep={"type": "boolean"},
            sound={"type": "boolean"},
            **dict.fromkeys(("attempts", "iterations", "partial", "records", "objects", "nbytes"), COUNT),
            findings=array_of(finding),
        ),
        "doctor": closed(findings=array_of(dataclass_schema(MachineFinding)), lacking=array_of(TEXT)),
        "trigger": dataclass_schema(ControlReply),
        "runs": closed(url=TEXT, runs=array_of(dataclass_schema(RunSummary))),
        "cp": {
            "anyOf": [
                closed(run=TEXT, url=TEXT, **dataclass_schema(report)["properties"])
                for report in (CopyReport, SelectionReport)
            ]
        },
        "prune": dataclass_schema(PruneReport),
        "push": closed(directory=TEXT, spills=array_of(spill)),
        "repair": closed(
            run=TEXT, dry_run={"type": "boolean"}, **dict.fromkeys(("done", "young", "left"), array_of(finding))
        ),
    }


def schemas(urls: Mapping[str, str]) -> dict[str, Schema]:
    """Every schema, by the name of its command."""
    fields = field_cells()
    made: dict[str, tuple[str, Schema]] = {}
    for name, questions in QUESTIONS.items():
        command = analyze.get_command(None, name)  # type: ignore[arg-type]  # nothing is asked of the context
        assert command is not None
        takes_fields = any(parameter.name == "by" for parameter in command.params)
        documents = [ask(name, words, urls=urls) for words in questions]
        schema = document_schema(documents, fields=fields if takes_fields else {}, any_name=ANY_NAME.get(name))
        made[f"analyze {name}"] = name, schema
    made |= {name: (name, schema) for name, schema in other_schemas().items()}
    return {
        name: {"$schema": DIALECT, "title": f"ranktape {words} --json", **schema}
        for words, (name, schema) in made.items()
    }


def main(place: Path) -> None:
    """Write every file."""
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        made = schemas(make_runs(Path(folder)))
    for name, schema in made.items():
        (place / f"{name}.json").write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
