"""Quantises what is multiplied, as a recipe says, and multiplies it.

Values alone, fast, whole or without the factor that a product can take afterwards. Products are exact, as fast as the
machine multiplies bfloat16 where that loses nothing.
"""

# Shapes: R = rows of an operand, S = what the product sums over; A, B = rows of the first and the second operand,
# C = rows of the second, which are the columns of the product.

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

import numpy as np

from ranktape.analyze.numerics.formats import FORMATS, Coding, Rounding
from ranktape.analyze.numerics.pieces import array_of, check_readable, each
from ranktape.analyze.numerics.quantization.kernels import (
    INFINITY,
    MAGNITUDE,
    add_squared_errors,
    find_largest,
    quantize_rows,
    rounding_of,
)
from ranktape.analyze.numerics.quantization.plan import (
    OperandOptions,
    QuantizeOptions,
    QuantizePlan,
    check_rotation_options,
    plan_of,
    recipe_plan,
)
from ranktape.analyze.numerics.quantization.quantizer import ScaleGroups, quantize_planned
from ranktape.analyze.numerics.quantization.rotation import rotated
from ranktape.analyze.numerics.quantization.scales import GroupScales, factors_of
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.numerics.recipes.recipe import OPERANDS, ProductRecipe
from ranktape.errors import UsageError
from ranktape.storage.format.dtypes import HALF_NBYTES

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


def quantized_values(x: torch.Tensor, scheme: str, **options: Unpack[QuantizeOptions]) -> torch.Tensor:
    """The `values` that `quantize` gives, bit for bit, in the type of `x`.

    Without codes, counts and float64 numbers for every element: in less time and memory on a CPU, in the threads of
    torch.

    Raises:
        UsageError: as `quantize`.
    """
    return _values_and_factor(x, plan=plan_of(scheme, num_dims=x.ndim, **options), is_apart=False)[0].to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedOperand:
    """A quantised matrix of which rows are multiplied and the last dimension is summed over."""

    values: torch.Tensor
    """Contiguous: what times `factor` is the operand. Bfloat16 where every value is a number of it, so that a product
    in bfloat16 loses nothing; else float32. NaN where a block or an element is NaN."""
    factor: float | torch.Tensor
    """Constant along the sum, and finite: a number, or a float32 for each row."""

    @property
    def is_bf16(self) -> bool:
        """Whether every value is a number of bfloat16; NaN counts as one."""
        import torch

        return self.values.dtype is torch.bfloat16

    def whole(self) -> torch.Tensor:
        """Values times factor, in float32; the values themselves where the factor is 1."""
        import torch

        if isinstance(self.factor, float):
            return self.values if self.factor == 1 else self.values.to(torch.float32) * self.factor
        return self.values.to(torch.float32) * self.factor[:, None]


def quantized_operand(
    x_RS: torch.Tensor, scheme: str | None = None, **options: Unpack[OperandOptions]
) -> QuantizedOperand:
    """The matrix as a product takes it, quantised along its last dimension, over which the product sums.

    Values times factor are the `values` of `quantize`, but for the rounding of the products of two scales in NVFP4,
    and rounded to float32 where `x_RS` is float64. Blocks lie along the last dimension, and `scaling="channel"` is one
    scale for each row: options are else those of `quantize`, and so are NaN, Inf, zeros and empty matrices. With a
    `rotation` they stay rotated, as both operands of a product are. Without a scheme the values are those of the
    matrix, or of the rotated one. The matrix may be any view; the result is on its device, detached, and may share its
    memory.

    Raises:
        UsageError: `x_RS` is no matrix; an option goes with no scheme; or as `quantize`.
    """
    if x_RS.ndim != 2:  # noqa: PLR2004
        raise UsageError(f"an operand is a matrix, and this has {x_RS.ndim} dimensions: reshape it to [rows, summed]")
    rotation, rotation_seed = options.pop("rotation", 0), options.pop("rotation_seed", None)
    # Without a scheme values are float32 numbers, which is to say, of the format fp32.
    axis = 0 if options.get("scaling") == Scaling.CHANNEL else 1
    plan = recipe_plan(scheme or "fp32", num_dims=2, axis=axis, **options)
    if scheme is None and options:
        raise UsageError(
            f"{', '.join(options)} has no effect on an operand that is left as it is: give a scheme, or leave it out"
        )
    check_readable(x_RS)
    # Turned over as it is, and then widened, takes a fifth of both at once.
    x = x_RS.detach().contiguous()
    if check_rotation_options(rotation, seed=rotation_seed):
        x = rotated(x, axis=1, size=rotation, seed=rotation_seed)
    if scheme is None:
        return QuantizedOperand(values=_narrowed(x), factor=1.0)
    values, factor = _values_and_factor(x, plan=plan, is_apart=True)
    return QuantizedOperand(values=_narrowed(values), factor=factor)


