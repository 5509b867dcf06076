"""Does the sweep of a selection say for each tensor, and for each group, what the sweep of the values says?"""

from __future__ import annotations

import dataclasses
import math
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

import ranktape.analyze
from ranktape.analyze import View, overflow, sweep
from ranktape.analyze.numerics.sweeps.options import SweepOptions
from ranktape.analyze.numerics.sweeps.sweep import sweep_array
from ranktape.analyze.table import Table
from ranktape.capture.writing.counting import reduce_to
from ranktape.errors import UnknownFieldError, UsageError
from ranktape.storage import Records, Run
from tests.analyze.runs import describe_tensor, model_tensors, store


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
    assert set(notes) == {"no level keeps anything: try smaller scales"}


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
        "2 of 4 tensors hold NaN or Inf, which are left out of the metrics",
        "3 of 4 tensors hold no finite number other than zero: no scale",
    )
    with pytest.raises(UsageError, match="no record holds floating-point numbers"):
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
