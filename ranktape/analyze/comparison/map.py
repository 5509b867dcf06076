"""Gives where two tensors differ: by token and channel, and for single elements that stand for all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.comparison.tensors import ComparedTensor
from ranktape.analyze.engine.values import View
from ranktape.analyze.options import Output
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import UsageError
from ranktape.storage import Record

MAX_BINS = 256
"""Rows and columns of a map at most, unless asked otherwise."""

_CHANNEL_LETTERS = frozenset("HDIOCEV")
"""Letters of a layout that name channels: hidden, of one head, into and out of a layer, of the vocabulary."""

_TOKEN_LETTERS = frozenset("BTSL")
"""Letters that name samples and tokens."""

_ROWS_AT_ONCE = 1 << 18
"""Elements that are widened to float64 at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DifferenceMap:
    """The largest |a - b| in each bin of tokens and channels.

    Tokens are the dimensions of samples and tokens, laid flat, and channels the others; where the layout is not known,
    channels are the last dimension. Where one of the two is NaN, or infinite and the other not so, the difference is
    infinite; two NaN, or two equal infinities, do not differ.
    """

    values: NDArray[np.float64]
    """One row for each bin of tokens, one column for each bin of channels."""
    token_edges: NDArray[np.int64]
    """Where the bins of tokens begin, and the number of tokens."""
    channel_edges: NDArray[np.int64]
    """Where the bins of channels begin, and the number of channels."""
    token_dims: tuple[int, ...]
    """The dimensions of the tensor that are tokens."""
    channel_dims: tuple[int, ...]
    """The dimensions that are channels."""
    shape: tuple[int, ...]
    """Of the tensors."""

    def to_table(self) -> Table:
        """One row for each bin, the largest difference first; the ranges hold their first and last index."""
        rows, columns = (index.reshape(-1) for index in np.indices(self.values.shape))
        ordered = np.argsort(-self.values.reshape(-1), kind="stable")
        tokens, channels = self.token_edges.tolist(), self.channel_edges.tolist()
        values = self.values.reshape(-1).tolist()
        return Table(
            title=f"largest |a-b| of tokens (dimensions: {_dims(self.token_dims)}) and channels (dimensions: "
            f"{_dims(self.channel_dims)}) of {list(self.shape)}, in {'x'.join(map(str, self.values.shape))} bins",
            columns=(
                Column(name="token_first", kind=Kind.INTEGER, head="token"),
                Column(name="token_last", kind=Kind.INTEGER, head="to"),
                Column(name="channel_first", kind=Kind.INTEGER, head="channel"),
                Column(name="channel_last", kind=Kind.INTEGER, head="to"),
                Column(name="max_abs", kind=Kind.FLOAT, head="max |a-b|"),
            ),
            rows=tuple(
                (tokens[row], tokens[row + 1] - 1, channels[column], channels[column + 1] - 1, values[place])
                for place, row, column in zip(
                    ordered.tolist(), rows[ordered].tolist(), columns[ordered].tolist(), strict=True
                )
            ),
        )

    def write(self, output: Output) -> None:
        """Write the table where and how it was asked for; into a file of the name `.npz` the arrays.

        Raises:
            UsageError: the file cannot be written.
        """
        if output.output is not None and output.output.suffix.lower() == ".npz":
            self.save(output.output)
        else:
            output.write(self.to_table())

    def save(self, path: Path) -> None:
        """Write the arrays as one `.npz` file: `values`, `token_edges` and `channel_edges`.

        Raises:
            UsageError: the file cannot be written.
        """
        try:
            with path.open("wb") as file:
                np.savez(file, values=self.values, token_edges=self.token_edges, channel_edges=self.channel_edges)
        except OSError as error:
            raise UsageError(f"--output {path} cannot be written: {error.strerror}") from error


def difference_map(
    a: Record | ComparedTensor, b: Record | ComparedTensor, *, max_bins: int = MAX_BINS, view: View = View.SEEN
) -> DifferenceMap:
    """Where two tensors of one shape differ, and how much; a has the layout. Both are in memory.

    Any shape: one without dimensions is one token with one channel; one without elements has no bin.

    Raises:
        DataError: bytes are missing or damaged.
        StorageError: a store cannot be read.
        UsageError: shapes differ, or values were not kept.
    """
    one, other = _alike(a, b, wanted="a map needs")
    if max_bins < 1:
        raise UsageError(f"max_bins={max_bins} is not allowed: give 1 or more")
    token_dims, channel_dims = _dims_of(one.first.layout, len(one.shape))
    arrays = (_as_matrix(side.read(view=view), token_dims, channel_dims) for side in (one, other))
    tokens, channels = (
        _edges(math.prod(one.shape[dim] for dim in dims), max_bins) for dims in (token_dims, channel_dims)
    )
    return DifferenceMap(
        values=_binned(*arrays, token_edges=tokens, channel_edges=channels),
        token_edges=tokens,
        channel_edges=channels,
        token_dims=token_dims,
        channel_dims=channel_dims,
        shape=one.shape,
    )


