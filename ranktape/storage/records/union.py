"""Puts selections of several sources together as one, in which `source` says which of them a record is of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.errors import UsageError
from ranktape.storage.format.catalogue import concatenate
from ranktape.storage.query.columns import Column, StringColumn, rows_of
from ranktape.storage.records.record import Record
from ranktape.storage.records.records import SOURCE, Records, SourcePart

if TYPE_CHECKING:
    import zarr

    from ranktape.storage.records.assemble import GlobalView


def unite(sources: Mapping[str, Records]) -> Records:
    """The records of several selections as one, those of the first before those of the second.

    A record keeps all its fields; `source` is the name that its selection has here. Records of different sources are
    never parts or copies of one tensor.

    Raises:
        UsageError: there is no selection.
    """
    if not sources:
        raise UsageError("there is nothing to unite: give one selection of records or more")
    parts = tuple(sources.items())
    return UnionRecords(parts, np.arange(sum(len(records) for _, records in parts)))


def short_names(paths: Sequence[str]) -> list[str]:
    """What to call each of several places: its path without the folders that begin or end all of them.

    `bf16` and `mxfp8` for runs/bf16 and runs/mxfp8, of one place its last name. Places are different, and so are
    their names.
    """
    split = [
        [word for word in path.replace("://", "/").split("/") if word not in {"", "."}] or [path] for path in paths
    ]
    if len(split) == 1:
        return [split[0][-1]]
    head = _num_alike(split)
    tail = _num_alike([words[head:][::-1] for words in split])
    # Of what lies in another one nothing would be left.
    head -= any(len(words) == head for words in split) and head > 0
    names = ["/".join(words[head : len(words) - tail]) for words in split]
    if not all(names) or len(set(names)) < len(names):
        names = ["/".join(words[head:]) for words in split]
    return names if len(set(names)) == len(names) else list(paths)


def _num_alike(paths: Sequence[Sequence[str]]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda words: len(set(words)) == 1, zip(*paths, strict=False)))


class UnionReader:
    """Names where the records come from; each reads its values from its own source."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.url = " and ".join(urls)
        """What the sources are called in messages."""

    def read(self, record: Record, *, sample: int | None) -> np.ndarray[Any, Any]:
        """What is kept of a record."""
        return record.reader.read(record, sample=sample)

    def parts(self, record: Record) -> Iterator[np.ndarray[Any, Any]]:
        """The values of a record, a part after the other."""
        return record.reader.parts(record)

    def open_array(self, path: str) -> zarr.Array[Any]:
        """Nothing.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{path} may be an array of each of {self.url}: ask one of them")

    def siblings(self, record: Record) -> Any:
        """What all ranks recorded at the place of a record, in its own source."""
        return record.reader.siblings(record)


class UnionRecords(Records):
    """The records of several sources; a narrower selection holds those that are left of each."""

    def __init__(self, parts: Sequence[tuple[str, Records]], rows: np.ndarray[Any, Any]) -> None:
        """Take the selections by name, and which of all their records are meant."""
        super().__init__(UnionReader([records.reader.url for _, records in parts]), (), rows)
        self._parts = tuple(parts)
        self._starts = np.cumsum([0, *(len(records) for _, records in parts)])

    @property
    def is_costly(self) -> bool:
        """Whether looking at a single record reads its values, in any of the sources."""
        return any(records.is_costly for _, records in self._parts)

    @property
    def files(self) -> Sequence[Any]:
        """The file of each record, where all sources are of files."""
        if not all(getattr(records, "files", ()) for _, records in self._parts):
            return ()
        known = list(itertools.chain.from_iterable(getattr(records, "files", ()) for _, records in self._parts))
        return [known[row] for row in self._rows.tolist()]

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources that records are of, in their order."""
        return tuple(self._parts[number][0] for number in np.unique(self._numbers(self._rows)).tolist())

    def groups(self) -> list[tuple[str, slice]]:
        """As of one source; groups of the same path in two of them do not follow one another as one."""
        found: list[tuple[str, slice]] = []
        for part in self.parts():
            first = int(part.places[0])
            groups = part.records.groups()
            found += [(path, slice(first + places.start, first + places.stop)) for path, places in groups]
        return found

    def parts(self) -> list[SourcePart]:
        """Runs of records of one source: where they are in the selection, and themselves."""
        numbers = self._numbers(self._rows)
        firsts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(self)] if len(self) else [0]
        return [self._part(np.arange(first, last), int(numbers[first])) for first, last in itertools.pairwise(firsts)]

    def by_source(self) -> list[SourcePart]:
        """All records of each source: their places, and themselves."""
        numbers = self._numbers(self._rows)
        return [self._part(np.flatnonzero(numbers == number), number) for number in np.unique(numbers).tolist()]

    def unfiltered(self) -> tuple[Records, np.ndarray[Any, Any]]:
        """All records of the iterations of all sources, and at which places those of this selection are there."""
        whole = [(name, *records.unfiltered()) for name, records in self._parts]
        starts = np.cumsum([0, *(len(records) for _, records, _ in whole)])
        places = np.concatenate([start + rows for start, (_, _, rows) in zip(starts, whole, strict=False)])
        every = UnionRecords([(name, records) for name, records, _ in whole], np.arange(int(starts[-1])))
        return every, places[self._rows]

    def assemble(self, *, replicas: str = "check") -> list[GlobalView[Record]]:
        """As of one source; tensors are put together from parts of one of them alone."""
        assembled = (part.records.assemble(replicas=replicas) for part in self.by_source())
        return list(itertools.chain.from_iterable(assembled))

    def _read(self, rows: np.ndarray[Any, Any]) -> Iterator[Record]:
        for part in self._take(rows).parts():
            yield from part.records

    def _take(self, rows: np.ndarray[Any, Any]) -> UnionRecords:
        return UnionRecords(self._parts, rows)

    def _source(self, rows: np.ndarray[Any, Any]) -> Callable[[str], Column]:
        numbers = self._numbers(rows)

        def column(name: str) -> Column:
            if name == SOURCE:
                return StringColumn(codes=numbers.astype(np.uint32), table=[named for named, _ in self._parts])
            if not len(rows):
                return self._parts[0][1].take([]).stored(name)
            order = np.argsort(numbers, kind="stable")
            parts = UnionRecords(self._parts, rows[order]).parts()
            columns = (part.records.stored(name) for part in parts)
            return rows_of(concatenate(columns), np.argsort(order, kind="stable"))

        return column

    def _numbers(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _part(self, places: np.ndarray[Any, Any], number: int) -> SourcePart:
        name, records = self._parts[number]
        return SourcePart(name, places, records.take((self._rows[places] - self._starts[number]).tolist()))
