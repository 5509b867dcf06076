"""Does the table of replayed products say what was compared with what, and every wrong question why it is wrong?"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ranktape.analyze import Table, replay
from ranktape.analyze.cli import cli
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.legacy.open import open_source
from ranktape.analyze.numerics.recipes.recipe import HighPrecision, Recipe
from ranktape.analyze.numerics.recipes.words import parse_recipes
from ranktape.analyze.replays.calls import RecordedCalls, select_calls
from ranktape.analyze.replays.replayed import replay_calls
from ranktape.capture.writing.counting import reduce_to
from ranktape.errors import NoRecordsError, UnknownFieldError, UsageError
from ranktape.storage import Run
from tests.analyze.pt_files import legacy_file
from tests.analyze.replay_runs import call_arrays, call_tensors, one_call, trained
from tests.analyze.runs import store


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two microbatches and two iterations of a transformer of 14 linear layers in float32."""
    return trained(tmp_path_factory.mktemp("plain"), microbatches=2)


def notes_of(table: Table) -> str:
    return "\n".join(table.notes)


def test_rows_are_layers_products_and_recipes_in_their_order(plain: Run) -> None:
    table = replay(plain.select(module="layers.*.down"))
    assert [(row["module"], row["product"], row["recipe"]) for row in table.records()] == [
        (f"layers.{layer}.down", product, recipe)
        for layer in (0, 1)
        for product in ("output", "grad_input", "grad_weight")
        for recipe in ("recorded", "nvfp4", "mxfp8")
    ]
    replayed = replay_calls(plain.select(module="layers.*.down"), parse_recipes("nvfp4,mxfp8"))
    groups = replayed.groups(["module", "product", "recipe"])
    for row, group in zip(table.records(), groups, strict=True):
        assert (row["calls"], row["sqnr"], row["bias"]) == (4, group.exact.sqnr, group.exact.bias)
        assert row["recorded_sqnr"] == group.recorded.sqnr
        assert (row["norm_ratio"] is None) == (row["product"] == "output")
        assert row["worst_sqnr"] <= row["median_sqnr"]
        call = replayed.calls.calls[replayed.places[group.worst]]
        assert row["worst_at"].startswith(f"iteration {call.field('iteration')} microbatch {call.field('microbatch')}")
    rows = {(row["product"], row["recipe"]): row for row in table.records()}
    assert rows["output", "recorded"]["sqnr"] > 120
    assert rows["output", "recorded"]["recorded_sqnr"] is None
    assert rows["output", "mxfp8"]["sqnr"] > rows["output", "nvfp4"]["sqnr"] + 6


def test_attention_has_rows_where_it_is_asked_for(plain: Run) -> None:
    chosen = plain.select(module=["layers.0.attention", "layers.0.attention.query"])
    table = replay(chosen, recipe="mxfp8", attention=True)
    assert "8 calls of 2 layers by recipe" in table.title
    rows = {(row["module"], row["product"], row["recipe"]): row for row in table.records()}
    assert [product for _, product, recipe in rows if recipe == "mxfp8"] == [
        *("output", "grad_input", "grad_weight"),
        *("output", "grad_query", "grad_key", "grad_value"),
    ]
    assert rows["layers.0.attention", "grad_key", "recorded"]["sqnr"] > 120
    assert 20 < rows["layers.0.attention", "grad_key", "mxfp8"]["sqnr"] < 50
    linear = [row for row in table.records() if row["module"] == "layers.0.attention.query"]
    assert linear == replay(chosen, recipe="mxfp8").records()
    [product] = {row["product"] for row in replay(chosen, product="grad_value", attention=True).records()}
    assert product == "grad_value"
    with pytest.raises(UsageError, match="--product grad_value is a product of attention: add --attention"):
        replay(chosen, product="grad_value")


