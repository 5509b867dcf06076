"""Reads the placement of a record: which part of which tensor the rank held, and who has the rest.

A placement is a JSON document of a mesh of ranks, the rank's coordinates in it, and one word for each axis:

    {"mesh": {"axes": ["dp", "tp"], "shape": [2, 2], "ranks": [[0, 1], [2, 3]]}, "coordinates": [0, 1],
     "placements": ["replicate", "shard(1)"], "global_shape": [8, 6], "offset": [0, 3], "partial": false}

`replicate`          every coordinate of the axis has the same
`shard(D)`           dimension D is cut into as many parts as the axis has coordinates, each as long as the first, but
                     for those at the end
`strided_shard(D, F)`  dimension D is cut into F parts first, and each of these along the axis: each coordinate has F
                     pieces (FSDP over tensor parallelism; where another axis then shards the same dimension by F, what
                     is left of the F pieces is one)
`partial(OP)`        every coordinate has a part of a sum (or average, minimum, maximum) that is not made yet

Whoever writes a run writes these, too: nothing is allocated or looped over because a document says so.
"""

from __future__ import annotations

import enum
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ranktape.errors import DataError
from ranktape.storage.format.record_info import RecordInfo
from ranktape.storage.format.validation import MAX_DIMENSIONS, MAX_INTEGER, MAX_WORLD_SIZE, check_shape

MAX_PIECES = 1 << 16
"""Into which a strided shard is cut: no mesh is as large."""

_WORD = re.compile(r"(replicate)|(shard)\((\d{1,2})\)|(strided_shard)\((\d{1,2}), ?(\d{1,9})\)|(partial)\((\w{1,16})\)")
_SHOWN = 60


class AxisKind(enum.StrEnum):
    """What an axis of a mesh does to a tensor."""

    REPLICATE = "replicate"
    SHARD = "shard"
    STRIDED_SHARD = "strided_shard"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlacement:
    """What one axis of a mesh does to a tensor."""

    axis: str
    """Its name."""
    size: int
    """Coordinates along it."""
    kind: AxisKind
    """What it does."""
    dim: int = -1
    """The dimension that is sharded; -1 where none is."""
    factor: int = 1
    """Parts that a strided shard is cut into first."""
    operation: str = ""
    """How partial values are to be put together: `sum`, ...; empty where they are not partial."""

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
    """Where the part of a tensor lies that a record holds."""

    axes: tuple[AxisPlacement, ...]
    """Of the mesh, the slowest first."""
    ranks: tuple[int, ...]
    """The mesh, flat: its last axis is the fastest."""
    coordinates: tuple[int, ...]
    """Of the rank in the mesh."""
    global_shape: tuple[int, ...]
    """Of the whole tensor, in elements."""
    offset: tuple[int, ...]
    """Where the part begins; the length of the dimension where it has nothing of it."""

    @property
    def is_partial(self) -> bool:
        """Whether an operation over ranks is not made yet."""
        return any(axis.kind is AxisKind.PARTIAL for axis in self.axes)

    def fixed(self, *kinds: AxisKind) -> tuple[int | None, ...]:
        """The coordinates along axes of other kinds than these; None along those."""
        return tuple(None if axis.kind in kinds else at for axis, at in zip(self.axes, self.coordinates, strict=True))

    def spans(self, shape: Sequence[int]) -> list[list[tuple[int, int]]]:
        """For each dimension the ranges of the whole tensor that a part of that shape has, in its order.

        Raises:
            DataError: a strided shard says other pieces than its offset and its shape do.
        """
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
            parts = (_part(pieces, number, of=axis.factor) for number in range(axis.factor))
            pieces = _joined(piece for part in parts for piece in _part(part, at, of=axis.size))
        if not pieces or pieces[0][0] != start or sum(last - first for first, last in pieces) != extent:
            raise DataError(
                f"the placement of a part says offset {start} and {extent} elements of dimension {dim}, and its "
                f"strided shards give {str(pieces)[:_SHOWN]}: see 'ranktape check'"
            )
        return pieces


def _part(pieces: Sequence[tuple[int, int]], number: int, *, of: int) -> list[tuple[int, int]]:
    """One of the parts into which torch cuts pieces that lie one after the other; the last ones may be shorter."""
    length = sum(last - first for first, last in pieces)
    step = -(-length // of)
    start, stop = number * step, min(length, (number + 1) * step)
    found, done = [], 0
    for first, last in pieces:
        low, high = max(first, first + start - done), min(last, first + stop - done)
        if low < high:
            found.append((low, high))
        done += last - first
    return found


def _joined(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ranges, those that meet as one."""
    joined: list[tuple[int, int]] = []
    for first, last in pieces:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return joined


def parse_placement(info: RecordInfo) -> Placement | None:
    """What the placement of a record says; None for a whole tensor.

    Raises:
        DataError: it says what no placement does, or what does not fit the record.
    """
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
    """The place of coordinates in a mesh that is laid flat, the last axis the fastest."""
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
