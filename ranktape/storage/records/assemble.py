"""Assembles a tensor from the shards that ranks recorded.

The placements of the records give the position of each shard, which shards are replicas of each other, and which are
summands. Replicas are compared by their checksums and read once. A missing shard is an error and never zeros.

A placement is a JSON document with a mesh of ranks, the rank's coordinates in it, and a word for each axis:

    {"mesh": {"axes": ["dp", "tp"], "shape": [2, 2], "ranks": [[0, 1], [2, 3]]}, "coordinates": [0, 1],
     "placements": ["replicate", "shard(1)"], "global_shape": [8, 6], "offset": [0, 3], "partial": false}

`replicate`          all coordinates of the axis have the same values
`shard(D)`           dimension D is split into one shard for each coordinate, of equal length except for the last ones
`strided_shard(D, F)`  dimension D is split into F parts, and each of these along the axis: each coordinate has F pieces
                     (FSDP over tensor parallelism; if another axis then shards the dimension by F, one piece is left)
`partial(OP)`        each coordinate has a summand of a pending sum (or average, minimum, maximum)

Sizes in documents are validated before memory is allocated for them.
"""

from __future__ import annotations

import enum
import functools
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from ranktape.errors import DataError, IncompleteTensorError, ReplicaMismatchError, UsageError
from ranktape.storage.format.documents import MAX_DIMENSIONS, MAX_INTEGER, MAX_WORLD_SIZE, check_shape
from ranktape.storage.format.dtypes import dtype_row, round_once, to_torch
from ranktape.storage.format.layout import TensorSite
from ranktape.storage.format.record_info import Keep, RecordInfo

if TYPE_CHECKING:
    import torch


MAX_PIECES = 1 << 16
"""The largest number of pieces of a strided shard. No mesh is as large."""

_WORD = re.compile(r"(replicate)|(shard)\((\d{1,2})\)|(strided_shard)\((\d{1,2}), ?(\d{1,9})\)|(partial)\((\w{1,16})\)")
_SHOWN = 60


