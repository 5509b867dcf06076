"""Linear layers that compute with quantised operands: they take the place of a model's own, under the same names.

Imports torch: a file for models that are there. A capture knows the class by its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ranktape.analyze.numerics.quantization.quantized_product import (
    Draws,
    LinearOperands,
    linear_operands,
    linear_product,
)
from ranktape.analyze.numerics.recipes.parse import RecipeWord, parse_recipe
from ranktape.analyze.numerics.recipes.plan_file import HIGH_PRECISION, PrecisionPlan, read_plan
from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.errors import UsageError


class QuantizedLinear(nn.Module):
    """A linear layer whose three products are computed as a recipe says; called as `nn.Linear` is.

    A hook of its own quantises what goes into `forward`, so that hooks which are put on later, as those of a capture,
    see the operands that are computed with, and those that they were made from.
    """

    def __init__(self, linear: nn.Linear, *, recipe: Recipe, stream: int = 0) -> None:
        """Take the parameters of a layer; `stream` tells the stochastic rounding of layers apart."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.bias: nn.Parameter | None = linear.bias
        self.recipe = recipe
        self.draws = Draws(stream)
        self.register_forward_pre_hook(_quantize, with_kwargs=True)
        self.train(linear.training)

    def forward(self, x: Tensor, weight: Tensor, wide_x: Tensor, wide_weight: Tensor) -> Tensor:
        """The product of the operands that `_quantize` has made of the input."""
        operands = LinearOperands(x, weight, wide_x, wide_weight)
        return linear_product(operands, self.bias, recipe=self.recipe, draws=self.draws)

    def extra_repr(self) -> str:
        """What is printed of the layer."""
        return f"{self.in_features}, {self.out_features}, recipe={self.recipe.name}"


def _quantize(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    assert isinstance(module, QuantizedLinear), "it is put on nothing else"
    x = args[0] if args else kwargs["input"]
    return linear_operands(x, module.weight, recipe=module.recipe, draws=module.draws), {}


def quantize_model(
    model: nn.Module,
    *,
    recipe: RecipeWord | None = None,
    plan: str | os.PathLike[str] | PrecisionPlan | None = None,
) -> None:
    """Put quantised layers in the place of the `nn.Linear` in a model: what `fake_quantize` does with one.

    Raises:
        UsageError: as `fake_quantize`.
    """
    linears = {
        name: module for name, module in model.named_modules(remove_duplicate=False) if type(module) is nn.Linear
    }
    if not linears or "" in linears:
        what = "is a linear layer itself: put it into nn.Sequential" if linears else "has no nn.Linear"
        raise UsageError(f"the {type(model).__name__} {what}, and layers inside of a model are quantised")
    if (recipe is None) == (plan is None):
        raise UsageError("a model is quantised by a recipe or by a plan: give recipe='mxfp8', or plan='plan.yaml'")
    if plan is not None:
        read = plan if isinstance(plan, PrecisionPlan) else read_plan(Path(plan))
        others = {name: type(module).__name__ for name, module in model.named_modules() if name not in linears}
        recipes = read.recipes_of(linears, others=others)
    else:
        assert recipe is not None
        recipes = _of_layers(parse_recipe(recipe), linears)
    made: dict[nn.Linear, QuantizedLinear] = {}
    for stream, (name, own) in enumerate(recipes.items()):
        linear, (parent, _, leaf) = linears[name], name.rpartition(".")
        if linear not in made:
            made[linear] = QuantizedLinear(linear, recipe=own, stream=stream)
        setattr(model.get_submodule(parent), leaf, made[linear])


def _of_layers(recipe: Recipe, modules: Iterable[str]) -> dict[str, Recipe]:
    """The recipe, for those of the modules of a model that it does not leave in bf16."""
    numbers = {name: _layer_idx(name) for name in modules}
    count = 1 + max(numbers.values())
    own = {name: recipe.of_layer(name, layer_idx=idx, num_layers=count) for name, idx in numbers.items()}
    return {name: one for name, one in own.items() if one.products != HIGH_PRECISION.products}


def _layer_idx(name: str) -> int:
    """The number of the layer that a module is in, from its dotted path: the first number; -1 where there is none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)
