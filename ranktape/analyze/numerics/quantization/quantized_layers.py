"""Gives `fake_quantize`: a tensor or a model that computes in low precision, in the types that it has.

The linear layers of a model become such that compute with quantised operands, under the same names.

Imports torch: a file for models that are there. A capture knows the class by its name.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from torch import Tensor, nn

from ranktape.analyze.numerics.quantization.quantized_product import (
    Draws,
    LinearOperands,
    as_written,
    fake_quantized,
    linear_operands,
    linear_product,
)
from ranktape.analyze.numerics.recipes.plan_file import HIGH_PRECISION, PrecisionPlan, read_plan
from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.analyze.numerics.recipes.words import RecipeWord, parse_recipe
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.numerics.quantization.plan import QuantizeOptions

    Model = TypeVar("Model", bound=nn.Module)


class QuantizedLinear(nn.Module):
    """A linear layer whose three products are computed as a recipe says; called as `nn.Linear` is.

    A layer that is there becomes one by `become_quantized`: whoever holds it, its parameters or its hooks holds them
    still. A hook of its own quantises what goes into `forward`, so that hooks which are put on later, as those of a
    capture, see the operands that are computed with, and those that they were made from.
    """

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    recipe: Recipe
    draws: Draws

    def forward(self, x: Tensor, weight: Tensor, wide_x: Tensor, wide_weight: Tensor) -> Tensor:
        """The product of the operands that `_quantize` has made of the input."""
        operands = LinearOperands(x, weight, wide_x, wide_weight)
        return linear_product(operands, self.bias, recipe=self.recipe, draws=self.draws)

    def extra_repr(self) -> str:
        """What is printed of the layer."""
        return f"{self.in_features}, {self.out_features}, recipe={self.recipe.name}"


def is_plain_linear(module: nn.Module) -> bool:
    """Whether it is an `nn.Linear` and nothing that derives from it, but for what FSDP2 makes of one."""
    kind = type(module)
    return kind is nn.Linear or (kind.__bases__[1:] == (nn.Linear,) and _is_fsdp(kind))


def _is_fsdp(kind: type) -> bool:
    # By its name: torch.distributed.fsdp is slow to import, and where it is not loaded no class is of it.
    return kind.__bases__[0].__name__ == "FSDPModule" and kind.__bases__[0].__module__.startswith("torch.")


def become_quantized(linear: nn.Module, *, recipe: Recipe, stream: int = 0) -> None:
    """Have a plain linear layer compute as a recipe says; `stream` tells the stochastic rounding of layers apart."""
    kind = type(linear)
    linear.__class__ = (
        QuantizedLinear
        if kind is nn.Linear
        else type("FSDPQuantizedLinear", (kind.__bases__[0], QuantizedLinear), {"__module__": __name__})
    )
    assert isinstance(linear, QuantizedLinear), "it was made one"
    linear.recipe, linear.draws = recipe, Draws(stream)
    linear.register_forward_pre_hook(_quantize, with_kwargs=True)


# Not compiled: each layer has a recipe and draws of its own, and would be a recompilation of it.
@as_written
def _quantize(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    assert isinstance(module, QuantizedLinear), "it is put on nothing else"
    if hasattr(module.weight, "device_mesh"):
        raise UsageError(
            "the weights of linear layers are sharded by tensor parallelism (DTensor), and are not quantised: train "
            "without tensor parallelism, or without quantisation"
        )
    x = args[0] if args else kwargs["input"]
    return linear_operands(x, module.weight, recipe=module.recipe, draws=module.draws), {}


def quantize_model(
    model: nn.Module,
    *,
    recipe: RecipeWord | None = None,
    plan: str | os.PathLike[str] | PrecisionPlan | None = None,
) -> None:
    """Have the `nn.Linear` in a model compute in low precision: what `fake_quantize` does with one.

    Raises:
        UsageError: as `fake_quantize`.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    linears = {name: module for name, module in modules.items() if is_plain_linear(module)}
    if not linears or "" in linears:
        what = "is a linear layer itself: put it into nn.Sequential" if linears else "has no nn.Linear"
        raise UsageError(f"the {type(model).__name__} {what}, and layers inside of a model are quantised")
    if (recipe is None) == (plan is None):
        raise UsageError("a model is quantised by a recipe or by a plan: give recipe='mxfp8', or plan='plan.yaml'")
    if plan is not None:
        read = plan if isinstance(plan, PrecisionPlan) else read_plan(Path(plan))
        others = {name: type(module).__name__ for name, module in modules.items() if name not in linears}
        recipes = read.recipes_of(linears, others=others)
        if inside := read.inside_attention(others):
            warnings.warn(inside_words(inside), stacklevel=3)
    else:
        assert recipe is not None
        recipes = recipes_of_layers(parse_recipe(recipe), linears)
    quantize_layers(linears, recipes)


