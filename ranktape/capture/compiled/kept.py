"""Says which of a graph's values inductor's code has in memory, and which only within the operation that uses them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch._inductor import config


def is_kept(node: fx.Node) -> bool:
    """Whether what a node gives is in memory also where nobody records it."""
    if not _is_fused(node):
        return True
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output" or getattr(user.target, "overloadpacket", None) in _products():
                return True
            if _is_view(user) and user not in seen:
                seen.add(user)
                waiting.append(user)
    return _is_view(node) and isinstance(node.args[0], fx.Node) and is_kept(node.args[0])


def is_rounded(node: fx.Node) -> bool:
    """Whether a value is rounded to fewer bits where it is kept."""
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize < torch.float32.itemsize
    )


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "is_view", False)


def _is_fused(node: fx.Node) -> bool:
    """Whether code generation may compute a node within what uses it."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001
        return False
    if node.target.overloadpacket in _products():
        return config.max_autotune or config.max_autotune_gemm
    return _is_view(node) or torch.Tag.pointwise in node.target.tags or node.target.overloadpacket in _read()


@functools.cache
def _products() -> frozenset[Any]:
    """Operations that have their operands in memory, and their result but where kernels are chosen by their time."""
    aten = torch.ops.aten
    return frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm})  # noqa: SLF001


@functools.cache
def _read() -> frozenset[Any]:
    """Operations that are computed within what uses them, though torch does not say so."""
    aten, prims = torch.ops.aten, torch.ops.prims
    return frozenset({aten.embedding, aten.index, aten._to_copy, aten.clone, prims.convert_element_type})  # noqa: SLF001
