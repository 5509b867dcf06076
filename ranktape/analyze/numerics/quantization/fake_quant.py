"""Quantises what a model multiplies and gives it back in its own type, with gradients that pass straight through."""

# Shapes: T = tokens, I = inputs of a linear layer, O = outputs.
# ruff: noqa: N806 - the letters of a shape end the name of the tensor

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ranktape.analyze.numerics.quantization.operand import quantized_values
from ranktape.analyze.numerics.quantization.schemes import ScaleRule, Scaling, parse_scheme
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeQuantization:
    """How the tensors of a training are quantised, forward and backward.

    Raises:
        UsageError: a scheme is not known.
    """

    forward: str | None = "mxfp8_e4m3"
    """The scheme of operands in the forward pass, and of the same operands in the backward pass; None: as they are."""
    backward: str | None = "mxfp8_e5m2"
    """The scheme of gradients; None: as they are."""
    scaling: Scaling | str | None = None
    """Which elements share a scale, where that is not the scheme's own."""
    block_size: int | None = None
    """Elements in a block, where that is not the scheme's own."""
    scale_rule: ScaleRule | str | None = None
    """How scales follow from largest magnitudes, where that is not the scheme's own."""

    def __post_init__(self) -> None:
        """Check the schemes, before a training has begun with them."""
        for name, scheme in (("forward", self.forward), ("backward", self.backward)):
            if scheme is None:
                continue
            if not isinstance(scheme, str):
                raise UsageError(f"{name}={scheme!r} is not the name of a scheme: give one, such as 'mxfp8_e4m3'")
            parse_scheme(scheme)

    def operand(self, x: torch.Tensor, *, axis: int) -> torch.Tensor:
        """An operand with blocks along an axis, quantised."""
        return self._quantised(x, self.forward, axis=axis)

    def gradient(self, x: torch.Tensor, *, axis: int) -> torch.Tensor:
        """A gradient with blocks along an axis, quantised."""
        return self._quantised(x, self.backward, axis=axis)

    def axis_of_matrix(self, summed: int) -> int:
        """The axis to quantise a matrix along whose product sums over its axis `summed`, 0 or -1.

        Blocks lie along it, and channels beside it: scales of what is added up are no factors of the sum.
        """
        return -1 - summed if self.scaling == Scaling.CHANNEL else summed

    def _quantised(self, x: torch.Tensor, scheme: str | None, *, axis: int) -> torch.Tensor:
        if scheme is None:
            return x
        return quantized_values(
            x, scheme, scaling=self.scaling, block_size=self.block_size, axis=axis, scale_rule=self.scale_rule
        )


def fake_quantize(
    x: torch.Tensor,
    *,
    forward: str | None = "mxfp8_e4m3",
    backward: str | None = None,
    axis: int = -1,
    scaling: Scaling | str | None = None,
    block_size: int | None = None,
    scale_rule: ScaleRule | str | None = None,
) -> torch.Tensor:
    """The tensor quantised with the scheme `forward`; its gradient is quantised with the scheme `backward`.

    A scheme that is None changes nothing. NaN, Inf, zeros and empty tensors become what `quantize` makes of them.
    The gradient passes straight through: where an element was clamped or became zero, too. There is no gradient of
    the gradient: to ask for one raises.

    Type, shape and device are those of `x`: values that do not fit its type (the float32 scale of NVFP4 in bfloat16)
    are rounded to it once more.

    Raises:
        UsageError: a scheme is not known, or `x` does not hold real floating-point numbers.
    """
    how = FakeQuantization(
        forward=forward, backward=backward, scaling=scaling, block_size=block_size, scale_rule=scale_rule
    )
    quantised: torch.Tensor = _functions().straight_through.apply(x, how, axis)
    return quantised


class Operands(NamedTuple):
    """What the three products of a linear layer are computed with."""

    x: torch.Tensor
    """The input, quantised along what the forward product adds up."""
    weight: torch.Tensor
    """The weight, quantised likewise."""
    wide_x: torch.Tensor
    """The input before it was quantised, without gradients: the backward pass quantises it along the tokens."""
    wide_weight: torch.Tensor
    """The weight, likewise: the backward pass quantises it along the outputs."""


