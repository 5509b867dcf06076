"""Computes the statistics of a tensor instead of copying its values: on the training thread, or on its device.

It takes one pass over the memory of the tensor, in any order of its dimensions, close to the speed of memory. A tensor
that is several operands in a forward pass is read once.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ranktape.analyze.numerics.histograms.histogram import measure
from ranktape.analyze.numerics.histograms.moments import statistics_of
from ranktape.analyze.numerics.summary_kernels import summariser
from ranktape.capture.guard import failure_text
from ranktape.capture.passes.tracker import dtype_name
from ranktape.capture.torch_private import in_backward, is_accelerator_error, storage_id, version_of
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import EXTREMES, TALLY_KINDS
from ranktape.storage.format.statistics import STATISTICS

_NUM_HEAD = len(STATISTICS) + len(EXTREMES)
_NUM_KINDS = len(TALLY_KINDS)
_COUNTS = 8 * _NUM_HEAD
"""The offset of the counts of samples, in bytes."""
_UNDERFLOW, _ZERO = TALLY_KINDS.index("underflow"), TALLY_KINDS.index("zero")
_MAX_KNOWN = 64
"""The number of tensors whose statistics are cached, the latest ones of an iteration."""

_NORMALS = {
    dtype: int(np.array([torch.finfo(dtype).tiny], dtype=np.float32).view(np.uint32)[0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
"""The float32 bit pattern of the smallest normal number of each dtype whose values float32 can represent."""


def is_summable(tensor: torch.Tensor) -> bool:
    """Whether `statistics_on_device` supports a tensor: float32 can represent its values."""
    return tensor.dtype in _NORMALS and tensor.numel() > 0


def statistics_on_device(tensor: torch.Tensor, *, sample_dim: int | None) -> torch.Tensor:
    """The statistics of a tensor, computed on its device without waiting: 64 bytes, and 40 for each further sample.

    Five int64 for each sample are the counts of NaN, inf, -inf, zeros, and magnitudes below the smallest normal number
    of the dtype, including zeros. Then six float32: the smallest and the largest finite value; the mean and the
    variance, with 0 for nonfinite values; the sum of finite magnitudes; and the largest finite magnitude.
    """
    if tensor.is_cuda and (fused := _fused_statistics()) is not None:
        dense, dim = _in_memory_order(tensor.detach(), sample_dim)
        return fused(dense.contiguous(), sample_dim=dim, normal=_NORMALS[tensor.dtype])
    wide = tensor.detach().float()
    rows = (
        wide.reshape(1, -1) if sample_dim is None else wide.movedim(sample_dim, 0).reshape(wide.shape[sample_dim], -1)
    )
    tiny = torch.finfo(tensor.dtype).tiny
    flags = (rows.isnan(), rows == math.inf, rows == -math.inf, rows == 0, rows.abs() < tiny)
    counts = torch.stack([flag.sum(dim=1) for flag in flags], dim=1)
    finite = rows.nan_to_num(0.0, 0.0, 0.0)
    variance, mean = torch.var_mean(finite, correction=0)
    magnitudes = finite.abs_()
    values = torch.stack(
        [
            rows.nan_to_num(math.inf, math.inf, math.inf).amin(),
            rows.nan_to_num(-math.inf, -math.inf, -math.inf).amax(),
            mean,
            variance,
            magnitudes.sum(),
            magnitudes.amax(),
        ]
    )
    return torch.cat([counts.view(-1).view(torch.uint8), values.view(torch.uint8)])


@cache
def _fused_statistics() -> Callable[..., torch.Tensor] | None:
    """Kernels that read a tensor once, while torch's reductions need 15 passes; None if Triton does not work.

    Triton is part of torch's builds for CUDA. It compiles its launcher with a C compiler, which may be missing.
    """
    try:
        from ranktape.capture.tensors.fused_statistics import fused_statistics

        fused_statistics(torch.zeros(1, device="cuda"), sample_dim=None, normal=_NORMALS[torch.float32])
    except Exception as error:  # Triton may raise any exception
        if is_accelerator_error(error):
            raise
        what = "statistics on the device read each tensor about 15 times, not once"
        warnings.warn(f"ranktape: {what}, because Triton does not work: {failure_text(error)}", stacklevel=2)
        return None
    return fused_statistics


class HostStatistics:
    """Computes statistics, and caches those of tensors in an iteration's forward passes while they are alive."""

    def __init__(self) -> None:
        """Compile the kernel or load it from the cache, before the first step needs it."""
        self._scratch = torch.zeros(0)
        self._make_room(8 * (_NUM_HEAD + _NUM_KINDS))
        self._summarise = summariser()
        self._known: dict[Any, tuple[StorageWeakRef, bytes]] = {}
        """Cached statistics by layout, storage and version. The identity of a storage with a weak reference is unique;
        its address may be reused."""
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Clear the cache at the start of an iteration."""
        self._known.clear()

    def compute(self, tensor: torch.Tensor, *, sample_dim: int | None) -> bytes:
        """The statistics and extremes of a tensor, and the counts of each sample at the limits of the dtype."""
        if in_backward() or tensor.is_inference():
            # Asking for the storage of a gradient would prevent torch from accumulating in place. Inference tensors
            # have no version.
            with self._lock:
                return self._compute(tensor, sample_dim)
        storage = tensor.untyped_storage()
        samples = (1, 0) if sample_dim is None else (tensor.shape[sample_dim], tensor.stride(sample_dim))
        location = storage_id(tensor), tensor.data_ptr(), _layout(tensor), samples
        key = location, tensor.dtype, tensor.is_neg(), tensor.is_conj(), version_of(tensor)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                return known[1]
            statistics = self._compute(tensor, sample_dim)
            if len(self._known) >= _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[key] = StorageWeakRef(storage), statistics
        return statistics

    def _compute(self, tensor: torch.Tensor, sample_dim: int | None) -> bytes:
        num_samples = 1 if sample_dim is None else tensor.shape[sample_dim]
        taken = self._compute_fast(tensor, sample_dim, num_samples)
        return _compute_slowly(tensor, sample_dim, num_samples) if taken is None else taken

    def _compute_fast(self, tensor: torch.Tensor, sample_dim: int | None, num_samples: int) -> bytes | None:
        """The statistics by the kernel; None if float32 cannot represent the dtype or a value is not finite."""
        normal, size = _NORMALS.get(tensor.dtype), tensor.numel()
        if normal is None or size == 0 or tensor.is_conj() or tensor.is_neg():
            return None
        plain, dim = tensor, sample_dim
        if plain.dtype != torch.float32 or not plain.is_contiguous():
            plain, dim = self._widened(tensor.detach(), sample_dim)
        nbytes = 8 * (_NUM_HEAD + num_samples * _NUM_KINDS)
        if len(self._result) < nbytes:
            self._make_room(nbytes)
        before = 1 if not dim else math.prod(plain.shape[:dim])
        sizes = before, num_samples, size // (before * num_samples), normal, _NUM_KINDS, _UNDERFLOW, _ZERO
        is_finite = self._summarise(plain.data_ptr(), self._address, self._address + _COUNTS, *sizes)
        return bytes(self._result[:nbytes]) if is_finite else None

    def _make_room(self, nbytes: int) -> None:
        """Allocate a buffer for the result of the kernel, at a fixed address."""
        buffer = np.empty(-(-nbytes // 8))
        self._address, self._result = buffer.ctypes.data, buffer.data.cast("B")

    def _widened(self, tensor: torch.Tensor, sample_dim: int | None) -> tuple[torch.Tensor, int | None]:
        """The values as float32 in the order of memory, and the new sample dimension."""
        plain, dim = _in_memory_order(tensor, sample_dim)
        if plain.dtype == torch.float32 and plain.is_contiguous():
            return plain, dim
        if self._scratch.numel() < plain.numel():
            self._scratch = torch.zeros(plain.numel())
        return self._scratch[: plain.numel()].view(plain.shape).copy_(plain), dim


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """The elements of its storage that a tensor covers, relative to the first: equal for views of the same elements."""
    if tensor.is_contiguous():
        return ((1, tensor.numel()),)
    layout: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True):
        if layout and layout[-1][0] == stride * size:
            layout[-1] = stride, layout[-1][1] * size
        elif size != 1:
            layout.append((stride, size))
    return tuple(layout)


def _in_memory_order(tensor: torch.Tensor, sample_dim: int | None) -> tuple[torch.Tensor, int | None]:
    """The values with dimensions in the order of memory, and the new sample dimension."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim))
    return tensor.permute(order), None if sample_dim is None else order.index(sample_dim)


def _compute_slowly(tensor: torch.Tensor, sample_dim: int | None, num_samples: int) -> bytes:
    """The statistics of any tensor, without the kernel."""
    target = np.zeros(_NUM_HEAD + num_samples * _NUM_KINDS)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.zeros(0, dtype=torch.uint8)
    array = flat.numpy().view(numpy_dtype(dtype_name(tensor.dtype))).reshape(tuple(tensor.shape))
    overflow = measure(array, sample_dim=sample_dim)
    target[: len(STATISTICS)] = statistics_of(array).to_vector()
    ends = [getattr(overflow, name) for name in EXTREMES]
    target[len(STATISTICS) : _NUM_HEAD] = [math.nan if end is None else end for end in ends]
    if overflow.per_sample is None:
        target[_NUM_HEAD:] = [getattr(overflow, kind).count for kind in TALLY_KINDS]
    else:
        counts_KS = [overflow.per_sample[kind] for kind in TALLY_KINDS]
        target[_NUM_HEAD:] = np.array(counts_KS, dtype=np.float64).T.reshape(-1)
    return target.tobytes()
