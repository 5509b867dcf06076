"""Gives the parts of a recipe: for each product of a layer, how both of its operands are quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PRODUCTS: Mapping[str, tuple[str, str]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
"""The products of a linear layer by the tensor that each gives, and the operands of each.

In matrices of T tokens, I inputs and O outputs: output_TO = input_TI @ weight_OI.T, grad_input_TI = grad_output_TO @
weight_OI, grad_weight_OI = grad_output_TO.T @ input_TI.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandRecipe:
    """How one operand of a product is quantised: options of `quantize`, along what the product sums over."""

    scheme: str | None = None
    """A scheme or format of `quantize`; None leaves the operand as it is."""
    scaling: str | None = None
    """Which elements share a scale, where that is not the scheme's own; `channel` is one for each token or output."""
    block_size: int | tuple[int, int] | None = None
    """Elements of a block along the sum, or of a tile: across it and along it."""
    scale_format: str | None = None
    """What scales of blocks are stored in, where that is not the scheme's own: e8m0, fp8_e4m3, ue5m3 or fp32."""
    scale_rule: str | None = None
    """How scales follow from largest magnitudes, where that is not the scheme's own."""
    four_over_six: bool = False
    """Whether each block of 4-bit floats has the better of two scales: that for 6 and that for 4 (arXiv 2512.02010)."""
    rounding: str | None = None
    """Where that is not the format's own; `stochastic` draws from the seed of the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRecipe:
    """How a product is computed."""

    operands: Mapping[str, OperandRecipe]
    """Of each of the two operands, by name."""
    rotation: int = 0
    """Size of the Hadamard matrices that rotate both operands along the sum before they are quantised; 0: none do."""
    rotation_seed: int | None = None
    """Of the random signs of the rotation; None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HighPrecision:
    """The layers that a recipe leaves in bf16."""

    first_layers: int = 0
    """So many at the start of the model."""
    last_layers: int = 0
    """So many at its end."""
    modules: tuple[str, ...] = ()
    """Those whose dotted path matches one of these patterns, with * and ?."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the three products of every linear layer are computed."""

    name: str
    """The word in options, tables and plots."""
    source: str
    """The paper or specification that it follows."""
    products: Mapping[str, ProductRecipe]
    """By the names of `PRODUCTS`."""
    high_precision: HighPrecision = field(default_factory=HighPrecision)
    """What is left in bf16."""
    seed: int = 0
    """Of stochastic rounding."""
    draws: int = 1
    """How often a product with stochastic rounding is computed, each time with other draws."""
