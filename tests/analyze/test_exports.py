"""Do the programs that people look at all day read from an export what the run holds?"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

from ranktape.analyze import distribution, stats
from ranktape.analyze.views.export import EVENTS as FILE
from ranktape.analyze.views.export import MAX_BINS, METRICS, BinnedValues, place_names, points
from ranktape.launch.cli import cli
from ranktape.storage import Run
from tests.analyze.runs import describe_tensor, model_tensors, store
from tests.optional import needs

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ITERATIONS = (10, 20, 30)


def export(run: Run, *words: str | Path) -> Result:
    """The command in this process; what it did not expect to happen is raised."""
    return CliRunner().invoke(cli, ["export", run.url, *map(str, words)], catch_exceptions=False)


def told(result: Result) -> str:
    """What a command that must succeed without a complaint wrote."""
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two layers on two ranks in three iterations."""
    tensors = model_tensors(num_layers=2, num_ranks=2, iterations=ITERATIONS)
    return store(tmp_path_factory.mktemp("exports") / "run", tensors)


@pytest.fixture(scope="module")
def events(run: Run, tmp_path_factory: pytest.TempPathFactory) -> EventAccumulator:
    """What TensorBoard's own reader finds in an export."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing import event_accumulator

    folder = tmp_path_factory.mktemp("tensorboard")
    said = told(export(run, "--to", "tensorboard", folder))
    assert said.startswith(f"{folder / FILE}: 378 scalars, 108 histograms, 2 pictures of 18 groups, 3 iterations\n")
    guidance = {event_accumulator.SCALARS: 0, event_accumulator.HISTOGRAMS: 0, event_accumulator.IMAGES: 0}
    found = event_accumulator.EventAccumulator(str(folder), size_guidance=guidance)
    found.Reload()
    return found


def test_tensorboard_reads_every_metric_of_every_place_in_every_iteration(run: Run, events: EventAccumulator) -> None:
    assert len(events.Tags()["scalars"]) == 18 * len(METRICS)
    rows = stats(run.select(), metric=METRICS, by=["module", "tensor_name", "operation", "iteration"]).to_json()["rows"]
    for row in rows:
        for name in METRICS:
            # Both operations of attention and of linear layers have a tensor of that name in none.
            found = events.Scalars(f"{name}/{row['module']}/{row['tensor_name']}")
            (value,) = [event.value for event in found if event.step == row["iteration"]]
            assert value == np.float32(row[name])
    event = events.Scalars("absmax/layers.0.linear/weight")[0]
    chosen = run.select(module="layers.0.linear", tensor_name="weight", iteration=10)
    assert event.wall_time == chosen.column("timestamp").max()


def test_tensorboard_reads_histograms_of_all_values(run: Run, events: EventAccumulator) -> None:
    assert len(events.Tags()["histograms"]) == 2 * 18
    chosen = run.select(module="layers.1.attention", tensor_name="query", iteration=20)
    values = np.concatenate([record.read().astype(np.float64).reshape(-1) for record in chosen])
    (linear,) = [one for one in events.Histograms("values/layers.1.attention/query") if one.step == 20]
    found = linear.histogram_value
    edges = np.array([found.min, *found.bucket_limit])
    assert (found.min, found.max, found.num) == (values.min(), values.max(), values.size)
    assert found.bucket == np.histogram(values, edges)[0].tolist()
    assert (found.sum, found.sum_squares) == pytest.approx((values.sum(), (values**2).sum()))
    (binades,) = [one for one in events.Histograms("binades/layers.1.attention/query") if one.step == 20]
    found = binades.histogram_value
    exponents = np.floor(np.log2(np.abs(values[values != 0])))
    assert found.bucket == [int((exponents == limit - 1).sum()) for limit in found.bucket_limit]
    assert found.num == np.count_nonzero(values)


def test_tensorboard_reads_pictures(events: EventAccumulator) -> None:
    assert set(events.Tags()["images"]) == {"plots/overflow", "plots/layer_binades"}
    (picture,) = events.Images("plots/overflow")
    assert picture.encoded_image_string.startswith(b"\x89PNG")
    assert picture.step == 30
    from PIL import Image

    path = Path(str(events.path)) / "picture.png"
    path.write_bytes(picture.encoded_image_string)
    with Image.open(path) as image:
        assert image.size == (picture.width, picture.height)


@needs("tensorboard")
def test_the_same_records_give_the_same_file_and_others_need_a_word(run: Run, tmp_path: Path) -> None:
    few = ("--to", "tensorboard", tmp_path / "logs", "--kind", "none", "--layer-idx", "0")
    (tmp_path / "logs").mkdir()
    training = tmp_path / "logs" / "events.out.tfevents.1.training"
    training.write_bytes(b"the training's own")
    told(export(run, *few))
    first = (tmp_path / "logs" / FILE).read_bytes()
    assert "iterations; it already exists\n" in told(export(run, *few))
    result = export(run, *few, "--metric", "p99.9")
    assert result.exit_code == 2
    assert "already exists with other content: add --overwrite, or choose another folder" in result.stderr
    assert (tmp_path / "logs" / FILE).read_bytes() == first
    assert "27 scalars, 54 histograms of 9 groups" in told(export(run, *few, "--metric", "p99.9", "--overwrite"))
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == sorted([training.name, FILE])
    assert training.read_bytes() == b"the training's own"


def test_points_are_of_groups_where_these_are_asked_for(run: Run) -> None:
    found = points(run.select(layer_type="linear"), metrics=["elements"], by=["layer_idx", "rank"])
    places = [f"layer_idx {layer}/rank {rank}" for layer in (0, 1) for rank in (0, 1)]
    assert [point.place for point in found] == places * 3
    assert [point.iteration for point in found] == [10] * 4 + [20] * 4 + [30] * 4
    assert {point.metrics["elements"] for point in found} == {5 * 4 * 64}
    assert points(run.select(), metrics=["elements"], has_histograms=False)[0].values is None


def test_places_have_as_few_words_as_tell_them_apart() -> None:
    base = {"module": "m", "layer_type": "linear", "operation": "forward", "tensor_name": "input", "mode": "train"}
    keys = [base, base | {"tensor_name": "weight"}]
    assert place_names(keys, is_whole=False) == ["m/input", "m/weight"]
    keys = [base, base | {"mode": "eval"}, base | {"module": ""}]
    assert place_names(keys, is_whole=False) == ["m/input/train", "m/input/eval", "no module/input/train"]
    assert place_names([{}], is_whole=True) == ["all"]
    names = place_names([{"rank": 1, "batch_size": 2.0}, {"rank": 0, "batch_size": None}], is_whole=True)
    assert names == ["rank 1/batch_size 2", "rank 0/no batch_size"]


def one_point(folder: Path, array: np.ndarray[Any, Any]) -> tuple[BinnedValues | None, BinnedValues | None]:
    """The histograms of a run of one tensor."""
    (point,) = points(store(folder, [describe_tensor(array, tensor_name="input")]).select())
    return point.values, point.binades


def test_histograms_at_the_ends(tmp_path: Path) -> None:
    assert one_point(tmp_path / "nothing", np.zeros((0, 4), np.float32)) == (None, None)
    values, binades = one_point(tmp_path / "nan", np.full((2, 2), np.nan, np.float32))
    assert (values, binades) == (None, None)
    values, binades = one_point(tmp_path / "zero", np.zeros((2, 2), ml_dtypes.bfloat16))
    assert values is not None
    assert (values.num_values, values.sum, binades) == (4, 0.0, None)
    wide = np.array([5e-324, 1.0, 1.5, np.finfo(np.float64).max, -2.0, 0.0, np.inf])
    values, binades = one_point(tmp_path / "wide", wide)
    assert values is not None
    assert binades is not None
    assert values.num_values == 6
    assert np.isfinite(values.edges).all()
    assert (binades.num_values, binades.counts.size <= MAX_BINS) == (5, True)
    exponents = np.floor(np.log2(np.abs(wide[[0, 1, 2, 3, 4]])))
    assert binades.counts.tolist() == np.histogram(exponents, binades.edges)[0].tolist()


def test_histograms_are_those_of_distribution(run: Run) -> None:
    chosen = run.select(module="layers.0.linear", tensor_name="input")
    rows = distribution(chosen, kind="log2", by=["iteration"]).to_json()["rows"]
    for point in points(chosen):
        assert point.binades is not None
        assert point.binades.counts.tolist() == [row["count"] for row in rows if row["iteration"] == point.iteration]


PARQUET = ("--to", "parquet")


@needs("pyarrow")
def test_the_catalogue_opens_as_parquet(run: Run, tmp_path: Path) -> None:
    said = told(export(run, *PARQUET, tmp_path / "out", "--metric", "std,p99.9,overflow.ratio"))
    path = tmp_path / "out" / "records.parquet"
    assert said.startswith(f"{path}: 108 records, 48 columns\n")
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    catalogue = run.select().to_arrow()
    assert table.select(catalogue.column_names).equals(catalogue)
    rows = stats(run.select(), metric=["std", "p99.9"]).to_json()["rows"]
    assert table["std"].to_pylist() == [row["std"] for row in rows]
    assert table["p99.9"].to_pylist() == [row["p99.9"] for row in rows]


SQL = """SELECT layer_type, operation, sum(nbytes) AS nbytes, max("overflow.absmax") AS absmax
FROM '{path}' WHERE iteration = 10 GROUP BY ALL ORDER BY ALL"""


@pytest.fixture(scope="module")
def parquet(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The catalogue as a file."""
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("parquet")
    told(export(run, *PARQUET, folder))
    return folder / "records.parquet"


