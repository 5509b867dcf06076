"""Who does the work of a question: this process, several of this machine, or a Dask cluster?

Whatever the number of workers, results come in the order of what was asked for, and are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ranktape.analyze.engine.measure import Measure, Payload
    from ranktape.storage import Records

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Where questions are answered."""

    workers: int = 1
    """Processes of this machine that read and count; 1 is this process alone."""
    scheduler: str | None = None
    """Address of a Dask scheduler, whose workers take the place of processes of this machine."""
    use_cache: bool = True
    """Whether measurements are kept beside the run, and taken from there."""
    show_progress: bool = False
    """Whether a bar on a terminal's stderr shows bytes, rate and the time left."""

    def measure(self, records: Records, measure: Measure) -> Iterator[Payload]:
        """What a measure finds in each record, in their order; what is known already is not read again.

        Raises:
            DataError: a record's bytes are missing or damaged.
            StorageError: the store cannot be read.
            UsageError: what was kept of a record does not answer the question.
        """
        for record in records:
            yield measure(record)

    def map(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], *, sizes: Sequence[int] | None = None
    ) -> Iterator[Result]:
        """What a function makes of each task, in their order; both can be pickled. `sizes` are bytes that each reads.

        Raises:
            RanktapeError: what the function raises.
        """
        for task, _ in zip(tasks, sizes or tasks, strict=True):
            yield function(task)
