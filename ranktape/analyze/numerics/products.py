"""Computes the products of a linear layer by recipes, from its recorded operands, and says how far off they are."""

# Shapes: T = tokens, I = inputs of the layer, O = outputs, R = rows of an operand, C = columns of the product,
# S = what the product sums over.

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from ranktape.analyze.numerics.error_sums import ErrorSums, error_sums
from ranktape.analyze.numerics.quantization.operand import (
    QuantizedOperand,
    difference_from,
    matrix_product,
    one_operand,
    quantized_operand,
)
from ranktape.analyze.numerics.quantization.plan import recipe_plan
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.numerics.recipes.recipe import OPERANDS, PRODUCTS, OperandRecipe, ProductRecipe, Recipe
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch

RECORDED = "recorded"
"""Stands in the place of a recipe's name for what the training itself computed."""

MAX_KEPT = 8
"""Quantised operands that there are at once: the two of a product, and as many for others as one recipe has."""

NEAR = 2**-7
"""Of its norm: so far from a product is one that was recorded in bfloat16, whatever the order of its sums."""

SUMMED = {"output": (1, 1), "grad_input": (1, 0), "grad_weight": (0, 0)}
"""By product: along which dimension of each operand's matrix it sums."""

SIZES = {"input": "TI", "weight": "OI", "grad_output": "TO", "output": "TO", "grad_input": "TI", "grad_weight": "OI"}
"""The dimensions of each matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductError:
    """How far off one product of a layer is."""

    product: str
    """Of `PRODUCTS`."""
    recipe: str
    """By which it was computed; `recorded` for the recorded result."""
    exact: ErrorSums
    """Against the product of the recorded operands in float32. Of all draws together."""
    recorded: ErrorSums | None
    """Against the recorded result; None where that is not known, or is this result itself."""
    sample: int | None = None
    """The place of the sample whose rows alone these are; None for those of all rows."""


def replay_products(
    operands: Mapping[str, torch.Tensor],
    recipes: Sequence[Recipe],
    *,
    recorded: Mapping[str, torch.Tensor] | None = None,
    products: Collection[str] = tuple(PRODUCTS),
    sample_dim: int | None = None,
) -> list[ProductError]:
    """How far off the products of one call of a linear layer are by each recipe, for each product with both operands.

    The products come in the order of `PRODUCTS`; of each first what was recorded, then the recipes as they are given.
    A recipe with stochastic rounding is computed as often as it says, and the sums are those of all draws.

    `operands` are `input [..., I]`, `weight [O, I]` and `grad_output [..., O]`, of any real floating type and all on
    one device; a product that lacks one is left out, as is one that `products` does not name. `recorded` are results
    that the training had, with the elements of `output [..., O]`, `grad_input [..., I]` and `grad_weight [O, I]`;
    others are ignored. NaN and Inf in an operand spoil what they meet, as in a training; what the reference has not as
    a finite number is not compared. Without tokens, outputs and gradients of inputs are empty and gradients of weights
    are 0.

    `sample_dim` is the dimension of `input` and `grad_output` that holds samples: then each sample has the sums of its
    own rows, one after the other, and `grad_weight`, a sum over samples, is left out. Scales stay those of the call.

    An operand is quantised once for all recipes and products that quantise it alike. Memory: beside what was given,
    at most `MAX_KEPT` quantised operands of 2 or 4 bytes an element, two float32 copies of the one that is being
    quantised, and of the product that is being looked at 14 bytes an element.

    Raises:
        UsageError: an operand is not known or not of floating type, the shapes do not belong to one layer, a recorded
            result has another number of elements than its product, or there is no such dimension of samples.
    """
    matrices = _matrices(operands)
    rows: dict[str, list[list[_Job]]] = {
        product: [_draws(product, recipe, matrices=matrices) for recipe in recipes]
        for product, names in PRODUCTS.items()
        if product in products and all(name in matrices for name in names)
        if sample_dim is None or product != "grad_weight"
    }
    kept = _Operands(matrices, jobs=(job for several in rows.values() for draws in several for job in draws))
    split = None if sample_dim is None else _split(operands, sample_dim)
    errors = []
    for product, several in rows.items():
        reference = _Reference(product, matrices, recorded=(recorded or {}).get(product), split=split)
        for sample, own in reference.recorded_errors():
            errors.append(ProductError(product=product, recipe=RECORDED, exact=own, recorded=None, sample=sample))
        found: dict[_Job, list[_Sums]] = {}
        for recipe, draws in zip(recipes, several, strict=True):
            for job in draws:
                if job not in found:
                    found[job] = reference.errors_of(kept.of(job))
            errors += [
                _of_all_draws(product, recipe, sums) for sums in zip(*(found[job] for job in draws), strict=True)
            ]
    return errors


_Sums: TypeAlias = "tuple[int | None, ErrorSums, ErrorSums | None]"
"""Of a sample, or of all rows: against the exact product, and against the recorded one where there is one."""


def _of_all_draws(product: str, recipe: Recipe, sums: Sequence[_Sums]) -> ProductError:
    if len(sums) == 1:
        sample, exact, against = sums[0]
        return ProductError(product=product, recipe=recipe.name, exact=exact, recorded=against, sample=sample)
    known = [against.to_array() for _, _, against in sums if against is not None]
    return ProductError(
        product=product,
        recipe=recipe.name,
        exact=ErrorSums.pooled([exact.to_array() for _, exact, _ in sums]),
        recorded=ErrorSums.pooled(known) if known else None,
        sample=sums[0][0],
    )


_Split: TypeAlias = "tuple[tuple[int, ...], int]"
"""The dimensions of the tokens, and which of them holds samples."""


def _split(operands: Mapping[str, torch.Tensor], sample_dim: int) -> _Split:
    found = {tuple(one.shape[:-1]) for name, one in operands.items() if name != "weight"}
    if len(found) > 1 or not all(0 <= sample_dim < len(sizes) for sizes in found):
        shapes = ", ".join(f"{name} {list(one.shape)}" for name, one in operands.items())
        raise UsageError(f"sample_dim={sample_dim} is no dimension of the tokens of {shapes}: give one that they have")
    return next(iter(found), ()), sample_dim


def _matrices(operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The operands as matrices, in the dimensions of `SIZES`."""
    matrices, sizes = {}, dict[str, tuple[int, str]]()
    for name, tensor in operands.items():
        if name not in OPERANDS:
            raise UsageError(f"{name!r:.60} is no operand of a linear layer: give {', '.join(OPERANDS)}")
        if not tensor.is_floating_point():
            raise UsageError(f"{name} has elements of {tensor.dtype}: products are of floating-point numbers")
        if not tensor.ndim or (name == "weight" and tensor.ndim != 2):  # noqa: PLR2004 - a matrix
            wanted = "[outputs, inputs]" if name == "weight" else "at least one dimension"
            raise UsageError(f"{name} has the shape {list(tensor.shape)}: it needs {wanted}")
        matrix = tensor.detach().reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
        for letter, size in zip(SIZES[name], matrix.shape, strict=True):
            known, owner = sizes.setdefault(letter, (size, name))
            if known != size:
                raise UsageError(
                    f"{name} of shape {list(tensor.shape)} has {size} {_WORDS[letter]} and {owner} {known}: give "
                    "operands of one call"
                )
        matrices[name] = matrix
    return matrices


