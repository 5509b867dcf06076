"""Do the pieces of an array hold each element once, cut no block, and stay small?"""

from __future__ import annotations

import itertools
import math
import os
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranktape.analyze.numerics import pieces as module
from ranktape.analyze.numerics.pieces import (
    MAX_THREADS,
    RUN,
    Box,
    as_array,
    as_three_dims,
    boxes,
    grouped_shape,
    map_in_threads,
    memory_order,
    num_threads,
    pieces,
)
from ranktape.errors import UsageError

SHAPES = [(1,), (7,), (1000,), (30, 40), (3, 1, 50), (2, 3, 4, 5), (500, 2), (2, 500), (1, 700), (0, 3)]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 64)


def test_every_element_is_in_one_piece() -> None:
    for shape, block_size in itertools.product(SHAPES, [1, 5, 32, 10_000]):
        array = np.arange(np.prod(shape)).reshape(shape)
        for axis in range(array.ndim):
            parts = pieces(array, axis=axis, block_size=block_size)
            found = np.concatenate([np.zeros(0, dtype=np.int64), *(part.reshape(-1) for part in parts)])
            np.testing.assert_array_equal(np.sort(found), array.reshape(-1))
            assert all(np.shares_memory(part, array) for part in parts)
            limit = max(64, min(block_size, shape[axis]))
            assert all(part.size <= limit for part in parts)


def test_no_block_is_cut() -> None:
    for shape in SHAPES:
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
    ordered, axis = memory_order(array, axis=0)
    assert ordered.flags.c_contiguous
    assert np.shares_memory(ordered, array)
    assert (ordered.shape, axis) == ((2, 3, 4), 2)
    assert as_three_dims(ordered, axis=1).shape == (2, 3, 4)
    assert as_three_dims(ordered, axis=axis).shape == (6, 4, 1)
    assert np.shares_memory(as_three_dims(ordered, axis=axis), array)


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
        assert times[box.slices].shape == box.shape
        times[box.slices] += 1
        before, count, length, after = box.shape_OBEI
        assert (before * count * length * after, count * length) == (box.size, box.shape[axis])
        assert groups[box.groups].size == before * count * after
        # Elements, sorted by the box into blocks, are those of the block that the box says.
        numbers = np.arange(box.groups[axis].start, box.groups[axis].stop).reshape(1, -1, 1, 1)
        assert (block_of[box.slices].reshape(box.shape_OBEI) == numbers).all()
    assert (times == 1).all()


def test_a_tensor_without_elements_has_no_boxes() -> None:
    assert list(boxes((3, 0, 4), axis=0, block_size=2, box_size=1)) == []
    assert grouped_shape((3, 0, 4), axis=0, block_size=2) == (2, 0, 4)


def test_boxes_of_large_tensors_are_large_and_reach_far_along_memory() -> None:
    cases: list[tuple[tuple[int, ...], int, int]] = [
        ((4096, 4096), 1, 32),
        ((4096, 4096), 0, 32),
        ((10**6,), 0, 10**6),
        ((8, 128, 4096), 1, 32),
        ((100, 8192), 0, 100),
    ]
    for shape, axis, block_size in cases:
        found: list[Box] = list(boxes(shape, axis=axis, block_size=block_size, box_size=BOX_SIZE))
        assert math.prod(shape) / len(found) > BOX_SIZE / 2
        assert found[0].shape[-1] >= min(RUN, shape[-1])


def test_results_are_in_the_order_of_the_items() -> None:
    for threads in [1, 2, 7, None]:
        assert map_in_threads(lambda item: item * item, range(20), threads=threads) == [
            item * item for item in range(20)
        ]
        assert map_in_threads(str, [], threads=threads) == []


def test_two_threads_work_at_once_and_one_is_the_callers_own() -> None:
    both = threading.Barrier(2, timeout=20)
    assert sorted(map_in_threads(lambda _: both.wait(), [0, 1], threads=2)) == [0, 1]
    assert map_in_threads(lambda _: threading.get_ident(), [0, 1], threads=1) == [threading.get_ident()] * 2
    assert map_in_threads(lambda _: threading.get_ident(), [0], threads=8) == [threading.get_ident()]


def test_what_the_work_raises_is_raised() -> None:
    def fail(item: int) -> None:
        raise KeyError(item)

    with pytest.raises(KeyError, match="0"):
        map_in_threads(fail, range(5), threads=3)


def test_there_are_as_many_threads_as_cores_unless_they_are_named() -> None:
    assert num_threads(3) == 3
    assert 1 <= num_threads(None) <= min(MAX_THREADS, os.cpu_count() or 1)
    with pytest.raises(UsageError, match=r"threads=0 is not a number of threads: give 1 or more, or None"):
        num_threads(0)


NUMBERS = [[1.5, -2.0], [float("nan"), -0.0]]


def test_a_tensor_is_read_where_it_lies() -> None:
    for dtype in ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "complex64"]:
        tensor = torch.tensor(NUMBERS).to(getattr(torch, dtype))
        array = as_array(tensor.T)
        assert array.dtype == np.array(NUMBERS, dtype=getattr(ml_dtypes, dtype, dtype)).dtype
        np.testing.assert_array_equal(array.astype(complex), np.array(NUMBERS).T.astype(complex))
        tensor[0, 0] = 0.5
        assert array[0, 0] == 0.5


def test_views_that_are_negated_or_conjugated_are_read_as_what_they_show() -> None:
    tensor = torch.tensor([1 + 2j])
    assert as_array(tensor.conj()).tolist() == [1 - 2j]
    assert as_array(tensor.conj().imag).tolist() == [-2]
    assert as_array(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


def test_lists_and_numbers_are_arrays() -> None:
    assert as_array([[1, 2], [3, 4]]).shape == (2, 2)
    assert as_array(1.5).dtype == np.float64
    assert as_array([]).size == 0


def test_the_order_of_bytes_changes_no_number() -> None:
    for dtype in [">f8", ">f4", ">f2", ">i4", ">c8"]:
        array = as_array(np.arange(6).reshape(2, 3).astype(dtype))
        assert array.dtype.isnative
        assert array.tolist() == np.arange(6).reshape(2, 3).tolist()


def test_an_array_is_not_copied() -> None:
    array = np.zeros((3, 4), dtype=ml_dtypes.bfloat16).T
    assert np.shares_memory(as_array(array), array)


def test_what_holds_no_numbers_is_refused() -> None:
    cases: list[tuple[Any, str]] = [
        (["a", "b"], "no numbers that records hold: give one of float64"),
        ([None], "elements of object"),
        (None, "elements of object"),
        (np.zeros(2, dtype=np.longdouble), "elements of longdouble|elements of float128"),
        ([[1.0], [1.0, 2.0]], "lists of the same length"),
        (torch.eye(2).to_sparse(), "make it dense"),
        (torch.zeros(2, device="meta"), "nothing to read"),
    ]
    for x, message in cases:
        with pytest.raises(UsageError, match=message):
            as_array(x)
