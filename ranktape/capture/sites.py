"""What is known of one tensor of one source: what is the same each time, and what this iteration has brought.

All that a hook needs on the training thread hangs on the site, found once: what became of it, where its failures
end, and the headers under which it was written before.

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
from typing import TYPE_CHECKING, Any

import torch

from ranktape.capture.passes.passes import dtype_name
from ranktape.capture.writing.counting import kept_nbytes
from ranktape.storage.format.record_info import Mode

if TYPE_CHECKING:
    from ranktape.capture.guard import Guard
    from ranktape.capture.passes.passes import Call
    from ranktape.capture.settings.selecting import Decision
    from ranktape.capture.source import Source, TensorRole
    from ranktape.capture.tensors.parts import PlainPart


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


def layout_of(layer_type: str, *, sample_dim: int | None, num_dims: int, layouts: Sequence[str] = ()) -> str:
    """One letter for each dimension, as one of the role's `layouts` has it; empty where they are not known."""
    own = _of_length(layouts, num_dims)
    return own or _LAYOUTS.get((layer_type, sample_dim, num_dims), "")


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
    part: PlainPart, *, decision: Decision, sample_dim: int | None
) -> tuple[PlainPart, Sequence[int] | None] | None:
    """The part with the samples that the decision names, and their places in the batch; None where it has none of them.

    The places are None for all samples. A part without a dimension of samples is kept whole, and so is a shard of the
    samples: which of them it holds is known to no other rank.
    """
    if decision.samples is None or sample_dim is None:
        return part, None
    count = part.tensor.shape[sample_dim]
    places = decision.places(count)
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


MAX_FORMS = 256
"""Forms of one site that are kept: shapes without end must not fill the memory."""

MAX_ALL_FORMS = 50_000
"""Forms of all sites that are kept, of about 1 kB each."""

Calls = set[tuple[Mode, int, int]]
"""Calls by mode, microbatch and place in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordForm:
    """What is the same of all tensors of a site that have one dtype, one shape and one kind of pass."""

    header: str
    """The beginning of what the writer is told of one: JSON that is not closed."""
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


class Site:
    """One tensor of one source, from when it is first met to the end of the run."""

    __slots__ = ("excused", "forms", "guard", "hooked", "is_disabled", "refused", "role", "seen", "source", "taken")

    def __init__(self, source: Source, role: TensorRole, *, guard: Guard, is_disabled: bool) -> None:
        """Know nothing of an iteration yet; the guard contains what goes wrong with it."""
        self.source = source
        self.role = role
        self.guard = guard
        self.is_disabled = is_disabled
        self.forms: dict[Any, RecordForm] = {}
        """Forms in which it was recorded, by all that tells one from another."""
        self.taken: dict[tuple[Mode, int], set[int]] = {}
        """In this iteration: by mode and microbatch the numbers of those that came."""
        self.hooked: Calls = set()
        """In this iteration: the calls that have a gradient hook."""
        self.seen: Calls = set()
        """In this iteration: the calls of which it was taken."""
        self.refused: str | None = None
        """In this iteration: why one was not taken, or not whole."""
        self.excused: Calls | None = None
        """In this iteration: what the selection left out, as far as that was for the call; None for nothing."""

    @property
    def is_idle(self) -> bool:
        """Whether the iteration has brought nothing of it, and nothing is waited for."""
        return not (self.hooked or self.seen) and self.refused is None

    def begin(self) -> None:
        """An iteration begins."""
        for indices in list(self.taken.values()):
            indices.clear()
        self.hooked.clear()
        self.seen.clear()
        self.refused = self.excused = None

    def distinct(self, call: Call) -> Call:
        """A call of its own for a tensor: two backward passes over one graph bring each gradient twice."""
        place = call.mode, call.microbatch
        indices = self.taken.get(place)
        if indices is None:
            indices = self.taken.setdefault(place, set())
        index = call.index
        while index in indices:
            index += 1
        indices.add(index)
        return call if index == call.index else dataclasses.replace(call, index=index)

    def keep_form(self, key: Any, form: RecordForm) -> RecordForm:
        """Have a form at hand from now on."""
        if len(self.forms) >= MAX_FORMS:
            self.forms.clear()
        self.forms[key] = form
        return form


def form_of(
    site: Site,
    part: PlainPart,
    *,
    keep: str,
    sample_dim: int | None,
    places: Sequence[int] | None,
    call: Call,
    quant_type: str,
) -> RecordForm:
    """The form of a part of a tensor of a site, with the samples that are kept, as it is recorded."""
    role, tensor = site.role, part.tensor
    dtype = dtype_name(tensor.dtype)
    layout = layout_of(site.source.layer_type, sample_dim=sample_dim, num_dims=tensor.ndim, layouts=role.layouts)
    fixed = {
        **site.source._asdict(),
        "operation": str(role.operation),
        "phase": role.phase,
        "tensor_name": role.tensor_name + part.suffix,
        "quant_type": quant_type,
        "dtype": dtype,
        "shape": list(tensor.shape),
        "layout": layout,
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
    sources: set[Source] = field(default_factory=set)
    """What they came from."""

    def count(self, form: RecordForm) -> None:
        """One more tensor, of that form."""
        self.num_tensors += 1
        self.nbytes += form.nbytes
        self.stored_nbytes += form.kept_nbytes
        self.kept[form.keep] += 1
