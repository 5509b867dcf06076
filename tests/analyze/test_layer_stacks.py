"""Are layers of one number that are of several stacks kept apart, wherever something is asked by layer?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ranktape.analyze import (
    compare,
    distribution,
    gate,
    gradients,
    listing,
    neighbours,
    overflow,
    overflow_begins,
    sample_stats,
    stats,
    sweep,
    trend,
)
from ranktape.analyze.cli import cli
from ranktape.analyze.identity import with_stacks
from ranktape.analyze.table import Table
from ranktape.storage import Records, Run, open_run
from tests.analyze.runs import store
from tests.analyze.stacked_runs import STACKS, stacked_tensors

LAYER = ["layer_idx"]

QUESTIONS: dict[str, Callable[[Records], Table]] = {
    "listing": lambda records: listing(records, by=LAYER),
    "overflow": lambda records: overflow(records, by=LAYER, format="fp8_e4m3"),
    "overflow_begins": lambda records: overflow_begins(records, by=LAYER, format="fp8_e4m3"),
    "stats": lambda records: stats(records, by=LAYER),
    "sample_stats": lambda records: sample_stats(records, by=LAYER),
    "neighbours": lambda records: neighbours(records, by=LAYER),
    "distribution": lambda records: distribution(records, kind="exponents", by=LAYER),
    "sweep": lambda records: sweep(records, format="fp8_e4m3", by=LAYER),
    "trend": lambda records: trend(records, by=LAYER).course,
    "gradients": lambda records: gradients(records, by=LAYER).ranges,
    "weights": lambda records: gradients(records, by=LAYER).weights,
    "compare": lambda records: compare(records, records, by=LAYER, in_order=True),
    "gate": lambda records: gate(records, rules=["absmax < 0"], by=LAYER).offenders,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return store(tmp_path_factory.mktemp("stacked") / "run", stacked_tensors())


def rows_of(table: Table) -> list[tuple[Any, ...]]:
    """The rows without the stack, in an order of their own."""
    names = [column.name for column in table.columns]
    rows = [tuple(str(row[place]) for place, name in enumerate(names) if name != "layer_stack") for row in table.rows]
    return sorted(rows)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_row_is_of_the_layer_of_one_stack(run: Run, name: str) -> None:
    ask = QUESTIONS[name]
    answer = ask(run.select())
    names = [column.name for column in answer.columns]
    assert names.index("layer_stack") + 1 == names.index("layer_idx")
    assert not next(column for column in answer.columns if column.name == "layer_stack").is_detail
    assert set(answer.column("layer_stack")) - {""} == set(STACKS)
    for stack in STACKS:
        alone = ask(run.select(layer_stack=stack))
        assert "layer_stack" not in [column.name for column in alone.columns]
        own = [row for row in answer.rows if row[names.index("layer_stack")] == stack]
        assert rows_of(Table(title="", columns=answer.columns, rows=tuple(own))) == rows_of(alone)


def test_groups_that_name_the_stack_or_no_layer_stay_as_they_are(run: Run) -> None:
    records = run.select()
    assert with_stacks(["layer_type"], records) == ("layer_type",)
    assert with_stacks(["layer_idx", "layer_stack"], records) == ("layer_idx", "layer_stack")
    assert with_stacks(["rank", "layer_idx"], records) == ("rank", "layer_stack", "layer_idx")
    assert with_stacks(["layer_idx"], *(run.select(layer_stack=stack) for stack in STACKS)) == (
        "layer_stack",
        "layer_idx",
    )
    assert with_stacks(["layer_idx"], run.select(layer_stack=[STACKS[0], ""])) == ("layer_idx",)


def answer(*words: str) -> Any:
    result = CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_commands_know_stacks(run: Run) -> None:
    chosen = answer("ls", run.url, "--layer-stack", "dec*", "--layer-idx", "0")["rows"]
    assert {(row["layer_stack"], row["layer_idx"]) for row in chosen} == {(STACKS[1], 0)}
    for command in (["overflow"], ["sweep", "--format", "fp8_e4m3"]):
        rows = answer(*command, run.url, "--by", "layer-idx")["rows"]
        assert [(row["layer_stack"], row["layer_idx"]) for row in rows] == [
            ("", -1),
            *((stack, layer) for stack in sorted(STACKS) for layer in range(3)),
        ]
    refused = CliRunner().invoke(cli, ["ls", run.url, "--layer-stack", "encodr"])
    assert refused.exit_code == 1
    assert "layer_stack is encoder.block (" in refused.stderr


def test_a_run_of_one_stack_has_no_column_of_stacks(tmp_path: Path) -> None:
    tensors = [(array, info) for array, info in stacked_tensors() if info.layer_stack in {STACKS[1], ""}]
    records = store(tmp_path / "run", tensors).select()
    for ask in QUESTIONS.values():
        assert "layer_stack" not in [column.name for column in ask(records).columns]
    (column,) = [column for column in stats(records).columns if column.name == "layer_stack"]
    assert column.is_detail


def test_files_keep_the_stack(run: Run, tmp_path: Path) -> None:
    from ranktape.launch.cli import cli as ranktape

    for words in (
        ["export", run.url, str(tmp_path / "files")],
        ["import", str(tmp_path / "files"), str(tmp_path / "run")],
    ):
        assert CliRunner().invoke(ranktape, words, catch_exceptions=False).exit_code == 0
    fields = ("module", "layer_stack", "layer_idx")
    expected = sorted(zip(*(run.select().column(name).tolist() for name in fields), strict=True))
    found = open_run(tmp_path / "run").select()
    assert sorted(zip(*(found.column(name).tolist() for name in fields), strict=True)) == expected
