"""What is measured of one record, in one reading, and in which form does the measurement travel and rest?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.storage import Record

Payload = dict[str, "NDArray[Any]"]
"""What was measured, as named arrays of numbers: what workers send and the cache keeps."""


class Measure(Protocol):
    """Something that is measured of one record; it can be pickled."""

    @property
    def name(self) -> str:
        """What the cache knows it by: two measures of one name have the same payload of the same record.

        It therefore holds a version and every parameter, in letters that a key of an object may have.
        """
        ...

    def __call__(self, record: Record) -> Payload:
        """Read the record and measure it, with no more of it in memory than one chunk.

        Raises:
            DataError: the record's bytes are missing or damaged.
            StorageError: the store cannot be read.
            UsageError: what was kept of the record does not answer the question.
        """
        ...
