"""Are figures over the iterations those of the raw tensors, and slopes and jumps those of scipy?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]  # it has no types
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.questions.trace import trace
from ranktape.analyze.questions.trend import trend
from ranktape.analyze.table import Table
from ranktape.errors import NoRecordsError, UnknownFieldError, UsageError
from ranktape.storage import Records, Run
from tests.analyze.faulty_runs import Place, Sizes, faulty_run
from tests.analyze.runs import describe_tensor, store

ITERATIONS = (0, 10, 20, 50)
SIZES = (1.0, 3.0, 2.0, 64.0)
UNCACHED = Engine(use_cache=False)


def values(iteration: int, rank: int, microbatch: int, layer: int) -> np.ndarray[Any, Any]:
    """Layer 1 changes, layer 0 does not."""
    ordinary = np.random.default_rng((rank, microbatch, layer)).standard_normal((4, 8)).astype(np.float16)
    return ordinary * np.float16(SIZES[ITERATIONS.index(iteration)] if layer else 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks with two microbatches in each of four iterations."""
    tensors = [
        describe_tensor(
            values(iteration, rank, microbatch, layer),
            iteration=iteration,
            rank=rank,
            microbatch=microbatch,
            layer_idx=layer,
        )
        for iteration in ITERATIONS
        for rank in (0, 1)
        for microbatch in (0, 1)
        for layer in (0, 1)
    ]
    return store(tmp_path_factory.mktemp("run"), tensors)


def together(iteration: int, layer: int) -> np.ndarray[Any, Any]:
    """All values of a layer in an iteration."""
    return np.concatenate([values(iteration, rank, batch, layer) for rank in (0, 1) for batch in (0, 1)]).astype(float)


def test_the_course_of_a_group(run: Run) -> None:
    rows = trend(run.select(), metric=["absmax", "mean"], by=["layer_idx"], engine=UNCACHED).records()
    assert [(row["layer_idx"], row["iteration"], row["records"]) for row in rows] == [
        (layer, iteration, 4) for layer in (0, 1) for iteration in ITERATIONS
    ]
    for row in rows:
        whole = together(row["iteration"], row["layer_idx"])
        assert row["absmax"] == np.abs(whole).max()
        assert row["mean"] == pytest.approx(whole.mean())
    assert [row["absmax.binades"] for row in rows[4:]] == [None, *np.diff(np.log2([r["absmax"] for r in rows[4:]]))]
    assert rows[5]["mean.change"] == pytest.approx(together(10, 1).mean() - together(0, 1).mean())
    # Means change sign, or not: a factor is given where both are positive.
    assert all(row["mean.binades"] is None or row["mean"] > 0 for row in rows)


def test_the_summary_of_a_group(run: Run) -> None:
    still, moving = trend(run.select(), metric=["absmax"], by=["layer_idx"], engine=UNCACHED, summary=True).records()
    assert (still["slope"], still["jump"], still["kendall_z"], still["last_over_first"]) == (0, 0, 0, 1)
    ends = [np.abs(together(iteration, 1)).max() for iteration in ITERATIONS]
    assert moving["slope"] == pytest.approx(scipy.stats.theilslopes(ends, ITERATIONS)[0])
    assert moving["binade_slope"] == pytest.approx(scipy.stats.theilslopes(np.log2(ends), ITERATIONS)[0])
    assert (moving["first"], moving["last"], moving["iterations"]) == (ends[0], ends[-1], 4)
    assert (moving["jump_binades"], moving["jump_iteration"]) == (pytest.approx(5, abs=0.01), 50)


def test_without_groups_each_place_is_one(run: Run) -> None:
    assert len(trend(run.select(), engine=UNCACHED).rows) == 2 * len(ITERATIONS)
    ends = trend(run.select(), summary=True, engine=UNCACHED)
    assert [row["module"] for row in ends.records()] == ["layers.0.linear", "layers.1.linear"]
    apart = trend(run.select(), by=["rank", "microbatch"], engine=UNCACHED)
    assert set(apart.column("records")) == {2}


def nothing_of(folder: Path, *arrays: np.ndarray[Any, Any], summary: bool = False) -> Table:
    """The trend of tensors that follow each other."""
    tensors = [describe_tensor(array, iteration=place) for place, array in enumerate(arrays)]
    names = ["absmax", "overflow.nan.ratio"]
    return trend(store(folder, tensors).select(), metric=names, summary=summary, engine=UNCACHED)


def test_what_has_no_figure(tmp_path: Path) -> None:
    empty, spoiled, zero = (np.full(shape, value, dtype=np.float32) for shape, value in ((0, 0), (4, np.nan), (4, 0)))
    rows = nothing_of(tmp_path / "many", empty, spoiled, zero, zero + 1).records()
    assert [row["absmax"] for row in rows] == [None, None, 0, 1]
    assert [row["absmax.binades"] for row in rows] == [None] * 4
    assert [row["overflow.nan.ratio"] for row in rows] == [0, 1, 0, 0]
    ends = nothing_of(tmp_path / "nan", spoiled, spoiled, summary=True).records()
    assert [ends[0][name] for name in ("first", "last", "slope", "jump")] == [None] * 4
    assert nothing_of(tmp_path / "one", zero + 1, summary=True).records()[0]["slope"] is None


