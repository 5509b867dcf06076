"""Finds the placement of a shard in a tensor that spans several ranks.

A placement is a document with the axes, shape and ranks of a mesh, this rank's coordinates, one word for each axis
(`replicate`, `shard(1)`, `strided_shard(0, 2)`, `partial(sum)`), the shape of the whole tensor, and the offset of this
shard. A DTensor provides all of it; torch computes the offset. For plain tensors, the modules provide it: weights that
FSDP2 or DDP has whole on every rank, and the heads of an attention layer whose projections are split by columns. The
placement is passed as JSON text, which is created once for each kind of tensor.

Megatron uses plain tensors and marks each weight with the dimension along which it is split. The split of activations
follows from the class and the settings of the layer. Weights are also replicas over data parallel ranks. Activations
are placed among tensor parallel ranks only, because each data parallel rank has its own samples.
"""

from __future__ import annotations

import functools
import json
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from ranktape.capture.guard import getattr_or_default
from ranktape.capture.torch_private import local_shape_and_offset, parameters_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

REPLICATE = "replicate"
"""The word for an axis along which all ranks have the same values."""

MAX_KINDS = 4096
"""The number of kinds of tensors whose placements are cached. Ragged batches have ever new shapes."""


@dataclass(frozen=True, slots=True)
class Axes:
    """A mesh of ranks, and this rank's coordinates."""

    names: tuple[str, ...]
    """Names of the axes; `axis_0` and so on if the mesh has none."""
    shape: tuple[int, ...]
    """Number of ranks along each axis."""
    ranks: Any
    """Global ranks, as nested tuples."""
    coordinates: tuple[int, ...]
    """Coordinates of this rank."""

    def __post_init__(self) -> None:
        """Check that the fields are consistent."""
        assert len(self.names) == len(self.shape) == len(self.coordinates), self


ATTENTION_NAMES = frozenset({"query", "key", "value", "output"})
"""The names of tensors whose heads a tensor parallel attention layer distributes."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The placement of one tensor."""

    text: str
    """The placement as JSON."""
    shape: tuple[int, ...]
    """Shape of this rank's shard according to the placement."""


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor. A module that the training has not imported is not imported for this."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shard_of(tensor: DTensor) -> Shard | None:
    """The placement of a DTensor; None if this rank is not in its mesh."""
    return _shard_of(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape))


@functools.lru_cache(maxsize=MAX_KINDS)
def _shard_of(mesh: DeviceMesh, placements: tuple[Any, ...], shape: tuple[int, ...]) -> Shard | None:
    axes = axes_of(mesh)
    if axes is None:
        return None
    local, offset = local_shape_and_offset(torch.Size(shape), mesh=mesh, placements=placements)
    words = tuple(placement_word(placement) for placement in placements)
    return Shard(text=describe(axes, words, global_shape=shape, offset=offset), shape=local)


@functools.lru_cache(maxsize=64)
def axes_of(mesh: DeviceMesh) -> Axes | None:
    """A device mesh in the form of a placement; None if this rank is not in it."""
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return None
    names = mesh.mesh_dim_names or tuple(f"axis_{axis}" for axis in range(mesh.ndim))
    return Axes(names, tuple(mesh.mesh.shape), _tuples(mesh.mesh.tolist()), tuple(coordinates))


def placement_word(placement: Any) -> str:
    """The word for a placement of torch."""
    kind = type(placement).__name__
    if kind == "_StridedShard":
        return f"strided_shard({placement.dim}, {placement.split_factor})"
    if placement.is_replicate():
        return REPLICATE
    if placement.is_partial():
        # Subclasses of Partial (masked rows, norms) need a reduction that readers do not know.
        plain = kind == "Partial"
        return f"partial({placement.reduce_op if plain else kind.strip('_').removesuffix('Partial').lower()})"
    if placement.is_shard():
        return f"shard({placement.dim})"
    return kind


@functools.lru_cache(maxsize=MAX_KINDS)
def scale_placement(text: str, whole: tuple[int, ...], part: tuple[int, ...]) -> str | None:
    """The placement of codes or scales of shape `part` of a shard of shape `whole`; None if it is not known."""
    if whole == part:
        return text
    document = json.loads(text)
    if len(whole) != len(part):
        return None
    for dim, (elements, pieces) in enumerate(zip(whole, part, strict=True)):
        for field in ("global_shape", "offset"):
            scaled, rest = divmod(document[field][dim] * pieces, max(elements, 1))
            if rest:
                return None
            document[field][dim] = scaled
    return json.dumps(document)


