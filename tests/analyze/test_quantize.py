"""Is a quantised tensor what its scheme says, bit for bit, whatever the tensor?"""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.linalg  # type: ignore[import-untyped]
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ranktape.analyze import quantize
from ranktape.analyze.numerics.formats import FORMATS, codes_of, decode, round_to
from ranktape.analyze.numerics.quantization import kernels
from ranktape.analyze.numerics.quantization.encoded import Quantized
from ranktape.analyze.numerics.quantization.quantizer import rotated, rotation_signs
from ranktape.analyze.numerics.quantization.schemes import SCHEMES
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sweep import sweep_array
from ranktape.errors import UsageError
from tests.analyze.quantize_twin import ELEMENTS, AnyArray, Expected, quantize_slowly, same_bits, special_values
from tests.exhaustive import exhaustive

DTYPES = [
    np.dtype(dtype)
    for dtype in (
        np.float64,
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
    )
]

BF16 = DTYPES[3]

NVFP4 = ("nvfp4", "nvfp4_modelopt", "nvfp4_torchao")


def assert_same(found: Quantized, expected: Expected) -> None:
    assert same_bits(found.values, expected.values)
    assert found.tensor_scale == expected.tensor_scale
    if expected.scales is None or expected.scale_values is None:
        assert found.scales is None
        assert found.scale_values is None
    else:
        assert same_bits(found.scales, expected.scales)
        assert same_bits(found.scale_values, expected.scale_values)
    losses = {name: getattr(found.losses, name) for name in expected.losses}
    assert losses == expected.losses
    if expected.codes is not None:
        assert found.codes.dtype == expected.codes.dtype
        assert np.array_equal(found.codes, expected.codes)
    else:
        with pytest.raises(UsageError, match="no code for NaN"):
            _ = found.codes


def compare(x: AnyArray, scheme: str, **options: Any) -> Quantized:
    found = quantize(x, scheme, warn=False, **options)
    assert_same(found, quantize_slowly(x, scheme, **options))
    return found


def roundings(name: str) -> list[dict[str, Any]]:
    """Every rounding that an element format has, and what it needs."""
    usual: list[dict[str, Any]] = [{"rounding": word} for word in ("even", "away", "floor")]
    own: list[dict[str, Any]] = [{"rounding": "hybrid"}] if name == "hif8" else []
    return [*usual, {"rounding": "stochastic", "seed": 7}, *own]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_are_those_of_the_twin_for_every_rule_and_rounding(scheme: str, dtype: np.dtype[Any]) -> None:
    x = special_values((9, 83), dtype=dtype)
    rules = [None] if scheme in NVFP4 else ["floor", "ceil", "even", "rceil"]
    for rule in rules:
        for how in roundings(SCHEMES[scheme].element.name):
            compare(x, scheme, scale_rule=rule, **how)


@pytest.mark.parametrize("scheme", ["mxfp8_e4m3", "mxint8", *NVFP4])
@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 1000])
def test_blocks_lie_along_any_axis_with_a_shorter_one_at_the_end(scheme: str, block_size: int) -> None:
    for shape in [(), (5,), (33, 7), (2, 35, 3), (2, 3, 4, 5)]:
        x = special_values(shape, dtype=BF16, seed=block_size)
        for axis in range(-len(shape), max(len(shape), 1)):
            found = compare(x, scheme, block_size=block_size, axis=axis)
            assert found.values.shape == shape


OTHER_BLOCKS: list[tuple[str, dict[str, Any]]] = [
    ("fp8_e4m3", {"block_size": (4, 6), "scale_format": "fp32"}),
    ("fp8_e4m3", {"block_size": (4, 6), "scale_rule": "rceil"}),
    ("nvfp4", {"block_size": (16, 16)}),
    *((name, {"block_size": (1, 7)}) for name in NVFP4),
    *((name, {"four_over_six": True}) for name in NVFP4),
    ("nvfp4", {"four_over_six": True, "block_size": (3, 50)}),
    ("nvfp4", {"four_over_six": True, "seed": 3}),
    ("nvfp4", {"four_over_six": True, "scale_offset": -2}),
    ("fp4_e2m1", {"scale_format": "ue5m3", "four_over_six": True, "block_size": 16}),
    ("fp4_e2m1", {"scale_format": "fp8_e4m3", "block_size": 7}),
    ("int4", {"scale_format": "fp32", "scale_offset": -1}),
    ("fp8_e5m2", {"scale_format": "fp32", "scale_offset": 3, "block_size": 128, "seed": 2}),
    ("hif8", {"scale_format": "fp32", "block_size": 5}),
]
"""Blocks whose scales are no powers of two, tiles, and blocks that choose their scale."""


