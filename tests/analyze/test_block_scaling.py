"""Are the figures of blocks and channels those of quantising the whole tensor at each offset?"""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktape.analyze.engine.target import is_sweepable
from ranktape.analyze.numerics.formats import FORMATS, Rounding
from ranktape.analyze.numerics.histograms.block_histogram import count_blocks
from ranktape.analyze.numerics.quantization.quantizer import quantize
from ranktape.analyze.numerics.quantization.schemes import SCHEMES, ScaleRule
from ranktape.analyze.numerics.sweeps import sweep as sweep_module
from ranktape.analyze.numerics.sweeps.metrics import SAME_SQNR, Level
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep, sweep_array, sweep_formats
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES, numpy_dtype
from tests.strategies import arrays

Array = np.ndarray[Any, Any]

FIVE: dict[str, Any] = {"num_levels": 5, "max_scale_exp": 8, "min_scale_exp": -8}

MX = [name for name in SCHEMES if name.startswith("mx")]

NVFP4 = [name for name in SCHEMES if name not in MX]

TYPES = ["bfloat16", "float16", "float32", "float64", "float8_e5m2"]


@functools.cache
def special(name: str, shape: tuple[int, ...] = (4, 9, 140)) -> Array:
    """Blocks of many magnitudes, among them NaN, Inf, zeros, subnormals and significands at which rules change."""
    rng = np.random.default_rng(1)
    dtype = numpy_dtype(name)
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, (*shape[:-1], 1)))
    flat = values.reshape(-1)
    flat[::7] = np.ldexp(rng.choice([1, 1.25, 1.5, 1.75, 1.875, 1.9375, 1.984375], flat[::7].size), 12)
    flat[300:420] = 0.0
    flat[500:560] = rng.choice([float(info.smallest_subnormal), -float(info.smallest_normal), 0.0], 60)
    flat[[5, 1000, 2001]] = np.nan, np.inf, -np.inf
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def assert_direct(found: ScaleSweep, array: Array, *, format: str, **how: Any) -> None:  # noqa: A002
    """The slow twin: the whole tensor is quantised at every level, and compared with what it was."""
    with np.errstate(invalid="ignore"):
        exact = array.astype(np.float64)
    for level in found.levels:
        quantized = quantize(exact, format, scale_offset=int(level.exponent), warn=False, **how)
        values, losses = np.asarray(quantized.values), quantized.losses
        is_in = np.isfinite(values) & np.isfinite(exact)
        x, y = exact[is_in], values[is_in]
        error = np.abs(x - y)
        assert (level.underflow_count, level.flushed_count) == (losses.underflow, losses.flushed)
        assert level.overflow_count == losses.overflow
        assert (found.nan, found.inf, found.spoiled) == (losses.nan, losses.inf, losses.spoiled)
        assert found.zero == np.count_nonzero(x == 0)
        assert (found.largest, found.smallest) == (np.abs(x).max(), np.abs(x[x != 0]).min())
        lengths = math.sqrt(math.fsum(x * x)) * math.sqrt(math.fsum(y * y))
        expected = {
            "mse": math.fsum(error * error) / x.size,
            "mae": math.fsum(error) / x.size,
            "max_abs_error": error.max(),
            "relative_error": math.fsum(error) / math.fsum(np.abs(x)),
            "cosine": math.fsum(x * y) / lengths if lengths else 0.0,
        }
        for name, value in expected.items():
            assert math.isclose(getattr(level, name), value, rel_tol=1e-12), (level.exponent, name)


@pytest.mark.parametrize("format_name", MX)
@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_blocks_lose_what_quantising_them_loses(name: str, rule: ScaleRule, format_name: str) -> None:
    array = special(name)
    found = sweep_array(array, format=format_name, options=SweepOptions(scale_rule=rule, **FIVE))
    assert [level.exponent for level in found.levels] == [8, 4, 0, -4, -8]
    assert_direct(found, array, format=format_name, scale_rule=rule.value)


