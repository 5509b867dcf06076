"""Quantises the operands of matrix products as a recipe specifies, and multiplies them.

Only values are computed, with or without a factor that the product can apply afterwards. Products are multiplied as
bfloat16 if that loses nothing.
"""

# Shapes: R = rows of an operand, S = the dimension that the product sums over; A, B = rows of the first and the second
# operand, C = rows of the second operand, which are the columns of the product.

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack, cast

from ranktape.analyze.numerics.formats import FORMATS
from ranktape.analyze.numerics.pieces import check_readable
from ranktape.analyze.numerics.quantization.kernels import CompiledGroups
from ranktape.analyze.numerics.quantization.plan import (
    OperandOptions,
    QuantizeOptions,
    QuantizePlan,
    check_rotation_options,
    plan_of,
    recipe_plan,
)
from ranktape.analyze.numerics.quantization.quantizer import ScaledTensor, rotated
from ranktape.analyze.numerics.quantization.schemes import Scaling
from ranktape.analyze.numerics.recipes.recipe import OPERANDS, ProductRecipe
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch


def quantized_values(x: torch.Tensor, scheme: str, **options: Unpack[QuantizeOptions]) -> torch.Tensor:
    """The `values` of `quantize`, bit for bit, in the type of `x`.

    On a CPU it takes less time and memory than `quantize`, because it computes no codes and counts and no float64
    number for every element. It uses as many threads as torch.

    Raises:
        UsageError: as for `quantize`.
    """
    return _values_and_factor(x, plan=plan_of(scheme, num_dims=x.ndim, **options), keeps_factor=False)[0].to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedOperand:
    """A quantised matrix as the operand of a product that sums over its last dimension."""

    values: torch.Tensor
    """Contiguous values, whose product with `factor` is the operand.

    They are bfloat16 if that represents all of them, so that a product in bfloat16 is exact, else float32. Elements of
    blocks that are NaN are NaN.
    """
    factor: float | torch.Tensor
    """A finite factor that is constant along the sum: a number, or a float32 for each row."""

    @property
    def is_bf16(self) -> bool:
        """Whether the values are stored as bfloat16, which represents all of them, including NaN."""
        import torch

        return self.values.dtype is torch.bfloat16

    def dequantized(self) -> torch.Tensor:
        """Values times factor in float32, or the values themselves if the factor is the number 1."""
        import torch

        if isinstance(self.factor, float):
            return self.values if self.factor == 1 else self.values.to(torch.float32) * self.factor
        return self.values.to(torch.float32) * self.factor[:, None]


def quantized_operand(
    x_RS: torch.Tensor, scheme: str | None = None, **options: Unpack[OperandOptions]
) -> QuantizedOperand:
    """Quantise a matrix along its last dimension, for a product that sums over it.

    Values times factor are the `values` of `quantize`, except that in NVFP4 the product of two scales is not rounded,
    and that float64 results are rounded to float32. Blocks are along the last dimension, and `scaling="channel"` gives
    each row a scale. All other options, NaN, Inf, zeros and empty matrices are treated as in `quantize`. With a
    `rotation` the values stay rotated, as both operands of a product are. Without a scheme they are those of the
    matrix, or of the rotated matrix. The matrix may be any view. The result is on its device, detached, and may share
    its memory.

    Raises:
        UsageError: `x_RS` is not a matrix; an option is given without a scheme; or as for `quantize`.
    """
    if x_RS.ndim != 2:  # noqa: PLR2004
        raise UsageError(f"an operand is a matrix, and this has {x_RS.ndim} dimensions: reshape it to [rows, summed]")
    rotation, rotation_seed = options.pop("rotation", 0), options.pop("rotation_seed", None)
    # Without a scheme values are float32, which is the format fp32.
    axis = 0 if options.get("scaling") == Scaling.CHANNEL else 1
    plan = recipe_plan(scheme or "fp32", num_dims=2, axis=axis, **options)
    if scheme is None and options:
        raise UsageError(
            f"{', '.join(options)} has no effect on an operand that is left as it is: give a scheme, or leave it out"
        )
    check_readable(x_RS)
    # Transposing first and converting later takes a fifth of the time of both in one operation.
    x = x_RS.detach().contiguous()
    if check_rotation_options(rotation, seed=rotation_seed):
        x = rotated(x, axis=1, size=rotation, seed=rotation_seed)
    if scheme is None:
        return QuantizedOperand(values=_narrowed(x), factor=1.0)
    values, factor = _values_and_factor(x, plan=plan, keeps_factor=True)
    return QuantizedOperand(values=_narrowed(values), factor=factor)


