"""Finds a model's modules, the number of each one's layer, and its stacks of layers; anew when the model changed.

A stack is the outermost list, dictionary or sequence of like layers that hold linear layers. A layer's number is what
it says itself (`layer_idx`, or `layer_number` counted from 1, both global), else its key, to which `layer_offset` is
added on a later stage of a pipeline. Names are data: one that is no small number is none. What is remembered of a model
are names and numbers, never the modules: a model that the training drops is gone.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from ranktape.capture.guard import asked
from ranktape.capture.passes.passes import Frame
from ranktape.capture.roles.known import role_of

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names under which wrappers keep the module they wrap."""

_NAMES = frozenset({"layers", "layer", "h", "block", "blocks", "transformer_blocks"})
"""What stacks are called; needed only where the layers are not alike, or there is one of them."""

_NO_STACKS = frozenset({"experts", "local_experts", "heads"})
"""What lists of like modules are called that are no layers."""

_ASIDE = ("encoder", "vision", "visual", "audio")
"""Parts of the names of stacks beside that of the decoder."""

_MAX_DIGITS = 6


class StackLayer(NamedTuple):
    """One layer of a stack."""

    idx: int
    """Its number in the whole model."""
    path: str
    """Its dotted path."""
    module: nn.Module


class Stack(NamedTuple):
    """A stack of layers, in the order of their numbers."""

    name: str
    """Its name in the model, wrappers included."""
    layers: list[StackLayer]
    """The layers that this process has."""
    keys: dict[str, int]
    """By the first part of a name inside of it: the number of the layer."""

    def idx_of(self, name: str) -> int | None:
        """The number of the layer that a module of that name is in; None outside of the stack."""
        prefix = f"{self.name}." if self.name else ""
        return self.keys.get(name.removeprefix(prefix).partition(".")[0]) if name.startswith(prefix) else None


class ModelSurvey(NamedTuple):
    """What there is in a model."""

    places: list[Frame]
    """Every module, the model itself first."""
    stacks: list[Stack]
    """Its stacks, that of its decoder first."""


def module_path(path: str) -> str:
    """The dotted path of a module without the prefixes that wrappers add."""
    parts = [part for part in path.split(".") if part not in WRAPPERS]
    while parts and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def find_stacks(root: nn.Module, *, layer_offset: int = 0) -> list[Stack]:
    """The outermost stacks of a model, that of its decoder first."""
    stacks: dict[str, Stack] = {}
    sizes: dict[str, int] = {}
    for name, module in root.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if not is_list or any(stack.idx_of(name) is not None for stack in stacks.values()):
            continue
        if keys := _layers_in(name, module, layer_offset=layer_offset):
            stacks[name] = _stack(name, module, keys)
            sizes[name] = sum(0 if is_lazy(one) else one.numel() for one in module.parameters())

    def order(stack: Stack) -> tuple[bool, int]:
        return any(part in stack.name for part in _ASIDE) and "decoder" not in stack.name, -sizes[stack.name]

    return sorted(stacks.values(), key=order)


def stated_idx(module: nn.Module) -> int | None:
    """The number of its layer that a module itself tells; None where it tells none."""
    own, number = _told(module, "layer_idx"), _told(module, "layer_number")
    if own is not None:
        return own
    return number - 1 if number else None


def numbered(path: str) -> tuple[int, str]:
    """The first number in a dotted path, and what is before it; -1 and nothing where there is none."""
    parts = path.split(".")
    place = next((place for place, part in enumerate(parts) if _is_number(part)), None)
    return (-1, "") if place is None else (int(parts[place]), ".".join(parts[:place]))


