"""Says whether a recorded result is what its recorded operands give, within what rounding allows.

Of a linear layer, with u the unit roundoff of the type that was computed in or of the result (the coarser one), v that
of the accumulator, K the terms of a sum and s = |a| |b| the norms of the two vectors that an element is the product of,
an element may be off by

    u (|product| + |result|)                 the product, and the sum with a bias, are rounded
    + 4 s (u / sqrt(K) + sqrt(K) v)          partial sums are rounded, each to its own side

for all but one in a thousand elements: rounding errors of sums grow with the root of their number (Higham and Mary,
SIAM J. Sci. Comput. 41, 2019), and partial sums of K terms are of the size s / sqrt(K) where terms have any sign. No
element may be off by more than u (|product| + |result|) + 2 s (u + K v), which holds whatever the signs are (Higham,
Accuracy and Stability of Numerical Algorithms, 3.1, with the norms in the place of the sum of the magnitudes).

Of attention the whole tensor is compared, by its Frobenius norm: it may be off by 8 times what attention computed step
by step in its type, with every step rounded, is off, and by what rounding the output costs a gradient.

Operands of float32 may have been rounded to TF32 by the device: a result that agrees only so is said to.
"""

# Shapes: R = rows of the first operand, C = rows of the second, S = what the product sums over, B = batch, H = heads,
# G = heads of keys, T = queries, D = elements of a head.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.analyze.numerics.attention import (
    ATTENTION_OPERANDS,
    ATTENTION_PRODUCTS,
    NOISE,
    AttentionForm,
    attention_products,
)
from ranktape.analyze.numerics.quantization.operand import matrix_product, quantized_operand
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS

if TYPE_CHECKING:
    import torch

FEW = 1e-3
"""The share of elements that may be further off than rounding errors of any sign explain."""

STATISTICAL = 4.0
"""How many times the size of what is expected the error of an element may have."""

CHUNK = 1 << 22
"""Elements that are looked at at once."""

TF32 = 2.0**-11
"""Unit roundoff of the operands of a product in TF32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far a recorded result is from the product of its operands."""

    product: str
    """The tensor that it is."""
    deviation: float
    """What it is off over what rounding allows: it agrees up to 1. Infinite where one of both alone is NaN or Inf."""
    relative_error: float
    """The norm of the difference over that of the product; over that of the result where the product is 0."""
    num_elements: int
    """Elements that were compared."""
    is_tf32: bool = False
    """Whether it agrees only if the operands were rounded to TF32."""

    @property
    def is_agreed(self) -> bool:
        """Whether rounding explains the difference."""
        return self.deviation <= 1


def linear_agreements(
    operands: Mapping[str, torch.Tensor],
    recorded: Mapping[str, torch.Tensor],
    *,
    compute_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    num_parts: int = 1,
) -> list[Agreement]:
    """Of each product of a linear layer that was recorded, and whose operands are there, how far off it is.

    `operands` are `input [..., I]`, `weight [O, I]` and `grad_output [..., O]`, `recorded` the results with the
    elements of `output [..., O]`, `grad_input [..., I]` and `grad_weight [O, I]`, `bias [O]` what is added to the
    output. Operands are rounded to the type that was computed in, as autocast does. `num_parts` is how many ranks each
    computed a part of the sums, rounded before they were added. NaN and Inf agree with NaN and Inf, and Inf with what
    is too large for its type; empty results agree.

    Raises:
        UsageError: the shapes are not those of one layer.
    """
    import torch

    work = torch.float64 if compute_dtype is torch.float64 else torch.float32
    matrices = {name: one.detach().to(compute_dtype).to(work).flatten(0, -2) for name, one in operands.items()}
    found = []
    for product, names in PRODUCTS.items():
        if product not in recorded or any(name not in matrices for name in names):
            continue
        first, second = (matrices[name] for name in names)
        a_RS, b_CS = first, second
        if product == "grad_input":
            b_CS = second.T
        elif product == "grad_weight":
            a_RS, b_CS = first.T, second.T
        own = recorded[product].detach()
        result = _Result(
            product=product,
            a_RS=a_RS,
            b_CS=b_CS,
            bias=bias.detach().to(compute_dtype).to(work) if bias is not None and product == "output" else None,
            recorded_RC=own.reshape(len(a_RS), len(b_CS)),
            dtypes=(compute_dtype, own.dtype),
            num_parts=num_parts,
        )
        found.append(result.agreement())
    return found