@pytest.mark.parametrize(("axis", "block_size"), [(-1, 1), (0, 3), (1, 4), (-2, 32), (2, 16), (1, 1000)])
@pytest.mark.parametrize("name", TYPES)
def test_along_every_axis_with_blocks_of_every_size(name: str, axis: int, block_size: int) -> None:
    array = special(name)
    options = SweepOptions(axis=axis, block_size=block_size, **FIVE)
    found = sweep_array(array, format="mxfp4_e2m1", options=options)
    assert (found.scheme.block_size, found.mode) == (block_size, SweepMode.MX)
    assert_direct(found, array, format="mxfp4_e2m1", axis=axis, block_size=block_size)


@pytest.mark.parametrize("rounding", [Rounding.AWAY, Rounding.FLOOR])
@pytest.mark.parametrize("scale_bits", [4, 8])
@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_other_roundings_and_narrower_scales(name: str, scale_bits: int, rounding: Rounding) -> None:
    array = special(name)
    options = SweepOptions(mode=SweepMode.MX, rounding=rounding, scale_bits=scale_bits, **FIVE)
    found = sweep_array(array, format="fp6_e3m2", options=options)
    assert_direct(found, array, format="mxfp6_e3m2", rounding=rounding.value, scale_bits=scale_bits)


@pytest.mark.parametrize("scheme", NVFP4)
@pytest.mark.parametrize(("axis", "block_size"), [(-1, 16), (0, 16), (1, 5)])
@pytest.mark.parametrize("name", TYPES)
def test_nvfp4_loses_what_quantising_to_it_loses(name: str, axis: int, block_size: int, scheme: str) -> None:
    array = special(name)
    found = sweep_array(array, format=scheme, options=SweepOptions(axis=axis, block_size=block_size, **FIVE))
    assert_direct(found, array, format=scheme, axis=axis, block_size=block_size)


@pytest.mark.parametrize("scheme", NVFP4)
@pytest.mark.parametrize("largest", [1e39, 1e41, 1e100, 1e-60])
def test_nvfp4_beyond_float32_loses_what_quantising_to_it_loses(largest: float, scheme: str) -> None:
    rest = min(largest, 1.0)
    array = np.array([[largest, -largest / 4, rest, 0.0] * 4, [rest, -rest / 2, rest / 4, 0.0] * 4])
    assert_direct(sweep_array(array, format=scheme, options=SweepOptions(**FIVE)), array, format=scheme)


