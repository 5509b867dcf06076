"""Which values are judged: those seen, or those computed with?"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from ranktape.analyze.engine.values import View, read_values, viewed_dtype
from tests.analyze.runs import describe_tensor, store


def test_what_is_judged_as_computed() -> None:
    cases: list[tuple[str, str, str]] = [
        ("float32", "bfloat16", "bfloat16"),
        ("float32", "float16", "float16"),
        ("float16", "bfloat16", "bfloat16"),
        ("bfloat16", "float16", "float16"),
        # Wider types hold the same values.
        ("bfloat16", "float32", "bfloat16"),
        ("float16", "float32", "float16"),
        ("float32", "float32", "float32"),
        # Its smallest value, 2**-127, is subnormal in bfloat16.
        ("float8_e8m0fnu", "bfloat16", "float8_e8m0fnu"),
        ("float8_e8m0fnu", "float16", "float16"),
        # No rounding is known for these.
        ("int64", "bfloat16", "int64"),
        ("float32", "tf32", "float32"),
        ("complex64", "bfloat16", "complex64"),
    ]
    for dtype, compute_dtype, expected in cases:
        assert viewed_dtype(dtype=dtype, compute_dtype=compute_dtype, view=View.COMPUTE) == expected
        assert viewed_dtype(dtype=dtype, compute_dtype=compute_dtype, view=View.SEEN) == dtype


def test_values_are_rounded_as_the_operation_rounded_them(tmp_path: Path) -> None:
    values = np.array([1.0, 1 + 2**-9, 1 + 3 * 2**-8, 3.4e38, np.nan, -np.inf], dtype=np.float32)
    (record,) = store(tmp_path, [describe_tensor(values, compute_dtype="bfloat16")]).select()
    seen, computed = (read_values(record, view=view) for view in (View.SEEN, View.COMPUTE))
    assert seen.dtype == np.float32
    assert computed.dtype == ml_dtypes.bfloat16
    expected = [1.0, 1.0, 1 + 2**-6, np.inf, np.nan, -np.inf]
    assert np.array_equal(computed.astype(np.float64), expected, equal_nan=True)
