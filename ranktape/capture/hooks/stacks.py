"""Finds a model's modules, the number of each one's layer, and its stacks of layers; anew when the model changed.

A stack is the outermost list, dictionary or sequence of like layers that hold linear layers. A layer's number is what
it says itself (`layer_idx`, or `layer_number` counted from 1, both global), else its key, to which `layer_offset` is
added on a later stage of a pipeline. Names are data: one that is no small number is none. What is remembered of a model
are names and numbers, never the modules: a model that the training drops is gone.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayer:
    """One layer of a stack."""

    idx: int
    """Its number in the whole model."""
    path: str
    """Its dotted path."""
    module: nn.Module
    """The module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A stack of layers, in the order of their numbers."""

    name: str
    """Its name in the model, wrappers included."""
    layers: tuple[StackLayer, ...]
    """The layers that this process has."""
    keys: dict[str, int]
    """By the first part of a name inside of it: the number of the layer."""

    def idx_of(self, name: str) -> int | None:
        """The number of the layer that a module of that name is in; None outside of the stack."""
        if not self.name:
            return self.keys.get(name.partition(".")[0])
        if not name.startswith(self.name + "."):
            return None
        return self.keys.get(name[len(self.name) + 1 :].partition(".")[0])


def module_path(path: str) -> str:
    """The dotted path of a module without the prefixes that wrappers add."""
    parts = [part for part in path.split(".") if part not in WRAPPERS]
    while parts and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def find_stacks(root: nn.Module, *, layer_offset: int = 0) -> list[Stack]:
    """The outermost stacks of a model, that of its decoder first."""
    stacks: list[Stack] = []
    sizes: dict[str, int] = {}
    for name, module in root.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) or _is_inside(name, stacks):
            continue
        layers = _layers_in(name, module)
        if layers:
            stacks.append(_stack(name, layers, layer_offset=layer_offset))
            sizes[name] = sum(map(_numel, module.parameters()))
    return sorted(stacks, key=lambda stack: (_is_aside(stack.name), -sizes[stack.name]))


def stated_idx(module: nn.Module) -> int | None:
    """The number of its layer that a module itself tells; None where it tells none."""
    own, number = _told(module, "layer_idx"), _told(module, "layer_number")
    if _is_idx(own):
        return own  # type: ignore[no-any-return]  # it is an int
    return number - 1 if _is_idx(number) and number > 0 else None


def shapes_of(module: nn.Module) -> tuple[tuple[int, ...] | None, ...]:
    """The shapes of a module's own parameters; None for one that is not made yet."""
    parameters = module._parameters.values()  # noqa: SLF001  (runs no parametrization)
    return tuple(None if one is None or is_lazy(one) else tuple(one.shape) for one in parameters)


def numbered(path: str) -> tuple[int, str]:
    """The first number in a dotted path, and what is before it; -1 and nothing where there is none."""
    parts = path.split(".")
    place = next((place for place, part in enumerate(parts) if _is_number(part)), None)
    return (-1, "") if place is None else (int(parts[place]), ".".join(parts[:place]))


def _told(module: nn.Module, name: str) -> Any:
    # Most modules tell nothing, and torch's own way to find that out is slow.
    kind = type(module)
    is_plain = kind.__getattr__ is nn.Module.__getattr__ and kind.__getattribute__ is object.__getattribute__
    if is_plain and name not in vars(module) and not hasattr(kind, name):
        return None
    return asked(module, name)


