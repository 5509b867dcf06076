"""Multiplies quantised matrices: exactly, as fast as the machine multiplies bfloat16 where that loses nothing."""

# Shapes: R = rows of the first operand, C = rows of the second, which are the columns of the product.

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

    from ranktape.analyze.numerics.quantization.operand import QuantizedOperand

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

    is_bf16 = a.is_bf16_exact and b.is_bf16_exact
    if is_bf16 and a.values.is_cuda:
        product = torch.mm(_bf16(a), _bf16(b).T, out_dtype=torch.float32)
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
    if not (isinstance(a.factor, float) and isinstance(b.factor, float) and a.is_bf16_exact and b.is_bf16_exact):
        return None
    if size <= SMALL or not _multiplies_bf16(base_RC.device):
        return None
    import torch

    return torch.addmm(base_RC, _bf16(a), _bf16(b).T, beta=-1, alpha=a.factor * b.factor)


def _bf16(operand: QuantizedOperand) -> torch.Tensor:
    import torch

    return operand.values.to(torch.bfloat16)


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
