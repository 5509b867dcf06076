"""Plans the work of a question: which records are known already, and which are measured together."""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.analyze.engine.batch import BATCH_NBYTES, BATCH_RECORDS
from ranktape.analyze.engine.cache import Cache, Found, record_keys

if TYPE_CHECKING:
    from ranktape.analyze.engine.cache_object import CacheObject
    from ranktape.storage import Records

_COLUMNS = ("site", "checksum", "dtype", "compute_dtype", "shape", "sample_dim", "keep", "nbytes")
"""What tells a record of a run from every other one at the same path, and from what it was before."""

_LOOKS_AHEAD = 8
"""Groups whose cached objects are fetched before they are needed."""

_FILES = "files"
"""The group of the records of a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSpan:
    """Neighbouring records of one group, some of which are known."""

    group: str
    """The path of the group."""
    places: range
    """Where in the selection they are."""
    keys: Sequence[str]
    """What they are known by."""
    sizes: Sequence[int]
    """Their bytes."""
    known: Mapping[int, CacheObject]
    """By place, the object that holds the payload."""
    damaged: tuple[str, ...]
    """Objects of the group that cannot be read, and are to be replaced."""

    @property
    def missing(self) -> list[int]:
        """The places of those that are to be measured."""
        return [place for place in self.places if place not in self.known]

    def key(self, place: int) -> str:
        """What a record is known by."""
        return self.keys[place - self.places.start]

    def size(self, place: int) -> int:
        """The bytes of a record."""
        return self.sizes[place - self.places.start]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    path: str
    places: slice


class WorkPlan:
    """The records of a selection in spans; made from columns, without looking at one record after the other."""

    def __init__(self, records: Records) -> None:
        self._files: Sequence[Any] = getattr(records, "files", ())
        if self._files:
            self._groups = [_Group(path=_FILES, places=slice(0, len(records)))]
        else:
            self._groups = [_Group(path=path, places=places) for path, places in records.groups()]
        self._sizes: list[int] = records.column("nbytes").tolist()
        self._columns = [] if self._files else [records.column(name) for name in _COLUMNS]

    @property
    def paths(self) -> list[str]:
        """The groups that the records are in."""
        return [group.path for group in self._groups]

    @property
    def nbytes(self) -> int:
        """Of all records."""
        return sum(self._sizes)

    def spans(self, cache: Cache | None) -> Generator[RecordSpan, None, None]:
        """All records in their order, in spans whose unknown records are one batch; the cache is looked at ahead."""
        with ThreadPoolExecutor(_LOOKS_AHEAD) as pool:
            ahead: list[tuple[_Group, Future[Found] | None]] = []
            groups = iter(self._groups)
            try:
                for group in itertools.chain(groups, [None] * _LOOKS_AHEAD):
                    if group is not None:
                        ahead.append((group, None if cache is None else pool.submit(cache.find, group.path)))
                    if ahead and (group is None or len(ahead) > _LOOKS_AHEAD):
                        first, looked = ahead.pop(0)
                        if looked is None:
                            yield from self._of_group(first, Found(), keys=[""] * _length(first.places))
                        else:
                            yield from self._of_group(first, looked.result(), keys=self._keys(first.places))
            finally:
                for _, looked in ahead:
                    if looked is not None:
                        looked.cancel()

    def _of_group(self, group: _Group, found: Found, *, keys: Sequence[str]) -> Iterator[RecordSpan]:
        first = group.places.start
        start, num_missing, nbytes = first, 0, 0
        for place in range(first, group.places.stop):
            is_known = keys[place - first] in found.objects
            size = 0 if is_known else self._sizes[place]
            is_full = num_missing and nbytes + size > BATCH_NBYTES
            if place > start and (is_full or place - start >= BATCH_RECORDS):
                yield self._span(group, start, place, keys, found)
                start, num_missing, nbytes = place, 0, 0
            num_missing += not is_known
            nbytes += size
        yield self._span(group, start, group.places.stop, keys, found)

    def _span(self, group: _Group, start: int, stop: int, keys: Sequence[str], found: Found) -> RecordSpan:
        own = keys[start - group.places.start : stop - group.places.start]
        known = {
            place: found.objects[key]
            for place, key in zip(range(start, stop), own, strict=True)
            if key in found.objects
        }
        return RecordSpan(
            group=group.path,
            places=range(start, stop),
            keys=own,
            sizes=self._sizes[start:stop],
            known=known,
            damaged=tuple(found.damaged),
        )

    def _keys(self, places: slice) -> list[str]:
        if self._files:
            return record_keys([[_state_of(file) for file in self._files[places]]])
        return record_keys([column[places].tolist() for column in self._columns])


def _length(places: slice) -> int:
    return int(places.stop - places.start)


def _state_of(file: Any) -> str:
    """What tells a file from what it was before it was written again."""
    status: os.stat_result | None = None
    with suppress(OSError):  # whoever reads it says why it cannot be
        status = file.path.stat()
    if status is None:
        return f"{file.site}\n{os.urandom(16).hex()}"
    # The two last change where a file was written over by one of the same size, and its time set back or kept.
    return "\n".join(map(str, (file.site, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)))
