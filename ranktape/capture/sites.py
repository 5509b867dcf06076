"""What is known of one tensor of one source: what is the same each time, and what has this iteration brought?

All that a hook needs on the training thread hangs on the site, found once: what became of it, where its failures
end, and the headers under which it was written before.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.capture.passes.tracker import dtype_name
from ranktape.capture.tensors.layout import layout_of
from ranktape.capture.writing.kept_nbytes import kept_nbytes
from ranktape.storage.record import Mode

if TYPE_CHECKING:
    import torch

    from ranktape.capture.guard import Guard
    from ranktape.capture.passes.tracker import Call
    from ranktape.capture.settings.sampling import Kept
    from ranktape.capture.source import Source, TensorRole

MAX_FORMS = 256
"""Forms of one site that are kept: shapes without end must not fill the memory."""

MAX_ALL_FORMS = 50_000
"""Forms of all sites that are kept, of about 1 kB each."""

Calls = set[tuple[Mode, int, int]]
"""Calls by mode, microbatch and place in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
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
        """Know nothing of an iteration yet.

        Args:
            source: What it comes from.
            role: What it is there.
            guard: Contains what goes wrong with it.
            is_disabled: Nothing is recorded of it any more.
        """
        self.source = source
        self.role = role
        self.guard = guard
        self.is_disabled = is_disabled
        self.forms: dict[Any, Form] = {}
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

    def keep_form(self, key: Any, form: Form) -> Form:
        """Have a form at hand from now on."""
        if len(self.forms) >= MAX_FORMS:
            self.forms.clear()
        self.forms[key] = form
        return form


def form_of(site: Site, kept: Kept, *, call: Call, quant_type: str) -> Form:
    """The form of a tensor of a site as it is recorded."""
    source, role, part, sample_dim = site.source, site.role, kept.part, kept.sample_dim
    tensor: torch.Tensor = part.tensor
    dtype = dtype_name(tensor.dtype)
    fixed = {
        "module": source.module,
        "layer_type": source.layer_type,
        "layer_idx": source.layer_idx,
        "layer_stack": source.layer_stack,
        "component": source.component,
        "operation": str(role.operation),
        "phase": role.phase,
        "tensor_name": role.tensor_name + part.suffix,
        "quant_type": quant_type,
        "dtype": dtype,
        "shape": list(tensor.shape),
        "layout": layout_of(source.layer_type, sample_dim=sample_dim, num_dims=tensor.ndim, layouts=role.layouts),
        "compute_dtype": call.compute_dtype,
        "sample_dim": sample_dim,
        "batch_size": call.batch_size,
        "mode": str(call.mode),
        "keep": kept.keep,
        "placement": None if part.placement is None else json.loads(part.placement),
    }
    return Form(
        header=json.dumps(fixed)[:-1],
        keep=kept.keep,
        nbytes=tensor.nbytes,
        kept_nbytes=kept_nbytes(kept.keep, nbytes=tensor.nbytes, dtype=dtype, compute_dtype=call.compute_dtype),
        sample_dim=sample_dim,
        places=kept.places,
    )