def inside_words(modules: Sequence[str]) -> str:
    """What becomes of projections of `nn.MultiheadAttention` that a plan gives a recipe."""
    more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    return (
        f"{modules[0]}{more} stay as they are: nn.MultiheadAttention multiplies by these weights itself, and calls no "
        "nn.Linear that could be quantised"
    )


def quantize_layers(
    linears: Mapping[str, nn.Module], recipes: Mapping[str, Recipe], *, first_stream: int = 0
) -> list[nn.Module]:
    """Have each of these plain layers compute with the recipe of its name, and return them.

    One that has several names computes with the recipe of the first.
    """
    done: dict[nn.Module, None] = {}
    for stream, (name, recipe) in enumerate(recipes.items(), start=first_stream):
        if linears[name] not in done:
            become_quantized(linears[name], recipe=recipe, stream=stream)
            done[linears[name]] = None
    return list(done)


def recipes_of_layers(recipe: Recipe, modules: Iterable[str], *, keeps_bf16: bool = True) -> dict[str, Recipe]:
    """The recipe, for those of the modules of a model that it does not leave in bf16.

    Without `keeps_bf16` those are rounded to bf16.
    """
    numbers = {name: _layer_idx(name) for name in modules}
    count = 1 + max(numbers.values())
    own = {name: recipe.of_layer(name, layer_idx=idx, num_layers=count) for name, idx in numbers.items()}
    return {name: one for name, one in own.items() if not (keeps_bf16 and one.products == HIGH_PRECISION.products)}


def _layer_idx(name: str) -> int:
    """The number of the layer that a module is in, from its dotted path: the first number; -1 where there is none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


@overload
def fake_quantize(x: Model, *, recipe: RecipeWord) -> Model: ...
@overload
def fake_quantize(x: Model, *, plan: str | os.PathLike[str] | PrecisionPlan) -> Model: ...
@overload
def fake_quantize(
    x: Tensor,
    *,
    forward: str | None = "mxfp8_e4m3",
    backward: str | None = None,
    **options: Unpack[QuantizeOptions],
) -> Tensor: ...
def fake_quantize(x: Any, **options: Any) -> Any:
    """A tensor quantised, or a model whose linear layers compute with quantised operands.

    A tensor is quantised with the scheme `forward` ("mxfp8_e4m3" by default), its gradient with the scheme `backward`
    (None by default); one that is None changes nothing. The other options are those of `quantize`, for both. NaN, Inf,
    zeros and empty tensors become what `quantize` makes of them. The gradient passes straight through: where an
    element was clamped or became zero, too. There is no gradient of the gradient: to ask for one raises. Type, shape
    and device are those of `x`: values that do not fit its type (the float32 scale of NVFP4 in bfloat16) are rounded
    to it once more.

    A model is changed in place, and returned: every `nn.Linear` inside of it that is to be quantised becomes a layer
    whose three products are computed as a recipe says; it stays the same object, with its name, parameters and hooks,
    so that DDP or FSDP may wrap it before or after. With `recipe`, all
    but those that the recipe leaves in bf16; of a recipe with exceptions for the first and last layers, a layer's
    number is the first one in its dotted path. With `plan` (a file, or a `PrecisionPlan`), those that the plan names,
    each with its own. Classes that derive from `nn.Linear` stay: they may compute something else. Weights that tensor
    parallelism shards (DTensor) are refused by the first forward pass. A capture records the operands that are computed
    with as `input` and `weight`, and what they were made from as `wide_input` and `wide_weight`.

    Raises:
        UsageError: a scheme, a recipe or an option is not known; `x` does not hold real floating-point numbers; the
            model has no linear layer, or not one that the plan names; neither a recipe nor a plan is given, or both.
    """
    if isinstance(x, nn.Module):
        quantize_model(x, **options)
        return x
    return fake_quantized(x, **options)
