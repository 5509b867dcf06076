"""Some records of a run are copied into a run of their own, whose commits say how many were left out, and why."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.errors import NoRecordsError
from ranktape.storage.format.attempt import Launch, read_attempts
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.progress import open_iteration, write_verdict
from ranktape.storage.recording.start import begin_attempt, claim_run
from ranktape.storage.recording.writer import RankWriter

if TYPE_CHECKING:
    from ranktape.storage.places.backend import Backend
    from ranktape.storage.places.retry import RetryingBackend
    from ranktape.storage.records.records import Records
    from ranktape.storage.records.run import Run

LEFT_OUT = "(other records)"
"""Stands for what was left out where a commit says what it does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionReport:
    """What a copy of some records did."""

    num_records: int
    """Records copied."""
    nbytes: int
    """Bytes of what is kept of them."""
    num_left_out: int
    """Other records of the iterations that were copied."""
    iterations: tuple[int, ...]
    """The iterations that were copied, ascending; of others nothing is in the copy."""


def copy_records(
    source: Backend,
    target: RetryingBackend,
    *,
    run: Run,
    records: Records,
    filters: str,
    on_progress: Callable[[int, int], object] | None = None,
) -> SelectionReport:
    """Copy records of a run into a new run of one attempt, with the ranks and iterations that they had.

    An iteration of the copy is complete when all records of it that were selected are there; each rank's commit says
    how many others the source has, and the filters. Values are compared with their checksums when they are read.

    Args:
        source: Where the run is.
        target: Where the copy is to be: nothing may be there.
        run: The run.
        records: A selection of it.
        filters: What selected them, in words, for the commits.
        on_progress: Called with the number of records copied and of all.

    Raises:
        DataError: a record's values are damaged.
        NoRecordsError: there is none.
        RunExistsError: something is at the target.
        StorageError: one of the stores cannot be read or written.
    """
    if not len(records):
        raise NoRecordsError(f"no record of {run.url} fits {filters}: nothing is copied")
    iterations = tuple(sorted({int(one) for one in records.column("iteration")}))
    size = max(attempt.launch.world_size for attempt in read_attempts(source))
    launch = Launch(launch_id=f"copy-{uuid.uuid4().hex}", restart=0, world_size=size)
    options = {"min_iterations": len(iterations), "copied_from": run.url, "filters": filters}
    num_done = num_left_out = 0
    with claim_run(target, launch=launch, resume=False, overwrite=False):
        environment = run.attributes.get("environment") or {}
        attempt = begin_attempt(
            target, launch=launch, options=options, environment=environment, resume=False, overwrite=False
        )
        writers = [RankWriter(target, attempt=attempt, rank=rank, environment={}) for rank in range(size)]
        for iteration in iterations:
            open_iteration(target, attempt=attempt, iteration=iteration)
            chosen, everything = records.select(iteration=iteration), run.select(iteration=iteration)
            for rank, writer in enumerate(writers):
                own = chosen.select(rank=rank)
                for record in own:
                    values = records.reader.read(record, sample=None)
                    writer.write(values, info=dataclasses.replace(record.info, attempt=attempt.number))
                    num_done += 1
                    if on_progress is not None:
                        on_progress(num_done, len(records))
                rest = len(everything.select(rank=rank)) - len(own)
                reason = f"{rest} records were left out of the copy: {filters}"
                writer.commit(iteration, expected=[], silent_sites={LEFT_OUT: reason} if rest else {})
                num_left_out += rest
            finish_iteration(target, attempt=attempt, iteration=iteration)
        for writer in writers:
            writer.close(reason="everything was copied")
        write_verdict(target, attempt=attempt)
    return SelectionReport(
        num_records=len(records),
        nbytes=int(records.column("nbytes").sum()),
        num_left_out=num_left_out,
        iterations=iterations,
    )