def attention_agreements(
    operands: Mapping[str, torch.Tensor],
    recorded: Mapping[str, torch.Tensor],
    *,
    form: AttentionForm,
    compute_dtype: torch.dtype,
) -> list[Agreement]:
    """Of attention's output and gradients how far off each recorded one is; all are [B, H, T, D].

    NaN and Inf agree with NaN and Inf at the same places; empty results agree.

    Raises:
        UsageError: as `attention_products`.
    """
    import torch

    work = torch.float64 if compute_dtype is torch.float64 else torch.float32
    rounded = {name: one.detach().to(compute_dtype) for name, one in operands.items()}
    wide = {name: one.to(work) for name, one in rounded.items()}
    exact = attention_products(wide, form=form)
    wanted = {name: one for name, one in recorded.items() if name in exact}
    if not wanted:
        return []
    noise = _noise(rounded, exact, form=form)
    coarsest = max(_unit(compute_dtype), *(_unit(one.dtype) for one in wanted.values()))
    floors = _floors(wide, exact, form=form)
    found = []
    for name, one in wanted.items():
        reference, own = exact[name], one.detach().to(work)
        is_spoilt = ~reference.isfinite() & ~own.isfinite()
        error = _norm((own - reference).masked_fill(is_spoilt, 0.0))
        size = _norm(reference.masked_fill(is_spoilt, 0.0))
        allowed = NOISE * noise[name] + coarsest * (2 * size + floors.get(name, 0.0))
        found.append(
            Agreement(
                product=name,
                deviation=_ratio(error, allowed),
                relative_error=_ratio(error, size or _norm(own)),
                num_elements=own.numel(),
            )
        )
    return found


