"""What do the documents of a run and of its attempts say?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.errors import RunFormatError, RunNotFoundError, StorageError
from ranktape.storage import layout
from ranktape.storage.documents import SCHEMA_KEY, SCHEMA_VERSION, decode_document

if TYPE_CHECKING:
    from ranktape.storage.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What all ranks of one start of the worker group know in common."""

    launch_id: str
    """Tells one launch from all others; the same over its restarts."""
    restart: int
    """Restart count of the worker group."""
    world_size: int
    """Number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the worker group in a run, as its document says."""

    number: int
    """Counts the attempts of a run, from 0."""
    path: str
    """Its group below the run; no other attempt, here or in a later run at the same place, has the same."""
    launch: Launch
    """The start it belongs to."""
    min_iterations: int
    """Iterations that the run guarantees, over all attempts."""
    completed: tuple[int, ...]
    """The iterations that earlier attempts had stored complete."""

    def to_json(self) -> dict[str, Any]:
        """A dictionary for the attempt's document."""
        return {
            "launch": {
                "launch_id": self.launch.launch_id,
                "restart": self.launch.restart,
                "world_size": self.launch.world_size,
            },
            "min_iterations": self.min_iterations,
            "completed": list(self.completed),
        }


def read_attempts(backend: Backend) -> list[Attempt]:
    """The attempts of a run by their numbers, ascending; what has no document is passed over."""
    attempts = (read_attempt(backend, name) for name in backend.list_names(""))
    return sorted(
        (attempt for attempt in attempts if attempt is not None), key=lambda attempt: (attempt.number, attempt.path)
    )


def read_attempt(backend: Backend, path: str) -> Attempt | None:
    """An attempt as its document says; None where there is no document, and for names that are not of attempts."""
    number = layout.parse_attempt(path)
    if number is None:
        return None
    key = layout.document_key(path)
    data = backend.get(key)
    if data is None:
        return None
    attributes = decode_document(data, place=f"{backend.url}/{key}").get("attributes", {})
    try:
        return Attempt(
            number=number,
            path=path,
            launch=Launch(**attributes["launch"]),
            min_iterations=int(attributes["min_iterations"]),
            completed=tuple(attributes["completed"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunFormatError(f"the document {backend.url}/{key} is damaged: {error!r}") from error


def is_attempt_there(backend: Backend, attempt: Attempt) -> bool:
    """Whether the run still is the one in which the attempt began; it may have been deleted or replaced since."""
    # Not `exists`, which some file systems answer from a listing they remember.
    return backend.get(layout.document_key(attempt.path)) is not None


def check_attempt(backend: Backend, attempt: Attempt) -> None:
    """Make sure, before something is written that counts, that the run still is the attempt's.

    Raises:
        StorageError: the run was deleted, or another one is in its place.
    """
    if not is_attempt_there(backend, attempt):
        raise StorageError(lost_message(backend))


def lost_message(backend: Backend) -> str:
    """What is said of a run that is no longer there."""
    return (
        f"the run at {backend.url} was replaced or deleted while it was recorded: nothing more of it can be stored; "
        f"give each launch a URL of its own"
    )


def run_attributes(data: bytes | None, *, place: str) -> dict[str, Any]:
    """What the document of a run says.

    Raises:
        RunNotFoundError: there is no document.
        RunFormatError: it is not one of a run, or of a schema that this version does not read.
    """
    if data is None:
        raise RunNotFoundError(f"there is no run at {place}: check the URL")
    attributes = decode_document(data, place=place).get("attributes", {})
    version = attributes.get(SCHEMA_KEY)
    if version is None:
        raise RunFormatError(f"{place} holds a Zarr group, but no run: check the URL")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RunFormatError(
            f"the run at {place} has schema {version}, this version reads up to {SCHEMA_VERSION}: update ranktape"
        )
    return dict(attributes)


def complete_iterations(backend: Backend, attempt: Attempt) -> list[int]:
    """The iterations that an attempt has stored complete, ascending; one LIST."""
    found = (layout.parse_iteration(key) for key in backend.list_keys(layout.iterations_path(attempt.path)))
    return sorted(iteration for iteration in found if iteration is not None)
