"""Recomputes the products of a linear layer from its recorded operands by recipes, and measures their errors."""

# Shapes: T = tokens, I = inputs of the layer, O = outputs, R = rows of an operand, C = columns of the product,
# S = the dimension that the product sums over.

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
    named_operand,
    quantized_operand,
)
from ranktape.analyze.numerics.quantization.plan import recipe_plan
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.numerics.recipes.recipe import OPERANDS, PRODUCTS, OperandRecipe, ProductRecipe, Recipe
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch

RECORDED = "recorded"
"""The name in place of a recipe's for the result that the training recorded."""

MAX_CACHED = 8
"""Maximum number of quantised operands in memory: two of the current product, and the six of one recipe."""

NEAR = 2**-7
"""Maximum distance of a product that was recorded in bfloat16 from the exact one, relative to its norm."""

SUMMED = {"output": (1, 1), "grad_input": (1, 0), "grad_weight": (0, 0)}
"""The dimension of each operand's matrix that a product sums over."""

SIZES = {"input": "TI", "weight": "OI", "grad_output": "TO", "output": "TO", "grad_input": "TI", "grad_weight": "OI"}
"""The dimensions of each matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductError:
    """The errors of one product of a layer."""

    product: str
    """Name of the product, one of `PRODUCTS`."""
    recipe: str
    """Name of the recipe; `recorded` for the recorded result."""
    exact: ErrorSums
    """Errors against the product of the recorded operands in float32, over all draws."""
    recorded: ErrorSums | None
    """Errors against the recorded result; None if it is not known, or is this result."""
    sample: int | None = None
    """Index of the sample whose rows were compared; None for all rows."""


def replay_products(
    operands: Mapping[str, torch.Tensor],
    recipes: Sequence[Recipe],
    *,
    recorded: Mapping[str, torch.Tensor] | None = None,
    products: Collection[str] = tuple(PRODUCTS),
    sample_dim: int | None = None,
) -> list[ProductError]:
    """The errors of the products of one call of a linear layer, computed by each recipe.

    Products are in the order of `PRODUCTS`; for each, the recorded result is first, followed by the recipes in their
    order. A recipe with stochastic rounding is drawn as often as it requests, and sums are over all draws.

    `operands` are `input [..., I]`, `weight [O, I]` and `grad_output [..., O]`, of any real floating-point dtype and on
    one device. Products without both operands, and those that are not in `products`, are left out. `recorded` are
    results of the training, with the elements of `output [..., O]`, `grad_input [..., I]` and `grad_weight [O, I]`;
    other names are ignored. NaN and Inf propagate as in training, and positions where the reference is not finite are
    not compared. Without tokens, outputs and gradients of inputs are empty, and gradients of weights are 0.

    `sample_dim` is the dimension of samples of `input` and `grad_output`. With it, there are errors for each sample, in
    order, computed over its rows; `grad_weight`, a sum over samples, is left out. Scales are still those of the call.

    An operand is quantised once for all recipes and products that quantise it in the same way. Besides the arguments,
    memory holds at most `MAX_CACHED` quantised operands of 2 or 4 bytes per element, two float32 copies of the operand
    that is being quantised, and 14 bytes per element of the current product.

    Raises:
        UsageError: an operand is unknown or not of a floating-point dtype, the shapes do not belong to one layer, a
            recorded result has another number of elements than its product, or there is no dimension `sample_dim`.
    """
    matrices = _matrices(operands)
    rows: dict[str, list[list[_Job]]] = {
        product: [_draws(product, recipe, matrices=matrices) for recipe in recipes]
        for product, names in PRODUCTS.items()
        if product in products and all(name in matrices for name in names)
        if sample_dim is None or product != "grad_weight"
    }
    cached = _Operands(matrices, jobs=(job for recipe_jobs in rows.values() for draws in recipe_jobs for job in draws))
    split = None if sample_dim is None else _split(operands, sample_dim)
    errors = []
    for product, recipe_jobs in rows.items():
        reference = _Reference(product, matrices, recorded=(recorded or {}).get(product), split=split)
        for sample, sums in reference.recorded_errors():
            errors.append(ProductError(product=product, recipe=RECORDED, exact=sums, recorded=None, sample=sample))
        errors_of_job: dict[_Job, list[_Sums]] = {}
        for recipe, draws in zip(recipes, recipe_jobs, strict=True):
            for job in draws:
                if job not in errors_of_job:
                    errors_of_job[job] = reference.errors(cached.of(job))
            errors += [
                _pooled_draws(product, recipe, sums)
                for sums in zip(*(errors_of_job[job] for job in draws), strict=True)
            ]
    return errors


_Sums: TypeAlias = "tuple[int | None, ErrorSums, ErrorSums | None]"
"""The index of a sample or None for all rows, and the errors against the exact product and the recorded one, if any."""


def _pooled_draws(product: str, recipe: Recipe, sums: Sequence[_Sums]) -> ProductError:
    if len(sums) == 1:
        sample, exact, against = sums[0]
        return ProductError(product=product, recipe=recipe.name, exact=exact, recorded=against, sample=sample)
    recorded_sums = [against.to_array() for _, _, against in sums if against is not None]
    return ProductError(
        product=product,
        recipe=recipe.name,
        exact=ErrorSums.pooled([exact.to_array() for _, exact, _ in sums]),
        recorded=ErrorSums.pooled(recorded_sums) if recorded_sums else None,
        sample=sums[0][0],
    )


_Split: TypeAlias = "tuple[tuple[int, ...], int]"
"""The sizes of the dimensions of tokens, and the index of that of samples."""


def _split(operands: Mapping[str, torch.Tensor], sample_dim: int) -> _Split:
    token_shapes = {tuple(tensor.shape[:-1]) for name, tensor in operands.items() if name != "weight"}
    if len(token_shapes) > 1 or not all(0 <= sample_dim < len(sizes) for sizes in token_shapes):
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in operands.items())
        raise UsageError(f"sample_dim={sample_dim} is no dimension of the tokens of {shapes}: give one that they have")
    return next(iter(token_shapes), ()), sample_dim


def _matrices(operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The operands as matrices, in the dimensions of `SIZES`."""
    matrices, sizes = {}, dict[str, tuple[int, str]]()
    for name, tensor in operands.items():
        if name not in OPERANDS:
            raise UsageError(f"{name!r:.60} is no operand of a linear layer: give {', '.join(OPERANDS)}")
        if not tensor.is_floating_point():
            raise UsageError(f"{name} has elements of {tensor.dtype}: products are of floating-point numbers")
        if not tensor.ndim or (name == "weight" and tensor.ndim != 2):  # noqa: PLR2004 - a matrix
            expected = "[outputs, inputs]" if name == "weight" else "at least one dimension"
            raise UsageError(f"{name} has the shape {list(tensor.shape)}: it needs {expected}")
        matrix = tensor.detach().reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
        for letter, size in zip(SIZES[name], matrix.shape, strict=True):
            expected_size, owner = sizes.setdefault(letter, (size, name))
            if expected_size != size:
                raise UsageError(
                    f"{name} of shape {list(tensor.shape)} has {size} {_WORDS[letter]} and {owner} {expected_size}: "
                    "give operands of one call"
                )
        matrices[name] = matrix
    return matrices


