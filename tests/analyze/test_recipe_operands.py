"""Are the operands of a product those that the recipe says, each with draws of its own?"""

from __future__ import annotations

import pytest
import torch

from ranktape.analyze import quantize
from ranktape.analyze.numerics.quantization.operand import one_operand, quantized_operands
from ranktape.analyze.numerics.recipes.recipe import OperandRecipe, ProductRecipe
from ranktape.analyze.numerics.recipes.table import RECIPES
from ranktape.errors import UsageError


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_both_operands_are_quantised_along_the_sum_in_their_order() -> None:
    product = RECIPES["mxfp8_e5m2_grad"].products["grad_weight"]
    grad_OT, x_IT = numbers(24, 64), numbers(40, 64, seed=1)
    first, second = quantized_operands(product, grad_OT, x_IT, seed=0)
    for found, matrix, scheme in ((first, grad_OT, "mxfp8_e5m2"), (second, x_IT, "mxfp8_e4m3")):
        expected = quantize(matrix, scheme, scale_rule="rceil", warn=False)
        assert torch.equal(found.whole(), expected.values)


def test_an_operand_that_is_left_as_it_is_keeps_its_numbers() -> None:
    product = ProductRecipe(operands={"input": OperandRecipe(), "weight": OperandRecipe(scheme="mxfp4")})
    first, _ = quantized_operands(product, numbers(3, 5), numbers(4, 5), seed=0)
    assert torch.equal(first.values, numbers(3, 5))
    assert first.factor == 1


@pytest.mark.parametrize("length", [1, 63, 64, 100])
@pytest.mark.parametrize("scheme", [None, "fp32"])
def test_a_rotation_of_both_operands_leaves_their_product(length: int, scheme: str | None) -> None:
    """Whatever the length of the sum; and one that is left as it is turns with the other."""
    operands = {"input": OperandRecipe(), "weight": OperandRecipe(scheme=scheme)}
    product = ProductRecipe(operands=operands, rotation=64, rotation_seed=3)
    given = numbers(7, length), numbers(5, length, seed=1)
    one, other = (operand.values.double() for operand in quantized_operands(product, *given, seed=0))
    assert one.shape[1] == other.shape[1] == -(-length // 64) * 64
    assert not torch.equal(one[:, :length].float(), given[0])
    torch.testing.assert_close((one @ other.T).float(), (given[0].double() @ given[1].double().T).float())


def test_only_a_matrix_is_an_operand() -> None:
    product = RECIPES["nvfp4_nvidia"].products["grad_weight"]
    for tensor in (torch.tensor(1.0), numbers(3), numbers(2, 3, 4)):
        with pytest.raises(UsageError, match=f"has {tensor.ndim} dimensions"):
            one_operand(product, "input", tensor, seed=0)


def test_a_prescale_moves_the_numbers_on_the_grid_and_the_factor_takes_it_back() -> None:
    matrix = numbers(8, 64)
    product = ProductRecipe(
        operands={"input": OperandRecipe(scheme="mxfp4", prescale=0.75), "weight": OperandRecipe(scheme="mxfp4")}
    )
    found, plain = quantized_operands(product, matrix, matrix, seed=0)
    assert torch.equal(found.values.float(), quantize(matrix * 0.75, "mxfp4", warn=False).values)
    assert (found.factor, plain.factor) == (4 / 3, 1)
    assert found.is_bf16


def test_draws_follow_the_seed_and_differ_between_the_operands() -> None:
    drawn = OperandRecipe(scheme="mxfp4", rounding="stochastic")
    product = ProductRecipe(operands={"grad_output": drawn, "input": drawn})
    matrix = numbers(32, 64)
    pairs = [quantized_operands(product, matrix, matrix, seed=seed) for seed in (0, 0, 1, 2)]
    values = [[operand.values for operand in pair] for pair in pairs]
    assert all(torch.equal(one, other) for one, other in zip(values[0], values[1], strict=True))
    different = [*values[0], *values[2], *values[3]]
    assert not any(torch.equal(one, two) for i, one in enumerate(different) for two in different[:i])
    assert torch.equal(one_operand(product, "input", matrix, seed=2).values, values[3][1])
