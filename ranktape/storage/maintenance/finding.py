"""The findings of a check: their kinds, severities and repairs."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ranktape.errors import DataError, ObjectTooLargeError, RunFormatError
from ranktape.storage.places.failures import printable

Result = TypeVar("Result")


class CheckSeverity(enum.StrEnum):
    """The severity of a finding."""

    ERROR = "error"
    """Committed data is lost or was changed."""
    NOTE = "note"
    """No committed data is affected: leftovers, unfinished work, foreign objects."""


class FindingKind(enum.StrEnum):
    """The kind of a finding."""

    MISSING = "missing"
    """A required object does not exist."""
    DAMAGED = "damaged"
    """An object differs from what was written under its key."""
    SIZE = "size"
    """An object does not have the size that its document implies."""
    MISMATCH = "mismatch"
    """Two objects with the same information disagree."""
    STALE = "stale"
    """The plan or the verdict does not agree with the stored iterations."""
    UNFINISHED = "unfinished"
    """Work has started and not finished: it is being recorded, or its processes died."""
    DEBRIS = "debris"
    """A leftover of a writer that died."""
    FOREIGN = "foreign"
    """An object that is not part of a run."""
    UNCHECKED = "unchecked"
    """An object that could not be checked: the store refuses to read it, or it exceeds the memory of this machine."""


class Repair(enum.StrEnum):
    """The repairs of `ranktape repair`, in the order in which they are applied."""

    RESTORE_MARKER = "restore the marker"
    """Write the marker of a rank commit."""
    FINISH_ITERATION = "write the iteration commit"
    """Write it from the rank commits, which all exist."""
    FINISH_REMOVAL = "finish the removal"
    """Delete the rest of an iteration whose removal was interrupted."""
    REMOVE_OBJECTS = "remove the objects"
    """Delete objects that no commit names."""
    REMOVE_UNFINISHED_WRITE = "remove the unfinished write"
    """Delete a partial file or an unfinished upload."""
    WRITE_VERDICT = "write the verdict again"
    """Write it from the present state of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """One finding of a check."""

    kind: FindingKind
    """Kind of the finding."""
    severity: CheckSeverity
    """Severity of the finding."""
    message: str
    """Description in one line."""
    attempt: int | None = None
    """Number of the attempt; None if it is not about one."""
    iteration: int | None = None
    """Training step; None if it is not about one."""
    rank: int | None = None
    """Rank; None if it is not about one."""
    record: str = ""
    """Path of the tensor below its iteration; empty if it is not about one."""
    key: str = ""
    """Key of the object, or prefix of the objects, below the run."""
    mend: Repair | None = None
    """The repair of `ranktape repair`; None if there is none."""
    modified: float = 0.0
    """Time of the last write to the object, in seconds since the epoch, if the repair removes it."""

    @property
    def is_error(self) -> bool:
        """Whether committed data is lost or was changed."""
        return self.severity is CheckSeverity.ERROR

    def text(self) -> str:
        """The finding in one line, safe for a terminal."""
        parts = {"attempt": self.attempt, "iteration": self.iteration, "rank": self.rank}
        place = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
        where = f" ({place})" if place else ""
        record = f" {self.record}:" if self.record else ""
        key = f" [{self.key}]" if self.key else ""
        return printable(f"{self.severity}: {self.kind}{where}:{record} {self.message}{key}")

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        document = dataclasses.asdict(self)
        del document["modified"]
        return document


@dataclass(slots=True, kw_only=True)
class Findings:
    """Collects findings that share some fields."""

    attempt: int | None = None
    iteration: int | None = None
    rank: int | None = None
    items: list[CheckFinding] = field(default_factory=list)

    def error(self, kind: FindingKind, message: str, **fields: Any) -> None:
        """Add an error about committed data."""
        self._add(CheckSeverity.ERROR, kind, message, fields)

    def note(self, kind: FindingKind, message: str, **fields: Any) -> None:
        """Add a note about something that is not committed."""
        self._add(CheckSeverity.NOTE, kind, message, fields)

    def read(self, work: Callable[[], Result], **fields: Any) -> Result | None:
        """The result of `work`; if it is damaged or too large, a finding is added and the result is None."""
        try:
            return work()
        except (DataError, RunFormatError) as error:
            self.error(FindingKind.DAMAGED, str(error), **fields)
        except ObjectTooLargeError as error:
            self.note(FindingKind.UNCHECKED, str(error), **(fields | {"mend": None}))
        return None

    def _add(self, severity: CheckSeverity, kind: FindingKind, message: str, fields: dict[str, Any]) -> None:
        place = {"attempt": self.attempt, "iteration": self.iteration, "rank": self.rank}
        self.items.append(CheckFinding(kind=kind, severity=severity, message=message, **(place | fields)))


@dataclass(slots=True, kw_only=True)
class CheckReport:
    """The result of a check, which the check fills in."""

    url: str
    """URL of the run, without credentials."""
    deep: bool
    """Whether every byte is read."""
    findings: list[CheckFinding] = field(default_factory=list)
    """The findings, by attempt, iteration and rank."""
    num_attempts: int = 0
    """Number of attempts with a document."""
    unclosed: dict[str, float] = field(default_factory=dict)
    """Time of the latest write to each attempt without a verdict, by path, in seconds since the epoch.

    0.0 if the store does not give times.
    """
    num_iterations: int = 0
    """Number of iteration commits of all attempts."""
    num_partial: int = 0
    """Number of iteration commits in which a rank was cut off."""
    num_records: int = 0
    """Number of records in rank commits of all attempts."""
    num_objects: int = 0
    """Number of objects of attempts."""
    nbytes: int = 0
    """Size of these objects, in bytes."""

    @property
    def errors(self) -> list[CheckFinding]:
        """The findings about committed data."""
        return [finding for finding in self.findings if finding.is_error]

    @property
    def notes(self) -> list[CheckFinding]:
        """The other findings."""
        return [finding for finding in self.findings if not finding.is_error]

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        return {
            "run": self.url,
            "deep": self.deep,
            "sound": not self.errors,
            "attempts": self.num_attempts,
            "iterations": self.num_iterations,
            "partial": self.num_partial,
            "records": self.num_records,
            "objects": self.num_objects,
            "nbytes": self.nbytes,
            "findings": [finding.to_json() for finding in self.findings],
        }