def test_what_is_not_allowed(run: Run) -> None:
    with pytest.raises(UsageError, match="by 'iteration' is not allowed"):
        trend(run.select(), by=["iteration"])
    with pytest.raises(UsageError, match="no metric 'absmx'"):
        trend(run.select(), metric=["absmx"])
    with pytest.raises(UsageError, match="needs a metric"):
        trend(run.select(), metric=[])
    with pytest.raises(UnknownFieldError, match="lyer"):
        trend(run.select(), by=["lyer"])


def test_the_command(run: Run) -> None:
    url = str(run.url).removeprefix("file://")
    answer = CliRunner().invoke(cli, ["trend", url, "--metric", "std,absmax", "--by", "layer-idx", "--json"])
    assert answer.exit_code == 0, answer.output
    assert len(json.loads(answer.stdout)["rows"]) == 8
    summary = CliRunner().invoke(cli, ["trend", url, "--summary", "--csv"])
    assert summary.stdout.splitlines()[0].startswith("module,layer_type,layer_idx")


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
def followed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two layers, two ranks, two iterations."""
    sizes = Sizes(num_layers=2, iterations=(0, 10))
    return faulty_run(tmp_path_factory.mktemp("followed"), spoiled, sizes=sizes)


def steps(records: Records, **options: Any) -> list[dict[str, Any]]:
    """The rows as dictionaries."""
    return trace(records, engine=UNCACHED, **options).records()


def test_all_steps_of_a_rank(followed: Run) -> None:
    records = followed.select(rank=0, iteration=10)
    rows = steps(records)
    assert [row["tensor_name"] for row in rows] == ORDER
    for record, row in zip(records, rows, strict=True):
        values = record.read().astype(np.float64)
        assert row["absmax"] == np.abs(values).max()
        assert row["std"] == pytest.approx(values.std())
        assert row["norm"] == pytest.approx(np.linalg.norm(values))
    changes = np.diff(np.log2([row["absmax"] for row in rows]))
    assert [row["absmax.binades"] for row in rows] == [None, *map(pytest.approx, changes)]


def test_one_sample(followed: Run) -> None:
    rows = steps(
        followed.select(rank=0, iteration=0), sample=4, metric=["absmax", "mean", "rms", "overflow.zero.count"]
    )
    assert [row["tensor_name"] for row in rows] == [name for name in ORDER if "weight" not in name]
    records = [record for record in followed.select(rank=0, iteration=0) if record.sample_dim is not None]
    for record, row in zip(records, rows, strict=True):
        values = record.read()[4].astype(np.float64)
        assert row["absmax"] == np.abs(values).max()
        assert row["mean"] == pytest.approx(values.mean())
        assert row["rms"] == pytest.approx(np.sqrt((values**2).mean()))
        assert row["overflow.zero.count"] == (values == 0).sum()


def test_where_nan_begins(followed: Run) -> None:
    rows = steps(followed.select(rank=1), sample=1)
    first = [row for row in rows if row["first"]]
    # Once on each way: in each iteration.
    assert [(row["iteration"], row["tensor_name"], row["layer_idx"], row["first"]) for row in first] == [
        (0, "output", 1, "NaN"),
        (10, "output", 1, "NaN"),
    ]
    assert not any(row["first"] for row in steps(followed.select(rank=1), sample=2))
    assert [row["first"] for row in steps(followed.select(rank=1), sample=4) if row["first"]] == ["Inf", "Inf"]
    assert next(row["first"] for row in steps(followed.select(rank=1)) if row["first"]) == "NaN Inf"


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
    assert "1 records are left out" in table.notes[0]
    with pytest.raises(NoRecordsError, match="no record has sample 0: identifiers are 7, 9, b, x"):
        steps(records, sample=0)


def test_what_is_not_there(followed: Run, tmp_path: Path) -> None:
    with pytest.raises(NoRecordsError, match="no record has sample 6: batches have up to 6 samples"):
        steps(followed.select(), sample=6)
    with pytest.raises(NoRecordsError, match="no record has sample first"):
        steps(followed.select(), sample="first")
    with pytest.raises(UsageError, match="metric 'p99' is not available for samples"):
        steps(followed.select(), sample=0, metric=["p99"])
    weights = store(tmp_path, [describe_tensor(np.ones((2, 2), dtype=np.float32))]).select()
    with pytest.raises(NoRecordsError, match="the sample dimension is unknown"):
        steps(weights, sample=0)


def test_the_command_follows_a_sample(followed: Run) -> None:
    arguments = ["trace", str(followed.url).removeprefix("file://"), "--sample", "3", "--rank", "0", "--iteration", "0"]
    answer = CliRunner().invoke(cli, [*arguments, "--json"])
    assert answer.exit_code == 0, answer.output
    assert [row["step"] for row in json.loads(answer.stdout)["rows"]] == list(range(8))
    texts = [CliRunner().invoke(cli, [*arguments, *more]).stdout for more in ([], ["--wide"])]
    assert ["sample_index" in text for text in texts] == [False, True]
    assert CliRunner().invoke(cli, [*arguments, "--metric", "stdd"]).exit_code == 2
