"""Do the pieces of an array hold each element once, cut no block, and stay small?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ranktape.analyze.numerics import pieces as module
from ranktape.analyze.numerics.pieces import by_memory, in_three, pieces

SHAPES = [(1,), (7,), (1000,), (30, 40), (3, 1, 50), (2, 3, 4, 5), (500, 2), (2, 500), (1, 700), (0, 3)]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 5, 32, 10_000])
def test_every_element_is_in_one_piece(shape: tuple[int, ...], block_size: int) -> None:
    array = np.arange(np.prod(shape)).reshape(shape)
    for axis in range(array.ndim):
        parts = pieces(array, axis=axis, block_size=block_size)
        found = np.concatenate([np.zeros(0, dtype=np.int64), *(part.reshape(-1) for part in parts)])
        np.testing.assert_array_equal(np.sort(found), array.reshape(-1))
        assert all(np.shares_memory(part, array) for part in parts)
        limit = max(64, min(block_size, shape[axis]))
        assert all(part.size <= limit for part in parts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_block_is_cut(shape: tuple[int, ...]) -> None:
    for axis, extent in enumerate(shape):
        along = [extent if dim == axis else 1 for dim in range(len(shape))]
        blocks = np.broadcast_to((np.arange(extent) // 5).reshape(along), shape)
        for part in pieces(blocks, axis=axis, block_size=5):
            starts, counts = np.unique(
                np.moveaxis(part, axis, 0).reshape(part.shape[axis], -1)[:, 0], return_counts=True
            )
            assert all(count == min(5, extent - 5 * start) for start, count in zip(starts, counts, strict=True))


def test_axes_in_the_order_of_memory_are_no_copy() -> None:
    array: Any = np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)
    ordered, axis = by_memory(array, axis=0)
    assert ordered.flags.c_contiguous
    assert np.shares_memory(ordered, array)
    assert (ordered.shape, axis) == ((2, 3, 4), 2)
    assert in_three(ordered, axis=1).shape == (2, 3, 4)
    assert in_three(ordered, axis=axis).shape == (6, 4, 1)
    assert np.shares_memory(in_three(ordered, axis=axis), array)
