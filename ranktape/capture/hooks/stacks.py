"""Finds the modules of a model, the layer number of each module, and the stacks of layers.

A stack is the outermost `ModuleList`, `ModuleDict` or `Sequential` of layers of one class that contain linear layers.
The number of a layer is its attribute `layer_idx`, or `layer_number` minus 1, both global; otherwise its key plus
`layer_offset`, which is for later pipeline stages. Names and numbers may be arbitrary, so large numbers are ignored.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ranktape.capture.guard import getattr_or_default
from ranktape.capture.passes.tracker import Frame
from ranktape.capture.roles.known import role_of
from ranktape.capture.settings.rules import Numbers
from ranktape.capture.torch_private import modules_of, parameters_of
from ranktape.errors import UsageError

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""The names under which wrappers store the wrapped module."""

_NAMES = frozenset({"layers", "layer", "h", "block", "blocks", "transformer_blocks"})
"""Usual names of stacks, under which some layers may have no linear layers or be of other classes."""

_NO_STACKS = frozenset({"experts", "local_experts", "heads"})
"""Names of lists of modules of one class that are not layers."""

_NOT_DECODERS = ("encoder", "vision", "visual", "audio")
"""Substrings of the names of stacks other than the decoder's."""

_MAX_DIGITS = 6


class StackLayer(NamedTuple):
    """One layer of a stack."""

    idx: int
    """Number in the whole model."""
    path: str
    """Dotted path without the names that wrappers add."""
    module: nn.Module


class Stack(NamedTuple):
    """A stack of layers."""

    name: str
    """Name in the model, including the names that wrappers add."""
    layers: list[StackLayer]
    """The layers of this process, in ascending order of their numbers."""
    keys: dict[str, int]
    """The number of each layer, by its key in the stack."""

    def idx_of(self, name: str) -> int | None:
        """The number of the layer that contains the module with a name; None outside the stack."""
        prefix = f"{self.name}." if self.name else ""
        return self.keys.get(name.removeprefix(prefix).partition(".")[0]) if name.startswith(prefix) else None


class ModelSurvey(NamedTuple):
    """The modules and the stacks of a model."""

    frames: list[Frame]
    """All modules, the model itself first."""
    stacks: list[Stack]
    """The stacks, that of the decoder first."""


def module_path(path: str) -> str:
    """The dotted path of a module without the names that wrappers add."""
    parts = [part for part in path.split(".") if part not in WRAPPERS]
    while parts and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def survey(root: nn.Module, *, layer_offset: int = 0) -> ModelSurvey:
    """The modules and the stacks of a model in its present state."""
    named = list(root.named_modules())
    stated = {module: idx for _, module in named if (idx := stated_idx(module)) is not None}
    stacks = _find_stacks(named, stated, layer_offset=layer_offset)
    paths = [module_path(stack.name) for stack in stacks]
    frames = []
    for name, module in named:
        path, stated_number = module_path(name), stated.get(module)
        idx, layer_stack = -1, ""
        for stack, container in zip(stacks, paths, strict=True):
            if (number_in_stack := stack.idx_of(name)) is not None:
                idx, layer_stack = number_in_stack, container
                break
        if idx < 0 and (stated_number is not None or not stacks):
            number, layer_stack = numbered(path)
            idx = number if number < 0 else number + layer_offset
        frames.append(Frame(path, module, idx if stated_number is None else stated_number, layer_stack))
    return ModelSurvey(frames, stacks)


def _find_stacks(
    named: Sequence[tuple[str, nn.Module]], stated: Mapping[nn.Module, int], *, layer_offset: int
) -> list[Stack]:
    """The outermost stacks of a model: other than encoders first, then the one with most parameters."""
    stacks: dict[str, Stack] = {}
    for name, module in named:
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if not is_list or any(stack.idx_of(name) is not None for stack in stacks.values()):
            continue
        if keys := _layers_in(name, module, stated, layer_offset=layer_offset):
            # Not by attributes: a class may have another attribute of this name.
            layers = [
                StackLayer(idx, module_path(f"{name}.{key}".lstrip(".")), child)
                for key, child in module.named_children()
                if (idx := keys.get(key)) is not None
            ]
            stacks[name] = Stack(name, sorted(layers, key=lambda layer: layer.idx), keys)

    def order(stack: Stack) -> tuple[bool, int]:
        is_aside = any(part in stack.name for part in _NOT_DECODERS) and "decoder" not in stack.name
        parameters: Iterable[Any] = modules[stack.name].parameters()
        return is_aside, -sum(parameter.numel() for parameter in parameters if not is_lazy(parameter))

    modules = dict(named)
    return sorted(stacks.values(), key=order) if len(stacks) > 1 else list(stacks.values())


def stated_idx(module: nn.Module) -> int | None:
    """The layer number in the attributes of a module; None if it has none."""
    idx, number = _number_in(module, "layer_idx"), _number_in(module, "layer_number")
    if idx is not None:
        return idx
    return number - 1 if number else None


