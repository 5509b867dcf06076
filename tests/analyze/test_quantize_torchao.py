"""Do block schemes agree with torchao's, and with the formula where torchao's is not exact?"""

from __future__ import annotations

import importlib
import pickle
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze import quantize
from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.numerics.quantization.schemes import SCHEMES
from tests.analyze.quantize_twin import AnyArray, same_bits

ELEMENTS = ["fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1"]

MAXIMA = np.arange(0x7F80, dtype=np.uint16)
"""The patterns of zero and of every positive finite bfloat16."""


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    found: ModuleType = pytest.importorskip("torch")
    return found


@pytest.fixture(scope="module")
def torchao(torch: ModuleType) -> SimpleNamespace:
    """The functions of torchao that quantise; its import warns of what it does not find."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao")
        constants, mx_tensor, nvfp4_tensor = (
            importlib.import_module(f"torchao.prototype.mx_formats.{name}")
            for name in ("constants", "mx_tensor", "nvfp4_tensor")
        )
        words = {
            "fp8_e4m3": torch.float8_e4m3fn,
            "fp8_e5m2": torch.float8_e5m2,
            "fp6_e2m3": constants.DTYPE_FP6_E2M3,
            "fp6_e3m2": constants.DTYPE_FP6_E3M2,
            "fp4_e2m1": torch.float4_e2m1fn_x2,
        }
        return SimpleNamespace(words=words, mx=mx_tensor, nvfp4=nvfp4_tensor)


def blocks_of_every_maximum() -> AnyArray:
    """For each of `MAXIMA` a block of 32 bfloat16: the maximum somewhere, of either sign, and anything below it."""
    random = np.random.default_rng(0)
    magnitudes = random.integers(0, MAXIMA[:, None].astype(np.int64) + 1, size=(MAXIMA.size, 32))
    # Most of what is below a pattern is far below its value: let half of the elements be near.
    near = np.maximum(MAXIMA[:, None].astype(np.int64) - random.integers(0, 1024, size=magnitudes.shape), 0)
    magnitudes = np.where(random.random(magnitudes.shape) < 0.5, near, magnitudes)
    magnitudes[np.arange(MAXIMA.size), random.integers(0, 32, size=MAXIMA.size)] = MAXIMA
    signs = random.integers(0, 2, size=magnitudes.shape) << 15
    return (magnitudes | signs).astype(np.uint16).view(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def every_maximum() -> AnyArray:
    return blocks_of_every_maximum()


def unpacked(codes: AnyArray) -> AnyArray:
    """Two 4-bit codes of each byte, the lower bits first."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
def test_every_block_maximum_agrees_with_torchao(
    torch: ModuleType, torchao: SimpleNamespace, every_maximum: AnyArray, element: str, rule: str
) -> None:
    """Scales everywhere; codes and values where torchao computes with the scale that it stores.

    Blocks whose scale would be below 2**-126 are left out of the latter: torchao divides them by 2**-126, or by 1, and
    stores 2**-127.
    """
    tensor = torch.from_numpy(every_maximum.view(np.int16)).view(torch.bfloat16)
    word = torchao.words[element]
    mode = getattr(torchao.mx.ScaleCalculationMode, rule.upper())
    scales, packed = torchao.mx.to_mx(tensor, word, 32, scaling_mode=mode)
    codes = packed.view(torch.uint8).numpy()
    codes = unpacked(codes) if element == "fp4_e2m1" else codes
    values = torchao.mx.to_dtype(packed, scales, word, 32, torch.float32).numpy()
    found = quantize(tensor, f"mx{element}", scale_rule=rule, warn=False)
    stored = scales.view(torch.uint8).numpy().reshape(-1, 1)
    assert np.array_equal(found.scales.numpy(), stored)
    is_right = stored[:, 0] > 0
    assert is_right.sum() > 30_000
    assert np.array_equal(found.codes.numpy()[is_right], codes.reshape(found.codes.shape)[is_right])
    assert same_bits(found.values.numpy()[is_right], values[is_right])


