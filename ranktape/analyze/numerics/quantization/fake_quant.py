"""Gives `fake_quantize`: a tensor or a model that computes in low precision, in the types that it has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ranktape.analyze.numerics.quantization.plan import QuantizeOptions
    from ranktape.analyze.numerics.recipes.parse import RecipeWord
    from ranktape.analyze.numerics.recipes.plan_file import PrecisionPlan

    Model = TypeVar("Model", bound=nn.Module)


@overload
def fake_quantize(x: Model, *, recipe: RecipeWord) -> Model: ...
@overload
def fake_quantize(x: Model, *, plan: str | os.PathLike[str] | PrecisionPlan) -> Model: ...
@overload
def fake_quantize(
    x: torch.Tensor,
    *,
    forward: str | None = "mxfp8_e4m3",
    backward: str | None = None,
    **options: Unpack[QuantizeOptions],
) -> torch.Tensor: ...
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
    import torch

    if isinstance(x, torch.nn.Module):
        from ranktape.analyze.numerics.quantization.quantized_layers import quantize_model

        quantize_model(x, **options)
        return x
    from ranktape.analyze.numerics.quantization.quantized_product import fake_quantized

    return fake_quantized(x, **options)
