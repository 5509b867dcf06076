"""Are ranges, norms and what formats flush of gradients those that numpy and ml_dtypes find?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.questions.gradients import gradients
from ranktape.analyze.table import Table
from ranktape.capture.writing.counting import reduce_to
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage import Run
from tests.analyze.runs import describe_tensor, model_tensors, store

UNCACHED = Engine(use_cache=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small transformer whose second layer's gradients are partly subnormal."""
    tensors = model_tensors(num_layers=2, num_ranks=2)
    for number, (array, info) in enumerate(tensors):
        if info.layer_idx == 1 and info.tensor_name == "grad_output":
            changed = array.astype(np.float32)
            changed[0] *= 2.0**-118
            tensors[number] = (changed.astype(ml_dtypes.bfloat16), info)
    return store(tmp_path_factory.mktemp("run"), tensors)


def asked(run: Run, **options: Any) -> Table:
    """The gradients of all records."""
    return gradients(run.select(), engine=UNCACHED, **options)


def raw(run: Run, **filters: Any) -> list[np.ndarray[Any, Any]]:
    """The values of the records that a row is about, in float64."""
    return [record.read().astype(np.float64) for record in run.select(**filters)]


def test_ranges(run: Run) -> None:
    rows = asked(run, format=["fp8_e4m3"], show="ranges").records()
    assert {(row["layer_type"], row["tensor_name"]) for row in rows} == {
        ("attention", "grad_output"),
        ("attention", "grad_query"),
        ("linear", "grad_output"),
        ("linear", "grad_weight"),
    }
    for row in rows:
        arrays = raw(run, layer_type=row["layer_type"], tensor_name=row["tensor_name"])
        whole = np.concatenate(arrays).reshape(-1)
        sizes = np.abs(whole[whole != 0])
        assert row["absmax"] == sizes.max()
        assert row["log2_range"] == pytest.approx(np.log2(sizes.max() / sizes.min()))
        assert row["overflow.underflow.ratio"] == (sizes < 2.0**-126).sum() / whole.size
        flushed = (whole.astype(ml_dtypes.float8_e4m3fn).astype(float) == 0) & (whole != 0)
        assert row["flushed.fp8_e4m3"] == flushed.mean()
        scaled = 0
        for array in arrays:
            scale = 2.0 ** np.ceil(np.log2(np.abs(array).max() / 448))
            scaled += (((array / scale).astype(ml_dtypes.float8_e4m3fn).astype(float) == 0) & (array != 0)).sum()
        assert row["flushed.fp8_e4m3.scaled"] == scaled / whole.size
    assert max(row["overflow.underflow.ratio"] for row in rows) > 0.1


def test_norms_beside_those_of_weights(run: Run) -> None:
    rows = asked(run, show="weights").records()
    assert [row["module"] for row in rows] == ["layers.0.linear", "layers.1.linear"]
    for row in rows:
        gradient, weight = (
            np.linalg.norm(np.concatenate(raw(run, module=row["module"], tensor_name=name)))
            for name in ("grad_weight", "weight")
        )
        assert row["norm.gradient"] == pytest.approx(gradient)
        assert row["norm_ratio"] == pytest.approx(gradient / weight)
        assert row["norm_ratio.binades"] == pytest.approx(np.log2(gradient / weight))


def test_forward_beside_backward(run: Run) -> None:
    rows = asked(run, by=["layer_type"], show="passes").records()
    assert [(row["layer_type"], row["tensor"]) for row in rows] == [
        ("attention", "output"),
        ("attention", "query"),
        ("linear", "output"),
        ("linear", "weight"),
    ]
    for row in rows:
        forward, backward = (
            np.concatenate(raw(run, layer_type=row["layer_type"], tensor_name=prefix + row["tensor"]))
            for prefix in ("", "grad_")
        )
        assert row["std.forward"] == pytest.approx(forward.std())
        assert row["std.backward"] == pytest.approx(backward.std())
        assert row["std.binades"] == pytest.approx(np.log2(backward.std() / forward.std()))
        assert row["absmax.backward"] == np.abs(backward).max()


def test_what_is_alone_empty_or_zero(tmp_path: Path) -> None:
    tensors = [
        describe_tensor(np.zeros((4, 4), dtype=np.float32), tensor_name="grad_weight", layer_idx=0),
        describe_tensor(np.zeros((4, 4), dtype=np.float32), tensor_name="weight", layer_idx=0),
        describe_tensor(np.zeros((0, 4), dtype=np.float32), tensor_name="grad_input", layer_idx=1),
        describe_tensor(np.array([np.nan, np.inf], dtype=np.float32), tensor_name="grad_output", layer_idx=2),
    ]
    run = store(tmp_path, tensors)
    assert asked(run, show="weights").column("norm_ratio") == [None]
    rows = {row["tensor_name"]: row for row in asked(run).records()}
    assert (rows["grad_input"]["absmax"], rows["grad_input"]["flushed.fp16"]) == (None, 0)
    assert (rows["grad_output"]["absmax"], rows["grad_weight"]["overflow.zero.ratio"]) == (None, 1)
    assert [row["absmax.forward"] for row in asked(run, show="passes").records()] == [None, None, 0]


@pytest.mark.parametrize(("keep", "is_known"), [("histogram", True), ("statistics", False)])
def test_what_was_kept(tmp_path: Path, keep: str, *, is_known: bool) -> None:
    array, info = describe_tensor(np.full((8, 8), 2.0**-20, dtype=ml_dtypes.bfloat16), tensor_name="grad_output")
    kept = reduce_to(keep, array, info=info)
    assert kept is not None
    other = describe_tensor(np.ones((8, 8), dtype=np.float32), tensor_name="grad_input")
    before, row = asked(store(tmp_path, [other, kept]), show="ranges").records()
    assert (before["absmax"], before["flushed.fp8_e5m2"]) == (1, 0)
    assert row["absmax"] == 2.0**-20
    assert (row["flushed.fp8_e5m2"], row["flushed.fp8_e5m2.scaled"]) == ((1, 0) if is_known else (None, None))


def test_what_is_not_allowed(run: Run) -> None:
    with pytest.raises(NoRecordsError, match="no record holds a gradient"):
        gradients(run.select(operation="forward"))
    with pytest.raises(UsageError, match="fp9"):
        gradients(run.select(), format=["fp9"])
    with pytest.raises(UsageError, match="no limits of its own"):
        gradients(run.select(), format=["mxfp8"])


@pytest.mark.parametrize("show", ["ranges", "weights", "passes"])
def test_the_command(run: Run, show: str) -> None:
    arguments = ["gradients", str(run.url).removeprefix("file://"), "--show", show, "--json", "--no-cache"]
    answer = CliRunner().invoke(cli, arguments)
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["rows"]