_WORDS = {"T": "tokens", "I": "inputs", "O": "outputs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A quantised operand, as far as it differs from others."""

    name: str
    """Of the operand."""
    dim: int | None
    """Along which the product sums; None where that makes no difference to the values."""
    recipe: OperandRecipe
    rotation: int
    rotation_seed: int | None
    seed: int
    """Of stochastic rounding, 0 without."""

    @property
    def is_plain(self) -> bool:
        return self.recipe.scheme is None and not self.rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One product of two quantised operands."""

    product: str
    """Of `PRODUCTS`."""
    uses: tuple[_Use, _Use]
    """Of its operands, in their order."""


def _draws(product: str, recipe: Recipe, *, matrices: Mapping[str, torch.Tensor]) -> list[_Job]:
    """The products that a recipe computes in the place of one: several of stochastic rounding."""
    own = recipe.products[product]
    jobs = []
    for seed in recipe.seeds_of(product):
        uses = [
            _use(name, dim, own, is_bf16=_is_bf16(matrices[name]), seed=seed)
            for name, dim in zip(PRODUCTS[product], SUMMED[product], strict=True)
        ]
        jobs.append(_Job(product=product, uses=(uses[0], uses[1])))
    return jobs


def _use(name: str, dim: int, product: ProductRecipe, *, is_bf16: bool, seed: int) -> _Use:
    recipe = product.operands[name]
    if is_bf16 and recipe == OperandRecipe(scheme="bf16"):
        recipe = OperandRecipe()
    is_free = not product.rotation and not recipe.is_stochastic and _is_symmetric(recipe)
    return _Use(
        name=name,
        dim=None if is_free else dim,
        recipe=recipe,
        rotation=product.rotation,
        rotation_seed=product.rotation_seed,
        seed=seed if recipe.is_stochastic else 0,
    )


def _is_symmetric(recipe: OperandRecipe) -> bool:
    """Whether the transposed matrix gets the same values."""
    if recipe.scheme is None:
        return True
    if isinstance(recipe.block_size, tuple):
        return len(set(recipe.block_size)) == 1
    scaling = recipe_plan(recipe.scheme, num_dims=2, **recipe.options).scheme.scaling
    return scaling in {Scaling.NONE, Scaling.TENSOR}


class _Operands:
    """The quantised operands of jobs: made when they are needed, and kept for later ones while there is room."""

    def __init__(self, matrices: Mapping[str, torch.Tensor], *, jobs: Iterable[_Job]) -> None:
        self._matrices = matrices
        self._kept: dict[_Use, QuantizedOperand] = {}
        self._places: dict[_Use, deque[int]] = defaultdict(deque)
        for place, job in enumerate(dict.fromkeys(jobs)):
            for use in job.uses:
                self._places[use].append(place)

    def of(self, job: _Job) -> tuple[QuantizedOperand, QuantizedOperand] | None:
        """Those of the next job, None if both are as they were recorded.

        Jobs come in the order in which they were given, each once.
        """
        for use in job.uses:
            self._places[use].popleft()
        if all(use.is_plain for use in job.uses):
            return None
        a, b = (self._operand(use, dim) for use, dim in zip(job.uses, SUMMED[job.product], strict=True))
        wanted = sorted((use for use in self._kept if self._places[use]), key=lambda use: self._places[use][0])
        self._kept = {use: self._kept[use] for use in wanted[: MAX_KEPT - len(job.uses)]}
        return a, b

    def _operand(self, use: _Use, dim: int) -> QuantizedOperand:
        if use not in self._kept:
            matrix = self._matrices[use.name]
            self._kept[use] = _quantised(matrix.T if use.dim == 0 else matrix, use)
        found = self._kept[use]
        return replace(found, values=found.values.T) if use.dim is None and dim == 0 else found


def _quantised(x_RS: torch.Tensor, use: _Use) -> QuantizedOperand:
    if use.is_plain:
        return _plain_operand(x_RS)
    product = ProductRecipe(operands={use.name: use.recipe}, rotation=use.rotation, rotation_seed=use.rotation_seed)
    return one_operand(product, use.name, x_RS, seed=use.seed)


def _plain_operand(x_RS: torch.Tensor) -> QuantizedOperand:
    """A matrix as it is: in bfloat16 it is multiplied from where it lies, turned over or not."""
    return QuantizedOperand(values=x_RS, factor=1.0) if _is_bf16(x_RS) else quantized_operand(x_RS)


def _is_bf16(matrix: torch.Tensor) -> bool:
    import torch

    return matrix.dtype is torch.bfloat16


class _Reference:
    """A product in float32, and what else results of recipes are compared with."""

    def __init__(
        self,
        product: str,
        matrices: Mapping[str, torch.Tensor],
        *,
        recorded: torch.Tensor | None,
        split: _Split | None = None,
    ) -> None:
        import torch

        self._split = split
        names, dims = PRODUCTS[product], SUMMED[product]
        a, b = (
            _plain_operand(matrices[name] if dim else matrices[name].T) for name, dim in zip(names, dims, strict=True)
        )
        shape = a.values.shape[0], b.values.shape[0]
        self.recorded: torch.Tensor | None = None
        if recorded is not None:
            if recorded.numel() != math.prod(shape):
                raise UsageError(
                    f"the recorded {product} has {recorded.numel()} elements and the product of its operands "
                    f"{math.prod(shape)}: give tensors of one call"
                )
            self.recorded = recorded.detach().to(a.values.device, torch.float32).reshape(shape)
        near = None if self.recorded is None else _exact_near(self.recorded, a, b)
        self.exact = matrix_product(a, b) if near is None else near
        self._base = _finite_bf16(self.exact)

    def recorded_errors(self) -> list[tuple[int | None, ErrorSums]]:
        """Those of the recorded result; none where there is no such."""
        return [] if self.recorded is None else self._sums(self.exact, self.recorded)

    def errors_of(self, operands: tuple[QuantizedOperand, QuantizedOperand] | None) -> list[_Sums]:
        """Those of a product against the exact one and against the recorded one; of None those of the exact one."""
        difference, result = None, self.exact
        if operands is not None:
            difference = difference_from(self._base, *operands)
            result = matrix_product(*operands) if difference is None else self._base
        exact = self._sums(self.exact, result, difference)
        if self.recorded is None:
            return [(sample, sums, None) for sample, sums in exact]
        against = self._sums(self.recorded, result, difference)
        return [(*one, sums) for one, (_, sums) in zip(exact, against, strict=True)]

    def _sums(
        self, reference: torch.Tensor, result: torch.Tensor, rest: torch.Tensor | None = None
    ) -> list[tuple[int | None, ErrorSums]]:
        """Those of all rows, or of the rows of each sample."""
        if self._split is None:
            return [(None, error_sums(reference, result, rest=rest))]
        sizes, dim = self._split
        parts = ([] if one is None else one.unflatten(0, sizes).unbind(dim) for one in (reference, result, rest))
        return [
            (sample, error_sums(want, got, rest=more))
            for sample, (want, got, more) in enumerate(itertools.zip_longest(*parts))
        ]


def _finite_bf16(matrix: torch.Tensor) -> torch.Tensor:
    """Rounded to bfloat16; what is not finite is 0, as its difference from anything would be no number."""
    import torch

    return matrix.to(torch.bfloat16).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _exact_near(recorded: torch.Tensor, a: QuantizedOperand, b: QuantizedOperand) -> torch.Tensor | None:
    """The product by way of a recorded one that is near it, in half the time; None where there is no such way.

    Rounding the difference leaves an error of `NEAR` times 2**-9 at most, of the norm.
    """
    import torch

    base = _finite_bf16(recorded)
    rest = difference_from(base, a, b)
    if rest is None:
        return None
    of_rest, of_base = (torch.linalg.vector_norm(one, dtype=torch.float32) for one in (rest, base))
    return base.to(torch.float32).add_(rest) if of_rest <= NEAR * of_base else None
