"""Are counts with scales, in several formats, of samples and of beginnings those of counting raw tensors?"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.analyze import View, overflow
from ranktape.analyze.cli import cli
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.target import parse_targets, preserves_limits
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.numerics.quantization.quantizer import quantize
from ranktape.errors import UsageError
from ranktape.storage import Run, open_run
from tests.analyze.runs import describe_tensor, store
from tests.analyze.test_kept_histogram import kept_as_histogram
from tests.exhaustive import exhaustive

Array = np.ndarray[Any, Any]


def wide_range(dtype: Any, *, seed: int, shift: int = 0) -> Array:
    """Values over 40 binades with everything else that floats can be, in (4, 6, 70)."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(1680) * 2.0 ** rng.integers(-25 + shift, 15 + shift, 1680)
    values[:5] = [np.nan, np.inf, -np.inf, 0.0, -0.0]
    with np.errstate(over="ignore"):
        return rng.permutation(values).astype(dtype).reshape(4, 6, 70)


KINDS = [
    ("bfloat16", "bfloat16", 0),
    ("float16", "float16", 0),
    ("float32", "float32", 0),
    ("float32", "bfloat16", 0),
    ("float64", "float64", 0),
    # So small that its limits are below what digests tell apart.
    ("float32", "float32", -118),
]


def array_to_tensor(kind: tuple[str, str, int], **fields: Any) -> Any:
    """A tensor of a kind, with samples."""
    dtype, compute, shift = kind
    values = wide_range(np.dtype(dtype), seed=7, shift=shift)
    return describe_tensor(values, compute_dtype=compute, sample_dim=0, **fields)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tensor of each kind."""
    folder = tmp_path_factory.mktemp("run")
    return store(folder, [array_to_tensor(kind, layer_idx=index) for index, kind in enumerate(KINDS)])


def judged(record: Any) -> Array:
    """The values as they were computed with, in float64, without a NaN's payload."""
    with np.errstate(over="ignore", invalid="ignore"):
        computed = record.read().astype(np.dtype(record.compute_dtype))
        return np.asarray(computed.astype(np.float64))


def counted(values: Array, *, name: str, exponent: int = 0) -> dict[str, int]:
    """The counts after division by a power of two, exact in float64 (or in integers, where it is not)."""
    row = FORMATS[name]
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.ldexp(values, -exponent)
    magnitudes = np.abs(scaled)
    return {
        "upper": int((scaled >= row.overflow_start).sum()),
        "lower": int((scaled <= -row.overflow_start).sum()),
        "underflow": int(((magnitudes > 0) & (magnitudes < row.min_normal)).sum()),
        "flushed": int(((magnitudes > 0) & (magnitudes <= row.flush_limit)).sum()),
    }


def aligned(values: Array, *, name: str) -> int:
    """By trying: the smallest exponent with which the largest finite value does not exceed the largest of a format."""
    largest = float(np.abs(values[np.isfinite(values)]).max())
    return next(exponent for exponent in range(-400, 400) if np.ldexp(largest, -exponent) <= FORMATS[name].maximum)


def test_counts_are_those_of_the_scaled_values(run: Run) -> None:
    names = ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "int8", "hif8", "bf16", "fp16", "fp32"]
    values = {record.layer_idx: judged(record) for record in run.select()}
    rows = overflow(run.select(), format=names, scaling=["none", "tensor"]).records()
    places = [(row["layer_idx"], row["limits_of"], row["scaling"]) for row in rows]
    assert sorted(places) == sorted(itertools.product(values, names, ["none", "tensor"]))
    for row, (layer, name, scaling) in zip(rows, places, strict=True):
        exponent = aligned(values[layer], name=name) if scaling == "tensor" else 0
        found = counted(values[layer], name=name, exponent=exponent)
        assert {kind: row[f"overflow.{kind}.count"] for kind in found} == found, (layer, name, scaling)
        assert row["overflow.total"] == found["upper"] + found["lower"]
        if scaling == "tensor":
            # Nothing but infinities is beyond the largest value.
            assert row["overflow.total"] == row["overflow.inf.count"]