def test_attention_whose_mask_nothing_tells_is_no_answer(plain: Run) -> None:
    attention = plain.select(layer_type="attention")
    tensors = [(record.read(), dataclasses.replace(record.info, metadata={"dropout": 0.5})) for record in attention]
    run = store(Path(plain.url).parent / "dropped", tensors)
    with pytest.raises(NoRecordsError, match="none of 32 products can be computed again: it uses random dropout"):
        replay(run.select(), attention=True)
    left_out = replay(run.select(), attention=True, show="unreplayable").records()
    assert Counter(row["reason"].partition(" (")[0] for row in left_out) == {"it uses random dropout": 32}
    assert replay(plain.select(), attention=True, show="unreplayable").records() == []


def test_by_names_other_fields_and_the_worst_come_first_where_rows_are_left_out(plain: Run) -> None:
    table = replay(plain.select(), recipe="nvfp4", product="grad_weight", by=["iteration", "layer_idx"])
    keys = [(row["iteration"], row["layer_idx"], row["recipe"]) for row in table.records()]
    assert keys == [(step, layer, name) for step in (0, 1) for layer in (-1, 0, 1) for name in ("recorded", "nvfp4")]
    assert {row["product"] for row in table.records()} == {"grad_weight"}
    assert sum(row["calls"] for row in table.records() if row["recipe"] == "nvfp4") == 2 * 2 * 14
    assert table.worst_first is not None
    worst = table.worst_first(table).records()
    assert [row["recipe"] for row in worst] == ["nvfp4"] * 6 + ["recorded"] * 6
    assert [row["sqnr"] for row in worst[:6]] == sorted(row["sqnr"] for row in worst[:6])


def test_notes_say_what_was_left_out(tmp_path: Path) -> None:
    tensors = [
        *call_tensors(call_arrays(), without={"bias"}, module="a"),
        *call_tensors(call_arrays(tokens=8), without={"bias"}, module="b"),
        *call_tensors(call_arrays(), without={"weight"}, module="c"),
        *call_tensors(call_arrays(seed=1) | {"output": call_arrays(seed=2)["output"]}, module="d"),
    ]
    run = store(tmp_path / "run", tensors)
    table = replay(run.select(), recipe="mxfp8")
    notes = notes_of(table)
    assert "2 products cannot be computed again: no weight was recorded (2); --show unreplayable lists them" in notes
    assert "1 recorded results are not compared: no bias was recorded" in notes
    assert "the bias of 1 calls is unknown" in notes
    assert "1 recorded results are not the products of the recorded operands" in notes
    assert "d (1)" in notes
    left_out = replay(run.select(), show="unreplayable")
    assert [(row["module"], row["product"], row["reason"]) for row in left_out.records()] == [
        ("c", "output", "no weight was recorded"),
        ("c", "grad_input", "no weight was recorded"),
    ]


def test_a_recipe_says_how_many_modules_it_leaves(plain: Run) -> None:
    (nvfp4,) = parse_recipes("nvfp4")
    mine = Recipe(name="mine", source="test", products=nvfp4.products, high_precision=HighPrecision(first_layers=1))
    table = replay(plain.select(iteration=0), recipe=[mine, "mxfp8"])
    assert "mine leaves 6 of 14 modules in bf16" in notes_of(table)


def test_elements_that_a_recipe_spoils_are_counted(tmp_path: Path) -> None:
    arrays = call_arrays()
    # Both factors are rounded up, and so is their product: to 2^128.
    arrays["input"][0] = 0
    arrays["input"][0, 0], arrays["weight"][:, 0] = 0.999 * 2.0**127, 1.96
    run = store(tmp_path / "run", call_tensors(arrays, without={"output", "bias"}))
    table = replay(run.select(), recipe="mxfp8", product="output")
    (row,) = table.records()
    assert (row["elements"], row["compared"], row["lost"]) == (32 * 8, 31 * 8, 8)
    assert "8 elements are NaN or infinite where the product of the recorded operands is finite" in notes_of(table)


