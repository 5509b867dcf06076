"""Reads and writes the documents of a run, its attempts and their plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from ranktape.errors import DataError, RunFormatError, RunLostError, RunNotFoundError
from ranktape.storage.format import layout
from ranktape.storage.format.documents import (
    MAX_COMMIT_NBYTES,
    MAX_DOCUMENT_NBYTES,
    MAX_WORLD_SIZE,
    SCHEMA_KEY,
    SCHEMA_VERSION,
    Count,
    converted,
    decode_document,
    for_each,
    read_as,
    read_attributes,
    read_document,
    write_group,
)
from ranktape.storage.places.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What all ranks of one start of the worker group share."""

    launch_id: str
    """Identifies the launch; the same after a restart."""
    restart: Count
    """Restart count of the worker group."""
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)]
    """Number of ranks."""
    first_rank: Annotated[int, Meta(ge=0, le=MAX_WORLD_SIZE)] = 0
    """The lowest rank."""

    @property
    def ranks(self) -> range:
        """The ranks that must commit an iteration for it to be complete."""
        return range(self.first_rank, self.first_rank + self.world_size)

    def overlaps(self, other: Launch) -> bool:
        """Whether the two launches share a rank."""
        return max(self.ranks.start, other.ranks.start) < min(self.ranks.stop, other.ranks.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the worker group in a run."""

    number: int
    """Number of the attempt in the run, starting at 0."""
    path: str
    """Its group below the run. No other attempt has the same path, even in a later run at the same URL."""
    launch: Launch
    """The start of the worker group."""
    min_iterations: Count
    """Number of iterations that the run guarantees, over all attempts."""
    completed: tuple[Count, ...]
    """The iterations that earlier attempts have stored complete."""
    adds: bool = False
    """Whether its records are added to those of earlier attempts instead of replacing them."""

    def to_json(self) -> dict[str, Any]:
        """The attempt's document as a dictionary, without the fields that its key gives."""
        document = dataclasses.asdict(self)
        return {name: document[name] for name in document if name not in {"number", "path"}}


def read_attempts(backend: Backend) -> list[Attempt]:
    """The attempts of a run in ascending order. Groups without a document are ignored."""
    attempts = for_each(lambda name: read_attempt(backend, name), backend.list_names(""))
    existing = [attempt for attempt in attempts if attempt is not None]
    return sorted(existing, key=lambda attempt: (attempt.number, attempt.launch.first_rank, attempt.path))


def read_attempt(backend: Backend, path: str) -> Attempt | None:
    """The attempt at a path; None if there is no document or the path is not that of an attempt."""
    number = layout.parse_attempt(path)
    if number is None:
        return None
    return read_as(backend, path, Attempt, number=number, path=path)


def shown_attempts(attempts: Iterable[Attempt]) -> list[Attempt]:
    """The attempts whose records of an iteration are shown by default, given those that hold the iteration.

    These are the latest attempt and, if it adds to the run, those that it adds to. A restart replaces the earlier
    attempts of its launch.
    """
    shown: dict[tuple[str, int], Attempt] = {}
    for attempt in attempts:
        if not attempt.adds:
            shown.clear()
        shown[attempt.launch.launch_id, attempt.launch.first_rank] = attempt
    return list(shown.values())


def is_attempt_there(backend: Backend, attempt: Attempt) -> bool:
    """Whether the attempt still exists. The run may have been deleted or replaced since it began."""
    # Not `exists`, which some file systems answer from a cached listing.
    return backend.get(layout.document_key(attempt.path), max_nbytes=MAX_DOCUMENT_NBYTES) is not None


def check_attempt(backend: Backend, attempt: Attempt) -> None:
    """Check that the attempt still exists before a document is written that readers trust.

    Raises:
        RunLostError: the run was deleted or replaced.
    """
    if not is_attempt_there(backend, attempt):
        raise RunLostError(lost_message(backend))


def lost_message(backend: Backend) -> str:
    """The error message for a run that was deleted or replaced while it was recorded."""
    return (
        f"the run at {backend.url} was replaced or deleted while it was recorded: nothing more of it can be stored; "
        f"give each launch a URL of its own"
    )


def read_run(backend: Backend) -> bytes | None:
    """The document of a run; None if there is none."""
    return read_document(backend, "")


def run_attributes(data: bytes | None, *, place: str) -> dict[str, Any]:
    """The attributes in the document of a run.

    Raises:
        RunNotFoundError: there is no document.
    """
    if data is None:
        raise RunNotFoundError(f"there is no run at {place}: check the URL")
    document = decode_document(data, place=place, key=layout.document_key(""))
    attributes: dict[str, Any] = document["attributes"]
    version = attributes.get(SCHEMA_KEY)
    if version is None:
        raise RunFormatError(f"{place} holds a Zarr group, but no run: check the URL")
    if type(version) is not int or version < 1:
        raise RunFormatError(f"{place} is damaged: its {SCHEMA_KEY} is {version!r:.60}; see 'ranktape check'")
    if version != SCHEMA_VERSION:
        raise RunFormatError(
            f"the run at {place} has schema {version}, this version reads schema {SCHEMA_VERSION}: read it with the "
            f"version that wrote it"
        )
    return attributes


def complete_iterations(backend: Backend, attempt: Attempt) -> list[int]:
    """The complete iterations of an attempt in ascending order. It takes two LIST requests."""
    # The order matters: an iteration that is removed between the two requests is in the second list.
    committed = committed_iterations(backend, attempt)
    return sorted(committed - dropped_iterations(backend, attempt)) if committed else []


def whole_iterations(backend: Backend, attempt: Attempt) -> list[int]:
    """The complete iterations that every rank finished, in ascending order. It takes one GET for each iteration."""
    iterations = complete_iterations(backend, attempt)
    are_whole = for_each(lambda iteration: is_whole(backend, attempt, iteration), iterations)
    return [iteration for iteration, is_one in zip(iterations, are_whole, strict=True) if is_one]


def is_whole(backend: Backend, attempt: Attempt, iteration: int) -> bool:
    """Whether every rank finished a complete iteration. If its document is damaged, the answer is True."""
    try:
        fields = read_attributes(backend, layout.iteration_path(attempt.path, iteration), max_nbytes=MAX_COMMIT_NBYTES)
    except (DataError, RunFormatError):
        return True
    return fields is None or not fields.get("cut_off")


def committed_iterations(backend: Backend, attempt: Attempt) -> frozenset[int]:
    """The iterations that have a commit, including late commits of removed iterations. It takes one LIST request."""
    return frozenset(layout.iterations_of(backend.list_keys(f"{attempt.path}/iterations")))


def dropped_iterations(backend: Backend, attempt: Attempt) -> frozenset[int]:
    """The iterations that were complete and have been removed. It takes one LIST request."""
    return frozenset(layout.iterations_of(backend.list_keys(f"{attempt.path}/dropped")))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedIterations:
    """Iterations that were requested while the training ran."""

    name: str
    """Name of the request."""
    iterations: tuple[Count, ...]
    """The iterations that were chosen for it, in ascending order, including replacements for those that failed."""
    num_iterations: Count
    """Number of requested iterations."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The selection, by the names of the capture's settings; empty for the capture's own selection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationPlan:
    """The iterations that an attempt captures."""

    iterations: tuple[Count, ...]
    """All iterations to capture, past and future, in ascending order."""
    is_done: bool
    """Whether the capture ends, because enough iterations are complete or no more can be."""
    is_enough: bool = False
    """Whether the capture ends because enough iterations are complete."""
    asked: tuple[RequestedIterations, ...] = ()
    """The iterations that were requested while the training ran. They do not count for the minimum."""

    @property
    def requested_iterations(self) -> frozenset[int]:
        """All iterations that were requested while the training ran."""
        return frozenset(iteration for request in self.asked for iteration in request.iterations)


def write_plan(backend: Backend, *, attempt: Attempt, plan: IterationPlan) -> None:
    """Announce a plan to every rank of an attempt."""
    check_attempt(backend, attempt)
    attributes = dataclasses.asdict(plan)
    requests = {request.pop("name"): request for request in attributes.pop("asked")}
    write_group(backend, layout.plan_path(attempt.path), attributes | ({"asked": requests} if requests else {}))


def read_plan(backend: Backend, *, attempt: Attempt) -> IterationPlan | None:
    """The latest plan of an attempt; None if there is none."""
    path = layout.plan_path(attempt.path)
    attributes = read_attributes(backend, path)
    if attributes is None:
        return None
    requests = attributes.get("asked", {})
    if isinstance(requests, dict):
        named = [
            {**request, "name": name} if isinstance(request, dict) else request for name, request in requests.items()
        ]
        attributes["asked"] = named
    return converted(attributes, IterationPlan, place=f"{backend.url}/{layout.document_key(path)}")
