"""Determines the form in which a tensor is recorded: its samples, the layout of its dimensions, and the header.

The letters of layouts are: B batch, T tokens, H hidden (heads in attention), D dimension of a head, I and O input and
output features, V vocabulary, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ranktape.capture.passes.tracker import Call, dtype_name
from ranktape.capture.settings.rules import CaptureRule
from ranktape.capture.source import Source, TensorRole
from ranktape.capture.tensors.parts import PlainPart
from ranktape.capture.writing.counting import kept_as, kept_nbytes

_LAYOUTS = {
    # By layer type, sample dimension and number of dimensions.
    ("linear", 0, 2): "BH",
    ("linear", 0, 3): "BTH",
    ("linear", 1, 3): "TBH",
    ("linear", None, 2): "OI",
    ("attention", 0, 4): "BHTD",
    ("hidden", 0, 3): "BTH",
    ("hidden", 1, 3): "TBH",
    ("embedding", 0, 3): "BTH",
    ("embedding", 1, 3): "TBH",
}


@functools.lru_cache(maxsize=1 << 12)
def find_sample_dim(
    shape: tuple[int, ...], *, batch_size: int | None, given: int | None, layouts: Sequence[str] = ()
) -> int | None:
    """The sample dimension of an activation: the given one, that of the role, or the first one with the batch size.

    None if there is none.
    """
    if given is not None:
        return given if given < len(shape) else None
    if own := _of_length(layouts, len(shape)):
        dim = own.find("B")
        # Some tensors, such as positions, are the same for all samples and have no such dimension.
        return dim if dim >= 0 and batch_size in {None, shape[dim]} else None
    return next((dim for dim in range(min(2, len(shape) - 1)) if shape[dim] == batch_size), None)


def _of_length(layouts: Sequence[str], num_dims: int) -> str:
    return next((layout for layout in layouts if len(layout) == num_dims), "")


def keep_samples(
    part: PlainPart, *, decision: CaptureRule, sample_dim: int | None
) -> tuple[PlainPart, Sequence[int] | None] | None:
    """The part with only the selected samples, and their indices in the batch; None if it has none of the samples.

    The indices are None for all samples. A part without a sample dimension is recorded whole. So is a part that is
    sharded along the sample dimension, because no other rank knows which samples it has.
    """
    if decision.samples is None or sample_dim is None:
        return part, None
    count = part.tensor.shape[sample_dim]
    places = decision.samples.below(count)
    if len(places) == count:
        return part, None
    if not places:
        return None
    placement = part.placement
    if placement is not None:
        placement = _narrowed(placement, sample_dim, count, len(places))
        if placement is None:
            return part, None
    tensor = narrow(part.tensor, places, sample_dim=sample_dim)
    return dataclasses.replace(part, tensor=tensor, placement=placement), places


def ids_at(places: Sequence[int] | None, ids: Sequence[int | str] | None) -> Sequence[int | str] | None:
    """The identifiers of selected samples, given those of the batch. The indices themselves if there are too few."""
    if places is None:
        return ids
    if ids is None or len(ids) <= places[-1]:
        return places
    return [ids[place] for place in places]


def narrow(tensor: torch.Tensor, places: Sequence[int], *, sample_dim: int) -> torch.Tensor:
    """The samples at some indices; a view if the indices are evenly spaced."""
    first, last = places[0], places[-1]
    step = places[1] - first if len(places) > 1 else 1
    if places == list(range(first, last + 1, step)):
        return tensor[(slice(None),) * sample_dim + (slice(first, last + 1, step),)]
    # Indexing by a list would copy the list to the device and wait for it.
    return torch.cat([tensor.narrow(sample_dim, place, 1) for place in places], dim=sample_dim)


@functools.lru_cache(maxsize=1 << 10)
def _narrowed(placement: str, dim: int, extent: int, kept: int) -> str | None:
    """The placement of a shard after `kept` samples are selected; None if it does not have all samples."""
    document = json.loads(placement)
    shape = document.get("global_shape")
    if not isinstance(shape, list) or dim >= len(shape) or shape[dim] != extent:
        return None
    return json.dumps({**document, "global_shape": [*shape[:dim], kept, *shape[dim + 1 :]]})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordForm:
    """The common properties of all tensors of a site with the same dtype, shape and kind of pass."""

    header: str
    """The start of the header for the writer, as JSON without the closing brace."""
    keep: str
    """The form that the writer stores: `values`, `histogram` or `statistics`."""
    nbytes: int
    """Size of the values, in bytes."""
    kept_nbytes: int
    """Size of the stored form, in bytes, before compression."""
    sample_dim: int | None
    """The sample dimension; None if there is none."""
    places: Sequence[int] | None
    """The indices in the batch of the selected samples; None for all samples."""


def form_of(
    source: Source,
    role: TensorRole,
    whole: PlainPart,
    *,
    decision: CaptureRule,
    call: Call,
    quant_type: str,
    given_sample_dim: int | None,
) -> RecordForm | None:
    """The form of a part of a tensor under a rule; None if the rule selects none of its samples."""
    sample_dim = None
    if role.has_samples:
        shape = tuple(whole.tensor.shape)
        sample_dim = find_sample_dim(shape, batch_size=call.batch_size, given=given_sample_dim, layouts=role.layouts)
    kept = keep_samples(whole, decision=decision, sample_dim=sample_dim)
    if kept is None:
        return None
    part, places = kept
    tensor = part.tensor
    dtype = dtype_name(tensor.dtype)
    keep = kept_as(decision.keep, dtype=dtype, compute_dtype=call.compute_dtype)
    own = _of_length(role.layouts, tensor.ndim)
    fixed = {
        **source._asdict(),
        "operation": str(role.operation),
        "phase": role.phase,
        "tensor_name": role.tensor_name + part.suffix,
        "quant_type": quant_type,
        "dtype": dtype,
        "shape": list(tensor.shape),
        "layout": own or _LAYOUTS.get((source.layer_type, sample_dim, tensor.ndim), ""),
        "compute_dtype": call.compute_dtype,
        "sample_dim": sample_dim,
        "batch_size": call.batch_size,
        "mode": str(call.mode),
        "keep": keep,
        "placement": None if part.placement is None else json.loads(part.placement),
    }
    return RecordForm(
        header=json.dumps(fixed)[:-1],
        keep=keep,
        nbytes=tensor.nbytes,
        kept_nbytes=kept_nbytes(keep, nbytes=tensor.nbytes, dtype=dtype, compute_dtype=call.compute_dtype),
        sample_dim=sample_dim,
        places=places,
    )


@dataclass(slots=True)
class IterationTally:
    """The counts of one iteration."""

    iteration: int
    """Training step."""
    is_staged: bool
    """Whether tensors are recorded; otherwise, they are only counted."""
    loss: str | None = None
    """The reason why the rest, and therefore the whole iteration, is not recorded; None if there is none."""
    num_tensors: int = 0
    """Number of tensors."""
    nbytes: int = 0
    """Size of their values, in bytes."""
    stored_nbytes: int = 0
    """Size of their stored forms, in bytes, before compression."""
    kept: Counter[str] = field(default_factory=Counter)
    """Number of tensors that are stored as `values`, `histogram` and `statistics`."""
    is_by_hand: bool = False
    """Whether the program saved a tensor by hand."""
    step_skipped: bool = False
    """Whether a gradient scaler skipped the step of the optimizer."""

    def count(self, form: RecordForm) -> None:
        """Add a tensor of this form."""
        self.num_tensors += 1
        self.nbytes += form.nbytes
        self.stored_nbytes += form.kept_nbytes
        self.kept[form.keep] += 1
