"""Are calls put together from their own records, and does what cannot be computed say why?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze.replays.calls import RecordedCalls, calls_of
from ranktape.capture.writing.counting import reduce_to
from ranktape.storage import Run
from tests.analyze.replay_runs import call_arrays, call_tensors, one_call, trained
from tests.analyze.runs import store

PRODUCTS = {"output", "grad_input", "grad_weight"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two microbatches and two iterations of a transformer of 13 linear layers, of which two have a bias."""
    return trained(tmp_path_factory.mktemp("plain"), microbatches=2)


def names_of(calls: RecordedCalls) -> list[dict[str, str]]:
    """For each call what its records say they are."""
    return [{name: calls.records[row].tensor_name for name, (row,) in call.rows.items()} for call in calls.calls]


def reasons(calls: RecordedCalls) -> dict[str, str]:
    """Why products are left out."""
    return {one.product: one.reason for one in calls.left_out}


def test_every_call_has_its_own_tensors_and_the_weight_of_its_iteration(plain: Run) -> None:
    calls = calls_of(plain.select())
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
    calls = calls_of(store(tmp_path / "run", tensors).select())
    assert [getattr(calls.records[call.rows["weight"][0]], along) for call in calls.calls] == [0, 1, 1]


def test_filters_choose_products_and_leave_their_operands(plain: Run) -> None:
    calls = calls_of(plain.select(microbatch=1, module="layers.0.up", operation="forward"))
    assert [set(call.products) for call in calls.calls] == [{"output"}] * 2
    assert all({"input", "weight", "bias", "output"} == set(call.rows) for call in calls.calls)
    calls = calls_of(plain.select(tensor_name="grad_weight"))
    assert {tuple(call.products) for call in calls.calls} == {("grad_weight",)}
    assert not calls_of(plain.select(tensor_name=["query", "weight"])).calls


def test_products_that_are_named_need_no_result(tmp_path: Path) -> None:
    arrays = call_arrays()
    frozen = call_tensors(arrays, without={"grad_weight"}, module="frozen", layer_idx=1)
    run = store(tmp_path / "run", [*frozen, *call_tensors(arrays)])
    assert {call.field("module"): set(call.products) for call in calls_of(run.select()).calls} == {
        "frozen": PRODUCTS - {"grad_weight"},
        "layers.0.linear": PRODUCTS,
    }
    named = calls_of(run.select(), products=["grad_weight"]).calls
    assert [set(call.products) for call in named] == [{"grad_weight"}] * 2
    # Where no layer has it, the capture left it out.
    assert "grad_weight" in calls_of(one_call(tmp_path, without={"grad_weight"}).select()).calls[0].products


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"without": {"input"}}, dict.fromkeys(("output", "grad_weight"), "no input was recorded")),
        ({"without": {"weight"}}, dict.fromkeys(("output", "grad_input"), "no weight was recorded")),
        ({"without": {"grad_output"}}, dict.fromkeys(("grad_input", "grad_weight"), "no grad_output was recorded")),
    ],
)
def test_a_missing_operand_is_named(tmp_path: Path, options: dict[str, Any], expected: dict[str, str]) -> None:
    calls = calls_of(one_call(tmp_path, **options).select())
    assert reasons(calls) == expected
    assert [set(call.products) for call in calls.calls] == [PRODUCTS - set(expected)]


def test_what_was_not_kept_cannot_be_multiplied(tmp_path: Path) -> None:
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in call_arrays().items()}
    kept = {"input": "histogram", "grad_output": "statistics"}
    tensors = [
        reduce_to(kept.get(info.tensor_name, "values"), array, info=info) or (array, info)
        for array, info in call_tensors(arrays)
    ]
    calls = calls_of(store(tmp_path / "run", tensors).select())
    assert reasons(calls) == {
        "output": "of input the histogram was kept, not the values",
        "grad_input": "of grad_output the statistics were kept, not the values",
        "grad_weight": "of grad_output the statistics were kept, not the values",
    }


def test_shapes_and_types_that_do_not_fit(tmp_path: Path) -> None:
    arrays = call_arrays() | {"input": np.ones((32, 23), np.float32)}
    assert reasons(calls_of(store(tmp_path / "a", call_tensors(arrays)).select())) == {
        "output": "the shapes of input and weight do not multiply",
        "grad_weight": "the shapes of input and weight are not of one call",
    }
    arrays = call_arrays() | {"input": np.ones((32, 24), np.int64)}
    assert set(reasons(calls_of(store(tmp_path / "b", call_tensors(arrays)).select())).values()) == {
        "input holds int64"
    }


@pytest.mark.parametrize(
    ("said", "product", "why"),
    [
        ({"grad_weight": {"metadata": {"accumulated": True}}}, "grad_weight", "accumulated over microbatches"),
        ({"input": {"sample_dim": 0, "batch_size": 64}}, "grad_weight", "of some samples alone"),
    ],
)
def test_results_of_something_else_are_not_compared(
    tmp_path: Path, said: dict[str, Any], product: str, why: str
) -> None:
    (call,) = calls_of(one_call(tmp_path, said=said).select()).calls
    assert why in call.products[product]
    assert set(call.rows) == {*PRODUCTS, "input", "weight", "grad_output", "bias"} - {product}
