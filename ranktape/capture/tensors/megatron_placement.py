"""Finds where the plain tensors of Megatron-core's layers lie in the tensors that span the ranks.

Megatron keeps plain tensors, and notes on each weight along which dimension it is split. How activations are split
follows from the class of the layer and from its settings. Weights are replicas over the data parallel ranks as well;
activations are placed among the tensor parallel ranks alone, because each data parallel rank has samples of its own.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from ranktape.capture.tensors.placement import REPLICATE, Axes, axes_of_group, describe_even

if TYPE_CHECKING:
    import torch
    from torch import nn

_LAYERS = frozenset({"ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"})
_ATTENTION = frozenset({"DotProductAttention", "TEDotProductAttention"})

_kinds: dict[type, str | None] = {}


def is_megatron(module: nn.Module) -> bool:
    """Whether the module is one of Megatron-core's, whose placements are known."""
    return _kind(module) is not None


def _kind(module: nn.Module) -> str | None:
    """The class of Megatron's that it is of, or that its class derives from."""
    if "megatron.core.parallel_state" not in sys.modules:
        return None
    if type(module) not in _kinds:
        names = (base.__name__ for base in type(module).__mro__ if base.__module__.startswith("megatron."))
        _kinds[type(module)] = next((name for name in names if name in _LAYERS or name in _ATTENTION), None)
    return _kinds[type(module)]


def megatron_placement(module: nn.Module, tensor_name: str, tensor: torch.Tensor) -> str | None:
    """The placement of a tensor of a Megatron layer; None where the layer is not split, or it is not known."""
    kind = _kind(module)
    group: Any = getattr(module, "tp_group", None)
    if kind is None or group is None:
        return None
    name = tensor_name.removeprefix("grad_").removeprefix("reduced_grad_").removeprefix("master_")
    if name in {"weight", "bias"}:
        return _weight(module, name, tensor, group, is_increment=tensor_name == f"grad_{name}")
    find_word = _word_of_heads if kind in _ATTENTION else _word_of_activation
    word = find_word(module, name, tensor.ndim)
    if word is None or getattr(module, "is_expert", False):
        return None  # experts take tokens from several ranks: their activations are nobody's slice
    axes = _axes("tp", group)
    if len(axes.ranks) == 1:
        return None
    return describe_even(axes, (word,), tuple(tensor.shape))


def _weight(module: Any, name: str, tensor: torch.Tensor, group: Any, *, is_increment: bool) -> str | None:
    weight = module._parameters.get(name)  # noqa: SLF001
    noted = tensor if weight is None else weight
    is_split = getattr(noted, "tensor_model_parallel", False)
    dim, stride = getattr(noted, "partition_dim", -1), getattr(noted, "partition_stride", 1)
    word = _shard(dim, stride) if is_split and dim >= 0 else REPLICATE
    tp = _axes("tp", group)
    # An increment of the gradient is this rank's own; what the optimizer gets is the same on all of them.
    dp = None if is_increment else _data_axes(is_expert=not getattr(noted, "allreduce", True))
    if dp is None or len(dp.ranks) == 1:
        return None if len(tp.ranks) == 1 else describe_even(tp, (word,), tuple(tensor.shape))
    return describe_even(_product(dp, tp), (REPLICATE, word), tuple(tensor.shape))


def _word_of_activation(module: Any, name: str, num_dims: int) -> str | None:
    kind = _kind(module)
    is_split = getattr(module, "sequence_parallel", False)
    sequence = "shard(0)" if is_split else REPLICATE  # Megatron's activations begin with the sequence
    if kind == "ColumnParallelLinear":
        stride = getattr(module.weight, "partition_stride", 1) if module.weight is not None else 1
        columns = REPLICATE if module.gather_output else _shard(num_dims - 1, stride)
        return {"input": sequence, "output": columns}.get(name)
    if kind == "RowParallelLinear":
        rows = _shard(num_dims - 1) if module.input_is_parallel else REPLICATE
        return {"input": rows, "output": sequence}.get(name)
    scattered = "shard(0)" if getattr(module, "reduce_scatter_embeddings", False) else REPLICATE
    return {"input": REPLICATE, "output": scattered}.get(name)


def _word_of_heads(module: Any, name: str, num_dims: int) -> str | None:
    # [S, B, heads, D], or [tokens, heads, D] where sequences are packed; the output has heads and D as one dimension.
    if name == "output":
        return _shard(num_dims - 1)
    num_groups = getattr(module.config, "num_query_groups", None)
    if name in {"key", "value"} and num_groups is not None and num_groups < module.tp_group.size():
        return None  # fewer heads than ranks: some ranks have the same ones
    return _shard(num_dims - 2) if name in {"query", "key", "value"} and num_dims > 2 else None  # noqa: PLR2004


def _shard(dim: int, stride: int = 1) -> str:
    return f"shard({dim})" if stride == 1 else f"strided_shard({dim}, {stride})"


@functools.lru_cache(maxsize=64)
def _axes(name: str, group: Any) -> Axes:
    return axes_of_group(name, group)


def _data_axes(*, is_expert: bool) -> Axes | None:
    from megatron.core import parallel_state

    if is_expert:
        group = parallel_state.get_expert_data_parallel_group(check_initialized=False)
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return None if group is None else _axes("dp", group)


@functools.lru_cache(maxsize=64)
def _product(outer: Axes, inner: Axes) -> Axes:
    """The mesh of two axes that cross in this rank.

    Megatron numbers its ranks by strides, so that a step along one axis is as long everywhere.
    """
    here = outer.ranks[outer.coordinates[0]]
    ranks = tuple(tuple(start + rank - here for rank in inner.ranks) for start in outer.ranks)
    return Axes(
        (*outer.names, *inner.names),
        (*outer.shape, *inner.shape),
        ranks,
        (*outer.coordinates, *inner.coordinates),
    )
