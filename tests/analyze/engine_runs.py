"""What do tests of the engine measure, and of which runs? Importable by worker processes: no torch, nothing heavy."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ranktape.analyze.engine.cache import Columns, Payload
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.numerics.digest import Digest
from ranktape.analyze.numerics.pieces import num_threads
from ranktape.errors import DataError
from ranktape.storage import Record, Run, open_run
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.progress import open_iteration
from ranktape.storage.format.record_info import Compression
from ranktape.storage.recording.writer import RankWriter
from tests.analyze.runs import Tensor
from tests.runs import start


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstValue:
    """Measures the first value of a record, and leaves a file with the record's name for each that it reads."""

    trace: Path
    """Where."""
    fails_at: int = -1
    """Layer at which it does not go on."""
    seconds: float = 0.0
    """How long it takes over each."""

    @property
    def name(self) -> str:
        """What the cache knows it by."""
        return "first_value"

    def __call__(self, records: Iterable[Record], /) -> Columns:
        """The first value of each record, and the layer."""
        return Columns.of_payloads([self._payload(record) for record in records])

    def _payload(self, record: Record) -> Payload:
        if record.layer_idx == self.fails_at:
            raise DataError(f"layer {record.layer_idx} is damaged")
        time.sleep(self.seconds)
        values = record.read().reshape(-1).astype(np.float64)
        (self.trace / f"{record.rank}-{record.layer_idx}-{time.monotonic_ns()}").touch()
        return {"first": values[:1], "layer": np.array(record.layer_idx)}

    def num_read(self) -> int:
        """How many records were read, from all processes."""
        return len(list(self.trace.iterdir()))


def threads_there(_: object) -> tuple[int, str | None]:
    """How many threads this process uses where nobody says it, and torch as soon as it is imported."""
    return num_threads(None), os.environ.get("OMP_NUM_THREADS")


def is_torch_there(_: object) -> bool:
    """Whether this process has imported torch."""
    return "torch" in sys.modules


def square(number: int) -> int:
    """Something to be worked out."""
    return number * number


def square_all(numbers: list[int]) -> list[int]:
    """Something that asks for workers itself."""
    return list(Engine(workers=2).map(square, numbers))


def die(_: object) -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def store_as(
    folder: Path | str,
    tensors: Sequence[Tensor],
    *,
    compression: Compression = Compression.NONE,
    is_stacked: bool = False,
) -> Run:
    """A run of one rank and iteration, its arrays stored in one way or another."""
    backend, attempt, _ = start(str(folder))
    stack_below = 1 << 40 if is_stacked else 0
    writer = RankWriter(
        backend, attempt=attempt, rank=0, environment={}, compression=compression.value, stack_below_nbytes=stack_below
    )
    open_iteration(backend, attempt=attempt, iteration=0)
    for array, info in tensors:
        writer.write(array, info=info)
    writer.commit(0, expected=[], silent_sites={})
    finish_iteration(backend, attempt=attempt, iteration=0)
    return open_run(folder)


def assert_same_digests(ours: Sequence[Digest], others: Sequence[Digest]) -> None:
    """That digests are the same to the last bit."""
    assert len(ours) == len(others)
    for one, other in zip(ours, others, strict=True):
        assert _bits(one) == _bits(other)


def _bits(digest: Digest) -> list[Any]:
    samples = None if digest.samples is None else [column.tobytes() for column in digest.samples.values()]
    arrays = digest.values.tobytes(), digest.counts.tobytes(), digest.statistics.to_vector().tobytes()
    return [digest.dtype, repr(digest.tallies), *arrays, digest.is_exact, digest.has_values, samples]
