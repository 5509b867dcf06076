"""Takes a tensor that a hook holds apart into the plain tensors that are recorded.

A plain tensor is one part. A DTensor is this rank's shard of it, with its placement. The result of a collective that
is still on its way is what arrives: it is waited for where the operation that follows would wait for it. A quantised
operand is its codes and its scales; a wrapper around one tensor of its own shape and dtype is that tensor. What has no
values, or none that can be read without changing the training, is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ranktape.capture.passes.passes import dtype_name
from ranktape.capture.tensors.placement import is_dtensor, scale_placement, shard_of
from ranktape.capture.torch_private import (
    NO_DISPATCH,
    is_batched_tensor,
    is_functional_tensor,
    is_transformed_tensor,
    untransformed,
    without_torch_function,
)
from ranktape.storage.format.dtypes import DTYPES

PLAIN = frozenset({torch.Tensor, nn.Parameter})
"""Types of tensors that are one part."""

SUFFIXES = {
    "qdata": "_codes",
    "_data": "_codes",
    "int_data": "_codes",
    "codes": "_codes",
    "packed_weights": "_codes",
    "scale": "_scales",
    "_scale": "_scales",
    "_scale_inv": "_scales",
    "scales": "_scales",
    # Transformer Engine keeps block-scaled operands twice, once for each direction of the product.
    "_rowwise_data": "_codes",
    "_rowwise_scale_inv": "_scales",
    "_columnwise_data": "_columnwise_codes",
    "_columnwise_scale_inv": "_columnwise_scales",
    # Wrappers that quantise when they are used: what they hold is the tensor.
    "_tensor": "",
    "original_weight_tensor": "",
}
"""What follows the name of a tensor, for the attributes in which libraries hold quantised operands; those that are not
here follow it by their own name."""


@dataclass(slots=True, kw_only=True)
class PlainPart:
    """A plain tensor that is recorded."""

    tensor: torch.Tensor
    """Dense, with values."""
    suffix: str = ""
    """What follows the name of the tensor: `_codes` of quantised operands."""
    placement: str | None = None
    """Where in a tensor that spans ranks it lies, as JSON; None for all of a tensor of this rank."""


class UnrecordableError(Exception):
    """The tensor cannot be recorded; the text says why."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one part as it is: of torch's own class, dense, and outside of function transforms."""
    is_dense = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and not is_transformed_tensor(tensor)


def take_apart(tensor: torch.Tensor, *, placement: str | None = None) -> list[PlainPart]:
    """The parts of the tensor that are recorded.

    With `placement` that one counts, and not the tensor's own.

    Raises:
        UnrecordableError: it has none.
    """
    if type(tensor) in PLAIN and not is_transformed_tensor(tensor):
        return [_plain(tensor, suffix="", placement=placement)]
    return list(_apart(tensor, suffix="", placement=placement))


def _apart(tensor: torch.Tensor, *, suffix: str, placement: str | None) -> Iterator[PlainPart]:
    if tensor.is_nested:
        raise UnrecordableError(
            "it is a nested tensor: its samples have different shapes, and only dense ones are stored"
        )
    if is_dtensor(tensor):
        yield from _shard(tensor, suffix=suffix, placement=placement)
    elif hasattr(tensor, "trigger_wait"):
        # An AsyncCollectiveTensor. The operation that follows waits in the same way and gets the same tensor; on a
        # device the stream waits, and not the training thread.
        yield from _apart(tensor.trigger_wait(), suffix=suffix, placement=placement)
    elif is_transformed_tensor(tensor):
        yield from _apart(_unwrapped(tensor), suffix=suffix, placement=placement)
    elif inner := _inner(tensor):
        is_wide = _is_wide(tensor, list(inner.values()))
        for attribute, part in inner.items():
            name = "" if is_wide else SUFFIXES.get(attribute, f"_{attribute.strip('_')}")
            where = None if placement is None else scale_placement(placement, tuple(tensor.shape), tuple(part.shape))
            if placement is not None and where is None:
                raise UnrecordableError(f"its {attribute} of shape {tuple(part.shape)} has no known place in the whole")
            yield from _apart(part, suffix=suffix + name, placement=where)
    elif not _has_dispatch(tensor):
        yield _plain(tensor, suffix=suffix, placement=placement)
    else:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise UnrecordableError(f"it is a {kind}, which does not say of which tensors it is made")


def _shard(tensor: Any, *, suffix: str, placement: str | None) -> Iterator[PlainPart]:
    shard = shard_of(tensor)
    if shard is None:
        raise UnrecordableError(f"this rank has no part of it: it is not in the mesh {tensor.device_mesh}")
    local = tensor._local_tensor  # noqa: SLF001  (`to_local` would add to the graph of the training)
    if tuple(local.shape) != shard.shape:
        raise UnrecordableError(
            f"its shard has the shape {tuple(local.shape)}, and by its placement it should have {shard.shape}"
        )
    yield from _apart(local, suffix=suffix, placement=placement or shard.text)


def _inner(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of which a subclass is made, by attribute; empty for one that does not say."""
    if is_functional_tensor(tensor) or type(tensor).__module__.startswith("torch._subclasses"):
        raise UnrecordableError(f"it is a {type(tensor).__name__}: the model is being traced, and there are no values")
    flatten = getattr(tensor, "__tensor_flatten__", None)
    attributes = SUFFIXES if flatten is None and _has_dispatch(tensor) else flatten()[0] if flatten else ()
    found = {attribute: getattr(tensor, attribute, None) for attribute in attributes}
    return {attribute: part for attribute, part in found.items() if isinstance(part, torch.Tensor)}


def _is_wide(tensor: torch.Tensor, inner: Sequence[torch.Tensor]) -> bool:
    """Whether a wrapper only holds another tensor, as weights do that are quantised inside of the product."""
    return len(inner) == 1 and inner[0].shape == tensor.shape and inner[0].dtype == tensor.dtype


def _has_dispatch(tensor: torch.Tensor) -> bool:
    """Whether operations on it are its class's business: then its own storage may hold nothing."""
    dispatch = type(tensor).__torch_dispatch__
    return dispatch is not NO_DISPATCH and type(tensor) not in PLAIN


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What a function transform of `torch.func` has wrapped."""
    if is_batched_tensor(tensor):
        raise UnrecordableError("it is inside of torch.func.vmap, where one tensor stands for many")
    return untransformed(tensor)


def _plain(tensor: torch.Tensor, *, suffix: str, placement: str | None) -> PlainPart:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        raise UnrecordableError(
            f"it is on {tensor.device} with layout {tensor.layout}, and only dense tensors with values can be recorded"
        )
    values = tensor if type(tensor) in PLAIN else _as_plain(tensor)
    if dtype_name(values.dtype) not in DTYPES:
        if values.dtype.is_floating_point and values.dtype.itemsize == 1:
            # Two 4-bit floats in a byte, for which torch has a dtype and stores do not.
            values = values.detach().view(torch.uint8)
        else:
            raise UnrecordableError(f"its dtype {dtype_name(values.dtype)} cannot be stored")
    return PlainPart(tensor=values, suffix=suffix, placement=placement)


def _as_plain(tensor: torch.Tensor) -> torch.Tensor:
    with without_torch_function():  # its own function might record, or raise
        return tensor.detach().as_subclass(torch.Tensor)
