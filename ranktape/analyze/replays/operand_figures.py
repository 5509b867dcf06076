"""Gives the figures of a product's operands that say why a recipe loses what it loses of it."""

# Shapes: R = rows of an operand, S = what the product sums over.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.products import SUMMED, replay_products
from ranktape.analyze.numerics.quantization.operand import one_operand
from ranktape.analyze.numerics.quantization.plan import plan_of
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS, OperandRecipe, ProductRecipe, Recipe
from ranktape.analyze.replays.tasks import CallTasks, layers_of, read_call

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from ranktape.analyze.replays.calls import RecordedCall, RecordedCalls

_DECIBELS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperandFigures:
    """What is known of one operand; of NaN and infinite elements nothing."""

    alone: float
    """SQNR in dB of the product with this operand quantised alone; NaN where nothing can be compared."""
    energy: Mapping[str, NDArray[np.float64]]
    """By `rows` and `channels`, the last dimension, what part of the sum of squares each holds, the largest first."""
    crest: float
    """How far the largest magnitude of those that share a scale is above their root mean square, in dB of all sums.

    So much more is lost than of values that are all of one magnitude. NaN of zeros, without a scale, and where the
    recipe rotates them before.
    """
    flushed: float
    """The part of the elements other than 0 that the recipe makes 0; NaN where it rotates them before."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProductFigures:
    """What is known of a product."""

    operands: Mapping[str, OperandFigures]
    """By name, in the order of `PRODUCTS`."""
    coherence: float
    """The square of its norm over that of unrelated operands with the same norms, in dB.

    Below 0 where the terms of its sums cancel one another, and above where they go together: the errors of quantised
    elements do neither. NaN of zeros.
    """


class CallFigures:
    """The figures of products of recorded calls, each read once."""

    def __init__(self, calls: RecordedCalls) -> None:
        """Take the calls; nothing is read."""
        self._calls = calls
        self._places = {
            (_fields(call, _LAYER), _fields(call, _MOMENT)): place for place, call in enumerate(calls.calls)
        }
        self._known: dict[tuple[int, str, str], ProductFigures | None] = {}

    def beside(self, place: int, *, or_else: int) -> int:
        """The call of the layer of `or_else` that was made when that of `place` was; `or_else` where there is none."""
        layer, moment = _fields(self._calls.calls[or_else], _LAYER), _fields(self._calls.calls[place], _MOMENT)
        return self._places.get((layer, moment), or_else)

    def calls_of(self, place: int) -> list[int]:
        """All calls of the layer of that one."""
        layer = _fields(self._calls.calls[place], _LAYER)
        return [other for (known, _), other in self._places.items() if known == layer]

    def of(self, place: int, product: str, recipe: Recipe) -> ProductFigures | None:
        """Those of the call in that place; None of experts that are multiplied in one call.

        Raises:
            DataError: a record's bytes are missing or damaged.
            StorageError: the store cannot be read.
        """
        key = place, product, recipe.name
        if key not in self._known:
            layers = list(layers_of(read_call(CallTasks(self._calls, [recipe])[place])[0]))
            self._known[key] = product_figures(product, layers[0], recipe) if len(layers) == 1 else None
        return self._known[key]


_MOMENT = ("iteration", "rank", "attempt", "microbatch", "call", "mode", "quant_type")
_LAYER = ("layer_type", "layer_stack", "layer_idx", "module")


def product_figures(product: str, operands: Mapping[str, torch.Tensor], recipe: Recipe) -> ProductFigures:
    """The figures of one product of one call of a linear layer, in a recipe; `operands` hold both of them.

    Of unrelated operands with zero mean the expected square of the norm is ||A||^2 ||B||^2 / S, with S terms in each
    sum. Raises as `replay_products`.
    """
    matrices = {name: operands[name].detach().reshape(-1, operands[name].shape[-1]) for name in PRODUCTS[product]}
    variants = [_alone(recipe, product, name) for name in matrices]
    found = [one for one in replay_products(matrices, variants) if one.product == product]
    own, length = recipe.products[product], 0
    figures, energy = {}, 1.0
    for (name, matrix), dim, error in zip(matrices.items(), SUMMED[product], found, strict=True):
        x_RS = (matrix if dim else matrix.T).float()
        figures[name] = _figures(own, name, x_RS, alone=error.exact.sqnr, is_transposed=not dim)
        energy *= float(_finite(x_RS).double().square().sum())
        length = x_RS.shape[1]
    squared = found[0].exact.reference_squared
    return ProductFigures(operands=figures, coherence=_decibels(squared * length, energy))


def _fields(call: RecordedCall, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(call.field(name) for name in names)


def _alone(recipe: Recipe, product: str, name: str) -> Recipe:
    """The recipe with the other operand of the product as it is."""
    own = recipe.products[product]
    kept = {one: operand if one == name else OperandRecipe() for one, operand in own.operands.items()}
    return dataclasses.replace(recipe, products={**recipe.products, product: dataclasses.replace(own, operands=kept)})


def _figures(
    product: ProductRecipe, name: str, x_RS: torch.Tensor, *, alone: float | None, is_transposed: bool
) -> OperandFigures:
    known_RS = _finite(x_RS)
    squares_RS = known_RS.double().square()
    sums = [np.sort(squares_RS.sum(dim=dim).numpy(force=True))[::-1] for dim in (1, 0)]
    total = float(squares_RS.sum()) or math.nan
    rows, channels = reversed(sums) if is_transposed else sums
    flushed = crest = math.nan
    if not product.rotation:
        crest = _decibels(_peaks(squares_RS, product.operands[name]), total)
        is_zero = one_operand(product, name, x_RS, seed=0).values == 0
        flushed = float((is_zero & (x_RS != 0)).sum()) / max(1, int((x_RS != 0).sum()))
    return OperandFigures(
        alone=math.nan if alone is None else alone,
        energy={"rows": rows / total, "channels": channels / total},
        crest=crest,
        flushed=flushed,
    )


def _peaks(squares_RS: torch.Tensor, operand: OperandRecipe) -> float:
    """The sum if each were as large as the largest of those that share its scale; 0 of nothing, and without a scale."""
    import torch

    if operand.scheme is None or not squares_RS.numel():
        return 0.0
    scheme = plan_of(operand.scheme, num_dims=2, **operand.options).scheme
    if scheme.scaling is Scaling.NONE:
        return 0.0
    shape = squares_RS.shape
    of_scaling = {Scaling.BLOCK: (scheme.block_rows, scheme.block_size), Scaling.CHANNEL: (1, shape[1])}
    sides = of_scaling.get(scheme.scaling, shape)
    counts = [-(-size // side) for size, side in zip(shape, sides, strict=True)]
    whole = squares_RS.new_zeros([count * side for count, side in zip(counts, sides, strict=True)])
    whole[: shape[0], : shape[1]] = squares_RS
    largest = whole.reshape(counts[0], sides[0], counts[1], sides[1]).amax(dim=(1, 3))
    # The last ones may be short.
    own = [
        (size - side * torch.arange(count, device=whole.device)).clamp(max=side).double()
        for size, side, count in zip(shape, sides, counts, strict=True)
    ]
    return float(own[0] @ largest @ own[1])


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.where(x.isfinite(), 0.0)


def _decibels(one: float, other: float) -> float:
    return _DECIBELS * math.log10(one / other) if one > 0 and other > 0 else math.nan