def _is_idx(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**_MAX_DIGITS


def _numel(parameter: Any) -> int:
    return 0 if is_lazy(parameter) else int(parameter.numel())


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _is_inside(name: str, stacks: list[Stack]) -> bool:
    return any(stack.idx_of(name) is not None for stack in stacks)


def _is_aside(name: str) -> bool:
    return any(part in name for part in _ASIDE) and "decoder" not in name


def _layers_in(name: str, module: nn.Module) -> dict[str, tuple[int, nn.Module]]:
    """The layers of a container, by key, with the numbers in their keys; empty where it is no stack."""
    own = module_path(name).rpartition(".")[2]
    children = dict(module.named_children())
    numbers = _numbers(list(children))
    if not numbers or own in _NO_STACKS:
        return {}
    inner = {key: _unwrapped(child) for key, child in children.items()}
    able = {key: child for key, child in inner.items() if _holds_products(child)}
    kinds = Counter(_kind(child) for child in able.values())
    if not able:
        return {}
    kind, count = kinds.most_common(1)[0]
    is_mixed = count < len(inner)
    if own in _NAMES and len(able) == len(inner):
        is_mixed = False
    elif 2 * count <= len(inner) or (len(inner) == 1 and isinstance(module, nn.Sequential)):
        return {}
    return {key: (numbers[key], children[key]) for key, child in able.items() if not is_mixed or _kind(child) is kind}


def _numbers(keys: list[str]) -> dict[str, int]:
    """The number in each key; empty where one has none, or two have the same."""
    found = {}
    for key in keys:
        tail = key[len(key.rstrip("0123456789")) :]
        if not _is_number(tail):
            return {}
        found[key] = int(tail)
    return found if len(set(found.values())) == len(found) else {}


def _stack(name: str, found: dict[str, tuple[int, nn.Module]], *, layer_offset: int) -> Stack:
    stated = {key: _stated_within(module) for key, (_, module) in found.items()}
    told = {key: idx for key, idx in stated.items() if idx is not None}
    if len(told) == len(found) == len(set(told.values())):
        keys = told
    else:
        keys = {key: number + layer_offset for key, (number, _) in found.items()}
    return stack_of(name, {key: module for key, (_, module) in found.items()}, keys)


def stack_of(name: str, children: Mapping[str, nn.Module], keys: dict[str, int]) -> Stack:
    """The stack of that name whose layers are the children with these keys, under these numbers."""
    layers = [
        StackLayer(idx=idx, path=module_path(f"{name}.{key}".lstrip(".")), module=children[key])
        for key, idx in keys.items()
    ]
    return Stack(name=name, layers=tuple(sorted(layers, key=lambda layer: layer.idx)), keys=keys)


def _stated_within(layer: nn.Module) -> int | None:
    stated = (stated_idx(module) for module in layer.modules())
    return next((idx for idx in stated if idx is not None), None)


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = module
    while found := [child for name, child in inner.named_children() if name in WRAPPERS]:
        inner = found[0]
    return inner


def _kind(module: nn.Module) -> type:
    """The class, without the one that FSDP2 puts before it."""
    bases = type(module).__mro__
    return bases[2] if len(bases) > 2 and bases[1].__name__ == "FSDPModule" else bases[0]  # noqa: PLR2004


def _holds_products(module: nn.Module) -> bool:
    return any(part is not module and _is_product(part) for part in module.modules()) or _is_bare_product(module)


def _is_product(module: nn.Module) -> bool:
    role = role_of(type(module))
    return (role is not None and role.layer_type == "linear") or isinstance(module, nn.MultiheadAttention)


def _is_bare_product(module: nn.Module) -> bool:
    """Whether a layer computes with matrices of its own and holds no linear layers."""
    return (
        not _is_product(module)
        and not _is_lookup(module)
        and any(
            parameter is not None and parameter.ndim > 1
            for parameter in module._parameters.values()  # noqa: SLF001  (runs no parametrization)
        )
    )


def _is_lookup(module: nn.Module) -> bool:
    role = role_of(type(module))
    return role is not None and role.layer_type == "embedding"


def embedding_path(root: nn.Module, stack: Stack) -> str:
    """The path of what makes the embedding that enters a stack: the nearest module beside it that looks up rows."""
    parts = stack.name.split(".") if stack.name else []
    for length in range(len(parts) - 1, -1, -1):
        for name, child in _children(root, parts[:length]):
            is_beside = not f"{stack.name}.".startswith(f"{name}.")
            if is_beside and any(_is_lookup(part) for part in child.modules()):
                return module_path(name)
    return module_path(".".join([*parts[:-1], "embedding"]))


def _children(root: nn.Module, above: list[str]) -> Iterator[tuple[str, nn.Module]]:
    module: Any = root
    for part in above:
        module = module._modules[part]  # noqa: SLF001  (a class may have something else under that name)
    for name, child in module.named_children():
        yield ".".join([*above, name]), child


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSurvey:
    """What there is in a model."""

    places: list[Frame]
    """Every module, the model itself first."""
    containers: list[tuple[str, nn.Module, dict[str, int]]]
    """For each stack its name, the module that holds its layers, and their numbers by their keys in it."""

    @property
    def stacks(self) -> list[Stack]:
        """Its stacks, that of its decoder first."""
        # By their children, not by their attributes: a class may have something else under the name of a stack.
        return [stack_of(name, dict(container.named_children()), keys) for name, container, keys in self.containers]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    """What is remembered of a model."""

    members: list[tuple[Any, ...]]
    """All that was read of each module: where that is another, it is another model."""
    places: list[tuple[str, int, str]]
    """For each of them the path, the number of the layer, and the list that holds it."""
    stacks: list[tuple[str, dict[str, int]]]
    """For each stack its name, and the numbers of its layers by the first part of a name inside of it."""


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
            known = self._findings[root] = _Findings(
                members=members,
                places=[(module_path(name), *self._layer_of(name, module, stacks)) for name, module in named],
                stacks=[(stack.name, stack.keys) for stack in stacks],
            )
        pairs = zip(named, known.places, strict=True)
        places = [Frame(path, module, layer_idx, stack) for (_, module), (path, layer_idx, stack) in pairs]
        modules = dict(named)
        return ModelSurvey(places=places, containers=[(name, modules[name], keys) for name, keys in known.stacks])

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
    # A module that stands under two names has one of them in the list: its other place is among the children.
    children = tuple((key, id(child)) for key, child in module.named_children())
    return name, id(module), kind, role_of(kind), stated_idx(module), shapes_of(module), children