def test_blocks_lose_what_quantising_them_loses(run: Run) -> None:
    for name in ["mxfp8_e4m3", "mxfp4_e2m1", "nvfp4"]:
        records = run.select()
        for record, row in zip(records, overflow(records, format=name, scaling="block").records(), strict=True):
            with np.errstate(over="ignore"):
                values = record.read().astype(np.dtype(record.compute_dtype))
            losses = quantize(values, name, warn=False).losses
            assert losses is not None
            found = {kind: row[f"overflow.{kind}.count"] for kind in ("underflow", "flushed", "nan", "inf", "spoiled")}
            assert found == {kind: getattr(losses, kind) for kind in found}, record
            assert row["overflow.total"] == losses.overflow + losses.inf
            assert (row["overflow.upper.count"], row["overflow.upper.ratio"]) == (None, None)


def test_all_scalings_see_the_same_extremes(run: Run) -> None:
    """Those of the values as they were computed with, also under autocast."""
    for by in [(), ("rank",)]:
        table = overflow(run.select(), format=["fp8_e4m3", "mxfp8"], scaling=["none", "block"], by=by)
        rows = [[row[f"overflow.{name}"] for name in ("minimum", "maximum", "absmax")] for row in table.records()]
        assert rows[0::2] == rows[1::2]
        if not by:
            arrays = [judged(record) for record in run.select()]
            assert rows[0::2] == [[np.nanmin(one), np.nanmax(one), np.nanmax(np.abs(one))] for one in arrays]


def test_a_kept_histogram_knows_its_blocks(tmp_path: Path) -> None:
    tensor = array_to_tensor(KINDS[0])
    pair = [store(tmp_path / "a", [tensor]), store(tmp_path / "b", [kept_as_histogram(tensor)])]
    options: dict[str, Any] = {"format": ["fp8_e4m3", "mxfp4"], "scaling": ["none", "tensor", "block"]}
    ours, theirs = (overflow(one.select(), **options).rows for one in pair)
    assert len(ours) == 4
    assert ours == theirs
    with pytest.raises(UsageError, match="does not distinguish samples"):
        overflow(pair[1].select(), format="fp8_e4m3", per_sample=True)


def severity_of_one(folder: Path, values: Array, **options: Any) -> tuple[str, str, str]:
    """The severity of a tensor, of its overflow, and of its underflow."""
    (row,) = overflow(store(folder, [describe_tensor(values)]).select(), **options).records()
    return row["severity"], row["overflow.severity"], row["overflow.underflow.severity"]


@pytest.mark.parametrize(
    ("ratio", "severity"), [(0.0, "none"), (0.001, "none"), (0.0011, "medium"), (0.01, "medium"), (0.0101, "high")]
)
def test_overflow_without_a_scale_is_severe_from_a_thousandth_on(tmp_path: Path, ratio: float, severity: str) -> None:
    values = np.ones(10_000, dtype=np.float32)
    values[: round(ratio * 10_000)] = 1000.0
    found = severity_of_one(tmp_path / "none", values, format="fp8_e4m3", scaling="none")
    assert found == (severity, severity, "none")
    assert severity_of_one(tmp_path / "tensor", values, format="fp8_e4m3") == ("none", "none", "none")


