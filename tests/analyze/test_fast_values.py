"""Do the compiled loops, and a GPU, quantise as operations of torch on a CPU do, bit for bit?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ranktape.analyze import quantize
from ranktape.analyze.numerics.formats import FORMATS, uniforms
from ranktape.analyze.numerics.formats.values import round_magnitudes, uniforms_at
from ranktape.analyze.numerics.quantization import kernels, quantizer
from ranktape.analyze.numerics.quantization.encoded import Quantized
from ranktape.analyze.numerics.quantization.operand import quantized_values
from ranktape.analyze.numerics.quantization.schemes import SCHEMES, ScaleRule
from ranktape.errors import UsageError


def _every_size() -> torch.Tensor:
    """Blocks of ordinary numbers, of all sizes at once, at both ends of float32, with NaN, Inf and zeros."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(6, 40, 9, generator=generator)
    numbers[0] *= torch.exp(30 * torch.randn(40, 9, generator=generator))
    numbers[1], numbers[1, 1, 1] = 0.0, -0.0
    numbers[2] *= 1e-37
    numbers[3] *= 1e37
    numbers[0].view(-1)[::97] = torch.nan
    numbers[4].view(-1)[5::131] = torch.inf
    return numbers


FAST: list[tuple[str, dict[str, Any]]] = [
    *((name, {"scale_rule": rule}) for name in SCHEMES if not SCHEMES[name].has_tensor_scale for rule in ScaleRule),
    ("mxfp8_e4m3", {"block_size": 5}),
    *((name, {"block_size": size}) for name in SCHEMES if SCHEMES[name].has_tensor_scale for size in (16, 7)),
    ("hif8", {}),
    ("hif8", {"scaling": "tensor"}),
    ("fp8_e4m3", {}),
    ("fp8_e4m3", {"scaling": "channel"}),
    ("bf16", {}),
    ("int8", {"scaling": "tensor", "scale_rule": "floor"}),
    ("hif8", {"scaling": "block"}),
    ("bf16", {"scaling": "block", "scale_rule": "rceil"}),
    ("fp8_e4m3", {"scaling": "tensor", "rounding": "floor"}),
    *((name, {"seed": 7}) for name in ("fp8_e4m3", "mxfp8_e4m3", "nvfp4", "nvfp4_modelopt")),
    ("hif8", {"scaling": "channel", "seed": 7}),
    ("mxfp4", {"rounding": "away", "scale_offset": -3, "scale_bits": 4}),
    ("mxfp4", {"scale_offset": 200}),
    ("nvfp4", {"scale_offset": 2}),
    *((name, {"saturate": False}) for name in ("fp8_e4m3", "fp8_e5m2", "hif8", "bf16", "mxfp8_e5m2")),
    ("fp8_e5m2", {"saturate": False, "seed": 7}),
    ("hif8", {"rounding": "hybrid", "scaling": "tensor"}),
    ("hif8", {"rounding": "hybrid", "scaling": "block", "scale_rule": "floor"}),
    *((name, {}) for name in ("fp16", "fp32")),
    *((name, {"four_over_six": True}) for name in SCHEMES if SCHEMES[name].has_tensor_scale),
    ("nvfp4", {"four_over_six": True, "seed": 7, "block_size": 7}),
    ("fp4_e2m1", {"scaling": "block", "scale_format": "ue5m3", "four_over_six": True}),
    ("fp4_e2m1", {"scaling": "block", "scale_format": "fp8_e4m3", "block_size": 7}),
    ("fp8_e5m2", {"scaling": "block", "scale_format": "fp32", "scale_offset": 3, "seed": 7}),
    ("mxfp8_e4m3", {"rotation": 2, "rotation_seed": 3}),
]

FAST_TILES: list[tuple[str, dict[str, Any]]] = [
    ("mxfp8_e4m3", {"block_size": (5, 3)}),
    ("fp8_e4m3", {"scaling": "block", "block_size": (128, 128), "scale_format": "fp32"}),
    ("nvfp4", {"block_size": (16, 4)}),
    ("nvfp4_modelopt", {"block_size": (16, 4), "four_over_six": True}),
    ("nvfp4", {"block_size": (2, 2), "four_over_six": True, "seed": 7}),
    ("nvfp4", {"block_size": (2**31 - 1, 2**31 - 1), "four_over_six": True}),
]


def _by_operations(x: torch.Tensor, scheme: str, **options: Any) -> Quantized:
    """What `quantize` gives on other devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantizer, "is_compiled", lambda *_, **__: False)
        return quantize(x, scheme, warn=False, **options)


def _assert_fast(x: torch.Tensor, scheme: str, **options: Any) -> None:
    expected = _by_operations(x, scheme, **options)
    _assert_equal(quantize(x, scheme, warn=False, **options), expected)
    values = quantized_values(x, scheme, **options)
    assert values.dtype is x.dtype
    _assert_same(values, expected.values.to(x.dtype))


def _assert_equal(found: Quantized, expected: Quantized) -> None:
    assert (found.losses, found.tensor_scale) == (expected.losses, expected.tensor_scale)
    for name in ("values", "scales", "scale_values", "stored_codes"):
        _assert_same(getattr(found, name), getattr(expected, name))


def _assert_same(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    if found is None or expected is None:
        assert found is expected
        return
    found = found.cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    is_number = ~expected.isnan().numpy()
    np.testing.assert_array_equal(*(np.signbit(one.double().numpy())[is_number] for one in (found, expected)))


def _name(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


@pytest.fixture
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several pieces of every tensor, and several threads for them."""
    monkeypatch.setattr(kernels, "PIECE_SIZE", 200)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("many_pieces")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", FAST, ids=_name)