def describe(axes: Axes, words: tuple[str, ...], *, global_shape: tuple[int, ...], offset: tuple[int, ...]) -> str:
    """A placement as JSON."""
    document = {
        "mesh": {"axes": axes.names, "shape": axes.shape, "ranks": axes.ranks},
        "coordinates": axes.coordinates,
        "placements": words,
        "global_shape": global_shape,
        "offset": [int(start) for start in offset],
        "partial": any(word.startswith("partial") for word in words),
    }
    return json.dumps(document)


@functools.lru_cache(maxsize=MAX_KINDS)
def describe_even(axes: Axes, words: tuple[str, ...], shape: tuple[int, ...]) -> str:
    """The placement of a plain tensor of that shape, assuming equal shards on all ranks of an axis."""
    global_shape, offset = list(shape), [0] * len(shape)
    for word, size, coordinate in zip(words, axes.shape, axes.coordinates, strict=True):
        kind, _, rest = word.partition("(")
        if kind in {"shard", "strided_shard"}:
            dim, _, factor = rest.rstrip(")").partition(", ")
            # Each of the `factor` parts is split along the axis. The offset is that of the first piece.
            offset[int(dim)] = coordinate * shape[int(dim)] // int(factor or 1)
            global_shape[int(dim)] = size * shape[int(dim)]
    return describe(axes, words, global_shape=tuple(global_shape), offset=tuple(offset))


def axes_of_group(name: str, group: Any) -> Axes:
    """A process group as a mesh of one axis."""
    import torch.distributed as dist

    ranks = tuple(dist.get_process_group_ranks(group))
    return Axes((name,), (len(ranks),), ranks, (ranks.index(dist.get_rank()),))


class Placements:
    """The placements of plain tensors, as far as the modules of a training determine them."""

    def __init__(self) -> None:
        self._axes: weakref.WeakKeyDictionary[nn.Module, dict[str, Axes]] = weakref.WeakKeyDictionary()

    def learn(self, root: nn.Module) -> None:
        """Find the parameters of a model that are whole on several ranks during the forward pass."""
        for module in root.modules():
            for owner, name, axes in (*_of_fsdp(module), *_of_ddp(module)):
                self._axes.setdefault(owner, {})[name] = axes

    def of(self, module: nn.Module, name: str, tensor: torch.Tensor, *, head_dim: int = 1) -> str | None:
        """The placement of a module's tensor of that name if the module determines it; otherwise None.

        A gradient of an activation has the placement of the activation. A gradient of a weight is this rank's summand
        and not a replica. `head_dim` is the dimension of attention heads.
        """
        if name in parameters_of(module):
            return self.of_weight(module, name, tensor)
        if name.removeprefix("grad_") in ATTENTION_NAMES and type(tensor) is torch.Tensor:
            return attention_placement(module, tensor, head_dim=head_dim)
        return None

    def of_weight(self, module: nn.Module, name: str, tensor: torch.Tensor) -> str | None:
        """The placement of a parameter in the forward pass if it differs from the tensor's own; otherwise None.

        A weight that is whole in its module is a replica over the ranks of FSDP2 or DDP. Under tensor parallelism, it
        is a replica along one axis and a shard along the other.
        """
        axes = self._axes.get(module, {}).get(name)
        if axes is None:
            return None
        if not is_dtensor(tensor):
            return describe_even(axes, (REPLICATE,) * len(axes.names), tuple(tensor.shape))
        own = shard_of(tensor)
        return None if own is None else _over(axes, own.text)


@functools.lru_cache(maxsize=MAX_KINDS)
def _over(axes: Axes, text: str) -> str:
    """A placement extended by further axes, along which the tensor is replicated."""
    document = json.loads(text)
    words = dict(zip(document["mesh"]["axes"], document["placements"], strict=True))
    if not set(words) < set(axes.names):
        return text
    return describe(
        axes,
        tuple(words.get(name, REPLICATE) for name in axes.names),
        global_shape=tuple(document["global_shape"]),
        offset=tuple(document["offset"]),
    )


def _of_fsdp(module: nn.Module) -> Iterator[tuple[nn.Module, str, Axes]]:
    """The parameters that `fully_shard` manages for a module: owner, name, and the mesh on which they are sharded."""
    get_state = getattr_or_default(module, "_get_fsdp_state")
    if get_state is None:
        return
    state = get_state()
    # Before torch 2.12 there is one group instead of a list.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001
    for group in groups:
        for parameter in () if group is None else group.fsdp_params:
            info, axes = parameter._module_info, axes_of(parameter.sharded_param.device_mesh)  # noqa: SLF001
            owners = [info.module, *info.shared_modules]
            names = [info.param_name, *info.shared_param_names]
            if axes is not None:
                yield from ((owner, name, axes) for owner, name in zip(owners, names, strict=True))


