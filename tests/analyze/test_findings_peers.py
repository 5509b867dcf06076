"""Ranks, layers, samples and channels that differ from their peers, by the numbers of numpy."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]  # it has no types
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.findings import outliers
from ranktape.analyze.findings.find import find
from ranktape.analyze.findings.survey import (
    Survey,
    binades,
    group_deviations,
    group_medians,
    group_sizes,
    robust_z,
    row_codes,
)
from ranktape.analyze.findings.thresholds import NORMAL_MAD
from ranktape.analyze.legacy.open import open_source
from ranktape.analyze.questions.findings import findings
from ranktape.analyze.questions.overflow import overflow
from ranktape.analyze.questions.trend import kendall_z, sen_slope
from ranktape.storage import Run
from tests.analyze.faulty_runs import Place, Sizes, faulty_run
from tests.analyze.pt_files import legacy_file
from tests.analyze.runs import Tensor, describe_tensor, store

Array = np.ndarray[Any, Any]
NUM_RANKS, NUM_LAYERS = 5, 6


def tensor(rank: int, layer: int) -> Array:
    """Rank 3 is far from the others in layer 2, and layer 4 from the other layers."""
    values = np.random.default_rng((rank, layer)).standard_normal((4, 8, 16)).astype(np.float32)
    return values * (300 if (rank, layer) == (3, 2) else 100 if layer == 4 else 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with one rank and one layer that stand out."""
    tensors: list[Tensor] = []
    for rank in range(NUM_RANKS):
        for layer in range(NUM_LAYERS):
            values = tensor(rank, layer)
            if (rank, layer) == (1, 0):
                values[2] *= 2000
            if rank == 0:
                values[..., 5] *= 1000 if layer == 5 else 1
            tensors.append(describe_tensor(values, rank=rank, layer_idx=layer, sample_dim=0, counter=layer))
    return store(tmp_path_factory.mktemp("run"), tensors)


def rows(run: Run, kind: str, **filters: Any) -> list[dict[str, Any]]:
    """The findings of a kind as dictionaries."""
    records = run.select(**filters)
    return findings(records, kind=kind, channels=True, engine=Engine(use_cache=False)).records()


def test_a_rank(run: Run) -> None:
    found = [row for row in rows(run, "rank_differs") if row["layer_idx"] == 2]
    assert [(row["kind"], row["ranks"]) for row in found] == [("rank_differs", [3])]
    figures = {
        "absmax": np.array([np.abs(tensor(rank, 2)).max() for rank in range(NUM_RANKS)]),
        "rms": np.array([np.sqrt((tensor(rank, 2).astype(np.float64) ** 2).mean()) for rank in range(NUM_RANKS)]),
    }
    expected = figures[found[0]["metric"]]
    assert found[0]["value"] == pytest.approx(expected[3], rel=1e-2)
    assert found[0]["binades"] == pytest.approx(np.log2(expected[3]) - np.median(np.log2(expected)), abs=0.02)
    assert found[0]["expected"] == pytest.approx(np.median(expected), rel=1e-2)
    assert found[0]["deviation"] == pytest.approx(found[0]["binades"] / (1.4826 * 0.25), rel=1e-2)


def test_a_layer(run: Run) -> None:
    found = rows(run, "layer_differs")
    assert [(row["kind"], row["layer_idx"]) for row in found] == [("layer_differs", 4)]
    assert found[0]["binades"] == pytest.approx(np.log2(100), abs=1)


