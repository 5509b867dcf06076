"""Is an operand what `quantize` makes of it, without the factor that is constant along the sum?"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from ranktape.analyze import quantize
from ranktape.analyze.numerics.formats import decode
from ranktape.analyze.numerics.pieces import as_array
from ranktape.analyze.numerics.quantization.encoded import Quantized
from ranktape.analyze.numerics.quantization.operand import QuantizedOperand, quantized_operand
from ranktape.analyze.numerics.quantization.quantizer import rotated
from ranktape.errors import UsageError

EXACT: list[tuple[str, dict[str, Any]]] = [
    ("mxfp8_e4m3", {}),
    ("mxfp8_e5m2", {"scale_rule": "rceil"}),
    ("mxfp4", {"block_size": 7, "scale_rule": "even"}),
    ("mxfp6", {"rounding": "away"}),
    ("mxfp4", {"rounding": "stochastic", "seed": 3}),
    *((name, {}) for name in ("nvfp4", "nvfp4_modelopt", "nvfp4_torchao")),
    ("nvfp4", {"rounding": "stochastic", "seed": 3}),
    ("fp8_e4m3", {"scaling": "tensor"}),
    ("fp8_e5m2", {"scaling": "channel"}),
    ("int8", {"scaling": "channel", "scale_rule": "ceil"}),
    ("hif8", {"scaling": "tensor"}),
    ("hif8", {}),
    ("bf16", {}),
    ("nvfp4", {"block_size": (4, 8), "four_over_six": True}),
    ("mxint4", {}),
    ("fp4_e2m1", {"scaling": "block", "scale_format": "ue5m3"}),
]
"""Schemes whose elements times the scales of their blocks have at most 8 significant bits."""


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=generator)
    return found * torch.exp2(4 * torch.randn(shape[0], 1, generator=generator))


def without_factor(quantized: Quantized) -> torch.Tensor:
    """The slow way: codes, decoded, times the scales of their blocks."""
    codes, scheme = quantized.codes.numpy(), quantized.scheme
    elements = decode(codes, target=scheme.element)
    if scheme.block_size:
        of_rows = np.repeat(quantized.scale_values.numpy(), scheme.block_rows, axis=0)[: codes.shape[0]]
        elements *= np.repeat(of_rows, scheme.block_size, axis=1)[:, : codes.shape[1]]
    return torch.from_numpy(elements).to(torch.float32)


def is_bf16(values: torch.Tensor) -> bool:
    return torch.equal(values.to(torch.bfloat16).to(torch.float32).nan_to_num(7.0), values.nan_to_num(7.0))


def dequantized(operand: QuantizedOperand) -> torch.Tensor:
    factor = operand.factor
    return operand.values.float() * (factor[:, None] if isinstance(factor, torch.Tensor) else factor)


def test_values_are_codes_times_the_scales_of_blocks_and_exact_in_bf16() -> None:
    for dtype, case in itertools.product([torch.float32, torch.bfloat16], EXACT):
        scheme, options = case
        for matrix in (numbers(9, 100).to(dtype), numbers(100, 9).to(dtype).T, numbers(40, 70).to(dtype)[::2, 1:]):
            found = quantized_operand(matrix, scheme, **options)
            axis = 0 if options.get("scaling") == "channel" else 1
            expected = quantize(matrix, scheme, axis=axis, warn=False, **options)
            assert torch.equal(found.values.float(), without_factor(expected))
            assert found.values.is_contiguous()
            assert found.is_bf16
            assert is_bf16(found.values)
            # What is rounded once more is the product of NVFP4's two scales.
            torch.testing.assert_close(dequantized(found), expected.values, rtol=2.0**-22, atol=0)


def test_a_factor_for_each_row_or_for_all_is_left_out() -> None:
    matrix = numbers(5, 64)
    rows = quantized_operand(matrix, "fp8_e4m3", scaling="channel").factor
    assert isinstance(rows, torch.Tensor)
    assert torch.equal(rows, (matrix.abs().amax(1).double() / 448).float())
    assert quantized_operand(matrix, "fp8_e4m3", scaling="tensor").factor == float(matrix.abs().max() / 448)
    assert quantized_operand(matrix, "nvfp4").factor == quantize(matrix, "nvfp4", warn=False).tensor_scale
    assert quantized_operand(matrix, "mxfp8").factor == 1


def test_what_has_more_bits_than_bf16_says_so() -> None:
    matrix = numbers(5, 64)
    for scheme in (None, "fp16", "fp32"):
        found = quantized_operand(matrix, scheme)
        assert not found.is_bf16
        assert not is_bf16(found.values)
    for same in (matrix.to(torch.bfloat16), matrix.to(torch.bfloat16).to(torch.float32)):
        found = quantized_operand(same)
        assert found.is_bf16
        assert torch.equal(found.values.float(), same.float())
    # A single number among many, wherever it is.
    for place in (0, 4095, 4096, 9999):
        single = torch.ones(1, 10_000)
        single[0, place] += 2.0**-8
        assert not quantized_operand(single).is_bf16


def spread_of_means(matrix: torch.Tensor, num_draws: int, **options: Any) -> float:
    """The root mean square error of the mean of so many draws, times the root of their number."""
    seeds = range(num_draws) if options["rounding"] == "stochastic" else [None] * num_draws
    draws = [dequantized(quantized_operand(matrix, seed=seed, **options)).double() for seed in seeds]
    errors = torch.stack(draws).mean(0) - matrix.double()
    return float(errors.square().mean().sqrt()) * math.sqrt(num_draws)


def test_the_mean_of_stochastic_draws_nears_the_operand_as_the_root_of_their_number() -> None:
    """A bias of 4 % of the spread of one draw makes the mean of 64 of them 5 % worse than it may be.

    With such scales nothing is clamped, which no number of draws makes good.
    """
    for options in [{"scheme": "mxfp4", "scale_rule": "rceil"}, {"scheme": "fp8_e4m3", "scaling": "tensor"}]:
        matrix = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
        one = spread_of_means(matrix, 1, rounding="stochastic", **options)
        assert spread_of_means(matrix, 64, rounding="stochastic", **options) == pytest.approx(one, rel=0.05)
        assert spread_of_means(matrix, 64, rounding="even", **options) > 2 * one


def test_a_rotated_operand_stays_rotated_whatever_shares_a_scale() -> None:
    one, other = numbers(7, 64), numbers(9, 64, seed=1)
    product = one.double() @ other.double().T
    cases: list[tuple[str | None, Any]] = [(None, {}), *(("fp16", {"scaling": word}) for word in ("tensor", "channel"))]
    for scheme, options in cases:
        sides = [quantized_operand(x, scheme, rotation=16, rotation_seed=2, **options) for x in (one, other)]
        turned = dequantized(sides[0]).double() @ dequantized(sides[1]).double().T
        torch.testing.assert_close(turned, product, rtol=1e-3, atol=1e-2 * float(product.abs().max()))
        assert not torch.equal(dequantized(sides[0]), one)
    expected = rotated(one, axis=1, size=16, seed=2)
    assert torch.equal(quantized_operand(one, rotation=16, rotation_seed=2).values, expected)


def test_a_float64_matrix_gives_narrower_values() -> None:
    matrix = numbers(5, 64).double() / 3
    found = quantized_operand(matrix, "mxfp8")
    assert found.values.dtype is torch.bfloat16
    assert torch.equal(found.values.double(), quantize(matrix, "mxfp8", warn=False).values)
    assert quantized_operand(matrix, "fp16").values.dtype is torch.float32


def test_nan_and_infinities_are_those_of_quantize_and_hide_no_inexact_number() -> None:
    matrix = numbers(4, 96)
    matrix[0, 3], matrix[1, 40] = torch.nan, torch.inf
    for scheme in ("mxfp8", "nvfp4"):
        found = quantized_operand(matrix, scheme)
        assert torch.equal(found.values.isnan(), quantize(matrix, scheme, warn=False).values.isnan())
        assert found.is_bf16
    assert not quantized_operand(matrix).is_bf16
    odd_nan = torch.tensor([[0x7FC00001, 0x3F800000]]).to(torch.int32).view(torch.float32)
    assert quantized_operand(odd_nan).is_bf16


@pytest.mark.parametrize("scheme", [None, "mxfp8", "nvfp4", "hif8"])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_matrix_gives_an_empty_operand(shape: tuple[int, int], scheme: str | None) -> None:
    found = quantized_operand(torch.zeros(shape), scheme)
    assert (found.values.shape, found.is_bf16) == (shape, True)
    assert quantized_operand(torch.zeros(shape), "fp8_e4m3", scaling="tensor").factor == 1


def test_only_matrices_are_operands() -> None:
    for shape in ((5,), (2, 3, 4), ()):
        with pytest.raises(UsageError, match=f"has {len(shape)} dimensions: reshape"):
            quantized_operand(torch.zeros(shape), "mxfp8")
    with pytest.raises(UsageError, match="rotation is 16, and 3 elements along the axis are no multiple"):
        quantized_operand(torch.zeros(2, 3), rotation=16)
    with pytest.raises(UsageError, match="block_size, seed has no effect on an operand that is left as it is"):
        quantized_operand(torch.zeros(2, 3), block_size=None, seed=3)
    with pytest.raises(UsageError, match="mxfp9"):
        quantized_operand(torch.zeros(2, 3), "mxfp9")


def test_the_memory_of_what_was_read_can_be_freed() -> None:
    for dtype in [torch.float32, torch.bfloat16, torch.float16, torch.float64]:
        matrix = numbers(8, 32).to(dtype)
        quantized_operand(matrix, "mxfp4")
        quantize(matrix, "mxfp4", warn=False)
        as_array(matrix)
        # FSDP frees parameters so; after `Tensor.numpy` that is an error.
        matrix.untyped_storage().resize_(0)
