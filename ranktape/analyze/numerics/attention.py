"""Recomputes attention and its gradients from recorded operands, unchanged or quantised by a recipe.

Published recipes leave attention in bfloat16. This module computes the errors that quantised operands would cause.
Query, key and the gradient of the output are quantised along the elements of a head, the value along the keys: the
dimensions that the products sum over. Attention weights are not quantised, and no operand is rotated.
"""

# Shapes: B = batch, H = heads, T = queries, S = keys, D = elements of a head, R = rows of an operand.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.error_sums import ErrorSums, error_sums
from ranktape.analyze.numerics.products import RECORDED, ProductError
from ranktape.analyze.numerics.quantization.operand import named_operand
from ranktape.analyze.numerics.recipes.recipe import OperandRecipe, ProductRecipe, Recipe
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch

ATTENTION_OPERANDS = ("query", "key", "value", "grad_output")
"""The operands of attention. Without the last one, no gradients are computed."""

ATTENTION_PRODUCTS = ("output", "grad_query", "grad_key", "grad_value")
"""The results of attention."""

NOISE = 8.0
"""Tolerance of a recorded output, as a multiple of the rounding error of attention that is computed step by step."""

HEADS = "BHTD"
"""The layout of all tensors in this module. For keys and values, T is the number of keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionForm:
    """The scale and the mask of attention."""

    scale: float | None = None
    """Factor of the products of queries and keys; None for 1 / sqrt(D)."""
    before: int | None = None
    """Number of keys before its own that a query attends to; None for all."""
    after: int | None = None
    """Number of keys after its own that a query attends to, 0 for causal attention; None for all."""
    shift: int = 0
    """Index of the first query's own key.

    FlashAttention aligns the last query with the last key if there are more keys than queries.
    """

    def mask(self, num_queries: int, num_keys: int, *, device: torch.device) -> torch.Tensor | None:
        """Which keys (columns) each query (row) attends to; None if each attends to all."""
        if self.before is None and self.after is None:
            return None
        import torch

        queries = torch.arange(num_queries, device=device)[:, None] + self.shift
        distance = torch.arange(num_keys, device=device)[None] - queries
        is_visible = torch.ones_like(distance, dtype=torch.bool)
        if self.before is not None:
            is_visible &= distance >= -self.before
        if self.after is not None:
            is_visible &= distance <= self.after
        return is_visible


CAUSAL, FULL = AttentionForm(after=0), AttentionForm()


def heads_second(tensor: torch.Tensor, layout: str, *, num_heads: int | None = None) -> torch.Tensor:
    """A view of the tensor in the layout `HEADS`, given its own layout as a letter for each dimension.

    A tensor without D, whose last dimension joins all heads, needs `num_heads`. A tensor without B gets a batch of one
    sample. If the layout is empty, a tensor with four dimensions is in the layout `HEADS`, and the last two dimensions
    of any other are tokens and elements of a single head.

    Raises:
        UsageError: the layout is not one of attention, or does not match the tensor.
    """
    if layout and len(layout) != tensor.ndim:
        raise UsageError(f"the layout {layout!r} is not that of a tensor with {tensor.ndim} dimensions")
    if not layout:
        if tensor.ndim < 2:  # noqa: PLR2004
            raise UsageError(f"attention is not computed of tensors with {tensor.ndim} dimensions")
        return tensor if tensor.ndim == len(HEADS) else tensor.reshape(-1, 1, *tensor.shape[-2:])
    view, letters = tensor, layout
    if "D" not in letters and letters.endswith("H"):
        if not num_heads or tensor.shape[-1] % num_heads:
            raise UsageError(f"{tensor.shape[-1]} elements are not those of {num_heads} heads")
        view, letters = tensor.unflatten(-1, (num_heads, -1)), letters + "D"
    if "B" not in letters:
        view, letters = view[None], f"B{letters}"
    if sorted(letters) != sorted(HEADS):
        raise UsageError(
            f"the layout {layout!r} is none of attention: it has batch B, heads H, tokens T and elements D"
        )
    return view.permute([letters.index(letter) for letter in HEADS])


def attention_products(operands: Mapping[str, torch.Tensor], *, form: AttentionForm) -> dict[str, torch.Tensor]:
    """The output of attention, and its gradients if there is a `grad_output`, in the dtype of the operands.

    Operands are [B, H, T, D]. Keys and values may have fewer heads, each for a group of the heads of queries. NaN and
    Inf propagate. Memory depends on the kernel that torch selects: at most a few T x S numbers for each head.

    Raises:
        UsageError: an operand is missing, or the shapes do not fit together.
    """
    import torch
    from torch.nn import functional

    leaves = _checked(operands)
    grad_output = operands.get("grad_output")
    has_gradients = grad_output is not None
    query, key, value = (leaf.detach().requires_grad_(has_gradients) for leaf in leaves)
    is_plain = form.after == 0 and form.before is None and not form.shift
    mask = None if is_plain else form.mask(query.shape[2], key.shape[2], device=query.device)
    with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
        output = functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_plain, scale=form.scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    if grad_output is None:
        return {"output": output}
    grads = torch.autograd.grad(output, (query, key, value), grad_output.to(output.dtype))
    return dict(zip(ATTENTION_PRODUCTS, (output.detach(), *grads), strict=True))


def reproduces_output(
    operands: Mapping[str, torch.Tensor], output: torch.Tensor, *, form: AttentionForm, compute_dtype: torch.dtype
) -> bool:
    """Whether attention of that form gives a recorded output up to rounding errors; all tensors are [B, H, T, D].

    The norm of the difference may be at most `NOISE` times that of attention whose steps are all rounded to
    `compute_dtype`, plus the rounding error of the output. Non-finite elements agree with any other such elements.
    """
    import torch

    work = torch.float64 if compute_dtype is torch.float64 else torch.float32
    rounded = {name: operands[name].detach().to(compute_dtype) for name in ATTENTION_OPERANDS[:3]}
    exact = attention_products({name: tensor.to(work) for name, tensor in rounded.items()}, form=form)["output"]
    recorded = output.detach().to(work)
    if not exact.numel():
        return True
    is_nonfinite = ~exact.isfinite() & ~recorded.isfinite()
    noise = (_stepwise(rounded, form=form).to(work) - exact).nan_to_num(0.0, 0.0, 0.0)
    unit = max(torch.finfo(dtype).eps / 2 for dtype in (compute_dtype, output.dtype))
    sizes = ((recorded - exact).masked_fill(is_nonfinite, 0.0), exact.masked_fill(is_nonfinite, 0.0), noise)
    error, size, least = (float(tensor.double().norm()) for tensor in sizes)
    # A NaN on one side alone makes the error NaN.
    return error <= NOISE * least + 2 * unit * size


def _stepwise(operands: Mapping[str, torch.Tensor], *, form: AttentionForm) -> torch.Tensor:
    """The output of attention computed in separate steps, each of which rounds to the dtype of the operands."""
    import torch

    num_groups = operands["key"].shape[1]
    query, key, value = (operands[name].unflatten(1, (num_groups, -1)) for name in ATTENTION_OPERANDS[:3])
    mask = form.mask(query.shape[-2], key.shape[-2], device=query.device)
    scale = query.shape[-1] ** -0.5 if form.scale is None else form.scale
    outputs = []
    # One sequence at a time: the scores are as large as the tokens squared.
    with torch.autocast(query.device.type, enabled=False):
        for number in range(len(query)):
            scores = (query[number] @ key[number].transpose(-1, -2)) * scale
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf)
            weights = scores.softmax(-1)
            if mask is not None:  # the weights of a query without keys are NaN
                weights = weights.masked_fill(~mask, 0.0)
            outputs.append(weights @ value[number])
    return torch.stack(outputs).flatten(1, 2)


def _checked(operands: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    missing = [name for name in ATTENTION_OPERANDS[:3] if name not in operands]
    if missing:
        raise UsageError(f"attention is not computed without {', '.join(missing)}")
    query, key, value = (operands[name] for name in ATTENTION_OPERANDS[:3])
    shapes = {name: tuple(operands[name].shape) for name in ATTENTION_OPERANDS if name in operands}
    is_valid = all(len(shape) == len(HEADS) for shape in shapes.values())
    is_valid = is_valid and query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
    is_valid = is_valid and key.shape[:3] == value.shape[:3] and key.shape[1] > 0 and query.shape[1] % key.shape[1] == 0
    expected = (*query.shape[:3], value.shape[-1])
    if not is_valid or shapes.get("grad_output", expected) != expected:
        raise UsageError(f"the shapes are not those of one attention: {shapes}")
    return query, key, value


def replay_attention(
    operands: Mapping[str, torch.Tensor],
    recipes: Sequence[Recipe],
    *,
    form: AttentionForm,
    recorded: Mapping[str, torch.Tensor] | None = None,
) -> list[ProductError]:
    """The errors of attention and its gradients with operands quantised by each recipe.

    The counterpart of `replay_products` for attention, in the order of `ATTENTION_PRODUCTS`. All tensors are
    [B, H, T, D] (see `heads_second`). Query, key and value are quantised as the `input` of a recipe's product `output`,
    and the gradient as the `grad_output` of `grad_input`. With stochastic rounding, sums are over all draws.

    Raises:
        UsageError: as for `attention_products`, or a recorded result has another shape than its product.
    """
    wide = {name: tensor.detach().float() for name, tensor in operands.items() if name in ATTENTION_OPERANDS}
    exact = attention_products(wide, form=form)
    references = {name: tensor.detach() for name, tensor in (recorded or {}).items() if name in exact}
    errors = [
        ProductError(product=name, recipe=RECORDED, exact=error_sums(exact[name], references[name]), recorded=None)
        for name in references
    ]
    for recipe in recipes:
        is_drawn = any(operand.is_stochastic for operand in _operand_recipes(recipe).values())
        sums = {name: ErrorSums() for name in exact}
        recorded_sums = {name: ErrorSums() for name in references}
        for draw in range(recipe.draws if is_drawn else 1):
            quantised = quantised_attention(wide, recipe, draw=draw)
            for name, result in attention_products(quantised, form=form).items():
                sums[name] += error_sums(exact[name], result)
                if name in references:
                    recorded_sums[name] += error_sums(references[name], result)
        errors += [
            ProductError(product=name, recipe=recipe.name, exact=sums[name], recorded=recorded_sums.get(name))
            for name in exact
        ]
    order = {name: index for index, name in enumerate(ATTENTION_PRODUCTS)}
    return sorted(errors, key=lambda error: order[error.product])


def quantised_attention(
    operands: Mapping[str, torch.Tensor], recipe: Recipe, *, draw: int = 0
) -> dict[str, torch.Tensor]:
    """The operands of attention, [B, H, T, D], quantised by a recipe, in float32."""
    quantised = {}
    for name in ATTENTION_OPERANDS:
        if name in operands:
            seed = int(np.random.SeedSequence((recipe.seed, draw, ATTENTION_OPERANDS.index(name))).generate_state(1)[0])
            quantised[name] = quantised_operand(name, operands[name].float(), recipe, seed=seed)
    return quantised


def quantised_operand(name: str, operand: torch.Tensor, recipe: Recipe, *, seed: int) -> torch.Tensor:
    """The named operand of attention, [..., T, D], quantised by a recipe, in its own dtype."""
    # The dimension that the product sums over is last: the keys for the value, the elements of a head for all others.
    last = operand.transpose(-2, -1) if name == "value" else operand
    operand_recipe = _operand_recipes(recipe)[name]
    matrix = named_operand(ProductRecipe(operands={"input": operand_recipe}), "input", last.flatten(0, -2), seed=seed)
    values = matrix.dequantized().to(operand.dtype).view(last.shape)
    return values.transpose(-2, -1).contiguous() if name == "value" else values


def _operand_recipes(recipe: Recipe) -> dict[str, OperandRecipe]:
    forward = recipe.products["output"].operands["input"]
    gradient = recipe.products["grad_input"].operands["grad_output"]
    return dict(zip(ATTENTION_OPERANDS, (forward, forward, forward, gradient), strict=True))
