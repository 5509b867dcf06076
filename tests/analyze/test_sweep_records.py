"""Are sweeps from counts that were kept those of the values, to the last bit, and those of samples those of slices?"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.analyze import sweep
from ranktape.analyze.cli import cli
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.sweep_measure import Asked, Job, sweep_one, sweep_records
from ranktape.analyze.engine.values import View, read_values
from ranktape.analyze.numerics.sweeps.options import SweepOptions, resolve
from ranktape.analyze.numerics.sweeps.sweep import sweep_array, sweep_schemes
from ranktape.analyze.questions.advice import common_scale
from ranktape.errors import DataError, RanktapeError, UsageError
from ranktape.storage import Run, open_run
from tests.analyze.runs import Tensor, describe_tensor, store
from tests.analyze.test_kept_histogram import kept_as_histogram

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
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tensor of each kind."""
    return store(tmp_path_factory.mktemp("run"), tensors())


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
def test_counts_answer_as_values_do(run: Run, names: tuple[str, ...], options: dict[str, Any]) -> None:
    records = run.select(dtype=["bfloat16", "float16", "float32", "float8_e4m3fn", "complex64"], keep="values")
    wanted = jobs(*names, **options)
    view = View.COMPUTE
    for use_cache in (True, True, False):
        whole: Asked = {None: wanted}
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


def test_records_may_be_asked_different_things(run: Run) -> None:
    records = run.select()
    wanted: list[Asked] = [{None: jobs(FORMATS[index % 4])} if index % 3 else {} for index in range(len(records))]
    for record, asked, found in zip(records, wanted, sweep_records(records, wanted, view=View.COMPUTE), strict=True):
        assert not isinstance(found, RanktapeError)
        assert found.keys() == asked.keys()
        assert not asked or fields(found[None]) == fields(sweep_one(record, asked[None], view=View.COMPUTE))


def test_a_second_format_reads_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((16, 64)).astype(ml_dtypes.bfloat16)
    store(tmp_path / "run", [describe_tensor(values)])
    first = sweep(open_run(tmp_path / "run").select(), format=["mxfp8", "fp8_e5m2"])
    for path in sorted((tmp_path / "run").rglob("c*")):
        if "iterations" not in path.parts and (path.name == "c" or path.name.startswith("c.")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    records = open_run(tmp_path / "run").select()
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
    return store(tmp_path_factory.mktemp("run"), [*found, describe_tensor(weight, layer_idx=2, tensor_name="weight")])


def test_samples_are_swept_one_by_one(sampled: Run) -> None:
    table = sweep(sampled.select(), format=["fp8_e4m3", "mxfp4"], by=["sample"])
    assert "1 of 3 records have no samples, and are left out" in table.notes
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
    with pytest.raises(UsageError, match="none of 1 records has samples"):
        sweep(sampled.select(tensor_name="weight"), format="mxfp8", by=["sample"])


def test_the_command_has_samples_and_the_options_of_the_engine(sampled: Run, tmp_path: Path) -> None:
    def invoke(*words: str) -> Any:
        return CliRunner().invoke(cli, ["sweep", sampled.url, *words], catch_exceptions=False)

    result = invoke("--by", "sample", "--csv", "--no-cache", "--workers", "1")
    assert result.exit_code == 0
    assert [line.split(",")[0] for line in result.stdout.splitlines()] == ["sample", "0", "1", "2"]
    assert result.stderr == "1 of 3 records have no samples, and are left out\n"
    both = invoke("--by", "sample", "--output-dir", str(tmp_path))
    assert (both.exit_code, "exclude each other" in both.stderr) == (2, True)
