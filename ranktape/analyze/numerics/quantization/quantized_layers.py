"""Fake quantisation of tensors and models, which keep their types.

The linear layers of a model compute with quantised operands, under the same names.

This module imports torch; only code that already has a model imports it. Captures recognise the class by its name.
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
    fake_quantized,
    linear_operands,
    linear_product,
    not_compiled,
)
from ranktape.analyze.numerics.recipes.plan_file import HIGH_PRECISION, PrecisionPlan, read_plan
from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.analyze.numerics.recipes.words import RecipeSource, parse_recipe
from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.analyze.numerics.quantization.plan import QuantizeOptions

    Model = TypeVar("Model", bound=nn.Module)


class QuantizedLinear(nn.Module):
    """A linear layer that quantises the operands of its three products by a recipe; called like `nn.Linear`.

    `become_quantized` turns an existing layer into one, so references to the layer, its parameters and hooks stay
    valid. A pre-forward hook of the layer quantises the arguments of `forward`, so hooks that are registered later, as
    by a capture, get the operands of the product and the tensors from which they were made.
    """

    in_features: int
    out_features: int
    weight: nn.Parameter
    bias: nn.Parameter | None
    recipe: Recipe
    draws: Draws

    def forward(self, x: Tensor, weight: Tensor, wide_x: Tensor, wide_weight: Tensor) -> Tensor:
        """The product of the operands that the hook `_quantize` makes of the input."""
        operands = LinearOperands(x, weight, wide_x, wide_weight)
        return linear_product(operands, self.bias, recipe=self.recipe, draws=self.draws)

    def extra_repr(self) -> str:
        """The features and the recipe, for printing the layer."""
        return f"{self.in_features}, {self.out_features}, recipe={self.recipe.name}"


def is_plain_linear(module: nn.Module) -> bool:
    """Whether the module is an `nn.Linear`, or the class that FSDP2 derives from it, but no other subclass."""
    kind = type(module)
    return kind is nn.Linear or (kind.__bases__[1:] == (nn.Linear,) and _is_fsdp(kind))


def _is_fsdp(kind: type) -> bool:
    # By name, because torch.distributed.fsdp is slow to import, and no such class exists if it is not loaded.
    return kind.__bases__[0].__name__ == "FSDPModule" and kind.__bases__[0].__module__.startswith("torch.")


def become_quantized(linear: nn.Module, *, recipe: Recipe, stream: int = 0) -> None:
    """Make a plain linear layer compute by a recipe; different streams give layers different random numbers."""
    kind = type(linear)
    linear.__class__ = (
        QuantizedLinear
        if kind is nn.Linear
        else type("FSDPQuantizedLinear", (kind.__bases__[0], QuantizedLinear), {"__module__": __name__})
    )
    assert isinstance(linear, QuantizedLinear), "it was made one"
    linear.recipe, linear.draws = recipe, Draws(stream)
    linear.register_forward_pre_hook(_quantize, with_kwargs=True)


# Not compiled, because every layer has its own recipe and draws, and would cause a recompilation.
@not_compiled
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
    recipe: RecipeSource | None = None,
    plan: str | os.PathLike[str] | PrecisionPlan | None = None,
) -> None:
    """`fake_quantize` of a model.

    Raises:
        UsageError: as for `fake_quantize`.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    linears = {name: module for name, module in modules.items() if is_plain_linear(module)}
    if not linears or "" in linears:
        problem = "is a linear layer itself: put it into nn.Sequential" if linears else "has no nn.Linear"
        raise UsageError(f"the {type(model).__name__} {problem}, and layers inside of a model are quantised")
    if (recipe is None) == (plan is None):
        raise UsageError("a model is quantised by a recipe or by a plan: give recipe='mxfp8', or plan='plan.yaml'")
    if plan is not None:
        read = plan if isinstance(plan, PrecisionPlan) else read_plan(Path(plan))
        other_classes = {name: type(module).__name__ for name, module in modules.items() if name not in linears}
        recipes = read.recipes_of(linears, others=other_classes)
        if inside := read.inside_attention(other_classes):
            warnings.warn(attention_warning(inside), stacklevel=3)
    else:
        assert recipe is not None
        recipes = layer_recipes(parse_recipe(recipe), linears)
    quantize_layers(linears, recipes)


