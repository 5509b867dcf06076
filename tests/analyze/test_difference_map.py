"""Does a map show where two tensors differ, and do points stand for all of their elements?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ranktape.analyze.comparison.map import difference_map, sample_pairs
from ranktape.analyze.questions.compare import compare_map
from ranktape.errors import UsageError
from tests.analyze.compared import normal
from tests.analyze.runs import describe_tensor, store


def test_a_map_finds_the_token_and_the_channel(tmp_path: Path) -> None:
    x = normal(2, 3, 700, 8)
    y = x + np.float32(1e-3)
    y[1, 2, 650, 5] += 7
    a, b = (
        store(tmp_path / name, [describe_tensor(array, layout="BHTD", sample_dim=0)]).select()
        for name, array in (("a", x), ("b", y))
    )
    found = compare_map(a, b, max_bins=100)
    assert (found.token_dims, found.channel_dims, found.values.shape) == ((0, 2), (1, 3), (100, 24))
    apart = np.abs(x.astype(np.float64) - y).transpose(0, 2, 1, 3).reshape(1400, 24)
    for row in range(100):
        first, last = found.token_edges[row : row + 2]
        assert np.array_equal(found.values[row], apart[first:last].max(axis=0))
    worst = found.to_table().records()[0]
    assert worst["token_first"] <= 700 + 650 <= worst["token_last"]
    assert (worst["channel_first"], worst["max_abs"]) == (2 * 8 + 5, apart.max())
    found.save(tmp_path / "map.npz")
    with np.load(tmp_path / "map.npz") as saved:
        assert np.array_equal(saved["values"], found.values)
    for shape, size in (((), (1, 1)), ((5,), (1, 5)), ((0, 4), (0, 4)), ((4, 0), (4, 0))):
        one = store(tmp_path / f"s{len(shape)}{size}", [describe_tensor(np.ones(shape))]).select()[0]
        assert difference_map(one, one).values.tolist() == np.zeros(size).tolist()


def test_sampled_pairs_are_spread_and_the_same_each_time(tmp_path: Path) -> None:
    x = normal(100, 100)
    a, b = (store(tmp_path / name, [describe_tensor(array)]).select()[0] for name, array in (("a", x), ("b", 2 * x)))
    points = sample_pairs(a, b, count=999)
    assert np.array_equal(points.b, 2 * points.a)
    assert np.array_equal(points.a, x.reshape(-1)[points.places])
    assert (np.diff(points.places) > 0).all()
    assert np.bincount(points.places // 1000, minlength=10).min() > 90
    assert np.array_equal(points.places, sample_pairs(a, b, count=999).places)
    assert sample_pairs(a, b, count=0).a.size == 0
    assert sample_pairs(a, b, count=10**6).a.size == 10_000
    with pytest.raises(UsageError, match="count=-1 is not allowed"):
        sample_pairs(a, b, count=-1)
