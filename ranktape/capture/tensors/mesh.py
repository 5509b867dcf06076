"""Writes down the place of a tensor in a mesh of ranks.

As the document that `ranktape.capture.tensors.placement` describes, as JSON text.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

REPLICATE = "replicate"
"""The word of an axis along which every rank has the same."""

MAX_KINDS = 4096
"""Kinds of tensors whose placements are kept; ragged batches bring ever new shapes."""


@dataclass(frozen=True, slots=True)
class Axes:
    """A mesh of ranks, and this rank's place in it."""

    names: tuple[str, ...]
    """Of the axes, as the mesh calls them; `axis_0` and so on where it does not."""
    shape: tuple[int, ...]
    """Ranks along each."""
    ranks: Any
    """Global ranks, as nested tuples."""
    coordinates: tuple[int, ...]
    """This rank's."""

    def __post_init__(self) -> None:
        """Check that the parts fit together."""
        assert len(self.names) == len(self.shape) == len(self.coordinates), self


def describe(axes: Axes, words: tuple[str, ...], *, global_shape: tuple[int, ...], offset: tuple[int, ...]) -> str:
    """The document of a placement, as JSON."""
    document = {
        "mesh": {"axes": axes.names, "shape": axes.shape, "ranks": axes.ranks},
        "coordinates": axes.coordinates,
        "placements": words,
        "global_shape": global_shape,
        "offset": [int(start) for start in offset],
        "partial": any(word.startswith("partial") for word in words),
    }
    return json.dumps(document)


@functools.lru_cache(maxsize=MAX_KINDS)
def describe_even(axes: Axes, words: tuple[str, ...], shape: tuple[int, ...]) -> str:
    """The placement of a plain tensor of that shape, of which all ranks along a sharded axis have as much."""
    global_shape, offset = list(shape), [0] * len(shape)
    for word, size, coordinate in zip(words, axes.shape, axes.coordinates, strict=True):
        kind, _, rest = word.partition("(")
        if kind in {"shard", "strided_shard"}:
            dim, _, factor = rest.rstrip(")").partition(", ")
            # Each of the factor's parts is split over the axis; a strided shard begins where its first piece does.
            offset[int(dim)] = coordinate * shape[int(dim)] // int(factor or 1)
            global_shape[int(dim)] = size * shape[int(dim)]
    return describe(axes, words, global_shape=tuple(global_shape), offset=tuple(offset))


def axes_of_group(name: str, group: Any) -> Axes:
    """A process group as a mesh of one axis."""
    import torch.distributed as dist

    ranks = tuple(dist.get_process_group_ranks(group))
    return Axes((name,), (len(ranks),), ranks, (ranks.index(dist.get_rank()),))