def sums(run: Run) -> list[tuple[str, str, int, float]]:
    """What each library must answer."""
    groups = run.select(iteration=10).group_by(["layer_type", "operation"])
    return [
        (*key.values(), int(records.column("nbytes").sum()), float(records.column("overflow.absmax").max()))
        for key, records in groups
    ]


@needs("duckdb")
def test_duckdb_opens_it(run: Run, parquet: Path) -> None:
    import duckdb

    assert duckdb.sql(SQL.format(path=parquet)).fetchall() == sums(run)


@needs("pandas")
def test_pandas_opens_it(run: Run, parquet: Path) -> None:
    import pandas as pd  # type: ignore[import-untyped]  # it has no types

    frame = pd.read_parquet(parquet)
    found = frame[frame["iteration"] == 10].groupby(["layer_type", "operation"])[["nbytes", "overflow.absmax"]]
    columns = found.agg({"nbytes": "sum", "overflow.absmax": "max"}).reset_index()
    assert list(columns.itertuples(index=False, name=None)) == sums(run)


@needs("polars")
def test_polars_opens_it(run: Run, parquet: Path) -> None:
    import polars as pl

    keys = ["layer_type", "operation"]
    wanted = (pl.col("nbytes").sum(), pl.col("overflow.absmax").max())
    found = pl.read_parquet(parquet).filter(pl.col("iteration") == 10).group_by(keys).agg(*wanted).sort(keys)
    assert found.rows() == sums(run)


