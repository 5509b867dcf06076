"""Are the answers to "what overflows?" those of counting every element of the raw tensors?"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze import View, overflow
from ranktape.analyze.engine.target import largest_value
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.errors import DataError, UnknownFieldError, UsageError
from ranktape.storage import Run
from ranktape.storage.format.dtypes import DTYPES
from tests.analyze.runs import describe_tensor, model_tensors, store

Array = np.ndarray[Any, Any]


def spoiled(dtype: Any, *, seed: int) -> Array:
    """Values of every kind for the dtype, in (4, 5, 6)."""
    rng = np.random.default_rng(seed)
    ends = [
        np.nan,
        np.inf,
        -np.inf,
        0.0,
        -0.0,
        460.0,
        464.0,
        466.0,
        -1000.0,
        2.0**-6,
        2.0**-7,
        -(2.0**-10),
        1e-40,
        1e-7,
    ]
    values = np.concatenate([rng.standard_normal(120 - 4 * len(ends)), np.repeat(ends, 4)])
    with np.errstate(all="ignore"):
        return rng.permutation(values).astype(dtype).reshape(4, 5, 6)


TENSORS = [
    describe_tensor(spoiled(dtype, seed=seed), layer_idx=seed % 2, rank=seed % 3, compute_dtype=compute, sample_dim=0)
    for seed, (dtype, compute) in enumerate(
        [
            (ml_dtypes.bfloat16, "bfloat16"),
            (np.float16, "float16"),
            (np.float32, "bfloat16"),
            (np.float32, "float32"),
            (np.float64, "float64"),
            (ml_dtypes.float8_e5m2, "float8_e5m2"),
        ]
    )
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in which everything goes wrong that can."""
    return store(tmp_path_factory.mktemp("run"), TENSORS)


def expected(array: Array, *, threshold: float, min_normal: float, flush_limit: float | None) -> dict[str, int]:
    """Counted with numpy in float64; `threshold` overflows."""
    with np.errstate(invalid="ignore"):
        values = array.astype(np.float64)
    magnitudes = np.abs(values)
    counts = {
        "upper": values >= threshold,
        "lower": values <= -threshold,
        "total": magnitudes >= threshold,
        "underflow": (magnitudes > 0) & (magnitudes < min_normal),
        "nan": np.isnan(values),
        "inf": np.isinf(values),
        "zero": values == 0,
    }
    if flush_limit is not None:
        counts["flushed"] = (magnitudes > 0) & (magnitudes <= flush_limit)
    return {kind: int(found.sum()) for kind, found in counts.items()}


def counts_of(row: dict[str, Any]) -> dict[str, int]:
    """The counts of a table's row, by kind; ratios must fit to them."""
    counts = {
        name.removeprefix("overflow.").removesuffix(".count"): value
        for name, value in row.items()
        if name.endswith(".count") or name == "overflow.total"
    }
    for kind, count in counts.items():
        ratio = row["overflow.ratio" if kind == "total" else f"overflow.{kind}.ratio"]
        assert ratio == count / max(1, row["elements"])
    return counts


def rows_by_tensor(run: Run, **options: Any) -> list[tuple[Array, dict[str, Any]]]:
    """Each stored tensor with its row."""
    records = run.select()
    rows = overflow(records, **options).records()
    return [(record.read(), row) for record, row in zip(records, rows, strict=True)]


def test_at_the_limits_of_the_dtype(run: Run) -> None:
    for array, row in rows_by_tensor(run):
        info = ml_dtypes.finfo(array.dtype)  # type: ignore[no-untyped-call]
        assert counts_of(row) == expected(
            array, threshold=np.inf, min_normal=float(info.smallest_normal), flush_limit=None
        )
        assert row["elements"] == 120
        assert (row["limits_of"], row["largest_value"]) == (array.dtype.name, float(info.max))


def test_at_the_limits_of_a_format(run: Run) -> None:
    for name in [name for name, row in FORMATS.items() if row.is_signed]:
        row = FORMATS[name]
        for array, found in rows_by_tensor(run, format=name, scaling="none", view=View.SEEN):
            assert counts_of(found) == expected(
                array, threshold=row.overflow_start, min_normal=row.min_normal, flush_limit=row.flush_limit
            )
            assert (found["limits_of"], found["largest_value"]) == (name, row.maximum)


def test_a_format_sees_what_was_computed_with(run: Run) -> None:
    """float32 under autocast is bfloat16 first: 464.5 is 464 there, and fits into fp8_e4m3."""
    row = FORMATS["fp8_e4m3"]
    for (array, found), record in zip(
        rows_by_tensor(run, format="fp8_e4m3", scaling="none"), run.select(), strict=True
    ):
        with np.errstate(invalid="ignore", over="ignore"):
            computed = array.astype(ml_dtypes.bfloat16) if record.compute_dtype == "bfloat16" else array
        assert counts_of(found) == expected(
            computed, threshold=row.overflow_start, min_normal=row.min_normal, flush_limit=row.flush_limit
        )


def test_rounding_decides_at_the_border(tmp_path: Path) -> None:
    values = np.array([464.0, 464.5, 465.9, 466.0], dtype=np.float32)
    records = store(tmp_path, [describe_tensor(values, compute_dtype="bfloat16")]).select()
    assert overflow(records, format="fp8_e4m3", scaling="none", view=View.SEEN).column("overflow.total") == [3]
    # bfloat16 has steps of 2 here: 465.9 becomes 466, 464.5 becomes 464.
    assert overflow(records, format="fp8_e4m3", scaling="none").column("overflow.total") == [2]


