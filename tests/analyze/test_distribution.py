"""Does `distribution` show the raw tensors' values: in each look, of each group, and whatever was kept of them?"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.analyze.engine.values import View
from ranktape.analyze.numerics.distributions import NARROW_FORMATS
from ranktape.analyze.numerics.formats import FORMATS, round_to
from ranktape.analyze.questions.distribution import DistributionKind, distribution
from ranktape.capture.writing.counting import reduce_to
from ranktape.errors import NoRecordsError, UnknownFieldError, UsageError
from ranktape.storage import Records
from tests.analyze.every_tensor import COMPLEX, FILLINGS, REAL, Array, filled, records_of, stored
from tests.analyze.runs import describe_tensor


@pytest.fixture(scope="module")
def tensors() -> list[Array]:
    return [filled("bfloat16", (30, 40), filling=filling) for filling in ("normal", "special", "wide")]


@pytest.fixture(scope="module")
def records(tensors: list[Array]) -> Records:
    return stored(*tensors)


def values_of(tensors: list[Array]) -> Array:
    together = np.concatenate([array.astype(np.float64).reshape(-1) for array in tensors])
    finite: Array = together[np.isfinite(together)]
    return finite


def test_a_selection_is_one_histogram(tensors: list[Array], records: Records) -> None:
    values = values_of(tensors[:1])
    table = distribution(records.select(layer_idx=0), bins=20)
    edges = [*table.column("lower"), table.column("upper")[-1]]
    assert edges == pytest.approx(np.histogram_bin_edges(values, bins=20).tolist())
    assert table.column("count") == np.histogram(values, bins=edges)[0].tolist()
    assert table.column("density") == pytest.approx(np.histogram(values, bins=edges, density=True)[0].tolist())
    assert (min(table.column("relative_density")), max(table.column("relative_density"))) >= (0.0, 1.0)
    assert table.column("records") == [1] * 20


def test_groups_have_bins_of_their_own(tensors: list[Array], records: Records) -> None:
    table = distribution(records, kind="log2", by=["layer_idx"])
    for layer, array in enumerate(tensors):
        rows = [row for row in table.records() if row["layer_idx"] == layer]
        values = values_of([array])
        assert sum(row["count"] for row in rows) == (values != 0).sum()
        for row in rows:
            inside = (np.abs(values) >= row["lower"]) & (np.abs(values) < row["upper"])
            assert (row["count"], row["negative"]) == (inside.sum(), (inside & (values < 0)).sum())
            assert row["density"] == row["ratio"]
    every = values_of(tensors)
    total = np.concatenate([array.astype(np.float64).reshape(-1) for array in tensors])
    expected = f"{np.isnan(total).sum()} NaN and {np.isinf(total).sum()} Inf are in no bin; {(every == 0).sum()} values"
    assert table.notes[0].startswith(expected)


def test_normalised_values_are_from_0_to_1(tensors: list[Array], records: Records) -> None:
    values = values_of(tensors[:1])
    table = distribution(records.select(layer_idx=0), kind=DistributionKind.NORMALISED, bins=16)
    scaled = (values - values.min()) / (values.max() - values.min())
    lower, upper = table.column("normalised.lower"), table.column("normalised.upper")
    assert (lower[0], upper[-1]) == (0.0, 1.0)
    density = np.histogram(scaled, bins=16, range=(0, 1), density=True)[0]
    assert table.column("normalised.density") == pytest.approx(density.tolist(), abs=16 / values.size)
    assert sum(table.column("count")) == values.size
    assert table.column("density") == pytest.approx((density / np.ptp(values)).tolist(), abs=16 / values.size)


def test_exponents_say_which_formats_hold_them() -> None:
    array = np.array([1.0, 1.5, 2.0**-6, -(2.0**-9), 2.0**-10, 0.0, np.nan, np.inf], dtype=np.float32)
    table = distribution(stored(array), kind="exponents", format=["fp8_e4m3", "fp4_e2m1"])
    rows = {row["exponent"]: row for row in table.records()}
    assert {exponent: row["count"] for exponent, row in rows.items()} == {-10: 1, -9: 1, -6: 1, 0: 2}
    assert (rows[0]["lower"], rows[0]["upper"], rows[0]["ratio"]) == (1.0, 2.0, 2 / 8)
    # Without a scale fp8_e4m3 has all bits from 2**-6 on; with 448 at 1.5, ten binades further down.
    assert rows[-6]["unscaled.normal_in"] == ["fp8_e4m3"]
    assert rows[-9]["unscaled.normal_in"] == []
    assert (rows[-10]["normal_in"], rows[-6]["normal_in"]) == (["fp8_e4m3"], ["fp8_e4m3"])
    assert rows[0]["normal_in"] == ["fp8_e4m3", "fp4_e2m1"]
    assert rows[-9]["subnormal_in"] == []


def test_formats_say_what_becomes_of_the_values(tensors: list[Array], records: Records) -> None:
    values = values_of(tensors[2:])
    rows = distribution(records.select(layer_idx=2), kind="formats").records()
    assert [(row["format"], row["scale"]) for row in rows] == [
        (name, scale) for name in NARROW_FORMATS for scale in ("none", "aligned")
    ]
    for row in rows:
        scaled = values / 2.0 ** row["scale_exponent"]
        rounded = round_to(scaled, target=FORMATS[row["format"]])
        assert row["flushed.count"] == ((rounded == 0) & (scaled != 0)).sum()
        assert (row["above.count"] == 0) or row["scale"] == "none"
        fates = ("above", "normal", "subnormal", "flushed", "zero", "nan", "inf")
        assert sum(row[f"{fate}.count"] for fate in fates) == values.size
        assert sum(row[f"{fate}.ratio"] for fate in fates) == pytest.approx(1)


def test_the_normal_fit_and_its_quantiles(records: Records) -> None:
    (normal, special, wide) = distribution(records, kind="normal", by=["layer_idx"]).records()
    assert normal["ks_distance"] < 0.05 < wide["ks_distance"]
    assert normal["qq_correlation"] > 0.99 > wide["qq_correlation"]
    assert special["finite"] < normal["finite"] == 1200
    assert normal["ks_p_value"] > 0.01
    points = distribution(records.select(layer_idx=0), kind="qq", points=5)
    assert points.column("probability") == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert points.column("observed") == pytest.approx(points.column("theoretical"), abs=0.15)


@pytest.fixture(scope="module")
def every_record() -> Records:
    shapes = [(3, 0), (), (40, 5)]
    return stored(
        *(filled(dtype, shape, filling=filling) for dtype in REAL + COMPLEX for shape in shapes for filling in FILLINGS)
    )


@pytest.mark.parametrize("kind", [*DistributionKind])
def test_whatever_a_record_holds_has_an_answer(kind: DistributionKind, every_record: Records) -> None:
    table = distribution(every_record, kind=kind, by=["layer_idx"])
    assert len({row["layer_idx"] for row in table.records()}) > len(REAL + COMPLEX) * 3
    assert len(table.to_text(wide=True).splitlines()) > len(table.rows)
    json.dumps(table.to_json(), allow_nan=False)
    assert distribution(every_record, kind=kind).rows


def test_constants_and_what_is_no_number() -> None:
    for value in [np.nan, np.inf, 0.0, 2.5]:
        records = stored(np.full(6, value, dtype=np.float16), np.zeros((0, 4), dtype=np.float16))
        rows: dict[str, Any] = {kind: distribution(records, kind=kind).records() for kind in DistributionKind}
        is_finite = np.isfinite(value)
        assert sum(row["count"] for row in rows["linear"]) == (6 if is_finite else 0)
        assert sum(row["count"] for row in rows["log2"]) == (6 if is_finite and value else 0)
        assert rows["normalised"] == rows["qq"] == []
        assert rows["normal"][0]["finite"] == (6 if is_finite else 0)
        assert rows["normal"][0]["ks_distance"] is None
        assert len(rows["formats"]) == len(NARROW_FORMATS) * (2 if is_finite and value else 1)


def test_what_was_kept_of_the_values() -> None:
    array = filled("bfloat16", (40, 60), filling="wide")
    tensor = describe_tensor(array)
    histogram, statistics = (reduce_to(keep, array, info=tensor[1]) for keep in ("histogram", "statistics"))
    assert histogram is not None
    assert statistics is not None
    for kind in DistributionKind:
        whole = distribution(records_of([tensor]), kind=kind)
        assert distribution(records_of([histogram]), kind=kind).rows == whole.rows
        with pytest.raises(NoRecordsError, match="no record stores values"):
            distribution(records_of([statistics]), kind=kind)
    other = describe_tensor(array, tensor_name="other")
    beside = distribution(records_of([statistics, other]), kind="linear")
    assert sum(beside.column("count")) == array.size
    assert "1 records are left out: they store only statistics" in beside.notes


def test_wide_values_are_looked_at_as_computed_with_unless_said_otherwise() -> None:
    values = np.random.default_rng(0).random(30_000).astype(np.float32)
    records = stored(values, compute_dtype="bfloat16")
    computed, seen = (distribution(records, bins=2, view=view) for view in (None, View.SEEN))
    assert not any("2^-10" in note for note in computed.notes)
    assert any("2^-10" in note for note in seen.notes)
    assert "as captured" in seen.title


def test_the_defaults_are_those_that_the_help_names(records: Records) -> None:
    for kind, name in (("linear", "bins"), ("normalised", "bins"), ("log2", "per_binade"), ("qq", "points")):
        found = re.search(rf"^ +{name} \(N\): .*\[(\d+)\]\.$", str(distribution.__doc__), re.MULTILINE)
        assert found is not None, name
        options: list[dict[str, Any]] = [{}, {name: int(found[1])}, {name: int(found[1]) + 1}]
        plain, same, other = (distribution(records, kind=DistributionKind(kind), **given).rows for given in options)
        assert (same == plain, other == plain) == (True, False), name


def test_what_is_not_known_is_refused(records: Records) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kind": "lin"}, "kind 'lin' is not known: use one of linear"),
        ({"bins": 0}, "bins=0 is not allowed: give a number from 1"),
        ({"kind": "log2", "per_binade": 1000}, "per_binade=1000 is not allowed"),
        ({"kind": "qq", "points": -1}, "points=-1 is not allowed"),
        ({"kind": "formats", "format": ["fp8_e4m4"]}, "format 'fp8_e4m4' is not known"),
        ({"kind": "formats", "format": ["e8m0"]}, "format 'e8m0' is a format of scales"),
    ]
    for options, message in cases:
        with pytest.raises(UsageError, match=message):
            distribution(records, **options)
        with pytest.raises(UnknownFieldError, match="layr"):
            distribution(records, by=["layr"])


def ask(records: Records, options: str) -> Any:
    url = repr(records).rpartition(" in ")[2].removesuffix(">")
    return CliRunner().invoke(cli, shlex.split(f"distribution {url} {options}"))


def test_the_command_asks_the_question(records: Records) -> None:
    for options, given in (
        ("", {"kind": "log2"}),
        ("--kind log2 --per-binade 2 --by layer-idx", {"kind": "log2", "per_binade": 2, "by": ["layer_idx"]}),
        ("--kind formats --format hif8,int8", {"kind": "formats", "format": ["hif8", "int8"]}),
        ("--kind qq --points 3", {"kind": "qq", "points": 3}),
        ("--bins 5", {"bins": 5, "kind": "linear"}),
    ):
        result = ask(records, f"{options} --json")
        assert result.exit_code == 0, result.output
        expected: Any = distribution(records, **given)
        assert json.loads(result.stdout) == json.loads(json.dumps(expected.to_json()))


def test_text_has_a_bar_for_each_bin() -> None:
    records = stored(np.array([1.0, 1, 1, 1, 1, 1, 1, 1, 0.25], np.float32))
    lines = ask(records, "--kind log2").stdout.splitlines()
    assert [line.split()[-1] for line in lines[-4:-1]] == ["#" * 4, ".", "#" * 32]


def test_the_command_names_the_way_out(records: Records) -> None:
    cases: list[tuple[str, str]] = [
        ("--kind lin", "'lin' is not one of"),
        ("--kind log2 --bins 3", "--bins does not apply to --kind log2: it is for linear and normalised"),
        ("--points 3", "--points does not apply to --kind log2: it is for qq"),
        ("--format fp8_e4m3", "--format does not apply to --kind log2: it is for exponents and formats"),
        ("--bins 0", "bins=0 is not allowed"),
        ("--layer-idx 9", "no records match --layer-idx 9"),
    ]
    for options, message in cases:
        result = ask(records, options)
        assert result.exit_code in {1, 2}
        assert message in result.stderr