@pytest.mark.parametrize("factor", [2.0**10, 2.0**-10])
def test_the_records_of_a_layer_are_in_order_of_their_distance(factor: float, tmp_path: Path) -> None:
    ranks = (0.9, 1.3, 0.7, 1.1)
    tensors = [
        describe_tensor(np.full((4, 4), 1e-9 * (factor * size if layer == 3 else 1)), layer_idx=layer, rank=rank)
        for layer in range(6)
        for rank, size in enumerate(ranks)
    ]
    records = store(tmp_path / "run", tensors).select()
    (found,) = [one for one in find(records, engine=Engine(use_cache=False)) if one.kind == "layer_differs"]
    assert set(records.column("layer_idx")[list(found.places)]) == {3}
    farthest_first = sorted(range(len(ranks)), key=lambda rank: ranks[rank], reverse=factor > 1)
    assert records.column("rank")[list(found.places)].tolist() == farthest_first


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_layer_of_three(odd: int, tmp_path: Path) -> None:
    # The other two are compared with it as well, and are not what is odd.
    arrays = [np.random.default_rng(layer).standard_normal((16, 16)).astype(np.float32) for layer in range(3)]
    arrays[odd] *= 3000
    tensors = [describe_tensor(array, layer_idx=layer, counter=layer) for layer, array in enumerate(arrays)]
    found = rows(store(tmp_path / "run", tensors), "layer_differs")
    assert [row["layer_idx"] for row in found] == [odd]
    assert found[0]["binades"] == pytest.approx(np.log2(3000), abs=1)


@pytest.mark.parametrize("odd", [1e300, 1e-300, np.finfo(np.float64).max])
@pytest.mark.parametrize(("kind", "field"), [("layer_differs", "layer_idx"), ("rank_differs", "rank")])
def test_what_is_apart_by_more_than_float64_reaches(kind: str, field: str, odd: float, tmp_path: Path) -> None:
    tensors = [
        describe_tensor(np.full((4, 4), odd if place == 3 else 1 / odd), **{field: place, "counter": place})
        for place in range(7)
    ]
    (found,) = rows(store(tmp_path / "run", tensors), kind)
    assert found["binades"] == pytest.approx(2 * np.log2(odd), abs=0.01)
    assert (found["value"], found["expected"]) == pytest.approx((odd, 1 / odd), rel=1e-9)


def test_a_sample(run: Run) -> None:
    found = rows(run, "sample_outlier")
    assert [(row["layer_idx"], row["ranks"], row["sample"]) for row in found] == [(0, [1], "2")]
    peers = [np.abs(tensor(rank, 0)[sample]).max() for rank in range(NUM_RANKS) for sample in range(4)]
    assert found[0]["expected"] == pytest.approx(np.median(peers), rel=2e-2)


def test_a_sample_is_called_what_the_user_calls_it(tmp_path: Path) -> None:
    """It is elsewhere in each batch, and one outlier all the same."""
    rng = np.random.default_rng(0)
    tensors = []
    for iteration in range(2):
        names = np.roll([f"id{number}" for number in range(8)], 3 * iteration).tolist()
        values = rng.standard_normal((8, 64)).astype(np.float32)
        values[names.index("id5")] *= 4096
        tensors.append(describe_tensor(values, iteration=iteration, sample_dim=0, sample_ids=names))
    found = rows(store(tmp_path, tensors), "sample_outlier")
    assert [(row["sample"], row["records"]) for row in found] == [("id5", 2)]


def test_a_channel(run: Run) -> None:
    """One of five records is not half of them; of that rank alone it is."""
    assert rows(run, "channel_outlier") == []
    alone = rows(run, "channel_outlier", rank=0)
    assert [(row["layer_idx"], row["channel"]) for row in alone] == [(5, 5)]


