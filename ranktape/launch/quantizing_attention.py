"""Has the attention of an unmodified training compute in low precision: what `--quant-attention` does.

`F.scaled_dot_product_attention` is replaced under every name by which loaded modules know it, and so is every function
that Hugging Face's registry of attention gives.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ranktape.analyze.numerics.quantization.quantized_attention import quantized_attention
from ranktape.analyze.numerics.quantization.quantized_product import Draws, as_written
from ranktape.capture.hooks.hook import Around, replace, replace_in_model, replace_names, table_of
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
