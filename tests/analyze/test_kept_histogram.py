"""Has a record whose histogram was kept the same answers as one whose values were kept?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze import View, overflow, plot_overflow, sweep
from ranktape.analyze.histogram import count_values, own_limits, scan, scan_histogram
from ranktape.errors import DataError, UsageError
from ranktape.storage import Run
from ranktape.storage.dtypes import numpy_dtype
from tests.analyze.runs import Tensor, describe_tensor, store

FORMATS = ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp4_e2m1", "bf16", "fp16")


def sizes(dtype: str) -> np.ndarray[Any, Any]:
    """Values of every magnitude with NaN, infinities and zeros among them."""
    rng = np.random.default_rng(1)
    with np.errstate(over="ignore"):
        values = (rng.standard_normal(3000) * 2.0 ** rng.integers(-40, 20, 3000)).astype(numpy_dtype(dtype))
    values[:6] = [np.nan, np.inf, -np.inf, 0.0, -0.0, np.nan]
    return values.reshape(50, 60)


def kept_as_histogram(tensor: Tensor) -> Tensor:
    """The same record as the writer keeps it when there is no room for values."""
    array, info = tensor
    dtype = info.dtype if array.dtype.itemsize == 2 else info.compute_dtype
    with np.errstate(over="ignore", invalid="ignore"):
        counts = count_values(array.astype(numpy_dtype(dtype))).counts.astype(np.uint32)
    return counts, dataclasses.replace(info, keep="histogram", nbytes=counts.nbytes)


def both(tmp_path: Path, **fields: Any) -> tuple[Run, Run]:
    """Two runs of one tensor: its values, and its histogram."""
    tensor = describe_tensor(sizes(fields.pop("dtype")), **fields)
    return store(tmp_path / "values", [tensor]), store(tmp_path / "histogram", [kept_as_histogram(tensor)])


KINDS = (
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"dtype": "float16", "compute_dtype": "bfloat16"},
    {"dtype": "float32", "compute_dtype": "bfloat16"},
    {"dtype": "float64", "compute_dtype": "float16"},
)


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("format_name", FORMATS)
def test_every_question_about_single_values_has_the_same_answer(
    tmp_path: Path, fields: dict[str, Any], format_name: str
) -> None:
    values, histogram = both(tmp_path, **dict(fields))
    ours = overflow(histogram.select(), format=format_name)
    assert ours.rows == overflow(values.select(), format=format_name).rows
    assert sweep(histogram.select(), format=format_name).rows == sweep(values.select(), format=format_name).rows


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_the_limits_of_the_dtype_have_too(tmp_path: Path, fields: dict[str, Any]) -> None:
    values, histogram = both(tmp_path, **dict(fields))
    for view in (None, View.COMPUTE):
        assert overflow(histogram.select(), view=view).rows == overflow(values.select(), view=view).rows
    plot_overflow(histogram.select(), path=tmp_path / "plot.png", format="fp8_e4m3")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_values_that_were_rounded_cannot_be_looked_at_as_they_were_seen(tmp_path: Path) -> None:
    _, histogram = both(tmp_path, dtype="float32", compute_dtype="bfloat16")
    with pytest.raises(UsageError, match=r"the histogram of its values in bfloat16 was kept.*leave out --as seen"):
        sweep(histogram.select(), format="fp8_e4m3", view=View.SEEN)
    with pytest.raises(UsageError, match="leave out --as seen"):
        overflow(histogram.select(), format="fp8_e4m3", view=View.SEEN)
    # What the dtype's own limits do was counted before: no value is needed.
    assert len(overflow(histogram.select(), view=View.SEEN).rows) == 1


def test_records_of_both_kinds_stand_in_one_table(tmp_path: Path) -> None:
    first = describe_tensor(sizes("bfloat16"))
    second = kept_as_histogram(describe_tensor(sizes("bfloat16"), call=1))
    run = store(tmp_path / "run", [first, second])
    rows = overflow(run.select(), format="fp4_e2m1", by=["keep"]).rows
    assert [row[0] for row in rows] == ["histogram", "values"]
    assert rows[0][1:] == rows[1][1:]


def test_a_histogram_of_another_tensor_is_refused(tmp_path: Path) -> None:
    counts, info = kept_as_histogram(describe_tensor(sizes("bfloat16")))
    run = store(tmp_path / "run", [(counts, dataclasses.replace(info, shape=(2, 2)))])
    with pytest.raises(DataError, match="counts other elements than the tensor had"):
        sweep(run.select(), format="fp8_e4m3")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, np.int16, np.uint8])
def test_a_histogram_is_scanned_as_its_array(dtype: Any) -> None:
    array = np.random.default_rng(2).integers(0, 256, 4096, dtype=np.uint8).view(np.dtype(dtype))
    limits = own_limits(array.dtype)
    assert repr(scan_histogram(count_values(array), limits=limits)) == repr(scan(array, limits=limits))
