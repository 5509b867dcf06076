"""Quantises both operands of a product as a recipe says."""

# Shapes: A, B = rows of the first and the second operand, S = what the product sums over.

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ranktape.analyze.numerics.quantization.operand import QuantizedOperand, quantized_operand
from ranktape.analyze.numerics.recipes.recipe import OPERANDS

if TYPE_CHECKING:
    import torch

    from ranktape.analyze.numerics.recipes.recipe import ProductRecipe


def quantized_operands(
    product: ProductRecipe, a_AS: torch.Tensor, b_BS: torch.Tensor, *, seed: int
) -> tuple[QuantizedOperand, QuantizedOperand]:
    """Both operands of `a_AS @ b_BS.T`, in the order in which `PRODUCTS` names them.

    What is stochastic draws from `seed`, each operand its own numbers. Rotated operands stay rotated: the product of
    the two is that of what they were. Zeros fill up the sum to whole runs of the rotation, and the operands are longer
    by them. NaN, Inf, zeros and empty matrices are those of `quantized_operand`.

    Raises:
        UsageError: one is no matrix of real floating-point numbers.
    """
    first, second = product.operands
    return one_operand(product, first, a_AS, seed=seed), one_operand(product, second, b_BS, seed=seed)


def one_operand(product: ProductRecipe, name: str, x_RS: torch.Tensor, *, seed: int) -> QuantizedOperand:
    """The operand of that name as `quantized_operands` gives it."""
    operand = product.operands[name]
    options: dict[str, Any] = operand.options
    if operand.is_stochastic:
        options["seed"] = len(OPERANDS) * seed + OPERANDS.index(name)
    if product.rotation:
        options |= {"rotation": product.rotation, "rotation_seed": product.rotation_seed}
        x_RS = _with_whole_runs(x_RS, product.rotation)
    if operand.prescale == 1:
        return quantized_operand(x_RS, operand.scheme, **options)
    found = quantized_operand(x_RS.float() * operand.prescale, operand.scheme, **options)
    return replace(found, factor=found.factor / operand.prescale)


def _with_whole_runs(x_RS: torch.Tensor, size: int) -> torch.Tensor:
    missing = -x_RS.shape[-1] % size if x_RS.ndim else 0
    if not missing:
        return x_RS
    from torch.nn.functional import pad

    return pad(x_RS, (0, missing))
