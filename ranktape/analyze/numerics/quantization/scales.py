"""Which power of two is the scale of elements whose largest magnitude is known?

Exact arithmetic on the exponent and the significand of the maximum; no logarithm is rounded.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from ranktape.analyze.numerics.formats import Format


class ScaleRule(enum.StrEnum):
    """How the exponent of a scale follows from the largest magnitude: the choices of `--scale-rule`."""

    FLOOR = "floor"
    """That of the maximum: the maximum may be clamped (OCP microscaling formats 1.0, 6.3)."""
    CEIL = "ceil"
    """That of the maximum rounded up to a power of two."""
    EVEN = "even"
    """That of the maximum rounded to the element's significand, half up (torchao's)."""
    RCEIL = "rceil"
    """The smallest with which nothing is clamped: the maximum over the format's largest value, rounded up."""


class Cut(NamedTuple):
    """From which significand of the maximum on the scale is twice as large."""

    at: float
    """In [1, 2]."""
    is_inclusive: bool
    """Whether a significand of just `at` is among them."""


def cut_of(rule: ScaleRule, *, element: Format) -> Cut:
    """Where the rule changes its mind for elements of that format; at 2 for `floor`, which never does."""
    if rule is ScaleRule.FLOOR:
        return Cut(2.0, is_inclusive=True)
    if rule is ScaleRule.CEIL:
        return Cut(1.0, is_inclusive=False)
    if rule is ScaleRule.EVEN:
        return Cut(2.0 - float(np.ldexp(0.5, -element.mantissa_bits)), is_inclusive=True)
    assert rule is ScaleRule.RCEIL, "a rule is one of the four, not a word for it"
    return Cut(float(np.ldexp(element.maximum, -element.emax)), is_inclusive=False)


MAX_SCALE_BITS = 8
"""Width of a scale's exponent: with 8 bits it is e8m0."""


def scale_exponents(
    largest: ArrayLike, *, rule: ScaleRule, element: Format, offset: int = 0, scale_bits: int = MAX_SCALE_BITS
) -> NDArray[np.int64]:
    """The exponents of the scales of groups with these largest magnitudes.

    Groups of nothing but zeros have the lowest exponent there is. The magnitudes are finite. `offset` is added to
    what the rule says; the sum is clamped to what `scale_bits` bits can say: -127 to 127 for 8 of them.
    """
    end = (1 << (scale_bits - 1)) - 1
    found = np.clip(unbounded_exponents(largest, rule=rule, element=element) + offset, -end, end)
    return np.where(np.asarray(largest) == 0, -end, found)


def unbounded_exponents(largest: ArrayLike, *, rule: ScaleRule, element: Format) -> NDArray[np.int64]:
    """What the rule says of groups with these largest magnitudes, however few bits there are to say it; of 0, anything.

    The magnitudes are finite.
    """
    significand, exponent = np.frexp(np.asarray(largest, dtype=np.float64))
    cut = cut_of(rule, element=element)
    doubled = 2 * significand
    is_above = doubled >= cut.at if cut.is_inclusive else doubled > cut.at
    found: NDArray[np.int64] = exponent.astype(np.int64) - 1 + is_above - element.emax
    return found