@pytest.mark.parametrize("largest", [1e155, 1e180])
def test_the_direction_of_nvfp4_is_known_where_squares_are_beyond_float64(largest: float) -> None:
    x = np.array([[1.0, -1 / 3, 1 / 7, 0.0] * 4])
    for level in sweep_array(largest * x, format="nvfp4", options=SweepOptions(**FIVE)).levels:
        y = quantize(largest * x, "nvfp4", scale_offset=int(level.exponent), warn=False).values
        y = np.asarray(y) / np.abs(y).max()
        cosine = (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
        assert level.cosine == pytest.approx(cosine, rel=1e-6)


def test_nvfp4_of_the_largest_float64_loses_nearly_all_and_says_so() -> None:
    levels = sweep_array(np.array([1e300, 0.0]), format="nvfp4").levels
    assert len(levels) == 21
    for level in levels:
        assert (level.mse, level.relative_error) == (math.inf, 1.0)
        assert level.sqnr == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("format_name", ["fp8_e4m3", "fp4_e2m1", "int8", "hif8"])
@pytest.mark.parametrize("name", ["bfloat16", "float32", "float64"])
def test_channels_lose_what_quantising_them_loses(name: str, format_name: str, axis: int) -> None:
    array = special(name)
    found = sweep_array(array, format=format_name, options=SweepOptions(mode=SweepMode.CHANNEL, axis=axis, **FIVE))
    assert_direct(found, array, format=format_name, scaling="channel", axis=axis)


def test_blocks_that_do_not_fit_into_a_box() -> None:
    array = special("float32", (3, 20_000))
    for axis, block_size in ((0, 2), (1, 15_000)):
        found = sweep_array(array, format="mxfp8_e4m3", options=SweepOptions(axis=axis, block_size=block_size, **FIVE))
        assert_direct(found, array, format="mxfp8_e4m3", axis=axis, block_size=block_size)
        turned = SweepOptions(axis=1 - axis, block_size=block_size, **FIVE)
        other = sweep_array(np.ascontiguousarray(array.T), format="mxfp8_e4m3", options=turned)
        assert [level.flushed_count for level in other.levels] == [level.flushed_count for level in found.levels]


@settings(max_examples=25)
@given(
    data=st.data(),
    name=st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
    format_name=st.sampled_from([*SCHEMES, "mxbf16"]),
    rule=st.sampled_from(ScaleRule),
    block_size=st.integers(1, 6),
)
def test_any_bits_and_any_layout(
    data: st.DataObject, name: str, format_name: str, rule: ScaleRule, block_size: int
) -> None:
    array = data.draw(arrays(name=name))
    if array.ndim == 0:
        return
    element = format_name.removeprefix("mx")
    rule_of: dict[str, Any] = {} if format_name in NVFP4 else {"scale_rule": rule.value}
    axis = data.draw(st.integers(-array.ndim, array.ndim - 1))
    options = SweepOptions(mode=SweepMode.MX, block_size=block_size, axis=axis, **FIVE, **rule_of)
    found = sweep_array(array, format=element, options=options)
    with np.errstate(all="ignore"):
        exact = array.astype(np.float64)
    scaling_of: dict[str, Any] = {} if format_name in NVFP4 else {"scaling": "block"}
    for level in found.levels:
        losses = quantize(
            exact,
            element,
            block_size=block_size,
            axis=axis,
            scale_offset=int(level.exponent),
            warn=False,
            **scaling_of,
            **rule_of,
        ).losses
        assert (level.overflow_count, level.underflow_count, level.flushed_count, found.spoiled) == (
            losses.overflow,
            losses.underflow,
            losses.flushed,
            losses.spoiled,
        )
        assert not any(math.isnan(getattr(level, field)) for field in Level.__dataclass_fields__)


@pytest.mark.parametrize(
    ("format_name", "how"),
    [("fp8_e4m3", {"scaling": "tensor", "scale_rule": "floor"}), ("mxfp4_e2m1", {}), *((name, {}) for name in NVFP4)],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_figures_of_stochastic_rounding_are_means_over_seeds(dtype: str, format_name: str, how: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    array = (rng.standard_normal((32, 64)) * np.exp2(-rng.integers(0, 12, (32, 64)))).astype(numpy_dtype(dtype))
    exact = array.astype(np.float64)
    exponent = 8 - math.floor(math.log2(np.abs(exact).max())) if how else 0
    options = SweepOptions(rounding=Rounding.STOCHASTIC, num_levels=1, max_scale_exp=-exponent, min_scale_exp=-exponent)
    (level,) = sweep_array(array, format=format_name, options=options).levels
    drawn = [quantize(array, format_name, seed=seed, warn=False, **how) for seed in range(60)]
    flushed = np.array([one.losses.flushed for one in drawn]) / exact.size
    errors = np.array([np.mean((exact - one.values.astype(np.float64)) ** 2) for one in drawn])
    assert 0.001 < level.flushed_ratio == pytest.approx(flushed.mean(), abs=5 * flushed.std() / math.sqrt(60))
    assert level.flushed_count == round(level.flushed_ratio * exact.size)
    assert level.mse == pytest.approx(errors.mean(), abs=5 * errors.std() / math.sqrt(60))
    for one in drawn:
        assert (one.losses.overflow, one.losses.underflow) == (level.overflow_count, level.underflow_count)
        assert np.abs(exact - one.values).max() <= level.max_abs_error * (1 + 1e-6)


@pytest.mark.parametrize("power", [-1000, 900])
@pytest.mark.parametrize("mode", [SweepMode.MX, SweepMode.CHANNEL])
def test_magnitudes_at_the_ends_of_float64_have_figures(mode: SweepMode, power: int) -> None:
    """Scales end at 2**127 and 2**-127: all is flushed, or all overflows."""
    array = np.ldexp(np.random.default_rng(0).uniform(1, 2, (4, 64)), power)
    found = sweep_array(array, format="fp8_e4m3", options=SweepOptions(mode=mode, **FIVE))
    for level in found.levels:
        assert (level.flushed_count, level.overflow_count) == ((256, 0) if power < 0 else (0, 256))
        assert not any(math.isnan(getattr(level, field)) for field in Level.__dataclass_fields__)
        assert level.relative_error == pytest.approx(1.0)


def test_values_and_counts_of_blocks_agree_bit_for_bit_in_counts() -> None:
    array = special("bfloat16")
    for format_name in MX:
        by_counts = sweep_array(array, format=format_name)
        by_values = sweep_array(array.astype(np.float32), format=format_name)
        assert by_counts.note == by_values.note == "blocks with NaN or Inf left out"
        assert len(by_counts.levels) == len(by_values.levels) == 21
        for left, right in zip(by_counts.levels, by_values.levels, strict=True):
            assert left.overflow_count == right.overflow_count
            assert math.isclose(left.mse, right.mse, rel_tol=1e-12)
            assert math.isclose(left.score, right.score, rel_tol=1e-9)


def test_the_same_bits_with_any_threads_and_layout() -> None:
    array = np.random.default_rng(0).standard_normal((70, 3000)).astype(np.float32)
    for options in (SweepOptions(**FIVE), SweepOptions(axis=0, **FIVE)):
        for format_name in ("mxfp8_e4m3", "nvfp4"):
            first = sweep_array(array, format=format_name, options=options, threads=1)
            second = sweep_array(np.asfortranarray(array), format=format_name, options=options, threads=3)
            assert first.levels == second.levels


def test_several_formats_come_from_one_counting() -> None:
    array = special("bfloat16")
    names = ["mxfp8_e4m3", "mxfp6_e2m3", "nvfp4", "hif8", "fp8_e5m2"]
    found = sweep_formats(array, formats=names)
    assert [sweep.scheme.name for sweep in found] == names
    assert [sweep.mode for sweep in found] == [SweepMode.MX] * 3 + [SweepMode.TENSOR] * 2
    assert list(found) == [sweep_array(array, format=name) for name in names]


def test_counts_that_were_kept_answer_as_the_values_do() -> None:
    array = special("bfloat16")
    counted = count_blocks(array, axis=1, block_size=4)
    options = SweepOptions(axis=1, block_size=4, scale_rule=ScaleRule.RCEIL)
    (found,) = sweep_formats(counted, formats=["mxfp8_e5m2"], options=options)
    expected = sweep_array(array, format="mxfp8_e5m2", options=options)
    assert found.levels == expected.levels
    assert (found.minimum, found.maximum) == (None, None)


def test_counts_that_do_not_answer_say_so() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("mxfp8_e4m3", {}, "counts of blocks of 4 are not sufficient for mxfp8_e4m3 with blocks of 32"),
        ("nvfp4", {"block_size": 4}, "counts of blocks of 4 are not sufficient for nvfp4"),
        ("fp8_e4m3", {}, "are not sufficient for mode tensor"),
    ]
    for format_name, options, message in cases:
        counted = count_blocks(special("bfloat16"), block_size=4)
        with pytest.raises(UsageError, match=message):
            sweep_formats(counted, formats=[format_name], options=SweepOptions(**options))


@pytest.mark.parametrize(
    ("values", "note"),
    [
        (np.zeros((0, 3)), "empty"),
        (np.zeros((2, 3)), "all zero: exact at any scale"),
        (np.full(3, np.nan), "no finite number"),
        (np.array([1.0, np.inf]), "NaN or Inf in every block"),
        (np.array([*[0.0] * 32, np.nan]), "no finite number other than zero"),
        (np.float64(3.0), ""),
    ],
)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("format_name", ["mxfp8_e4m3", "nvfp4"])
def test_tensors_without_a_scale_say_why(format_name: str, dtype: Any, values: Array, note: str) -> None:
    found = sweep_array(np.asarray(values).astype(dtype), format=format_name)
    assert found.note == note
    assert bool(found.levels) == (note == "")


def test_every_dtype_has_blocks() -> None:
    for name in [name for name in DTYPES if is_sweepable(name)]:
        with np.errstate(all="ignore"):
            array = np.ones((2, 40)).astype(numpy_dtype(name))
        found = sweep_array(array, format="mxfp8_e4m3", options=SweepOptions(**FIVE))
        assert found.best(lambda level: -level.mse) is not None
        assert found.num_elements == (160 if array.dtype.kind == "c" else 80)
        single = sweep_array(array.reshape(-1)[3].reshape(()), format="mxfp8_e4m3", options=SweepOptions(**FIVE))
        assert single.num_elements == (2 if array.dtype.kind == "c" else 1)


def test_what_does_not_go_together_is_refused() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("hif8", {"mode": SweepMode.MX}, "format 'hif8' is not one of blocks"),
        ("mxfp8_e4m3", {"mode": SweepMode.TENSOR}, "format 'mxfp8_e4m3' has blocks: give --sweep-mode mx"),
        ("fp8_e4m3", {"rounding": Rounding.HYBRID}, "rounding hybrid is that of hif8"),
        ("hif8", {"rounding": Rounding.HYBRID, "mode": SweepMode.CHANNEL}, "--rounding hybrid is not allowed"),
        ("e8m0", {}, "format 'e8m0' is one of scales"),
        ("mxfp8_e4m3", {"num_levels": 1, "min_scale_exp": 0.5}, "--min-scale-exp 0.5 is not allowed with blocks"),
        ("mxfp8_e4m3", {"axis": 3}, r"--axis 3 is not one of a tensor of shape \(4, 9, 140\)"),
        ("mxfp8_e4m3", {"max_scale_exp": 0.5}, "--max-scale-exp 0.5 is not allowed with blocks"),
        ("mxfp8_e4m3", {"num_levels": 22}, "there are 21 whole numbers, give that many or fewer"),
    ]
    for format_name, options, message in cases:
        with pytest.raises(UsageError, match=message):
            sweep_array(special("bfloat16"), format=format_name, options=SweepOptions(**options))


def test_offsets_are_whole_and_evenly_placed() -> None:
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({}, list(range(10, -11, -1))),
        ({"max_scale_exp": 2, "min_scale_exp": -1}, [2, 1, 0, -1]),
        ({"num_levels": 3, "max_scale_exp": -4, "min_scale_exp": 4}, [-4, 0, 4]),
        ({"num_levels": 1, "max_scale_exp": 3}, [3]),
        ({"num_levels": 4}, [10, 3, -3, -10]),
    ]
    for options, expected in cases:
        assert SweepOptions(**options).offsets().tolist() == expected


