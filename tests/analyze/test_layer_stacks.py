"""Are layers of one number that are of several stacks kept apart, wherever something is asked by layer?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.analyze import (
    compare,
    distribution,
    ls,
    overflow,
    stats,
    sweep,
    trend,
)
from ranktape.analyze.cli import cli
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.target import parse_target
from ranktape.analyze.engine.values import View
from ranktape.analyze.findings.find import find
from ranktape.analyze.findings.finding import Severity, make_finding
from ranktape.analyze.findings.survey import Survey
from ranktape.analyze.identity import layer_positions, short_names, with_stacks
from ranktape.analyze.table import Table
from ranktape.analyze.views.plots.data import PlotData
from ranktape.analyze.views.plots.heat_maps import grid_of, layer_names
from ranktape.analyze.views.plots.table import PLOTS
from ranktape.analyze.views.report.model import build_model
from ranktape.analyze.views.report.page import write_report
from ranktape.errors import UsageError
from ranktape.storage import Run, open_run
from tests.analyze.report_page import Page
from tests.analyze.runs import SITES, Tensor, describe_tensor, store
from tests.analyze.test_report import data_of, unpacked
from tests.capture.hugging_face import STACKS as NAMES
from tests.capture.hugging_face import capture_two_stacks
from tests.exhaustive import exhaustive

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


STACKS = ("encoder.block", "decoder.block")
"""The lists that hold the layers."""


def stacked_tensors(*, num_layers: int = 3, iterations: int = 2, factor: float = 64.0) -> list[Tensor]:
    """The tensors of each stack, the second of which has values so many times as large, and of a head."""
    rng = np.random.default_rng(5)
    tensors: list[Tensor] = []
    for iteration in range(iterations):
        for stack, times in zip(STACKS, (1.0, factor), strict=True):
            for layer in range(num_layers):
                for layer_type, operation, phase, name, deviation in SITES:
                    values = rng.standard_normal((4, 64)) * deviation * times
                    tensors.append(
                        describe_tensor(
                            values.astype(ml_dtypes.bfloat16),
                            iteration=iteration,
                            layer_idx=layer,
                            layer_stack=stack,
                            module=f"{stack}.{layer}.{layer_type}",
                            layer_type=layer_type,
                            operation=operation,
                            phase=phase,
                            tensor_name=name,
                            sample_dim=None if "weight" in name else 0,
                            counter=len(tensors),
                        )
                    )
        for name in ("input", "weight"):
            array = rng.standard_normal((4, 64)).astype(ml_dtypes.bfloat16)
            sample_dim = 0 if name == "input" else None
            fields = {"iteration": iteration, "layer_idx": -1, "module": "head", "sample_dim": sample_dim}
            tensors.append(describe_tensor(array, tensor_name=name, counter=len(tensors), **fields))
    return tensors


LAYER = ["layer_idx"]

QUESTIONS: dict[str, Callable[..., Table]] = {
    "ls": lambda records, by=LAYER: ls(records, by=by),
    "overflow": lambda records, by=LAYER: overflow(records, by=by, format="fp8_e4m3"),
    "overflow_begins": lambda records, by=LAYER: overflow(records, by=by, format="fp8_e4m3", first=True),
    "stats": lambda records, by=LAYER: stats(records, by=by),
    "sample_stats": lambda records, by=LAYER: stats(records, by=by, per_sample=True),
    "neighbours": lambda records, by=LAYER: stats(records, by=by, neighbours=True),
    "distribution": lambda records, by=LAYER: distribution(records, kind="exponents", by=by),
    "sweep": lambda records, by=LAYER: sweep(records, format="fp8_e4m3", by=by),
    "trend": lambda records, by=LAYER: trend(records, by=by),
    "compare": lambda records, by=LAYER: compare(records, records, by=by, in_order=True),
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
def test_a_text_is_no_list_of_fields(run: Run, name: str) -> None:
    with pytest.raises(UsageError, match=r"'layer_idx' is a text, not a list of fields: give \['layer_idx'\]"):
        QUESTIONS[name](run.select(), by="layer_idx")


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


def test_places_lie_one_behind_the_other() -> None:
    stacks = ["", "a.x", "a.x", "b.x", "b.x", "a.x"]
    places = layer_positions(stacks, [-1, 1, 3, 0, 1, 2])
    assert places == [-1, 0, 2, 4, 5, 1]
    assert [str(place) for place in places] == ["-1", "a 1", "a 3", "b 0", "b 1", "a 2"]
    assert [place.number for place in places] == [-1, 1, 3, 0, 1, 2]
    assert layer_positions(["a", "", "a"], [4, -1, 0]) == [4, -1, 0]
    assert [str(place) for place in layer_positions(["a", "b", ""], [0, 0, 7])] == ["a 0", "b 0", "7"]


def test_what_all_stacks_are_called_is_left_out() -> None:
    for stacks, names in [
        (["model.encoder.layers", "model.decoder.layers"], ["encoder", "decoder"]),
        (["encoder.block", "decoder.block"], ["encoder", "decoder"]),
        (["vision_tower.encoder.layers", "language_model.layers"], ["vision_tower.encoder", "language_model"]),
        (["layers", "mtp.layers"], ["layers", "mtp.layers"]),
        (["layers", "stage1.layers", "stage2.layers"], ["layers", "stage1.layers", "stage2.layers"]),
    ]:
        assert list(short_names(stacks).values()) == names


def alone(run: Run, stack: str) -> PlotData:
    return PlotData(run.select(layer_stack=stack), target=parse_target("fp8_e4m3"))


@pytest.fixture(scope="module")
def survey(run: Run) -> PlotData:
    return PlotData(run.select(), target=parse_target("fp8_e4m3"))


@pytest.mark.parametrize("name", ["overflow", "overflow.absmax"])
def test_two_stacks_are_two_times_the_rows_of_a_heat_map(run: Run, survey: PlotData, name: str) -> None:
    names = ["outside", *(f"encoder {layer}" for layer in range(3)), *(f"decoder {layer}" for layer in range(3))]
    layers = survey.values_of("layer_idx")
    assert layer_names(layers) == names
    for rows, stack in ((slice(1, 4), STACKS[0]), (slice(4, 7), STACKS[1])):
        own = alone(run, stack)
        for operation in ("forward", "backward"):
            cells = grid_of(survey, name, field="iteration", operation=operation)[rows]
            np.testing.assert_array_equal(cells, grid_of(own, name, field="iteration", operation=operation))
            figures = [one.samples.grid(operation) for one in (survey, own)]
            np.testing.assert_array_equal(figures[0][rows], figures[1])


def test_every_picture_of_layers_can_be_drawn(survey: PlotData) -> None:
    """No line joins two stacks, and each axis says which they are."""
    for name in ("overflow", "layer_statistics", "neighbouring_layers", "layer_binades", "layer_iteration_absmax"):
        figure = PLOTS[name].draw(survey)
        labels = {axes.get_xlabel() for axes in figure.axes}
        if name in {"overflow", "layer_statistics", "neighbouring_layers"}:
            assert "layer of encoder | decoder" in labels
            for axes in figure.axes[:2]:
                lines = [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines]
                long = [values for values in lines if values.size > len(STACKS)]
                assert long
                assert all(np.isnan(values).any() for values in long)
        else:
            (ticks,) = {tuple(text.get_text() for text in axes.get_yticklabels()) for axes in figure.axes[:1]}
            assert {"encoder 0", "decoder 0"} <= set(ticks)


def test_the_report_tells_stacks_apart(run: Run) -> None:
    model = build_model(run.select(), findings=[], formats=["fp8_e4m3"], view=View.COMPUTE)
    fields = {field["name"]: field for field in model.data["fields"]}
    assert fields["layer_idx"]["words"] == layer_names(PlotData(run.select()).values_of("layer_idx"))
    codes = unpacked(fields["layer_idx"]["codes"], count=model.data["count"]).astype(int)
    words = [fields["layer_idx"]["words"][code] for code in codes]
    columns = (run.select().column(name).tolist() for name in ("layer_stack", "layer_idx"))
    assert words == [
        "outside" if layer < 0 else f"{stack.partition('.')[0]} {layer}" for stack, layer in zip(*columns, strict=True)
    ]
    assert fields["layer_stack"]["values"] == ["", *sorted(STACKS)]
    assert "6 layers (attention, linear)" in model.facts
    one = build_model(run.select(layer_stack=[STACKS[0], ""]), findings=[], formats=["fp8_e4m3"], view=View.COMPUTE)
    plain = {field["name"]: field for field in one.data["fields"]}
    assert "layer_stack" not in plain
    assert (plain["layer_idx"]["isNumber"], plain["layer_idx"]["values"]) == (True, [-1, 0, 1, 2])


def test_a_gradient_is_judged_beside_the_forward_pass_of_its_own_layer(tmp_path: Path) -> None:
    """The encoder's layer gave nothing but zeros: the decoder's layer of that number did not."""
    values = np.linspace(1, 2, 64, dtype=np.float32)
    tensors = [
        describe_tensor(
            values * 0 if (stack, operation) in {(STACKS[0], "forward"), (STACKS[1], "backward")} else values,
            layer_stack=stack,
            module=f"{stack}.0.up",
            operation=operation,
            phase="post",
            tensor_name=name,
        )
        for stack in STACKS
        for operation, name in (("forward", "output"), ("backward", "grad_input"))
    ]
    findings = find(store(tmp_path / "run", tensors).select())
    (found,) = [one for one in findings if one.kind == "gradient_underflow" and "is all zero" in one.title]
    assert (found.where["layer_stack"], found.where["layer_idx"]) == (STACKS[1], 0)
    assert found.title.startswith("decoder.block.0.up grad_input")


def test_the_next_command_names_the_stack(run: Run) -> None:
    """Of several modules of one layer, the number alone would name the layers of both stacks."""
    records = run.select()
    positions = [
        place
        for place, record in enumerate(records)
        if (record.layer_stack, record.layer_idx, record.tensor_name) == (STACKS[1], 2, "grad_output")
    ]
    known = Survey(records)
    found = make_finding(known, kind="zero", severity=Severity.LOW, score=1.0, text="is", evidence="", places=positions)
    assert "--layer-stack decoder.block --layer-idx 2" in found.command


@pytest.fixture(scope="module", params=["t5", "whisper"])
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    """Two iterations of a real model with an encoder of 2 layers and a decoder of 3."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    url = tmp_path_factory.mktemp("captured") / request.param
    capture_two_stacks(request.param, url, num_iterations=2)
    return request.param, open_run(url)


