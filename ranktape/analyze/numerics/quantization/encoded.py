"""What is a tensor after it was quantised: its values, its codes, its scales?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ranktape.analyze.numerics.quantization.losses import Losses
from ranktape.analyze.numerics.quantization.schemes import Scaling, Scheme
from ranktape.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantized:
    """A quantised tensor: arrays of numpy or tensors of torch on one device, as the tensor that was given.

    `values` are those of the codes times `scale_values`, rounded once to their type; in NVFP4 times the product of
    `scale_values` and `tensor_scale`, which is rounded to float32.
    """

    scheme: Scheme
    """Element format, and which elements share a scale."""
    values: Any
    """Dequantised: float32, of float64 input float64; the shape of the input."""
    scales: Any
    """None without scales. Of blocks, codes of e8m0 (of e4m3 for NVFP4) as uint8, in the shape of the input with
    blocks along the axis, 0xFF (0x7F) where a block is NaN. Of a tensor or of channels, float32: one number, or one
    for each index along the axis."""
    scale_values: Any
    """The numbers that `scales` stand for, as float64; None without scales."""
    tensor_scale: float | None
    """The scale of the scales of NVFP4, a float32; None for other schemes."""
    losses: Losses
    """What the scheme could not keep."""
    stored_codes: Any = field(repr=False)
    """`codes`, with 0 for NaN where the format has no code for that."""

    @property
    def codes(self) -> Any:
        """The code of each element, in the shape of the input: uint8, for formats of 16 and 32 bits uint16 and uint32.

        0 in blocks that are NaN as a whole.

        Raises:
            UsageError: elements are NaN, and the format has no code for that.
        """
        element, num_nans = self.scheme.element, self.losses.nan
        if num_nans and not element.num_nans and self.scheme.scaling is not Scaling.BLOCK:
            raise UsageError(
                f"{element.name} has no code for NaN, and {num_nans} elements are NaN: replace them first, "
                "or read `values` alone"
            )
        return self.stored_codes
