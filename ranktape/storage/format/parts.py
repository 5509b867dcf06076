"""Cuts values into the parts that are looked at one after the other, whatever their storage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

RUN = 1 << 21
"""Elements of a part of a record without samples; and of samples together, unless a single one has more."""


def split(values: np.ndarray[Any, Any], *, sample_dim: int | None) -> Iterator[np.ndarray[Any, Any]]:
    """The values in runs of `RUN` elements in C order; with samples, some of them, counted by the first dimension."""
    if not values.size:
        return
    if sample_dim is None:
        flat = np.ascontiguousarray(values).reshape(-1)
        for start in range(0, flat.size, RUN):
            yield flat[start : start + RUN]
        return
    samples = np.moveaxis(values, sample_dim, 0)
    step = max(1, RUN // math.prod(samples.shape[1:]))
    for start in range(0, len(samples), step):
        yield np.ascontiguousarray(samples[start : start + step])