@exhaustive("make test asks the same of tensors with such names, and captures two stacks in tests/capture")
@pytest.mark.filterwarnings("ignore")  # transformers warns of its own plans
def test_a_captured_encoder_and_decoder_are_apart_in_every_answer(captured: tuple[str, Run], tmp_path: Path) -> None:
    kind, run = captured
    encoder, decoder = NAMES[kind]
    layers = [("", -1), *((decoder, layer) for layer in range(3)), *((encoder, layer) for layer in range(2))]
    for table in (overflow(run.select(), by=LAYER, format="fp8_e4m3"), stats(run.select(), by=LAYER)):
        assert list(zip(table.column("layer_stack"), table.column("layer_idx"), strict=True)) == layers
        sizes = [len(run.select(layer_stack=stack, layer_idx=layer)) for stack, layer in layers]
        assert table.column("records") == sizes
    survey = PlotData(run.select())
    names = ["outside", "encoder 0", "encoder 1", "decoder 0", "decoder 1", "decoder 2"]
    assert layer_names(survey.values_of("layer_idx")) == names
    for words in (
        ["plot", run.url, "--output", str(tmp_path / "a.png")],
        ["report", run.url, "-o", str(tmp_path / "r.html")],
    ):
        result = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
    page = (tmp_path / "r.html").read_text()
    assert all(f'"{name}"' in json.dumps(data_of(page)) for name in names)