@pytest.mark.parametrize(
    ("ratio", "in_dtype", "in_format"),
    [(0.01, "none", "none"), (0.1, "medium", "none"), (0.11, "medium", "medium"), (0.26, "high", "high")],
)
def test_underflow_is_what_is_subnormal_in_the_dtype_and_becomes_zero_in_a_format(
    tmp_path: Path, ratio: float, in_dtype: str, in_format: str
) -> None:
    """As `findings` judges gradients; what is subnormal in a format, and kept, is not severe."""
    values = np.ones(1000, dtype=np.float16)
    values[: round(ratio * 1000)] = 1e-6
    assert severity_of_one(tmp_path / "own", values) == (in_dtype, "none", in_dtype)
    assert severity_of_one(tmp_path / "zero", values, format="fp8_e4m3") == (in_format, "none", in_format)
    values[values < 1] = 2.0**-16
    assert severity_of_one(tmp_path / "kept", values, format="fp8_e4m3") == ("none", "none", "none")


def test_what_the_rule_of_a_block_cuts_off_is_not_severe(tmp_path: Path) -> None:
    """OCP's rule takes 511 to 448, the largest value of fp8_e4m3."""
    records = store(tmp_path, [describe_tensor(np.full(64, 511.0, dtype=np.float32))]).select()
    (row,) = overflow(records, format="mxfp8").records()
    assert (row["overflow.ratio"], row["severity"], row["overflow.severity"]) == (1.0, "none", "none")


@pytest.mark.parametrize(
    ("value", "severities"), [(np.nan, ("high", "none", "none")), (-np.inf, ("high", "high", "none"))]
)
@pytest.mark.parametrize(
    "options", [{}, {"format": "fp8_e4m3"}, {"format": "mxfp8", "scaling": "block"}, {"by": ["layer_idx"]}]
)
def test_one_nan_is_high(
    tmp_path: Path, value: float, severities: tuple[str, str, str], options: dict[str, Any]
) -> None:
    values = np.ones(100_000, dtype=np.float32)
    clean = describe_tensor(values.copy(), layer_idx=0)
    values[7] = value
    rows = overflow(store(tmp_path, [clean, describe_tensor(values, layer_idx=1)]).select(), **options).records()
    found = [(row["severity"], row["overflow.severity"], row["overflow.underflow.severity"]) for row in rows]
    assert found == [("none", "none", "none"), severities]


def test_what_does_not_go_together_is_refused() -> None:
    for formats, scalings, message in [
        (["hif8"], ["block"], "not one of blocks"),
        (["mxfp8"], ["tensor"], "or --scaling block"),
        (["fp8_e4m3"], ["blok"], "did you mean block"),
        (["fp8_e4m3"], ["tensor,nine"], "'nine' is not allowed"),
        (None, ["tensor"], "needs a format"),
        (["mxfp8"], ["tensor", "block"], "--scaling tensor has no effect on mxfp8"),
        ([], None, "no format is given"),
    ]:
        with pytest.raises(UsageError, match=message):
            parse_targets(formats, scalings)


def test_every_format_has_the_scalings_that_it_can_have() -> None:
    found = parse_targets(["hif8,mxfp8", "fp8_e4m3"], ["tensor,block"])
    assert [(target.name, target.scaling.value) for target in found] == [
        ("hif8", "tensor"),
        ("mxfp8_e4m3", "block"),
        ("fp8_e4m3", "tensor"),
    ]


def test_a_format_with_blocks_has_their_scales_unless_another_scaling_is_given(run: Run) -> None:
    records = run.select()
    assert [target.scaling.value for target in parse_targets("fp8_e4m3,mxfp8,nvfp4,hif8")] == [
        "tensor",
        "block",
        "block",
        "tensor",
    ]
    assert [target.scaling.value for target in parse_targets("int8,fp4_e2m1,bf16,fp16")] == 2 * ["tensor"] + 2 * [
        "none"
    ]
    assert overflow(records, format="mxfp8").rows == overflow(records, format="mxfp8", scaling="block").rows
    assert [target.scaling.value for target in parse_targets("nvfp4", "none")] == ["none"]
    with pytest.raises(UsageError, match="has no limits of its own"):
        parse_targets("mxfp8", "none")


