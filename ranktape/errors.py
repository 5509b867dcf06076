"""The errors of ranktape, each with the exit code of a command that ends with it.

All are subclasses of `RanktapeError`. Commands show their message without a traceback.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar


def nearest(name: str, known: Collection[str], *, otherwise: str = "use one of", cutoff: float = 0.5) -> str:
    """Advice for an unknown name: the names that start with it or contain it, else the nearest one, else all names."""
    import difflib

    longer = [one for one in known if name in one] if len(name) > 1 else []
    if longer:
        return f"did you mean {', '.join(sorted(longer, key=lambda one: not one.startswith(name)))}?"
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else f"{otherwise} {', '.join(known)}"


def expect_least(least: float, **values: float | None) -> None:
    """Check that numbers, given by the names of their options, are not below a limit. None is allowed.

    Raises:
        UsageError: a number is too small or NaN.
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise UsageError(f"--{name.replace('_', '-')} {value} is not allowed: give {least} or more")


class RanktapeError(Exception):
    """An error that the user can resolve. The message says how."""

    exit_code: ClassVar[int] = 1
    """The exit code of a command that ends with this error."""


class UsageError(RanktapeError):
    """An option, a field or a value is not allowed."""

    exit_code: ClassVar[int] = 2


class UnknownFieldError(UsageError):
    """A filter or a grouping names a field that records do not have."""


class RunNotFoundError(RanktapeError):
    """There is no run at the URL."""


class RunExistsError(RanktapeError):
    """The URL already has a run of another launch."""


class RunFormatError(RanktapeError):
    """The store does not have a run, or has a run of a schema that this version cannot read."""


class StorageError(RanktapeError):
    """The store cannot be reached, read or written."""

    is_transient: ClassVar[bool] = False
    """Whether the same request may succeed later."""


class UnreachableError(StorageError):
    """The store does not answer, or is temporarily unavailable."""

    is_transient: ClassVar[bool] = True


class NoSpaceError(StorageError):
    """The store is full, or a quota is exceeded."""


class AccessDeniedError(StorageError):
    """The store denies access because of credentials, permissions, or a read-only file system."""


class NoBucketError(StorageError):
    """The bucket or container of the URL does not exist."""


class RunLostError(StorageError):
    """The run was deleted or replaced while it was recorded."""


class ObjectTooLargeError(StorageError):
    """An object is larger than the limit for its kind."""


class DataError(RanktapeError):
    """The bytes of a committed record are missing, truncated or damaged."""


class IncompleteTensorError(DataError):
    """A tensor cannot be assembled because a shard is missing."""


class ReplicaMismatchError(DataError):
    """Replicas of a tensor have different values."""


class NoRecordsError(RanktapeError):
    """A selection has no records."""


class WorkersError(RanktapeError):
    """The worker processes or the cluster of an analysis cannot be started, or died."""


class CaptureError(RanktapeError):
    """A capture cannot start, or cannot record what was requested."""


class FailedElsewhereError(CaptureError):
    """Another rank cannot start its capture, and reports the reason itself."""


class LateError(CaptureError):
    """A capture did not start because a rank or a writer was not ready in time. The training is not at fault."""


class LateElsewhereError(FailedElsewhereError, LateError):
    """A capture did not start because a rank was not ready in time, which another rank reports."""


class MinimumNotMetError(RanktapeError):
    """The run ended with fewer complete iterations than guaranteed."""


class CheckFoundError(RanktapeError):
    """A check finished and found something."""

    exit_code: ClassVar[int] = 3
