"""Tells what a name in a condition stands for: a count, a metric, a loss of a format, copies that differ, a field."""

from __future__ import annotations

import difflib
import enum
import re
from dataclasses import dataclass

from ranktape.analyze.identity import SAMPLE
from ranktape.analyze.metrics.counts import EXTREMES, KINDS
from ranktape.analyze.metrics.metric import METRICS, parse_metric
from ranktape.analyze.numerics.sweeps.metrics import METRICS as SWEPT_METRICS
from ranktape.analyze.numerics.sweeps.options import SweepOptions, resolve
from ranktape.errors import UsageError
from ranktape.storage.format.catalogue import COLUMNS
from ranktape.storage.places.failures import printable

REPLICAS = "replicas.differing"
"""How many copies of a record hold other bits than it does; 0 where most hold the same."""

LOSSES = (*SWEPT_METRICS, "overflow_ratio", "underflow_ratio", "flushed_ratio", "exponent")
"""What can be asked of the recommended level of a sweep: `sqnr.mxfp8`."""


class Origin(enum.Enum):
    """Where a value comes from."""

    COUNTS = "counts"
    """What is beyond limits: from the catalogue, or against a format from digests."""
    DIGEST = "digest"
    """A figure of single values."""
    SWEEP = "sweep"
    """What a format loses with the recommended scale."""
    REPLICAS = "replicas"
    """The checksums of copies."""
    FIELD = "field"
    """What the catalogue says of the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOperand:
    """What a name stands for."""

    name: str
    """The name, as it is written."""
    origin: Origin
    """Where its values come from."""
    part: str = ""
    """Of counts their kind, of a sweep the figure."""
    is_ratio: bool = False
    """Of a count, whether it is one of all elements."""
    format: str = ""
    """Of a sweep the format."""

    @property
    def has_limits(self) -> bool:
        """Whether it depends on the limits that values are counted against."""
        return self.origin is Origin.COUNTS and self.part in {
            "upper",
            "lower",
            "total",
            "underflow",
            "flushed",
            "spoiled",
        }

    @property
    def needs_format(self) -> bool:
        """Whether against the limits of the dtype there is nothing to count."""
        return self.origin is Origin.COUNTS and self.part in {"flushed", "spoiled"}

    @property
    def is_worst_if_low(self) -> bool:
        """Of a sweep, whether the lowest value of a group is its worst."""
        return self.part in SWEPT_METRICS and not SWEPT_METRICS[self.part].is_error


def parse_operand(name: str) -> RuleOperand:
    """What a name stands for.

    Raises:
        UsageError: nothing; the message names what is like it.
    """
    if name in _COUNTS:
        return _COUNTS[name]
    if name == REPLICAS:
        return RuleOperand(name=name, origin=Origin.REPLICAS)
    if name in METRICS or re.fullmatch(r"p\d+(\.\d+)?", name):
        return RuleOperand(name=parse_metric(name).name, origin=Origin.DIGEST)
    if name in COLUMNS or name == SAMPLE:
        return RuleOperand(name=name, origin=Origin.FIELD)
    part, dot, format_name = name.partition(".")
    if dot and part in LOSSES:
        resolve(format_name, options=SweepOptions())
        return RuleOperand(name=name, origin=Origin.SWEEP, part=part, format=format_name)
    known = [*_COUNTS, REPLICAS, *METRICS, *COLUMNS, *(f"{loss}.{format_name or 'mxfp8'}" for loss in LOSSES)]
    near = [one for one in known if f".{name}." in f".{one}."]
    near += difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(dict.fromkeys(near[:3]))}?" if near else f"use one of {', '.join(METRICS)}"
    raise UsageError(f"no figure or field {printable(repr(name))}: {hint}")


def _counts() -> dict[str, RuleOperand]:
    found = [RuleOperand(name="elements", origin=Origin.COUNTS, part="elements")]
    for kind in KINDS:
        names = f"overflow.{kind}.count", f"overflow.{kind}.ratio"
        for name, is_ratio in zip(
            ("overflow.total", "overflow.ratio") if kind == "total" else names, (False, True), strict=True
        ):
            found.append(RuleOperand(name=name, origin=Origin.COUNTS, part=kind, is_ratio=is_ratio))
    found += [RuleOperand(name=f"overflow.{name}", origin=Origin.COUNTS, part=name) for name in EXTREMES]
    return {operand.name: operand for operand in found}


_COUNTS = _counts()