def test_a_digest_answers_for_eight_significant_bits() -> None:
    told = {
        name
        for name, row in FORMATS.items()
        if row.is_signed and preserves_limits(parse_targets(name, "none")[0].limits())
    }
    assert {"fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1", "int8", "hif8"} <= told
    assert not told & {"bf16", "fp16", "fp32"}


def test_samples_are_counted_one_by_one(run: Run) -> None:
    records = run.select()
    values = [judged(record) for record in records]
    for name, scaling, block in (
        ("fp8_e4m3", "none", ""),
        ("fp8_e5m2", "tensor", ""),
        ("mxfp8", "block", "mxfp8_e4m3"),
    ):
        rows = overflow(records, format=name, scaling=scaling, per_sample=True).records()
        assert [row["sample"] for row in rows] == ["0", "1", "2", "3"] * len(KINDS)
        for place, row in enumerate(rows):
            whole = values[place // 4]
            assert row["elements"] == 420
            if block:
                losses = quantize(whole[place % 4].astype(np.dtype(row["compute_dtype"])), block, warn=False).losses
                assert losses is not None
                assert row["overflow.underflow.count"] == losses.underflow
                continue
            exponent = aligned(whole, name=name) if scaling == "tensor" else 0
            found = counted(whole[place % 4], name=name, exponent=exponent)
            assert {kind: row[f"overflow.{kind}.count"] for kind in found} == found


def test_samples_of_the_catalogue_have_the_users_names(tmp_path: Path) -> None:
    values = np.ones((3, 8), dtype=np.float16)
    values[1, :2] = np.inf
    tensors = [
        describe_tensor(values, sample_dim=0, sample_ids=["a", "b", 7], layer_idx=0),
        describe_tensor(values[:2], sample_dim=0, layer_idx=1),
        describe_tensor(values, layer_idx=2, tensor_name="weight"),
    ]
    run = store(tmp_path, tensors)
    table = overflow(run.select(), by=["sample"])
    assert [(row["sample"], row["overflow.total"], row["records"]) for row in table.records()] == [
        ("0", 0, 1),
        ("1", 2, 1),
        ("7", 0, 1),
        ("a", 0, 1),
        ("b", 2, 1),
    ]
    assert table.notes[0] == "1 of 3 records have no samples and are left out"
    assert overflow(run.select(), by=["layer_idx", "sample"]).column("layer_idx") == [0, 0, 0, 1, 1]
    with pytest.raises(UsageError, match="none of 1 records has samples"):
        overflow(run.select(tensor_name="weight"), per_sample=True)
    # Rounded to what was computed with, samples come from the digest.
    seen = overflow(run.select(), by=["sample"], view=View.COMPUTE)
    assert seen.rows == table.rows


def test_where_it_begins(tmp_path: Path) -> None:
    good, bad = np.ones(2000, dtype=np.float32), np.ones(2000, dtype=np.float32)
    bad[5], bad[7:17] = 600.0, 1e-9
    places = [(10, 0, 1), (10, 1, 1), (20, 0, 0), (20, 0, 2), (20, 1, 2), (30, 1, 0)]
    spoiled = {(20, 0, 2), (20, 1, 2), (30, 1, 0)}
    tensors = [
        describe_tensor(bad if place in spoiled else good, iteration=place[0], rank=place[1], counter=place[2])
        for place in places
    ]
    tensors = [
        (array, describe_tensor(array, iteration=i, rank=r, counter=c, layer_idx=9 - c)[1])
        for (array, _), (i, r, c) in zip(tensors, places, strict=True)
    ]
    rows = {
        row["kind"]: row
        for row in overflow(_store(tmp_path, tensors), format="fp8_e4m3", scaling="none", first=True).records()
    }
    assert list(rows) == ["nan", "overflow", "underflow", "flushed"]
    for kind, ratio in (("overflow", 1 / 2000), ("underflow", 10 / 2000), ("flushed", 10 / 2000)):
        found = rows[kind]
        assert (found["first.iteration"], found["first.rank"], found["first.layer_idx"]) == (20, 0, 7)
        assert (found["affected"], found["first.ranks"], found["first.ratio"]) == (3, [0, 1], ratio)
    assert (rows["nan"]["affected"], rows["nan"]["first.iteration"], rows["nan"]["first.ranks"]) == (0, None, None)


def _store(folder: Path, tensors: Any) -> Any:
    return store(folder, tensors).select()


def test_the_cache_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    store(folder, [array_to_tensor(kind, layer_idx=index) for index, kind in enumerate(KINDS)])
    options: dict[str, Any] = {"format": ["fp8_e4m3", "bf16", "nvfp4"], "scaling": ["tensor", "block"]}
    records = open_run(folder).select()
    alone = overflow(records, engine=Engine(use_cache=False), **options)
    for _ in range(2):
        assert overflow(records, engine=Engine(), **options) == alone


@exhaustive("make test compares digests of several workers, which all counts follow from")
def test_several_workers_change_nothing(run: Run) -> None:
    options: dict[str, Any] = {"format": ["fp8_e4m3", "bf16", "nvfp4"], "scaling": ["tensor", "block"]}
    for per_sample in (False, True):
        alone, together = (
            overflow(run.select(), engine=Engine(workers=workers, use_cache=False), per_sample=per_sample, **options)
            for workers in (1, 2)
        )
        assert alone == together


def invoke(*words: str) -> Any:
    """The command; what it did not expect to happen is raised."""
    return CliRunner().invoke(cli, ["overflow", *words], catch_exceptions=False)


def test_the_command(run: Run) -> None:
    place = run.url
    document = json.loads(invoke(place, "--format", "fp8_e4m3,mxfp4", "--scaling", "none,block", "--json").stdout)
    assert len(document["rows"]) == 3 * len(KINDS)
    first = invoke(place, "--first", "--format", "fp8_e4m3", "--by", "layer_idx", "--csv")
    assert len(first.stdout.splitlines()) == 1 + 4 * len(KINDS)
    by_sample = invoke(place, "--by", "sample", "--where", "dtype == 'bfloat16'")
    assert by_sample.stdout.splitlines()[2].split()[:3] == ["sample", "records", "elements"]
    both = invoke(place, "--per-sample", "--by", "rank")
    assert (both.exit_code, both.stdout) == (2, "")
    assert "exclude each other" in both.stderr
    wrong = invoke(place, "--scaling", "tensr", "--format", "fp8_e4m3")
    assert (wrong.exit_code, "did you mean tensor?" in wrong.stderr) == (2, True)


def test_integers_have_no_blocks(tmp_path: Path) -> None:
    tensors = [
        describe_tensor(np.arange(64, dtype=np.int32), tensor_name="indices"),
        describe_tensor(np.zeros((0, 4), dtype=np.float32), tensor_name="empty"),
        describe_tensor(np.array(3.0, dtype=ml_dtypes.bfloat16), tensor_name="scalar"),
    ]
    records = store(tmp_path, tensors).select()
    table = overflow(records, format="mxfp8", scaling="block")
    rows = {row["tensor_name"]: row for row in table.records()}
    assert rows.keys() == {"empty", "scalar"}
    assert table.notes[0] == "1 records of integers or bool are left out: they are not divided into blocks"
    (whole,) = overflow(records, format="mxfp8", scaling="block", by=["rank"]).records()
    assert (whole["records"], whole["elements"], whole["overflow.total"]) == (2, 1, 0)
    with pytest.raises(UsageError, match="integers and bool are not divided into blocks"):
        overflow(records.select(tensor_name="indices"), format="mxfp8", scaling="block")
    assert (rows["empty"]["overflow.total"], rows["empty"]["severity"]) == (0, "none")
    assert (rows["scalar"]["overflow.total"], rows["scalar"]["overflow.underflow.count"]) == (0, 0)
