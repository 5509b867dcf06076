"""Gives between which values a tensor lies, before and after it is rounded at a level of a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.numerics.formats import Rounding, round_to
from ranktape.analyze.numerics.quantization.quantizer import quantize
from ranktape.analyze.numerics.quantization.schemes import MAX_SCALE_BITS, SCHEMES, Scaling
from ranktape.analyze.numerics.sweeps.legacy import legacy_result
from ranktape.analyze.numerics.sweeps.options import SweepMode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.numerics.sweeps.metrics import Level
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """From one value to another, both included."""

    minimum: float
    """The smaller one."""
    maximum: float
    """The larger one."""


def range_before(sweep: ScaleSweep) -> Range:
    """The smallest and the largest finite value of a tensor that has levels.

    Where only magnitudes were counted, the largest of them with either sign.
    """
    low = -sweep.largest if sweep.minimum is None else max(sweep.minimum, -sweep.largest)
    high = sweep.largest if sweep.maximum is None else min(sweep.maximum, sweep.largest)
    return Range(minimum=low, maximum=high)


def range_after(sweep: ScaleSweep, *, level: Level) -> Range:
    """What the ends of `range_before` become at a level of the sweep.

    Where elements share a scale in blocks or channels, each end becomes what it is as the largest of its own, which
    the larger of the two always is. What chance would decide goes to the nearest value.
    """
    before = range_before(sweep)
    ends = np.array([before.minimum, before.maximum])
    if sweep.mode is SweepMode.LEGACY:
        results = legacy_result(ends, target=sweep.target, exponent=level.exponent)
    else:
        is_drawn = sweep.rounding in {Rounding.STOCHASTIC, Rounding.HYBRID}
        rounding = sweep.target.rounding if is_drawn else sweep.rounding
        if sweep.mode is SweepMode.TENSOR:
            with np.errstate(over="ignore"):
                results = round_to(ends / level.scale, target=sweep.target, rounding=rounding) * level.scale
        else:
            results = _in_groups(ends, sweep=sweep, offset=int(level.exponent), rounding=rounding)
    minimum, maximum = (results + 0.0).tolist()
    return Range(minimum=minimum, maximum=maximum)


def _in_groups(ends: NDArray[np.float64], *, sweep: ScaleSweep, offset: int, rounding: Rounding) -> NDArray[np.float64]:
    is_mx = sweep.mode is SweepMode.MX
    has_rule = is_mx and not sweep.scheme.has_tensor_scale
    quantized = quantize(
        ends.reshape(-1, 1),
        sweep.scheme.name if sweep.scheme.name in SCHEMES else sweep.target.name,
        scaling=Scaling.BLOCK if is_mx else Scaling.CHANNEL,
        axis=-1 if is_mx else 0,
        scale_rule=sweep.options.rule if has_rule else None,
        scale_bits=sweep.options.bits if has_rule else MAX_SCALE_BITS,
        rounding=rounding,
        scale_offset=offset,
        warn=False,
    )
    return np.asarray(quantized.values, dtype=np.float64).ravel()