@pytest.mark.parametrize("dtype", [np.dtype(np.float64), np.dtype(np.float32), BF16], ids=str)
@pytest.mark.parametrize("case", OTHER_BLOCKS, ids=str)
def test_tiles_and_other_scales_are_those_of_the_twin(case: tuple[str, dict[str, Any]], dtype: np.dtype[Any]) -> None:
    scheme, options = case
    for shape in ((9, 84), (3, 7, 10), (0, 5)):
        ordinary = np.random.default_rng(0).standard_normal(shape) * 1e-3
        for x in (special_values(shape, dtype=dtype), ordinary.astype(dtype)):
            compare(x, scheme, scaling="block", **options)
            if not isinstance(options.get("block_size"), tuple):
                compare(x, scheme, scaling="block", axis=0, **options)


@pytest.mark.parametrize("dtype", [np.dtype(np.float64), np.dtype(np.float32), BF16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_a_rotated_tensor_is_that_of_the_twin(size: int, dtype: np.dtype[Any]) -> None:
    for x in (
        special_values((3, 128, 2), dtype=dtype),
        np.random.default_rng(0).standard_normal((2, 64, 3)).astype(dtype),
    ):
        for seed in (None, 5):
            compare(x, "nvfp4", rotation=size, rotation_seed=seed, axis=1)
    compare(np.zeros((0, 64), dtype=dtype), "mxfp8", rotation=size)
    assert quantize(np.array(3.0, dtype=dtype), "mxfp8", rotation=1).values == np.array(3.0)


def test_a_rotation_is_orthonormal_and_sylvesters_matrix() -> None:
    for size in (1, 2, 8, 32):
        for seed in (None, 3):
            unit = torch.eye(size, dtype=torch.float64)
            turned = rotated(unit, axis=1, size=size, seed=seed)
            expected = scipy.linalg.hadamard(size) / np.sqrt(size) * rotation_signs(size, seed=seed)[:, None]
            np.testing.assert_allclose(turned.numpy(), expected, rtol=1e-15)
            np.testing.assert_allclose(turned @ turned.T, unit, atol=1e-14)
            back = rotated(turned, axis=1, size=size, seed=seed, is_inverse=True)
            np.testing.assert_allclose(back, unit, atol=1e-14)
    assert set(rotation_signs(64, seed=0).tolist()) == {1.0, -1.0}
    assert rotation_signs(64, seed=0).tolist() != rotation_signs(64, seed=1).tolist()


def test_a_rotation_spreads_an_outlier_and_changes_no_product() -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 8, 64))
    x[3, 7] = 1000.0
    plain = quantize(x, "mxfp4", warn=False).losses
    turned = quantize(x, "mxfp4", rotation=64, rotation_seed=1, warn=False).losses
    assert plain.flushed > 31
    assert turned.flushed < plain.flushed - 20
    first, second = (rotated(torch.from_numpy(side), axis=1, size=64, seed=1) for side in (x, y))
    np.testing.assert_allclose(first @ second.T, x @ y.T, rtol=1e-10, atol=1e-9)


def test_four_over_six_never_has_larger_errors_than_either_scale_alone() -> None:
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    found = quantize(x, "nvfp4", four_over_six=True, warn=False)
    plain = quantize(x, "nvfp4", warn=False)
    errors = [((one.values - x).astype(np.float64) ** 2).mean() for one in (found, plain)]
    # Quartet II (arXiv 2601.22813), table 1: of N(0, 1) 9.0e-3 without and 7.6e-3 with it.
    assert errors == pytest.approx([7.6e-3, 9.0e-3], rel=0.02)
    largest = np.abs(decode(found.codes, target=FORMATS["nvfp4"])).reshape(256, 16, 16).max(axis=2)
    assert set(largest.ravel().tolist()) == {4.0, 6.0}
    # That of the largest block is 256 for 6, and 384 for 4.
    assert 256.0 <= found.scale_values.max() <= 384.0


