"""Which dimension of a tensor holds samples, and what are its dimensions called?

    B batch   T tokens   H hidden (of attention: heads)   D of one head   I, O into and out of a layer   V vocabulary
    E experts

What a role says of its tensors comes first; else it follows from the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

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
