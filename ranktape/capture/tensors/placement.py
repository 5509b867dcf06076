"""Finds where in a tensor that spans several ranks a shard lies.

A placement is a document: the axes, shape and ranks of a mesh, this rank's coordinates in it, one word for each axis
(`replicate`, `shard(1)`, `strided_shard(0, 2)`, `partial(sum)`), the shape of the whole tensor, and where in it this
shard begins. A DTensor knows all of it, and torch's own function says where it begins. Of plain tensors the modules
around them know: weights that FSDP2 or DDP holds whole on every rank, and the heads of an attention layer whose
projections are split by columns. It is passed on as JSON text, made once for each kind of tensor.
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

from ranktape.capture.guard import asked

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

REPLICATE = "replicate"
"""The word of an axis along which every rank has the same."""

MAX_KINDS = 4096
"""Kinds of tensors whose placements are kept; ragged batches bring ever new shapes."""


@dataclass(frozen=True, slots=True)
class Axes:
    """A mesh of ranks, and this rank's place in it."""

    names: tuple[str, ...]
    """Of the axes, as the mesh calls them; `axis_0` and so on where it does not."""
    shape: tuple[int, ...]
    """Ranks along each."""
    ranks: Any
    """Global ranks, as nested tuples."""
    coordinates: tuple[int, ...]
    """This rank's."""

    def __post_init__(self) -> None:
        """Check that the parts fit together."""
        assert len(self.names) == len(self.shape) == len(self.coordinates), self


ATTENTION_NAMES = frozenset({"query", "key", "value", "output"})
"""Of the tensors whose heads a tensor parallel attention layer shares out."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The placement of one tensor."""

    text: str
    """JSON."""
    shape: tuple[int, ...]
    """What the placement says that this rank has."""


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor; does not import what a training without them never imports."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shard_of(tensor: DTensor) -> Shard | None:
    """The placement of a DTensor; None where this rank has no part of it."""
    return _shard_of(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape))


@functools.lru_cache(maxsize=MAX_KINDS)
def _shard_of(mesh: DeviceMesh, placements: tuple[Any, ...], shape: tuple[int, ...]) -> Shard | None:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    axes = axes_of(mesh)
    if axes is None:
        return None
    local, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    words = tuple(placement_word(placement) for placement in placements)
    return Shard(text=describe(axes, words, global_shape=shape, offset=tuple(offset)), shape=tuple(local))


@functools.lru_cache(maxsize=64)
def axes_of(mesh: DeviceMesh) -> Axes | None:
    """A device mesh in a placement's words; None where this rank is not part of it."""
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        return None
    names = mesh.mesh_dim_names or tuple(f"axis_{axis}" for axis in range(mesh.ndim))
    return Axes(names, tuple(mesh.mesh.shape), _tuples(mesh.mesh.tolist()), tuple(coordinates))


def placement_word(placement: Any) -> str:
    """A placement of torch in our word for it."""
    kind = type(placement).__name__
    if kind == "_StridedShard":
        return f"strided_shard({placement.dim}, {placement.split_factor})"
    if placement.is_replicate():
        return REPLICATE
    if placement.is_partial():
        # What the subclasses do on top (masked rows, norms) is not known to whoever adds the summands up.
        plain = kind == "Partial"
        return f"partial({placement.reduce_op if plain else kind.strip('_').removesuffix('Partial').lower()})"
    if placement.is_shard():
        return f"shard({placement.dim})"
    return kind


@functools.lru_cache(maxsize=MAX_KINDS)
def scale_placement(text: str, whole: tuple[int, ...], part: tuple[int, ...]) -> str | None:
    """The placement of codes or scales of that shape, which belong to a shard of shape `whole`; None: not known."""
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
    """The document of a placement, as JSON."""
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
    """The placement of a plain tensor of that shape, of which all ranks along a sharded axis have as much."""
    global_shape, offset = list(shape), [0] * len(shape)
    for word, size, coordinate in zip(words, axes.shape, axes.coordinates, strict=True):
        kind, _, rest = word.partition("(")
        if kind in {"shard", "strided_shard"}:
            dim, _, factor = rest.rstrip(")").partition(", ")
            # Each of the factor's parts is split over the axis; a strided shard begins where its first piece does.
            offset[int(dim)] = coordinate * shape[int(dim)] // int(factor or 1)
            global_shape[int(dim)] = size * shape[int(dim)]
    return describe(axes, words, global_shape=tuple(global_shape), offset=tuple(offset))