def test_at_the_limits_of_what_was_computed_with(tmp_path: Path) -> None:
    values = np.array([1.0, 3.4e38, -3.4e38, 1e-45, 1e5], dtype=np.float32)
    tensors = [
        describe_tensor(values, compute_dtype="bfloat16"),
        describe_tensor(values, compute_dtype="float32", tensor_name="other"),
    ]
    records = store(tmp_path, tensors).select()
    seen, computed = (overflow(records, view=view) for view in (None, View.COMPUTE))
    assert seen.column("overflow.total") == [0, 0]
    assert computed.column("limits_of") == ["bfloat16", "float32"]
    assert computed.column("overflow.total") == [2, 0]
    # 1e-45 is subnormal in float32, and too small for any number of bfloat16.
    assert seen.column("overflow.underflow.count") == [1, 1]
    assert computed.column("overflow.underflow.count") == [0, 1]


@pytest.mark.parametrize("name", [None, "fp8_e4m3"])
@pytest.mark.parametrize("by", [["rank"], ["layer_idx", "dtype"], ["tensor_name"]])
def test_groups_add_up(run: Run, name: str | None, by: list[str]) -> None:
    records = run.select()
    single = overflow(records, format=name).records()
    for row in overflow(records, by=by, format=name).records():
        members = [one for one in single if all(one[field] == row[field] for field in by)]
        assert row["records"] == len(members)
        assert row["elements"] == sum(one["elements"] for one in members)
        for kind, count in counts_of(row).items():
            assert count == sum(counts_of(one)[kind] for one in members)
        assert row["overflow.absmax"] == max(one["overflow.absmax"] for one in members)
        assert row["overflow.minimum"] == min(one["overflow.minimum"] for one in members)
        assert row["limits_of"] == " ".join(sorted({one["limits_of"] for one in members}))


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        # Ties away: half a step beyond 32768 overflows, half of 2**-22 is not flushed.
        ("hif8", [40959.0, 40960.0, -(2.0**-16), 2.0**-23, 2.0**-24], {"upper": 1, "underflow": 3, "flushed": 1}),
        # Of a step of 2**-6 half is flushed, and no number is subnormal.
        ("int8", [1.99, -2.0, 2.0**-6, 2.0**-7, 0.5], {"lower": 1, "underflow": 1, "flushed": 1}),
        ("nvfp4", [6.9, 7.0, 0.75, 0.25, -0.3], {"upper": 1, "underflow": 3, "flushed": 1}),
    ],
)
def test_formats_that_are_no_element_types(
    tmp_path: Path, name: str, values: list[float], expected: dict[str, int]
) -> None:
    records = store(tmp_path, [describe_tensor(np.array(values, dtype=np.float32))]).select()
    table = overflow(records, format=name, scaling="none")
    counts = counts_of(table.records()[0])
    assert counts.pop("total") == expected.get("upper", 0) + expected.get("lower", 0)
    assert {kind: count for kind, count in counts.items() if count} == expected
    assert table.title.startswith(f"overflow and underflow in {name} without scaling")


def test_groups_of_one_answer_may_mix_what_is_read_and_what_is_known(tmp_path: Path) -> None:
    """In the first group nothing is rounded and the catalogue answers; in the second every value is read."""
    tensors = [
        describe_tensor(np.array([1.0, np.inf], dtype=np.float16), layer_idx=0),
        describe_tensor(np.array([3.4e38, 2.0], dtype=np.float32), layer_idx=1, compute_dtype="bfloat16"),
        describe_tensor(np.array([np.inf, np.inf], dtype=np.float16), layer_idx=2),
    ]
    records = store(tmp_path, tensors).select()
    assert overflow(records, by=["layer_idx"], view=View.COMPUTE).column("overflow.total") == [1, 1, 2]


def test_the_catalogue_answers_without_a_value(tmp_path: Path) -> None:
    store(tmp_path / "run", model_tensors())
    for path in (tmp_path / "run").rglob("c.*"):
        if "iterations" not in path.parts:
            path.unlink()
    for folder in (tmp_path / "run").rglob("c"):
        if "iterations" not in folder.parts:
            shutil.rmtree(folder)
    from ranktape.storage import open_run

    records = open_run(tmp_path / "run").select()
    assert sum(overflow(records).column("elements")) == 18 * 256
    with pytest.raises(DataError, match="Record"):
        overflow(records, format="fp8_e4m3")


def test_empty_and_scalar_tensors_have_rows(tmp_path: Path) -> None:
    tensors = [
        describe_tensor(np.zeros((0, 3), dtype=np.float32), tensor_name="empty"),
        describe_tensor(np.array(np.inf, dtype=np.float16), tensor_name="scalar"),
        describe_tensor(np.array([True, False]), tensor_name="flags"),
    ]
    records = store(tmp_path, tensors).select()
    for name in (None, "fp4_e2m1"):
        rows = {row["tensor_name"]: row for row in overflow(records, format=name).records()}
        assert (rows["empty"]["elements"], rows["empty"]["overflow.ratio"]) == (0, 0.0)
        assert rows["empty"]["overflow.absmax"] is None
        assert (rows["scalar"]["overflow.total"], rows["scalar"]["overflow.absmax"]) == (1, np.inf)
        assert (rows["flags"]["overflow.total"], rows["flags"]["overflow.zero.count"]) == (0, 1)


def test_every_dtype_has_a_largest_value() -> None:
    for name in DTYPES:
        assert largest_value(name) > 0


def test_what_is_not_known_is_refused(run: Run) -> None:
    with pytest.raises(UsageError, match="format 'fp9' is not known"):
        overflow(run.select(), format="fp9")
    with pytest.raises(UnknownFieldError, match="layr_idx"):
        overflow(run.select(), by=["layr_idx"])