def test_four_over_six_is_that_of_its_authors_but_for_ties_of_scales() -> None:
    """What `fouroversix` computes, operation by operation in float32: it divides by 6 before it multiplies."""
    x = np.random.default_rng(1).standard_normal((512, 64)).astype(np.float32)
    blocks, one, six = x.reshape(-1, 16), np.float32(1), np.float32(6)
    largest = np.abs(x).max()
    encode = np.float32(1536) / largest
    tried = []
    for stretch in (np.float32(1), np.float32(1.5)):
        wanted = np.abs(blocks).max(axis=1, keepdims=True) / six * encode * stretch
        scales = wanted.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        elements = round_to(blocks * (one / (one / encode * scales)), target=FORMATS["nvfp4"]).astype(np.float32)
        values = elements * scales * largest / np.float32(1536)
        tried.append((((values - blocks) ** 2).sum(axis=1), elements))
    expected = np.where((tried[1][0] < tried[0][0])[:, None], tried[1][1], tried[0][1])
    found = decode(quantize(x, "nvfp4", four_over_six=True, warn=False).codes, target=FORMATS["nvfp4"]).reshape(-1, 16)
    assert (found == expected).all(axis=1).mean() > 0.998


def test_mxint4_is_that_of_microxcaling() -> None:
    """Its formula: the exponent of the largest magnitude, steps of 1/4 of that power of two, 7 of them at most."""
    x = np.random.default_rng(1).standard_normal((64, 32)).astype(np.float32)
    powers = 2.0 ** np.floor(np.log2(np.abs(x).max(axis=1, keepdims=True).astype(np.float64)))
    expected = np.clip(np.rint(x / powers * 4), -7, 7) / 4 * powers
    assert same_bits(quantize(x, "mxint4", warn=False).values, expected.astype(np.float32) + np.float32(0))


def test_every_format_goes_with_every_scaling() -> None:
    for element in ELEMENTS:
        x = special_values((7, 50), dtype=BF16)
        for how in roundings(element):
            compare(x, element, **how)
            for rule in ("exact", "floor", "ceil", "even", "rceil"):
                compare(x, element, scaling="tensor", scale_rule=rule, **how)
                compare(x, element, scaling="channel", axis=0, scale_rule=rule, **how)
            compare(x, element, scaling="block", block_size=8, **how)


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_16_bit_number_becomes_what_the_reference_says(element: str) -> None:
    """All patterns of bfloat16 and float16, every rounding, saturating or not: values and codes."""
    target = FORMATS[element]
    for dtype in (BF16, np.dtype(np.float16)):
        x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
        with np.errstate(invalid="ignore"):
            is_number = ~np.isnan(x)
        for how in roundings(element):
            for saturate in (True, False)[: 1 + target.has_overflow_code]:
                with np.errstate(invalid="ignore"):
                    expected = round_to(x, target=target, saturate=saturate, **how)
                found = quantize(x, element, saturate=saturate, warn=False, **how)
                assert same_bits(found.values, expected.astype(np.float32))
                if target.num_nans:
                    assert np.array_equal(found.codes, codes_of(expected, target=target))
                elif "seed" not in how:
                    codes = quantize(x[is_number], element, warn=False, **how).codes
                    assert np.array_equal(codes, codes_of(expected[is_number], target=target))


def test_unscaled_scaled_and_channels_of_every_type() -> None:
    for dtype in DTYPES:
        x = special_values((6, 5, 40), dtype=dtype)
        for element in ("hif8", "fp8_e5m2", "fp16"):
            compare(x, element)
            compare(x, element, scaling="tensor")
            for axis in range(3):
                compare(x, element, scaling="channel", axis=axis, scale_offset=axis - 1)


