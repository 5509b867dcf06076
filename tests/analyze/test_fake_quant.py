"""Does fake quantisation compute what it says, forward and backward, and leave everything else to torch?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ranktape.analyze import fake_quantize, quantize
from ranktape.analyze.numerics.quantization.quantized_product import Draws, linear_operands, quantized_linear
from ranktape.analyze.numerics.quantization.schemes import SCHEMES
from ranktape.analyze.numerics.recipes.recipe import (
    OPERANDS,
    PRODUCTS,
    OperandRecipe,
    ProductRecipe,
    Recipe,
    products_of,
)
from ranktape.analyze.numerics.recipes.table import RECIPES as SHIPPED
from ranktape.errors import UsageError

_E4M3 = OperandRecipe(scheme="mxfp8_e4m3", scale_rule="rceil")
_STOCHASTIC = OperandRecipe(scheme="nvfp4", rounding="stochastic")

RECIPES = {
    recipe.name: recipe
    for recipe in (
        *(SHIPPED[name] for name in ("mxfp8_e5m2_grad", "mxfp4", "nvfp4", "hif8", "int8_token")),
        Recipe(name="forward_alone", source="", products=products_of(_E4M3, grad_output=OperandRecipe())),
        Recipe(
            name="one_product",
            source="",
            products={
                **products_of(OperandRecipe()),
                "grad_weight": ProductRecipe(operands={"grad_output": _E4M3, "input": OperandRecipe(scheme="mxfp4")}),
            },
        ),
        Recipe(
            name="stochastic", source="", products=products_of(OperandRecipe(scheme="nvfp4"), grad_output=_STOCHASTIC)
        ),
    )
}

NOTHING = Recipe(name="nothing", source="", products=products_of(OperandRecipe()))


def _values(x: torch.Tensor, operand: OperandRecipe, *, seed: int) -> torch.Tensor:
    """The slow way: the public function, along the last dimension, and its values in the type of the tensor."""
    if operand.scheme is None:
        return x
    axis = 0 if operand.scaling == "channel" else -1
    options = {**operand.options, "seed": seed} if operand.is_stochastic else operand.options
    values: torch.Tensor = quantize(x, operand.scheme, axis=axis, warn=False, **options).values
    return values.to(x.dtype)


class _Twin:
    """A linear layer, forward and backward, written out."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, recipe: Recipe) -> None:
        self.recipe, self.shape = recipe, x.shape
        self.x, self.weight = x.detach().reshape(-1, x.shape[-1]), weight.detach()
        self.draws = Draws()
        narrow_x, narrow_weight = self._operands("output", self.x, self.weight)
        self.output = F.linear(narrow_x.view(self.shape), narrow_weight, bias.detach())

    def gradients(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = grad.reshape(-1, grad.shape[-1])
        one, other = self._operands("grad_input", tokens, self.weight.T)
        grad_x = one @ other.T
        one, other = self._operands("grad_weight", tokens.T, self.x.T)
        return grad_x.view(self.shape), one @ other.T, tokens.sum(0)

    def _operands(self, product: str, *operands: torch.Tensor) -> list[torch.Tensor]:
        """Each along its last dimension, which the product adds up."""
        how = self.recipe.products[product]
        seed = self.draws.next_seed(self.recipe, product=product)
        return [
            _values(x, how.operands[name], seed=len(OPERANDS) * seed + OPERANDS.index(name))
            for x, name in zip(operands, PRODUCTS[product], strict=True)
        ]


def _leaves(dtype: torch.dtype = torch.float32, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (shape or (3, 37, 50), (70, (shape or (50,))[-1]), (70,))
    found = [torch.randn(one, generator=generator).to(dtype).requires_grad_() for one in shapes]
    return found[0], found[1], found[2]


def _grads(function: Callable[[], torch.Tensor], *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    output = function()
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return (output.detach(), *torch.autograd.grad(output, leaves, weights))


def _assert_bits(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_products_are_those_of_a_twin_written_out(recipe: str, dtype: torch.dtype) -> None:
    x, weight, bias = _leaves(dtype)
    twin = _Twin(x, weight, bias, RECIPES[recipe])
    output, *grads = _grads(
        lambda: quantized_linear(x, weight, bias, recipe=RECIPES[recipe], draws=Draws()), x, weight, bias
    )
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    # In float32 the twin rounds a block's scale times the tensor's, and the layer each value times the latter.
    is_rounded_elsewhere = dtype is torch.float32 and recipe in {"nvfp4", "stochastic"}
    look = {"rtol": 1e-5, "atol": 1e-5} if is_rounded_elsewhere else {"rtol": 0, "atol": 0}
    torch.testing.assert_close((output, *grads), (twin.output, *twin.gradients(grad)), **look)


@pytest.mark.parametrize("shape", [(50,), (1, 50), (33, 50), (2, 3, 5, 50)], ids=str)
def test_any_number_of_dimensions_and_ragged_blocks_will_do(shape: tuple[int, ...]) -> None:
    x, weight, bias = _leaves(torch.float32, *shape)
    recipe = RECIPES["mxfp8_e5m2_grad"]
    twin = _Twin(x, weight, bias, recipe)
    output, *grads = _grads(lambda: quantized_linear(x, weight, bias, recipe=recipe), x, weight, bias)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    _assert_bits((output, *grads), (twin.output, *twin.gradients(grad)))


def test_scales_of_channels_are_factors_of_the_product() -> None:
    """A token or an output of any size changes nothing but itself; on the axis of the sum it would flush others."""
    x, weight, _ = _leaves(torch.float32, 4, 50)
    recipe, factors = RECIPES["int8_token"], 2.0 ** (10 * torch.arange(4.0))
    plain = quantized_linear(x, weight, recipe=recipe)
    assert torch.equal(quantized_linear(x * factors[:, None], weight, recipe=recipe), plain * factors[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_without_schemes_it_is_a_linear_layer(dtype: torch.dtype) -> None:
    x, weight, bias = _leaves(dtype)
    found = _grads(lambda: quantized_linear(x, weight, bias, recipe=NOTHING), x, weight, bias)
    torch.testing.assert_close(found, _grads(lambda: F.linear(x, weight, bias), x, weight, bias))
    found = _grads(lambda: quantized_linear(x, weight, recipe=NOTHING), x, weight)
    torch.testing.assert_close(found, _grads(lambda: F.linear(x, weight), x, weight))


def test_the_gradient_is_quantised_with_a_scheme_of_its_own() -> None:
    x = torch.randn(5, 64, requires_grad=True)
    grad = torch.randn(5, 64) * 1e-3
    found = fake_quantize(x, forward="mxfp4", backward="mxfp8_e5m2", axis=0)
    _assert_bits((found.detach(),), (quantize(x, "mxfp4", axis=0, warn=False).values,))
    (found_grad,) = torch.autograd.grad(found, x, grad)
    _assert_bits((found_grad,), (quantize(grad, "mxfp8_e5m2", axis=0, warn=False).values,))


def test_the_gradient_passes_straight_through_what_is_clamped_or_flushed() -> None:
    x = torch.tensor([1e9, 1e-9, -0.3, 0.0], requires_grad=True)
    found = fake_quantize(x, forward="fp8_e4m3")
    assert found.tolist() == [448.0, 0.0, -0.3125, 0.0]
    (grad,) = torch.autograd.grad(found.sum(), x)
    assert grad.tolist() == [1.0, 1.0, 1.0, 1.0]


def test_autocast_computes_in_its_type_and_gives_gradients_in_that_of_the_parameters() -> None:
    x, weight, bias = _leaves()
    recipe = RECIPES["mxfp8_e5m2_grad"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = quantized_linear(x, weight, bias, recipe=recipe)
    assert output.dtype is torch.bfloat16
    grad = torch.randn(output.shape).to(torch.bfloat16)
    grads = torch.autograd.grad(output, (x, weight, bias), grad)
    twin = _Twin(x.to(torch.bfloat16), weight.to(torch.bfloat16), bias.to(torch.bfloat16), recipe)
    _assert_bits((output.detach(), *grads), (twin.output, *(one.float() for one in twin.gradients(grad))))


def test_a_backward_pass_inside_of_autocast_gives_the_same_gradients() -> None:
    x, weight, bias = _leaves()
    output = quantized_linear(x, weight, bias, recipe=RECIPES["mxfp8_e5m2_grad"])
    grad = torch.randn(output.shape)
    expected = torch.autograd.grad(output, (x, weight, bias), grad, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _assert_bits(torch.autograd.grad(output, (x, weight, bias), grad), expected)


@pytest.mark.parametrize("name", ["nvfp4", "stochastic"])
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_activation_checkpoints_change_no_bit(kind: str, name: str) -> None:
    x, weight, bias = _leaves()
    draws = Draws()

    def layer(given: torch.Tensor) -> torch.Tensor:
        return F.gelu(quantized_linear(given, weight, bias, recipe=RECIPES[name], draws=draws))

    expected = _grads(lambda: layer(x), x, weight, bias)
    draws = Draws()
    output = checkpoint(layer, x, use_reentrant=kind == "reentrant")
    assert isinstance(output, torch.Tensor)
    output.backward(torch.randn(output.shape, generator=torch.Generator().manual_seed(1)))
    grads = tuple(one.grad for one in (x, weight, bias) if one.grad is not None)
    _assert_bits((output.detach(), *grads), expected)


def test_stochastic_rounding_draws_anew_in_each_call_and_the_same_in_each_run() -> None:
    x, weight, bias = _leaves()
    recipe, draws = RECIPES["stochastic"], Draws()
    calls = [_grads(lambda: quantized_linear(x, weight, bias, recipe=recipe, draws=draws), x, weight) for _ in range(2)]
    _assert_bits(calls[0][:1], calls[1][:1])  # the forward product rounds to nearest
    for first, second in zip(calls[0][1:], calls[1][1:], strict=True):
        assert not torch.equal(first, second)
    again = Draws()
    for call in calls:
        found = _grads(lambda: quantized_linear(x, weight, bias, recipe=recipe, draws=again), x, weight)
        _assert_bits(found, call)
    apart = _grads(lambda: quantized_linear(x, weight, bias, recipe=recipe, draws=Draws(1)), x, weight)
    assert not torch.equal(apart[2], calls[0][2])


@pytest.mark.parametrize("inputs", [48, 50], ids=["whole", "filled up"])
def test_a_rotation_of_both_operands_cancels_in_each_product(inputs: int) -> None:
    """Without rounding worth the name, and with sums that are no multiple of the rotation: zeros fill them up."""
    x, weight, bias = _leaves(torch.float32, 3, 7, inputs)
    rotated = products_of(OperandRecipe(scheme="fp32"), rotations=dict.fromkeys(PRODUCTS, (16, 3)))
    recipe = Recipe(name="rotated", source="", products=rotated)
    found = _grads(lambda: quantized_linear(x, weight, bias, recipe=recipe), x, weight, bias)
    expected = _grads(lambda: F.linear(x, weight, bias), x, weight, bias)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_options_of_quantize_reach_a_tensor_and_its_gradient() -> None:
    x = torch.randn(32, 64, requires_grad=True)
    grad = torch.randn(32, 64)
    options: dict[str, Any] = {"block_size": (16, 16), "rounding": "stochastic", "seed": 3}
    found = fake_quantize(x, forward="nvfp4", backward="nvfp4", **options)
    _assert_bits((found.detach(),), (quantize(x, "nvfp4", warn=False, **options).values.float(),))
    (found_grad,) = torch.autograd.grad(found, x, grad)
    _assert_bits((found_grad,), (quantize(grad, "nvfp4", warn=False, **options).values.float(),))


def test_two_uses_of_one_weight_add_up() -> None:
    x, weight, bias = _leaves()
    recipe = RECIPES["mxfp8_e5m2_grad"]
    halves = [x.detach()[:, :16], x.detach()[:, 16:]]
    outputs = [quantized_linear(half, weight, bias, recipe=recipe) for half in halves]
    (found,) = torch.autograd.grad([output.sum() for output in outputs], weight)
    apart = [
        torch.autograd.grad(quantized_linear(half, weight, bias, recipe=recipe).sum(), weight)[0] for half in halves
    ]
    _assert_bits((found,), (apart[0] + apart[1],))


def test_what_needs_no_gradient_gets_none() -> None:
    x, weight, bias = _leaves()
    recipe = RECIPES["mxfp8_e5m2_grad"]
    frozen = quantized_linear(x, weight.detach(), None, recipe=recipe)
    assert torch.autograd.grad(frozen.sum(), x)[0].shape == x.shape
    first = quantized_linear(x.detach(), weight, bias, recipe=recipe)
    assert torch.autograd.grad(first.sum(), weight)[0].shape == weight.shape
    assert not quantized_linear(x.detach(), weight.detach(), bias.detach(), recipe=recipe).requires_grad


def test_the_same_numbers_come_out_every_time_and_on_any_number_of_threads() -> None:
    x, weight, bias = _leaves()
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            found.append([fake_quantize(x, forward=name, axis=axis) for name in SCHEMES for axis in (0, -1)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        _assert_bits(tuple(other), tuple(found[0]))
    first = _grads(lambda: quantized_linear(x, weight, bias, recipe=RECIPES["nvfp4"]), x, weight)
    _assert_bits(_grads(lambda: quantized_linear(x, weight, bias, recipe=RECIPES["nvfp4"]), x, weight), first)


def test_a_model_learns_with_it() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(16, 64), nn.Linear(64, 1)
    x = torch.randn(256, 16)
    target = x[:, :1] * x[:, 1:2]
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=1e-2)
    losses = []
    for _ in range(60):
        hidden = torch.relu(quantized_linear(x, first.weight, first.bias, recipe=RECIPES["mxfp4"]))
        loss = F.mse_loss(quantized_linear(hidden, second.weight, second.bias, recipe=RECIPES["mxfp4"]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(UsageError, match="mxfp9"):
        fake_quantize(torch.zeros(3), forward="mxfp9")
    with pytest.raises(UsageError, match="mxfp9"):
        fake_quantize(torch.zeros(3), forward=None, backward="mxfp9")
    with pytest.raises(UsageError, match="backward=3 is not the name of a scheme"):
        fake_quantize(torch.zeros(3), backward=3)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="cannot be quantised"):
        fake_quantize(torch.zeros(3, dtype=torch.int32), forward="mxfp8")
    x = torch.randn(3, requires_grad=True)
    found = fake_quantize(x * x, backward="mxfp8")
    (grad,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_quantises_as_a_cpu_does(recipe: str) -> None:
    x, weight, _ = _leaves()
    here = linear_operands(x, weight, recipe=RECIPES[recipe], draws=Draws())
    there = linear_operands(x.cuda(), weight.cuda(), recipe=RECIPES[recipe], draws=Draws())
    _assert_bits(tuple(one.detach().cpu() for one in there), tuple(one.detach() for one in here))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = quantized_linear(x.cuda(), weight.cuda(), recipe=RECIPES[recipe])
    assert output.dtype is torch.bfloat16
    output.sum().backward()
    assert weight.grad is not None
