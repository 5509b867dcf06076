"""What do the tensors of an iteration take: in the ring, in the store, and in objects there?

Objects are counted by the writer's own rule: small tensors of one kind go into one array, large ones have one each.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.histograms.histogram import measure
from ranktape.capture.settings.options import Policy
from ranktape.capture.writing.counting import reduce_to
from ranktape.capture.writing.kept_nbytes import kept_nbytes
from ranktape.capture.writing.storing import COUNT_FROM_NBYTES
from ranktape.storage import stack
from ranktape.storage.dtypes import numpy_dtype
from ranktape.storage.record import Keep, RecordInfo

if TYPE_CHECKING:
    from ranktape.capture.settings.options import CaptureOptions

ARRAY_OBJECTS = 2
"""An array is its document and its values."""

COMMIT_OBJECTS = 4
"""Of an iteration, for each rank: the catalogue with its document, the commit, the marker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What one iteration takes on one rank."""

    num_tensors: int
    """Tensors that are recorded."""
    nbytes: int
    """Bytes of their values."""
    staged_nbytes: int
    """Bytes that they take in the ring."""
    stored_nbytes: int
    """Bytes of what is kept of them, before it is packed."""
    num_objects: int
    """Objects in the store."""
    kept: dict[str, int]
    """For `values`, `histogram` and `statistics`: the tensors of which that is kept."""
    largest: str
    """The name of the largest tensor; empty where there is none."""
    largest_nbytes: int
    """Bytes that it takes in the ring."""


def footprint_of(headers: Sequence[tuple[bytes, int]], options: CaptureOptions) -> Footprint:
    """What tensors take whose headers are given, each with the bytes of its slot."""
    slots = [(json.loads(header), nbytes) for header, nbytes in headers]
    infos = [_info_of(header) for header, _ in slots]
    kept = [_kept_of(header, info) for (header, _), info in zip(slots, infos, strict=True)]
    names = [
        f"{info.module or info.layer_type} {info.operation} {info.phase} {info.tensor_name}".strip() for info in infos
    ]
    largest = max(range(len(slots)), key=lambda number: slots[number][1], default=None)
    return Footprint(
        num_tensors=len(slots),
        nbytes=sum(info.nbytes for info in infos),
        staged_nbytes=sum(nbytes for _, nbytes in slots),
        stored_nbytes=sum(one.nbytes for one in kept),
        num_objects=_num_arrays(kept, options) * ARRAY_OBJECTS + COMMIT_OBJECTS,
        kept=dict(sorted(Counter(str(one.keep) for one in kept).items())),
        largest="" if largest is None else names[largest],
        largest_nbytes=0 if largest is None else slots[largest][1],
    )


def _info_of(header: dict[str, Any]) -> RecordInfo:
    shape = tuple(header["shape"])
    dtype = numpy_dtype(header["dtype"])
    known = {name: header[name] for name in RecordInfo.__dataclass_fields__ if name in header}
    return RecordInfo(
        **{**known, "shape": shape, "keep": Keep.VALUES.value},
        rank=0,
        attempt=0,
        nbytes=int(np.prod(shape, dtype=np.int64)) * dtype.itemsize,
        overflow=measure(np.zeros(1, dtype=dtype), sample_dim=None),
        checksum="",
    )


def _kept_of(header: dict[str, Any], info: RecordInfo) -> RecordInfo:
    # Of one value as of all of them it is known whether something else is kept.
    one = np.zeros(1, dtype=numpy_dtype(info.dtype))
    keep = str(header.get("keep", Keep.VALUES.value))
    if reduce_to(keep, one, info=info) is None:
        return info
    nbytes = kept_nbytes(keep, nbytes=info.nbytes, dtype=info.dtype, compute_dtype=info.compute_dtype)
    return dataclasses.replace(info, keep=keep, nbytes=nbytes)


def _num_arrays(kept: Sequence[RecordInfo], options: CaptureOptions) -> int:
    below = COUNT_FROM_NBYTES if options.policy == Policy.HISTOGRAM else stack.STACK_BELOW_NBYTES
    stacks = stack.Stacks()
    count = 0
    for info in kept:
        if not 0 < info.nbytes < below:
            count += 1
            continue
        # Only its size counts: no memory is behind it.
        array = np.broadcast_to(np.zeros(1, dtype=np.uint8), (info.nbytes,))
        full = stacks.add(stack.Held(array=array, info=info, site="", release=_nothing))
        count += full is not None
        if stacks.nbytes > stack.MAX_HELD_NBYTES:
            count += len(stacks.take_all())
    return count + len(stacks.take_all())


def _nothing() -> None:
    pass
