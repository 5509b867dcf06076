"""What is left of a tensor when only some of its samples are kept?"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ranktape.capture.settings.selecting import Decision
    from ranktape.capture.tensors.parts import Part


@dataclass(slots=True, kw_only=True)
class Kept:
    """A part of a tensor as it is recorded."""

    part: Part
    """With the samples that are kept."""
    keep: str
    """What the writer keeps of it: `values`, `histogram` or `statistics`."""
    sample_dim: int | None
    """The dimension of samples; None where it has none."""
    places: Sequence[int] | None = None
    """The places in the batch of the samples that are kept; None for all of them."""


def keep_samples(part: Part, *, decision: Decision, sample_dim: int | None) -> Kept | None:
    """The part with the samples that the decision names; None where it has none of these.

    A part without a dimension of samples is kept whole, and so is a shard of the samples: which of them it holds is
    known to no other rank.
    """
    whole = Kept(part=part, keep=decision.keep, sample_dim=sample_dim)
    if decision.samples is None or sample_dim is None:
        return whole
    count = part.tensor.shape[sample_dim]
    places = decision.places(count)
    if len(places) == count:
        return whole
    if not places:
        return None
    placement = part.placement
    if placement is not None:
        placement = _narrowed(placement, sample_dim, count, len(places))
        if placement is None:
            return whole
    tensor = narrow(part.tensor, places, sample_dim=sample_dim)
    narrowed = dataclasses.replace(part, tensor=tensor, placement=placement)
    return Kept(part=narrowed, keep=decision.keep, sample_dim=sample_dim, places=places)


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