class AxisKind(enum.StrEnum):
    """The kind of placement along an axis of a mesh."""

    REPLICATE = "replicate"
    SHARD = "shard"
    STRIDED_SHARD = "strided_shard"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlacement:
    """The placement of a tensor along one axis of a mesh."""

    axis: str
    """Name of the axis."""
    size: int
    """Number of coordinates along the axis."""
    kind: AxisKind
    """Kind of placement."""
    dim: int = -1
    """The sharded dimension; -1 if none is."""
    factor: int = 1
    """Number of parts into which a strided shard is split first."""
    operation: str = ""
    """The reduction of partial values, such as `sum`; empty if they are not partial."""

    def __str__(self) -> str:
        inner = {
            AxisKind.REPLICATE: "",
            AxisKind.SHARD: f"({self.dim})",
            AxisKind.STRIDED_SHARD: f"({self.dim}, {self.factor})",
            AxisKind.PARTIAL: f"({self.operation})",
        }
        return f"{self.axis}={self.size} {self.kind}{inner[self.kind]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The placement of a record's shard in the whole tensor."""

    axes: tuple[AxisPlacement, ...]
    """Axes of the mesh, the slowest first."""
    ranks: tuple[int, ...]
    """Ranks of the mesh, flattened: its last axis is the fastest."""
    coordinates: tuple[int, ...]
    """Coordinates of the rank in the mesh."""
    global_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Start of the shard in each dimension; the extent of the dimension if the shard is empty."""

    @property
    def is_partial(self) -> bool:
        """Whether a reduction over ranks is pending."""
        return any(axis.kind is AxisKind.PARTIAL for axis in self.axes)

    def fixed(self, *kinds: AxisKind) -> tuple[int | None, ...]:
        """The coordinates, with None along axes of these kinds."""
        return tuple(None if axis.kind in kinds else at for axis, at in zip(self.axes, self.coordinates, strict=True))

    def spans(self, shape: Sequence[int]) -> list[list[tuple[int, int]]]:
        """The ranges of the whole tensor, for each dimension, that a shard of that shape covers, in its order."""
        return [self._spans_of(dim, extent) for dim, extent in enumerate(shape)]

    def _spans_of(self, dim: int, extent: int) -> list[tuple[int, int]]:
        start = self.offset[dim]
        if not extent:
            return []
        cuts = [(axis, at) for axis, at in zip(self.axes, self.coordinates, strict=True) if axis.dim == dim]
        if all(axis.kind is not AxisKind.STRIDED_SHARD for axis, _ in cuts):
            return [(start, start + extent)]
        pieces = [(0, self.global_shape[dim])]
        for axis, at in cuts:
            parts = (_cut(pieces, number, of=axis.factor) for number in range(axis.factor))
            pieces = _joined(piece for part in parts for piece in _cut(part, at, of=axis.size))
        if not pieces or pieces[0][0] != start or sum(last - first for first, last in pieces) != extent:
            raise DataError(
                f"the placement of a part says offset {start} and {extent} elements of dimension {dim}, and its "
                f"strided shards give {str(pieces)[:_SHOWN]}: see 'ranktape check'"
            )
        return pieces


def _cut(pieces: Sequence[tuple[int, int]], number: int, *, of: int) -> list[tuple[int, int]]:
    """One of the `of` parts into which torch splits consecutive pieces; the last parts may be shorter."""
    length = sum(last - first for first, last in pieces)
    step = -(-length // of)
    start, stop = number * step, min(length, (number + 1) * step)
    part, done = [], 0
    for first, last in pieces:
        low, high = max(first, first + start - done), min(last, first + stop - done)
        if low < high:
            part.append((low, high))
        done += last - first
    return part


def _joined(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges, with adjacent ones merged."""
    joined: list[tuple[int, int]] = []
    for first, last in pieces:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined


def parse_placement(info: RecordInfo) -> Placement | None:
    """The placement of a record; None for a whole tensor."""
    if info.placement is None:
        return None
    try:
        return _parse(info.placement, info)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        name = f"{info.module or '(no module)'} {info.tensor_name} of iteration {info.iteration}, rank {info.rank}"
        raise DataError(f"the placement of {name} is none that can be assembled: {error}") from error


def _parse(document: Mapping[str, Any], info: RecordInfo) -> Placement:
    mesh, words = document["mesh"], document["placements"]
    if not isinstance(mesh, Mapping):
        raise TypeError(f"its mesh names no ranks ({str(mesh)[:_SHOWN]})")
    names, sizes = mesh["axes"], _integers(mesh["shape"], "mesh shape", low=1)
    is_complete = isinstance(names, list) and isinstance(words, list) and len(names) == len(sizes) == len(words)
    if not is_complete or len(sizes) > MAX_DIMENSIONS:
        raise ValueError("it has not one name, one size and one word for each axis")
    if math.prod(sizes) > MAX_WORLD_SIZE:
        raise ValueError(f"a mesh of {str(sizes)[:_SHOWN]}")
    ranks = _flat(mesh["ranks"], sizes)
    if len(set(ranks)) != len(ranks):
        raise ValueError("a rank is twice in its mesh")
    coordinates = _integers(document["coordinates"], "coordinates")
    if len(coordinates) != len(sizes) or any(at >= size for at, size in zip(coordinates, sizes, strict=True)):
        raise ValueError(f"coordinates {str(coordinates)[:_SHOWN]} in a mesh of {str(sizes)[:_SHOWN]}")
    if ranks[flat_index(coordinates, sizes)] != info.rank:
        raise ValueError(f"its coordinates are those of rank {ranks[flat_index(coordinates, sizes)]}")
    axes = tuple(_axis(str(name), size, word) for name, size, word in zip(names, sizes, words, strict=True))
    global_shape = _integers(document["global_shape"], "global_shape")
    offset = _integers(document["offset"], "offset")
    _check_extents(global_shape, offset, info.shape)
    if any(axis.dim >= len(global_shape) for axis in axes):
        raise ValueError(f"it shards a dimension that a tensor of {len(global_shape)} dimensions does not have")
    placement = Placement(axes=axes, ranks=ranks, coordinates=coordinates, global_shape=global_shape, offset=offset)
    if document["partial"] is not placement.is_partial:
        raise ValueError(f"partial is {str(document['partial'])[:_SHOWN]}, and its words say {placement.is_partial}")
    return placement