def numbered(path: str) -> tuple[int, str]:
    """The first number in a dotted path and the path before it; -1 and an empty path if there is none."""
    parts = path.split(".")
    index = next((index for index, part in enumerate(parts) if _is_number(part)), None)
    return (-1, "") if index is None else (int(parts[index]), ".".join(parts[:index]))


def _number_in(module: nn.Module, name: str) -> int | None:
    # Most modules do not have the attribute, and `nn.Module.__getattr__` is slow then.
    kind = type(module)
    is_plain = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    if is_plain and name not in vars(module) and not hasattr(kind, name):
        return None
    value = getattr_or_default(module, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**_MAX_DIGITS else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _layers_in(
    name: str, container: nn.Module, stated: Mapping[nn.Module, int], *, layer_offset: int
) -> dict[str, int]:
    """The number of each layer in a container, by key; empty if the container is not a stack."""
    container_name = module_path(name).rpartition(".")[2]
    children = dict(container.named_children())
    tails = {key: key[len(key.rstrip("0123456789")) :] for key in children}
    if container_name in _NO_STACKS or not all(map(_is_number, tails.values())):
        return {}
    numbers = {key: int(tail) for key, tail in tails.items()}
    kinds = {key: _kind(child) for key, child in children.items() if _has_products(unwrapped(child))}
    if not kinds or len(set(numbers.values())) < len(numbers):
        return {}
    kind, count = Counter(kinds.values()).most_common(1)[0]
    if container_name not in _NAMES or len(kinds) < len(children):
        if 2 * count <= len(children) or (len(children) == 1 and isinstance(container, nn.Sequential)):
            return {}
        kinds = {key: cls for key, cls in kinds.items() if cls is kind}
    # Most models have no such attributes, and then the modules of layers need not be searched.
    within = ((key, [stated[part] for part in children[key].modules() if part in stated]) for key in kinds if stated)
    first = {key: layer_numbers[0] for key, layer_numbers in within if layer_numbers}
    if first and len(first) == len(kinds) == len(set(first.values())):
        return first
    return {key: numbers[key] + layer_offset for key in kinds}


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers."""
    inner = module
    while wrapped := [child for name, child in inner.named_children() if name in WRAPPERS]:
        inner = wrapped[0]
    return inner


def _kind(module: nn.Module) -> type:
    """The class of the module inside all wrappers, before FSDP2 changed it."""
    bases = type(unwrapped(module)).__mro__
    return bases[2] if len(bases) > 2 and bases[1].__name__ == "FSDPModule" else bases[0]  # noqa: PLR2004


def _has_products(module: nn.Module) -> bool:
    """Whether a layer contains linear layers, or has matrices as parameters of its own."""
    if any(part is not module and _is_product(part) for part in module.modules()):
        return True
    parameters = parameters_of(module).values()
    is_other = _is_product(module) or _layer_type(module) == "embedding"
    return not is_other and any(parameter is not None and parameter.ndim > 1 for parameter in parameters)


def _is_product(module: nn.Module) -> bool:
    return _layer_type(module) == "linear" or isinstance(module, nn.MultiheadAttention)


def _layer_type(module: nn.Module) -> str:
    role = role_of(type(module))
    return "" if role is None else role.layer_type


def embedding_path(root: nn.Module, stack: Stack) -> str:
    """The path of the embedding before a stack: the nearest module beside the stack that contains an embedding layer.

    If there is none, the result is the name `embedding` beside the stack.
    """
    parts = stack.name.split(".") if stack.name else []
    for length in range(len(parts) - 1, -1, -1):
        above: Any = root
        for part in parts[:length]:
            above = modules_of(above)[part]
        for key, child in above.named_children():
            name = ".".join([*parts[:length], key])
            is_beside = not f"{stack.name}.".startswith(f"{name}.")
            if is_beside and any(_layer_type(part) == "embedding" for part in child.modules()):
                return module_path(name)
    return module_path(".".join([*parts[:-1], "embedding"]))


def check_layers(wanted: Numbers, root: nn.Module, stack: Stack) -> None:
    """Check that the model has the requested layers. Skipped for a pipeline stage of a model of unknown depth.

    Raises:
        UsageError: a requested layer does not exist; the message names the existing ones.
    """
    layer_filter = wanted.filter
    # In one process, the stack has all layers.
    is_single_rank = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    total = None if is_single_rank else _num_layers(root)
    layers: Sequence[int] = [layer.idx for layer in stack.layers] if total is None else range(total)
    is_stage = total is None and not is_single_rank
    if layer_filter is None or is_stage:
        return
    for alternative in layer_filter.alternatives:
        numbers = Numbers(filter=dataclasses.replace(layer_filter, alternatives=(alternative,)))
        if not any(numbers.holds(idx) for idx in layers):
            existing = f"layers {min(layers)} to {max(layers)}"
            raise UsageError(
                f"--layers {alternative} is not in the model, which has {existing}: choose of these, or 'all'"
            )


def _num_layers(root: nn.Module) -> int | None:
    """Number of layers on all pipeline stages according to the model's configuration; None if it does not tell."""
    config = getattr(root, "config", None)
    numbers = (getattr(config, name, None) for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"))
    return next((number for number in numbers if isinstance(number, int) and number > 0), None)
