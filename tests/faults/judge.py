"""Is a run in order whose writers were killed?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ranktape.errors import RanktapeError, RunNotFoundError
from ranktape.storage import open_run
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.finding import FindingKind, Repair
from ranktape.storage.maintenance.repair import repair_run
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.urls import open_backend
from tests.faults.truth import NUM_RANKS, tensors
from tests.strategies import raw_bytes

RANKS = range(NUM_RANKS)
NUM_TENSORS = len(tensors(0, 0))


def problems(
    url: str, *, promised: set[tuple[int, int]], storage_options: Mapping[str, Any] | None = None
) -> list[str]:
    """What is wrong with a run whose writers were killed; nothing is the only right answer.

    Args:
        url: Where it is.
        promised: Pairs of rank and iteration that must be committed, whatever happened afterwards.
        storage_options: For the backend.
    """
    backend = open_backend(url, storage_options=storage_options)
    if not backend.exists("zarr.json"):
        return [f"promised, and there is no run: {sorted(promised)}"] if promised else []
    found = _wrong_values(url, storage_options=storage_options)
    stored = _Stored.of(backend)
    found += [f"rank {rank} had committed iteration {step}" for rank, step in sorted(promised - stored.marked)]
    found += _misjudged(backend, stored)
    repair_run(backend, dry_run=False, min_age_seconds=0.0)
    found += [
        f"after repair: {finding.text()}"
        for finding in check_run(backend, deep=True).findings
        if finding.kind is not FindingKind.UNFINISHED
    ]
    found += [f"after repair: {line}" for line in _wrong_values(url, storage_options=storage_options)]
    if (run := open_run(url, storage_options=storage_options)).iterations != sorted(stored.ready):
        found.append(f"every rank has committed {sorted(stored.ready)}, and {run.iterations} are complete")
    found += [f"left after repair: {debris.key}" for debris in backend.list_unfinished()]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """What the keys of a run say, read without the code under test."""

    committed: set[tuple[int, int]]
    """Rank and iteration of every rank commit."""
    marked: set[tuple[int, int]]
    """Those that the coordinator can see."""
    closed: set[int]
    """Iterations with an iteration commit."""

    @classmethod
    def of(cls, backend: Backend) -> _Stored:
        keys = "\n".join(backend.list_keys(""))

        def pairs(pattern: str) -> set[tuple[int, int]]:
            found = (match.groupdict() for match in re.finditer(pattern, keys, re.MULTILINE))
            return {(int(one.get("rank", -1)), int(one["step"])) for one in found}

        top, step, rank = r"^attempt_[^/]+", r"iter_(?P<step>\d+)", r"rank_(?P<rank>\d+)"
        return cls(
            committed=pairs(rf"{top}/{rank}/{step}/zarr\.json$"),
            marked=pairs(rf"{top}/commits/{step}/{rank}\.committed/zarr\.json$"),
            closed={step for _, step in pairs(rf"{top}/iterations/{step}/zarr\.json$")},
        )

    @property
    def ready(self) -> set[int]:
        """Iterations that every rank has committed."""
        return {step for _, step in self.committed if all((rank, step) in self.committed for rank in RANKS)}


def _misjudged(backend: Backend, stored: _Stored) -> list[str]:
    """Where a check says more, or less, than what a kill leaves: something said that was not passed on."""
    report = check_run(backend, deep=True)
    unmarked = {
        (finding.rank, finding.iteration) for finding in report.findings if finding.mend is Repair.RESTORE_MARKER
    }
    unclosed = {finding.iteration for finding in report.findings if finding.mend is Repair.FINISH_ITERATION}
    found = [
        f"check: {finding.text()}"
        for finding in report.findings
        if finding.is_error and finding.mend not in {Repair.RESTORE_MARKER, Repair.FINISH_ITERATION}
    ]
    if unmarked != stored.committed - stored.marked:
        found.append(f"check finds {unmarked} without a marker, of {stored}")
    if unclosed != stored.ready - stored.closed:
        found.append(f"check finds {unclosed} to be closed, of {stored}")
    if report.num_records != len(stored.committed) * NUM_TENSORS:
        found.append(f"check counts {report.num_records} records in {len(stored.committed)} commits of {NUM_TENSORS}")
    return found


def _wrong_values(url: str, *, storage_options: Mapping[str, Any] | None) -> list[str]:
    """Where what is called complete is not all of it, bit for bit."""
    found = []
    try:
        run = open_run(url, storage_options=storage_options)
        for iteration in run.iterations:
            for rank in RANKS:
                expected = {info.module: array for array, info in tensors(iteration, rank)}
                records = list(run.select(iteration=iteration, rank=rank))
                if sorted(record.info.module for record in records) != sorted(expected):
                    found.append(f"iteration {iteration} of rank {rank} has {len(records)} of {len(expected)} records")
                found += [
                    f"wrong bits in {record}"
                    for record in records
                    if raw_bytes(record.read()) != raw_bytes(expected[record.info.module])
                ]
    except RunNotFoundError as error:
        found.append(f"the run cannot be found: {error}")
    except RanktapeError as error:
        found.append(f"what is complete cannot be read: {error!r}")
    return found