def _told(module: nn.Module, name: str) -> int | None:
    # Most modules tell nothing, and torch's own way to find that out is slow.
    kind = type(module)
    is_plain = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    if is_plain and name not in vars(module) and not hasattr(kind, name):
        return None
    value = asked(module, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**_MAX_DIGITS else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _layers_in(name: str, container: nn.Module, *, layer_offset: int) -> dict[str, int]:
    """The keys of the layers in a container, with their numbers; empty where it is no stack."""
    own = module_path(name).rpartition(".")[2]
    children = dict(container.named_children())
    tails = {key: key[len(key.rstrip("0123456789")) :] for key in children}
    if own in _NO_STACKS or not all(map(_is_number, tails.values())):
        return {}
    numbers = {key: int(tail) for key, tail in tails.items()}
    kinds = {key: _kind(child) for key, child in children.items() if _holds_products(_unwrapped(child))}
    if not kinds or len(set(numbers.values())) < len(numbers):
        return {}
    kind, count = Counter(kinds.values()).most_common(1)[0]
    if own not in _NAMES or len(kinds) < len(children):
        if 2 * count <= len(children) or (len(children) == 1 and isinstance(container, nn.Sequential)):
            return {}
        kinds = {key: one for key, one in kinds.items() if one is kind}
    stated = {key: idx for key in kinds if (idx := _stated_within(children[key])) is not None}
    if len(stated) == len(kinds) == len(set(stated.values())):
        return stated
    return {key: numbers[key] + layer_offset for key in kinds}


def _stack(name: str, container: nn.Module, keys: dict[str, int]) -> Stack:
    # By its children, not by its attributes: a class may have something else under the name of a stack.
    children = dict(container.named_children())
    layers = [StackLayer(idx, module_path(f"{name}.{key}".lstrip(".")), children[key]) for key, idx in keys.items()]
    return Stack(name, sorted(layers, key=lambda layer: layer.idx), keys)


def _stated_within(layer: nn.Module) -> int | None:
    stated = (stated_idx(module) for module in layer.modules())
    return next((idx for idx in stated if idx is not None), None)


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = module
    while found := [child for name, child in inner.named_children() if name in WRAPPERS]:
        inner = found[0]
    return inner


def _kind(module: nn.Module) -> type:
    """The class of what is wrapped, without the one that FSDP2 puts before it."""
    bases = type(_unwrapped(module)).__mro__
    return bases[2] if len(bases) > 2 and bases[1].__name__ == "FSDPModule" else bases[0]  # noqa: PLR2004


def _holds_products(module: nn.Module) -> bool:
    """Whether a layer holds linear layers, or computes with matrices of its own."""
    if any(part is not module and _is_product(part) for part in module.modules()):
        return True
    own = module._parameters.values()  # noqa: SLF001  (runs no parametrization)
    is_other = _is_product(module) or _layer_type(module) == "embedding"
    return not is_other and any(one is not None and one.ndim > 1 for one in own)


def _is_product(module: nn.Module) -> bool:
    return _layer_type(module) == "linear" or isinstance(module, nn.MultiheadAttention)


def _layer_type(module: nn.Module) -> str:
    role = role_of(type(module))
    return "" if role is None else role.layer_type


def embedding_path(root: nn.Module, stack: Stack) -> str:
    """The path of what makes the embedding that enters a stack: the nearest module beside it that looks up rows."""
    parts = stack.name.split(".") if stack.name else []
    for length in range(len(parts) - 1, -1, -1):
        above: Any = root
        for part in parts[:length]:
            above = above._modules[part]  # noqa: SLF001  (a class may have something else under that name)
        for key, child in above.named_children():
            name = ".".join([*parts[:length], key])
            is_beside = not f"{stack.name}.".startswith(f"{name}.")
            if is_beside and any(_layer_type(part) == "embedding" for part in child.modules()):
                return module_path(name)
    return module_path(".".join([*parts[:-1], "embedding"]))


class _Findings(NamedTuple):
    """What is remembered of a model."""

    members: list[tuple[Any, ...]]
    """All that was read of each module: where that is another, it is another model."""
    places: list[tuple[str, int, str]]
    """For each of them the path, the number of the layer, and the list that holds it."""
    stacks: list[tuple[str, dict[str, int]]]
    """For each stack its name, and the numbers of its layers by their keys in it."""


class Surveys:
    """The surveys of a training's models."""

    def __init__(self, *, layer_offset: int) -> None:
        self._layer_offset = layer_offset
        self._findings: weakref.WeakKeyDictionary[nn.Module, _Findings] = weakref.WeakKeyDictionary()

    def of(self, root: nn.Module) -> ModelSurvey:
        """The survey of a model as it is now."""
        named = list(root.named_modules())
        members = [_member(name, module) for name, module in named]
        known = self._findings.get(root)
        if known is None or known.members != members:
            stacks = find_stacks(root, layer_offset=self._layer_offset)
            places = [(module_path(name), *self._layer_of(name, module, stacks)) for name, module in named]
            known = _Findings(members, places, [(stack.name, stack.keys) for stack in stacks])
            self._findings[root] = known
        modules = dict(named)
        return ModelSurvey(
            places=[
                Frame(path, module, layer_idx, stack)
                for (_, module), (path, layer_idx, stack) in zip(named, known.places, strict=True)
            ],
            stacks=[_stack(name, modules[name], keys) for name, keys in known.stacks],
        )

    def _layer_of(self, name: str, module: nn.Module, stacks: list[Stack]) -> tuple[int, str]:
        """The number of the layer that a module is in, and the path of the list that holds it."""
        own = stated_idx(module)
        for stack in stacks:
            idx = stack.idx_of(name)
            if idx is not None:
                return idx if own is None else own, module_path(stack.name)
        if stacks and own is None:
            return -1, ""
        number, path = numbered(module_path(name))
        if own is not None:
            return own, path
        return number if number < 0 else number + self._layer_offset, path


def _member(name: str, module: nn.Module) -> tuple[Any, ...]:
    kind = type(module)
    own = module._parameters.values()  # noqa: SLF001  (runs no parametrization)
    shapes = tuple(None if one is None or is_lazy(one) else tuple(one.shape) for one in own)
    # A module that stands under two names has one of them in the list: its other place is among the children.
    children = tuple((key, id(child)) for key, child in module.named_children())
    return name, id(module), kind, role_of(kind), stated_idx(module), shapes, children
