"""Computes linear products and attention with quantised operands, as differentiable torch functions.

This module imports torch; only code that already has tensors imports it.
"""

# Shapes: T = tokens, I = inputs of a linear layer, O = outputs.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, Unpack, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ranktape.analyze.numerics.attention import ATTENTION_OPERANDS, quantised_operand
from ranktape.analyze.numerics.quantization.operand import QuantizedOperand, quantized_operands, quantized_values
from ranktape.analyze.numerics.quantization.plan import QuantizeOptions
from ranktape.analyze.numerics.quantization.schemes import parse_scheme
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS, Recipe
from ranktape.errors import UsageError

Params = ParamSpec("Params")
Result = TypeVar("Result")


def not_compiled(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Exclude a function from `torch.compile`, because the loops that quantise are already compiled."""
    return cast("Callable[Params, Result]", torch.compiler.disable(function))


class Draws:
    """The seeds of stochastic rounding: different for each computed product, the same in every run.

    A seed depends on the seed of the recipe, the rank, the stream, the kind of product, and the number of previous
    products of this kind. Products of the backward pass are counted when gradients arrive, so activation checkpointing,
    which computes the forward pass twice, does not change their seeds.
    """

    def __init__(self, stream: int = 0) -> None:
        """Start with the first seeds of a stream; layers with different streams draw different numbers."""
        self._stream = stream
        self._counts: Counter[str] = Counter()

    def next_seed(self, recipe: Recipe, *, product: str) -> int:
        """The seed of the next product with this name."""
        if not recipe.products[product].is_stochastic:
            return recipe.seed
        self._counts[product] += 1
        is_parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if is_parallel else 0
        entropy = (recipe.seed, rank, self._stream, list(PRODUCTS).index(product), self._counts[product])
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])


_PROCESS_DRAWS = Draws()
"""The draws of callers that pass none."""


class LinearOperands(NamedTuple):
    """The operands from which the three products of a linear layer are computed."""

    x: Tensor
    """The input, quantised for the forward product and padded with zeros to whole runs of the rotation."""
    weight: Tensor
    """The weight, quantised and padded like `x`."""
    wide_x: Tensor
    """The input before quantisation, without gradients, which the backward pass quantises for its own product."""
    wide_weight: Tensor
    """The weight before quantisation, without gradients."""


def quantized_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe, draws: Draws | None = None
) -> Tensor:
    """`torch.nn.functional.linear` with the three products computed from operands that a recipe quantises.

    Each product quantises its unquantised operands along the dimension that it sums over: the output along the inputs,
    the gradient of the input along the outputs, the gradient of the weight along the tokens. Under autocast it computes
    in the autocast type. The bias is not quantised, but cast to the type of the operands. The layers that the recipe
    leaves in bf16 are not considered here. NaN, Inf and zeros are treated as in `quantize`.

    `x` is [..., inputs], `weight` [outputs, inputs], `bias` [outputs]; the result is [..., outputs], in the type of the
    operands. Without `draws`, the seeds of stochastic rounding count the calls in the process.

    Raises:
        UsageError: the operands are not real floating-point numbers, or a tile or rotation does not fit them.
    """
    draws = draws or _PROCESS_DRAWS
    return linear_product(linear_operands(x, weight, recipe=recipe, draws=draws), bias, recipe=recipe, draws=draws)


@not_compiled
def linear_operands(x: Tensor, weight: Tensor, *, recipe: Recipe, draws: Draws) -> LinearOperands:
    """The operands of a linear layer, quantised for its forward product.

    Under autocast both are first cast to the autocast type, as in training with autocast and a quantiser.
    """
    x, weight = as_computed(x, weight)
    wide_x, wide_weight = x.detach(), weight.detach()
    x_TI = wide_x.reshape(-1, wide_x.shape[-1])
    narrow_TI, narrow_OI = _narrow("output", x_TI, wide_weight, recipe=recipe, draws=draws)
    narrow_x = narrow_TI.view(*x.shape[:-1], narrow_TI.shape[-1])
    return LinearOperands(straight_through(x, narrow_x), straight_through(weight, narrow_OI), wide_x, wide_weight)


def as_computed(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands of a product in the type in which it is computed, which under autocast is the autocast type."""
    kind = operands[0].device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    # Autocast does not cast float64.
    if not is_on or any(operand.dtype is torch.float64 for operand in operands):
        return operands
    return tuple(operand.to(torch.get_autocast_dtype(kind)) for operand in operands)


@not_compiled
def linear_product(operands: LinearOperands, bias: Tensor | None = None, *, recipe: Recipe, draws: Draws) -> Tensor:
    """`x @ weight.T + bias` of quantised operands; the backward pass quantises the operands of its two products.

    The gradient of the bias is the same as in a linear layer.
    """
    product: Tensor = _Product.apply(*operands, bias, recipe, draws)  # type: ignore[no-untyped-call]
    return product


@not_compiled
def fake_quantized(
    x: Tensor,
    *,
    forward: str | None = "mxfp8_e4m3",
    backward: str | None = None,
    **options: Unpack[QuantizeOptions],
) -> Tensor:
    """`fake_quantize` of a tensor.

    Raises:
        UsageError: as for `fake_quantize`.
    """
    for name, scheme in (("forward", forward), ("backward", backward)):
        if scheme is None:
            continue
        if not isinstance(scheme, str):
            raise UsageError(f"{name}={scheme!r} is not the name of a scheme: give one, such as 'mxfp8_e4m3'")
        parse_scheme(scheme, with_tables=True)

    def on_gradient(grad: Tensor) -> Tensor:
        assert backward is not None, "it is asked for nothing else"
        return quantized_values(grad, backward, **options)

    values = x.detach() if forward is None else quantized_values(x, forward, **options)
    return straight_through(x, values, None if backward is None else on_gradient)


def straight_through(x: Tensor, values: Tensor, on_gradient: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The values, whose gradient is passed to `x`, through `on_gradient` if that is given.

    There is no second derivative; computing one raises.
    """
    passed: Tensor = _StraightThrough.apply(x, values, on_gradient)  # type: ignore[no-untyped-call]
    return passed


def _narrow(product: str, a_RS: Tensor, b_CS: Tensor, *, recipe: Recipe, draws: Draws) -> tuple[Tensor, Tensor]:
    """Both operands, quantised for a product over their last dimension, in their own types."""
    product_recipe = recipe.products[product]
    if not product_recipe.rotation and all(operand.scheme is None for operand in product_recipe.operands.values()):
        return a_RS, b_CS
    first, second = quantized_operands(product_recipe, a_RS, b_CS, seed=draws.next_seed(recipe, product=product))
    return _in_type(first, a_RS.dtype), _in_type(second, b_CS.dtype)


def _in_type(operand: QuantizedOperand, dtype: torch.dtype) -> Tensor:
    return operand.dequantized().to(dtype)


def _filled(grad: Tensor, num_zeros: int) -> Tensor:
    """The gradient of an operand, padded with `num_zeros` zeros."""
    return functional.pad(grad, (0, num_zeros)) if num_zeros else grad


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, on_gradient: Callable[[Tensor], Tensor] | None) -> Tensor:
        ctx.on_gradient, ctx.shape = on_gradient, x.shape
        # Autograd would treat a returned input as the input itself with a new history.
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    @not_compiled
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = grads[0]
        if grad.shape != ctx.shape:
            grad = grad[..., : ctx.shape[-1]]
        return grad if ctx.on_gradient is None else ctx.on_gradient(grad), None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd knows no keywords
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        wide_x: Tensor,
        wide_weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        draws: Draws,
    ) -> Tensor:
        ctx.recipe, ctx.draws, ctx.bias_dtype = recipe, draws, None if bias is None else bias.dtype
        ctx.save_for_backward(wide_x, wide_weight)
        ctx.num_filled = x.shape[-1] - wide_x.shape[-1]
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    @not_compiled
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        options = {"recipe": ctx.recipe, "draws": ctx.draws}
        grad_TO, x_TI = grads[0].reshape(-1, weight_OI.shape[0]), x.reshape(-1, weight_OI.shape[1])
        grad_x = grad_weight = grad_bias = None
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                narrow_TO, narrow_IO = _narrow("grad_input", grad_TO, weight_OI.T, **options)
                grad_x = _filled((narrow_TO @ narrow_IO.T).view(x.shape), ctx.num_filled)
            if ctx.needs_input_grad[1]:
                narrow_OT, narrow_IT = _narrow("grad_weight", grad_TO.T, x_TI.T, **options)
                grad_weight = _filled(narrow_OT @ narrow_IT.T, ctx.num_filled)
            if ctx.needs_input_grad[4]:
                grad_bias = grad_TO.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, None, None, grad_bias, None, None


_ATTENTION_PRODUCTS = dict(zip(ATTENTION_OPERANDS, ("output", "output", "output", "grad_input"), strict=True))
"""The linear product whose recipe and draws each operand of attention uses."""


@not_compiled
def quantized_attention(
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    recipe: Recipe,
    draws: Draws,
) -> Tensor:
    """Call `function` with the quantised query, key and value, from which its gradients are computed, too.

    Query and key are quantised along the elements of a head and the value along the keys, as the recipe's `input` of
    the product `output`. The gradient of the output is quantised along the elements of a head, as its `grad_output` of
    `grad_input`. The probabilities are not quantised, and nothing is rotated. Under autocast the operands are cast
    first. NaN, Inf and zeros are treated as in `quantize`.

    The operands and the result of `function` are [..., tokens, elements of a head].

    Raises:
        UsageError: an operand is sharded (DTensor), or is not of real floating-point numbers.
    """
    if any(hasattr(operand, "device_mesh") for operand in (query, key, value)):
        raise UsageError(
            "the operands of attention are sharded by tensor parallelism (DTensor), and are not quantised: train "
            "without tensor parallelism, or without --quant-attention"
        )

    def narrow(name: str, wide: Tensor) -> Tensor:
        seed = len(ATTENTION_OPERANDS) * draws.next_seed(recipe, product=_ATTENTION_PRODUCTS[name])
        return quantised_operand(name, wide.detach(), recipe, seed=seed + ATTENTION_OPERANDS.index(name))

    def on_gradient(grad: Tensor) -> Tensor:
        return narrow("grad_output", grad)

    wide = as_computed(query, key, value)
    named = zip(ATTENTION_OPERANDS, wide, strict=False)
    operands = [straight_through(operand, narrow(name, operand)) for name, operand in named]
    output = function(operands[0], operands[1], operands[2])
    return straight_through(output, output.detach(), on_gradient)
