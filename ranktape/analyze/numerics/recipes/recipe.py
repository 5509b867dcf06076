"""The parts of a recipe: how the two operands of each product of a layer are quantised."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ranktape.analyze.numerics.formats import Coding, Format
from ranktape.analyze.numerics.quantization.plan import QuantizePlan, recipe_plan
from ranktape.errors import UsageError, nearest

PRODUCTS: Mapping[str, tuple[str, str]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
"""The operands of the products of a linear layer; each product is named after its result.

With T tokens, I inputs and O outputs: output_TO = input_TI @ weight_OI.T, grad_input_TI = grad_output_TO @ weight_OI,
grad_weight_OI = grad_output_TO.T @ input_TI.
"""

OPERANDS = ("input", "weight", "grad_output")
"""The operands of the products; each occurs in two products."""

WIDE_BITS = 16
"""Bits of an element that is not quantised, which is bfloat16 in low-precision training."""

MAX_DRAWS = 1024

MAX_ROTATION = 4096
"""The largest rotation; operands are padded to a multiple of it, so more would only cost memory and time."""

MAX_PRESCALE = 2.0**64
"""The largest prescale; with a larger one, the inverse factor could leave the range of float32."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""A name that can be used in comma-separated options, in a file without quotes, and in a tag of records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandRecipe:
    """How one operand of a product is quantised, along the dimension that the product sums over.

    All fields except `prescale` are options of `quantize`, where None means the default of the scheme or format.

    Raises:
        UsageError: an option is unknown, out of range, or has no effect on the scheme.
    """

    scheme: str | None = None
    """A scheme or format of `quantize`; None for no quantisation."""
    scaling: str | None = None
    """The elements that share a scale; with `channel` these are the elements of a row of the operand."""
    block_size: int | tuple[int, int] | None = None
    """Elements of a block along the sum, or the sides of a tile across and along the sum."""
    scale_format: str | None = None
    """The format of the scales of blocks: e8m0, fp8_e4m3, ue5m3 or fp32."""
    scale_rule: str | None = None
    """How scales follow from largest magnitudes."""
    four_over_six: bool = False
    """Whether each block of NVFP4 has the better of two scales: the scale for 6, and 1.5 times as much, for 4.

    The better scale has the smaller squared error; if both are equal, it is the scale for 6. The tensor's scale is for
    256 instead of 448, so that 1.5 times the largest scale of a block is an e4m3 number (arXiv 2512.02010).
    """
    rounding: str | None = None
    """The rounding of the elements; `stochastic` draws from the seed of the recipe."""
    prescale: float = 1.0
    """The factor of elements before quantisation; the product is divided by it."""

    def __post_init__(self) -> None:
        """Check the options."""
        _check_prescale(self.prescale)
        if self.scheme is not None:
            self._plan()
        elif self.changed:
            raise UsageError(
                f"{', '.join(self.changed)} has no effect on an operand that is left as it is: give a scheme"
            )

    @property
    def changed(self) -> dict[str, Any]:
        """The fields other than the scheme that differ from their defaults."""
        fields = [field for field in dataclasses.fields(self) if field.name != "scheme"]
        return {field.name: value for field in fields if (value := getattr(self, field.name)) != field.default}

    @property
    def options(self) -> dict[str, Any]:
        """The options of `quantize` that differ from their defaults, without the scheme."""
        return {name: value for name, value in self.changed.items() if name != "prescale"}

    @property
    def is_stochastic(self) -> bool:
        """Whether the values depend on the draws."""
        return self.rounding == "stochastic"

    @property
    def bits(self) -> float:
        """Stored bits per element, including its share of the scale of its block; 16 if it is not quantised.

        Scales of tensors and channels are left out, because their share depends on the size of the tensor.
        """
        if self.scheme is None:
            return WIDE_BITS
        scheme = self._plan().scheme
        if scheme.scale is None:
            return scheme.element.num_bits
        return scheme.element.num_bits + scheme.scale.num_bits / (scheme.block_rows * scheme.block_size)

    @property
    def speed(self) -> int:
        """The speed at which hardware multiplies such elements, relative to bfloat16.

        It is 2 for 8 and 6 bits, 4 for 4 bits, and 1 for elements that no matrix unit multiplies as they are stored.
        """
        return 1 if self.scheme is None else _speed(self._plan().scheme.element)

    def _plan(self) -> QuantizePlan:
        assert self.scheme is not None, "the caller has looked"
        return recipe_plan(self.scheme, num_dims=2, **self.options)


