"""The form of a role: the modules or functions that it covers, and the names under which their tensors are recorded.

A role is written by a user. Its ports are the resolved form: each tensor with its names and its position in a call.
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

    from ranktape.capture.passes.tracker import Arguments

UNSAMPLED = frozenset({"weight", "wide_weight", "bias", "grad_weight", "grad_bias"})
"""The names of tensors without a sample dimension."""

_OPTIONAL = frozenset({"bias"})
"""The names of optional parameters of a layer."""

OUTPUT = "output"
"""The name of the result of a role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """The position of a tensor among the arguments of a call."""

    position: int | None
    """Place among the positional arguments, without `self`; None for one that is always named."""
    keyword: str
    """Name of the argument."""
    part: tuple[int, int] | None = None
    """If the argument contains several tensors: the dimension that stacks them, and the index of this one."""
    is_optional: bool = False
    """Whether a call may omit it, as it may a bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOption:
    """An argument that configures a call, such as `is_causal`. Its value is recorded as metadata."""

    position: int | None
    """Place among the positional arguments, without `self`; None for one that is always named."""
    keyword: str
    """Name of the argument."""
    default: bool | float | str | None = None
    """The value if it is not passed; None if it is not known, and then nothing is recorded."""

    def value_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The passed value for JSON: numbers, strings and lists of them, otherwise the name of its class.

        A tensor is not read, because the training would wait for its device.
        """
        is_placed = self.position is not None and self.position < len(args)
        value = args[self.position] if is_placed else kwargs.get(self.keyword)  # type: ignore[index]  # it is placed
        if value is None:
            return self.default
        if isinstance(value, tuple | list) and all(isinstance(number, int) for number in value):
            return list(value)
        is_plain = isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
        return value if is_plain else type(value).__name__


