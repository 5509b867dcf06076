"""Rotates tensors by Hadamard matrices along an axis, so that an outlier is spread over its neighbours.

A product whose two operands are rotated along what it sums over is the same, but for rounding: the matrices are
orthonormal.
"""

# Shapes: G = groups that are rotated, N = the size of the matrix, I = elements after the axis.

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import uniforms
from ranktape.analyze.numerics.formats.kernels import HALF
from ranktape.analyze.numerics.kernels import compiled
from ranktape.errors import UsageError


def rotation_signs(size: int, *, seed: int | None) -> NDArray[np.float64]:
    """The signs of a rotation of that size, 1 and -1; all 1 without a seed.

    They are -1 where `formats.uniforms` of the seed are below 1/2: the same everywhere.
    """
    if seed is None:
        return np.ones(size)
    return np.where(uniforms(seed, start=0, size=size) < HALF, -1.0, 1.0)


def rotation_factors(size: int, *, seed: int | None, is_back: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the elements of a run are multiplied by before they are added up, and after it."""
    signs_N, scales_N = rotation_signs(size, seed=seed), np.full(size, 1 / math.sqrt(size))
    return (np.ones(size), scales_N * signs_N) if is_back else (signs_N, scales_N)


def check_rotation(length: int, *, size: int) -> None:
    """Whether an axis of that length is one of whole groups.

    Raises:
        UsageError: it is not.
    """
    if length % size:
        raise UsageError(
            f"rotation is {size}, and {length} elements along the axis are no multiple of it: give a power of two that "
            "divides them, or 0"
        )


def rotated(x: Any, *, axis: int, size: int, seed: int | None, ops: ModuleType, is_back: bool = False) -> Any:
    """Each run of `size` neighbours along the axis, times signs and the normalised Hadamard matrix; or else undone.

    In Sylvester's order: element i of a run becomes the sum over j of (-1)**(number of bits that i and j share) times
    sign j times element j, over sqrt(size). Added up in pairs of neighbours, then of pairs, and so on, in float32 (of
    float64 in float64), and multiplied by 1 / sqrt(size) at last. NaN and Inf spread over their run. The result is a
    new array, or with `tensor_ops` a tensor, in the shape of `x`.

    Raises:
        UsageError: the axis is no multiple of the size.
    """
    shape = tuple(x.shape)
    check_rotation(shape[axis], size=size)
    xp = ops.namespace()
    groups_GNI = xp.asarray(x, dtype=xp.float64 if x.dtype == xp.float64 else xp.float32).reshape(
        math.prod(shape[:axis]) * (shape[axis] // size), size, math.prod(shape[axis + 1 :])
    )
    before_N, after_N = rotation_factors(size, seed=seed, is_back=is_back)
    with np.errstate(all="ignore"):  # what is NaN or overflows is part of the answer
        return ops.butterflies(groups_GNI, before_N, after_N).reshape(shape)


@compiled
def rotate_groups(groups_GNI: NDArray[Any], before_N: NDArray[Any], after_N: NDArray[Any]) -> None:
    """Rotate each group in place, the first factors before and the second ones after it."""
    size = groups_GNI.shape[1]
    for number in range(groups_GNI.shape[0]):
        group = groups_GNI[number]
        for row in range(size):
            for index in range(group.shape[1]):
                group[row, index] *= before_N[row]
        span = 1
        while span < size:
            for start in range(0, size, 2 * span):
                for row in range(start, start + span):
                    for index in range(group.shape[1]):
                        one, other = group[row, index], group[row + span, index]
                        group[row, index], group[row + span, index] = one + other, one - other
            span *= 2
        for row in range(size):
            for index in range(group.shape[1]):
                group[row, index] *= after_N[row]