_WORDS = {"T": "tokens", "I": "inputs", "O": "outputs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """The parameters that determine a quantised operand."""

    name: str
    """Name of the operand."""
    dim: int | None
    """Dimension that the product sums over; None if the values do not depend on it."""
    recipe: OperandRecipe
    rotation: int
    rotation_seed: int | None
    seed: int
    """Seed of stochastic rounding; 0 without."""

    @property
    def is_plain(self) -> bool:
        return self.recipe.scheme is None and not self.rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One product of two quantised operands."""

    product: str
    """Name of the product, one of `PRODUCTS`."""
    uses: tuple[_Use, _Use]
    """The operands, in the order of `PRODUCTS`."""


def _draws(product: str, recipe: Recipe, *, matrices: Mapping[str, torch.Tensor]) -> list[_Job]:
    """The products that a recipe computes for one product: one, or one for each draw of stochastic rounding."""
    product_recipe = recipe.products[product]
    jobs = []
    for seed in recipe.seeds_of(product):
        uses = [
            _use(name, dim, product_recipe, is_bf16=_is_bf16(matrices[name]), seed=seed)
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
    """Whether quantising the transposed matrix gives the same values."""
    if recipe.scheme is None:
        return True
    if isinstance(recipe.block_size, tuple):
        return len(set(recipe.block_size)) == 1
    scaling = recipe_plan(recipe.scheme, num_dims=2, **recipe.options).scheme.scaling
    return scaling in {Scaling.NONE, Scaling.TENSOR}


class _Operands:
    """The quantised operands of jobs, computed on demand and cached for later jobs up to `MAX_CACHED`."""

    def __init__(self, matrices: Mapping[str, torch.Tensor], *, jobs: Iterable[_Job]) -> None:
        self._matrices = matrices
        self._cache: dict[_Use, QuantizedOperand] = {}
        self._positions: dict[_Use, deque[int]] = defaultdict(deque)
        for position, job in enumerate(dict.fromkeys(jobs)):
            for use in job.uses:
                self._positions[use].append(position)

    def of(self, job: _Job) -> tuple[QuantizedOperand, QuantizedOperand] | None:
        """The operands of the next job; None if both are the recorded ones.

        Jobs are taken once each, in the order in which they were given.
        """
        for use in job.uses:
            self._positions[use].popleft()
        if all(use.is_plain for use in job.uses):
            return None
        a, b = (self._operand(use, dim) for use, dim in zip(job.uses, SUMMED[job.product], strict=True))
        reusable = sorted((use for use in self._cache if self._positions[use]), key=lambda use: self._positions[use][0])
        self._cache = {use: self._cache[use] for use in reusable[: MAX_CACHED - len(job.uses)]}
        return a, b

    def _operand(self, use: _Use, dim: int) -> QuantizedOperand:
        if use not in self._cache:
            matrix = self._matrices[use.name]
            self._cache[use] = _quantised(matrix.T if use.dim == 0 else matrix, use)
        operand = self._cache[use]
        return replace(operand, values=operand.values.T) if use.dim is None and dim == 0 else operand


def _quantised(x_RS: torch.Tensor, use: _Use) -> QuantizedOperand:
    if use.is_plain:
        return _plain_operand(x_RS)
    product = ProductRecipe(operands={use.name: use.recipe}, rotation=use.rotation, rotation_seed=use.rotation_seed)
    return named_operand(product, use.name, x_RS, seed=use.seed)


def _plain_operand(x_RS: torch.Tensor) -> QuantizedOperand:
    """An unquantised operand. A bfloat16 matrix is multiplied without a copy, transposed or not."""
    return QuantizedOperand(values=x_RS, factor=1.0) if _is_bf16(x_RS) else quantized_operand(x_RS)


def _is_bf16(matrix: torch.Tensor) -> bool:
    import torch

    return matrix.dtype is torch.bfloat16


class _Reference:
    """The references of a product: the product of the recorded operands in float32, and the recorded result."""

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
        from_recorded = None if self.recorded is None else _exact_from_recorded(self.recorded, a, b)
        self.exact = matrix_product(a, b) if from_recorded is None else from_recorded
        self._base = _finite_bf16(self.exact)

    def recorded_errors(self) -> list[tuple[int | None, ErrorSums]]:
        """The errors of the recorded result against the exact product; empty if there is none."""
        return [] if self.recorded is None else self._sums(self.exact, self.recorded)

    def errors(self, operands: tuple[QuantizedOperand, QuantizedOperand] | None) -> list[_Sums]:
        """The errors of a product against the exact and the recorded one; None stands for the exact product."""
        difference, result = None, self.exact
        if operands is not None:
            difference = difference_from(self._base, *operands)
            result = matrix_product(*operands) if difference is None else self._base
        exact = self._sums(self.exact, result, difference)
        if self.recorded is None:
            return [(sample, sums, None) for sample, sums in exact]
        against = self._sums(self.recorded, result, difference)
        return [(*entry, sums) for entry, (_, sums) in zip(exact, against, strict=True)]

    def _sums(
        self, reference: torch.Tensor, result: torch.Tensor, residual: torch.Tensor | None = None
    ) -> list[tuple[int | None, ErrorSums]]:
        """The errors over all rows, or over the rows of each sample."""
        if self._split is None:
            return [(None, error_sums(reference, result, residual=residual))]
        sizes, dim = self._split
        parts = (
            [] if tensor is None else tensor.unflatten(0, sizes).unbind(dim) for tensor in (reference, result, residual)
        )
        return [
            (sample, error_sums(expected, actual, residual=part))
            for sample, (expected, actual, part) in enumerate(itertools.zip_longest(*parts))
        ]


def _finite_bf16(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix rounded to bfloat16, with 0 for non-finite elements, from which no difference can be computed."""
    import torch

    return matrix.to(torch.bfloat16).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _exact_from_recorded(recorded: torch.Tensor, a: QuantizedOperand, b: QuantizedOperand) -> torch.Tensor | None:
    """The exact product as a recorded one plus a small difference, in half the time; None if that is not possible.

    Rounding the difference causes an error of at most `NEAR` times 2**-9, relative to the norm.
    """
    import torch

    base = _finite_bf16(recorded)
    residual = difference_from(base, a, b)
    if residual is None:
        return None
    residual_norm, base_norm = (torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in (residual, base))
    return base.to(torch.float32).add_(residual) if residual_norm <= NEAR * base_norm else None
