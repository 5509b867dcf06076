"""Reads and writes the documents of a run, of its attempts and of their plans."""

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
    """What all ranks of one start of the worker group know in common."""

    launch_id: str
    """Tells one launch from all others; the same over its restarts."""
    restart: Count
    """Restart count of the worker group."""
    world_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_SIZE)]
    """Number of ranks."""
    first_rank: Annotated[int, Meta(ge=0, le=MAX_WORLD_SIZE)] = 0
    """The lowest of their numbers."""

    @property
    def ranks(self) -> range:
        """The ranks that belong together: each of them must commit an iteration for it to be complete."""
        return range(self.first_rank, self.first_rank + self.world_size)

    def overlaps(self, other: Launch) -> bool:
        """Whether both have one of the ranks."""
        return max(self.ranks.start, other.ranks.start) < min(self.ranks.stop, other.ranks.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the worker group in a run, as its document says."""

    number: int
    """Counts the attempts of a run, from 0."""
    path: str
    """Its group below the run; no other attempt, here or in a later run at the same place, has the same."""
    launch: Launch
    """The start it belongs to."""
    min_iterations: Count
    """Iterations that the run guarantees, over all attempts."""
    completed: tuple[Count, ...]
    """The iterations that earlier attempts had stored complete."""
    adds: bool = False
    """Whether what it records stands beside what the run held, instead of in its place."""

    def to_json(self) -> dict[str, Any]:
        """A dictionary for the attempt's document; its key says the rest."""
        document = dataclasses.asdict(self)
        return {name: document[name] for name in document if name not in {"number", "path"}}


def read_attempts(backend: Backend) -> list[Attempt]:
    """The attempts of a run by their numbers, ascending; what has no document is passed over."""
    attempts = for_each(lambda name: read_attempt(backend, name), backend.list_names(""))
    found = [attempt for attempt in attempts if attempt is not None]
    return sorted(found, key=lambda attempt: (attempt.number, attempt.launch.first_rank, attempt.path))


def read_attempt(backend: Backend, path: str) -> Attempt | None:
    """An attempt as its document says; None where there is no document, and for names that are not of attempts."""
    number = layout.parse_attempt(path)
    if number is None:
        return None
    return read_as(backend, path, Attempt, number=number, path=path)


def shown_attempts(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Those of the attempts that hold an iteration, ascending, whose records are shown unless others are asked for.

    They are the latest one, or where that one adds to the run, those that it adds to as well. A restart stands in the
    place of the launch that it continues.
    """
    shown: dict[tuple[str, int], Attempt] = {}
    for attempt in attempts:
        if not attempt.adds:
            shown.clear()
        shown[attempt.launch.launch_id, attempt.launch.first_rank] = attempt
    return list(shown.values())


def is_attempt_there(backend: Backend, attempt: Attempt) -> bool:
    """Whether the run still is the one in which the attempt began; it may have been deleted or replaced since."""
    # Not `exists`, which some file systems answer from a listing they remember.
    return backend.get(layout.document_key(attempt.path), max_nbytes=MAX_DOCUMENT_NBYTES) is not None


def check_attempt(backend: Backend, attempt: Attempt) -> None:
    """Make sure, before something is written that counts, that the run still is the attempt's.

    Raises:
        RunLostError: the run was deleted, or another one is in its place.
    """
    if not is_attempt_there(backend, attempt):
        raise RunLostError(lost_message(backend))


def lost_message(backend: Backend) -> str:
    """What is said of a run that is no longer there."""
    return (
        f"the run at {backend.url} was replaced or deleted while it was recorded: nothing more of it can be stored; "
        f"give each launch a URL of its own"
    )


def read_run(backend: Backend) -> bytes | None:
    """The document of a run; None where there is none."""
    return read_document(backend, "")


def run_attributes(data: bytes | None, *, place: str) -> dict[str, Any]:
    """What the document of a run says.

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
    """The iterations that an attempt has stored complete and not removed since, ascending; two LISTs."""
    # In this order: what is removed in between is in the second list.
    committed = committed_iterations(backend, attempt)
    return sorted(committed - dropped_iterations(backend, attempt)) if committed else []


def whole_iterations(backend: Backend, attempt: Attempt) -> list[int]:
    """Those of the complete iterations that no rank was cut off in, ascending; one GET for each beside the LISTs."""
    iterations = complete_iterations(backend, attempt)
    are_whole = for_each(lambda iteration: is_whole(backend, attempt, iteration), iterations)
    return [iteration for iteration, is_one in zip(iterations, are_whole, strict=True) if is_one]


def is_whole(backend: Backend, attempt: Attempt, iteration: int) -> bool:
    """Whether no rank was cut off in a complete iteration; damage to its document changes nothing."""
    try:
        fields = read_attributes(backend, layout.iteration_path(attempt.path, iteration), max_nbytes=MAX_COMMIT_NBYTES)
    except (DataError, RunFormatError):
        return True
    return fields is None or not fields.get("cut_off")


def committed_iterations(backend: Backend, attempt: Attempt) -> frozenset[int]:
    """The iterations of which there is a commit, be it a late one of an iteration that was removed. One LIST."""
    return frozenset(layout.iterations_of(backend.list_keys(f"{attempt.path}/iterations")))


def dropped_iterations(backend: Backend, attempt: Attempt) -> frozenset[int]:
    """The iterations that were complete and have been removed; a late commit of one does not count. One LIST."""
    return frozenset(layout.iterations_of(backend.list_keys(f"{attempt.path}/dropped")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Iterations that somebody asked for while the training ran."""

    name: str
    """That of the request."""
    iterations: tuple[Count, ...]
    """Those that were named for it, ascending: as many as were asked for, and others for those that failed."""
    num_iterations: Count
    """How many were asked for."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What is selected in them, by the names of the capture's settings; empty for what the capture selects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationPlan:
    """The iterations of an attempt."""

    iterations: tuple[Count, ...]
    """All that are or were to be captured, ascending."""
    is_done: bool
    """Whether capture ends: enough iterations are complete, or no more can be."""
    is_enough: bool = False
    """Whether it ends because enough iterations are complete."""
    asked: tuple[Asked, ...] = ()
    """Which of them were asked for while the training ran; they guarantee nothing."""

    @property
    def asked_iterations(self) -> frozenset[int]:
        """All that were asked for while the training ran."""
        return frozenset(iteration for one in self.asked for iteration in one.iterations)


def write_plan(backend: Backend, *, attempt: Attempt, plan: IterationPlan) -> None:
    """Announce a plan to every rank of an attempt."""
    check_attempt(backend, attempt)
    attributes = dataclasses.asdict(plan)
    asked = {one.pop("name"): one for one in attributes.pop("asked")}
    write_group(backend, layout.plan_path(attempt.path), attributes | ({"asked": asked} if asked else {}))


def read_plan(backend: Backend, *, attempt: Attempt) -> IterationPlan | None:
    """The plan that was announced last; None where none was."""
    path = layout.plan_path(attempt.path)
    attributes = read_attributes(backend, path)
    if attributes is None:
        return None
    asked = attributes.get("asked", {})
    if isinstance(asked, dict):
        named = [{**one, "name": name} if isinstance(one, dict) else one for name, one in asked.items()]
        attributes["asked"] = named
    return converted(attributes, IterationPlan, place=f"{backend.url}/{layout.document_key(path)}")