def test_without_saturation_what_is_beyond_becomes_inf_or_nan() -> None:
    for element in [name for name in ELEMENTS if FORMATS[name].has_overflow_code]:
        x = special_values((40, 40), dtype=np.float32)
        for how in roundings(element):
            found = compare(x, element, saturate=False, **how)
            compare(x, element, scaling="block", scale_offset=-2, saturate=False, **how)
            beyond = np.isinf(found.values) if FORMATS[element].num_infinities else np.isnan(found.values)
            assert beyond.sum() > np.isnan(x).sum()


@pytest.mark.parametrize("offset", [-300, -10, -1, 1, 10, 300])
@pytest.mark.parametrize("scheme", ["mxfp8_e4m3", "mxfp4_e2m1", *NVFP4])
def test_an_offset_moves_the_exponents_of_all_scales_as_far_as_they_go(scheme: str, offset: int) -> None:
    x = special_values((4, 640), dtype=np.float32)
    compare(x, scheme, scale_offset=offset)
    compare(x, "fp8_e4m3", scaling="tensor", scale_offset=offset)


def test_narrower_exponents_of_scales_are_clamped() -> None:
    for scale_bits in range(2, 9):
        x = special_values((4, 640), dtype=np.float32)
        found = compare(x, "mxfp8_e4m3", scale_bits=scale_bits)
        exponents = np.log2(found.scale_values[np.isfinite(found.scale_values)])
        end = 2 ** (scale_bits - 1) - 1
        assert {exponents.min(), exponents.max()} <= {-end, end} or scale_bits == 8


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name not in NVFP4])
def test_scales_are_exact_where_the_rules_change_their_minds(scheme: str, rule: str) -> None:
    """The float32 numbers around every significand at which a rule may go up, near and far from 1."""
    element = SCHEMES[scheme].element
    cuts = [1.0, 2 - 2.0 ** -(element.mantissa_bits + 1), element.maximum / 2.0**element.emax, 1.5]
    exponents = [-126, -100, -21, -3, 0, 1, 9, 60, 126]
    maxima = np.array([cut * 2.0**exponent for cut in cuts for exponent in exponents], dtype=np.float32)
    around = (maxima.view(np.int32)[:, None] + np.arange(-3, 4, dtype=np.int32)).view(np.float32)
    compare(
        np.concatenate([around.reshape(-1), np.array([2.0**-149, 2.0**-127], dtype=np.float32)]),
        scheme,
        scale_rule=rule,
        block_size=1,
    )


def test_ties_fall_as_division_in_float32_has_them() -> None:
    """Of every significand that the largest of a bfloat16 tensor or channel can have, and all below it."""
    for name, dtype in [("fp8_e4m3", ml_dtypes.float8_e4m3fn), ("fp8_e5m2", ml_dtypes.float8_e5m2), ("int8", None)]:
        significands = np.arange(128, 256, dtype=np.float32)
        magnitudes = np.ldexp(significands, -np.arange(20, dtype=np.int32)[:, None]).reshape(-1)
        x = np.where(magnitudes <= significands[:, None], magnitudes, 0).astype(BF16)
        scales = significands / np.float32(FORMATS[name].maximum)
        quotients = x.astype(np.float32) / scales[:, None]
        elements = np.rint(quotients * 64) / 64 if dtype is None else quotients.astype(dtype).astype(np.float32)
        found = quantize(x, name, scaling="channel", axis=0, warn=False)
        assert same_bits(found.values, elements * scales[:, None])
        for row, scale, own in zip(x, scales, elements, strict=True):
            found = quantize(row, name, scaling="tensor", warn=False)
            assert same_bits(found.values, own * scale)
            swept = sweep_array(
                row[None], format=name, options=SweepOptions(mode=SweepMode.CHANNEL, axis=0, num_levels=1)
            )
            assert swept.levels[0].flushed_count == found.losses.flushed == np.count_nonzero((own == 0) & (row != 0))


