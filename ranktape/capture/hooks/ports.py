"""The tensors of a role, and where among the arguments of a call, or in the module, each of them is."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.capture.passes.clock import Arguments
from ranktape.capture.roles.table import (
    OPTIONAL,
    OUTPUT,
    FunctionRole,
    ModuleRole,
    Operand,
    forward_role,
    grad_role,
    operand_of,
)

if TYPE_CHECKING:
    import torch

    from ranktape.capture.source import TensorRole


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
        return self.name in OPTIONAL

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

    arguments: tuple[Argument, ...]
    """The operands, by argument."""
    parameters: tuple[tuple[str, Port], ...]
    """Attributes of the module, and what is in them."""
    output: Port
    """The result."""

    @property
    def all(self) -> Iterator[Port]:
        """One after the other: operands, parameters, the output."""
        for argument in self.arguments:
            yield from argument.ports
        yield from (port for _, port in self.parameters)
        yield self.output

    @property
    def roles(self) -> Iterator[TensorRole]:
        """Everything that is recorded of a call with gradients."""
        for port in self.all:
            yield port.value
            yield port.grad


@functools.lru_cache(maxsize=1024)
def ports_of(role: ModuleRole | FunctionRole) -> Ports:
    """The tensors of a role."""
    grouped: dict[tuple[int | None, str, bool], list[Port]] = {}
    for name, place in role.operands.items():
        operand = operand_of(place)
        key = operand.position, operand.keyword, operand.is_optional
        grouped.setdefault(key, []).append(_port(role, name, operand))
    arguments = [
        Argument(position=position, keyword=keyword, ports=tuple(ports), is_optional=is_optional)
        for (position, keyword, is_optional), ports in grouped.items()
    ]
    parameters = role.parameters if isinstance(role, ModuleRole) else {}
    return Ports(
        arguments=tuple(arguments),
        parameters=tuple((attribute, _port(role, name)) for name, attribute in parameters.items()),
        output=_port(role, OUTPUT),
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


def _port(role: ModuleRole | FunctionRole, name: str, operand: Operand | None = None) -> Port:
    return Port(
        name=name,
        value=forward_role(name, role.layouts),
        grad=grad_role(name, role.layouts),
        part=None if operand is None else operand.part,
    )
