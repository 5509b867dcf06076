"""Do keys and what they stand for agree in both directions?"""

from __future__ import annotations

import pytest

from ranktape.storage.format import layout
from ranktape.storage.format.layout import AttemptKey, KeyKind, Mark

ATTEMPT = layout.attempt_path(1000, token="1f3a9c2e")

PATHS = {
    layout.rank_path(ATTEMPT, 99_999): AttemptKey(KeyKind.RANK, rank=99_999),
    layout.rank_iteration_path(ATTEMPT, 3, 7): AttemptKey(KeyKind.RANK_COMMIT, 7, 3),
    layout.catalogue_path(ATTEMPT, 3, 7): AttemptKey(KeyKind.MEMBER, 7, 3),
    layout.opened_path(ATTEMPT, 10**18 - 1): AttemptKey(KeyKind.OPENED, 10**18 - 1),
    layout.iteration_path(ATTEMPT, 7): AttemptKey(KeyKind.ITERATION_COMMIT, 7),
    layout.closed_path(ATTEMPT, 10**9 - 1): AttemptKey(KeyKind.CLOSED, rank=10**9 - 1),
    layout.dropped_path(ATTEMPT, 7): AttemptKey(KeyKind.DROPPED, 7),
    layout.plan_path(ATTEMPT): AttemptKey(KeyKind.PLAN),
    layout.verdict_path(ATTEMPT): AttemptKey(KeyKind.VERDICT),
    ATTEMPT: AttemptKey(KeyKind.ATTEMPT),
    **{f"{ATTEMPT}/{group}": AttemptKey(KeyKind.GROUP) for group in layout.ATTEMPT_GROUPS},
    **{
        layout.marker_path(ATTEMPT, 10**9, 10**6, mark): AttemptKey(KeyKind.MARKER, 10**9, 10**6, mark) for mark in Mark
    },
}


def below(path: str) -> str:
    return layout.document_key(path).removeprefix(f"{ATTEMPT}/")


@pytest.mark.parametrize("path", PATHS)
def test_what_lies_at_a_key_comes_back_from_it(path: str) -> None:
    assert layout.parse_key(below(path)) == PATHS[path]


def test_names_come_back() -> None:
    assert layout.iterations_named(["iter_00000007", "iter_7", "c.0"]) == {7}
    assert layout.iterations_of(["iter_00000007/zarr.json", "iter_00000008/c.0", "zarr.json"]) == {7}
    assert layout.ranks_named(["rank_00003", "rank_3"]) == {3}
    assert layout.parse_attempt(layout.attempt_path(12, token="0f")) == 12
    assert layout.parse_lease(layout.lease_path(12)) == 12


@pytest.mark.parametrize(
    "step",
    [
        "00000\u0663\u0661\u0662",
        "\uff11" * 8,
        "7",
        "000000007",
        "99999999999999999999",
        "-0000007",
        "1_000_000",
        "0000 007",
    ],
)
def test_numbers_are_spelled_in_one_way_and_fit_64_bits(step: str) -> None:
    assert layout.parse_key(f"iterations/iter_{step}/zarr.json") is None
    assert layout.parse_key(f"commits/iter_{step}/rank_00003.committed/zarr.json") is None
    assert layout.parse_key(f"commits/iter_00000007/rank_{step}.committed/zarr.json") is None
    assert layout.parse_key(f"rank_{step}/zarr.json") is None
    assert layout.parse_attempt(f"attempt_{step}-0f") is None


@pytest.mark.parametrize(
    "key",
    [
        "iterations/iter_00000001/c.1",
        "commits/iter_00000001/rank_00002/zarr.json",
        "commits/iter_00000001/rank_00002.lost/zarr.json",
        "rank_00001.committed/zarr.json",
        "rank_00001/other/zarr.json",
        "other/zarr.json",
        "plan/c.0",
    ],
)
def test_other_keys_are_passed_over(key: str) -> None:
    assert layout.parse_key(key) is None


@pytest.mark.parametrize("name", ["attempt_", "attempt_0-UPPER", "control", "lease_1"])
def test_other_names_are_passed_over(name: str) -> None:
    assert layout.parse_attempt(name) is None
    assert layout.parse_lease(name) is None