NUM_CHECKED_FIRST = 4096
"""Number of elements that are checked first, because float32 numbers usually show among them."""


def _narrowed(values: torch.Tensor) -> torch.Tensor:
    """The values in bfloat16 if that represents all of them, else in float32."""
    import torch

    if values.dtype is torch.bfloat16:
        return values
    wide = values.to(torch.float32)
    narrow = wide
    for part in (wide.flatten()[:NUM_CHECKED_FIRST], wide):
        narrow = part.to(torch.bfloat16)
        back = narrow.to(torch.float32)
        if not (torch.equal(back, part) or bool(((back == part) | part.isnan()).all())):
            return wide
    return narrow


def _values_and_factor(
    x: torch.Tensor, *, plan: QuantizePlan, keeps_factor: bool
) -> tuple[torch.Tensor, float | torch.Tensor]:
    """The values, and the factor that they lack if `is_apart`.

    The values are float64 if `x` is, else float32, or bfloat16 if that is known to represent all of them.
    """
    import torch

    scaled = ScaledTensor.of(x, plan=plan, keeps_factor=keeps_factor)
    may_be_bf16 = (keeps_factor or x.dtype is torch.bfloat16) and x.dtype is not torch.float64 and not plan.rotation
    is_bf16 = (
        may_be_bf16
        and isinstance(scaled.groups, CompiledGroups)
        and _is_exact_in_bf16(scaled, keeps_factor=keeps_factor)
    )
    return scaled.values(torch.bfloat16 if is_bf16 else scaled.groups.value_dtype), scaled.factor


def _is_exact_in_bf16(scaled: ScaledTensor, *, keeps_factor: bool) -> bool:
    """Whether bfloat16 represents the values exactly for any elements."""
    scheme, scales, narrow = scaled.groups.plan.scheme, scaled.scales, FORMATS["bf16"]
    element = scheme.element
    if element.mantissa_bits > narrow.mantissa_bits or element.exponent_bits > narrow.exponent_bits:
        return False
    if scales is None or scheme.scaling is not Scaling.BLOCK:
        return scales is None or keeps_factor
    if scheme.has_power_scales:
        min_scale = narrow.min_subnormal / element.min_subnormal
        if scaled.after.amin() >= min_scale:
            return True
        # Blocks of zeros have the lowest scale, and no bits to lose.
        has_bits = (scales.largest > 0) & scales.largest.isfinite()
        return bool((scaled.after >= min_scale).logical_or_(~has_bits).all())
    bits = element.mantissa_bits + 1 + (0 if scheme.scale is None else scheme.scale.mantissa_bits + 1)
    return (scales.tensor is None or keeps_factor) and bits <= narrow.mantissa_bits + 1


SMALL = 1 << 22
"""Number of multiplications up to which bfloat16 is not faster than float32."""

_SETTING = threading.RLock()
"""The lock for changing the precision of float32 products in the process."""


