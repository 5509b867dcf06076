"""Marks what `make test-all` runs and `make test` does not: what is long, and seldom fails where its sample passes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

MANY_COMBINATIONS = 16


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


def exhaustive_but(*kept: str, reason: str) -> pytest.MarkDecorator:
    """The mark of all combinations of a test's parameters but those with these ids, with why they are enough."""
    return pytest.mark.exhaustive_but(*kept, reason=reason)


def mark_others(items: Iterable[pytest.Item], *, are_all: bool) -> None:
    """Mark what `exhaustive_but` does not keep; where `are_all` cases are there, it is an error that none is kept."""
    cases = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("exhaustive_but"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, alike in cases.items():
        mark = alike[0].get_closest_marker("exhaustive_but")
        assert mark is not None
        others = [item for item in alike if item.callspec.id not in mark.args]
        if are_all and len(others) == len(alike):
            raise pytest.UsageError(f"{name}: exhaustive_but keeps {mark.args}, which none of its cases is")
        for item in others:
            item.add_marker(exhaustive(mark.kwargs["reason"]))


def mark_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark of a test with many combinations of parameters those without which each value is in one of the others."""
    combinations = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("alone"):
            combinations[item.nodeid.partition("[")[0]].append(item)
    for alike in combinations.values():
        if len(alike) < MANY_COMBINATIONS:
            continue
        met: set[tuple[str, int]] = set()
        for item in random.Random(0).sample(alike, len(alike)):  # noqa: S311  (the same each time)
            values = {(name, id(value)) for name, value in item.callspec.params.items()}
            if values <= met:
                item.add_marker(exhaustive("each value of each parameter is in make test"))
            met |= values
