"""What do the tests of comparisons compare, and what does numpy say of it?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from ranktape.analyze.table import Table
from tests.analyze.runs import Tensor

Array = np.ndarray[Any, Any]


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    """Values of a normal distribution."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def changed(tensors_of: Sequence[Tensor], *, seed: int, by: float) -> list[Tensor]:
    """The same tensors with noise of that size, relative to each value, and the same identities."""
    rng = np.random.default_rng(seed)
    return [
        ((array.astype(np.float64) * (1 + by * rng.standard_normal(array.shape))).astype(array.dtype), info)
        for array, info in tensors_of
    ]


def relative(a: Array, b: Array) -> float:
    """The norm of a - b over the norm of a, as far as two ways to add up agree."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    return cast("float", pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-13))


def rows(table: Table, *names: str) -> list[tuple[Any, ...]]:
    """Some columns of a table, by row."""
    return list(zip(*(table.column(name) for name in names), strict=True))
