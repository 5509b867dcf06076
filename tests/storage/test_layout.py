"""Do keys and what they stand for agree in both directions?"""

from __future__ import annotations

import pytest

from ranktape.storage.format import layout
from ranktape.storage.format.layout import Mark, Marker

ATTEMPT = layout.attempt_path(1000, token="1f3a9c2e")


def test_markers_come_back_from_their_keys() -> None:
    for mark in Mark:
        key = layout.document_key(layout.marker_path(ATTEMPT, 1234, 3, mark))
        below = key.removeprefix(layout.commits_path(ATTEMPT) + "/")
        assert layout.parse_marker(below) == Marker(iteration=1234, rank=3, mark=mark)


def test_iterations_attempts_and_closings_come_back_from_their_keys() -> None:
    assert (
        layout.parse_iteration(layout.document_key(layout.iteration_path(ATTEMPT, 7)).partition("iterations/")[2]) == 7
    )
    assert layout.parse_attempt(layout.attempt_path(12, token="0f")) == 12
    assert (
        layout.parse_closed(layout.document_key(layout.closed_path(ATTEMPT, 99_999)).partition("closed/")[2]) == 99_999
    )


def test_keys_grow_beyond_their_padding() -> None:
    key = layout.document_key(layout.marker_path(ATTEMPT, 10**9, 10**6, Mark.COMMITTED))
    below = key.removeprefix(layout.commits_path(ATTEMPT) + "/")
    assert layout.parse_marker(below) == Marker(iteration=10**9, rank=10**6, mark=Mark.COMMITTED)


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
    assert layout.parse_iteration("iter_00000007/zarr.json") == 7
    assert layout.parse_iteration(f"iter_{step}/zarr.json") is None
    assert layout.parse_marker(f"iter_{step}/rank_00003.committed/zarr.json") is None
    assert layout.parse_marker(f"iter_00000007/rank_{step}.committed/zarr.json") is None
    assert layout.parse_closed(f"rank_{step}/zarr.json") is None
    assert layout.parse_attempt(f"attempt_{step}-0f") is None


def test_the_greatest_numbers_come_back() -> None:
    assert layout.parse_iteration(f"iter_{10**18 - 1}/zarr.json") == 10**18 - 1
    assert layout.parse_closed(f"rank_{10**9 - 1}/zarr.json") == 10**9 - 1


def test_other_keys_are_passed_over() -> None:
    for key in (
        "zarr.json",
        "iter_1/c.0",
        "iter_1/rank_2/zarr.json",
        "iter_1/rank_2.lost/zarr.json",
        "rank_1.committed",
    ):
        assert layout.parse_marker(key) is None
    assert layout.parse_iteration("iter_1/c.0") is None
    assert layout.parse_attempt("attempt_") is None
    assert layout.parse_attempt("attempt_0-UPPER") is None
    assert layout.parse_attempt("control") is None
