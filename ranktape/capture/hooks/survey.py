"""Where in a model is each module: its path, the number of its layer, the stacks? Found anew when the model changed.

What is remembered of a model are names and numbers, never the modules: a model that the training drops is gone.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ranktape.capture.hooks.stacks import (
    Stack,
    find_stacks,
    module_path,
    numbered,
    shapes_of,
    stack_of,
    stated_idx,
)
from ranktape.capture.roles.known import role_of

if TYPE_CHECKING:
    from torch import nn


class Place(NamedTuple):
    """Where a module is."""

    path: str
    """Its dotted path."""
    module: nn.Module
    """The module."""
    layer_idx: int
    """Its layer; -1 outside of the stacks."""
    layer_stack: str
    """Dotted path of the list that holds the layer: from names alone, the same on every rank that has the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What there is in a model."""

    places: list[Place]
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

    def of(self, root: nn.Module) -> Survey:
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
        places = [Place(path, module, layer_idx, stack) for (_, module), (path, layer_idx, stack) in pairs]
        modules = dict(named)
        return Survey(places=places, containers=[(name, modules[name], keys) for name, keys in known.stacks])

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