@pytest.mark.parametrize("options", [{"axis": 0}, {"axis": 1}, {"axis": 0, "block_size": 5000}, {"block_size": 5000}])
@pytest.mark.parametrize("shape", [(300, 700), (6000, 40), (3, 70000)])
def test_tensors_of_many_pieces_are_those_of_the_twin(shape: tuple[int, int], options: dict[str, Any]) -> None:
    """Large blocks and long rows are cut; the stochastic numbers follow from the index in the whole tensor."""
    x = special_values(shape, dtype=BF16)
    options = {"block_size": 500, **options}
    found = quantize(x, "mxfp6_e3m2", warn=False, rounding="stochastic", seed=3, **options)
    # Element by element in one go: to make blocks by hand takes the twin too long.
    axis = options.get("axis", 1)
    scales = found.scale_values.take(np.arange(shape[axis]) // options["block_size"], axis=axis)
    with np.errstate(invalid="ignore"):
        scaled = x.astype(np.float64) / scales
        expected = round_to(scaled, target=FORMATS["fp6_e3m2"], rounding="stochastic", seed=3) * scales
    assert same_bits(found.values, expected.astype(np.float32))
    for row in (0, shape[0] // 2):
        for column in (0, shape[1] // 2):
            size = options["block_size"]
            block = [row, column]
            block[axis] //= size
            run = [slice(row, row + 1), slice(column, column + 1)]
            run[axis] = slice(block[axis] * size, (block[axis] + 1) * size)
            part = quantize_slowly(x[tuple(run)], "mxfp6_e3m2", block_size=size, axis=axis)
            assert part.scale_values is not None
            assert same_bits(found.scale_values[tuple(block)].reshape(-1), part.scale_values.reshape(-1))


def test_the_layout_in_memory_changes_nothing() -> None:
    for scheme in ["mxfp8_e5m2", *NVFP4, "hif8"]:
        x = special_values((6, 40, 10), dtype=np.float32)
        options: dict[str, Any] = {} if scheme == "hif8" else {"axis": 1}
        for view in (x.transpose(2, 0, 1), x[::2, ::-1, 1:], np.asfortranarray(x), x.astype(">f4")):
            for how in roundings("int8"):
                found = quantize(view, scheme, warn=False, **options, **how)
                expected = quantize(np.ascontiguousarray(view).astype(np.float32), scheme, warn=False, **options, **how)
                assert same_bits(found.values, expected.values)
                assert np.array_equal(found.codes, expected.codes)


def test_empty_tensors_give_empty_results() -> None:
    for scheme, shape in itertools.product(["mxfp8_e4m3", *NVFP4, "fp8_e4m3"], [(0,), (0, 64), (4, 0), (3, 0, 5)]):
        for axis in range(len(shape)):
            found = compare(np.zeros(shape, dtype=np.float32), scheme, axis=axis)
            assert found.values.shape == found.codes.shape == shape
            assert found.losses.underflow_ratio == 0
        compare(np.zeros(shape, dtype=np.float32), "hif8", scaling="tensor")
        compare(np.zeros(shape, dtype=np.float32), "hif8", scaling="channel")


def test_a_block_with_nan_or_inf_becomes_nan_and_the_others_do_not() -> None:
    x = np.ones((3, 64), dtype=np.float32)
    x[0, 3], x[1, 40] = np.nan, -np.inf
    found = quantize(x, "mxfp8_e4m3")
    assert np.isnan(found.values).reshape(3, 2, 32).all(axis=2).tolist() == [[True, False], [False, True], [False] * 2]
    assert found.scales.tolist() == [[255, 119], [119, 255], [119, 119]]
    assert (found.codes[np.isnan(found.values)] == 0).all()
    assert (found.losses.spoiled, found.losses.nan, found.losses.inf) == (62, 1, 1)
    for scheme in NVFP4:
        nv = quantize(x, scheme)
        assert nv.scales[0].tolist() == [0x7F, 0x7E, 0x7E, 0x7E]
        assert nv.tensor_scale == np.float32(1 / 2688)


def test_a_tensor_of_zeros_has_the_scales_that_are_documented() -> None:
    x = np.array([0.0, -0.0] * 16, dtype=np.float32)
    assert quantize(x, "mxfp8_e4m3").scales.tolist() == [0]
    assert quantize(x, "fp8_e4m3", scaling="tensor", scale_offset=3).scales == 1
    assert quantize(x, "fp8_e4m3", scaling="channel", scale_rule="floor").scale_values.tolist() == [2.0**-127] * 32
    for scheme, scale in zip(NVFP4, (0.0, 1.0, 2.0**-6), strict=True):
        assert quantize(x, scheme).tensor_scale == 1
        assert quantize(x, scheme).scale_values.tolist() == [scale] * 2
        assert same_bits(quantize(x, scheme).values, x)
    assert same_bits(quantize(x, "mxfp8_e4m3").values, x)
    assert same_bits(quantize(x, "mxint8").values, np.abs(x))


def test_the_smallest_blocks_are_kept_with_the_smallest_scale() -> None:
    x = np.full(32, 2.0**-130, dtype=np.float32)
    found = quantize(x, "mxfp8_e4m3", warn=False)
    assert found.scale_values.tolist() == [2.0**-127]
    assert (found.values == x).all()


def test_nvfp4_of_the_smallest_and_the_largest_numbers_stays_near_them() -> None:
    for scheme, amax in itertools.product(NVFP4, [2.0**-149, 1e-43, 2.0**-126, 1e-30, 3.4e38]):
        x = np.array([1.0, 0.5, 0.0, -1.0, 0.25, 1e-3] * 16, dtype=np.float64) * amax
        found = compare(x.astype(np.float32), scheme)
        assert np.isfinite(found.values).all()
        # TransformerEngine multiplies by no more than the largest float32.
        least = 2.0**-127 if scheme == "nvfp4" else 2.0**-132
        assert np.abs(found.values.astype(np.float64) - x).max() <= max(amax / 6, least)


def test_nvfp4_of_float64_ends_at_the_largest_float32() -> None:
    for scheme, offset, amax in itertools.product(NVFP4, [-10, 0, 10], [1e38, 1e39, 2e39, 1e41, 1e45, 1e300]):
        x = np.array([[amax, -amax / 4, 1.0, 0.0], [1.0, -0.5, 0.25, 0.0]])
        found = compare(x, scheme, block_size=4, scale_offset=offset)
        assert np.isfinite(found.values).all()
        assert (found.values[x == 0] == 0).all()
        if offset == 0:
            assert found.values[0, 0] == pytest.approx(min(amax, 2.0**128), rel=0.07)


@pytest.mark.parametrize(("scheme", "percent"), list(zip(NVFP4, (67.2, 14.4, 85.5), strict=True)))
def test_what_one_outlier_costs_each_way_of_nvfp4(scheme: str, percent: float) -> None:
    x = np.random.default_rng(0).standard_normal(1 << 17).astype(np.float32)
    x[5] = 1e6
    losses = compare(x, scheme).losses
    assert 100 * losses.flushed / losses.num_elements == pytest.approx(percent, abs=0.5)


def test_a_block_below_the_smallest_scale_is_flushed_and_does_not_overflow() -> None:
    x = np.array([2688.0, *[0.0] * 15, *[2.0**-11] * 16], dtype=np.float32)
    found = compare(x, "nvfp4")
    assert found.scales.tolist() == [0x7E, 0]
    assert (found.values[16:] == 0).all()
    assert (found.losses.flushed, found.losses.underflow, found.losses.overflow) == (16, 16, 0)


def test_an_element_format_in_blocks_is_the_scheme_with_blocks() -> None:
    x = special_values((3, 50), dtype=BF16)
    named = quantize(x, "mxfp8_e4m3", warn=False)
    made = quantize(x, "fp8_e4m3", scaling="block", block_size=32, warn=False)
    assert made.scheme == named.scheme == SCHEMES["mxfp8_e4m3"]
    assert same_bits(made.values, named.values)
    assert quantize(x, "mxfp8", warn=False).scheme == named.scheme


def test_the_largest_value_of_a_scaled_tensor_becomes_the_largest_of_the_format() -> None:
    x = np.array([-3.0, 0.1, 1.5], dtype=np.float32)
    found = quantize(x, "fp8_e4m3", scaling="tensor")
    assert found.scales == np.float32(3 / 448)
    assert decode(found.codes, target=FORMATS["fp8_e4m3"])[0] == -448
    assert decode(quantize(x, "hif8", scaling="tensor").codes, target=FORMATS["hif8"])[0] == -8


class LargestWide(TorchDispatchMode):
    """The elements of the largest tensor of 8 bytes an element that an operation gives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        if isinstance(found, torch.Tensor) and found.dtype.itemsize == 8:
            self.num_elements = max(self.num_elements, found.numel())
        return found


@exhaustive("it fills memory")
def test_memory_beyond_the_result_does_not_grow_with_the_tensor() -> None:
    """Nothing is held in 8 bytes an element but pieces and what there is of each scale, whatever the layout."""
    x = np.random.default_rng(0).standard_normal((2048, 2048), dtype=np.float32).astype(BF16)
    for view, axis in ((x, -1), (x, 0), (x.T, -1)):
        for block_size in (2, 32, 4096):
            with LargestWide() as largest:
                found = quantize(view, "mxfp8_e4m3", axis=axis, warn=False, block_size=block_size)
            assert largest.num_elements <= max(kernels.PIECE_SIZE, found.scales.size)


def test_an_option_that_cannot_be_is_refused() -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("mxfp9", {}, "'mxfp9' is not known"),
        ("fp8", {}, r"did you mean fp8_e4m3, .*, mxfp8\?"),
        ("fp4", {}, r"did you mean fp4_e2m1, nvfp4, .*, mxfp4\?"),
        ("xyzzy", {}, "use one of fp8_e4m3, .*, mxfp8_e4m3, .*, mxfp8, "),
        (None, {}, "format None is not a name"),
        ("mxfp8_e4m3", {"block_size": 0}, "block_size is 0"),
        ("mxfp8_e4m3", {"block_size": 1.5}, "block_size is 1.5: give an integer"),
        ("mxfp8_e4m3", {"scaling": "tensor"}, "name its element format fp8_e4m3"),
        ("nvfp4", {"scaling": "tensor"}, "name its element format fp4_e2m1"),
        ("nvfp4", {"scale_rule": "floor"}, "has its own rule"),
        ("nvfp4", {"scale_bits": 5}, "scale_bits is 5"),
        ("fp8_e4m3", {"block_size": 32}, "scaling none has no blocks"),
        ("fp8_e4m3", {"scaling": "tensor", "block_size": 32}, "scaling tensor has no blocks"),
        ("fp8_e4m3", {"scale_rule": "floor"}, "has no scales"),
        ("fp8_e4m3", {"scale_offset": 1}, "has no scales"),
        ("fp8_e4m3", {"scaling": "row"}, "use one of none, tensor, channel, block"),
        ("mxfp8_e4m3", {"scale_rule": "exact"}, "use one of floor, ceil, even, rceil"),
        ("fp8_e4m3", {"scaling": "tensor", "scale_rule": "up"}, "use one of exact, floor, ceil, even, rceil"),
        ("mxfp8_e4m3", {"rounding": "up"}, "rounding 'up' is not known"),
        ("mxfp8_e4m3", {"rounding": "hybrid"}, "hybrid is that of hif8"),
        ("mxfp8_e4m3", {"rounding": "even", "seed": 1}, "draws nothing"),
        ("mxfp8_e4m3", {"scale_bits": 9}, "2 to 8 bits"),
        ("mxfp8_e4m3", {"scale_offset": 0.5}, "scale_offset is 0.5: give an integer"),
        ("mxfp8_e4m3", {"scale_offset": 10**30}, "it is -4096 to 4096"),
        ("mxfp8_e4m3", {"axis": 2}, "axis is 2: the tensor has 2 dimensions, so it is -2 to 1"),
        ("mxfp4_e2m1", {"saturate": False}, "no infinity and no NaN"),
        ("e8m0", {}, "no format to quantise to"),
        ("fp64", {}, "no format to quantise to"),
        ("ue5m3", {}, "no format to quantise to"),
        ("mxfp8", {"block_size": (16,)}, r"block_size is \(16,\): give a length along the axis, or \(rows, columns\)"),
        ("mxfp8", {"block_size": (0, 4)}, "a block has at least one element"),
        ("mxfp8", {"block_size": (4, 4), "axis": 0}, "tiles of 4 x 4 lie in the last two dimensions"),
        ("fp8_e4m3", {"scale_format": "fp32"}, "has no blocks: give scaling='block'"),
        ("mxfp8", {"scale_format": "bf16"}, "is no format of scales: use one of e8m0, fp8_e4m3, ue5m3, fp32"),
        ("nvfp4", {"scale_format": "ue5m3"}, "has its own scales: leave it out"),
        ("mxfp8", {"scale_format": "fp32", "scale_rule": "floor"}, "scales in fp32 follow the rule exact"),
        ("mxfp8", {"scale_format": "fp32", "scale_bits": 5}, "has no scales that are such powers"),
        ("mxfp4", {"four_over_six": True}, "name nvfp4, or fp4_e2m1"),
        ("mxfp8", {"scale_format": "fp32", "four_over_six": True}, "chooses between two scales of 4-bit floats"),
        ("mxfp8", {"rotation": 3}, "rotation is 3: Hadamard matrices have a power of two"),
        ("mxfp8", {"rotation": -2}, "rotation is -2: Hadamard"),
        ("mxfp8", {"rotation": 64}, "rotation is 64, and 32 elements along the axis are no multiple"),
        ("mxfp8", {"rotation_seed": 4}, "rotation_seed is 4, and nothing is rotated"),
        ("mxfp8", {"rotation": 2, "rotation_seed": 0.5}, "seed is 0.5: give an integer"),
    ]
    for scheme, options, message in cases:
        with pytest.raises(UsageError, match=message):
            quantize(np.zeros((2, 32), dtype=np.float32), scheme, **options)


def test_what_is_not_a_real_floating_point_number_is_refused() -> None:
    for dtype in [np.int32, np.bool_, np.complex64, np.uint8, np.str_, np.object_]:
        with pytest.raises(UsageError, match="cannot be quantised"):
            quantize(np.zeros(4, dtype=dtype), "mxfp8_e4m3")


def test_hybrid_rounding_refuses_a_type_whose_bits_it_does_not_look_at_unless_a_scale_makes_it_float32() -> None:
    ones = np.ones(4)
    with pytest.raises(UsageError, match="give float32, float16, bfloat16, not float64"):
        quantize(ones, "hif8", rounding="hybrid")
    assert quantize(ones, "hif8", rounding="hybrid", scaling="tensor").values.tolist() == [1.0] * 4


def test_lists_are_arrays_and_ragged_ones_are_refused() -> None:
    assert quantize([[1.0, 2.1]], "fp8_e4m3", warn=False).values.tolist() == [[1.0, 2.0]]  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give lists of the same length"):
        quantize([[1.0], [1.0, 2.0]], "fp8_e4m3")  # type: ignore[arg-type]


def test_nan_without_a_code_is_refused_when_codes_are_asked_for() -> None:
    found = quantize(np.array([1.0, math.nan]), "fp4_e2m1")
    assert np.isnan(found.values).tolist() == [False, True]
    with pytest.raises(UsageError, match="fp4_e2m1 has no code for NaN, and 1 elements are NaN"):
        _ = found.codes


def test_float64_without_a_scale_is_rounded_once() -> None:
    """Not to float32 first, where a number just above a tie becomes the tie."""
    above_tie = np.array([1 + 2**-4 + 2**-40, 1 + 2**-4 - 2**-40, -(1 + 2**-4 + 2**-40)])
    for name in ("fp8_e4m3", "hif8"):
        found = quantize(above_tie, name).values
        np.testing.assert_array_equal(found, [1.125, 1.0, -1.125])
        np.testing.assert_array_equal(found, round_to(above_tie, target=FORMATS[name]))
    assert quantize(np.full(3, 464.0 * (1 + 2**-40)), "fp8_e4m3").losses.overflow == 3
