"""Which figures does the page show, and what stands for several records together?"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Merge(enum.StrEnum):
    """What the figure of several records is: the page's script knows these words."""

    RATIO = "ratio"
    """Their counts over their elements."""
    LARGEST = "largest"
    """The largest of theirs."""
    SMALLEST = "smallest"
    """The smallest of theirs."""
    MEDIAN = "median"
    """The median of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A figure of the page."""

    name: str
    """Its name in `ranktape.analyze.metrics.metric`; `sqnr.` and a format for what a format makes of it."""
    head: str
    """What people read."""
    merge: Merge
    """What stands for several records."""
    is_magnitude: bool = False
    """Whether it is positive and compared as a ratio, on a logarithmic scale."""
    unit: str = ""
    """Empty for pure numbers."""

    @property
    def source(self) -> str:
        """The figure of which the page holds a column: of a ratio the count."""
        if self.merge is not Merge.RATIO:
            return self.name
        return "overflow.total" if self.name == "overflow.ratio" else self.name.removesuffix(".ratio") + ".count"


def _ratio(kind: str, head: str) -> Shown:
    return Shown(name=f"overflow.{kind}.ratio" if kind else "overflow.ratio", head=head, merge=Merge.RATIO)


def _magnitude(name: str, head: str, merge: Merge = Merge.LARGEST) -> Shown:
    return Shown(name=name, head=head, merge=merge, is_magnitude=True)


SHOWN = (
    _ratio("", "overflow"),
    _ratio("upper", "upper overflow"),
    _ratio("lower", "lower overflow"),
    _ratio("underflow", "underflow (subnormal)"),
    _ratio("nan", "NaN"),
    _ratio("inf", "Inf"),
    _ratio("zero", "zeros"),
    _magnitude("absmax", "absmax"),
    _magnitude("rms", "rms"),
    _magnitude("std", "std"),
    _magnitude("norm", "norm"),
    _magnitude("smallest_nonzero", "smallest nonzero", Merge.SMALLEST),
    Shown(name="log2_range", head="range", merge=Merge.LARGEST, unit="bits"),
    _magnitude("kurtosis", "kurtosis"),
    Shown(name="skewness", head="skewness", merge=Merge.MEDIAN),
    Shown(name="mean", head="mean", merge=Merge.MEDIAN),
    Shown(name="minimum", head="minimum", merge=Merge.SMALLEST),
    Shown(name="maximum", head="maximum", merge=Merge.LARGEST),
    Shown(name="p1", head="1st percentile", merge=Merge.MEDIAN),
    Shown(name="p50", head="median", merge=Merge.MEDIAN),
    Shown(name="p99", head="99th percentile", merge=Merge.MEDIAN),
)
"""The figures, in the order of the page's menu; what formats make of the tensors comes after them."""


def sqnr_of(name: str) -> Shown:
    """The figure of what one format makes of the tensors: the worst of several records."""
    return Shown(name=f"sqnr.{name}", head=f"SQNR in {name}", merge=Merge.SMALLEST, unit="dB")