Place = Operand | int | str | tuple[int | None, str]
"""The forms of an operand: a position, a keyword, or both."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Role:
    layer_type: str
    """`linear`, `attention`, `embedding`, or your own."""
    component: str = "unknown"
    """`linear`, `FA`, or your own."""
    operands: Mapping[str, Place] = field(default_factory=dict)
    """The position among the arguments for each tensor name."""
    output: int | str | None = None
    """The element of the result that is the output, by index or name; by default the first tensor."""
    layouts: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """The letters of the dimensions for each tensor name, one string for each number of dimensions; `B` is samples."""
    options: Mapping[str, CallOption] = field(default_factory=dict)
    """The argument that configures a call for each key in the metadata of the first operand."""

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
        for name in given:
            is_dotted = isinstance(name, str) and "." in name
            if not (is_dotted or (what == "classes" and isinstance(name, type))):
                raise UsageError(f"{name!r} in {what} of a role is not allowed: give {example}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleRole(_Role):
    """The role of the modules of some classes and their subclasses."""

    classes: tuple[type | str, ...]
    """Types, or dotted names such as 'mine.layers.Linear', which are not imported. `*` matches any text."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """The attribute of the module with the parameter for each tensor name. A parameter that is None is absent."""
    placement: Callable[[nn.Module, str, torch.Tensor], str | None] | None = None
    """A function from a module, a tensor name and the tensor to the placement of a shard as JSON; None for a whole
    tensor."""
    accumulated: Callable[[nn.Module, torch.Tensor], torch.Tensor | None] | None = None
    """A function from a module and its parameter to the tensor in which the layer itself accumulates the gradient, if
    any."""
    returned: Callable[[nn.Module], bool] | None = None
    """A function that tells whether a module returns its bias beside the output instead of adding it; None if no module
    does."""
    is_aliased: bool = True
    """Whether an input may be replaced by a view of itself, in order to see this layer's share of its gradient. Set it
    to False for a layer that writes to its input; the gradients of its operands are then not recorded."""

    def __post_init__(self) -> None:
        """Check what a user may get wrong."""
        example = "a type, or 'package.module.Class'"
        self._check("classes", holds="types or dotted names", example=example, parameters=self.parameters)
        for attribute in self.parameters.values():
            if not isinstance(attribute, str):
                raise UsageError(f"parameters of a role: {attribute!r} is no attribute: give names such as 'weight'")

    @property
    def name(self) -> str:
        """Name in messages."""
        classes = (kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}" for kind in self.classes)
        return ", ".join(classes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FunctionRole(_Role):
    """The role of some functions, whose calls are recorded in captured iterations, wherever they are stored."""

    functions: tuple[str, ...]
    """Dotted names such as 'flash_attn.flash_attn_func', which are not imported."""
    gives_function: bool = False
    """Whether the dotted name is a method that returns the function, as that of a registry does."""
    owner: str = ""
    """The operand that must be a parameter of a known module, after which the call is named. By default, calls are
    named after the running module."""
    is_grouped: bool = False
    """Whether that operand may also be the transposed parameter or a copy in another dtype, as for experts."""

    def __post_init__(self) -> None:
        """Check what a user may get wrong."""
        self._check("functions", holds="dotted names", example="'package.module.function'", parameters={})

    @property
    def name(self) -> str:
        """Name in messages."""
        return ", ".join(self.functions)


def operand_of(place: Any) -> Operand:
    """The operand for one of its forms. If only a position is given, the keyword is empty.

    Raises:
        UsageError: it is not one of the forms.
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
    """Name in records."""
    value: TensorRole
    """Role in the forward pass."""
    grad: TensorRole
    """Role of its gradient in the backward pass."""
    part: tuple[int, int] | None = None
    """If the argument contains several tensors: the dimension that stacks them, and the index of this one."""

    @property
    def is_optional(self) -> bool:
        """Whether a layer may omit it, as it may a bias, which may also be computed for one call."""
        return self.name in _OPTIONAL

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of an argument, or of its gradient, that belongs to this port."""
        return tensor if self.part is None else tensor.select(*self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument with tensors of a role."""

    position: int | None
    """Index among the positional arguments."""
    keyword: str
    """Name of the argument; empty if only the position is known."""
    ports: tuple[Port, ...]
    """The tensors in it."""
    is_optional: bool = False
    """Whether a call may omit it."""

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The passed value; None if nothing was passed."""
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return kwargs.get(self.keyword)

    def replace(self, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments with another value for this one."""
        if self.position is not None and self.position < len(args):
            return (*args[: self.position], value, *args[self.position + 1 :]), kwargs
        return args, {**kwargs, self.keyword: value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """All tensors of a role."""

    arguments: tuple[Argument, ...] = ()
    """The operands, by argument."""
    parameters: tuple[tuple[str, Port], ...] = ()
    """Attributes of the module, and their tensors."""
    output: Port
    """The result."""
    options: tuple[tuple[str, CallOption], ...] = ()
    """Keys of the metadata, and their arguments."""

    def options_json(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """The configuration of a call as JSON; `null` if there is none."""
        values = {key: option.value_in(args, kwargs) for key, option in self.options}
        return json.dumps({key: value for key, value in values.items() if value is not None} or None)

    @property
    def all(self) -> Iterator[Port]:
        """All ports: operands, parameters, then the output."""
        for argument in self.arguments:
            yield from argument.ports
        yield from (port for _, port in self.parameters)
        yield self.output


def port_of(name: str, layouts: Mapping[str, str | tuple[str, ...]], part: tuple[int, int] | None = None) -> Port:
    """The port of a tensor of that name and its gradient."""
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
    """The ports with both position and keyword of every argument, of which a role may give only one.

    The first `num_bound` parameters of the function, such as `self`, are not arguments.
    """
    if all(argument.keyword and argument.position is not None for argument in ports.arguments):
        return ports
    try:
        names = list(inspect.signature(function).parameters)[num_bound:]
    except (TypeError, ValueError):
        return ports  # a built-in function has no signature
    arguments = []
    for argument in ports.arguments:
        position, keyword = argument.position, argument.keyword
        if not keyword and position is not None and position < len(names):
            keyword = names[position]
        if position is None and keyword in names:
            position = names.index(keyword)
        arguments.append(dataclasses.replace(argument, position=position, keyword=keyword))
    return dataclasses.replace(ports, arguments=tuple(arguments))
