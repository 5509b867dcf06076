"""Makes the form in which a tensor is recorded: its samples, the layout of its dimensions, the header of its record.

B batch   T tokens   H hidden (of attention: heads)   D of one head   I, O into and out of a layer   V vocabulary
E experts
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ranktape.capture.passes.passes import Call, dtype_name
from ranktape.capture.settings.rules import CaptureRule
from ranktape.capture.source import Source, TensorRole
from ranktape.capture.tensors.parts import PlainPart
from ranktape.capture.writing.counting import kept_as, kept_nbytes

_LAYOUTS = {
    # By kind of layer, dimension of samples and number of dimensions.
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
    """The dimension of samples of an activation: the one given, the role's, or the first as long as the batch."""
    if given is not None:
        return given if given < len(shape) else None
    if own := _of_length(layouts, len(shape)):
        dim = own.find("B")
        # Positions, say, are the same for all samples, and come once.
        return dim if dim >= 0 and batch_size in {None, shape[dim]} else None
    return next((dim for dim in range(min(2, len(shape) - 1)) if shape[dim] == batch_size), None)


def _of_length(layouts: Sequence[str], num_dims: int) -> str:
    return next((layout for layout in layouts if len(layout) == num_dims), "")


def keep_samples(
    part: PlainPart, *, decision: CaptureRule, sample_dim: int | None
) -> tuple[PlainPart, Sequence[int] | None] | None:
    """The part with the samples that the decision names, and their places in the batch; None where it has none of them.

    The places are None for all samples. A part without a dimension of samples is kept whole, and so is a shard of the
    samples: which of them it holds is known to no other rank.
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
    """The identifiers of the samples at those places, of those given for the whole batch, else the places."""
    if places is None:
        return ids
    if ids is None or len(ids) <= places[-1]:
        return places
    return [ids[place] for place in places]


def narrow(tensor: torch.Tensor, places: Sequence[int], *, sample_dim: int) -> torch.Tensor:
    """The samples at those places; a view where they are evenly apart."""
    first, last = places[0], places[-1]
    step = places[1] - first if len(places) > 1 else 1
    if places == list(range(first, last + 1, step)):
        return tensor[(slice(None),) * sample_dim + (slice(first, last + 1, step),)]
    # An index made of a list would have to be copied to the device, and waited for.
    return torch.cat([tensor.narrow(sample_dim, place, 1) for place in places], dim=sample_dim)


@functools.lru_cache(maxsize=1 << 10)
def _narrowed(placement: str, dim: int, extent: int, kept: int) -> str | None:
    """The placement of a shard of which so many samples are kept; None where it has only some of the samples."""
    document = json.loads(placement)
    shape = document.get("global_shape")
    if not isinstance(shape, list) or dim >= len(shape) or shape[dim] != extent:
        return None
    return json.dumps({**document, "global_shape": [*shape[:dim], kept, *shape[dim + 1 :]]})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordForm:
    """What is the same of all tensors of a site that have one dtype, one shape and one kind of pass."""

    header: str
    """The beginning of its header for the writer: JSON that is not closed."""
    keep: str
    """What the writer keeps of it: `values`, `histogram` or `statistics`."""
    nbytes: int
    """Bytes of its values."""
    kept_nbytes: int
    """Bytes of what is kept of it, before it is packed."""
    sample_dim: int | None
    """The dimension of samples; None where it has none."""
    places: Sequence[int] | None
    """The places in the batch of the samples that are kept; None for all of them."""


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
    """The form of a part of a tensor, as the decision has it; None where it leaves all samples out."""
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
    """What one iteration has come to."""

    iteration: int
    """Training step."""
    is_staged: bool
    """Whether tensors are recorded, or only counted."""
    loss: str | None = None
    """Why the rest of it, and so all of it, is not recorded."""
    num_tensors: int = 0
    """Tensors seen."""
    nbytes: int = 0
    """Bytes of their values."""
    stored_nbytes: int = 0
    """Bytes of what is kept of them, before it is packed."""
    kept: Counter[str] = field(default_factory=Counter)
    """How many of them are kept as `values`, `histogram` and `statistics`."""
    is_by_hand: bool = False
    """Whether the program has saved some of them by itself."""
    step_skipped: bool = False
    """Whether a gradient scaler skipped the step of the optimizer."""

    def count(self, form: RecordForm) -> None:
        """One more tensor, of that form."""
        self.num_tensors += 1
        self.nbytes += form.nbytes
        self.stored_nbytes += form.kept_nbytes
        self.kept[form.keep] += 1
