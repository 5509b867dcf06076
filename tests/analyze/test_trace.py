"""Is a sample followed in the order of execution, with the figures that numpy finds in it?"""

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
from ranktape.analyze.questions.trace import trace
from ranktape.errors import NoRecordsError, UsageError
from ranktape.storage import Records, Run
from tests.analyze.faulty_runs import Place, Sizes, faulty_run
from tests.analyze.runs import describe_tensor, store

UNCACHED = Engine(use_cache=False)
ORDER = ["input", "weight", "output", "input", "weight", "output"]
ORDER += ["grad_output", "grad_weight", "grad_input"] * 2


def spoiled(place: Place, tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """NaN in sample 1 of rank 1 from the second layer's output on."""
    if place[1:] == (1, 1, "output"):
        tensor = tensor.copy()
        tensor[1, 2, 3] = np.nan
        tensor[4, 0, 0] = np.inf
    return tensor


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two layers, two ranks, two iterations."""
    sizes = Sizes(num_layers=2, iterations=(0, 10))
    return faulty_run(tmp_path_factory.mktemp("run"), spoiled, sizes=sizes)


def steps(records: Records, **options: Any) -> list[dict[str, Any]]:
    """The rows as dictionaries."""
    return trace(records, engine=UNCACHED, **options).records()


def test_all_steps_of_a_rank(run: Run) -> None:
    records = run.select(rank=0, iteration=10)
    rows = steps(records)
    assert [row["tensor_name"] for row in rows] == ORDER
    for record, row in zip(records, rows, strict=True):
        values = record.read().astype(np.float64)
        assert row["absmax"] == np.abs(values).max()
        assert row["std"] == pytest.approx(values.std())
        assert row["norm"] == pytest.approx(np.linalg.norm(values))
    changes = np.diff(np.log2([row["absmax"] for row in rows]))
    assert [row["absmax.binades"] for row in rows] == [None, *map(pytest.approx, changes)]


def test_one_sample(run: Run) -> None:
    rows = steps(run.select(rank=0, iteration=0), sample=4, metric=["absmax", "mean", "rms", "overflow.zero.count"])
    assert [row["tensor_name"] for row in rows] == [name for name in ORDER if "weight" not in name]
    records = [record for record in run.select(rank=0, iteration=0) if record.sample_dim is not None]
    for record, row in zip(records, rows, strict=True):
        values = record.read()[4].astype(np.float64)
        assert row["absmax"] == np.abs(values).max()
        assert row["mean"] == pytest.approx(values.mean())
        assert row["rms"] == pytest.approx(np.sqrt((values**2).mean()))
        assert row["overflow.zero.count"] == (values == 0).sum()


def test_where_nan_begins(run: Run) -> None:
    rows = steps(run.select(rank=1), sample=1)
    first = [row for row in rows if row["first"]]
    # Once on each way: in each iteration.
    assert [(row["iteration"], row["tensor_name"], row["layer_idx"], row["first"]) for row in first] == [
        (0, "output", 1, "NaN"),
        (10, "output", 1, "NaN"),
    ]
    assert not any(row["first"] for row in steps(run.select(rank=1), sample=2))
    assert [row["first"] for row in steps(run.select(rank=1), sample=4) if row["first"]] == ["Inf", "Inf"]
    assert next(row["first"] for row in steps(run.select(rank=1)) if row["first"]) == "NaN Inf"


def test_overflow_in_what_was_computed_in(tmp_path: Path) -> None:
    tensors = [
        describe_tensor(
            np.array([1.0, 2.0], dtype=np.float32), compute_dtype="float16", counter=0, tensor_name="input"
        ),
        describe_tensor(
            np.array([1.0, 7e4], dtype=np.float32), compute_dtype="float16", counter=1, tensor_name="output"
        ),
    ]
    assert [row["first"] for row in steps(store(tmp_path, tensors).select())] == ["", "overflow"]


def test_identifiers_of_samples(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((3, 4)).astype(ml_dtypes.bfloat16)
    ids: tuple[list[int | str], ...] = ([7, "b", 9], [9, 7, "x"])
    tensors = [
        describe_tensor(array, sample_dim=0, sample_ids=one, microbatch=batch, counter=batch)
        for batch, one in enumerate(ids)
    ]
    records = store(tmp_path, tensors).select()
    assert [row["sample_index"] for row in steps(records, sample="7")] == [0, 1]
    table = trace(records, sample="b", engine=UNCACHED)
    assert (table.column("microbatch"), table.column("absmax")) == ([0], [np.abs(array[1].astype(float)).max()])
    assert "1 records left out" in table.notes[0]
    with pytest.raises(NoRecordsError, match="no record has sample 0: identifiers are 7, 9, b, x"):
        steps(records, sample=0)


def test_what_is_not_there(run: Run, tmp_path: Path) -> None:
    with pytest.raises(NoRecordsError, match="no record has sample 6: batches have up to 6 samples"):
        steps(run.select(), sample=6)
    with pytest.raises(NoRecordsError, match="no record has sample first"):
        steps(run.select(), sample="first")
    with pytest.raises(UsageError, match="metric 'p99' is not known of samples"):
        steps(run.select(), sample=0, metric=["p99"])
    weights = store(tmp_path, [describe_tensor(np.ones((2, 2), dtype=np.float32))]).select()
    with pytest.raises(NoRecordsError, match="no dimension of samples is known"):
        steps(weights, sample=0)


def test_the_command(run: Run) -> None:
    arguments = ["trace", str(run.url).removeprefix("file://"), "--sample", "3", "--rank", "0", "--iteration", "0"]
    answer = CliRunner().invoke(cli, [*arguments, "--json"])
    assert answer.exit_code == 0, answer.output
    assert [row["step"] for row in json.loads(answer.stdout)["rows"]] == list(range(8))
    assert CliRunner().invoke(cli, [*arguments, "--metric", "stdd"]).exit_code == 2
