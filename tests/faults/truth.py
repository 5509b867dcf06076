"""What do the processes of the fault tests record?

The values follow from iteration, rank and place: whoever judges a run computes them again and needs no copy.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from ranktape.storage.format.record_info import RecordInfo
from tests.runs import describe

NUM_RANKS = 2
ITERATIONS = range(4)

Tensor = tuple[np.ndarray[Any, Any], RecordInfo]

_FORMS: tuple[tuple[tuple[int, ...], type, int | None, int], ...] = (
    ((6, 256, 192), np.float32, 0, 1),  # an object of its own, cut by samples
    ((600, 1024), ml_dtypes.bfloat16, None, 1),  # an object of its own, in one chunk
    ((4, 64), np.float32, 0, 9),
    ((100,), ml_dtypes.bfloat16, None, 5),
    ((), np.float64, None, 1),  # a small one alone
    ((0, 4), np.float32, None, 1),  # one without a value
)
"""Shape, dtype, dimension of the samples, and how many of it."""


@functools.lru_cache(maxsize=len(ITERATIONS) * NUM_RANKS)
def tensors(iteration: int, rank: int, *, version: int = 0) -> tuple[Tensor, ...]:
    """Everything that one rank records in one iteration; another `version` has other values of the same form."""
    made: list[Tensor] = []
    for shape, dtype, sample_dim, count in _FORMS:
        for _ in range(count):
            number = len(made)
            array = values(shape, dtype, seed=(version, iteration, rank, number))
            fields = {"module": f"layers.{number}.up", "layer_idx": number, "counter": number}
            info = describe(array, iteration=iteration, rank=rank, sample_dim=sample_dim, **fields)
            made.append((array, info))
    return tuple(made)


def values(shape: tuple[int, ...], dtype: Any, *, seed: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Any bits at all, NaNs among them, that no other seed has."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    key = sum(part * factor for part, factor in zip(seed, (1_000_003, 10_007, 1009, 1), strict=True))
    words = (np.arange(-(-size // 4), dtype=np.uint32) + np.uint32(key)) * np.uint32(2654435761)
    array: np.ndarray[Any, Any] = words.view(np.uint8)[:size].view(dtype).reshape(shape)
    return array
