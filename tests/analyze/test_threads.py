"""Is work shared among threads without a trace of how many there were?"""

from __future__ import annotations

import os
import threading

import pytest

from ranktape.analyze.numerics.pieces import MAX_THREADS, each, num_threads
from ranktape.errors import UsageError


@pytest.mark.parametrize("threads", [1, 2, 7, None])
def test_results_are_in_the_order_of_the_items(threads: int | None) -> None:
    assert each(lambda item: item * item, range(20), threads=threads) == [item * item for item in range(20)]
    assert each(str, [], threads=threads) == []


def test_two_threads_work_at_once_and_one_is_the_callers_own() -> None:
    both = threading.Barrier(2, timeout=20)
    assert sorted(each(lambda _: both.wait(), [0, 1], threads=2)) == [0, 1]
    assert each(lambda _: threading.get_ident(), [0, 1], threads=1) == [threading.get_ident()] * 2
    assert each(lambda _: threading.get_ident(), [0], threads=8) == [threading.get_ident()]


def test_what_the_work_raises_is_raised() -> None:
    def fail(item: int) -> None:
        raise KeyError(item)

    with pytest.raises(KeyError, match="0"):
        each(fail, range(5), threads=3)


def test_there_are_as_many_threads_as_cores_unless_they_are_named() -> None:
    assert num_threads(3) == 3
    assert 1 <= num_threads(None) <= min(MAX_THREADS, os.cpu_count() or 1)
    with pytest.raises(UsageError, match=r"threads=0 is not a number of threads: give 1 or more, or None"):
        num_threads(0)
