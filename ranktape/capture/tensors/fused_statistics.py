"""Computes the statistics of a CUDA tensor in one read, with two Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_STEP = 1024


@triton.jit(do_not_specialize=["inner", "num_samples", "sample_size"])  # type: ignore[untyped-decorator]
def _reduce_blocks(tensor, counts, values, inner, num_samples, sample_size, NORMAL: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reduce one block of one sample."""
    block, num_blocks, sample = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_valid = index < sample_size
    offset = index // inner * (num_samples * inner) + sample * inner + index % inner
    x = tl.load(tensor + offset, mask=is_valid, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    magnitude_bits = bits & 0x7FFFFFFF
    is_finite = magnitude_bits < 0x7F800000
    slot = counts + (sample * 5).to(tl.int64) * num_blocks + block
    tl.store(slot, tl.sum((magnitude_bits > 0x7F800000).to(tl.int32), axis=0))
    tl.store(slot + num_blocks, tl.sum((bits == 0x7F800000).to(tl.int32), axis=0))
    tl.store(slot + 2 * num_blocks, tl.sum(((magnitude_bits == 0x7F800000) & (bits < 0)).to(tl.int32), axis=0))
    tl.store(slot + 3 * num_blocks, tl.sum(((magnitude_bits == 0) & is_valid).to(tl.int32), axis=0))
    tl.store(slot + 4 * num_blocks, tl.sum(((magnitude_bits < NORMAL) & is_valid).to(tl.int32), axis=0))
    finite = tl.where(is_finite, x, 0.0)
    magnitude = tl.abs(finite)
    total = tl.sum(finite, axis=0)
    num_valid = tl.minimum(sample_size - block.to(tl.int64) * BLOCK, BLOCK)
    difference = tl.where(is_valid, finite - total / num_valid.to(tl.float32), 0.0)
    place = values + (sample * 6).to(tl.int64) * num_blocks + block
    tl.store(place, tl.min(tl.where(is_finite & is_valid, x, float("inf")), axis=0))
    tl.store(place + num_blocks, tl.max(tl.where(is_finite & is_valid, x, float("-inf")), axis=0))
    tl.store(place + 2 * num_blocks, total)
    tl.store(place + 3 * num_blocks, tl.sum(difference * difference, axis=0))
    tl.store(place + 4 * num_blocks, tl.sum(magnitude, axis=0))
    tl.store(place + 5 * num_blocks, tl.max(magnitude, axis=0))


@triton.jit(do_not_specialize=["num_blocks", "num_samples", "sample_size"])  # type: ignore[untyped-decorator]
def _reduce_samples(  # type: ignore[no-untyped-def]
    counts, values, ints, floats, num_blocks, num_samples, sample_size, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """Add up the counts of one sample. The last program reduces the values of all samples."""
    sample = tl.program_id(0)
    if sample < num_samples:
        for kind in range(5):
            count = tl.zeros([STEP], dtype=tl.int64)
            start = counts + (sample * 5 + kind).to(tl.int64) * num_blocks
            for first in range(0, num_blocks, STEP):
                block = first + tl.arange(0, STEP)
                count += tl.load(start + block, mask=block < num_blocks, other=0).to(tl.int64)
            tl.store(ints + sample * 5 + kind, tl.sum(count, axis=0))
    else:
        lowest, highest = tl.full([STEP], float("inf"), tl.float32), tl.full([STEP], float("-inf"), tl.float32)
        total, magnitudes = tl.zeros([STEP], dtype=tl.float32), tl.zeros([STEP], dtype=tl.float32)
        largest, squares = tl.zeros([STEP], dtype=tl.float32), tl.zeros([STEP], dtype=tl.float32)
        for first in range(0, num_samples * num_blocks, STEP):
            index = first + tl.arange(0, STEP)
            is_valid = index < num_samples * num_blocks
            place = values + (index // num_blocks * 6).to(tl.int64) * num_blocks + index % num_blocks
            lowest = tl.minimum(lowest, tl.load(place, mask=is_valid, other=float("inf")))
            highest = tl.maximum(highest, tl.load(place + num_blocks, mask=is_valid, other=float("-inf")))
            total += tl.load(place + 2 * num_blocks, mask=is_valid, other=0.0)
            magnitudes += tl.load(place + 4 * num_blocks, mask=is_valid, other=0.0)
            largest = tl.maximum(largest, tl.load(place + 5 * num_blocks, mask=is_valid, other=0.0))
        size = (num_samples * sample_size).to(tl.float32)
        mean = tl.sum(total, axis=0) / size
        for first in range(0, num_samples * num_blocks, STEP):
            index = first + tl.arange(0, STEP)
            is_valid = index < num_samples * num_blocks
            place = values + (index // num_blocks * 6).to(tl.int64) * num_blocks + index % num_blocks
            rest = sample_size - (index % num_blocks).to(tl.int64) * BLOCK
            num_valid = tl.minimum(rest, BLOCK).to(tl.float32)
            shift = tl.load(place + 2 * num_blocks, mask=is_valid, other=0.0) / num_valid - mean
            # Chan, Golub and LeVeque, 1983: combine the squares about the mean of each block and those of block means.
            inside = tl.load(place + 3 * num_blocks, mask=is_valid, other=0.0)
            squares += tl.where(is_valid, inside + num_valid * shift * shift, 0.0)
        tl.store(floats, tl.min(lowest, axis=0))
        tl.store(floats + 1, tl.max(highest, axis=0))
        tl.store(floats + 2, mean)
        tl.store(floats + 3, tl.sum(squares, axis=0) / size)
        tl.store(floats + 4, tl.sum(magnitudes, axis=0))
        tl.store(floats + 5, tl.max(largest, axis=0))


def fused_statistics(tensor: torch.Tensor, *, sample_dim: int | None, normal: int) -> torch.Tensor:
    """The result of `statistics_on_device` for a contiguous, nonempty tensor.

    `normal` is the float32 bit pattern of the smallest normal number of the dtype.
    """
    size = tensor.numel()
    num_samples = 1 if sample_dim is None else tensor.shape[sample_dim]
    inner = size if sample_dim is None else tensor.stride(sample_dim)
    sample_size = size // num_samples
    num_blocks = -(-sample_size // _BLOCK)
    counts = torch.empty((num_samples, 5, num_blocks), dtype=torch.int32, device=tensor.device)
    values = torch.empty((num_samples, 6, num_blocks), dtype=torch.float32, device=tensor.device)
    taken = torch.empty(num_samples * 5 + 3, dtype=torch.int64, device=tensor.device)
    with torch.cuda.device_of(tensor):
        _reduce_blocks[num_blocks, num_samples](
            tensor, counts, values, inner, num_samples, sample_size, NORMAL=normal, BLOCK=_BLOCK
        )
        _reduce_samples[(num_samples + 1,)](
            counts,
            values,
            taken,
            taken[num_samples * 5 :].view(torch.float32),
            num_blocks,
            num_samples,
            sample_size,
            BLOCK=_BLOCK,
            STEP=_STEP,
        )
    return taken.view(torch.uint8)