def test_wrong_questions(plain: Run) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"recipe": "nvfp"}, "recipe 'nvfp' is not known: did you mean nvfp4"),
        ({"recipe": []}, "has an empty name"),
        ({"product": "outputs"}, "--product 'outputs' is not a product of a linear layer: did you mean output"),
        ({"by": ["operation"]}, "--by operation is a field of tensors, but rows are products: use --by product"),
        ({"by": "rank"}, "'rank' is a text, not a list of fields"),
        ({"by": ["rnk"]}, "--by 'rnk' is not a field of calls: did you mean rank"),
    ]
    for options, message in cases:
        with pytest.raises(UsageError, match=message):
            replay(plain.select(), **options)
        assert issubclass(UnknownFieldError, UsageError)


def test_nothing_to_replay(tmp_path: Path, plain: Run) -> None:
    with pytest.raises(NoRecordsError, match="no product of a linear layer is selected"):
        replay(plain.select(layer_type="attention"))
    run = one_call(tmp_path, without={"weight", "input"})
    with pytest.raises(NoRecordsError, match=r"none of 3 products can be computed again: no input was recorded \(2\)"):
        replay(run.select())


def test_files_of_single_samples_are_told_apart(tmp_path: Path) -> None:
    for sample in (3, 7):
        arrays = call_arrays(seed=sample)
        arrays["output"] = arrays["input"] @ arrays["weight"].T
        for counter, (name, phase) in enumerate({"input": "pre", "weight": "pre", "output": "post"}.items()):
            tags: dict[str, Any] = {
                "tensor_name": name,
                "phase": phase,
                "sample_idx": sample,
                "counter": counter + 10 * sample,
            }
            legacy_file(tmp_path, torch.from_numpy(arrays[name]), **tags)
    table = replay(open_source(str(tmp_path)).select(), recipe="mxfp8", by=["sample"])
    rows = table.records()
    assert [(row["sample"], row["product"], row["recipe"]) for row in rows] == [
        (sample, "output", recipe) for sample in ("3", "7") for recipe in ("recorded", "mxfp8")
    ]
    assert all(row["sqnr"] > 120 for row in rows if row["recipe"] == "recorded")
    # Files without names of modules are told apart by their layers.
    assert replay(open_source(str(tmp_path)).select()).columns[0].name == "layer_idx"


@pytest.mark.parametrize("dim", [0, 1])
def test_each_sample_has_the_figures_of_a_run_of_its_own(tmp_path: Path, dim: int) -> None:
    names: list[int | str] = ["b", 7, "a", 3]
    arrays, shape = call_arrays(), (4, 8) if dim == 0 else (8, 4)
    flowing = ("input", "output", "grad_output", "grad_input")
    arrays |= {name: arrays[name].reshape(*shape, -1) for name in flowing}
    said = {name: {"sample_dim": dim, "sample_ids": names} for name in flowing}
    run = store(tmp_path / "run", call_tensors(arrays, said=said) + call_tensors(arrays, without={"input"}, call=1))
    # Blocks lie within a row: what a sample is quantised to depends on no other.
    table = replay(run.select(), recipe="mxfp8", by=["sample"])
    rows = {(row["sample"], row["product"], row["recipe"]): row for row in table.records()}
    assert list(dict.fromkeys(name for name, _, _ in rows)) == ["3", "7", "a", "b"]
    for place, name in enumerate(names):
        own = {
            one: np.ascontiguousarray(array.take(place, axis=dim)) for one, array in arrays.items() if one in flowing
        }
        alone = store(tmp_path / str(name), call_tensors(arrays | own))
        for twin in replay(alone.select(), recipe="mxfp8", product=["output", "grad_input"], by=["product"]).records():
            row = rows.pop((str(name), twin["product"], twin["recipe"]))
            for figure in ("elements", "sqnr", "recorded_sqnr", "max_abs_error", "bias", "norm_ratio"):
                expected = twin[figure]
                assert row[figure] == (expected and pytest.approx(expected, rel=1e-6)), figure
    assert not rows
    notes = notes_of(table)
    assert "scales are those of the whole call" in notes
    assert "grad_weight is a sum over all samples, which are compared one by one (1)" in notes
    assert "its records do not give the sample of each row (1)" in notes
    left_out = replay(run.select(), by=["sample"], show="unreplayable")
    assert [row["product"] for row in left_out.records()] == ["output", "grad_weight", "grad_weight", "grad_input"]


