"""Takes what a tensor on the CPU adds up to, on the training thread, in the place of a copy of its values.

One pass over the memory in which the tensor lies, whatever the order of its dimensions: a quarter of what a copy takes
in two. A tensor that is several operands is looked at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ranktape.analyze.numerics.histograms.histogram import measure
from ranktape.analyze.numerics.histograms.moments import statistics_of
from ranktape.analyze.numerics.kernels import summarise
from ranktape.capture.passes.passes import dtype_name
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.record_info import EXTREMES, TALLY_KINDS
from ranktape.storage.format.statistics import STATISTICS

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUM_HEAD = len(STATISTICS) + len(EXTREMES)
_NUM_KINDS = len(TALLY_KINDS)
_UNDERFLOW, _ZERO = TALLY_KINDS.index("underflow"), TALLY_KINDS.index("zero")
_MAX_KNOWN = 64
"""Tensors that are remembered, the last ones of an iteration."""

_NORMALS = {
    dtype: np.array([torch.finfo(dtype).tiny], dtype=np.float32).view(np.int32)[0]
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
"""Of the dtypes whose values float32 holds: the pattern there of the smallest normal number."""


def taken_nbytes(tensor: torch.Tensor, *, sample_dim: int | None) -> int:
    """Bytes of what is taken of a tensor."""
    num_samples = 1 if sample_dim is None else tensor.shape[sample_dim]
    return 8 * (_NUM_HEAD + num_samples * _NUM_KINDS)


class StatisticsTaker:
    """Remembers what it has taken of the tensors of an iteration, as long as they live."""

    def __init__(self) -> None:
        """Compile the kernel, or load it from the cache: not in the middle of a step."""
        self._scratch = torch.zeros(0)
        self._known: dict[Any, tuple[StorageWeakRef, NDArray[np.float64]]] = {}
        taken = np.zeros(taken_nbytes(self._scratch, sample_dim=None) // 8)
        self.take(torch.zeros(2), sample_dim=None, into=taken.data.cast("B"))

    def begin(self) -> None:
        """An iteration begins."""
        self._known.clear()

    def take(self, tensor: torch.Tensor, *, sample_dim: int | None, into: memoryview) -> None:
        """Write the statistics of a tensor, its extremes, and for each sample its counts at the limits of the dtype."""
        num_samples = 1 if sample_dim is None else tensor.shape[sample_dim]
        stride = 0 if sample_dim is None else tensor.stride(sample_dim)
        # What inference mode made counts no writes.
        version = -1 if tensor.is_inference() else tensor._version  # noqa: SLF001  (torch has no public way)
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype, version, num_samples, stride)
        known = None if version < 0 else self._known.get(key)
        target = np.frombuffer(into, dtype=np.float64)
        if known is not None and not known[0].expired():
            target[:] = known[1]
            return
        if not self._take_fast(tensor, sample_dim, num_samples, target):
            _take_slowly(tensor, sample_dim, target)
        while len(self._known) >= _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[key] = StorageWeakRef(tensor.untyped_storage()), target.copy()

    def _take_fast(
        self, tensor: torch.Tensor, sample_dim: int | None, num_samples: int, target: NDArray[np.float64]
    ) -> bool:
        """Whether it could be: not for dtypes that float32 does not hold, and where a value is not finite."""
        normal = _NORMALS.get(tensor.dtype)
        if normal is None or tensor.numel() == 0 or tensor.is_conj() or tensor.is_neg():
            return False
        plain, dim = _in_memory_order(tensor.detach(), sample_dim)
        if plain.dtype != torch.float32 or not plain.is_contiguous():
            if self._scratch.numel() < plain.numel():
                self._scratch = torch.zeros(plain.numel())
            scratch = self._scratch[: plain.numel()].view(plain.shape)
            plain = scratch.copy_(plain)
        before = 1 if dim is None else math.prod(plain.shape[:dim])
        values = plain.numpy().reshape(before, num_samples, -1)
        summary = np.empty(9 + 2 * num_samples)
        if not summarise(values.view(np.int32), values, normal, summary):
            return False
        _lay_out(summary, num_samples, target)
        return True


def _in_memory_order(tensor: torch.Tensor, sample_dim: int | None) -> tuple[torch.Tensor, int | None]:
    """The same values with the dimensions as they lie in memory, and where the samples are then."""
    if tensor.is_contiguous():
        return tensor, sample_dim
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim))
    return tensor.permute(order), None if sample_dim is None else order.index(sample_dim)


def _lay_out(summary: NDArray[np.float64], num_samples: int, target: NDArray[np.float64]) -> None:
    """Write a kernel's summary in the order in which it is read."""
    count, total, second, third, fourth, magnitudes, smallest, largest, magnitude = summary[:9].tolist()
    keys = np.array([smallest, largest, magnitude], dtype=np.int32)
    # Keys in the order of the values; the patterns of negative ones are turned back.
    minimum, maximum, absmax = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(np.float32).tolist()
    if minimum == maximum:
        second = third = fourth = 0.0
    target[: len(STATISTICS)] = (
        *(count, count, total, second, third, fourth, magnitudes),
        *(minimum, maximum, absmax),
    )
    target[len(STATISTICS) : _NUM_HEAD] = minimum, maximum, absmax
    counts_SK = target[_NUM_HEAD:].reshape(num_samples, _NUM_KINDS)
    counts_SK[:] = 0.0
    counts_SK[:, _UNDERFLOW] = summary[9::2] - summary[10::2]
    counts_SK[:, _ZERO] = summary[10::2]


def _take_slowly(tensor: torch.Tensor, sample_dim: int | None, target: NDArray[np.float64]) -> None:
    """The same for any tensor."""
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