def flat_index(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    """The index of coordinates in a flattened mesh whose last axis is the fastest."""
    place = 0
    for at, size in zip(coordinates, sizes, strict=True):
        place = place * size + at
    return place


def _axis(name: str, size: int, word: Any) -> AxisPlacement:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(f"the word {word[:_SHOWN]!r}")
    replicate, shard, dim, strided, strided_dim, factor, _, operation = match.groups()
    if replicate:
        return AxisPlacement(axis=name, size=size, kind=AxisKind.REPLICATE)
    if shard:
        return AxisPlacement(axis=name, size=size, kind=AxisKind.SHARD, dim=int(dim))
    if strided:
        if not 1 <= int(factor) <= MAX_PIECES:
            raise ValueError(f"a strided shard of {factor} parts, allowed are 1 to {MAX_PIECES}")
        return AxisPlacement(
            axis=name, size=size, kind=AxisKind.STRIDED_SHARD, dim=int(strided_dim), factor=int(factor)
        )
    return AxisPlacement(axis=name, size=size, kind=AxisKind.PARTIAL, operation=operation)


def _check_extents(global_shape: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> None:
    if not len(global_shape) == len(offset) == len(shape):
        raise ValueError(
            f"{len(global_shape)} dimensions and {len(offset)} offsets of a part that has {len(shape)} dimensions"
        )
    check_shape(global_shape, itemsize=1)
    for start, extent, whole in zip(offset, shape, global_shape, strict=True):
        if start + extent > whole:
            raise ValueError(
                f"offset {list(offset)} and shape {list(shape)} lead out of the whole, {list(global_shape)}"
            )


def _flat(ranks: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a mesh in nested lists."""
    level = [ranks]
    for size in sizes:
        if not all(isinstance(part, list) and len(part) == size for part in level):
            raise ValueError(f"its ranks are not those of a mesh of {str(list(sizes))[:_SHOWN]}")
        level = list(itertools.chain.from_iterable(level))
    return _integers(level, "ranks")


def _integers(values: Any, name: str, *, low: int = 0) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(one) is int and low <= one <= MAX_INTEGER for one in values):
        raise ValueError(f"{name} {str(values)[:_SHOWN]}")
    return tuple(values)


class ReadableRecord(Protocol):
    """A record whose values can be read."""

    @property
    def info(self) -> RecordInfo:
        """Its metadata."""
        ...

    def read(self, sample: int | None = None) -> np.ndarray[Any, Any]:
        """Its values, or those of one sample."""
        ...


AnyRecord = TypeVar("AnyRecord", bound=ReadableRecord)
"""The kind of record in a view."""

_MAX_CELLS = 1 << 22
"""The largest grid on which coverage is checked. A mesh of many thousand ranks has as many cells."""

_MAX_CUT = 16
"""The largest number of sharded dimensions. A mesh has an axis for each."""

_MAX_NAMED = 8
"""The number of ranks that a message names."""

REPLICAS = ("check", "ignore")
"""The treatment of replicas: they must have equal bits, or the first one is used."""

Spans = list[list[tuple[int, int]]]
"""The ranges of the whole tensor, for each dimension, that a shard covers."""


class Part(NamedTuple, Generic[AnyRecord]):
    """A record and its placement."""

    record: AnyRecord
    placement: Placement


def _part(record: AnyRecord) -> Part[AnyRecord]:
    """A record with its placement. A whole tensor has one shard."""
    info = record.info
    whole = Placement(
        axes=(), ranks=(info.rank,), coordinates=(), global_shape=info.shape, offset=(0,) * len(info.shape)
    )
    return Part(record, parse_placement(info) or whole)


class GlobalView(Generic[AnyRecord]):
    """A tensor over all ranks that had shards of it. No values are read before `read`."""

    def __init__(self, parts: Sequence[Part[AnyRecord]], *, replicas: str) -> None:
        self.records: tuple[AnyRecord, ...] = tuple(record for record, _ in parts)
        """Its shards and their replicas, in the order of the selection."""
        self._parts = parts
        self._replicas = replicas
        first, placement = parts[0]
        self._axes = placement.axes
        self.dtype: str = first.info.dtype
        """Dtype of the elements."""
        self.shape: tuple[int, ...] = placement.global_shape
        """Shape of the whole tensor."""
        self.is_partial: bool = placement.is_partial
        """Whether ranks had summands of it, which `read` reduces."""
        self.placement: str = ", ".join(map(str, placement.axes))
        """The placement along each axis, such as `dp=2 replicate, tp=2 shard(1)`; empty for a tensor of one rank."""
        known = {record.info.rank for record in self.records}
        self.missing_ranks: tuple[int, ...] = tuple(rank for rank in placement.ranks if rank not in known)
        """Ranks of the mesh without a record in the selection."""

    def __repr__(self) -> str:
        first = self.records[0].info
        what = f"{first.module or '(no module)'} {first.operation} {first.phase} {first.tensor_name}"
        where = f"iteration={first.iteration} microbatch={first.microbatch} call={first.call}"
        return f"<GlobalView {what} {where} {self.dtype}{list(self.shape)} of {len(self.records)} records>"

    def differing_replicas(self) -> list[tuple[int, ...]]:
        """The ranks with replicas of a shard, for each shard whose replicas differ in their bits."""
        return [
            tuple(record.info.rank for record, _ in copies)
            for copies in self._grouped(AxisKind.REPLICATE)
            if len({(record.info.shape, record.info.checksum) for record, _ in copies}) > 1
        ]

    def read(self) -> np.ndarray[Any, Any]:
        """The values as a numpy array of the captured dtype. Memory is needed for the whole tensor and one shard.

        Summands are added in float64 (integers in int64) in the order of the mesh, and rounded once.

        Raises:
            DataError: bytes are missing or damaged, or placements contradict each other.
            IncompleteTensorError: a shard is missing: a rank, or samples that were not recorded.
            ReplicaMismatchError: replicas differ and are not ignored.
            UsageError: the values of a shard were not kept, or its summands cannot be reduced.
        """
        if self.records[0].info.placement is None:
            return self.records[0].read()
        if self._replicas == "check" and (differing := self.differing_replicas()):
            raise ReplicaMismatchError(
                f"copies of {self!r} differ between {_ranks(differing[0])}"
                + (f", and those of {len(differing) - 1} more parts" if len(differing) > 1 else "")
                + ": read each record, or take the first with replicas='ignore'"
            )
        # One replica of each shard, or its summands.
        boxes = [self._summands(box) for box in self._grouped(AxisKind.REPLICATE, AxisKind.PARTIAL)]
        # The largest shard is read first, so that no memory is allocated before bytes have been read.
        boxes = [box for box in boxes if math.prod(box[0].record.info.shape)]
        boxes.sort(key=lambda box: -math.prod(box[0].record.info.shape))
        spans = [box[0].placement.spans(box[0].record.info.shape) for box in boxes]
        self._check_cover(spans)
        assembled: np.ndarray[Any, Any] | None = None
        for box, ranges in zip(boxes, spans, strict=True):
            values = self._put_together(box)
            if assembled is None:
                assembled = np.empty(self.shape, dtype=values.dtype)
            _put(assembled, values, ranges)
        return np.empty(self.shape, dtype=dtype_row(self.dtype).numpy_dtype) if assembled is None else assembled

    def tensor(self) -> torch.Tensor:
        """The values as a CPU tensor.

        Raises:
            DataError: see `read`.
            UsageError: see `read`; also if torch does not have the dtype.
        """
        return to_torch(self.read(), dtype=self.dtype, shape=self.shape)

    def _grouped(self, *kinds: AxisKind) -> list[list[Part[AnyRecord]]]:
        """Groups of shards whose coordinates differ only along axes of these kinds."""
        groups: dict[tuple[int | None, ...], list[Part[AnyRecord]]] = {}
        for part in self._parts:
            groups.setdefault(part.placement.fixed(*kinds), []).append(part)
        return list(groups.values())

    def _summands(self, box: Sequence[Part[AnyRecord]]) -> list[Part[AnyRecord]]:
        """One replica of each summand of a shard, in the order of the mesh; a single one if nothing is partial."""
        copies: dict[tuple[int | None, ...], Part[AnyRecord]] = {}
        for part in box:
            copies.setdefault(part.placement.fixed(AxisKind.REPLICATE), part)
        count = math.prod(axis.size for axis in self._axes if axis.kind is AxisKind.PARTIAL)
        if len(copies) < count:
            raise IncompleteTensorError(f"{count - len(copies)} of {count} summands of {self!r} {self._why_missing()}")
        chosen = [copies[key] for key in sorted(copies, key=lambda key: [-1 if at is None else at for at in key])]
        infos = [record.info for record, _ in chosen]
        if reduced := next((record for record, _ in chosen if record.info.keep != Keep.VALUES), None):
            raise UsageError(
                f"of {reduced!r} the {reduced.info.keep} of a part were kept, and values alone are assembled"
            )
        if {(info.shape, info.dtype) for info in infos} != {(infos[0].shape, self.dtype)}:
            raise DataError(f"parts of {self!r} have several shapes or dtypes: see 'ranktape check'")
        return chosen

    def _check_cover(self, spans: Sequence[Spans]) -> None:
        """Check that the shards cover the whole tensor and do not overlap."""
        num_there = sum(math.prod(sum(last - first for first, last in pieces) for pieces in box) for box in spans)
        num_wanted = math.prod(self.shape)
        if num_there < num_wanted:
            raise IncompleteTensorError(
                f"{num_wanted - num_there} of {num_wanted} elements of {self!r} {self._why_missing()}"
            )
        if num_there != num_wanted or not _is_tiled(spans):
            raise DataError(f"the parts of {self!r} lie over each other: their placements are damaged")

    def _why_missing(self) -> str:
        if self.missing_ranks:
            return f"are missing: there is no record of {_ranks(self.missing_ranks)} here"
        return "are missing: of parts not all samples were recorded"

    def _put_together(self, summands: Sequence[Part[AnyRecord]]) -> np.ndarray[Any, Any]:
        if not self.is_partial:
            return summands[0].record.read()
        operations = {axis.operation for axis in self._axes if axis.kind is AxisKind.PARTIAL}
        operation = operations.pop()
        if operations or operation not in _OPERATIONS:
            raise UsageError(
                f"parts of {self!r} are to be put together by {', '.join(sorted({operation, *operations}))}: "
                f"one of {', '.join(_OPERATIONS)} can be; read each record instead"
            )
        row = dtype_row(self.dtype)
        wide = np.complex128 if row.is_complex else np.float64 if row.is_floating else np.int64
        arrays = (record.read().astype(wide) for record, _ in summands)
        # Infinities of opposite signs give NaN, and overflow gives infinity, as in the reduction on the ranks.
        with np.errstate(over="ignore", invalid="ignore"):
            total = functools.reduce(_OPERATIONS[operation], arrays)
            return round_once(total / len(summands) if operation == "avg" else total, row=row)


_OPERATIONS: dict[str, Any] = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum}
"""The reduction for the operation of a partial placement."""


def assemble_records(records: Iterable[AnyRecord], *, replicas: str = "check") -> list[GlobalView[AnyRecord]]:
    """The tensors assembled from records, in the order of their first records.

    Raises:
        UsageError: `replicas` is neither "check" nor "ignore".
    """
    _check_policy(replicas)
    groups: dict[Any, list[Part[AnyRecord]]] = {}
    for part in map(_part, records):
        groups.setdefault(_key(part), []).append(part)
    return [GlobalView(parts, replicas=replicas) for parts in groups.values()]


def view_of(record: AnyRecord, *, siblings: Iterable[AnyRecord], replicas: str = "check") -> GlobalView[AnyRecord]:
    """The tensor assembled from a record and those of its siblings that belong to it.

    Raises:
        UsageError: `replicas` is neither "check" nor "ignore".
    """
    _check_policy(replicas)
    key = _key(_part(record))
    parts = [_part(sibling) for sibling in siblings if _is_alike(sibling, record)]
    return GlobalView([part for part in parts if _key(part) == key], replicas=replicas)


def _check_policy(replicas: str) -> None:
    if replicas not in REPLICAS:
        raise UsageError(f"replicas={replicas!r} is not allowed: use one of {', '.join(REPLICAS)}")


def _is_alike(sibling: ReadableRecord, record: ReadableRecord) -> bool:
    """Whether two records have placements of one mesh and one tensor. A damaged placement of the other is allowed."""
    alike = ("mesh", "placements", "global_shape")
    documents = [info.placement or {} for info in (sibling.info, record.info)]
    left, right = ([json.dumps(document.get(name), sort_keys=True) for name in alike] for document in documents)
    return left == right


def _key(part: Part[Any]) -> Any:
    """The fields that shards of one tensor share."""
    info, placement = part.record.info, part.placement
    site = TensorSite.of(info)
    return info.iteration, info.attempt, site, placement.axes, placement.ranks, placement.global_shape


def _put(whole: np.ndarray[Any, Any], values: np.ndarray[Any, Any], spans: Spans) -> None:
    """Copy a shard to its ranges of the whole tensor."""
    moves = []
    for pieces in spans:
        starts = itertools.accumulate((last - first for first, last in pieces), initial=0)
        ends = [(start, start + last - first) for start, (first, last) in zip(starts, pieces, strict=False)]
        moves.append(list(zip(pieces, ends, strict=True)))
    for move in itertools.product(*moves):
        target = tuple(slice(*piece) for piece, _ in move)
        source = tuple(slice(*piece) for _, piece in move)
        whole[target] = values[source]


def _is_tiled(spans: Sequence[Spans]) -> bool:
    """Whether shards, which together have as many elements as the whole tensor, cover each element once."""
    if not spans:
        return True
    num_dims = len(spans[0])
    marks = [sorted({end for box in spans for piece in box[dim] for end in piece}) for dim in range(num_dims)]
    cut = [dim for dim in range(num_dims) if len(marks[dim]) > 2]  # noqa: PLR2004  # two ends are one cell
    if math.prod(len(marks[dim]) - 1 for dim in cut) > _MAX_CELLS or len(cut) > _MAX_CUT:
        return False
    grid = np.zeros([len(marks[dim]) - 1 for dim in cut], dtype=np.int32)
    for box in spans:
        cells = [
            [cell for first, last in box[dim] for cell in range(*np.searchsorted(marks[dim], (first, last)))]
            for dim in cut
        ]
        grid[np.ix_(*cells) if cells else ()] += 1
    return bool((grid == 1).all())


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_MAX_NAMED]))
    return f"rank{'s' if len(ranks) > 1 else ''} {named}" + (", ..." if len(ranks) > _MAX_NAMED else "")