def test_channels_of_many_records_are_not_held(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    survey = Survey(run.select(), engine=Engine(use_cache=False))
    held: set[int] = set()
    most = 0

    def measure(*_: Any) -> Iterator[dict[str, Array]]:
        nonlocal most
        for number in range(len(survey)):
            absmax = np.ones(1 << 10)
            absmax[7] = 1e6
            held.add(number)
            weakref.finalize(absmax, held.discard, number)
            most = max(most, len(held))
            yield {"absmax": absmax}

    monkeypatch.setattr(Engine, "measure", measure)
    whole = list(outliers.channels(survey))
    assert (most, [one.where["channel"] for one in whole]) == (len(survey), [7] * NUM_LAYERS)
    most = 0
    monkeypatch.setattr(outliers, "_MAX_PENDING_NBYTES", 4 * np.ones(1 << 10).nbytes, raising=False)
    assert list(outliers.channels(survey)) == whole
    assert most <= 6 < len(survey)


def spoil(place: Place, tensor: Array) -> Array:
    """One NaN in every tensor of every layer."""
    changed = tensor.copy()
    changed.flat[len(place[3])] = np.nan
    return changed


def test_nan_comes_first(tmp_path: Path) -> None:
    run = faulty_run(tmp_path, spoil, sizes=Sizes(iterations=(10,)))
    found = findings(run.select(), engine=Engine(use_cache=False)).records()
    assert (found[0]["kind"], found[0]["where"]) == ("nan", "layers.0.linear input on all ranks")
    assert {row["severity"] for row in found if row["kind"] == "nan"} == {"high"}


def test_a_folder_with_a_layer_of_nan(tmp_path: Path) -> None:
    """And with tensors of several trainings side by side: which of them it is is said."""
    for layer in range(4):
        for quant_type in ("bf16", "mxfp8"):
            tensor = torch.from_numpy(np.random.default_rng(layer).standard_normal((16, 16)))
            if (layer, quant_type) == (2, "mxfp8"):
                tensor[3] = torch.nan
            legacy_file(tmp_path, tensor, layer_idx=layer, counter=layer, quant_type=quant_type)
    table = findings(open_source(str(tmp_path)).select())
    assert [(row["kind"], row["severity"], row["layer_idx"]) for row in table.records()] == [("nan", "high", 2)]
    assert table.records()[0]["where"] == "layer 2 linear input (mxfp8)"
    by_layer = overflow(open_source(str(tmp_path)).select(), by=["layer_idx"]).records()
    assert [row["severity"] for row in by_layer] == ["none", "none", "high", "none"]


PAIRS = st.lists(st.tuples(st.integers(0, 3), st.floats(-50, 50, width=32)), min_size=1, max_size=30)


@settings(max_examples=40, deadline=None)
@given(PAIRS)
def test_deviations_are_those_of_scipy(pairs: list[tuple[int, float]]) -> None:
    groups = np.array([group for group, _ in pairs])
    values = np.array([value for _, value in pairs], dtype=np.float64)
    apart, mads = group_deviations(groups, values)
    scores = robust_z(apart, mads, floor=0.25)
    for group in set(groups.tolist()):
        mine = groups == group
        own = values[mine]
        mad = scipy.stats.median_abs_deviation(own)
        assert mads[mine] == pytest.approx(np.full(own.size, mad))
        expected = (own - np.median(own)) / (NORMAL_MAD * max(0.25, mad))
        assert scores[mine] == pytest.approx(expected)
        assert (group_sizes(groups)[mine] == own.size).all()


def test_the_factor_is_that_of_a_normal_distribution() -> None:
    assert pytest.approx(1 / scipy.stats.norm.ppf(0.75), abs=1e-4) == NORMAL_MAD


def test_nothing_has_no_peers() -> None:
    assert group_medians(np.zeros(0, dtype=np.int64), np.zeros(0)).size == 0


def test_codes_tell_rows_apart() -> None:
    first = np.array(["a", "b", "a", "a"], dtype=object)
    second = np.array([1.0, 1.0, np.nan, np.nan])
    assert row_codes(first, second).tolist() == [0, 2, 1, 1]


def test_binades_of_what_has_none() -> None:
    assert binades(np.array([8.0, 0.25, 0, -1, np.inf, np.nan])).tolist()[:2] == [3, -2]
    assert np.isnan(binades(np.array([0, -1, np.inf, np.nan]))).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=12, unique=True))
def test_trends_are_those_of_scipy(values: list[float]) -> None:
    times, array = np.arange(len(values)) * 10, np.array(values, dtype=np.float64)
    assert sen_slope(times, array) == pytest.approx(scipy.stats.theilslopes(array, times)[0])
    tau = scipy.stats.kendalltau(times, array).statistic
    assert np.sign(kendall_z(array)) in {0, np.sign(tau)}
    count = len(values)
    total = tau * count * (count - 1) / 2
    spread = (count * (count - 1) * (2 * count + 5) / 18) ** 0.5
    assert abs(kendall_z(array)) == pytest.approx(max(0.0, abs(total) - 1) / spread)
