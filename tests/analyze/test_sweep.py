"""Does the sweep of a selection say for each tensor, and for each group, what the sweep of the values says?"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze import FORMATS, SweepOptions, View, sweep, sweep_array
from ranktape.errors import UnknownFieldError, UsageError
from ranktape.storage import Run
from tests.analyze.runs import describe_tensor, model_tensors, store

E4M3 = FORMATS["fp8_e4m3"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two layers of a model."""
    return store(tmp_path_factory.mktemp("run"), model_tensors())


def test_each_record_has_its_recommended_level(run: Run) -> None:
    records = run.select()
    table = sweep(records, format="fp8_e4m3")
    assert len(table.rows) == len(records) == 18
    for record, row in zip(records, table.records(), strict=True):
        found = sweep_array(record.read(), target=E4M3)
        level = found.recommended
        assert level is not None
        assert {name: row[name] for name in dataclasses.asdict(level)} == dataclasses.asdict(level)
        assert row["tensor_name"] == record.tensor_name
        assert row["shape"] == list(record.shape)
        assert (row["elements"], row["nan"], row["inf"], row["note"]) == (256, 0, 0, "")
        best = found.best(lambda one: -one.mse)
        assert best is not None
        assert row["best_mse_exponent"] == row["best_psnr_exponent"] == best.exponent


def test_every_level_has_a_row_if_asked(run: Run) -> None:
    records = run.select(tensor_name="weight", layer_idx=0)
    table = sweep(records, format="fp4_e2m1", with_levels=True, options=SweepOptions(num_levels=5))
    found = sweep_array(records[0].read(), target=FORMATS["fp4_e2m1"], options=SweepOptions(num_levels=5))
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
    assert {name: rows[name]["note"] for name in ("zeros", "nan", "inf", "empty", "tokens")} == {
        "zeros": "all zero: exact at any scale",
        "nan": "no finite number",
        "inf": "NaN or Inf left out",
        "empty": "empty",
        "tokens": "",
    }
    assert rows["zeros"]["exponent"] is None
    assert rows["tokens"]["mse"] == 0
    assert table.notes[1:] == (
        "2 of 5 tensors hold NaN or Inf, which are left out of the figures",
        "3 of 5 tensors hold no finite number other than zero: no scale",
    )
    grouped = sweep(records, format="fp8_e4m3", by=["tensor_name"]).records()
    assert grouped[0]["tensor_name"] == "empty"
    assert grouped[0]["median_exponent"] is None
    levels = sweep(records.select(tensor_name="zeros"), format="fp8_e4m3", with_levels=True).records()
    assert [row["note"] for row in levels] == ["all zero: exact at any scale"]


def test_values_are_those_computed_with_unless_asked(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    records = store(tmp_path, [describe_tensor(values, compute_dtype="bfloat16")]).select()
    for view, expected in ((View.COMPUTE, values.astype(ml_dtypes.bfloat16)), (View.SEEN, values)):
        level = sweep_array(expected, target=E4M3).recommended
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
