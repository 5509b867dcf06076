"""Which mistakes can ranktape report, and with which exit code do they end a command?

RanktapeError                 everything a user can cause or must know; never shown with a traceback
  UsageError                  a wrong option, field name or value (exit code 2)
    UnknownFieldError         a filter names a field that records do not have
  RunNotFoundError            no run at the URL
  RunExistsError              a run is at the URL and neither resume nor overwrite was asked for
  RunFormatError              what is stored there is not a run of a schema we read
  StorageError                the store cannot be reached, read or written
  DataError                   a record's bytes are missing or damaged
  NoRecordsError              a selection holds nothing
  CaptureError                capture cannot start or cannot go on
  MinimumNotMetError          fewer complete iterations than guaranteed
  CheckFoundError             a check ran and found something (exit code 3)
"""

from __future__ import annotations

from typing import ClassVar


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


class DataError(RanktapeError):
    """The bytes of a committed record are missing, short or damaged."""


class NoRecordsError(RanktapeError):
    """A selection holds no records."""


class CaptureError(RanktapeError):
    """Capture cannot start, or cannot record what was asked for."""


class MinimumNotMetError(RanktapeError):
    """The run ended with fewer complete iterations than it had guaranteed."""


class CheckFoundError(RanktapeError):
    """A check ran to its end and found something."""

    exit_code: ClassVar[int] = 3