def _dims_of(layout: str, num_dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions of tokens, and those of channels."""
    letters = layout if len(layout) == num_dims else ""
    tokens = tuple(dim for dim, letter in enumerate(letters) if letter in _TOKEN_LETTERS)
    channels = tuple(dim for dim, letter in enumerate(letters) if letter in _CHANNEL_LETTERS)
    if tokens and channels and len(tokens) + len(channels) == num_dims:
        return tokens, channels
    return tuple(range(num_dims - 1)), tuple(range(num_dims))[-1:]


def _as_matrix(array: NDArray[Any], token_dims: tuple[int, ...], channel_dims: tuple[int, ...]) -> NDArray[Any]:
    rows = math.prod(array.shape[dim] for dim in token_dims)
    columns = math.prod(array.shape[dim] for dim in channel_dims)
    return array.transpose((*token_dims, *channel_dims)).reshape(rows, columns)


def _edges(extent: int, max_bins: int) -> NDArray[np.int64]:
    """Where bins begin that are as equal as can be, none of them empty; and the extent."""
    num_bins = min(extent, max_bins)
    return np.arange(num_bins + 1, dtype=np.int64) * extent // max(1, num_bins)


def _binned(
    a: NDArray[Any], b: NDArray[Any], *, token_edges: NDArray[np.int64], channel_edges: NDArray[np.int64]
) -> NDArray[np.float64]:
    values = np.zeros((token_edges.size - 1, channel_edges.size - 1))
    if not values.size:
        return values
    step = max(1, _ROWS_AT_ONCE // a.shape[1])
    for place, (first, last) in enumerate(zip(token_edges[:-1].tolist(), token_edges[1:].tolist(), strict=True)):
        for start in range(first, last, step):
            stop = min(start + step, last)
            largest = _apart(a[start:stop], b[start:stop]).max(axis=0)
            np.maximum(values[place], np.maximum.reduceat(largest, channel_edges[:-1]), out=values[place])
    return values


def _apart(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """|a - b|, infinite where only one of the two is no finite number."""
    wide = np.complex128 if "c" in {a.dtype.kind, b.dtype.kind} else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        one, other = a.astype(wide), b.astype(wide)
        is_equal = (one == other) | (np.isnan(one) & np.isnan(other))
        apart = np.abs(one - other)
    return np.where(is_equal, 0.0, np.where(np.isnan(apart), np.inf, apart))


def _dims(dims: tuple[int, ...]) -> str:
    return ", ".join(map(str, dims)) or "none"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledPairs:
    """Elements of two tensors of one shape that are at the same places."""

    a: NDArray[np.float64]
    """Of the first; of complex elements the magnitudes."""
    b: NDArray[np.float64]
    """Of the second."""
    places: NDArray[np.int64]
    """Where they are in the tensors laid flat, ascending."""


def sample_pairs(
    a: Record | ComparedTensor, b: Record | ComparedTensor, *, count: int = 10_000, view: View = View.SEEN
) -> SampledPairs:
    """At most `count` pairs of elements, spread over the whole tensors; the same for the same shape and count.

    One place is drawn from each of `count` equal stretches, so that no dimension falls into step with them. NaN and
    infinities are among them where they are met. All elements where there are no more; none of an empty tensor.

    Raises:
        DataError: bytes are missing or damaged.
        StorageError: a store cannot be read.
        UsageError: shapes differ, values were not kept, or the count is negative.
    """
    one, other = _alike(a, b, wanted="pairs need")
    if count < 0:
        raise UsageError(f"count={count} is not allowed: give 0 or more")
    places = _places(int(np.prod(one.shape, dtype=np.int64)), count=count)
    return SampledPairs(a=_taken(one, places, view=view), b=_taken(other, places, view=view), places=places)


def _places(num_elements: int, *, count: int) -> NDArray[np.int64]:
    if num_elements <= count:
        return np.arange(num_elements, dtype=np.int64)
    edges = np.arange(count + 1, dtype=np.int64) * num_elements // max(1, count)
    drawn = np.random.default_rng(0).random(count)
    return edges[:-1] + np.floor(drawn * np.diff(edges)).astype(np.int64)


def _taken(tensor: ComparedTensor, places: NDArray[np.int64], *, view: View) -> NDArray[np.float64]:
    taken = tensor.read(view=view).reshape(-1)[places]
    with np.errstate(over="ignore", invalid="ignore"):
        if taken.dtype.kind == "c":
            return np.abs(taken.astype(np.complex128))
        return taken.astype(np.float64)


def _alike(
    a: Record | ComparedTensor, b: Record | ComparedTensor, *, wanted: str
) -> tuple[ComparedTensor, ComparedTensor]:
    """Both sides, if their values were kept and they have one shape."""
    one, other = (side if isinstance(side, ComparedTensor) else ComparedTensor(records=(side,)) for side in (a, b))
    for side in (one, other):
        if not side.has_values:
            raise UsageError(f"of {side.first!r} the {side.first.keep} were kept, and {wanted} the values")
    if one.shape != other.shape:
        raise UsageError(f"{one.first!r} and {other.first!r} have the shapes {list(one.shape)} and {list(other.shape)}")
    return one, other
