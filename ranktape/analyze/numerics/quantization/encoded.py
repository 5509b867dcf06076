"""Gives what quantisation returns: values, codes, scales, and the count of what was lost."""

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
"""Above this part of all elements, the severity of a loss is medium, and underflow is warned of."""

HIGH_RATIO = 0.01
"""Above this part of all elements, the severity of a loss is high."""


class QuantizationWarning(UserWarning):
    """More than 0.1 % of a tensor's elements are below the smallest normal value of the format that it is rounded to.

    The result is what it would be without the warning.
    """


class LossSeverity(enum.StrEnum):
    """How much of a tensor is lost."""

    NONE = "none"
    """At most 0.1 % of the elements."""
    MEDIUM = "medium"
    """At most 1 %."""
    HIGH = "high"
    """More."""


def severity_of(ratio: float, *, medium: float = MEDIUM_RATIO, high: float = HIGH_RATIO) -> LossSeverity:
    """How bad it is to lose that part of all elements."""
    if ratio > high:
        return LossSeverity.HIGH
    return LossSeverity.MEDIUM if ratio > medium else LossSeverity.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """How many elements a scheme cannot keep well, counted after division by their scales.

    NaN, Inf and what is spoiled by them are in no other count. Ratios are parts of all elements, 0 of an empty tensor.
    """

    num_elements: int
    """Elements of any kind."""
    underflow: int
    """Nonzero and below the format's smallest normal value: fewer significant bits are left, or none."""
    flushed: int
    """Nonzero and rounded to zero; part of `underflow`."""
    overflow: int
    """Rounded to beyond the format's largest value, and saturated where that was not forbidden."""
    spoiled: int
    """Finite, in a block that holds NaN or Inf: the whole block becomes NaN."""
    nan: int
    """Not a number."""
    inf: int
    """Infinities of either sign."""

    @property
    def underflow_ratio(self) -> float:
        """`underflow` as a part of all elements."""
        return self._ratio(self.underflow)

    @property
    def flushed_ratio(self) -> float:
        """`flushed` as a part of all elements."""
        return self._ratio(self.flushed)

    @property
    def overflow_ratio(self) -> float:
        """`overflow` as a part of all elements."""
        return self._ratio(self.overflow)

    @property
    def level(self) -> LossSeverity:
        """How bad the underflow is, of which the warning speaks."""
        return severity_of(self.underflow_ratio)

    @property
    def overflow_level(self) -> LossSeverity:
        """How bad the overflow is."""
        return severity_of(self.overflow_ratio)

    def __str__(self) -> str:
        """One line for people."""
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
"""What is counted of elements, in order."""


def code_dtype(element: Format) -> torch.dtype:
    """What codes are stored in."""
    import torch

    return {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[max(NARROW_BITS, element.num_bits)]


def element_codes(elements: torch.Tensor, element: Format, *, has_nan: bool = True) -> torch.Tensor:
    """The codes of numbers of the format; of NaN, if there may be any, that of 0 where it has none."""
    import torch

    if element.num_bits <= NARROW_BITS:
        codes: torch.Tensor = narrow_codes(elements, target=element)
        return codes
    bits = elements.to(getattr(torch, str(element.dtype))).view({16: torch.int16, 32: torch.int32}[element.num_bits])
    if has_nan:  # each device has its own idea of the bits
        bits = bits.masked_fill(elements.isnan(), int(codes_of(np.nan, target=element)))
    return bits.view(code_dtype(element))


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
    """`codes`, with that of 0 for NaN where the format has no code for it."""

    def as_arrays(self) -> Quantized:
        """The same with arrays of numpy, of tensors on a CPU."""
        return replace(
            self,
            values=self.values.numpy(),
            scales=None if self.scales is None else self.scales.numpy(),
            scale_values=None if self.scale_values is None else self.scale_values.numpy(),
            stored_codes=self.stored_codes.numpy(),
        )

    @property
    def codes(self) -> Any:
        """The code of each element, in the shape of the input: uint8, for formats of 16 and 32 bits uint16 and uint32.

        That of 0 in blocks that are NaN as a whole.

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
