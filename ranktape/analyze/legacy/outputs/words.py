"""Gives the words in which reports and plots speak of a sweep, its levels and the limits of its format."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ranktape.analyze.advice.recommendation import best_by
from ranktape.analyze.advice.verdict import Verdict, is_lossless, is_square_beyond
from ranktape.analyze.numerics.formats import Rounding
from ranktape.analyze.numerics.sweeps.metrics import METRICS
from ranktape.analyze.numerics.sweeps.options import SweepMode

if TYPE_CHECKING:
    from ranktape.analyze.numerics.sweeps.metrics import Level
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep

PLAIN_FROM, PLAIN_BELOW = 1e-3, 1e6
"""Scales within these are written without an exponent."""

BOX_METRICS = ("mse", "cosine", "psnr", "sqnr", "mae", "relative_error")
"""The metrics of the recommended level that the box of statistics names."""


class Limit(NamedTuple):
    """A place among the levels where the format ends for the tensor."""

    kind: str
    """`largest`, `normal`, `flush`, or `rule`."""
    place: float
    """The exponent, or the offset."""
    text: str
    """What happens there."""


def level_text(sweep: ScaleSweep, level: Level, *, sign: str = ":") -> str:
    """Which level it is: what people call it, and its factor."""
    return f"{level_name(sweep)}{sign} {exponent_text(level.exponent)}"


def level_name(sweep: ScaleSweep) -> str:
    """What the number of a level is."""
    return "Scale Offset" if sweep.has_offsets else "Scale Exp"


def exponent_text(exponent: float) -> str:
    """An exponent or offset, with two decimals as the legacy tool has it."""
    return f"{exponent:.2f}"


def factor_text(scale: float) -> str:
    """A scale; with six decimals where they say anything."""
    return f"{scale:.6f}" if PLAIN_FROM <= scale < PLAIN_BELOW else f"{scale:.6e}"


def cosine_text(cosine: float) -> str:
    """A cosine; only a true 1 is shown as 1."""
    text = f"{cosine:.6f}"
    return text if text != "1.000000" or cosine == 1 else f"{cosine:.12f}"


def decibel_text(ratio: float, level: Level) -> str:
    """A ratio of a level in dB; infinite where nothing is lost. Minus zero is zero."""
    return f"{round(ratio, 2) + 0.0:.2f} dB" + (" (nothing is lost)" if is_lossless(level) else "")


def square_text(level: Level) -> str:
    """The mean square of a level's errors, which float64 does not always hold."""
    return "beyond float64" if is_square_beyond(level) else f"{level.mse:.6e}"


def number_of(count: int, thing: str) -> str:
    """How many there are, with the thing in the plural unless there is one."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def share_text(ratio: float) -> str:
    """A part in percent; only a true zero is shown as 0 %."""
    percent = 100 * ratio
    return f"{percent:.2f}%" if ratio == 0 or percent >= 0.01 else f"{percent:.2e}%"  # noqa: PLR2004 - two decimals


def metric_text(name: str, level: Level) -> str:
    """A metric of a level with its unit."""
    value = METRICS[name].of(level)
    special = {"cosine": cosine_text, "relative_error": share_text}
    if name in special:
        return special[name](value)
    if name == "mse":
        return square_text(level)
    return decibel_text(value, level) if METRICS[name].unit == "dB" else f"{value:.6e}"


def counted_as(sweep: ScaleSweep) -> str:
    """What stands before the names of counts: those of a legacy sweep are the original's."""
    return "Original " if sweep.mode is SweepMode.LEGACY else ""


def rounding_of(sweep: ScaleSweep) -> str:
    """How values are rounded; legacy mode has a way of its own."""
    return Rounding.AWAY.value if sweep.mode is SweepMode.LEGACY else sweep.rounding.value


def limits_of(sweep: ScaleSweep) -> list[Limit]:
    """Where among the levels the tensor meets the format's limits; nothing for a tensor without levels."""
    if not sweep.levels:
        return []
    if sweep.scheme.has_tensor_scale:
        return [Limit("rule", 0.0, "tensor scale from the largest value")]
    if sweep.mode is SweepMode.MX:
        return [Limit("rule", 0.0, f"scales as rule {sweep.options.rule.value!r} gives them")]
    if sweep.mode is SweepMode.CHANNEL:
        return [Limit("rule", 0.0, "largest value of each channel just fits")]
    row, smallest = sweep.target, math.log2(sweep.smallest)
    flush = f"smallest |x| becomes {row.min_subnormal:.3g}, the smallest nonzero"
    normal = f"smallest |x| becomes {row.min_normal:.3g}, the smallest normal"
    largest = f"largest |x| becomes {row.maximum:.4g}, the largest value"
    return [
        Limit("largest", math.log2(sweep.largest) - math.log2(row.maximum), largest),
        Limit("normal", smallest - math.log2(row.min_normal), normal),
        Limit("flush", smallest - math.log2(row.min_subnormal), flush),
    ]


def statistics_lines(sweep: ScaleSweep) -> list[str]:
    """The box of statistics: the tensor, the format, the best levels, and the recommended one."""
    row, level = sweep.target, sweep.recommended
    sections: dict[str, dict[str, str]] = {
        "TENSOR": {
            "elements": f"{sweep.num_elements:,}",
            "NaN": f"{sweep.nan:,}",
            "Inf": f"{sweep.inf:,}",
            "spoiled": f"{sweep.spoiled:,}" if sweep.spoiled else "",
            "zeros": f"{sweep.zero:,}",
            "minimum": "" if sweep.minimum is None else f"{sweep.minimum:.4g}",
            "maximum": "" if sweep.maximum is None else f"{sweep.maximum:.4g}",
            "largest |x|": f"{sweep.largest:.4g}" if sweep.largest else "",
            "smallest |x|": f"{sweep.smallest:.4g}" if sweep.largest else "",
        },
        f"\nFORMAT {sweep.scheme.name}": {
            "largest": f"{row.maximum:.6g}",
            "min normal": f"{row.min_normal:.4g}",
            "min subnormal": f"{row.min_subnormal:.4g}",
            "rounding": rounding_of(sweep),
            "block": f"{sweep.scheme.block_size} along axis {sweep.options.axis}" if sweep.scheme.block_size else "",
        },
    }
    if level is not None:
        bests = {name: best_by(sweep, name) or level for name in ("mse", "cosine", "psnr")}
        labels = {"mse": "by MSE", "cosine": "by cosine", "psnr": "by PSNR"}
        sections[f"\nBEST {level_name(sweep).upper()}"] = {
            labels[name]: exponent_text(best.exponent) for name, best in bests.items()
        }
        labels = {"cosine": "cosine", "relative_error": "rel. error"}
        sections["\nRECOMMENDED"] = {
            "offset" if sweep.has_offsets else "exponent": exponent_text(level.exponent),
            "factor": factor_text(level.scale),
            "score": f"{level.score:.4f}",
        } | {
            labels.get(name, METRICS[name].label): metric_text(name, level).removesuffix(" (nothing is lost)")
            for name in BOX_METRICS
        }
        losses = {kind: share_text(Verdict(level).ratio(kind)) for kind in ("overflow", "underflow", "flushed")}
        if counted_as(sweep):
            sections["AS THE ORIGINAL COUNTS"] = losses
        else:
            sections["\nRECOMMENDED"] |= losses
    lines = []
    for heading, entries in sections.items():
        lines += [*heading.splitlines(), *(f"  {name:<15}{text}" for name, text in entries.items() if text)]
    return lines
