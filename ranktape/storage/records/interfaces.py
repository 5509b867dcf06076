"""What views of records ask of a record and of a selection, whatever holds their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Keep

if TYPE_CHECKING:
    import numpy as np

    from ranktape.storage.format.record_info import RecordInfo


class ReadableRecord(Protocol):
    """A record of which values can be read."""

    @property
    def info(self) -> RecordInfo:
        """Its identity."""
        ...

    def read(self, sample: int | None = None) -> np.ndarray[Any, Any]:
        """Its values, or those of one sample."""
        ...


AnyRecord = TypeVar("AnyRecord", bound=ReadableRecord)
"""The kind of record that a view is made of."""


class RecordColumns(Protocol):
    """A selection of records as columns."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> ReadableRecord: ...

    def __iter__(self) -> Iterator[ReadableRecord]: ...

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """One field of all of them."""
        ...


_READ_BY = {Keep.VALUES: "read", Keep.HISTOGRAM: "counts", Keep.STATISTICS: "statistics"}
"""The method of a record that gives what was kept of it."""


def expect(record: ReadableRecord, keep: Keep) -> None:
    """That this was kept of a record.

    Raises:
        UsageError: something else was.
    """
    if record.info.keep != keep:
        raise UsageError(f"of {record!r} {otherwise_kept(record.info.keep, wanted=keep)}")


def otherwise_kept(keep: str, *, wanted: Keep) -> str:
    """What to say where something else was kept than is wanted: which, and what reads it."""
    verb = "was" if keep == Keep.HISTOGRAM else "were"
    return f"the {keep} {verb} kept, not the {wanted}: use {_READ_BY[Keep(keep)]}()"
