"""Is a tensor cut into pieces that hold every element once, and blocks as they are?"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktape.analyze.numerics.pieces import RUN, Box, boxes, grouped_shape

BOX_SIZE = 1 << 17


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, int]:
    num_dims = draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.integers(0, 200 >> 2 * (num_dims - 1) or 3), min_size=num_dims, max_size=num_dims)))
    axis = draw(st.integers(0, len(shape) - 1))
    return shape, axis, draw(st.integers(1, 50)), draw(st.sampled_from([3, 16, 100, 1000]))


@given(cuts())
def test_boxes_hold_every_element_once_with_its_block(cut: tuple[tuple[int, ...], int, int, int]) -> None:
    shape, axis, block_size, box_size = cut
    times = np.zeros(shape, dtype=np.int64)
    block_of = np.broadcast_to(
        (np.arange(shape[axis]) // block_size).reshape(-1, *[1] * (len(shape) - 1 - axis)), shape
    )
    groups = np.zeros(grouped_shape(shape, axis=axis, block_size=block_size))
    for box in boxes(shape, axis=axis, block_size=block_size, box_size=box_size):
        assert box.size <= box_size
        assert times[box.place].shape == box.shape
        times[box.place] += 1
        before, count, length, after = box.shape_OBEI
        assert (before * count * length * after, count * length) == (box.size, box.shape[axis])
        assert groups[box.groups].size == before * count * after
        # Elements, sorted by the box into blocks, are those of the block that the box says.
        numbers = np.arange(box.groups[axis].start, box.groups[axis].stop).reshape(1, -1, 1, 1)
        assert (block_of[box.place].reshape(box.shape_OBEI) == numbers).all()
    assert (times == 1).all()


def test_a_tensor_without_elements_has_no_boxes() -> None:
    assert list(boxes((3, 0, 4), axis=0, block_size=2, box_size=1)) == []
    assert grouped_shape((3, 0, 4), axis=0, block_size=2) == (2, 0, 4)


@pytest.mark.parametrize(
    ("shape", "axis", "block_size"),
    [
        ((4096, 4096), 1, 32),
        ((4096, 4096), 0, 32),
        ((10**6,), 0, 10**6),
        ((8, 128, 4096), 1, 32),
        ((100, 8192), 0, 100),
    ],
)
def test_boxes_of_large_tensors_are_large_and_reach_far_along_memory(
    shape: tuple[int, ...], axis: int, block_size: int
) -> None:
    found: list[Box] = list(boxes(shape, axis=axis, block_size=block_size, box_size=BOX_SIZE))
    assert math.prod(shape) / len(found) > BOX_SIZE / 2
    assert found[0].shape[-1] >= min(RUN, shape[-1])
