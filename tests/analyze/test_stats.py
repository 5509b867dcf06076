"""Are the statistics of records, groups, samples and neighbours those of the raw tensors?"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]  # it has no types
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.analyze.engine.metrics import METRICS, PERCENTILES, is_percentile, parse_metric
from ranktape.analyze.engine.values import View
from ranktape.analyze.questions.stats import SAMPLE_NAMES, stats
from ranktape.capture.writing.counting import reduce_to
from ranktape.errors import NoRecordsError, UnknownFieldError, UsageError
from ranktape.storage import Records
from ranktape.storage.format.dtypes import DTYPES
from tests.analyze.every_tensor import COMPLEX, FILLINGS, REAL, SHAPES, Array, filled, numbers_of, records_of, stored
from tests.analyze.runs import Tensor, describe_tensor

Row = dict[str, Any]


def expected(array: Array) -> Row:
    """Every figure but the percentiles, straight from the elements."""
    numbers = numbers_of(array)
    wide = np.abs(array.astype(np.complex128)) if array.dtype.kind == "c" else array
    with np.errstate(invalid="ignore"):
        exact = wide.astype(np.float64).reshape(-1)
    x = exact[np.isfinite(exact)]
    # Of a float64 that is a sum of many, the last bits depend on the order.
    has_spread = x.size > 0 and x.min() < x.max()
    row = DTYPES[array.dtype.name]
    limit = float(ml_dtypes.finfo(array.dtype).smallest_normal) if row.is_floating or row.is_complex else 0.0  # type: ignore[no-untyped-call]
    magnitudes = np.abs(numbers[np.isfinite(numbers)])
    counts = {
        "upper": numbers == np.inf,
        "lower": numbers == -np.inf,
        "underflow": (numbers != 0) & (np.abs(numbers) < limit),
        "inf": np.isinf(numbers),
        "zero": numbers == 0,
    }
    tallies = {kind: int(mask.sum()) for kind, mask in counts.items()} | {"nan": array.size - numbers.size}
    found: Row = {f"overflow.{kind}.count": count for kind, count in tallies.items()}
    found |= {f"overflow.{kind}.ratio": count / max(1, array.size) for kind, count in tallies.items()}
    total = tallies["upper"] + tallies["lower"]
    rms = math.sqrt((x**2).mean()) if x.size else None
    nonzero = magnitudes[magnitudes > 0]
    return found | {
        "elements": array.size,
        "finite": int(np.isfinite(numbers).sum()),
        "overflow.total": total,
        "overflow.ratio": total / max(1, array.size),
        "mean": x.mean() if x.size else None,
        "std": x.std() if x.size else None,
        "variance": x.var() if x.size else None,
        "minimum": x.min() if x.size else None,
        "maximum": x.max() if x.size else None,
        "absmax": np.abs(x).max() if x.size else None,
        "mean_magnitude": np.abs(x).mean() if x.size else None,
        "rms": rms,
        "norm": np.linalg.norm(x),
        "skewness": scipy.stats.skew(x) if has_spread else None,
        "kurtosis": scipy.stats.kurtosis(x, fisher=False) if has_spread else None,
        "smallest_nonzero": nonzero.min() if nonzero.size else None,
        "log2_range": math.log2(nonzero.max() / nonzero.min()) if nonzero.size else None,
        "crest_factor": np.abs(x).max() / rms if rms else None,
        "distinct": None if array.dtype.kind == "c" else np.unique(numbers).size,
        "overflow.minimum": numbers.min() if numbers.size else None,
        "overflow.maximum": numbers.max() if numbers.size else None,
        "overflow.absmax": np.abs(numbers).max() if numbers.size else None,
    }


def percentile_of(array: Array, percent: str) -> float | None:
    """The smallest number at or below which so many per cent lie, counted in whole numbers."""
    numbers = np.sort(numbers_of(array).reshape(-1))
    if not numbers.size or array.dtype.kind == "c":
        return None
    wanted = Fraction(percent) * numbers.size
    return next(float(one) for place, one in enumerate(numbers, start=1) if 100 * place >= wanted)


def assert_figures(row: Row, array: Array) -> None:
    scale = float(np.abs(np.nan_to_num(numbers_of(array), posinf=0, neginf=0)).max(initial=0.0))
    for name, value in expected(array).items():
        # What cancels is as uncertain as what it is a sum of.
        tolerance = 1e-9 if name in {"skewness", "kurtosis"} else 1e-12 * scale ** (1 + (name == "variance"))
        assert row[name] == (None if value is None else pytest.approx(value, rel=1e-9, abs=tolerance)), name
    for percent in PERCENTILES:
        assert row[f"p{percent}"] == percentile_of(array, percent), percent
    assert row["percentiles"] == ("unknown" if array.dtype.kind == "c" else "exact")


@pytest.mark.parametrize("dtype", REAL + COMPLEX)
def test_every_figure_is_that_of_the_raw_tensor(dtype: str) -> None:
    arrays = [filled(dtype, shape, filling=filling) for shape in SHAPES for filling in FILLINGS]
    rows = stats(stored(*arrays)).records()
    for row, array in zip(rows, arrays, strict=True):
        assert_figures(row, array)
        assert set(METRICS) < set(row)


def test_a_group_is_one_tensor() -> None:
    for dtype in REAL:
        fillings = ("normal", "special", "nan", "zero", "shifted") * 4
        parts = [filled(dtype, (5, 7), filling=filling, seed=seed) for seed, filling in enumerate(fillings)]
        records = records_of(
            [describe_tensor(part, layer_idx=place % 2, call=place) for place, part in enumerate(parts)]
        )
        for layer, row in enumerate(stats(records, by=["layer_idx"]).records()):
            assert (row["layer_idx"], row["records"]) == (layer, 10)
            assert_figures(row, np.concatenate([part.reshape(-1) for part in parts[layer::2]]))


def test_a_group_of_several_types() -> None:
    parts = [filled(dtype, (30, 40), filling="normal") for dtype in ("bfloat16", "float32", "int8")]
    (row,) = stats(stored(*parts), by=["rank"]).records()
    together = np.concatenate([part.astype(np.float64).reshape(-1) for part in parts])
    assert row["mean"] == pytest.approx(together.mean(), rel=1e-12)
    assert row["p99"] == np.quantile(together, 0.99, method="inverted_cdf")
    assert row["percentiles"] == "exact"


def test_percentiles_of_many_wide_values_say_how_near_they_are() -> None:
    values = (1e6 + np.random.default_rng(0).standard_normal(200_000)).reshape(10, -1)
    table = stats(stored(*values), by=["rank"])
    (row,) = table.records()
    assert row["percentiles"] == "within 2^-8"
    assert any("ranks within 2^-10" in note for note in table.notes)
    for percent in PERCENTILES:
        if percent != "99.9":
            low, high = (np.quantile(values, float(percent) / 100 + slack).item() for slack in (0, 2.0**-10))
            assert low <= row[f"p{percent}"] <= high, percent


def test_percentiles_are_exact_at_every_size() -> None:
    """As p99.9 of 1,000 values, which is the 999th: 0.999 times 1,000 is above 999 in float64."""
    sizes = [*range(1, 130), 1000, 2000, 4000]
    percents = ["99.9", "99.99999", "0.1", *map(str, range(101))]
    arrays = [np.arange(1, size + 1, dtype=np.float32) for size in sizes]
    rows = stats(stored(*arrays), metric=[f"p{percent}" for percent in percents]).records()
    for row, array in zip(rows, arrays, strict=True):
        for percent in percents:
            assert row[f"p{percent}"] == max(1, math.ceil(Fraction(percent) * array.size / 100)), (percent, array.size)
    assert stats(stored(arrays[0]), metric=["p50.00"]).columns[-2].name == "p50"


@pytest.mark.parametrize("factor", [1e-300, 1e-170, 1e160, 1e300])
def test_magnitudes_at_the_ends_of_float64_have_every_metric(factor: float) -> None:
    array = np.array([[8.0, 2.0, 3.0, -7.0], [1.0, -1.0, 5.0, 0.5]])
    (plain,), (row,) = (stats(stored(one)).records() for one in (array, array * factor))
    for name in ("mean", "std", "absmax", "mean_magnitude", "rms", "norm", "p50"):
        assert row[name] == pytest.approx(plain[name] * factor), name
    for name in ("skewness", "kurtosis", "crest_factor"):
        assert row[name] == pytest.approx(plain[name]), name
    # No float64 holds its square.
    assert row["variance"] is None
    samples = stats(records_of([describe_tensor(array * factor, sample_dim=0)]), per_sample=True).records()
    assert [one["std"] for one in samples] == pytest.approx((array.std(axis=1) * factor).tolist())
    together = stats(records_of([describe_tensor(array * factor, sample_dim=1)]), by=["sample", "rank"]).records()
    assert [one["norm"] for one in together] == pytest.approx((np.linalg.norm(array, axis=0) * factor).tolist())


def test_the_mean_of_the_largest_float64_is_known() -> None:
    largest = float(np.finfo(np.float64).max)
    (row,) = stats(stored(np.full(100, largest))).records()
    assert (row["mean"], row["rms"], row["std"], row["norm"]) == (largest, largest, 0.0, None)


def test_values_are_those_that_were_computed_with_unless_said_otherwise() -> None:
    array = np.array([1.0, 1.001, 3.0], dtype=np.float32)
    records = stored(array, compute_dtype="bfloat16")
    (computed,), (seen,) = (stats(records, view=view).records() for view in (None, View.SEEN))
    assert (computed["p50"], computed["percentiles"], computed["distinct"]) == (1.0, "exact", 2)
    assert (seen["mean"], seen["distinct"]) == (pytest.approx(array.mean(dtype=np.float64)), 3)
    assert seen["p50"] == np.float32(1.001)


@pytest.mark.parametrize("keep", ["histogram", "statistics"])
def test_what_was_kept_instead_of_values_says_what_it_knows(keep: str) -> None:
    array = filled("bfloat16", (40, 60), filling="special")
    tensor = describe_tensor(array, sample_dim=0)
    kept = reduce_to(keep, array, info=tensor[1])
    assert kept is not None
    (whole,), (row,) = (stats(records_of([one])).records() for one in (tensor, kept))
    lost = {"distinct", "smallest_nonzero", "log2_range"} | {name for name in METRICS if is_percentile(name)}
    for name in METRICS:
        known = whole[name] if keep == "histogram" or name not in lost else None
        assert row[name] == (known if known is None else pytest.approx(known, rel=1e-12)), name
    # Beside a record with values, still nothing is known of the percentiles of both.
    other = describe_tensor(array, tensor_name="other")
    (together,) = stats(records_of([kept, other]), by=["rank"]).records()
    assert (together["p50"] is None) == (keep == "statistics")
    assert together["elements"] == 2 * array.size
    with pytest.raises(NoRecordsError, match="no record has samples"):
        stats(records_of([kept]), per_sample=True)


def test_a_field_that_is_given_twice_is_one_column() -> None:
    records = records_of([describe_tensor(np.ones(3))])
    assert stats(records, by=["rank", "rank"]).records() == stats(records, by=["rank"]).records()


def test_figures_are_chosen_by_name() -> None:
    table = stats(stored(filled("bfloat16", (4, 5), filling="normal")), metric=["p99.5", "std", "p99.5"])
    assert [column.name for column in table.columns][-3:] == ["p99.5", "std", "percentiles"]
    assert not any(column.is_detail for column in table.columns[-3:-1])
    for name, hint in (("skewnes", "use skewness"), ("p101", "use p0.1 or p1"), ("", "use one of elements")):
        with pytest.raises(UsageError, match=f"no metric '{name}': {hint}"):
            parse_metric(name)
    with pytest.raises(UnknownFieldError, match="layr"):
        stats(stored(np.zeros(1)), by=["layr"])


def layered(make: Callable[[int], Array], *, num_layers: int = 3, **fields: Any) -> list[Tensor]:
    return [describe_tensor(make(layer), layer_idx=layer, **fields) for layer in range(num_layers)]


def test_each_layer_beside_the_next() -> None:
    arrays = [filled("bfloat16", (30, 40), filling="normal", seed=seed) for seed in range(3)]
    scaled = [(array.astype(np.float32) * 4**layer + layer).astype(np.float16) for layer, array in enumerate(arrays)]
    table = stats(records_of(layered(lambda layer: scaled[layer], compute_dtype="float16")), neighbours=True)
    assert [(row["layer_idx"], row["next.layer_idx"]) for row in table.records()] == [(0, 1), (1, 2)]
    for row, here, there in zip(table.records(), scaled, scaled[1:], strict=False):
        x, y = here.astype(np.float64).reshape(-1), there.astype(np.float64).reshape(-1)
        assert row["ratio.std"] == pytest.approx(y.std() / x.std(), rel=1e-9)
        assert row["ratio.absmax"] == np.abs(y).max() / np.abs(x).max()
        assert row["shift.mean"] == pytest.approx((y.mean() - x.mean()) / x.std(), rel=1e-9)
        assert row["distance.kolmogorov_smirnov"] == pytest.approx(scipy.stats.ks_2samp(x, y).statistic, abs=1e-12)
        assert row["distance.wasserstein"] == pytest.approx(scipy.stats.wasserstein_distance(x, y), rel=1e-9)


def test_neighbours_are_found_across_pipeline_stages_and_beside_experts() -> None:
    def tensor(layer: int, rank: int, module: str) -> Tensor:
        return describe_tensor(np.full(3, 2.0**rank), layer_idx=layer, rank=rank, module=module)

    # Layers 0 and 2 are on ranks 0 and 1, whose copies are on 2 and 3; paths of the second stage begin with 0 again.
    records = records_of(
        [
            tensor(layer, rank, f"stage.{0 if is_second else layer}.experts.{expert}")
            for is_second, ranks in ((False, (0, 1)), (True, (2, 3)))
            for rank in ranks
            for layer in ((2,) if is_second else (0,))
            for expert in (4, 5)
        ]
        + [tensor(-1, 0, "head"), tensor(7, 0, "other.7")]
    )
    rows = stats(records, neighbours=True).records()
    assert [(row["rank"], row["module"], row["next.layer_idx"], row["ratio.absmax"]) for row in rows] == [
        (rank, f"stage.0.experts.{expert}", 2, 4.0) for rank in (0, 1) for expert in (4, 5)
    ]
    assert [row["ratio.std"] for row in rows] == [None] * 4


def test_neighbours_of_groups() -> None:
    tensors = [
        *layered(lambda layer: np.full(4, layer + 1.0), tensor_name="input"),
        *layered(lambda layer: np.full(4, 3.0**layer), tensor_name="output"),
    ]
    rows = stats(records_of(tensors), by=["layer_idx", "tensor_name"], neighbours=True).records()
    assert [(row["tensor_name"], row["layer_idx"], row["ratio.absmax"]) for row in rows] == [
        ("input", 0, 2.0),
        ("input", 1, 1.5),
        ("output", 0, 3.0),
        ("output", 1, 3.0),
    ]
    with pytest.raises(NoRecordsError, match="no record has a neighbour"):
        stats(stored(np.ones(3)), neighbours=True)


def sampled(array: Array, *, ids: list[int | str] | None = None, **fields: Any) -> Tensor:
    values, info = describe_tensor(array, sample_dim=0, **fields)
    return values, dataclasses.replace(info, sample_ids=ids)


def test_each_sample_of_each_record() -> None:
    for dtype in ["bfloat16", "float32", "float64", "int8"]:
        array = filled(dtype, (6, 5, 30), filling="special")
        records = records_of([sampled(array, ids=[7, "b", 1, 2, 3, 4]), describe_tensor(array, tensor_name="weight")])
        table = stats(records, per_sample=True)
        assert table.column("sample") == ["7", "b", "1", "2", "3", "4"]
        assert table.column("sample_index") == list(range(6))
        assert table.notes[0].startswith("1 records are left out")
        for row, sample in zip(table.records(), array, strict=True):
            values = expected(sample)
            for name in SAMPLE_NAMES:
                assert row[name] == (values[name] if values[name] is None else pytest.approx(values[name], rel=1e-9)), (
                    name
                )


def test_each_sample_over_all_records() -> None:
    first, second = (filled("bfloat16", (3, 50), filling="special", seed=seed) for seed in (0, 1))
    nothing = filled("bfloat16", (3, 4), filling="nan")
    records = records_of(
        [
            sampled(first, ids=["x", 1, "y"], layer_idx=0),
            sampled(second, ids=["y", "x", 1], layer_idx=1),
            sampled(nothing, ids=["x", "y", 1], layer_idx=2),
        ]
    )
    rows = stats(records, by=["sample"], metric=SAMPLE_NAMES, per_sample=True).records()
    assert [(row["sample"], row["records"]) for row in rows] == [("1", 3), ("x", 3), ("y", 3)]
    for row, parts in zip(rows, ((1, 2), (0, 1), (2, 0)), strict=True):
        together = np.concatenate([first[parts[0]], second[parts[1]], nothing[0]])
        for name, value in expected(together).items():
            if name in SAMPLE_NAMES:
                assert row[name] == pytest.approx(value, rel=1e-9), name
    by_layer = stats(records, by=["layer_idx"], per_sample=True)
    assert [column.name for column in by_layer.columns][:3] == ["layer_idx", "sample", "records"]
    assert len(by_layer.rows) == 9


def test_samples_without_ids_say_what_an_index_means() -> None:
    records = records_of([sampled(np.ones((2, 3)), rank=rank) for rank in (0, 1)])
    table = stats(records, by=["sample", "rank"], per_sample=True)
    assert table.column("rank") == [0, 0, 1, 1]
    assert table.column("sample") == ["0", "1"] * 2
    (note,) = table.notes
    assert note.startswith("samples have no IDs")
    assert note.endswith("to distinguish them, add --by iteration,microbatch")
    with pytest.raises(UsageError, match="metric 'p50' is not available for samples"):
        stats(records, metric=["p50"], per_sample=True)


@pytest.fixture(scope="module")
def run() -> Records:
    return records_of(layered(lambda layer: filled("bfloat16", (4, 50), filling="normal", seed=layer), sample_dim=0))


def ask(records: Records, line: str) -> Any:
    url = repr(records).rpartition(" in ")[2].removesuffix(">")
    return CliRunner().invoke(cli, shlex.split(line.format(run=url)))


def test_the_command_asks_each_question(run: Records) -> None:
    for options, question in (
        ("", stats(run)),
        ("--by layer-idx", stats(run, by=["layer_idx"])),
        ("--metric std,p99.5", stats(run, metric=["std", "p99.5"])),
        ("--neighbours", stats(run, neighbours=True)),
        ("--per-sample", stats(run, per_sample=True)),
        ("--by sample", stats(run, by=["sample"], per_sample=True)),
    ):
        result = ask(run, f"stats {{run}} {options} --json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout) == json.loads(json.dumps(question.to_json()))


def test_the_command_names_the_way_out(run: Records) -> None:
    cases: list[tuple[str, str]] = [
        ("--metric stdd", "no metric 'stdd': use std"),
        ("--neighbours --per-sample", "--neighbours and --per-sample exclude each other"),
        ("--neighbours --metric std", "--neighbours has its own metrics"),
        ("--by layr", "records have no field 'layr'"),
        ("--by sample --metric kurtosis", "metric 'kurtosis' is not available for samples"),
    ]
    for options, message in cases:
        result = ask(run, f"stats {{run}} {options}")
        assert (result.exit_code, message in result.stderr) == (2, True), result.output
