"""Does a GPU quantise as a CPU does, bit for bit?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ranktape.analyze.numerics.formats import FORMATS, uniforms
from ranktape.analyze.numerics.formats.values import round_magnitudes, uniforms_at
from ranktape.analyze.numerics.quantization.encoded import Quantized
from ranktape.analyze.numerics.quantization.quantizer import quantize
from ranktape.analyze.numerics.quantization.schemes import SCHEMES, ScaleRule
from ranktape.errors import UsageError

WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NO_TARGETS = ("nvfp4", "fp64", *(name for name, row in FORMATS.items() if not row.is_signed))
ELEMENTS = [name for name in FORMATS if name not in NO_TARGETS]
NVFP4 = [name for name, scheme in SCHEMES.items() if scheme.has_tensor_scale]
BLOCKS = [name for name in SCHEMES if name not in NVFP4]

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ELEMENTS),
    *((name, {"scaling": "tensor"}) for name in ELEMENTS),
    *((name, {"saturate": False}) for name in ELEMENTS if FORMATS[name].has_overflow_code),
    *((name, {"scale_rule": rule, "block_size": 5}) for name in BLOCKS for rule in ScaleRule),
    *((name, {"rounding": rounding}) for name in (*BLOCKS, "hif8") for rounding in ("even", "away", "floor")),
    *((name, {"seed": 3}) for name in ("mxfp8_e4m3", "mxint8", "nvfp4", "hif8")),
    ("mxfp8_e4m3", {"scale_bits": 5, "scale_offset": -3}),
    ("mxfp4_e2m1", {"block_size": 1000}),
    *((name, {}) for name in NVFP4),
    *((name, {"scale_offset": 2, "block_size": 7}) for name in NVFP4),
    *((name, {"four_over_six": True}) for name in NVFP4),
    ("nvfp4", {"four_over_six": True, "seed": 3, "block_size": 5}),
    ("fp4_e2m1", {"scaling": "block", "scale_format": "ue5m3", "four_over_six": True}),
    ("fp8_e4m3", {"scaling": "block", "scale_format": "fp32", "block_size": 6}),
    *((name, {"rotation": 2, "rotation_seed": 1}) for name in ("mxfp8_e4m3", "nvfp4")),
    ("fp8_e4m3", {"scaling": "channel"}),
    ("fp8_e5m2", {"scaling": "channel", "scale_rule": "rceil", "saturate": False}),
    ("hif8", {"rounding": "hybrid", "scaling": "tensor"}),
]


def _name(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


def _numbers(*shape: int) -> torch.Tensor:
    """Of every size that float32 has, with NaN, Inf, zeros of both signs and blocks of nothing else."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(shape, generator=generator) * torch.exp(20 * torch.randn(shape, generator=generator))
    flat = numbers.view(-1)
    flat[::97], flat[5::131], flat[7::133], flat[3::61] = torch.nan, torch.inf, -torch.inf, -0.0
    flat[: flat.numel() // 5] = torch.randn(flat.numel() // 5, generator=generator)
    flat[flat.numel() // 2 : flat.numel() * 3 // 4] = 0
    return numbers


def _assert_same(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    if found is None or expected is None:
        assert found is expected
        return
    found_array, expected_array = found.cpu().numpy(), expected.cpu().numpy()
    assert found_array.dtype == expected_array.dtype
    np.testing.assert_array_equal(found_array, expected_array)
    if expected_array.dtype.kind == "f":
        is_number = ~np.isnan(expected_array)
        np.testing.assert_array_equal(np.signbit(found_array)[is_number], np.signbit(expected_array)[is_number])


def _assert_equal(found: Quantized, expected: Quantized) -> None:
    for name in ("values", "scales", "scale_values"):
        _assert_same(getattr(found, name), getattr(expected, name))
    assert (found.losses, found.tensor_scale, found.scheme) == (
        expected.losses,
        expected.tensor_scale,
        expected.scheme,
    )
    if expected.losses.nan and not expected.scheme.element.num_nans and expected.scheme.scale is None:
        for quantized in (found, expected):
            with pytest.raises(UsageError, match=r"has no code for NaN, and \d+ elements are NaN: replace them first"):
                _ = quantized.codes
    else:
        _assert_same(found.codes, expected.codes)


TILES: list[tuple[str, dict[str, Any]]] = [
    ("nvfp4", {"block_size": (16, 16)}),
    ("nvfp4", {"block_size": (4, 7), "four_over_six": True}),
    ("fp8_e4m3", {"scaling": "block", "block_size": (128, 128), "scale_format": "fp32"}),
    ("mxfp8_e4m3", {"block_size": (3, 5)}),
    ("mxfp8_e4m3", {"rotation": 32}),
]
"""What is done along the last dimensions alone."""


def test_uniform_numbers_are_those_of_the_seed_and_the_index() -> None:
    for seed in (0, 1, -5, 1 << 70):
        found = uniforms_at(torch.arange(10, 1010), seed=seed)
        np.testing.assert_array_equal(found.numpy(), uniforms(seed, start=10, size=1000))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64], ids=str)
def test_hybrid_rounding_refuses_types_whose_bits_it_does_not_know(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match="give float32, float16, bfloat16, not float"):
        quantize(torch.ones(3).to(dtype), "hif8", rounding="hybrid")


def test_views_are_quantised_as_copies_and_gradients_are_not_followed() -> None:
    numbers = _numbers(40, 66)
    for view in (numbers.T, numbers[::2, 1:], numbers.expand(2, 40, 66), numbers.requires_grad_()):
        found = quantize(view, "mxfp8_e4m3", warn=False)
        _assert_equal(found, quantize(view.detach().clone(), "mxfp8_e4m3", warn=False))
        assert not found.values.requires_grad


def test_codes_are_those_of_the_tensor_as_it_was() -> None:
    numbers = torch.ones(64)
    quantized = quantize(numbers, "fp8_e4m3")
    numbers.zero_()
    assert quantized.codes.unique().tolist() == [0x38]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::ranktape.analyze.numerics.quantization.encoded.QuantizationWarning")
def test_a_gpu_gives_the_same_bits() -> None:
    for case in CASES:
        scheme, options = case
        for dtype in WIDE:
            numbers = _numbers(5, 700, 6).to(dtype)
            _assert_equal(
                quantize(numbers.cuda(), scheme, axis=1, **options), quantize(numbers, scheme, axis=1, **options)
            )


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::ranktape.analyze.numerics.quantization.encoded.QuantizationWarning")
def test_a_gpu_gives_the_same_bits_of_tiles() -> None:
    for case in TILES:
        scheme, options = case
        numbers = _numbers(2, 700, 64)
        _assert_equal(quantize(numbers.cuda(), scheme, **options), quantize(numbers, scheme, **options))


@pytest.mark.gpu
def test_a_gpu_divides_and_rounds_as_a_cpu_does() -> None:
    numbers, element = torch.rand(1 << 20, dtype=torch.float64) * 500, FORMATS["fp8_e4m3"]
    for rounding in (element.rounding, FORMATS["hif8"].rounding):
        expected, found = (
            round_magnitudes(one / 3, element=element, rounding=rounding) for one in (numbers, numbers.cuda())
        )
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)
