"""Are numbers read as they are, whatever they are held in?"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ranktape.analyze.numerics.pieces import numbers_of
from ranktape.errors import UsageError

NUMBERS = [[1.5, -2.0], [float("nan"), -0.0]]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "complex64"])
def test_a_tensor_is_read_where_it_lies(dtype: str) -> None:
    tensor = torch.tensor(NUMBERS).to(getattr(torch, dtype))
    array = numbers_of(tensor.T)
    assert array.dtype == np.array(NUMBERS, dtype=getattr(ml_dtypes, dtype, dtype)).dtype
    np.testing.assert_array_equal(array.astype(complex), np.array(NUMBERS).T.astype(complex))
    tensor[0, 0] = 0.5
    assert array[0, 0] == 0.5


def test_views_that_are_negated_or_conjugated_are_read_as_what_they_show() -> None:
    tensor = torch.tensor([1 + 2j])
    assert numbers_of(tensor.conj()).tolist() == [1 - 2j]
    assert numbers_of(tensor.conj().imag).tolist() == [-2]
    assert numbers_of(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


def test_lists_and_numbers_are_arrays() -> None:
    assert numbers_of([[1, 2], [3, 4]]).shape == (2, 2)
    assert numbers_of(1.5).dtype == np.float64
    assert numbers_of([]).size == 0


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">f2", ">i4", ">c8"])
def test_the_order_of_bytes_changes_no_number(dtype: str) -> None:
    array = numbers_of(np.arange(6).reshape(2, 3).astype(dtype))
    assert array.dtype.isnative
    assert array.tolist() == np.arange(6).reshape(2, 3).tolist()


def test_an_array_is_not_copied() -> None:
    array = np.zeros((3, 4), dtype=ml_dtypes.bfloat16).T
    assert np.shares_memory(numbers_of(array), array)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (["a", "b"], "no numbers that records hold: give one of float64"),
        ([None], "elements of object"),
        (None, "elements of object"),
        (np.zeros(2, dtype=np.longdouble), "elements of longdouble|elements of float128"),
        ([[1.0], [1.0, 2.0]], "lists of the same length"),
        (torch.eye(2).to_sparse(), "make it dense"),
        (torch.zeros(2, device="meta"), "nothing to read"),
    ],
    ids=repr,
)
def test_what_holds_no_numbers_is_refused(x: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        numbers_of(x)
