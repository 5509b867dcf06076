"""The removal of a complete iteration, so that nobody takes what is left of it for the whole.

First it is written down that it is removed on purpose; from then on nobody makes its commit anew. Then goes the
commit, so that no reader that opens the run sees it; then the data. What a crash interrupts is finished later.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ranktape.storage.format import layout
from ranktape.storage.format.attempt import check_attempt
from ranktape.storage.format.group_documents import read_attributes, write_group

if TYPE_CHECKING:
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.places.backend import Backend

_NUM_THREADS = 16
"""Ranks whose data are removed at once."""


def drop_iteration(backend: Backend, *, attempt: Attempt, iteration: int) -> None:
    """Remove a complete iteration; its state is `dropped` then. Can be repeated.

    Raises:
        StorageError: the run was deleted or replaced, or the store cannot be written.
    """
    check_attempt(backend, attempt)
    path = layout.dropped_path(attempt.path, iteration)
    words = {"dropped": time.time(), "removed": False}
    write_group(backend, path, words)
    backend.flush()
    commit = layout.iteration_path(attempt.path, iteration)
    backend.delete_keys([layout.document_key(commit)])
    ranks = attempt.launch.ranks
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        removals = [
            pool.submit(backend.delete, layout.rank_iteration_path(attempt.path, rank, iteration)) for rank in ranks
        ]
    for removal in removals:
        removal.result()
    backend.delete(commit)
    backend.delete(layout.opened_path(attempt.path, iteration))
    write_group(backend, path, {**words, "removed": True})


def finish_drops(backend: Backend, *, attempt: Attempt) -> None:
    """Remove what is left of the iterations whose removal was interrupted.

    Raises:
        StorageError: the run was deleted or replaced, or the store cannot be written.
    """
    for key in backend.list_keys(f"{attempt.path}/dropped"):
        iteration = layout.parse_iteration(key)
        if iteration is None:
            continue
        words = read_attributes(backend, layout.dropped_path(attempt.path, iteration))
        if words is not None and not words.get("removed"):
            drop_iteration(backend, attempt=attempt, iteration=iteration)
