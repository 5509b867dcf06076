"""Does the sweep of a selection say for each tensor, and for each group, what the sweep of the values says?"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import ranktape.analyze
from ranktape.analyze import View, overflow, sweep
from ranktape.analyze.cli import cli
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.sweep_measure import Job, RecordJobs, sweep_record, sweep_records
from ranktape.analyze.engine.values import read_values
from ranktape.analyze.numerics.sweeps.options import SweepOptions, resolve
from ranktape.analyze.numerics.sweeps.sweep import sweep_array, sweep_schemes
from ranktape.analyze.questions.advice import common_scale
from ranktape.analyze.table import Table
from ranktape.capture.writing.counting import reduce_to
from ranktape.errors import DataError, RanktapeError, UnknownFieldError, UsageError
from ranktape.storage import Records, Run, open_run
from tests.analyze.runs import Tensor, describe_tensor, model_tensors, store
from tests.analyze.test_kept_histogram import kept_as_histogram


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two layers of a model."""
    return store(tmp_path_factory.mktemp("run"), model_tensors())


def test_each_record_has_its_recommended_level(run: Run) -> None:
    records = run.select()
    table = sweep(records, format="fp8_e4m3")
    assert len(table.rows) == len(records) == 18
    for record, row in zip(records, table.records(), strict=True):
        found = sweep_array(record.read(), format="fp8_e4m3")
        level = found.recommended
        assert level is not None
        assert {name: row[name] for name in dataclasses.asdict(level)} == dataclasses.asdict(level)
        assert row["tensor_name"] == record.tensor_name
        assert row["shape"] == list(record.shape)
        assert (row["elements"], row["nan"], row["inf"], row["note"]) == (256, 0, 0, "")
        best = found.best(lambda one: -one.mse)
        assert best is not None
        assert row["best_mse_exponent"] == row["best_psnr_exponent"] == best.exponent


def test_a_tensor_of_which_no_level_keeps_anything_has_a_note(run: Run) -> None:
    options = SweepOptions(max_scale_exp=40, min_scale_exp=30)
    notes = sweep(run.select(layer_idx=0), format="fp8_e4m3", options=options).column("note")
    assert set(notes) == {"all levels lose nearly everything: try smaller scales"}


def test_every_level_has_a_row_if_asked(run: Run) -> None:
    records = run.select(tensor_name="weight", layer_idx=0)
    table = sweep(records, format="fp4_e2m1", with_levels=True, options=SweepOptions(num_levels=5))
    found = sweep_array(records[0].read(), format="fp4_e2m1", options=SweepOptions(num_levels=5))
    assert table.column("exponent") == [level.exponent for level in found.levels]
    assert table.column("mse") == [level.mse for level in found.levels]
    assert [row["exponent"] for row in table.records() if row["note"] == "recommended"] == [
        level.exponent for level in [found.recommended] if level is not None
    ]


def test_groups_summarise_their_records(run: Run) -> None:
    records = run.select()
    single = sweep(records, format="fp8_e4m3").records()
    table = sweep(records, format="fp8_e4m3", by=["layer_type", "operation"])
    assert len(table.rows) == 4
    for row in table.records():
        members = [
            one for one in single if (one["layer_type"], one["operation"]) == (row["layer_type"], row["operation"])
        ]
        exponents = [one["exponent"] for one in members]
        assert row["records"] == len(members)
        assert (row["lowest_exponent"], row["highest_exponent"]) == (min(exponents), max(exponents))
        assert row["median_exponent"] == statistics.median(exponents)
        assert row["worst_cosine"] == min(one["cosine"] for one in members)
        assert row["worst_flushed_ratio"] == max(one["flushed_ratio"] for one in members)


def test_a_note_sums_up_the_selection(run: Run) -> None:
    exponents = sweep(run.select(), format="fp8_e4m3").column("exponent")
    (note,) = sweep(run.select(), format="fp8_e4m3").notes
    assert note.startswith(f"recommended exponents of 18 tensors: median {statistics.median(exponents):.4g} (scale ")
    assert note.endswith(f"from {min(exponents):.4g} to {max(exponents):.4g}")


