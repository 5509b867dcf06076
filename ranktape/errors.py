"""The mistakes that ranktape reports, each with the exit code with which it ends a command.

All are `RanktapeError`s: what a user can cause or must know, never shown with a traceback.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar


def nearest(name: str, known: Collection[str], *, otherwise: str = "use one of", cutoff: float = 0.5) -> str:
    """The way out where a name is not known: those that begin with it or contain it, else the nearest one, else all."""
    import difflib

    longer = [one for one in known if name in one] if len(name) > 1 else []
    if longer:
        return f"did you mean {', '.join(sorted(longer, key=lambda one: not one.startswith(name)))}?"
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else f"{otherwise} {', '.join(known)}"


def expect_least(least: float, **values: float | None) -> None:
    """Refuse numbers that are too small, by the names of their options; None was not given.

    Raises:
        UsageError: one is, or is NaN.
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise UsageError(f"--{name.replace('_', '-')} {value} is not allowed: give {least} or more")


class RanktapeError(Exception):
    """A mistake or a state that the user can mend; its text says how."""

    exit_code: ClassVar[int] = 1
    """What a command ends with when it meets this error."""


class UsageError(RanktapeError):
    """An option, a field or a value is not one of those allowed."""

    exit_code: ClassVar[int] = 2


class UnknownFieldError(UsageError):
    """A filter or a grouping names a field that records do not have."""


class RunNotFoundError(RanktapeError):
    """There is no run at the URL."""


class RunExistsError(RanktapeError):
    """There is a run at the URL already, and it belongs to another launch."""


class RunFormatError(RanktapeError):
    """What is stored is not a run, or is of a schema that this version does not read."""


class StorageError(RanktapeError):
    """The store cannot be reached, read or written."""

    is_transient: ClassVar[bool] = False
    """Whether the same request may succeed later with nothing changed."""


class UnreachableError(StorageError):
    """The store does not answer, or says that it cannot just now."""

    is_transient: ClassVar[bool] = True


class NoSpaceError(StorageError):
    """The store is full, or a quota is used up."""


class AccessDeniedError(StorageError):
    """The store refuses us: credentials, permissions, or a read-only file system."""


class NoBucketError(StorageError):
    """The bucket or container that the URL names is not there."""


class RunLostError(StorageError):
    """The run was deleted or replaced while it was recorded."""


class ObjectTooLargeError(StorageError):
    """An object is larger than what it is read as may be."""


class DataError(RanktapeError):
    """The bytes of a committed record are missing, short or damaged."""


class IncompleteTensorError(DataError):
    """A tensor that several ranks held cannot be put together: a part of it is not there."""


class ReplicaMismatchError(DataError):
    """Ranks that held copies of one tensor recorded different values."""


class NoRecordsError(RanktapeError):
    """A selection holds no records."""


class WorkersError(RanktapeError):
    """The processes or the cluster that were to do the work of a question cannot be had, or were lost."""


class CaptureError(RanktapeError):
    """Capture cannot start, or cannot record what was asked for."""


class FailedElsewhereError(CaptureError):
    """Another rank cannot start its capture, and says why itself."""


class LateError(CaptureError):
    """Capture did not start, as a rank or a writer was not ready in time; the training has no fault."""


class LateElsewhereError(FailedElsewhereError, LateError):
    """Capture did not start, as a rank was not ready in time; another one says so itself."""


class MinimumNotMetError(RanktapeError):
    """The run ended with fewer complete iterations than it had guaranteed."""


class CheckFoundError(RanktapeError):
    """A check ran to its end and found something."""

    exit_code: ClassVar[int] = 3
