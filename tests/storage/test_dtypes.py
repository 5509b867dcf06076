"""Is every element type the same one in torch, numpy and our table?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import DTYPES, DtypeRow, dtype_name, dtype_row, numpy_dtype
from tests.strategies import WITHOUT_TORCH, arrays, dtype_names, element_bits, raw_bytes, special_patterns

ROWS = [pytest.param(row, id=row.name) for row in DTYPES.values()]


@pytest.mark.parametrize("row", ROWS)
def test_what_numpy_cannot_name_by_itself_comes_from_ml_dtypes(row: DtypeRow) -> None:
    assert row.is_ml_dtype == (row.numpy_dtype.type.__module__ == "ml_dtypes")
    assert row.is_ml_dtype == row.name.startswith(("bfloat", "float8_", "float6_", "float4_"))


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_one_name_everywhere(row: DtypeRow) -> None:
    assert DTYPES[row.name] is row
    assert row.name == row.numpy_dtype.name
    assert numpy_dtype(row.name) == row.numpy_dtype
    assert dtype_name(row.numpy_dtype) == row.name
    assert dtype_row(row.name) is row


@pytest.mark.parametrize("row", ROWS)
def test_the_fill_value_is_the_element_whose_bits_are_0(row: DtypeRow) -> None:
    if isinstance(row.fill_value, str):
        assert int(row.fill_value, 16) == 0
        return
    value = complex(*row.fill_value) if isinstance(row.fill_value, list) else row.fill_value
    assert raw_bytes(np.array(value).astype(row.numpy_dtype)) == bytes(row.itemsize)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_agrees_with_torch(row: DtypeRow) -> None:
    torch = pytest.importorskip("torch")
    theirs = getattr(torch, row.name, None)
    if row.name in WITHOUT_TORCH:
        assert theirs is None
        return
    assert theirs is not None
    assert (theirs.itemsize, theirs.is_floating_point, theirs.is_complex) == (
        row.itemsize,
        row.is_floating,
        row.is_complex,
    )
    if row.is_floating:
        codes = np.arange(256 ** min(row.itemsize, 2)).astype(f"<u{row.itemsize}")
        values = torch.from_numpy(codes).view(theirs).to(torch.float64).numpy()
        np.testing.assert_array_equal(values, as_numbers(codes.view(row.numpy_dtype)))


def as_numbers(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    # numpy warns of signalling NaNs.
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


def names_in_torch(torch: object) -> set[str]:
    return {name for name in dir(torch) if type(getattr(torch, name)).__name__ == "dtype"}


def test_what_torch_can_hold_is_in_the_table() -> None:
    torch = pytest.importorskip("torch")
    real = {str(getattr(torch, name)).removeprefix("torch.") for name in names_in_torch(torch)}
    # Half complex, sub-byte integers, and codes of torch's own quantisation are refused by name at capture.
    left_out = {name for name in real if name.startswith(("bits", "q", "complex32", "float4"))}
    left_out |= {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)} | {"bit", "bcomplex32"}
    assert real - left_out <= set(DTYPES)


@pytest.mark.parametrize("name", ["", "float", "torch.float32", "int4", "float4_e2m1fn_x2"])
def test_an_unknown_name_is_refused_with_the_allowed_ones(name: str) -> None:
    with pytest.raises(
        UsageError, match=f"dtype '{name}' cannot be stored: use one of float64, float32, .*float4_e2m1fn"
    ):
        numpy_dtype(name)


@pytest.mark.parametrize(
    "dtype", [np.dtype("U3"), np.dtype("O"), np.dtype("M8[s]"), np.dtype([("a", "<f4")]), np.dtype("V2")]
)
def test_an_unknown_numpy_dtype_is_refused(dtype: np.dtype[np.generic]) -> None:
    with pytest.raises(UsageError, match="cannot be stored: use one of float64"):
        dtype_name(dtype)


def test_big_endian_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"'>f4' is big-endian .* \.astype\('<f4'\)"):
        dtype_name(np.dtype(">f4"))


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in DTYPES.values() if row.is_floating])
def test_special_patterns_hold_what_breaks_things(row: DtypeRow) -> None:
    bits = special_patterns(row.name)
    values = as_numbers(np.array(bits, dtype=f"<u{row.itemsize}").view(row.numpy_dtype))
    expected_nans = 0 if element_bits(row) < 8 else 1
    assert np.isnan(values).sum() >= expected_nans
    if row.name != "float8_e8m0fnu":
        assert (values == 0).any()


@given(array=arrays(), data=st.data())
def test_drawn_arrays_are_what_they_say(array: np.ndarray[Any, Any], data: st.DataObject) -> None:
    assert dtype_name(array.dtype) in DTYPES
    name = data.draw(dtype_names())
    shape = data.draw(st.sampled_from([(), (0,), (2, 3)]))
    drawn = data.draw(arrays(name=name, shape=shape))
    assert (dtype_name(drawn.dtype), drawn.shape) == (name, shape)
    assert len(raw_bytes(drawn)) == drawn.nbytes