def test_tensors_without_a_scale_have_a_row_and_a_note(tmp_path: Path) -> None:
    tensors = [
        describe_tensor(np.zeros(3, dtype=np.float32), tensor_name="zeros"),
        describe_tensor(np.full(3, np.nan, dtype=np.float16), tensor_name="nan"),
        describe_tensor(np.array([1.0, np.inf], dtype=np.float16), tensor_name="inf"),
        describe_tensor(np.zeros(0, dtype=ml_dtypes.bfloat16), tensor_name="empty"),
        describe_tensor(np.arange(5), tensor_name="tokens"),
    ]
    records = store(tmp_path, tensors).select()
    table = sweep(records, format="fp8_e4m3")
    rows = {row["tensor_name"]: row for row in table.records()}
    assert {name: rows[name]["note"] for name in ("zeros", "nan", "inf", "empty")} == {
        "zeros": "all zero: exact at any scale",
        "nan": "no finite number",
        "inf": "NaN or Inf left out",
        "empty": "empty",
    }
    assert rows["zeros"]["exponent"] is None
    assert "tokens" not in rows, "no scale is sought for indices"
    assert table.notes == (
        "2 of 4 tensors contain NaN or Inf, which are left out of the metrics",
        "3 of 4 tensors have no finite nonzero value, and no scale",
    )
    with pytest.raises(UsageError, match="no record has floating-point numbers"):
        sweep(records.select(tensor_name="tokens"), format="fp8_e4m3")
    grouped = sweep(records, format="fp8_e4m3", by=["tensor_name"]).records()
    assert grouped[0]["tensor_name"] == "empty"
    assert grouped[0]["median_exponent"] is None
    levels = sweep(records.select(tensor_name="zeros"), format="fp8_e4m3", with_levels=True).records()
    assert [row["note"] for row in levels] == ["all zero: exact at any scale"]


