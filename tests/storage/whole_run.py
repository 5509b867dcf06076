"""How does a test get a run that is whole, with every kind of object in it?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ranktape.storage.format.attempt import Attempt
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.documents import encode_document
from ranktape.storage.format.progress import open_iteration, write_verdict
from ranktape.storage.format.record_info import RecordInfo
from ranktape.storage.places.backend import Backend
from ranktape.storage.recording.writer import RankWriter
from tests.runs import describe, start

LONG_NAME = "module." * 40
"""A site whose path has several segments."""


def tensors(iteration: int, rank: int) -> Iterator[tuple[np.ndarray[Any, Any], RecordInfo]]:
    """A stack of three, a sharded one, one without values, and a small one alone under a long name."""
    place = {"iteration": iteration, "rank": rank}
    for number in range(3):
        array = np.full((4, 4), 100 * iteration + 10 * rank + number, np.float32)
        yield array, describe(array, **place, module=f"layers.{number}", counter=number)
    large = np.arange(2 * 140_000, dtype=np.float32).reshape(2, 140_000) + iteration + rank
    yield large, describe(large, **place, module="large", sample_dim=0, counter=3)
    empty = np.empty((0, 4), np.float32)
    yield empty, describe(empty, **place, module="empty", counter=4)
    alone = np.full(7, iteration + rank, np.float16)
    yield alone, describe(alone, **place, module=LONG_NAME, counter=5)


def record(
    backend: Backend,
    attempt: Attempt,
    writers: Sequence[RankWriter],
    *,
    iteration: int,
    finish: bool = True,
    cut_off: str = "",
) -> None:
    """One iteration of all given ranks; rank 1 may say why it was cut off."""
    open_iteration(backend, attempt=attempt, iteration=iteration)
    for rank, writer in enumerate(writers):
        for array, info in tensors(iteration, rank):
            writer.write(array, info=info)
        silent_sites = {"a site": "no gradient"} if rank == 1 else {}
        writer.commit(iteration, expected=[], silent_sites=silent_sites, cut_off=cut_off if rank == 1 else "")
    if finish:
        finish_iteration(backend, attempt=attempt, iteration=iteration)


def whole_run(
    url: str | Path, *, iterations: Sequence[int] = (0, 10), close: bool = True, **options: Any
) -> tuple[Backend, Attempt, list[RankWriter]]:
    """A run of two ranks, closed unless told otherwise."""
    backend, attempt, writers = start(url, world_size=2, **options)
    for iteration in iterations:
        record(backend, attempt, writers, iteration=iteration)
    if close:
        for writer in writers:
            writer.close(reason="the training ended")
        write_verdict(backend, attempt=attempt)
    return backend, attempt, writers


def keys_of(path: Path, pattern: str) -> list[str]:
    """Objects of a run by a pattern below it."""
    found = sorted(str(one.relative_to(path)) for one in path.glob(pattern) if one.is_file())
    assert found, pattern
    return found


def forge(path: Path, key: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a document of a run, with a checksum that is right: whoever writes it can compute one."""
    document = json.loads((path / key).read_bytes())
    document["attributes"].pop("ranktape_checksum", None)
    change(document)
    (path / key).write_bytes(encode_document(document, key=key))


def put_in(tree: Any, way: Sequence[str | int], value: Any) -> None:
    """Replace the value in a document to which the names lead."""
    for name in way[:-1]:
        tree = tree[name]
    tree[way[-1]] = value
