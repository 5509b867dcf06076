"""What would a tensor lose in a low-precision format, counted before it is rounded?"""

from __future__ import annotations

import enum
from dataclasses import dataclass

MODERATE_RATIO = 0.001
"""Above this part of all elements, a loss is moderate, and underflow is warned of."""

HIGH_RATIO = 0.01
"""Above this part of all elements, a loss is high."""


class QuantizationWarning(UserWarning):
    """More than 0.1 % of a tensor's elements are below the smallest normal value of the format that it is rounded to.

    The result is what it would be without the warning.
    """


class Severity(enum.StrEnum):
    """How much of a tensor is lost."""

    NONE = "none"
    """At most 0.1 % of the elements."""
    MODERATE = "moderate"
    """At most 1 %."""
    HIGH = "high"
    """More."""


def severity_of(ratio: float) -> Severity:
    """How bad it is to lose that part of all elements."""
    if ratio > HIGH_RATIO:
        return Severity.HIGH
    return Severity.MODERATE if ratio > MODERATE_RATIO else Severity.NONE


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
    def level(self) -> Severity:
        """How bad the underflow is, of which the warning speaks."""
        return severity_of(self.underflow_ratio)

    @property
    def overflow_level(self) -> Severity:
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
