"""What do the documents of a run and of its attempts say?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.errors import RunFormatError, RunNotFoundError
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


def list_attempts(backend: Backend) -> list[int]:
    """The numbers of a run's attempts, ascending."""
    numbers = (layout.parse_attempt(name) for name in backend.list_names(""))
    return sorted(number for number in numbers if number is not None)


def read_attempt(backend: Backend, number: int) -> Attempt | None:
    """An attempt as its document says; None while the document is not there."""
    attributes = attempt_attributes(backend, number)
    if attributes is None:
        return None
    try:
        return Attempt(
            number=number,
            launch=Launch(**attributes["launch"]),
            min_iterations=int(attributes["min_iterations"]),
            completed=tuple(attributes["completed"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunFormatError(f"the document of attempt {number} in {backend.url} is damaged: {error!r}") from error


def attempt_attributes(backend: Backend, number: int) -> dict[str, Any] | None:
    """What the document of an attempt says; None while it is not there."""
    key = layout.document_key(layout.attempt_path(number))
    data = backend.get(key)
    return None if data is None else decode_document(data, place=f"{backend.url}/{key}").get("attributes", {})


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


def complete_iterations(backend: Backend, number: int) -> list[int]:
    """The iterations that an attempt has stored complete, ascending; one LIST."""
    found = (layout.parse_iteration(key) for key in backend.list_keys(layout.iterations_path(number)))
    return sorted(iteration for iteration in found if iteration is not None)