def attention_warning(modules: Sequence[str]) -> str:
    """The warning that projections of `nn.MultiheadAttention` with a recipe in the plan are not quantised."""
    more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    return (
        f"{modules[0]}{more} stay as they are: nn.MultiheadAttention multiplies by these weights itself, and calls no "
        "nn.Linear that could be quantised"
    )


def quantize_layers(
    linears: Mapping[str, nn.Module], recipes: Mapping[str, Recipe], *, first_stream: int = 0
) -> list[nn.Module]:
    """Make each plain layer compute with the recipe of its name, and return the layers.

    A layer with several names uses the recipe of the first.
    """
    done: dict[nn.Module, None] = {}
    for stream, (name, recipe) in enumerate(recipes.items(), start=first_stream):
        if linears[name] not in done:
            become_quantized(linears[name], recipe=recipe, stream=stream)
            done[linears[name]] = None
    return list(done)


def layer_recipes(recipe: Recipe, modules: Iterable[str], *, keeps_bf16: bool = True) -> dict[str, Recipe]:
    """The recipe of each module of a model, without the modules that it leaves in bf16.

    If `keeps_bf16` is False, these modules are included, with a recipe that rounds to bf16.
    """
    numbers = {name: _layer_idx(name) for name in modules}
    count = 1 + max(numbers.values())
    by_module = {name: recipe.of_layer(name, layer_idx=idx, num_layers=count) for name, idx in numbers.items()}
    wide = HIGH_PRECISION.products
    return {name: chosen for name, chosen in by_module.items() if not (keeps_bf16 and chosen.products == wide)}


def _layer_idx(name: str) -> int:
    """The index of the layer that contains a module: the first number in its dotted path, or -1 if there is none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


@overload
def fake_quantize(x: Model, *, recipe: RecipeSource) -> Model: ...
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
    """Quantise a tensor, or make the linear layers of a model compute with quantised operands.

    A tensor is quantised with the scheme `forward` ("mxfp8_e4m3" by default) and its gradient with the scheme
    `backward` (None by default); None means no quantisation. The other options are those of `quantize`, for both. NaN,
    Inf, zeros and empty tensors are treated as in `quantize`. The gradient passes straight through, even for elements
    that were clamped or became zero. There is no second derivative; computing one raises. Type, shape and device are
    those of `x`: values that its type cannot represent (the float32 scale of NVFP4 in bfloat16) are rounded once more.

    A model is changed in place and returned. Each `nn.Linear` inside the model that is to be quantised computes its
    three products by a recipe. It stays the same object, with its name, parameters and hooks, so DDP or FSDP may wrap
    it before or after. With `recipe`, all linear layers are quantised except those that the recipe leaves in bf16; if
    the recipe makes exceptions for the first and last layers, the number of a layer is the first one in its dotted
    path. With `plan` (a file, or a `PrecisionPlan`), the layers that the plan names are quantised, each with its own
    recipe. Subclasses of `nn.Linear` are not changed, because they may compute something else. If weights are sharded
    by tensor parallelism (DTensor), the first forward pass raises. A capture records the operands of the product as
    `input` and `weight`, and the tensors from which they were made as `wide_input` and `wide_weight`.

    Raises:
        UsageError: a scheme, recipe or option is unknown; `x` is not of real floating-point numbers; the model has no
            linear layer, or not one that the plan names; or not exactly one of `recipe` and `plan` is given.
    """
    if isinstance(x, nn.Module):
        quantize_model(x, **options)
        return x
    return fake_quantized(x, **options)