def _noise(
    rounded: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor], *, form: AttentionForm
) -> dict[str, float]:
    """What attention computed step by step in the type of its operands is off, by the norm of each product."""
    squares = dict.fromkeys(exact, 0.0)
    num_groups = rounded["key"].shape[1]
    grouped = {name: _by_group(one, num_groups) for name, one in rounded.items()}
    wanted = {name: _by_group(one, num_groups) for name, one in exact.items()}
    num_queries, num_keys = rounded["query"].shape[2], rounded["key"].shape[2]
    heads = grouped["query"].shape[1]
    mask = form.mask(num_queries, num_keys, device=rounded["query"].device)
    step = max(1, CHUNK // max(heads * num_queries * num_keys, 1))
    for start in range(0, len(grouped["query"]), step):
        part = {name: one[start : start + step] for name, one in grouped.items()}
        for name, one in _stepwise(part, mask=mask, scale=form.scale).items():
            error = one.to(exact[name].dtype) - wanted[name][start : start + step]
            squares[name] += float(error.nan_to_num(0.0, 0.0, 0.0).double().square().sum())
    return {name: math.sqrt(square) for name, square in squares.items()}


def _by_group(tensor_BHTD: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[batch * groups of heads, heads of a group, tokens, elements]."""
    grouped: torch.Tensor = tensor_BHTD.unflatten(1, (num_groups, -1))
    return grouped.flatten(0, 1)


def _stepwise(
    part: Mapping[str, torch.Tensor], *, mask: torch.Tensor | None, scale: float | None
) -> dict[str, torch.Tensor]:
    """Attention in plain steps, whose results are all rounded to the type of the operands."""
    import torch

    grad_output = part.get("grad_output")
    leaves = [part[name].detach().requires_grad_(grad_output is not None) for name in ATTENTION_OPERANDS[:3]]
    query, key, value = leaves
    with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
        scores = (query @ key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        weights = scores.softmax(-1)
        if mask is not None:  # of a query that sees no key they are NaN
            weights = weights.masked_fill(~mask, 0.0)
        output = weights @ value
    if grad_output is None:
        return {"output": output}
    grads = torch.autograd.grad(output, leaves, grad_output.to(output.dtype))
    return dict(zip(ATTENTION_PRODUCTS, (output.detach(), *grads), strict=True))


def _floors(
    wide: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor], *, form: AttentionForm
) -> dict[str, float]:
    """What gradients of query and key may be off, in units of roundoff, as the output that they subtract is rounded.

    FlashAttention (arXiv 2205.14135) takes the sum over a head of output times grad_output from what is the same sum of
    weights: where both are nearly the same, hardly anything but rounding is left.
    """
    if "grad_output" not in wide:
        return {}
    query, key = wide["query"], wide["key"]
    scale = query.shape[-1] ** -0.5 if form.scale is None else form.scale
    products_BHT = wide["grad_output"].norm(dim=-1) * exact["output"].norm(dim=-1) * scale
    longest = key.norm(dim=-1).nan_to_num(0.0).amax() if key.numel() else key.new_zeros(())
    return {
        "grad_query": _norm(products_BHT) * float(longest),
        "grad_key": _norm(products_BHT * query.norm(dim=-1)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """A recorded product, and what it is the product of."""

    product: str
    a_RS: torch.Tensor
    b_CS: torch.Tensor
    bias: torch.Tensor | None
    recorded_RC: torch.Tensor
    dtypes: tuple[torch.dtype, torch.dtype]
    """What was computed in, and that of the result."""
    num_parts: int

    def agreement(self) -> Agreement:
        """How far off it is."""
        import torch

        if self.a_RS.dtype is torch.float64:
            product_RC = self.a_RS @ self.b_CS.T
        else:
            product_RC = matrix_product(quantized_operand(self.a_RS), quantized_operand(self.b_CS))
        found = self._compared(product_RC, lost=0.0)
        may_be_tf32 = self.dtypes == (torch.float32, torch.float32)
        if found.is_agreed or not may_be_tf32:
            return found
        again = self._compared(product_RC, lost=2 * TF32)
        return dataclasses.replace(again, is_tf32=True) if again.is_agreed else found

    def _compared(self, product_RC: torch.Tensor, *, lost: float) -> Agreement:
        """As what is `lost` of both operands, in parts of them, has it."""
        norms_R, norms_C = self.a_RS.norm(dim=1), self.b_CS.norm(dim=1)
        num_summed = max(self.a_RS.shape[1], 1)
        accumulator = _unit(self.a_RS.dtype)
        unit = max(map(_unit, self.dtypes))
        each = (math.sqrt(self.num_parts) * unit + lost) / math.sqrt(num_summed)
        likely = STATISTICAL * (each + math.sqrt(num_summed) * accumulator)
        most = 2 * (self.num_parts * unit + lost + num_summed * accumulator)
        smallest, limit = max(map(_smallest, self.dtypes)), min(map(_largest, self.dtypes))
        num_beyond, largest, error_squared, squared, own_squared = 0, 0.0, 0.0, 0.0, 0.0
        for rows in _parts(product_RC.shape):
            reference = product_RC[rows] if self.bias is None else product_RC[rows] + self.bias
            own = self.recorded_RC[rows].to(reference.dtype)
            is_spoilt = ~own.isfinite() & (~reference.isfinite() | (reference.abs() >= limit))
            error = (own - reference).masked_fill_(is_spoilt, 0.0)
            rounding = unit * (product_RC[rows].abs() + reference.abs()) + smallest
            scale = norms_R[rows, None] * norms_C
            distance = error.abs()
            num_beyond += int((~(distance <= rounding + likely * scale) & ~is_spoilt).sum())
            ratios = (distance / (rounding + most * scale)).masked_fill_(is_spoilt, 0.0)
            largest = max(largest, float(ratios.nan_to_num(math.inf).amax()))
            error_squared += _square(error)
            squared += _square(reference.masked_fill(is_spoilt, 0.0))
            own_squared += _square(own.masked_fill(is_spoilt, 0.0))
        return Agreement(
            product=self.product,
            deviation=max(largest, num_beyond / max(FEW * product_RC.numel(), 1.0)),
            relative_error=_ratio(math.sqrt(error_squared), math.sqrt(squared or own_squared)),
            num_elements=product_RC.numel(),
        )


def _parts(shape: torch.Size) -> Iterator[slice]:
    """The rows of a matrix, so many at once."""
    step = max(1, CHUNK // max(shape[1], 1))
    for start in range(0, shape[0] if shape[1] else 0, step):
        yield slice(start, start + step)


def _unit(dtype: torch.dtype) -> float:
    import torch

    return torch.finfo(dtype).eps / 2


def _largest(dtype: torch.dtype) -> float:
    import torch

    return torch.finfo(dtype).max


def _smallest(dtype: torch.dtype) -> float:
    """What a tiny result may be off: below the normal numbers float16 has fixed steps, and of others may be 0."""
    import torch

    limits = torch.finfo(dtype)
    return limits.smallest_normal * (limits.eps if dtype is torch.float16 else 1.0)


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())


def _norm(tensor: torch.Tensor) -> float:
    return math.sqrt(_square(tensor))


def _ratio(error: float, of: float) -> float:
    if math.isnan(error) or math.isnan(of):
        return math.inf
    return error / of if of else math.inf if error else 0.0