@exhaustive("make test asks the answers behind the page")
def test_on_the_page_no_line_joins_two_stacks(chromium: Chrome, run: Run, tmp_path: Path) -> None:
    page = Page(chromium, write_report(run.select(), output=tmp_path / "report.html", engine=Engine(use_cache=False)))
    page.open()
    page.type("#columns", "iteration")
    page.type("#lines", "operation")
    names = ["outside", *(f"{stack} {layer}" for stack in ("encoder", "decoder") for layer in range(3))]
    assert page.ask("return document.getElementById('overview-chart')._fullLayout.yaxis.ticktext") == names
    forward, backward = page.ask("return document.getElementById('layers-chart').data.map((one) => [one.x, one.y])")
    assert forward[0] == [-1, None, 0, 1, 2, None, 4, 5, 6]
    assert backward[0] == [0, 1, 2, None, 4, 5, 6]
    assert [value is None for value in backward[1]] == [False] * 3 + [True] + [False] * 3
    assert page.ask("return document.getElementById('layers-chart')._fullLayout.xaxis.ticktext") == names
    page.cell(4, 0)
    assert page.rows() == [
        place
        for place, one in enumerate(run.select())
        if (one.layer_stack, one.layer_idx, one.iteration) == (STACKS[1], 0, 0)
    ]
    assert page.log() == []


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
