"""Finds the module that owns a parameter with which a function computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ranktape.capture.passes.tracker import Frame
from ranktape.capture.roles.known import role_of
from ranktape.capture.tensors.parts import PLAIN
from ranktape.capture.torch_private import base_of, in_backward, parameters_of

if TYPE_CHECKING:
    from torch import nn

    from ranktape.capture.roles.table import FunctionRole


@dataclass(frozen=True, slots=True)
class Owner:
    """A parameter or a part of one, with the module that has it."""

    frame: Frame
    """The module."""
    attribute: str
    """Name of the parameter in the module."""
    first: int | None = None
    """First or only row of the part; None for the whole parameter."""
    last: int | None = None
    """The row after the part; None if the part is a single row."""

    @property
    def path(self) -> str:
        """The name of products with it: the path of the module, the parameter if it is not `weight`, and the rows."""
        name = "" if self.attribute == "weight" else f".{self.attribute.removesuffix('_weight')}"
        rows = "" if self.first is None else f"[{self.first}]" if self.last is None else f"[{self.first}:{self.last}]"
        return f"{self.frame.path}{name}{rows}".lstrip(".")


ANY_KIND = ""
"""The key for a layer of any kind."""

_Owned = tuple[torch.Tensor, Frame, str]
"""A parameter, the module that has it, and its name in the module."""


class Owners:
    """The parameters of all known modules, for one iteration."""

    def __init__(self) -> None:
        # Also references the tensors, because a new tensor could get the `id` of a deleted one.
        self._owners: dict[tuple[int, str], _Owned] = {}
        self._addresses: dict[tuple[int, torch.Size, str], _Owned] | None = None
        """The owners by address and shape of the parameter; None until a recomputation needs them."""
        self.frames: dict[nn.Module, Frame] = {}
        """The known modules."""
        self.recorded: set[tuple[nn.Module, str]] = set()
        """The module and the name of each parameter with which a product was recorded."""

    def forget(self) -> None:
        """Drop all references to modules and parameters."""
        self._owners.clear()
        self._addresses = None
        self.frames.clear()
        self.recorded.clear()

    def add(self, frame: Frame) -> None:
        """Add the parameters of a module itself.

        If several modules share a parameter, its owner is the running module, or else the first added one, separately
        for each kind of layer.
        """
        self.frames[frame.module] = frame
        self._addresses = None
        role = role_of(type(frame.module))
        for name, parameter in parameters_of(frame.module).items():
            if parameter is not None:
                for kind in {ANY_KIND, ANY_KIND if role is None else role.layer_type}:
                    self._owners.setdefault((id(parameter), kind), (parameter, frame, name))

    def find(self, weight: torch.Tensor, frame: Frame | None, *, role: FunctionRole) -> Owner | None:
        """The owner of a weight or of some of its rows; None if it is not a known parameter, or is transposed.

        If there are several owners, a layer of the kind of the function's role is preferred: a product with a weight
        that an embedding and an output layer share belongs to the output layer. In a grouped product, a transposed
        weight or a copy in another dtype also has an owner. The running module is searched as well, because under FSDP2
        it has other parameters while it runs.
        """
        owned = self._lookup(_origin(weight) if role.is_grouped else weight, frame, kind=role.layer_type)
        if owned is not None:
            return Owner(owned[1], owned[2])
        base = base_of(weight)
        owned = None if base is None else self._lookup(base, frame, kind=role.layer_type)
        rows = None if base is None or owned is None else rows_of(weight, base)
        return None if rows is None or owned is None else Owner(owned[1], owned[2], *rows)

    def _lookup(self, weight: torch.Tensor, frame: Frame | None, *, kind: str) -> _Owned | None:
        owned = self._owners.get((id(weight), kind)) or self._owners.get((id(weight), ANY_KIND))
        if owned is not None and owned[0] is weight:
            return self._of_running(owned, frame)
        if in_backward() and (owned := self._at_address(weight, kind=kind)) is not None:
            return self._of_running(owned, frame)
        if frame is None:
            return None
        for module in (frame.module, *frame.module.children()):
            for name, parameter in parameters_of(module).items():
                if parameter is weight:
                    return weight, self.frames.get(module, frame), name
        return None

    def _of_running(self, owned: _Owned, frame: Frame | None) -> _Owned:
        """The running module as the owner, if it has the parameter."""
        if frame is None or frame.module is owned[1].module:
            return owned
        names = (name for name, parameter in parameters_of(frame.module).items() if parameter is owned[0])
        name = next(names, None)
        return owned if name is None else (owned[0], self.frames.get(frame.module, frame), name)

    def _at_address(self, weight: torch.Tensor, *, kind: str) -> _Owned | None:
        """The owner of a parameter that is an argument of a reentrant checkpoint, which detaches its arguments."""
        is_detached = weight.is_leaf and not isinstance(weight, torch.nn.Parameter) and type(weight) in PLAIN
        if not is_detached or not weight.numel():
            return None
        if self._addresses is None:
            known = ((owned[0], key[1], owned) for key, owned in self._owners.items() if type(owned[0]) in PLAIN)
            self._addresses = {
                (parameter.data_ptr(), parameter.shape, kind): owned
                for parameter, kind, owned in known
                if parameter.numel()
            }
        address = weight.data_ptr(), weight.shape
        return self._addresses.get((*address, kind)) or self._addresses.get((*address, ANY_KIND))


def rows_of(weight: torch.Tensor, base: torch.Tensor) -> tuple[int, int | None] | None:
    """The first row of a view in its base and the row after it, or its only row and None; None if it is not rows."""
    if not base.is_contiguous() or not weight.is_contiguous() or not base.ndim:
        return None
    first, rest = divmod(int(weight.storage_offset() - base.storage_offset()), max(int(base.stride(0)), 1))
    is_row = weight.shape == base.shape[1:]
    if rest or not (is_row or weight.shape[1:] == base.shape[1:]):
        return None
    return first, None if is_row else first + weight.shape[0]


_SAME_VALUES = ("TransposeBackward0", "TBackward0", "PermuteBackward0", "ToCopyBackward0")
"""Autograd nodes whose result has the same values in another order or dtype."""


def _origin(weight: torch.Tensor) -> torch.Tensor:
    """The parameter of which a tensor is a transposed view or a cast; the tensor itself if autograd does not tell."""
    node = weight.grad_fn
    while node is not None and node.name() in _SAME_VALUES:
        node = node.next_functions[0][0]
    variable = getattr(node, "variable", None)
    if isinstance(variable, torch.Tensor):
        return variable
    base = base_of(weight)
    return base if base is not None and base.numel() == weight.numel() else weight