def _of_ddp(module: nn.Module) -> Iterator[tuple[nn.Module, str, Axes]]:
    """The parameters of a DistributedDataParallel module: owner, name, and its group as a mesh of one axis."""
    if not isinstance(module, nn.parallel.DistributedDataParallel):
        return
    axes = axes_of_group("dp", module.process_group)
    ignored = set(getattr_or_default(module, "parameters_to_ignore", ()))
    for path, owner in module.module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if f"{path}.{name}".lstrip(".") not in ignored and not is_dtensor(parameter):
                yield owner, name, axes


def attention_placement(module: nn.Module, tensor: torch.Tensor, *, head_dim: int = 1) -> str | None:
    """The placement of a plain query, key, value or output of attention under tensor parallelism; None if unknown.

    It is known if a projection of the attention module is a DTensor split by columns with as many columns as the heads
    of the tensor have elements. Each rank then has a share of the heads.
    """
    if not 0 <= head_dim < tensor.ndim - 1 or "torch.distributed.tensor" not in sys.modules:
        return None
    columns = tensor.shape[head_dim] * tensor.shape[-1]
    for child in module.children():
        weight = parameters_of(child).get("weight")
        if weight is None or not is_dtensor(weight) or weight.ndim != 2:  # noqa: PLR2004
            continue
        axes, words = axes_of(weight.device_mesh), [placement_word(placement) for placement in weight.placements]
        shard = shard_of(weight)
        if words == ["shard(0)"] and axes is not None and shard is not None and shard.shape[0] == columns:
            return describe_even(axes, (f"shard({head_dim})",), tuple(tensor.shape))
    return None


def _tuples(nested: Any) -> Any:
    return tuple(_tuples(item) for item in nested) if isinstance(nested, list) else nested


_LAYERS = frozenset({"ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"})
_ATTENTION = frozenset({"DotProductAttention", "TEDotProductAttention"})

_kinds: dict[type, str | None] = {}


def is_megatron(module: nn.Module) -> bool:
    """Whether a module is one of Megatron-core's with known placements."""
    return _kind(module) is not None


def _kind(module: nn.Module) -> str | None:
    """The name of the Megatron class of a module or of one of its bases; None if there is none."""
    if "megatron.core.parallel_state" not in sys.modules:
        return None
    if type(module) not in _kinds:
        names = (base.__name__ for base in type(module).__mro__ if base.__module__.startswith("megatron."))
        _kinds[type(module)] = next((name for name in names if name in _LAYERS or name in _ATTENTION), None)
    return _kinds[type(module)]


def megatron_placement(module: nn.Module, tensor_name: str, tensor: torch.Tensor) -> str | None:
    """The placement of a tensor of a Megatron layer; None if the layer is not split or the placement is not known."""
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
        return None  # experts get tokens from several ranks, so that their activations are not shards
    axes = _axes("tp", group)
    if len(axes.ranks) == 1:
        return None
    return describe_even(axes, (word,), tuple(tensor.shape))


def _weight(module: Any, name: str, tensor: torch.Tensor, group: Any, *, is_increment: bool) -> str | None:
    weight = parameters_of(module).get(name)
    noted = tensor if weight is None else weight
    is_split = getattr(noted, "tensor_model_parallel", False)
    dim, stride = getattr(noted, "partition_dim", -1), getattr(noted, "partition_stride", 1)
    word = _shard(dim, stride) if is_split and dim >= 0 else REPLICATE
    tp = _axes("tp", group)
    # A summand of the gradient belongs to this rank; the optimizer's gradient is the same on all ranks.
    dp = None if is_increment else _data_axes(is_expert=not getattr(noted, "allreduce", True))
    if dp is None or len(dp.ranks) == 1:
        return None if len(tp.ranks) == 1 else describe_even(tp, (word,), tuple(tensor.shape))
    return describe_even(_product(dp, tp), (REPLICATE, word), tuple(tensor.shape))


def _word_of_activation(module: Any, name: str, num_dims: int) -> str | None:
    kind = _kind(module)
    is_split = getattr(module, "sequence_parallel", False)
    sequence = "shard(0)" if is_split else REPLICATE  # dimension 0 of Megatron's activations is the sequence
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
    # [S, B, heads, D], or [tokens, heads, D] for packed sequences. In the output, heads and D are one dimension.
    if name == "output":
        return _shard(num_dims - 1)
    num_groups = getattr(module.config, "num_query_groups", None)
    if name in {"key", "value"} and num_groups is not None and num_groups < module.tp_group.size():
        return None  # fewer heads than ranks: several ranks have the same heads
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
    """The mesh of two axes that both contain this rank.

    Megatron numbers its ranks with fixed strides for each axis.
    """
    here = outer.ranks[outer.coordinates[0]]
    ranks = tuple(tuple(start + rank - here for rank in inner.ranks) for start in outer.ranks)
    return Axes(
        (*outer.names, *inner.names),
        (*outer.shape, *inner.shape),
        ranks,
        (*outer.coordinates, *inner.coordinates),
    )
