"""Do counts of a torch tensor on its device equal those of the compiled code?"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ranktape.analyze.numerics.histograms import torch_histogram
from ranktape.analyze.numerics.histograms.block_histogram import BlockHistogram, count_blocks
from ranktape.analyze.numerics.histograms.histogram import count_values
from ranktape.analyze.numerics.histograms.torch_histogram import count_tensor, count_tensor_blocks
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import numpy_dtype

HALVES = (torch.bfloat16, torch.float16)
NARROW = (*HALVES, torch.float8_e4m3fn, torch.float8_e5m2)


def _as_array(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    pattern = torch.int16 if tensor.dtype.itemsize == 2 else torch.uint8
    return tensor.cpu().contiguous().view(pattern).numpy().view(numpy_dtype(str(tensor.dtype).removeprefix("torch.")))


def _patterns(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every kind of pattern: normal numbers of all sizes, subnormals, NaN, Inf, and a stretch of zeros."""
    generator = torch.Generator().manual_seed(0)
    integer = torch.int16 if dtype.itemsize == 2 else torch.uint8
    low, high = (-(1 << 15), 1 << 15) if dtype.itemsize == 2 else (0, 256)
    drawn = torch.randint(low, high, shape, generator=generator).to(integer).view(dtype)
    ordinary = torch.randn(shape, generator=generator).to(dtype)
    mixed = torch.where(torch.rand(shape, generator=generator) < 0.02, drawn, ordinary)
    mixed.view(-1)[: mixed.numel() // 10] = 0
    return mixed


def _assert_same(found: BlockHistogram, expected: BlockHistogram) -> None:
    for field in dataclasses.fields(BlockHistogram):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name), err_msg=field.name)
        if isinstance(getattr(expected, field.name), np.ndarray):
            assert getattr(found, field.name).dtype == getattr(expected, field.name).dtype, field.name


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_pattern_is_counted_once(dtype: torch.dtype) -> None:
    integer, size = (torch.int16, 1 << 16) if dtype.itemsize == 2 else (torch.uint8, 256)
    tensor = torch.arange(size).to(integer).view(dtype)
    found = count_tensor(tensor)
    assert found.dtype == _as_array(tensor).dtype
    np.testing.assert_array_equal(found.counts, 1)
    np.testing.assert_array_equal(count_tensor(torch.cat([tensor, tensor[:5]])).counts[:5], 2)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_counts_of_patterns_equal_those_of_the_compiled_code(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_histogram, "BOX_SIZE", 1000)
    tensor = _patterns(dtype, 7, 33, 40)
    for layout in (tensor, tensor.transpose(0, 2), tensor[:, ::2], tensor[0, 0, 0], tensor[:0]):
        np.testing.assert_array_equal(count_tensor(layout).counts, count_values(_as_array(layout)).counts)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("block_size", [1, 5, 32, 5000])
def test_joint_counts_equal_those_of_the_compiled_code(
    dtype: torch.dtype, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_histogram, "BOX_SIZE", 1000)
    tensor = _patterns(dtype, 6, 70, 41)
    for layout in (tensor, tensor.transpose(0, 2)):
        for axis in (0, 1, -1):
            found = count_tensor_blocks(layout, axis=axis, block_size=block_size)
            _assert_same(found, count_blocks(_as_array(layout), axis=axis, block_size=block_size))
            assert found.num_elements == tensor.numel()


def test_what_has_no_elements_or_no_dimensions_is_counted_too() -> None:
    for tensor in (torch.zeros(0, 4), torch.zeros(4, 0), torch.tensor(3.0), torch.tensor(0.0), torch.tensor(torch.nan)):
        half = tensor.to(torch.bfloat16)
        _assert_same(count_tensor_blocks(half), count_blocks(_as_array(half)))


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(UsageError, match=r"torch\.float32 has too many patterns to count: use a type of at most 16 "):
        count_tensor(torch.zeros(3))
    for tensor in (torch.zeros(3), torch.zeros(3, dtype=torch.int16)):
        with pytest.raises(UsageError, match="cannot be counted in blocks: use a floating type of at most 16 bits"):
            count_tensor_blocks(tensor)
    half = torch.zeros(3, dtype=torch.float16)
    with pytest.raises(UsageError, match=r"axis=1 is not an axis of a tensor of shape \(3,\)"):
        count_tensor_blocks(half, axis=1)
    with pytest.raises(UsageError, match="block_size=0 is not a number of elements: give 1 or more"):
        count_tensor_blocks(half, block_size=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_gpu_counts_as_a_cpu_does(dtype: torch.dtype) -> None:
    tensor = _patterns(dtype, 64, 512, 70)
    on_gpu = tensor.cuda()
    np.testing.assert_array_equal(count_tensor(on_gpu).counts, count_tensor(tensor).counts)
    for axis in (0, -1):
        _assert_same(count_tensor_blocks(on_gpu, axis=axis), count_tensor_blocks(tensor, axis=axis))
