"""The form of a role: which modules or functions it is about, and which of their tensors are recorded as what.

A role is what a person writes; its ports are what that comes to: each tensor with its names and places.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranktape.capture.source import TensorRole
from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Operation, check_term

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ranktape.capture.passes.passes import Arguments

UNSAMPLED = frozenset({"weight", "wide_weight", "bias", "grad_weight", "grad_bias"})
"""Tensors without a dimension of samples."""

_OPTIONAL = frozenset({"bias"})
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOption:
    """An argument that says how a call computes, such as `is_causal`; what it is goes into the records' metadata."""

    position: int | None
    """Place among the positional arguments, without `self`; None for one that is always named."""
    keyword: str
    """Name of the argument."""
    default: bool | float | str | None = None
    """What holds where it is not passed; None where that is not known, and nothing is said."""

    def said(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What was passed as JSON has it: of anything but numbers, texts and lists of them the name of its class.

        A tensor is not read: the training would wait for its device.
        """
        is_placed = self.position is not None and self.position < len(args)
        value = args[self.position] if is_placed else kwargs.get(self.keyword)  # type: ignore[index]  # it is placed
        if value is None:
            return self.default
        if isinstance(value, tuple | list) and all(isinstance(one, int) for one in value):
            return list(value)
        is_plain = isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
        return value if is_plain else type(value).__name__


Place = Operand | int | str | tuple[int | None, str]
"""How an operand may be written: a position, a keyword, or both."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Role:
    layer_type: str
    """`linear`, `attention`, `embedding`, or your own."""
    component: str = "unknown"
    """`linear`, `FA`, or your own."""
    operands: Mapping[str, Place] = field(default_factory=dict)
    """For each tensor name: where among the arguments it is."""
    output: int | str | None = None
    """Which element of the result is the output: a place or a name; the first tensor by default."""
    layouts: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """For each tensor name: the letters of its dimensions, in several lengths if need be; `B` holds samples."""
    options: Mapping[str, CallOption] = field(default_factory=dict)
    """For each word in the metadata of the first operand: the argument that says so how a call computes."""

    def _check(self, what: str, *, holds: str, example: str, parameters: Mapping[str, str]) -> None:
        check_term(self.layer_type, field="layer_type")
        check_term(self.component, field="component")
        for name in (*self.operands, *parameters):
            check_term(name, field="tensor_name")
        for option in self.options.values():
            if not isinstance(option, CallOption):
                raise UsageError(
                    f"options of a role: {option!r:.80} is none: give a CallOption(position=..., keyword=...)"
                )
        given = getattr(self, what)
        if not given or not isinstance(given, tuple | list):
            raise UsageError(f"{what}={given!r} of a role is not allowed: give a tuple of {holds}")
        for one in given:
            is_dotted = isinstance(one, str) and "." in one
            if not (is_dotted or (what == "classes" and isinstance(one, type))):
                raise UsageError(f"{one!r} in {what} of a role is not allowed: give {example}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleRole(_Role):
    """What the modules of some classes are, and of their subclasses."""

    classes: tuple[type | str, ...]
    """Types, or dotted names such as 'mine.layers.Linear': nothing is imported for them. `*` stands for any text."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """For each tensor name: the attribute of the module that holds the parameter; one that is None is not there."""
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
        example = "a type, or 'package.module.Class'"
        self._check("classes", holds="types or dotted names", example=example, parameters=self.parameters)
        for attribute in self.parameters.values():
            if not isinstance(attribute, str):
                raise UsageError(f"parameters of a role: {attribute!r} is no attribute: give names such as 'weight'")

    @property
    def name(self) -> str:
        """What messages call it."""
        classes = (one if isinstance(one, str) else f"{one.__module__}.{one.__qualname__}" for one in self.classes)
        return ", ".join(classes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FunctionRole(_Role):
    """What some functions are, whose calls are seen while an iteration is captured, whatever holds them."""

    functions: tuple[str, ...]
    """Dotted names, such as 'flash_attn.flash_attn_func': nothing is imported for them."""
    gives_function: bool = False
    """Whether the dotted name is a method whose result is the function, as that of a registry."""
    owner: str = ""
    """The operand that must be a parameter of a known module, which then gives the call its name; none by default, and
    the module that is running gives it."""
    is_grouped: bool = False
    """Whether that operand may also be the parameter transposed, or in another dtype, as in products of experts."""

    def __post_init__(self) -> None:
        """Check what a user may get wrong."""
        self._check("functions", holds="dotted names", example="'package.module.function'", parameters={})

    @property
    def name(self) -> str:
        """What messages call it."""
        return ", ".join(self.functions)


def operand_of(place: Any) -> Operand:
    """An operand as it may be written, in full; of a bare position the keyword is empty.

    Raises:
        UsageError: it is none of the forms.
    """
    if isinstance(place, Operand):
        return place
    position, keyword = place if isinstance(place, tuple) and len(place) == _PAIR else (place, "")
    if isinstance(place, str) and place:
        position, keyword = None, place
    is_place = isinstance(position, int) and not isinstance(position, bool) and position >= 0
    if isinstance(keyword, str) and (is_place or (position is None and place is not None)):
        return Operand(position=position, keyword=keyword)
    raise UsageError(f"{place!r} of a role is no operand: give a position, a keyword, or (position, keyword)")


_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One tensor of a role."""

    name: str
    """Its name in records."""
    value: TensorRole
    """What it is in the forward pass."""
    grad: TensorRole
    """What its gradient is in the backward pass."""
    part: tuple[int, int] | None = None
    """Of an argument that holds several tensors: the dimension that counts them, and the place of this one."""

    @property
    def is_optional(self) -> bool:
        """Whether a layer may do without it, as without a bias, which may also be computed for one call."""
        return self.name in _OPTIONAL

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """What of an argument, or of its gradient, belongs to this port."""
        return tensor if self.part is None else tensor.select(*self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument that holds tensors of a role."""

    position: int | None
    """Place among the positional ones."""
    keyword: str
    """Its name; empty where only the place is known."""
    ports: tuple[Port, ...]
    """The tensors in it."""
    is_optional: bool = False
    """Whether a call may do without it."""

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What was passed; None where nothing was."""
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return kwargs.get(self.keyword)

    def put(self, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments with another value in place of what was passed."""
        if self.position is not None and self.position < len(args):
            return (*args[: self.position], value, *args[self.position + 1 :]), kwargs
        return args, {**kwargs, self.keyword: value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """All tensors of a role."""

    arguments: tuple[Argument, ...] = ()
    """The operands, by argument."""
    parameters: tuple[tuple[str, Port], ...] = ()
    """Attributes of the module, and what is in them."""
    output: Port
    """The result."""
    options: tuple[tuple[str, CallOption], ...] = ()
    """Words, and what says them."""

    def said(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """What a call's settings are, as JSON; `null` without any."""
        words = {word: option.said(args, kwargs) for word, option in self.options}
        return json.dumps({word: value for word, value in words.items() if value is not None} or None)

    @property
    def all(self) -> Iterator[Port]:
        """One after the other: operands, parameters, the output."""
        for argument in self.arguments:
            yield from argument.ports
        yield from (port for _, port in self.parameters)
        yield self.output


def port_of(name: str, layouts: Mapping[str, str | tuple[str, ...]], part: tuple[int, int] | None = None) -> Port:
    """What a tensor of that name, and its gradient, are recorded as."""
    given = layouts.get(name, ())
    letters = (given,) if isinstance(given, str) else tuple(given)
    phases = ("post", "pre") if name == OUTPUT else ("pre", "post")
    has_samples = name not in UNSAMPLED
    return Port(
        name=name,
        value=TensorRole(Operation.FORWARD, phases[0], name, has_samples, letters),
        grad=TensorRole(Operation.BACKWARD, phases[1], f"grad_{name}", has_samples, letters),
        part=part,
    )


@functools.lru_cache(maxsize=1024)
def ports_of(role: ModuleRole | FunctionRole) -> Ports:
    """The tensors of a role."""
    grouped: dict[tuple[int | None, str, bool], list[Port]] = {}
    for name, place in role.operands.items():
        operand = operand_of(place)
        key = operand.position, operand.keyword, operand.is_optional
        grouped.setdefault(key, []).append(port_of(name, role.layouts, operand.part))
    parameters = role.parameters if isinstance(role, ModuleRole) else {}
    return Ports(
        arguments=tuple(
            Argument(position=position, keyword=keyword, ports=tuple(ports), is_optional=is_optional)
            for (position, keyword, is_optional), ports in grouped.items()
        ),
        parameters=tuple((attribute, port_of(name, role.layouts)) for name, attribute in parameters.items()),
        output=port_of(OUTPUT, role.layouts),
        options=tuple(role.options.items()),
    )


def resolved(ports: Ports, function: Callable[..., Any], *, num_bound: int = 0) -> Ports:
    """The ports with places and names of all arguments, where a role gives one of them only.

    The first `num_bound` parameters of the function are no arguments: `self`.
    """
    if all(argument.keyword and argument.position is not None for argument in ports.arguments):
        return ports
    try:
        names = list(inspect.signature(function).parameters)[num_bound:]
    except (TypeError, ValueError):
        return ports  # a built-in function does not say
    arguments = []
    for argument in ports.arguments:
        position, keyword = argument.position, argument.keyword
        if not keyword and position is not None and position < len(names):
            keyword = names[position]
        if position is None and keyword in names:
            position = names.index(keyword)
        arguments.append(dataclasses.replace(argument, position=position, keyword=keyword))
    return dataclasses.replace(ports, arguments=tuple(arguments))
