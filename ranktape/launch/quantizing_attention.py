"""Has the attention of an unmodified training compute in low precision: what `--quant-attention` does.

`F.scaled_dot_product_attention` is replaced under every name by which loaded modules know it, but those of the standard
library and of the packages beneath torch; in the attributes of a model's modules; in the default arguments and the
closures of their methods and of the functions beside them. So is every function that Hugging Face's registry of
attention gives. What a list, a dictionary or a partial function holds is not found, and neither is a local name.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from ranktape.analyze.numerics.quantization.quantized_attention import quantized_attention
from ranktape.analyze.numerics.quantization.quantized_product import Draws, as_written
from ranktape.capture.hooks.hook import Around, replace
from ranktape.capture.roles.known import ATTENTION, HUGGING_FACE_ATTENTION
from ranktape.capture.roles.table import Argument, FunctionRole, ports_of

if TYPE_CHECKING:
    from torch import nn

    from ranktape.analyze.numerics.recipes.recipe import Recipe

_STREAM = 1 << 32
"""Stochastic rounding of attention draws apart from that of linear layers, whose streams count from 0."""


class AttentionQuantizer:
    """Quantises attention in the models of this process, from the first that it is told of."""

    def __init__(self, recipe: Recipe) -> None:
        """Wait for a model."""
        self.recipe = recipe
        self.draws = Draws(_STREAM)
        self.num_calls = 0
        """How many calls were quantised."""
        self.is_wanted = False
        """Whether what runs now is a model that is quantised."""
        self._running = threading.local()
        self._known: dict[Callable[..., Any], _QuantizedAttention] = {}

    def quantize(self, model: nn.Module) -> None:
        """Quantise what this model computes attention with, from now on."""
        original: Any = torch.nn.functional.scaled_dot_product_attention
        if not isinstance(original, _QuantizedAttention):
            # torch's compiler makes tables of torch's functions as it is first asked for one: of its own, not of ours.
            torch._dynamo.trace_rules.get_torch_obj_rule_map()  # noqa: SLF001  (as above)
            name = HUGGING_FACE_ATTENTION.functions[0]
            replace(name, self._giver)
            quantized = self._around(original, ATTENTION)
            replace_names(table_of([(original, quantized)]))
            self._table = table_of([(original, quantized)])
        replace_in_model(model, self._table)

    def call(self, around: _QuantizedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the function gives; Hugging Face's may call torch's, whose operands are quantised then."""
        function = around.function
        if not self.is_wanted or getattr(self._running, "is_inside", False):
            return function(*args, **kwargs)
        self._running.is_inside = True
        rest: list[Any] = []

        def compute(*operands: torch.Tensor) -> torch.Tensor:
            given, named = args, kwargs
            for argument, operand in zip(around.arguments, operands, strict=True):
                given, named = argument.put(operand, given, named)
            output = function(*given, **named)
            if around.element is None:
                return output  # type: ignore[no-any-return]  # torch's
            rest[:] = output
            return rest[around.element]  # type: ignore[no-any-return]  # as above

        try:
            found = [argument.find(args, kwargs) for argument in around.arguments]
            output = quantized_attention(compute, *found, recipe=self.recipe, draws=self.draws)
        finally:
            self._running.is_inside = False
        self.num_calls += 1
        if around.element is None:
            return output
        rest[around.element] = output
        return tuple(rest)

    def _giver(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """In place of the method of a registry: gives functions that quantise."""

        @functools.wraps(original)
        def give(*args: Any, **kwargs: Any) -> Any:
            return self._around(original(*args, **kwargs), HUGGING_FACE_ATTENTION)

        return give

    def _around(self, function: Callable[..., Any], role: FunctionRole) -> _QuantizedAttention:
        if function not in self._known:
            self._known[function] = _QuantizedAttention(function, role, self)
        return self._known[function]


class _QuantizedAttention(Around):
    """A function of attention, with quantised operands where its quantiser wants them."""

    def __init__(self, function: Callable[..., Any], role: FunctionRole, quantizer: AttentionQuantizer) -> None:
        super().__init__(function)
        functools.update_wrapper(self, function, updated=())
        self.element: int | None = role.output if isinstance(role.output, int) else None
        self.arguments: tuple[Argument, ...] = ports_of(role).arguments
        self._quantizer = quantizer

    @as_written
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function gives."""
        return self._quantizer.call(self, args, kwargs)


_LEFT_ALONE = ("torch._dynamo", "torch._inductor", "torch.overrides", "ranktape.")
"""Beginnings of modules that hold functions to compare with them, not to call them."""

_BENEATH = frozenset({"numpy", "sympy", "mpmath"})
"""Packages on which torch is built: half of all names there are, and none of them is a function of torch."""

_WITHOUT_FILES = ("built-in", "frozen")
"""Where modules of the standard library come from that have no file."""

_STDLIB = f"{Path(os.__file__).parent}{os.sep}"
_SITE_PACKAGES = f"{os.sep}site-packages{os.sep}"

Table = Mapping[int, tuple[Any, Any]]
"""By the identity of a function: itself, and what takes its place."""


def table_of(pairs: Iterable[tuple[Any, Any]]) -> Table:
    """What takes the place of what."""
    return {id(old): (old, new) for old, new in pairs}


def replace_names(table: Table) -> None:
    """Under every module-level name."""
    for name, module in sys.modules.copy().items():
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and not _is_left_alone(name, namespace):
            _replace_in(namespace, table)


def _is_left_alone(name: str, namespace: dict[str, Any]) -> bool:
    package = name.partition(".")[0]
    if package not in sys.stdlib_module_names:
        return package in _BENEATH or name.startswith(_LEFT_ALONE)
    # A program may have a module of its own under such a name, with a file or without one.
    file = namespace.get("__file__")
    if not isinstance(file, str):
        return getattr(namespace.get("__spec__"), "origin", None) in _WITHOUT_FILES
    return file.startswith(_STDLIB) and _SITE_PACKAGES not in file


def replace_in_model(root: nn.Module, table: Table) -> None:
    """In the attributes and functions of a model."""
    kinds: set[type] = set()
    for module in root.modules():
        _replace_in(vars(module), table)
        kinds.update(type(module).__mro__)
    for function in _functions(kinds):
        _replace_in_function(function, table)


def _replace_in(namespace: dict[str, Any], table: Table) -> None:
    # Almost none has any: that is found out without a step of Python for each name.
    if table.keys().isdisjoint(map(id, list(namespace.values()))):
        return
    found = [(name, value) for name, value in list(namespace.items()) if id(value) in table]
    namespace.update({name: table[id(value)][1] for name, value in found if namespace.get(name) is value})


def _functions(kinds: Iterable[type]) -> Iterator[FunctionType]:
    """The methods of classes that are not torch's, and the functions of the modules in which they are."""
    names: set[str] = set()
    for kind in kinds:
        if not kind.__module__.startswith(("torch.", "builtins", *_LEFT_ALONE)):
            names.add(kind.__module__)
            yield from (value for value in list(vars(kind).values()) if isinstance(value, FunctionType))
    for name in names:
        namespace = vars(sys.modules[name]) if name in sys.modules else {}
        yield from (value for value in list(namespace.values()) if isinstance(value, FunctionType))


def _replace_in_function(function: FunctionType, table: Table) -> None:
    defaults, named = function.__defaults__, function.__kwdefaults__
    if defaults and any(id(value) in table for value in defaults):
        function.__defaults__ = tuple(table.get(id(value), (value, value))[1] for value in defaults)
    if named and any(id(value) in table for value in named.values()):
        function.__kwdefaults__ = {name: table.get(id(value), (value, value))[1] for name, value in named.items()}
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue  # not filled yet
        if id(content) in table:
            cell.cell_contents = table[id(content)][1]
