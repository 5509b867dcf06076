"""The form of a role: which modules or functions it is about, and which of their tensors are recorded as what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranktape.capture.source import TensorRole
from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Operation, check_term

if TYPE_CHECKING:
    import torch
    from torch import nn

UNSAMPLED = frozenset({"weight", "bias", "grad_weight", "grad_bias"})
"""Tensors without a dimension of samples."""

OPTIONAL = frozenset({"bias"})
"""Parameters that a layer may do without."""

OUTPUT = "output"
"""What the result of a role is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Where among the arguments of a call a tensor is."""

    position: int | None
    """Place among the positional arguments, without `self`; None for one that is always named."""
    keyword: str
    """Name of the argument."""
    part: tuple[int, int] | None = None
    """Of one that holds several tensors: the dimension that counts them, and the place of this one."""
    is_optional: bool = False
    """Whether a call may do without it, as without a bias."""


Place = Operand | int | str | tuple[int | None, str]
"""How an operand may be written: a position, a keyword, or both."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleRole:
    """What the modules of some classes are, and of their subclasses."""

    classes: tuple[type | str, ...]
    """Types, or dotted names such as 'mine.layers.Linear': nothing is imported for them. `*` stands for any text."""
    layer_type: str
    """`linear`, `attention`, `embedding`, or your own."""
    component: str = "unknown"
    """`linear`, `FA`, or your own."""
    operands: Mapping[str, Place] = field(default_factory=dict)
    """For each tensor name: where among the arguments of `forward` it is."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """For each tensor name: the attribute of the module that holds the parameter; one that is None is not there."""
    output: int | str | None = None
    """Which element of what `forward` returns is the output: a place or a name; the first tensor by default."""
    layouts: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """For each tensor name: the letters of its dimensions, in several lengths if need be; `B` holds samples."""
    placement: Callable[[nn.Module, str, torch.Tensor], str | None] | None = None
    """Gives for a module, a tensor name and the tensor the placement of a shard, as JSON; None for a whole tensor."""
    accumulated: Callable[[nn.Module, torch.Tensor], torch.Tensor | None] | None = None
    """Gives for a module and its parameter the tensor in which the layer itself adds up the gradient; None for none."""
    returned: Callable[[nn.Module], bool] | None = None
    """Says of a module whether it returns its bias beside its output, and does not add it; None where none does."""
    is_aliased: bool = True
    """Whether an input may be replaced by a view of itself, to see this layer's share of its gradient. Say False of a
    layer that writes into its input: its `grad_` of operands are not recorded then."""

    def __post_init__(self) -> None:
        """Check what a user may get wrong."""
        _check_terms(self.layer_type, self.component, names=(*self.operands, *self.parameters))
        if not self.classes or not _is_tuple(self.classes):
            raise UsageError(f"classes={self.classes!r} of a role: give a tuple of types or dotted names")
        for one in self.classes:
            if not (isinstance(one, type) or _is_dotted(one)):
                raise UsageError(f"{one!r} in classes of a role is not allowed: give a type, or 'package.module.Class'")
        for attribute in self.parameters.values():
            if not isinstance(attribute, str):
                raise UsageError(f"parameters of a role: {attribute!r} is no attribute: give names such as 'weight'")

    @property
    def name(self) -> str:
        """What a person is told."""
        classes = (one if isinstance(one, str) else f"{one.__module__}.{one.__qualname__}" for one in self.classes)
        return ", ".join(classes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FunctionRole:
    """What some functions are, which are replaced under every module-level name while an iteration is captured."""

    functions: tuple[str, ...]
    """Dotted names, such as 'flash_attn.flash_attn_func': nothing is imported for them."""
    layer_type: str
    """`attention`, or your own."""
    component: str = "unknown"
    """`FA`, or your own."""
    operands: Mapping[str, Place] = field(default_factory=dict)
    """For each tensor name: where among the arguments it is."""
    output: int | str | None = None
    """Which element of the result is the output; the first tensor by default."""
    layouts: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """As of a module's role."""
    gives_function: bool = False
    """Whether the dotted name is a method whose result is the function, as that of a registry."""
    owner: str = ""
    """The operand that must be a parameter of a known module, which then gives the call its name; none by default, and
    the module that is running gives it."""
    is_grouped: bool = False
    """Whether that operand may also be the parameter transposed, or in another dtype, as in products of experts."""

    def __post_init__(self) -> None:
        """Check what a user may get wrong."""
        _check_terms(self.layer_type, self.component, names=tuple(self.operands))
        if not self.functions or not _is_tuple(self.functions):
            raise UsageError(f"functions={self.functions!r} of a role is not allowed: give a tuple of dotted names")
        for one in self.functions:
            if not _is_dotted(one):
                raise UsageError(f"{one!r} in functions of a role is not allowed: give 'package.module.function'")

    @property
    def name(self) -> str:
        """What a person is told."""
        return ", ".join(self.functions)


def operand_of(place: Any) -> Operand:
    """An operand as it may be written, in full; of a bare position the keyword is empty.

    Raises:
        UsageError: it is none of the forms.
    """
    if isinstance(place, Operand):
        return place
    if isinstance(place, int) and not isinstance(place, bool) and place >= 0:
        return Operand(position=place, keyword="")
    if isinstance(place, str) and place:
        return Operand(position=None, keyword=place)
    if isinstance(place, tuple) and len(place) == _PAIR:
        position, keyword = place
        if (position is None or (isinstance(position, int) and position >= 0)) and isinstance(keyword, str):
            return Operand(position=position, keyword=keyword)
    raise UsageError(f"{place!r} of a role is no operand: give a position, a keyword, or (position, keyword)")


_PAIR = 2


def _is_tuple(value: Any) -> bool:
    return isinstance(value, tuple | list)


def _is_dotted(value: Any) -> bool:
    return isinstance(value, str) and "." in value


def forward_role(name: str, layouts: Mapping[str, str | tuple[str, ...]]) -> TensorRole:
    """What a tensor of a role is in the forward pass."""
    return TensorRole(
        operation=Operation.FORWARD,
        phase="post" if name == OUTPUT else "pre",
        tensor_name=name,
        has_samples=name not in UNSAMPLED,
        layouts=_layouts(layouts, name),
    )


def grad_role(name: str, layouts: Mapping[str, str | tuple[str, ...]]) -> TensorRole:
    """What the gradient of that tensor is in the backward pass."""
    return TensorRole(
        operation=Operation.BACKWARD,
        phase="pre" if name == OUTPUT else "post",
        tensor_name=f"grad_{name}",
        has_samples=name not in UNSAMPLED,
        layouts=_layouts(layouts, name),
    )


def _layouts(layouts: Mapping[str, str | tuple[str, ...]], name: str) -> tuple[str, ...]:
    given = layouts.get(name, ())
    return (given,) if isinstance(given, str) else tuple(given)


def _check_terms(layer_type: str, component: str, *, names: tuple[str, ...]) -> None:
    check_term(layer_type, field="layer_type")
    check_term(component, field="component")
    for name in names:
        check_term(name, field="tensor_name")