def test_an_element_format_in_blocks_is_the_scheme_of_that_name() -> None:
    array = special("float32")
    options = SweepOptions(mode=SweepMode.MX)
    assert sweep_array(array, format="fp8_e4m3", options=options) == sweep_array(
        array, format="mxfp8_e4m3", options=options
    )
    assert FORMATS["fp8_e4m3"] == sweep_array(array, format="mxfp8_e4m3").target


@pytest.mark.parametrize("axis", [-1, 0])
def test_where_counts_would_be_too_many_the_values_say_the_same(monkeypatch: pytest.MonkeyPatch, axis: int) -> None:
    array, options = special("bfloat16"), SweepOptions(axis=axis, **FIVE)
    counted = sweep_array(array, format="mxfp6_e3m2", options=options)
    monkeypatch.setattr(sweep_module, "MAX_CELLS", 100)
    found = sweep_array(array, format="mxfp6_e3m2", options=options)
    assert (found.num_elements, found.spoiled, found.zero) == (counted.num_elements, counted.spoiled, counted.zero)
    assert_direct(found, array, format="mxfp6_e3m2", axis=axis)


def test_offsets_that_lose_the_same_leave_the_scales_as_they_are() -> None:
    array = np.random.default_rng(0).standard_normal((64, 256)).astype(ml_dtypes.bfloat16)
    found = sweep_array(array, format="nvfp4")
    assert found.recommended is not None
    assert found.recommended.exponent == 0
    assert max(level.sqnr for level in found.levels) - found.recommended.sqnr <= SAME_SQNR
