"""Computes attention with quantised operands, as a function of torch that has gradients.

Imports torch: a file for functions that are called with tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ranktape.analyze.numerics.attention import ATTENTION_OPERANDS, quantised_one
from ranktape.analyze.numerics.quantization.quantized_product import Draws, as_computed, as_written, straight_through
from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_PRODUCTS = dict(zip(ATTENTION_OPERANDS, ("output", "output", "output", "grad_input"), strict=True))
"""The products of a linear layer whose recipes the operands of attention follow, and whose draws they share."""


@as_written
def quantized_attention(
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    recipe: Recipe,
    draws: Draws,
) -> Tensor:
    """What `function` gives of a query, key and value as a recipe quantises them; its gradients come from those, too.

    Query and key are quantised along the elements of a head, the value along the keys, as the recipe's `input` of the
    product `output`; the gradient of the output along the elements of a head, as its `grad_output` of `grad_input`. The
    probabilities stay as `function` computes them. Nothing is rotated. Under autocast the operands are cast first. NaN,
    Inf and zeros become what `quantize` makes of them.

    Operands are [..., tokens, elements of a head]; the last dimension of what `function` gives is that, too.

    Raises:
        UsageError: an operand is sharded (DTensor), or does not hold real floating-point numbers.
    """
    if any(hasattr(one, "device_mesh") for one in (query, key, value)):
        raise UsageError(
            "the operands of attention are sharded by tensor parallelism (DTensor), and are not quantised: train "
            "without tensor parallelism, or without --quant-attention"
        )

    def narrow(name: str, wide: Tensor) -> Tensor:
        seed = len(ATTENTION_OPERANDS) * draws.next_seed(recipe, product=_PRODUCTS[name])
        return quantised_one(name, wide.detach(), recipe, seed=seed + ATTENTION_OPERANDS.index(name))

    def on_gradient(grad: Tensor) -> Tensor:
        return narrow("grad_output", grad)

    wide = as_computed(query, key, value)
    operands = [straight_through(one, narrow(name, one)) for name, one in zip(ATTENTION_OPERANDS, wide, strict=False)]
    output = function(operands[0], operands[1], operands[2])
    return straight_through(output, output.detach(), on_gradient)