def test_a_mistake_is_one_line_before_anything_is_written(run: Run, tmp_path: Path) -> None:
    cases: list[tuple[str, str]] = [
        ("--to tensorbord DIR", "'tensorbord' is not one of 'pt', 'tensorboard', 'parquet'"),
        ("--to tensorboard DIR --metric absmx", "no metric 'absmx': use absmax"),
        ("--to tensorboard DIR --kind overflw", "--kind 'overflw' names no plot: did you mean overflow"),
        (
            "--to tensorboard DIR --kind rank_deviation --rank 0",
            "--kind rank_deviation cannot be drawn: there is only one rank",
        ),
        ("--to tensorboard DIR --by iteration", "by 'iteration' is not allowed"),
        ("--to tensorboard DIR --by layer", "layer"),
        ("--to tensorboard FILE", "is a file: give a folder"),
        ("--to parquet s3://bucket/x", "is a URL"),
        ("--to parquet DIR --kind overflow", "--kind is only for --to tensorboard, not for --to parquet"),
        ("--to parquet DIR --no-histograms", "--no-histograms is only for --to tensorboard"),
        ("--to tensorboard DIR --form layers", "--form is only for --to pt, not for --to tensorboard"),
        ("DIR --metric absmax", "--metric is only for --to tensorboard or --to parquet, not for --to pt"),
        ("DIR --by rank", "--by is only for"),
        ("--to parquet ''", "an empty name is not allowed"),
    ]
    for words, said in cases:
        (tmp_path / "file").write_text("a file")
        names = {"DIR": str(tmp_path / "dir"), "FILE": str(tmp_path / "file"), "''": ""}
        result = export(run, *(names.get(word, word) for word in words.split()))
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
        assert not (tmp_path / "dir").exists()


@pytest.mark.parametrize(("to", "package"), [("tensorboard", "TensorBoard"), ("parquet", "pyarrow")])
def test_a_library_that_is_not_installed_is_named_with_the_way_to_get_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, package: str
) -> None:
    module = {"parquet": "pyarrow"}.get(to, to)
    for loaded in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    # None in the place of a module is how Python itself says that it cannot be imported.
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    result = export(run, "place", "--to", to)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: --to {to} needs {package} (")
    assert result.stderr.endswith(f"pip install 'ranktape[{to}]'\n")
    assert not (tmp_path / "place").exists()


@pytest.mark.parametrize("library", ["duckdb", "pandas", "polars"])
def test_the_examples_of_the_page_run(
    parquet: Path, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(library)
    page = (Path(__file__).parents[2] / "docs" / "exports.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"import {library}" in one]
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / parquet.name).write_bytes(parquet.read_bytes())
    monkeypatch.chdir(tmp_path)
    exec(compile(block, library, "exec"), {})  # noqa: S102 - our own page
    assert "attention" in capsys.readouterr().out