def test_samples_of_a_training_add_up_to_its_calls(plain: Run) -> None:
    records = plain.select(module="layers.1.down")
    whole = replay(records, recipe="nvfp4", product="output").records()
    for engine in (None, Engine(workers=2)):
        rows = replay(records, recipe="nvfp4", product="output", by=["sample"], engine=engine).records()
        assert {row["calls"] for row in rows} == {4}
        for one in whole:
            own = [row for row in rows if row["recipe"] == one["recipe"]]
            assert len(own) > 1
            assert sum(row["elements"] for row in own) == one["elements"]
            assert max(row["max_abs_error"] for row in own) == one["max_abs_error"]
            assert min(row["sqnr"] for row in own) <= one["sqnr"] <= max(row["sqnr"] for row in own)


def test_the_command_writes_the_same_as_a_document(plain: Run) -> None:
    options = ["--recipe", "mxfp8,nvfp4", "--module", "head", "--product", "output,grad_weight", "--json"]
    done = CliRunner().invoke(cli, ["replay", plain.url, *options])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    table = replay(plain.select(module="head"), recipe="mxfp8,nvfp4", product=["output", "grad_weight"])
    assert document["rows"] == table.to_json()["rows"]
    assert len(document["rows"]) == 2 * 3
    done = CliRunner().invoke(cli, ["replay", plain.url, "--show", "unreplayable"])
    assert done.stdout.startswith("0 products that cannot be computed again")


