"""How is work on a large tensor shared among threads, so that its results do not depend on how many there are?"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ranktape.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_THREADS = 16
"""More threads than this read memory no faster."""


def num_threads(threads: int | None) -> int:
    """`threads`, or for None the cores that this process may use, 16 at most.

    Raises:
        UsageError: it is less than 1.
    """
    if threads is None:
        is_known = hasattr(os, "sched_getaffinity")
        return min(MAX_THREADS, len(os.sched_getaffinity(0)) if is_known else os.cpu_count() or 1)
    if threads < 1:
        raise UsageError(f"threads={threads} is not a number of threads: give 1 or more, or None for one on each core")
    return threads


def each(work: Callable[[Item], Result], items: Sequence[Item], *, threads: int | None) -> list[Result]:
    """What `work` gives for each item, in the order of the items; the work must release the GIL to take less time.

    No thread is started where one is enough.

    Raises:
        UsageError: `threads` is less than 1; or whatever the work raises first, in the order of the items.
    """
    count = min(num_threads(threads), len(items))
    if count <= 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, items))
