"""Makes the attention of an unmodified training compute in low precision, for `--quant-attention`.

`F.scaled_dot_product_attention` is replaced under all its names in loaded modules, in the attributes of a model's
modules, and in the default arguments and closures of their methods and of the functions next to them. All functions
from Hugging Face's registry of attention are replaced too. References in lists, dictionaries, partial functions and
local variables are not replaced.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from ranktape.analyze.numerics.quantization.quantized_product import Draws, not_compiled, quantized_attention
from ranktape.capture.hooks.hook import Around, replace
from ranktape.capture.roles.known import ATTENTION, HUGGING_FACE_ATTENTION
from ranktape.capture.roles.table import Argument, FunctionRole, ports_of

if TYPE_CHECKING:
    from torch import nn

    from ranktape.analyze.numerics.recipes.recipe import Recipe

_STREAM = 1 << 32
"""The random stream of attention for stochastic rounding. Those of linear layers count from 0."""


class AttentionQuantizer:
    """Quantises the attention of the models that are passed to `quantize`."""

    def __init__(self, recipe: Recipe) -> None:
        """Take the recipe; nothing is replaced before the first model."""
        self.recipe = recipe
        self.draws = Draws(_STREAM)
        self.num_calls = 0
        """Number of quantised calls."""
        self.is_wanted = False
        """Whether the running model is quantised."""
        self._running = threading.local()
        self._known: dict[Callable[..., Any], _QuantizedAttention] = {}

    def quantize(self, model: nn.Module) -> None:
        """Replace the attention functions of a model, from now on."""
        original: Any = torch.nn.functional.scaled_dot_product_attention
        if not isinstance(original, _QuantizedAttention):
            # torch's compiler builds tables of torch's functions at their first use. They should not contain ours.
            torch._dynamo.trace_rules.get_torch_obj_rule_map()  # noqa: SLF001  (torch has no public way)
            name = HUGGING_FACE_ATTENTION.functions[0]
            replace(name, self._registry_method)
            quantized = self._wrapped(original, ATTENTION)
            replace_names(original, quantized)
            self._pair = original, quantized
        replace_in_model(model, *self._pair)

    def call(self, wrapper: _QuantizedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an attention function with quantised operands. Functions that it calls do not quantise them again."""
        function = wrapper.function
        if not self.is_wanted or getattr(self._running, "is_inside", False):
            return function(*args, **kwargs)
        self._running.is_inside = True
        outputs: list[Any] = []

        def compute(*operands: torch.Tensor) -> torch.Tensor:
            positional, keywords = args, kwargs
            for argument, operand in zip(wrapper.arguments, operands, strict=True):
                positional, keywords = argument.replace(operand, positional, keywords)
            output = function(*positional, **keywords)
            if wrapper.element is None:
                return output  # type: ignore[no-any-return]  # torch's
            outputs[:] = output
            return outputs[wrapper.element]  # type: ignore[no-any-return]  # as above

        try:
            operands = [argument.find(args, kwargs) for argument in wrapper.arguments]
            output = quantized_attention(compute, *operands, recipe=self.recipe, draws=self.draws)
        finally:
            self._running.is_inside = False
        self.num_calls += 1
        if wrapper.element is None:
            return output
        outputs[wrapper.element] = output
        return tuple(outputs)

    def _registry_method(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A replacement for the registry's method, which returns quantising functions."""

        @functools.wraps(original)
        def get_interface(*args: Any, **kwargs: Any) -> Any:
            return self._wrapped(original(*args, **kwargs), HUGGING_FACE_ATTENTION)

        return get_interface

    def _wrapped(self, function: Callable[..., Any], role: FunctionRole) -> _QuantizedAttention:
        if function not in self._known:
            self._known[function] = _QuantizedAttention(function, role, self)
        return self._known[function]


class _QuantizedAttention(Around):
    """An attention function whose operands its quantiser may quantise."""

    def __init__(self, function: Callable[..., Any], role: FunctionRole, quantizer: AttentionQuantizer) -> None:
        super().__init__(function)
        functools.update_wrapper(self, function, updated=())
        self.element: int | None = role.output if isinstance(role.output, int) else None
        self.arguments: tuple[Argument, ...] = ports_of(role).arguments
        self._quantizer = quantizer

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function through the quantiser."""
        return self._quantizer.call(self, args, kwargs)


_EXCLUDED = ("torch._dynamo", "torch._inductor", "torch.overrides", "ranktape.")
"""Prefixes of modules that compare functions instead of calling them."""


def replace_names(old: Any, new: Any) -> None:
    """Replace a function under all its module-level names."""
    for name, module in sys.modules.copy().items():
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and not name.startswith(_EXCLUDED):
            _replace_in(namespace, old, new)


def replace_in_model(root: nn.Module, old: Any, new: Any) -> None:
    """Replace a function in the attributes of a model's modules, and in the functions of their classes and files."""
    kinds: set[type] = set()
    for module in root.modules():
        _replace_in(vars(module), old, new)
        kinds.update(type(module).__mro__)
    for function in _functions(kinds):
        _replace_in_function(function, old, new)


def _replace_in(namespace: dict[str, Any], old: Any, new: Any) -> None:
    for name in [name for name, value in list(namespace.items()) if value is old]:
        namespace[name] = new


def _functions(kinds: Iterable[type]) -> Iterator[FunctionType]:
    """The methods of classes outside torch, and the functions of the Python modules that define these classes."""
    names: set[str] = set()
    for kind in kinds:
        if not kind.__module__.startswith(("torch.", "builtins", *_EXCLUDED)):
            names.add(kind.__module__)
            yield from (value for value in list(vars(kind).values()) if isinstance(value, FunctionType))
    for name in names:
        namespace = vars(sys.modules[name]) if name in sys.modules else {}
        yield from (value for value in list(namespace.values()) if isinstance(value, FunctionType))


def _replace_in_function(function: FunctionType, old: Any, new: Any) -> None:
    if any(value is old for value in function.__defaults__ or ()):
        function.__defaults__ = tuple(new if value is old else value for value in function.__defaults__ or ())
    if function.__kwdefaults__:
        _replace_in(function.__kwdefaults__, old, new)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the cell is empty
            if cell.cell_contents is old:
                cell.cell_contents = new