def matrix_product(a: QuantizedOperand, b: QuantizedOperand) -> torch.Tensor:
    """The product of both matrices over the last dimension of each, as float32 `[rows of a, rows of b]`.

    Every product of two elements is exact if both operands are bfloat16, else rounded to float32. Sums are float32, in
    an order that depends on the machine. NaN and Inf follow IEEE 754. Magnitudes below 2**-126 may be flushed to 0.
    Empty sums are 0. Both operands are on one device.

    While CPU operands in bfloat16 are multiplied, other threads of the process multiply float32 matrices as bfloat16.
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
    """The product minus a bfloat16 base, if that takes half the time of `matrix_product`; else None.

    Sums are float32, and the difference is rounded once, to bfloat16. If the base is near the product, the loss of a
    format is therefore correct to a relative 2**-9, which needs far more digits of the product than bfloat16 has.
    """
    size = base_RC.numel() * a.values.shape[1]
    if not (isinstance(a.factor, float) and isinstance(b.factor, float) and a.is_bf16 and b.is_bf16):
        return None
    if size <= SMALL or not _multiplies_bf16(base_RC.device):
        return None
    import torch

    return torch.addmm(base_RC, a.values, b.values.T, beta=-1, alpha=a.factor * b.factor)


def _multiplies_bf16(device: torch.device) -> bool:
    """Whether the device is a CPU with bfloat16 instructions, which sum in float32 and round at the end."""
    import torch

    if device.type != "cpu" or not cast("bool", torch.backends.mkldnn.enabled):
        return False
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@contextlib.contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    """Use this precision for float32 products on a CPU, and `ieee` on CUDA, regardless of the process's settings."""
    import torch

    with _SETTING:
        backends: list[Any] = [torch.backends.mkldnn, torch.backends.cuda]
        if hasattr(torch.backends.mkldnn, "matmul"):
            backend_settings = [backend.matmul for backend in backends]
            previous = [settings.fp32_precision for settings in backend_settings]
            try:
                backend_settings[0].fp32_precision = precision
                backend_settings[1].fp32_precision = "ieee"
                yield
            finally:
                for settings, setting in zip(backend_settings, previous, strict=True):
                    settings.fp32_precision = "none"  # the setting for all backends applies
                    if settings.fp32_precision != setting:
                        settings.fp32_precision = setting
        else:
            previous_precision = torch.get_float32_matmul_precision()
            try:
                torch.set_float32_matmul_precision("medium" if precision == "bf16" else "highest")
                yield
            finally:
                torch.set_float32_matmul_precision(previous_precision)


def quantized_operands(
    product: ProductRecipe, a_AS: torch.Tensor, b_BS: torch.Tensor, *, seed: int
) -> tuple[QuantizedOperand, QuantizedOperand]:
    """The quantised operands of `a_AS @ b_BS.T`, in the order of `PRODUCTS`.

    Stochastic rounding draws from `seed`, different numbers for each operand. Rotated operands stay rotated, which does
    not change their product. They are padded with zeros to whole runs of the rotation. NaN, Inf, zeros and empty
    matrices are treated as in `quantized_operand`.

    Raises:
        UsageError: an operand is not a matrix of real floating-point numbers.
    """
    first, second = product.operands
    return named_operand(product, first, a_AS, seed=seed), named_operand(product, second, b_BS, seed=seed)


def named_operand(product: ProductRecipe, name: str, x_RS: torch.Tensor, *, seed: int) -> QuantizedOperand:
    """The operand with this name of `quantized_operands`."""
    operand = product.operands[name]
    options: dict[str, Any] = operand.options
    if operand.is_stochastic:
        options["seed"] = len(OPERANDS) * seed + OPERANDS.index(name)
    if product.rotation:
        options |= {"rotation": product.rotation, "rotation_seed": product.rotation_seed}
        x_RS = _padded_to_runs(x_RS, product.rotation)
    if operand.prescale == 1:
        return quantized_operand(x_RS, operand.scheme, **options)
    quantized = quantized_operand(x_RS.float() * operand.prescale, operand.scheme, **options)
    return replace(quantized, factor=quantized.factor / operand.prescale)


def _padded_to_runs(x_RS: torch.Tensor, size: int) -> torch.Tensor:
    missing = -x_RS.shape[-1] % size if x_RS.ndim else 0
    if not missing:
        return x_RS
    from torch.nn.functional import pad

    return pad(x_RS, (0, missing))