def _speed(element: Format) -> int:
    if element.coding is Coding.TABLE:
        return 1
    return 4 if element.num_bits == 4 else 2 if element.num_bits <= 8 else 1  # noqa: PLR2004 - widths in bits


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRecipe:
    """How a product is computed.

    Raises:
        UsageError: the rotation is not 0 or a power of two from 2 to `MAX_ROTATION`, or has a seed although it is 0.
    """

    operands: Mapping[str, OperandRecipe]
    """The recipes of the two operands, by name."""
    rotation: int = 0
    """Size of the Hadamard matrices that rotate both operands along the sum before quantisation; 0 for no rotation."""
    rotation_seed: int | None = None
    """The seed of the random signs of the rotation; None for no signs."""

    def __post_init__(self) -> None:
        """Check the rotation; `Recipe` checks the names of the operands."""
        size = _integer(self.rotation, name="rotation", least=0)
        if size == 1 or size & (size - 1) or size > MAX_ROTATION:
            raise UsageError(f"rotation is {size}: give a power of two from 2 to {MAX_ROTATION}, or 0 for none")
        if self.rotation_seed is not None:
            _integer(self.rotation_seed, name="rotation_seed", least=0)
            if not size:
                raise UsageError(f"rotation_seed is {self.rotation_seed}, and there is no rotation: give its size")

    @property
    def is_stochastic(self) -> bool:
        """Whether the product depends on the draws."""
        return any(operand.is_stochastic for operand in self.operands.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class HighPrecision:
    """The layers that a recipe leaves in bf16.

    Raises:
        UsageError: a number of layers is negative, a fraction is not between 0 and 1, or a pattern is not a string.
    """

    first_layers: int | float = 0
    """Number of layers at the start of the model; a float is a fraction of all layers, rounded to whole layers."""
    last_layers: int | float = 0
    """Number or fraction of layers at the end of the model."""
    modules: tuple[str, ...] = ()
    """Patterns with * and ?; modules whose dotted path matches one stay in bf16."""
    outside: bool = False
    """Whether linear layers outside the stack of layers, such as the head, stay in bf16; ignored without a stack."""

    def __post_init__(self) -> None:
        """Check the numbers and the patterns."""
        _check_truth(self.outside, name="outside")
        for name in ("first_layers", "last_layers"):
            _check_layers(getattr(self, name), name=name)
        _check_patterns(self.modules)

    def holds_for(self, module: str, *, layer_idx: int, num_layers: int) -> bool:
        """Whether a linear layer stays in bf16.

        `module` is its dotted path, `layer_idx` the index of the layer that contains it, -1 outside the stack of
        layers. `num_layers` is the number of layers in the stack, 0 if the model has none.
        """
        if any(fnmatchcase(module, pattern) for pattern in self.modules):
            return True
        if layer_idx < 0:
            return self.outside and num_layers > 0
        first, last = (
            number if isinstance(number, int) else round(number * num_layers)
            for number in (self.first_layers, self.last_layers)
        )
        return layer_idx < first or layer_idx >= num_layers - last


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the three products of every linear layer are computed.

    Raises:
        UsageError: the name has characters other than letters, digits, _ . and -; a product or an operand is missing,
            unknown or in another order; or a number is out of range.
    """

    name: str
    """Name in options, tables and plots."""
    source: str
    """The paper or specification that the recipe follows."""
    products: Mapping[str, ProductRecipe]
    """The products by the names in `PRODUCTS`, with operands in the order given there."""
    high_precision: HighPrecision = field(default_factory=HighPrecision)
    """The layers that stay in bf16."""
    seed: int = 0
    """The seed of stochastic rounding."""
    draws: int = 1
    """How often a product with stochastic rounding is computed, each time with different draws."""

    def __post_init__(self) -> None:
        """Check that all products and operands are present and no others."""
        _check_name(self.name)
        _check_names(self.products, PRODUCTS, what=f"recipe {self.name}, products")
        for product, operands in PRODUCTS.items():
            named = self.products[product].operands
            _check_names(named, operands, what=f"recipe {self.name}, product {product}")
            if tuple(named) != operands:
                raise UsageError(f"recipe {self.name}, product {product}: give {operands[0]} before {operands[1]}")
        _integer(self.seed, name="seed", least=0)
        if _integer(self.draws, name="draws", least=1) > MAX_DRAWS:
            raise UsageError(f"draws is {self.draws}: at most {MAX_DRAWS} are computed")

    def of_layer(self, module: str, *, layer_idx: int, num_layers: int) -> Recipe:
        """The recipe of a layer: this one, or bf16 in all products if this one leaves the layer in bf16."""
        if not self.high_precision.holds_for(module, layer_idx=layer_idx, num_layers=num_layers):
            return self
        return dataclasses.replace(
            self, products=products_of(OperandRecipe(scheme="bf16")), high_precision=HighPrecision(), draws=1
        )

    def seeds_of(self, product: str) -> range:
        """The seeds with which a product is computed: one for each draw, or a single one if it is not stochastic."""
        return range(self.seed, self.seed + (self.draws if self.products[product].is_stochastic else 1))

    @property
    def bits(self) -> float:
        """The mean of `OperandRecipe.bits` over the operands of all products."""
        return statistics.fmean(
            operand.bits for product in self.products.values() for operand in product.operands.values()
        )

    @property
    def speed(self) -> float:
        """The speed of the three products together, relative to bfloat16, on hardware that supports the formats.

        If the operands of a product have different speeds, the slower one counts.
        """
        slowest = (min(operand.speed for operand in product.operands.values()) for product in self.products.values())
        return statistics.harmonic_mean(list(slowest))


def products_of(
    default: OperandRecipe | None = None,
    *,
    rotations: Mapping[str, tuple[int, int | None]] | None = None,
    **operands: OperandRecipe,
) -> dict[str, ProductRecipe]:
    """The three products with the same recipe of an operand in each: that with its name in `operands`, or `every`.

    `rotations` has the size and the seed of the signs by product.
    """
    named = {name: operand for name in OPERANDS if (operand := operands.get(name, default)) is not None}
    products = {}
    for product, names in PRODUCTS.items():
        size, seed = (rotations or {}).get(product, (0, None))
        chosen = {name: named[name] for name in names}
        products[product] = ProductRecipe(operands=chosen, rotation=size, rotation_seed=seed)
    return products


def _check_names(names: Collection[str], expected: Collection[str], *, what: str) -> None:
    for name in names:
        if name not in expected:
            raise UsageError(f"{what}: there is no {name!r:.60}: {nearest(str(name), expected)}")
    for name in expected:
        if name not in names:
            raise UsageError(f"{what}: {name} is missing")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{name!r:.60} is no name of a recipe: use a letter, then letters, digits, _ . and -")


def _check_patterns(patterns: Any) -> None:
    if not isinstance(patterns, tuple) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise UsageError(f"modules is {patterns!r:.60}: give a tuple (in a file a list) of patterns, as *head")


def _check_prescale(factor: Any) -> None:
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not is_number or not 1 / MAX_PRESCALE <= factor <= MAX_PRESCALE:
        raise UsageError(f"prescale is {factor!r:.60}: give a number between 2**-64 and 2**64")


def _check_truth(value: Any, *, name: str) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r:.60}: give true or false")


def _check_layers(number: Any, *, name: str) -> None:
    if isinstance(number, float):
        if not 0 < number < 1:
            raise UsageError(
                f"{name} is {number}: a part of the layers is above 0 and below 1, a number of them is whole"
            )
    else:
        _integer(number, name=name, least=0)


def _integer(number: Any, *, name: str, least: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise UsageError(f"{name} is {number!r:.60}: give a whole number, {least} or more")
    return number