def test_values_are_those_computed_with_unless_asked(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    records = store(tmp_path, [describe_tensor(values, compute_dtype="bfloat16")]).select()
    for view, expected in ((View.COMPUTE, values.astype(ml_dtypes.bfloat16)), (View.SEEN, values)):
        level = sweep_array(expected, format="fp8_e4m3").recommended
        assert level is not None
        assert sweep(records, format="fp8_e4m3", view=view).column("mse") == [level.mse]


def test_what_is_not_allowed_is_refused(run: Run) -> None:
    records = run.select()
    with pytest.raises(UsageError, match="--levels and --by exclude each other"):
        sweep(records, format="fp8_e4m3", by=["rank"], with_levels=True)
    with pytest.raises(UsageError, match="did you mean fp8_e4m3"):
        sweep(records, format="fp8-e4m3")
    with pytest.raises(UnknownFieldError, match="bogus"):
        sweep(records, format="fp8_e4m3", by=["bogus"])


FORMATS_AT_ONCE = ("fp8_e4m3", "fp4_e2m1", "mxfp8_e4m3", "nvfp4", "hif8")


def test_several_formats_are_what_each_is_alone(run: Run) -> None:
    records = run.select(layer_idx=0)
    together = sweep(records, format=FORMATS_AT_ONCE).records()
    assert [row["format"] for row in together[: len(FORMATS_AT_ONCE)]] == list(FORMATS_AT_ONCE)
    for name in FORMATS_AT_ONCE:
        alone = sweep(records, format=name)
        ours = [row for row in together if row["format"] == name]
        assert [{column: row[column] for column in alone.records()[0]} for row in ours] == alone.records()
    assert sweep(records, format="fp8_e4m3,mxfp8").column("format") == ["fp8_e4m3", "mxfp8_e4m3"] * 9


def test_the_best_format_of_a_record_is_the_narrowest_that_keeps_enough(run: Run) -> None:
    records = run.select(layer_idx=0)
    for target, expected in ((10.0, {"fp4_e2m1", "mxfp4_e2m1"}), (26.0, {"fp8_e4m3"}), (99.0, {"fp8_e4m3"})):
        rows = sweep(records, format="fp4_e2m1,mxfp4,fp8_e4m3", target_sqnr=target).records()
        assert {row["best_format"] for row in rows} <= expected
        assert {row["meets_target"] for row in rows} == {"yes" if target < 99 else "no"}
        assert all((row["best_format_sqnr"] >= target) is (target < 99) for row in rows)


def test_the_common_scale_of_a_group_is_the_best_of_whole_exponents(run: Run) -> None:
    records = run.select(tensor_name="query")
    (row,) = sweep(records, format="fp4_e2m1", by=["tensor_name"]).records()
    preferred = sweep(records, format="fp4_e2m1").column("exponent")
    first, last = math.ceil(max(preferred)) + 1, math.floor(min(preferred)) - 1
    grid = SweepOptions(max_scale_exp=first, min_scale_exp=last, num_levels=first - last + 1)
    levels = [sweep_array(record.read(), format="fp4_e2m1", options=grid).levels for record in records]
    scores = [statistics.fmean(level.score for level in row) for row in zip(*levels, strict=True)]
    index = scores.index(max(scores))
    assert (row["common_exponent"], row["common_score"]) == (first - index, max(scores))
    assert row["common_scale"] == 2.0 ** row["common_exponent"]
    assert row["worst_common_price"] == max(max(one.sqnr for one in own) - own[index].sqnr for own in levels)


def test_offsets_of_blocks_are_common(run: Run) -> None:
    records = run.select(layer_type="linear", operation="forward")
    (row,) = sweep(records, format="mxfp4", by=["operation"]).records()
    levels = [sweep_array(record.read(), format="mxfp4").levels for record in records]
    scores = {of[0].exponent: statistics.fmean(level.score for level in of) for of in zip(*levels, strict=True)}
    assert scores[row["common_exponent"]] == row["common_score"] == max(scores.values())


@pytest.mark.parametrize("axis", [-1, 0])
def test_kept_counts_of_blocks_answer_as_values_do(tmp_path: Path, axis: int) -> None:
    array, info = model_tensors(num_layers=1)[0]
    kept = reduce_to("histogram", array, info=info)
    assert kept is not None
    values, counts = store(tmp_path / "values", [(array, info)]).select(), store(tmp_path / "kept", [kept]).select()
    options = SweepOptions(axis=axis)
    ours, theirs = (sweep(one, format="mxfp4,fp8_e4m3", options=options).records() for one in (counts, values))
    figures = ("exponent", "overflow_count", "flushed_count")
    assert [[row[name] for name in figures] for row in ours] == [[row[name] for name in figures] for row in theirs]
    assert [row["mse"] for row in ours] == pytest.approx([row["mse"] for row in theirs], rel=1e-12)
    with pytest.raises(UsageError, match=r"--axis -1 and not 5|--axis"):
        sweep(counts, format="mxfp4", options=SweepOptions(axis=5))
    with pytest.raises(UsageError, match="nvfp4"):
        sweep(counts, format="nvfp4")


def test_records_that_tell_no_group_apart_are_one_group(tmp_path: Path) -> None:
    tensors = [describe_tensor(np.ones(4, np.float32), tensor_name=name, batch_size=None) for name in "ab"]
    records = store(tmp_path, tensors).select()
    assert [row["records"] for row in sweep(records, format="mxfp8", by=["batch_size"]).records()] == [2]


@pytest.mark.parametrize(("ask", "most"), [(partial(sweep, format="fp8_e4m3"), 9), (overflow, 7)])
def test_an_answer_that_is_known_enters_few_modules(run: Run, ask: Callable[[Records], Table], most: int) -> None:
    records, package = run.select(), str(Path(ranktape.analyze.__file__).parent)
    ask(records)
    entered = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        ask(records)
    finally:
        sys.setprofile(before)
    assert 1 < len(entered) <= most


FORMATS = ("mxfp8", "mxfp4", "nvfp4", "fp8_e4m3", "hif8", "mxint8")


def tensors() -> list[Tensor]:
    """Of every kind that is swept in a way of its own."""
    rng = np.random.default_rng(3)

    def values(dtype: Any, *shape: int) -> Any:
        with np.errstate(over="ignore"):
            return (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 6, shape)).astype(dtype)

    spoiled = values(ml_dtypes.bfloat16, 8, 70)
    spoiled[0, :3] = [np.nan, np.inf, -np.inf]
    patterns = rng.integers(0, 1 << 16, 4096, dtype=np.uint16).view(np.float16).reshape(64, 64)
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (spoiled, {}),
        (values(np.float32, 4, 64), {}),
        (values(np.float32, 4, 64), {"compute_dtype": "bfloat16"}),
        (values(ml_dtypes.float8_e4m3fn, 6, 33), {}),
        (patterns, {}),
        (np.zeros((3, 5), dtype=np.float16), {}),
        (np.zeros((0, 5), dtype=ml_dtypes.bfloat16), {}),
        (np.array(0.3, dtype=ml_dtypes.bfloat16), {}),
        (values(np.complex64, 3, 40), {}),
    ]
    described = [describe_tensor(array, layer_idx=index, **fields) for index, (array, fields) in enumerate(kinds)]
    kept = describe_tensor(values(ml_dtypes.bfloat16, 8, 64), layer_idx=len(kinds))
    return [*described, kept_as_histogram(kept)]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tensor of each kind."""
    return store(tmp_path_factory.mktemp("swept"), tensors())


def jobs(*names: str, **options: Any) -> list[Job]:
    """What is sought in each format."""
    chosen = SweepOptions(**options)
    return [Job(*resolve(name, options=chosen), chosen) for name in names]


def fields(found: Any) -> Any:
    """All that a sweep says, with NaN equal to itself."""
    return repr([dataclasses.asdict(sweep) for sweep in found])


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (FORMATS, {}),
        (("mxfp8", "mxfp6"), {"axis": 0, "scale_rule": "rceil"}),
        (("fp8_e4m3", "fp4_e2m1"), {"mode": "channel"}),
        (("fp8_e4m3",), {"mode": "legacy"}),
        (("mxfp4",), {"block_size": 7, "num_levels": 3}),
    ],
)
def test_counts_answer_as_values_do(swept: Run, names: tuple[str, ...], options: dict[str, Any]) -> None:
    records = swept.select(dtype=["bfloat16", "float16", "float32", "float8_e4m3fn", "complex64"], keep="values")
    wanted = jobs(*names, **options)
    view = View.COMPUTE
    for use_cache in (True, True, False):
        whole: RecordJobs = {None: wanted}
        found = sweep_records(records, [whole] * len(records), view=view, engine=Engine(use_cache=use_cache))
        for record, sweeps in zip(records, found, strict=True):
            expected: tuple[Any, ...] | RanktapeError
            try:
                # As one reading of the values alone has it.
                pairs = [(job.scheme, job.mode) for job in wanted]
                expected = sweep_schemes(read_values(record, view=view), pairs, options=wanted[0].options)
            except RanktapeError as error:
                expected = error
            if isinstance(expected, RanktapeError) or isinstance(sweeps, RanktapeError):
                assert str(expected) == str(sweeps)
            else:
                assert fields(sweeps[None]) == fields(expected), record


def test_records_may_be_asked_different_things(swept: Run) -> None:
    records = swept.select()
    wanted: list[RecordJobs] = [{None: jobs(FORMATS[index % 4])} if index % 3 else {} for index in range(len(records))]
    for record, asked, found in zip(records, wanted, sweep_records(records, wanted, view=View.COMPUTE), strict=True):
        assert not isinstance(found, RanktapeError)
        assert found.keys() == asked.keys()
        assert not asked or fields(found[None]) == fields(sweep_record(record, asked[None], view=View.COMPUTE))


def test_a_second_format_reads_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((16, 64)).astype(ml_dtypes.bfloat16)
    store(tmp_path / "swept", [describe_tensor(values)])
    first = sweep(open_run(tmp_path / "swept").select(), format=["mxfp8", "fp8_e5m2"])
    for path in sorted((tmp_path / "swept").rglob("c*")):
        if "iterations" not in path.parts and (path.name == "c" or path.name.startswith("c.")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    records = open_run(tmp_path / "swept").select()
    assert sweep(records, format=["mxfp8", "fp8_e5m2"]) == first
    found = sweep(records, format=["mxfp4", "mxint8", "fp8_e4m3"])
    assert found.column("mse") == [
        recommended.mse
        for name in ("mxfp4", "mxint8", "fp8_e4m3")
        if (recommended := sweep_array(values, format=name).recommended)
    ]
    with pytest.raises(DataError):
        sweep(records, format="nvfp4")


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two layers with three samples, each of another size, and a weight without any."""
    rng = np.random.default_rng(5)
    found = []
    for layer in range(2):
        values = rng.standard_normal((3, 4, 40)) * np.array([1.0, 2.0**12, 2.0**-12])[:, None, None]
        array = np.moveaxis(values, 0, layer).astype(ml_dtypes.bfloat16 if layer else np.float32)
        found.append(describe_tensor(array, layer_idx=layer, sample_dim=layer))
    weight = rng.standard_normal((4, 4)).astype(np.float32)
    return store(tmp_path_factory.mktemp("swept"), [*found, describe_tensor(weight, layer_idx=2, tensor_name="weight")])