def heavy_tailed(size: int) -> AnyArray:
    random = np.random.default_rng(2)
    return (random.standard_normal((size // 64, 64)) * 2.0 ** random.uniform(-12, 12, (size // 64, 64))).astype(
        np.float32
    )


@pytest.mark.parametrize("kind", ["normal", "tiny", "large", "heavy tails"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nvfp4_agrees_with_torchao(torch: ModuleType, torchao: SimpleNamespace, kind: str, dtype: str) -> None:
    size = 1 << 18
    factor = {"normal": 1.0, "tiny": 2.0**-60, "large": 2.0**60, "heavy tails": 1.0}[kind]
    numbers = (
        heavy_tailed(size) if kind == "heavy tails" else np.random.default_rng(1).standard_normal((size // 64, 64))
    )
    tensor = torch.from_numpy((numbers * factor).astype(np.float32)).to(getattr(torch, dtype))
    tensor[3] = 0.0
    per_tensor = torchao.nvfp4.per_tensor_amax_to_scale(tensor.abs().max())
    scales, packed = torchao.nvfp4.nvfp4_quantize(tensor, per_tensor_scale=per_tensor)
    found = quantize(tensor, "nvfp4_torchao", warn=False)
    assert found.tensor_scale == float(per_tensor)
    assert np.array_equal(found.scales.numpy(), scales.view(torch.uint8).numpy().reshape(found.scales.shape))
    codes = unpacked(packed.view(torch.uint8).numpy()).reshape(found.codes.shape)
    assert np.array_equal(found.codes.numpy(), codes)
    elements = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)[codes]
    factors = scales.float().numpy().reshape(found.scales.shape) * np.float32(per_tensor)
    assert same_bits(found.values.numpy(), elements * np.repeat(factors, 16, axis=-1))


def test_rceil_is_the_smallest_scale_that_clamps_nothing() -> None:
    """On the float32 numbers around every largest value times a power of two, where torchao takes a logarithm."""
    for element in [*ELEMENTS, "int8"]:
        largest = np.float32(FORMATS[element].maximum) * np.exp2(np.arange(-100, 100, dtype=np.float32))
        steps = np.arange(-40, 41, dtype=np.int32)
        maxima = (largest.view(np.int32)[:, None] + steps).view(np.float32)
        found = quantize(maxima, f"mx{element}", block_size=1, scale_rule="rceil", warn=False)
        scaled = maxima.astype(np.float64) / found.scale_values
        assert (scaled <= FORMATS[element].maximum).all()
        assert (2 * scaled > FORMATS[element].maximum).all()
        assert found.losses.overflow == 0


def test_rceil_is_exact_where_a_logarithm_in_float32_is_not() -> None:
    found = quantize(np.array([float.fromhex("0x1.c00002p-22")], dtype=np.float32), "mxfp8_e4m3", scale_rule="rceil")
    assert found.scale_values.tolist() == [2.0**-29]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_torch_gives_torch_and_numpy_gives_numpy(torch: ModuleType, scheme: str) -> None:
    random = np.random.default_rng(0)
    for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        tensor = torch.from_numpy(random.standard_normal((6, 40))).to(getattr(torch, name)).t()
        array = tensor.contiguous().view(getattr(torch, f"int{8 * tensor.itemsize}")).numpy()
        array = array.view(getattr(ml_dtypes, name, name))
        found, expected = quantize(tensor, scheme, warn=False), quantize(array, scheme, warn=False)
        for field in ("values", "codes", "scales", "scale_values"):
            assert isinstance(getattr(found, field), torch.Tensor)
            assert same_bits(getattr(found, field).numpy(), getattr(expected, field))
        assert (found.losses, found.tensor_scale) == (expected.losses, expected.tensor_scale)


def test_a_tensor_of_a_graph_is_quantised_detached(torch: ModuleType) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 32))
    found = quantize(weight * 2, "mxfp8_e4m3")
    assert not found.values.requires_grad
    assert quantize(torch.tensor(3.0), "hif8", scaling="tensor").values.shape == ()
    assert quantize(torch.ones(2), "hif8").scales is None


def test_tensors_that_are_no_dense_real_numbers_are_refused(torch: ModuleType) -> None:
    from ranktape.errors import UsageError

    wrong: list[tuple[Any, str]] = [
        (torch.ones(3, dtype=torch.int64), "elements of int64"),
        (torch.ones(3, dtype=torch.complex64), "elements of complex64"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.ones(3, device="meta"), "no values"),
    ]
    for tensor, message in wrong:
        with pytest.raises(UsageError, match=message):
            quantize(tensor, "mxfp8_e4m3")


def test_a_result_can_be_pickled(torch: ModuleType) -> None:
    for x in (np.ones(32, dtype=np.float32), torch.ones(32)):
        found = pickle.loads(pickle.dumps(quantize(x, "mxfp8_e4m3")))  # noqa: S301 - our own
        assert found.codes.tolist() == [0x78] * 32


def test_a_negated_view_is_read_as_it_is(torch: ModuleType) -> None:
    view = torch.view_as_complex(torch.ones(4, 2)).conj().imag
    assert view.is_neg()
    assert quantize(view, "fp8_e4m3").values.tolist() == [-1.0] * 4
