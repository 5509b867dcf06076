"""The result of a quantisation: values, codes, scales, and counts of the losses."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.numerics.formats import Format, codes_of
from ranktape.analyze.numerics.formats.values import NARROW_BITS, narrow_codes
from ranktape.analyze.numerics.quantization.schemes import Scaling, Scheme
from ranktape.errors import UsageError

if TYPE_CHECKING:
    import torch

MEDIUM_RATIO = 0.001
"""The fraction of all elements above which the severity of a loss is medium, and underflow causes a warning."""

HIGH_RATIO = 0.01
"""The fraction of all elements above which the severity of a loss is high."""


class QuantizationWarning(UserWarning):
    """More than 0.1 % of a tensor's elements are nonzero and below the smallest normal value of the format.

    The warning does not change the result.
    """


class LossSeverity(enum.StrEnum):
    """The severity of a loss."""

    NONE = "none"
    """At most 0.1 % of the elements."""
    MEDIUM = "medium"
    """At most 1 % of the elements."""
    HIGH = "high"
    """More than 1 % of the elements."""


def severity_of(ratio: float, *, medium: float = MEDIUM_RATIO, high: float = HIGH_RATIO) -> LossSeverity:
    """The severity if this fraction of all elements is lost."""
    if ratio > high:
        return LossSeverity.HIGH
    return LossSeverity.MEDIUM if ratio > medium else LossSeverity.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Counts of the elements that a scheme represents badly, after division by their scales.

    NaN, Inf and the elements spoiled by them are in no other count. Ratios are fractions of all elements, 0 if the
    tensor is empty.
    """

    num_elements: int
    """Number of all elements."""
    underflow: int
    """Nonzero elements below the smallest normal value of the format, which lose some or all significant bits."""
    flushed: int
    """Nonzero elements that are rounded to zero; they are part of `underflow`."""
    overflow: int
    """Elements that round beyond the largest value of the format; they are saturated by default."""
    spoiled: int
    """Finite elements that become NaN because their block has a NaN or Inf."""
    nan: int
    """Elements that are NaN."""
    inf: int
    """Infinite elements of either sign."""

    @property
    def underflow_ratio(self) -> float:
        """`underflow` as a fraction of all elements."""
        return self._ratio(self.underflow)

    @property
    def flushed_ratio(self) -> float:
        """`flushed` as a fraction of all elements."""
        return self._ratio(self.flushed)

    @property
    def overflow_ratio(self) -> float:
        """`overflow` as a fraction of all elements."""
        return self._ratio(self.overflow)

    @property
    def level(self) -> LossSeverity:
        """The severity of the underflow, on which the warning depends."""
        return severity_of(self.underflow_ratio)

    @property
    def overflow_level(self) -> LossSeverity:
        """The severity of the overflow."""
        return severity_of(self.overflow_ratio)

    def __str__(self) -> str:
        """The losses in one line of text."""
        parts = [
            f"underflow {self.underflow_ratio:.2%} ({self.level}), {self.flushed_ratio:.2%} become zero",
            f"overflow {self.overflow_ratio:.2%} ({self.overflow_level})",
        ]
        if self.nan or self.inf:
            parts.append(f"{self.nan} NaN, {self.inf} Inf, {self.spoiled} others in their blocks")
        return f"of {self.num_elements} elements: {'; '.join(parts)}"

    def _ratio(self, count: int) -> float:
        return count / self.num_elements if self.num_elements else 0.0


LOSSES = tuple(field.name for field in fields(Losses))[1:]
"""The names of the counts, in the order of the fields."""


def code_dtype(element: Format) -> torch.dtype:
    """The unsigned type of the codes of a format."""
    import torch

    return {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[max(NARROW_BITS, element.num_bits)]


def element_codes(elements: torch.Tensor, element: Format, *, has_nan: bool = True) -> torch.Tensor:
    """The codes of values of the format; NaN, if there may be any, has the code of 0 if the format has no NaN."""
    import torch

    if element.num_bits <= NARROW_BITS:
        codes: torch.Tensor = narrow_codes(elements, target=element)
        return codes
    bits = elements.to(getattr(torch, str(element.dtype))).view({16: torch.int16, 32: torch.int32}[element.num_bits])
    if has_nan:  # the bits of NaN differ between devices
        bits = bits.masked_fill(elements.isnan(), int(codes_of(np.nan, target=element)))
    return bits.view(code_dtype(element))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantized:
    """A quantised tensor, as numpy arrays or torch tensors on one device, like the input.

    `values` are the decoded codes times `scale_values`, rounded once to their type. In NVFP4 they are multiplied by
    the product of `scale_values` and `tensor_scale`, which is rounded to float32.
    """

    scheme: Scheme
    """Element format, and the groups of elements that share a scale."""
    values: Any
    """Dequantised values in the shape of the input: float64 if the input is float64, else float32."""
    scales: Any
    """The stored scales; None if the scheme has none.

    The scales of blocks have the shape of the input with blocks along the axis. They are codes of the scale format as
    uint8 (e8m0, e4m3 for NVFP4; 0xFF or 0x7F if the block is NaN), or float32 if that format is fp32. The scale of a
    tensor and the scales of channels along the axis are float32.
    """
    scale_values: Any
    """The numbers that `scales` represent, as float64; None if there are no scales."""
    tensor_scale: float | None
    """The scale of the scales of NVFP4, a float32; None for other schemes."""
    losses: Losses
    """Counts of the elements that the scheme represents badly."""
    stored_codes: Any = field(repr=False)
    """`codes`, in which NaN has the code of 0 if the format has no NaN."""

    def as_arrays(self) -> Quantized:
        """The result with numpy arrays instead of tensors, which are on the CPU."""
        return replace(
            self,
            values=self.values.numpy(),
            scales=None if self.scales is None else self.scales.numpy(),
            scale_values=None if self.scale_values is None else self.scale_values.numpy(),
            stored_codes=self.stored_codes.numpy(),
        )

    @property
    def codes(self) -> Any:
        """The code of each element, in the shape of the input: uint8, or uint16 or uint32 for 16- and 32-bit formats.

        Elements of blocks that are NaN as a whole have the code of 0.

        Raises:
            UsageError: elements without a block are NaN, and the format has no code for NaN.
        """
        element, num_nans = self.scheme.element, self.losses.nan
        if num_nans and not element.num_nans and self.scheme.scaling is not Scaling.BLOCK:
            raise UsageError(
                f"{element.name} has no code for NaN, and {num_nans} elements are NaN: replace them first, "
                "or read `values` alone"
            )
        return self.stored_codes
