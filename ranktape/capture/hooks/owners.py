"""The owner of a parameter: the module that has it, and what a product with it, or with a part of it, is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ranktape.capture.passes.passes import Frame

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A parameter, or a part of one, and the module that has it."""

    module: nn.Module
    """The module."""
    attribute: str
    """Its name of the parameter."""
    layer_idx: int
    """The layer; -1 outside of the stack."""
    layer_stack: str
    """The list that holds the layer."""
    base_path: str
    """The module's dotted path."""
    first: int | None = None
    """Of a part: its first row, or the only one; None for all of it."""
    last: int | None = None
    """Of a part with several rows: the row after it."""

    @property
    def path(self) -> str:
        """What the product with it is called: the module, and which of its parameters if that is not `weight`."""
        name = "" if self.attribute == "weight" else f".{self.attribute.removesuffix('_weight')}"
        rows = "" if self.first is None else f"[{self.first}]" if self.last is None else f"[{self.first}:{self.last}]"
        return f"{self.base_path}{name}{rows}".lstrip(".")


class Owners:
    """The parameters of all modules that are known, for one iteration."""

    def __init__(self) -> None:
        # The tensors are held too: another one could get the identity of one that is gone.
        self._owners: dict[int, tuple[torch.Tensor, Frame, str]] = {}
        self._frames: dict[nn.Module, Frame] = {}
        self.met: set[tuple[nn.Module, str]] = set()
        """The modules and their names of the parameters with which a product was recorded."""

    def add(self, frame: Frame) -> None:
        """Know a module's own parameters; of one that several have, the first is the owner."""
        self._frames[frame.module] = frame
        for name, parameter in frame.module._parameters.items():  # noqa: SLF001  (runs no parametrization)
            if parameter is not None:
                self._owners.setdefault(id(parameter), (parameter, frame, name))

    def find(self, weight: torch.Tensor, frame: Frame | None, *, is_grouped: bool = False) -> Owner | None:
        """The owner of a weight or of some rows of one; None where it is no known parameter, or a transposed one.

        With `is_grouped`, of a transposed one too, and of its copy in another dtype. The module that is running is
        asked too: under FSDP2 it computes with other tensors than it has at rest.
        """
        found = self._lookup(_origin(weight) if is_grouped else weight, frame)
        if found is not None:
            return _owner(found[1], found[2])
        base = weight._base  # noqa: SLF001  (torch has no public name for it)
        found = None if base is None else self._lookup(base, frame)
        if base is None or found is None or not base.is_contiguous() or not weight.is_contiguous() or not base.ndim:
            return None
        first, rest = divmod(int(weight.storage_offset() - base.storage_offset()), max(int(base.stride(0)), 1))
        is_row = weight.shape == base.shape[1:]
        if rest or not (is_row or weight.shape[1:] == base.shape[1:]):
            return None
        return _owner(found[1], found[2], first=first, last=None if is_row else first + weight.shape[0])

    def _lookup(self, weight: torch.Tensor, frame: Frame | None) -> tuple[torch.Tensor, Frame, str] | None:
        found = self._owners.get(id(weight))
        if found is not None and found[0] is weight:
            return found
        if frame is None:
            return None
        for module in (frame.module, *frame.module.children()):
            for name, parameter in module._parameters.items():  # noqa: SLF001  (runs no parametrization)
                if parameter is weight:
                    return weight, self._frames.get(module, frame), name
        return None


_SAME_VALUES = ("TransposeBackward0", "PermuteBackward0", "ToCopyBackward0")
"""Nodes of autograd behind which a tensor has the same values, in another order or dtype."""


def _origin(weight: torch.Tensor) -> torch.Tensor:
    """The parameter that a tensor is, transposed or in another dtype; the tensor itself where autograd cannot tell."""
    node = weight.grad_fn
    while node is not None and node.name() in _SAME_VALUES:
        node = node.next_functions[0][0]
    own = getattr(node, "variable", None)
    if isinstance(own, torch.Tensor):
        return own
    base = weight._base  # noqa: SLF001  (torch has no public name for it)
    return base if base is not None and base.numel() == weight.numel() else weight


def _owner(frame: Frame, attribute: str, *, first: int | None = None, last: int | None = None) -> Owner:
    return Owner(
        module=frame.module,
        attribute=attribute,
        layer_idx=frame.layer_idx,
        layer_stack=frame.layer_stack,
        base_path=frame.path,
        first=first,
        last=last,
    )