PRODUCTS = {"output", "grad_input", "grad_weight"}


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two microbatches and two iterations of a transformer of 13 linear layers, of which two have a bias."""
    return trained(tmp_path_factory.mktemp("called"), microbatches=2)


def names_of(calls: RecordedCalls) -> list[dict[str, str]]:
    """For each call what its records say they are."""
    return [{name: calls.records[row].tensor_name for name, (row,) in call.rows.items()} for call in calls.calls]


def reasons(calls: RecordedCalls) -> dict[str, str]:
    """Why products are left out."""
    return {one.product: one.reason for one in calls.left_out}


def test_every_call_has_its_own_tensors_and_the_weight_of_its_iteration(called: Run) -> None:
    calls = select_calls(called.select())
    assert len(calls.calls) == 2 * 2 * 14
    assert not calls.left_out
    for call, names in zip(calls.calls, names_of(calls), strict=True):
        assert names == {name: name for name in names}
        # What enters the first layer needs no gradient: it has none, and none is missing.
        assert set(call.products) == (PRODUCTS if call.field("module") != "embed" else PRODUCTS - {"grad_input"})
        for name, (row,) in call.rows.items():
            record = calls.records[row]
            assert (record.module, record.iteration) == (call.field("module"), call.field("iteration"))
            assert record.microbatch == (0 if name in {"weight", "bias"} else call.field("microbatch"))
    assert calls.num_layers == {"": 0, "layers": 2}


@pytest.mark.parametrize(("along", "mode"), [("call", "train"), ("iteration", "eval")])
def test_a_call_without_a_weight_of_its_own_has_the_last_one_before(tmp_path: Path, along: str, mode: str) -> None:
    arrays = call_arrays()
    tensors = []
    for number in range(3):
        said = {name: {"counter": number * len(arrays) + place} for place, name in enumerate(arrays)}
        without = {"weight"} if number == 2 else set()
        tensors += call_tensors(arrays, without=without, said=said, mode=mode, **{along: number})
    calls = select_calls(store(tmp_path / "run", tensors).select())
    assert [getattr(calls.records[call.rows["weight"][0]], along) for call in calls.calls] == [0, 1, 1]


def test_filters_choose_products_and_leave_their_operands(called: Run) -> None:
    calls = select_calls(called.select(microbatch=1, module="layers.0.up", operation="forward"))
    assert [set(call.products) for call in calls.calls] == [{"output"}] * 2
    assert all({"input", "weight", "bias", "output"} == set(call.rows) for call in calls.calls)
    calls = select_calls(called.select(tensor_name="grad_weight"))
    assert {tuple(call.products) for call in calls.calls} == {("grad_weight",)}
    assert not select_calls(called.select(tensor_name=["query", "weight"])).calls


def test_products_that_are_named_need_no_result(tmp_path: Path) -> None:
    arrays = call_arrays()
    frozen = call_tensors(arrays, without={"grad_weight"}, module="frozen", layer_idx=1)
    run = store(tmp_path / "run", [*frozen, *call_tensors(arrays)])
    assert {call.field("module"): set(call.products) for call in select_calls(run.select()).calls} == {
        "frozen": PRODUCTS - {"grad_weight"},
        "layers.0.linear": PRODUCTS,
    }
    named = select_calls(run.select(), products=["grad_weight"]).calls
    assert [set(call.products) for call in named] == [{"grad_weight"}] * 2
    # Where no layer has it, the capture left it out.
    assert "grad_weight" in select_calls(one_call(tmp_path, without={"grad_weight"}).select()).calls[0].products


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"without": {"input"}}, dict.fromkeys(("output", "grad_weight"), "no input was recorded")),
        ({"without": {"weight"}}, dict.fromkeys(("output", "grad_input"), "no weight was recorded")),
        ({"without": {"grad_output"}}, dict.fromkeys(("grad_input", "grad_weight"), "no grad_output was recorded")),
    ],
)
def test_a_missing_operand_is_named(tmp_path: Path, options: dict[str, Any], expected: dict[str, str]) -> None:
    calls = select_calls(one_call(tmp_path, **options).select())
    assert reasons(calls) == expected
    assert [set(call.products) for call in calls.calls] == [PRODUCTS - set(expected)]


def test_what_was_not_kept_cannot_be_multiplied(tmp_path: Path) -> None:
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in call_arrays().items()}
    kept = {"input": "histogram", "grad_output": "statistics"}
    tensors = [
        reduce_to(kept.get(info.tensor_name, "values"), array, info=info) or (array, info)
        for array, info in call_tensors(arrays)
    ]
    calls = select_calls(store(tmp_path / "run", tensors).select())
    assert reasons(calls) == {
        "output": "only the histogram of input was stored, not its values",
        "grad_input": "only the statistics of grad_output were stored, not its values",
        "grad_weight": "only the statistics of grad_output were stored, not its values",
    }


def test_shapes_and_types_that_do_not_fit(tmp_path: Path) -> None:
    arrays = call_arrays() | {"input": np.ones((32, 23), np.float32)}
    assert reasons(select_calls(store(tmp_path / "a", call_tensors(arrays)).select())) == {
        "output": "the shapes of input and weight do not multiply",
        "grad_weight": "the shapes of input and weight are not of one call",
    }
    arrays = call_arrays() | {"input": np.ones((32, 24), np.int64)}
    assert set(reasons(select_calls(store(tmp_path / "b", call_tensors(arrays)).select())).values()) == {
        "input has dtype int64"
    }


@pytest.mark.parametrize(
    ("said", "product", "why"),
    [
        ({"grad_weight": {"metadata": {"accumulated": True}}}, "grad_weight", "accumulated over microbatches"),
        ({"input": {"sample_dim": 0, "batch_size": 64}}, "grad_weight", "recorded for some of the samples only"),
    ],
)
def test_results_of_something_else_are_not_compared(
    tmp_path: Path, said: dict[str, Any], product: str, why: str
) -> None:
    (call,) = select_calls(one_call(tmp_path, said=said).select()).calls
    assert why in call.products[product]
    assert set(call.rows) == {*PRODUCTS, "input", "weight", "grad_output", "bias"} - {product}