def axes_of_group(name: str, group: Any) -> Axes:
    """A process group as a mesh of one axis."""
    import torch.distributed as dist

    ranks = tuple(dist.get_process_group_ranks(group))
    return Axes((name,), (len(ranks),), ranks, (ranks.index(dist.get_rank()),))


class Placements:
    """What the modules of a training know of the placements of plain tensors."""

    def __init__(self) -> None:
        self._axes: weakref.WeakKeyDictionary[nn.Module, dict[str, Axes]] = weakref.WeakKeyDictionary()

    def learn(self, root: nn.Module) -> None:
        """Ask a model which of its parameters are whole on several ranks while it computes."""
        for module in root.modules():
            for owner, name, axes in (*_of_fsdp(module), *_of_ddp(module)):
                self._axes.setdefault(owner, {})[name] = axes

    def of(self, module: nn.Module, name: str, tensor: torch.Tensor, *, head_dim: int = 1) -> str | None:
        """The placement of a module's tensor of that name, where the module knows it and the tensor does not.

        A gradient of an activation lies where the activation lies; one of a weight is this rank's own increment, which
        other ranks' increments are added to, so it is no replica. `head_dim` is the dimension of heads of attention.
        """
        if name in module._parameters:  # noqa: SLF001  (a parametrized weight is computed when it is read)
            return self.of_weight(module, name, tensor)
        if name.removeprefix("grad_") in ATTENTION_NAMES and type(tensor) is torch.Tensor:
            return attention_placement(module, tensor, head_dim=head_dim)
        return None

    def of_weight(self, module: nn.Module, name: str, tensor: torch.Tensor) -> str | None:
        """The placement of a parameter that is computed with, where it is not the tensor's own.

        A weight that is whole in its module is a replica over the ranks of FSDP2 or DDP; under tensor parallelism it is
        a replica along one axis and a shard along the other.
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
    """The placement, on the mesh that has its axes and others, along which the tensor is replicated."""
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
    """The parameters that `fully_shard` manages for this module: owner, name, and the mesh they are sharded on."""
    get_state = asked(module, "_get_fsdp_state")
    if get_state is None:
        return
    state = get_state()
    # One group and not a list of them before torch 2.12.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001
    for group in groups:
        for parameter in () if group is None else group.fsdp_params:
            info, axes = parameter._module_info, axes_of(parameter.sharded_param.device_mesh)  # noqa: SLF001
            owners = [info.module, *info.shared_modules]
            names = [info.param_name, *info.shared_param_names]
            if axes is not None:
                yield from ((owner, name, axes) for owner, name in zip(owners, names, strict=True))


def _of_ddp(module: nn.Module) -> Iterator[tuple[nn.Module, str, Axes]]:
    """The parameters that DistributedDataParallel keeps equal: owner, name, and its group as a mesh of one axis."""
    if not isinstance(module, nn.parallel.DistributedDataParallel):
        return
    axes = axes_of_group("dp", module.process_group)
    ignored = set(asked(module, "parameters_to_ignore", ()))
    for path, owner in module.module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if f"{path}.{name}".lstrip(".") not in ignored and not is_dtensor(parameter):
                yield owner, name, axes


def attention_placement(module: nn.Module, tensor: torch.Tensor, *, head_dim: int = 1) -> str | None:
    """The placement of a plain query, key, value or output of attention under tensor parallelism.

    Known where a projection of the attention's module is a DTensor split by columns, which makes as many columns as
    the tensor has heads' elements: then each rank has its share of the heads. None where it is not known.
    """
    if not 0 <= head_dim < tensor.ndim - 1 or "torch.distributed.tensor" not in sys.modules:
        return None
    columns = tensor.shape[head_dim] * tensor.shape[-1]
    for child in module.children():
        weight = child._parameters.get("weight")  # noqa: SLF001  (not to run a parametrization)
        if weight is None or not is_dtensor(weight) or weight.ndim != 2:  # noqa: PLR2004
            continue
        axes, words = axes_of(weight.device_mesh), [placement_word(placement) for placement in weight.placements]
        shard = shard_of(weight)
        if words == ["shard(0)"] and axes is not None and shard is not None and shard.shape[0] == columns:
            return describe_even(axes, (f"shard({head_dim})",), tuple(tensor.shape))
    return None


def _tuples(nested: Any) -> Any:
    return tuple(_tuples(item) for item in nested) if isinstance(nested, list) else nested