def quantized_operands(x: torch.Tensor, weight: torch.Tensor, *, how: FakeQuantization) -> Operands:
    """The operands of a linear layer, quantised for its forward product.

    Under autocast both are cast to its type first, as what enters a quantiser in such a training.
    """
    import torch

    kind, float64 = x.device.type, torch.float64
    wide_x, wide_weight = x, weight
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    # Autocast leaves float64 as it is.
    if is_on and x.dtype is not float64 and weight.dtype is not float64:
        dtype = torch.get_autocast_dtype(kind)
        wide_x, wide_weight = x.to(dtype), weight.to(dtype)
    # The gradients come out of the two products of the backward pass, and are quantised no more.
    only_forward = dataclasses.replace(how, backward=None)
    straight_through, axis = _functions().straight_through, how.axis_of_matrix(-1)
    shape = wide_x.shape
    # Channels of the input are its tokens, whatever dimensions they are spread over.
    rows = wide_x if axis == -1 else wide_x.reshape(math.prod(shape[:-1]), shape[-1])
    narrow_x = straight_through.apply(rows, only_forward, axis)
    return Operands(
        narrow_x if axis == -1 else narrow_x.view(shape),
        straight_through.apply(wide_weight, only_forward, axis),
        wide_x.detach(),
        wide_weight.detach(),
    )


def quantized_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    wide_x: torch.Tensor,
    wide_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    how: FakeQuantization,
) -> torch.Tensor:
    """`x @ weight.T + bias` of operands that are quantised; the backward pass quantises for its own two products.

    Each of them along what it adds up: the gradient of the output and the weight along the outputs, the gradient of
    the output and the input along the tokens, as MX training does; scales of channels lie beside it. With
    `how.backward` None, the gradient and the operands of the forward product as they are. The gradient of the bias is
    that of a linear layer.

    x is [..., inputs], weight [outputs, inputs], bias [outputs]; the result is [..., outputs], in the type of x.
    """
    product: torch.Tensor = _functions().product.apply(x, weight, wide_x, wide_weight, bias, how)
    return product


def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, how: FakeQuantization
) -> torch.Tensor:
    """What `torch.nn.functional.linear` gives, were its three products computed with quantised operands.

    Under autocast it computes in its type. The bias is not quantised, and cast to the type of the operands. Shapes and
    errors are those of `linear` and of `fake_quantize`.
    """
    return quantized_product(*quantized_operands(x, weight, how=how), bias, how=how)


class _Functions(NamedTuple):
    straight_through: Any
    product: Any


@functools.cache
def _functions() -> _Functions:
    """The two nodes of the graph: their classes need torch."""
    import torch
    from torch.autograd.function import once_differentiable
    from torch.nn import functional

    class StraightThrough(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, how: FakeQuantization, axis: int) -> torch.Tensor:
            ctx.how, ctx.axis = how, axis
            # A result that is the input would be the input with another history.
            return how.operand(x, axis=axis) if how.forward is not None else x.view_as(x)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            return ctx.how.gradient(grads[0], axis=ctx.axis), None, None

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(  # noqa: PLR0917 - autograd knows no keywords
            ctx: Any,
            x: torch.Tensor,
            weight: torch.Tensor,
            wide_x: torch.Tensor,
            wide_weight: torch.Tensor,
            bias: torch.Tensor | None,
            how: FakeQuantization,
        ) -> torch.Tensor:
            ctx.how, ctx.bias_dtype = how, None if bias is None else bias.dtype
            ctx.save_for_backward(*((x, weight) if how.backward is None else (wide_x, wide_weight)))
            with torch.autocast(x.device.type, enabled=False):
                return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            how: FakeQuantization = ctx.how
            x, weight = ctx.saved_tensors
            along_first, along_last = how.axis_of_matrix(0), how.axis_of_matrix(-1)
            grad_TO = grads[0].reshape(-1, weight.shape[0])
            grad_x = grad_weight = grad_bias = None
            with torch.autocast(x.device.type, enabled=False):
                if ctx.needs_input_grad[0]:
                    narrow_OI = weight if how.backward is None else how.operand(weight, axis=along_first)
                    grad_x = (how.gradient(grad_TO, axis=along_last) @ narrow_OI).view(x.shape)
                if ctx.needs_input_grad[1]:
                    x_TI = x.reshape(-1, weight.shape[1])
                    narrow_TI = x_TI if how.backward is None else how.operand(x_TI, axis=along_first)
                    grad_weight = how.gradient(grad_TO, axis=along_first).T @ narrow_TI
                if ctx.needs_input_grad[4]:
                    grad_bias = grad_TO.sum(0).to(ctx.bias_dtype)
            return grad_x, grad_weight, None, None, grad_bias, None

    return _Functions(StraightThrough, Product)
