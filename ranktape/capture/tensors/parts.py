"""Finds the tensors in arguments and results, and splits a tensor into the plain tensors that are recorded.

A plain tensor is one part. A DTensor is this rank's shard, with its placement. The result of an asynchronous collective
is waited for, as the next operation would do. A quantised operand is its codes and its scales. A wrapper around one
tensor of the same shape and dtype is that tensor. A tensor without values, or whose values cannot be read without
changing the training, is refused with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ranktape.capture.passes.tracker import dtype_name
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
"""The types of tensors that are one part."""

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
    # Transformer Engine stores block-scaled operands twice, once for each direction of the product.
    "_rowwise_data": "_codes",
    "_rowwise_scale_inv": "_scales",
    "_columnwise_data": "_columnwise_codes",
    "_columnwise_scale_inv": "_columnwise_scales",
    # Wrappers that quantise on use contain the tensor itself.
    "_tensor": "",
    "original_weight_tensor": "",
}
"""The suffix of a tensor's name for each attribute in which libraries store quantised operands. The suffix of any other
attribute is its own name."""


@dataclass(slots=True, kw_only=True)
class PlainPart:
    """A plain tensor that is recorded."""

    tensor: torch.Tensor
    """The tensor, dense and with values."""
    suffix: str = ""
    """Suffix of the tensor's name, such as `_codes` for quantised operands."""
    placement: str | None = None
    """Placement of the shard as JSON; None for a whole tensor of this rank."""


class UnrecordableError(Exception):
    """A tensor cannot be recorded. The message gives the reason."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one part: of torch's own class, dense, and outside function transforms."""
    is_dense = type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and not is_transformed_tensor(tensor)


def parts_of(tensor: torch.Tensor, *, placement: str | None = None) -> list[PlainPart]:
    """The parts of a tensor that are recorded.

    `placement`, if given, replaces that of the tensor.

    Raises:
        UnrecordableError: it has no parts that can be recorded.
    """
    if type(tensor) in PLAIN and not is_transformed_tensor(tensor):
        return [_plain(tensor, suffix="", placement=placement)]
    return list(_parts(tensor, suffix="", placement=placement))


def _parts(tensor: torch.Tensor, *, suffix: str, placement: str | None) -> Iterator[PlainPart]:
    if tensor.is_nested:
        raise UnrecordableError(
            "it is a nested tensor: its samples have different shapes, and only dense ones are stored"
        )
    if is_dtensor(tensor):
        yield from _shard(tensor, suffix=suffix, placement=placement)
    elif hasattr(tensor, "trigger_wait"):
        # An AsyncCollectiveTensor. The next operation waits in the same way and gets the same tensor. On a device, the
        # stream waits instead of the training thread.
        yield from _parts(tensor.trigger_wait(), suffix=suffix, placement=placement)
    elif is_transformed_tensor(tensor):
        yield from _parts(_unwrapped(tensor), suffix=suffix, placement=placement)
    elif inner := _inner(tensor):
        is_wrapper = _is_wrapper(tensor, list(inner.values()))
        for attribute, part in inner.items():
            name = "" if is_wrapper else SUFFIXES.get(attribute, f"_{attribute.strip('_')}")
            part_placement = (
                None if placement is None else scale_placement(placement, tuple(tensor.shape), tuple(part.shape))
            )
            if placement is not None and part_placement is None:
                raise UnrecordableError(f"its {attribute} of shape {tuple(part.shape)} has no known place in the whole")
            yield from _parts(part, suffix=suffix + name, placement=part_placement)
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
    yield from _parts(local, suffix=suffix, placement=placement or shard.text)


def _inner(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inner tensors of a subclass, by attribute; empty if it does not list them."""
    if is_functional_tensor(tensor) or type(tensor).__module__.startswith("torch._subclasses"):
        raise UnrecordableError(f"it is a {type(tensor).__name__}: the model is being traced, and there are no values")
    flatten = getattr(tensor, "__tensor_flatten__", None)
    attributes = SUFFIXES if flatten is None and _has_dispatch(tensor) else flatten()[0] if flatten else ()
    inner = {attribute: getattr(tensor, attribute, None) for attribute in attributes}
    return {attribute: part for attribute, part in inner.items() if isinstance(part, torch.Tensor)}


def _is_wrapper(tensor: torch.Tensor, inner: Sequence[torch.Tensor]) -> bool:
    """Whether a wrapper only contains another tensor, as that of a weight which is quantised in the product."""
    return len(inner) == 1 and inner[0].shape == tensor.shape and inner[0].dtype == tensor.dtype


def _has_dispatch(tensor: torch.Tensor) -> bool:
    """Whether the class of a tensor implements its operations, so that its own storage may be empty."""
    dispatch = type(tensor).__torch_dispatch__
    return dispatch is not NO_DISPATCH and type(tensor) not in PLAIN


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a function transform of `torch.func` has wrapped."""
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
            # torch packs two 4-bit floats into a byte, in a dtype that stores do not have.
            values = values.detach().view(torch.uint8)
        else:
            raise UnrecordableError(f"its dtype {dtype_name(values.dtype)} cannot be stored")
    return PlainPart(tensor=values, suffix=suffix, placement=placement)


def _as_plain(tensor: torch.Tensor) -> torch.Tensor:
    with without_torch_function():  # its `__torch_function__` might record or raise
        return tensor.detach().as_subclass(torch.Tensor)


def tensor_in(output: Any, element: int | str | None) -> torch.Tensor | None:
    """The result if it is a tensor; otherwise an element of it, by default the first tensor; None if there is none.

    Results may be tuples, lists, mappings or dataclasses.
    """
    if isinstance(output, torch.Tensor):
        return output
    if element is None:
        tensors = (tensor_in(value, None) for value in _elements(output))
        return next((tensor for tensor in tensors if tensor is not None), None)
    try:
        value = getattr(output, element) if isinstance(element, str) and hasattr(output, element) else output[element]
    except (LookupError, TypeError):
        return None
    return value if isinstance(value, torch.Tensor) else None


def _elements(output: Any) -> Sequence[Any]:
    if isinstance(output, Mapping):
        return list(output.values())
    if isinstance(output, tuple | list):
        return output
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, item.name) for item in dataclasses.fields(output)]
    return ()


def tensors_in(value: Any, *, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in a value of nested tuples, lists, mappings and dataclasses, at most `depth` levels deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        for element in _elements(value):
            yield from tensors_in(element, depth=depth - 1)


def first_floating(args: Iterable[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The first floating-point tensor among the arguments of a call; None if there is none."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    return next((tensor for tensor in tensors if tensor.is_floating_point()), None)
