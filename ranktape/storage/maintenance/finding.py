"""Names what a check can find in a run, how bad that is, and how it is mended."""

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
    """How bad a finding is."""

    ERROR = "error"
    """Something that was committed is lost or is not what was written."""
    NOTE = "note"
    """Nothing that was committed is touched: debris, what is not finished, what is not ours."""


class FindingKind(enum.StrEnum):
    """What is wrong."""

    MISSING = "missing"
    """An object that must be there is not."""
    DAMAGED = "damaged"
    """An object is not what was written under its key."""
    SIZE = "size"
    """An object has another size than its document says."""
    MISMATCH = "mismatch"
    """Two objects that say the same thing disagree."""
    STALE = "stale"
    """The plan or the verdict does not fit what is stored."""
    UNFINISHED = "unfinished"
    """Something was begun and not ended: it is being recorded, or its processes were lost."""
    DEBRIS = "debris"
    """A writer that was lost left it behind."""
    FOREIGN = "foreign"
    """It is no part of a run."""
    UNCHECKED = "unchecked"
    """It could not be looked at: the store refuses it, or this machine has too little memory for it."""


class Mend(enum.StrEnum):
    """What `ranktape repair` does about a finding; in the order in which it is done."""

    RESTORE_MARKER = "restore the marker"
    """From the rank commit that it stands for."""
    FINISH_ITERATION = "write the iteration commit"
    """From the rank commits, which are all there."""
    FINISH_REMOVAL = "finish the removal"
    """Of an iteration that a retention began to remove."""
    REMOVE_OBJECTS = "remove the objects"
    """That no commit names."""
    REMOVE_DEBRIS = "remove the unfinished write"
    """A partial file or an upload that was not ended."""
    WRITE_VERDICT = "write the verdict again"
    """As the run stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """One thing that a check found."""

    kind: FindingKind
    """What is wrong."""
    severity: CheckSeverity
    """How bad it is."""
    message: str
    """What was found, in one line."""
    attempt: int | None = None
    """The start of the worker group that it belongs to."""
    iteration: int | None = None
    """The training step that it belongs to."""
    rank: int | None = None
    """The rank that it belongs to."""
    record: str = ""
    """The path of the tensor below its iteration, where one is concerned."""
    key: str = ""
    """The object, or the prefix of objects, below the run."""
    mend: Mend | None = None
    """What `ranktape repair` does about it; None where it can do nothing."""
    modified: float = 0.0
    """When what it is about was last written, in seconds since the epoch, where it may have to be removed."""

    @property
    def is_error(self) -> bool:
        """Whether something committed is lost or wrong."""
        return self.severity is CheckSeverity.ERROR

    def text(self) -> str:
        """The finding in one line, fit for a terminal."""
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
    """Findings on one place, as they come; the fields of the place are those of every finding."""

    attempt: int | None = None
    iteration: int | None = None
    rank: int | None = None
    items: list[CheckFinding] = field(default_factory=list)

    def error(self, kind: FindingKind, message: str, **fields: Any) -> None:
        """Add a finding on something committed."""
        self._add(CheckSeverity.ERROR, kind, message, fields)

    def note(self, kind: FindingKind, message: str, **fields: Any) -> None:
        """Add a finding on something that is not committed."""
        self._add(CheckSeverity.NOTE, kind, message, fields)

    def read(self, work: Callable[[], Result], **fields: Any) -> Result | None:
        """What `work` reads; None where it is damaged or too large, which is added."""
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
    """What a check found in a run; filled in while it goes on."""

    url: str
    """Where the run is, without credentials."""
    deep: bool
    """Whether every byte is read."""
    findings: list[CheckFinding] = field(default_factory=list)
    """By attempt, iteration and rank."""
    num_attempts: int = 0
    """Attempts that have a document."""
    unclosed: dict[str, float] = field(default_factory=dict)
    """Those that no verdict closes, by path: when the youngest object was written, in seconds since the epoch.

    0.0 where the store does not say.
    """
    num_iterations: int = 0
    """Iteration commits, over all attempts."""
    num_partial: int = 0
    """Those of them in which a rank was cut off."""
    num_records: int = 0
    """Records in rank commits, over all attempts."""
    num_objects: int = 0
    """Objects that belong to attempts."""
    nbytes: int = 0
    """Bytes of them."""

    @property
    def errors(self) -> list[CheckFinding]:
        """What is lost or wrong."""
        return [finding for finding in self.findings if finding.is_error]

    @property
    def notes(self) -> list[CheckFinding]:
        """What else there is to know."""
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