def test_the_fast_way_to_the_values_gives_the_bits_of_the_slow_one(
    case: tuple[str, dict[str, Any]], dtype: torch.dtype
) -> None:
    scheme, options = case
    numbers = _every_size().to(dtype)
    for axis in (0, 1, 2):
        for view in (numbers, numbers.transpose(0, 2), numbers[2:3], numbers[5:], numbers[5:] * 1e-30, numbers[:0]):
            if "rotation" not in options or view.shape[axis] % options["rotation"] == 0:
                _assert_fast(view, scheme, axis=axis, **options)


@pytest.mark.usefixtures("many_pieces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_hybrid_rounding_of_unscaled_numbers_looks_at_their_own_bits(dtype: torch.dtype) -> None:
    numbers = _every_size().to(dtype)
    for saturate in (True, False):
        _assert_fast(numbers, "hif8", rounding="hybrid", saturate=saturate)


@pytest.mark.usefixtures("many_pieces")
def test_the_fast_way_to_a_row_gives_the_bits_of_the_slow_one() -> None:
    for scheme, options in FAST:
        for row in (_every_size()[0, :, 0], torch.tensor(-0.3)):
            if "rotation" not in options or row.ndim:
                _assert_fast(row, scheme, **options)


def test_numbers_that_torch_negates_later_are_negated() -> None:
    for scheme in ["mxfp8_e4m3", "nvfp4", "fp8_e4m3"]:
        negated = torch.randn(4, 40, dtype=torch.complex64).conj().imag
        assert negated.is_neg()
        _assert_fast(negated, scheme)
        _assert_same(
            quantize(negated, scheme, warn=False).values, quantize(negated.resolve_neg(), scheme, warn=False).values
        )


def test_nan_of_every_pattern_is_nan() -> None:
    for scheme in ["mxfp8_e4m3", "nvfp4", "fp8_e4m3"]:
        for dtype, kind in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32), (torch.float64, torch.int64)):
            numbers = torch.ones(2, 64, dtype=dtype)
            numbers.view(kind)[0, 3], numbers.view(kind)[1, 3] = torch.iinfo(kind).max, -1
            _assert_fast(numbers, scheme)


@pytest.mark.usefixtures("many_pieces")
@pytest.mark.parametrize("case", FAST_TILES, ids=_name)
def test_the_fast_way_to_tiles_gives_the_bits_of_the_slow_one(case: tuple[str, dict[str, Any]]) -> None:
    scheme, options = case
    numbers = _every_size()
    for view in (numbers, numbers[0].T, numbers.transpose(0, 2)[:, :, 1:], numbers[:0], numbers.bfloat16()):
        _assert_fast(view, scheme, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_value_of_16_bits_may_be_the_largest_of_a_block(scheme: str, dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16).to(torch.int16).view(dtype).reshape(-1, 1)
    blocks = every * torch.tensor([1.0, -0.71, 0.33, 0.02]).to(dtype)
    _assert_fast(blocks, scheme)


def test_uniform_numbers_are_those_of_the_seed_and_the_index() -> None:
    for seed in (0, 1, -5, 1 << 70):
        found = uniforms_at(torch.arange(10, 1010), seed=seed)
        np.testing.assert_array_equal(found.numpy(), uniforms(seed, start=10, size=1000))


def test_hybrid_rounding_refuses_types_whose_bits_it_does_not_know() -> None:
    for dtype in [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]:
        with pytest.raises(UsageError, match="give float32, float16, bfloat16, not float"):
            quantize(torch.ones(3).to(dtype), "hif8", rounding="hybrid")


def test_views_are_quantised_as_copies_and_gradients_are_not_followed() -> None:
    numbers = _every_size()[0]
    for view in (numbers.T, numbers[::2, 1:], numbers.expand(2, 40, 9), numbers.requires_grad_()):
        found = quantize(view, "mxfp8_e4m3", warn=False)
        _assert_equal(found, quantize(view.detach().clone(), "mxfp8_e4m3", warn=False))
        assert not found.values.requires_grad


def test_codes_are_those_of_the_tensor_as_it_was() -> None:
    numbers = torch.ones(64)
    quantized = quantize(numbers, "fp8_e4m3")
    numbers.zero_()
    assert quantized.codes.unique().tolist() == [0x38]


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits() -> None:
    unscaled: list[tuple[str, dict[str, Any]]] = [
        (name, {}) for name, row in FORMATS.items() if row.is_signed and name not in {"nvfp4", "fp64"}
    ]
    for scheme, options in [*FAST, *FAST_TILES, *unscaled]:
        where: dict[str, Any] = {} if (scheme, options) in FAST_TILES else {"axis": 1}
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            if options.get("rounding") == "hybrid" and dtype is torch.float64:
                continue
            numbers = _every_size().to(dtype)
            found, expected = (
                quantize(one, scheme, warn=False, **where, **options) for one in (numbers.cuda(), numbers)
            )
            _assert_equal(found, expected)


@pytest.mark.gpu
def test_a_gpu_divides_and_rounds_as_a_cpu_does() -> None:
    numbers, element = torch.rand(1 << 20, dtype=torch.float64) * 500, FORMATS["fp8_e4m3"]
    for rounding in (element.rounding, FORMATS["hif8"].rounding):
        expected, found = (
            round_magnitudes(one / 3, element=element, rounding=rounding) for one in (numbers, numbers.cuda())
        )
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)