def test_samples_are_swept_one_by_one(sampled: Run) -> None:
    table = sweep(sampled.select(), format=["fp8_e4m3", "mxfp4"], by=["sample"])
    assert "1 of 3 records have no samples and are left out" in table.notes
    rows = table.records()
    assert [(row["sample"], row["format"], row["records"]) for row in rows] == [
        (str(sample), name, 2) for sample in range(3) for name in ("fp8_e4m3", "mxfp4_e2m1")
    ]
    records = list(sampled.select(tensor_name="input"))
    for row in rows:
        arrays = [np.take(record.read(), [int(row["sample"])], axis=record.sample_dim or 0) for record in records]
        levels = [sweep_array(array, format=row["format"]).recommended for array in arrays]
        assert row["lowest_exponent"] == min(level.exponent for level in levels if level)
        assert row["worst_sqnr"] == min(level.sqnr for level in levels if level)
        if row["format"] == "fp8_e4m3":
            exponents = [round(level.exponent) for level in levels if level]
            grid = range(max(exponents) + 3, min(exponents) - 4, -1)
            options = SweepOptions(max_scale_exp=grid[0], min_scale_exp=grid[-1], num_levels=len(grid))
            common = common_scale([sweep_array(array, format="fp8_e4m3", options=options) for array in arrays])
            assert common is not None
            # Scores are relative to the levels that were tried: the exponent is near, not always the same.
            assert abs(row["common_exponent"] - common.exponent) <= 1


def test_samples_and_fields_make_groups(sampled: Run) -> None:
    rows = sweep(sampled.select(), format="mxfp8", by=["layer_idx", "sample"]).records()
    assert [(row["layer_idx"], row["sample"]) for row in rows] == [(layer, s) for layer in range(2) for s in "012"]
    with pytest.raises(UsageError, match="none of 1 records has stored values and samples"):
        sweep(sampled.select(tensor_name="weight"), format="mxfp8", by=["sample"])


def test_the_command_has_samples_and_the_options_of_the_engine(sampled: Run, tmp_path: Path) -> None:
    def invoke(*words: str) -> Any:
        return CliRunner().invoke(cli, ["sweep", sampled.url, *words], catch_exceptions=False)

    result = invoke("--by", "sample", "--csv", "--no-cache", "--workers", "1")
    assert result.exit_code == 0
    assert [line.split(",")[0] for line in result.stdout.splitlines()] == ["sample", "0", "1", "2"]
    assert result.stderr == "1 of 3 records have no samples and are left out\n"
    both = invoke("--by", "sample", "--output-dir", str(tmp_path))
    assert (both.exit_code, "exclude each other" in both.stderr) == (2, True)
