"""Rotates tensors by Hadamard matrices along an axis, so that an outlier is spread over its neighbours.

A product whose two operands are rotated along what it sums over is the same, but for rounding: the matrices are
orthonormal.
"""

# Shapes: G = groups that are rotated, N = the size of the matrix, I = elements after the axis.

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.formats import uniforms
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch

HALF = 0.5
"""Where uniform numbers have as many below as above them."""

PIECE, DEVICE_PIECE = 1 << 17, 1 << 24
"""Elements that are rotated at once, on a CPU and on other devices."""


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


def rotated(x: torch.Tensor, *, axis: int, size: int, seed: int | None, is_back: bool = False) -> torch.Tensor:
    """Each run of `size` neighbours along the axis, times signs and the normalised Hadamard matrix; or else undone.

    In Sylvester's order: element i of a run becomes the sum over j of (-1)**(number of bits that i and j share) times
    sign j times element j, over sqrt(size). Added up in pairs of neighbours, then of pairs, and so on, in float32 (of
    float64 in float64), and multiplied by 1 / sqrt(size) at last. NaN and Inf spread over their run. The result is a
    new tensor in the shape of `x`.

    Raises:
        UsageError: the axis is no multiple of the size.
    """
    import torch

    shape = tuple(x.shape)
    check_rotation(shape[axis], size=size)
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    groups_GNI = x.detach().reshape(math.prod(shape[:axis]) * (shape[axis] // size), size, math.prod(shape[axis + 1 :]))
    before, after = (
        torch.asarray(factors, dtype=dtype, device=x.device).view(1, size, 1)
        for factors in rotation_factors(size, seed=seed, is_back=is_back)
    )
    found = torch.empty(groups_GNI.shape, dtype=dtype, device=x.device)
    piece = max(1, (PIECE if x.device.type == "cpu" else DEVICE_PIECE) // max(1, size * groups_GNI.shape[2]))
    for start in range(0, len(groups_GNI), piece):
        own = groups_GNI[start : start + piece].to(dtype) * before
        span = 1
        while span < size:
            one, other = own.view(-1, size // (2 * span), 2, span, own.shape[2]).unbind(2)
            own, span = torch.stack((one + other, one - other), dim=2), 2 * span
            own = own.view(-1, size, groups_GNI.shape[2])
        torch.mul(own, after, out=found[start : start + piece])
    return found.view(shape)
