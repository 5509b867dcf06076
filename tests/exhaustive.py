"""Marks what `make test-all` runs and `make test` does not: what is long, and seldom fails where its sample passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest


def exhaustive(reason: str) -> pytest.MarkDecorator:
    """The mark, with why `make test` is enough without it."""
    return pytest.mark.exhaustive(reason)


def sampled(cases: Iterable[Any], *, keep: int, reason: str = "a sample of these cases is in make test") -> list[Any]:
    """Parameters of which `make test` runs some, the same each time, and `make test-all` the others."""
    params = [case if hasattr(case, "marks") else pytest.param(case) for case in cases]
    kept = set(np.random.default_rng(0).permutation(len(params))[:keep].tolist())
    return [
        param if at in kept else param._replace(marks=(*param.marks, exhaustive(reason)))
        for at, param in enumerate(params)
    ]