LOOKED_AT = 4096
"""Elements that are looked at first: numbers that are none of bfloat16 show among them."""


def _narrowed(values: torch.Tensor) -> torch.Tensor:
    """In bfloat16 where every value is a number of it, else in float32."""
    import torch

    if values.dtype is torch.bfloat16:
        return values
    wide = values.to(torch.float32)
    narrow = wide
    for part in (wide.flatten()[:LOOKED_AT], wide):
        narrow = part.to(torch.bfloat16)
        back = narrow.to(torch.float32)
        if not (torch.equal(back, part) or bool(((back == part) | part.isnan()).all())):
            return wide
    return narrow


def _values_and_factor(
    x: torch.Tensor, *, plan: QuantizePlan, is_apart: bool
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """The values, and the factor that was left out of them.

    Float32, or bfloat16 where it is known that every value is a number of it; of float64 float64.
    """
    import torch

    is_plain = x.device.type == "cpu" and x.layout is torch.strided and x.is_floating_point() and x.numel() > 0
    if is_plain and x.dtype is not torch.float64 and _is_compiled(plan):
        return _compiled_values(x.detach(), plan=plan, is_apart=is_apart)
    slow = quantize_planned(x, plan=plan, is_apart=is_apart)
    if not is_apart:
        return slow.values, 1.0
    factor: float | torch.Tensor = 1.0 if slow.tensor_scale is None else slow.tensor_scale
    if plan.scheme.scaling is Scaling.TENSOR:
        factor = float(slow.scale_values)
    elif plan.scheme.scaling is Scaling.CHANNEL:
        factor = slow.scale_values.to(torch.float32)
    return slow.values, factor


def _is_compiled(plan: QuantizePlan) -> bool:
    """Whether the compiled loop knows the elements of a plan, how they round and what becomes of those beyond them."""
    element = plan.scheme.element
    has_end = plan.saturate or not element.has_overflow_code
    return has_end and plan.rounding is not Rounding.HYBRID and element.coding is not Coding.TABLE


def _compiled_values(
    x: torch.Tensor, *, plan: QuantizePlan, is_apart: bool
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """The same by the compiled loop, of a tensor on a CPU that has elements and is not float64."""
    import torch

    scheme, shape = plan.scheme, x.shape
    given = (x if x.dtype in {torch.float32, torch.bfloat16} else x.to(torch.float32)).contiguous()
    given = given.view(shape or (1,))
    if plan.rotation:
        given = rotated(given, axis=plan.axis, size=plan.rotation, seed=plan.rotation_seed)
    rows = _Rows.of(ScaleGroups.of(given, plan=plan))
    scales = rows.groups.scales(largest=rows.largest, errors_of=rows.squared_errors)
    before = after = torch.ones(1, dtype=torch.float64)
    factor: float | torch.Tensor = 1.0
    if scales is not None:
        before, after = factors_of(scales, plan=plan)
        if is_apart and scheme.scaling is Scaling.BLOCK:
            after = scales.values
            factor = 1.0 if scales.tensor is None else scales.tensor.scale
        elif is_apart:
            factor = scales.values.to(torch.float32) if scheme.scaling is Scaling.CHANNEL else float(scales.values)
            after = torch.ones_like(after)
    is_wanted = (is_apart or x.dtype is torch.bfloat16) and not plan.rotation
    is_bf16 = is_wanted and _gives_bf16(scales, after, plan=plan, is_apart=is_apart)
    values = rows.quantized(before, after, dtype=torch.bfloat16 if is_bf16 else torch.float32)
    if plan.rotation:
        values = rotated(values, axis=plan.axis, size=plan.rotation, seed=plan.rotation_seed, is_back=True)
    return values.view(shape), factor


def _gives_bf16(scales: GroupScales | None, after: torch.Tensor, *, plan: QuantizePlan, is_apart: bool) -> bool:
    """Whether elements times these factors are numbers of bfloat16, whatever the elements are."""
    element, scheme, narrow = plan.scheme.element, plan.scheme, FORMATS["bf16"]
    if element.mantissa_bits > narrow.mantissa_bits or element.exponent_bits > narrow.exponent_bits:
        return False
    if scales is None or scheme.scaling is not Scaling.BLOCK:
        return scales is None or is_apart
    if scheme.has_power_scales:
        # Blocks of zeros have the lowest scale that there is, and no bits to lose.
        has_bits = (scales.largest > 0) & scales.largest.isfinite()
        return bool((after * element.min_subnormal >= narrow.min_subnormal).logical_or_(~has_bits).all())
    bits = element.mantissa_bits + 1 + (0 if scheme.scale is None else scheme.scale.mantissa_bits + 1)
    return (scales.tensor is None or is_apart) and bits <= narrow.mantissa_bits + 1


Result = TypeVar("Result")

PIECE_SIZE = 1 << 17
"""Elements that a thread takes at a time: they stay in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """A contiguous tensor on a CPU as a matrix, for the compiled loops, which work in the threads of torch."""

    groups: ScaleGroups
    """The tensor and its groups."""
    numbers_RC: NDArray[Any]
    """Its patterns."""
    num_groups: int
    """Rows of the factors."""
    group_R: NDArray[np.int64]
    """By row, the row of the factors of its groups."""
    run: int
    """Neighbours in a row that share a factor."""
    unit: int
    """Rows whose groups no other row has."""

    @classmethod
    def of(cls, groups: ScaleGroups) -> _Rows:
        """The rows of a tensor."""
        outer, along, inner = groups.x_OLI.shape
        scaling, height = groups.plan.scheme.scaling, groups.plan.scheme.block_rows
        num_rows, columns = (outer * along, inner) if inner > 1 else (outer, along)
        place, run, unit = np.arange(num_rows), columns, 1
        if scaling is Scaling.BLOCK and inner > 1:
            group, run, unit = place // along * groups.num_runs + place % along // groups.length, 1, along
        elif scaling is Scaling.BLOCK:
            unit, run = groups.shape[-2] if height > 1 else 1, groups.length
            group = place // unit * -(-unit // height) + place % unit // height
        elif scaling is Scaling.CHANNEL:
            group, run = (place % along, columns) if inner > 1 else (0 * place, 1)
        else:
            group = 0 * place
        numbers_RC = _patterns(groups.x_OLI).reshape(num_rows, columns)
        num_groups = int(group.max()) + 1
        return cls(groups=groups, numbers_RC=numbers_RC, num_groups=num_groups, group_R=group, run=run, unit=unit)

    def _of_groups(self, values: torch.Tensor) -> NDArray[Any]:
        return values.view(self.num_groups, -1).numpy()

    def _each(self, work: Callable[[slice], Result], *, unit: int = 1) -> list[Result]:
        num_rows, columns = self.numbers_RC.shape
        step = max(1, PIECE_SIZE // (columns * unit)) * unit
        parts = [slice(start, start + step) for start in range(0, num_rows, step)]
        import torch

        return each(work, parts, threads=torch.get_num_threads())

    def quantized(self, before: torch.Tensor, after: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
        """The values with factors in `scale_shape`, in float32 or bfloat16, in the shape of the tensor."""
        import torch

        values = torch.empty(self.groups.shape, dtype=dtype)
        bits = torch.uint16 if dtype is torch.bfloat16 else torch.int32
        results_RC = values.view(bits).numpy().reshape(self.numbers_RC.shape)
        factors = [self._of_groups(one.to(torch.float32)) for one in (before, after)]
        narrow, wide, divides = rounding_of(self.groups.plan)

        def work(part: slice) -> None:
            own = self.numbers_RC[part], results_RC[part], self.group_R[part], factors[0], factors[1]
            quantize_rows(*own, self.run, part.start * self.numbers_RC.shape[1], narrow, wide, divides)

        self._each(work)
        return values

    def largest(self) -> tuple[torch.Tensor, float]:
        """The largest magnitudes of groups, and the largest finite one of all, as `ScaleGroups.scales` takes them."""
        import torch

        scheme = self.groups.plan.scheme
        is_block, num_columns = scheme.scaling is Scaling.BLOCK, self.numbers_RC.shape[1]
        shape = self.num_groups, -(-num_columns // self.run)
        # NaN of any pattern is below this end, and so is no block without it finite.
        end = MAGNITUDE if is_block else INFINITY
        found_GK = self._raised(shape, self.group_R, self.run, end)
        of_all = 0.0
        if scheme.has_tensor_scale:
            most = np.int32(found_GK.max())
            if most >= INFINITY:
                most = self._raised((1, 1), 0 * self.group_R, num_columns, INFINITY)[0, 0]
            of_all = float(most.view(np.float32))
        found = torch.from_numpy(found_GK.view(np.float32)).to(torch.float64)
        return found.view(self.groups.scale_shape or (1,)), of_all

    def _raised(self, shape: tuple[int, int], group_R: NDArray[np.int64], run: int, end: np.int32) -> NDArray[np.int32]:
        """The patterns of the largest magnitudes below an end; of few groups those of each part apart."""
        is_shared = group_R is not self.group_R or self.groups.plan.scheme.scaling is not Scaling.BLOCK
        found_GK = np.zeros(shape, dtype=np.int32)

        def work(part: slice) -> NDArray[np.int32]:
            own_GK = np.zeros(shape, dtype=np.int32) if is_shared else found_GK
            find_largest(self.numbers_RC[part], group_R[part], run, end, own_GK)
            return own_GK

        for own_GK in self._each(work, unit=self.unit):
            np.maximum(found_GK, own_GK, out=found_GK)
        return found_GK

    def squared_errors(self, scales: GroupScales) -> torch.Tensor:
        """What the squared errors of the values of each group add up to, in `scale_shape`."""
        import torch

        values = self.quantized(*factors_of(scales, plan=self.groups.plan), dtype=torch.float32)
        results_RC = _patterns(values).reshape(self.numbers_RC.shape)
        errors = torch.zeros_like(scales.values)
        errors_GK = self._of_groups(errors)

        def work(part: slice) -> None:
            add_squared_errors(self.numbers_RC[part], results_RC[part], self.group_R[part], self.run, errors_GK)

        self._each(work, unit=self.unit)
        return errors


def _patterns(tensor: torch.Tensor) -> NDArray[Any]:
    array = array_of(tensor)
    return array.view(np.uint16 if array.itemsize == HALF_NBYTES else np.int32)


SMALL = 1 << 22
"""Up to so many multiplications bfloat16 takes no less time than float32."""

_SETTING = threading.RLock()
"""Held while the precision of products of float32 is another one than the process's."""


def matrix_product(a: QuantizedOperand, b: QuantizedOperand) -> torch.Tensor:
    """The product of both matrices over the last dimension of each, as float32 `[rows of a, rows of b]`.

    Every product of two elements is exact where both operands are numbers of bfloat16, and rounded to float32 where
    not; sums are float32, in an order that the machine chooses. NaN and Inf follow IEEE 754. Numbers below 2**-126 may
    be taken as 0. Sums over nothing are 0. Both are on one device.

    While CPU operands in bfloat16 are multiplied, so are the float32 matrices of other threads of the process.
    """
    import torch

    is_bf16 = a.is_bf16 and b.is_bf16
    if is_bf16 and a.values.is_cuda:
        product = torch.mm(a.values, b.values.T, out_dtype=torch.float32)
    else:
        with _float32_products("bf16" if is_bf16 else "ieee"):
            product = a.values.to(torch.float32) @ b.values.to(torch.float32).T
    for factor in (a.factor if isinstance(a.factor, float) else a.factor[:, None], b.factor):
        if not isinstance(factor, float) or factor != 1:
            product *= factor
    return product


def difference_from(base_RC: torch.Tensor, a: QuantizedOperand, b: QuantizedOperand) -> torch.Tensor | None:
    """The product minus a base in bfloat16, where that takes half the time of the product; None where it does not.

    Sums are float32, and the difference is rounded once, to bfloat16. Beside a base that is near the product, that
    leaves the product far more digits than bfloat16 has: what a format loses is right to 2**-9 of itself.
    """
    size = base_RC.numel() * a.values.shape[1]
    if not (isinstance(a.factor, float) and isinstance(b.factor, float) and a.is_bf16 and b.is_bf16):
        return None
    if size <= SMALL or not _multiplies_bf16(base_RC.device):
        return None
    import torch

    return torch.addmm(base_RC, a.values, b.values.T, beta=-1, alpha=a.factor * b.factor)


def _multiplies_bf16(device: torch.device) -> bool:
    """Whether the device is a CPU with instructions for it, which sum in float32 and round at the end."""
    import torch

    if device.type != "cpu" or not cast("bool", torch.backends.mkldnn.enabled):
        return False
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@contextlib.contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    """Matrices of float32 are multiplied as `bf16`, or as they are by `ieee`, whatever the process has chosen."""
    import torch

    with _SETTING:
        backends: list[Any] = [torch.backends.mkldnn, torch.backends.cuda]
        if hasattr(torch.backends.mkldnn, "matmul"):
            places = [backend.matmul for backend in backends]
            before = [place.fp32_precision for place in places]
            try:
                places[0].fp32_precision = precision
                places[1].fp32_precision = "ieee"
                yield
            finally:
                for place, setting in zip(places, before, strict=True):
                    place.fp32_precision = "none"  # what is chosen for all backends counts
                    if place.fp32_precision != setting:
                        place.fp32_precision = setting
        else:
            word = torch.get_float32_matmul_precision()
            try:
                torch.set_float32_matmul_precision("medium" if precision == "bf16" else "highest")
                yield
            finally:
                torch.set_float32_matmul_precision(word)


def quantized_operands(
    product: ProductRecipe, a_AS: torch.Tensor, b_BS: torch.Tensor, *, seed: int
) -> tuple[QuantizedOperand, QuantizedOperand]:
    """Both operands of `a_AS @ b_BS.T`, in the order in which `PRODUCTS` names them.

    What is stochastic draws from `seed`, each operand its own numbers. Rotated operands stay rotated: the product of
    the two is that of what they were. Zeros fill up the sum to whole runs of the rotation, and the operands are longer
    by them. NaN, Inf, zeros and empty matrices are those of `quantized_operand`.

    Raises:
        UsageError: one is no matrix of real floating-point numbers.
    """
    first, second = product.operands
    return one_operand(product, first, a_AS, seed=seed), one_operand(product, second, b_BS, seed=seed)


def one_operand(product: ProductRecipe, name: str, x_RS: torch.Tensor, *, seed: int) -> QuantizedOperand:
    """The operand of that name as `quantized_operands` gives it."""
    operand = product.operands[name]
    options: dict[str, Any] = operand.options
    if operand.is_stochastic:
        options["seed"] = len(OPERANDS) * seed + OPERANDS.index(name)
    if product.rotation:
        options |= {"rotation": product.rotation, "rotation_seed": product.rotation_seed}
        x_RS = _with_whole_runs(x_RS, product.rotation)
    if operand.prescale == 1:
        return quantized_operand(x_RS, operand.scheme, **options)
    found = quantized_operand(x_RS.float() * operand.prescale, operand.scheme, **options)
    return replace(found, factor=found.factor / operand.prescale)


def _with_whole_runs(x_RS: torch.Tensor, size: int) -> torch.Tensor:
    missing = -x_RS.shape[-1] % size if x_RS.ndim else 0
    if not missing:
        return x_RS
    from torch.nn.functional import pad

    return pad(x_RS, (0, missing))
