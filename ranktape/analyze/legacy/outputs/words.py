"""Gives the words in which reports and plots speak of a sweep, its levels and the limits of its format."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.analyze.advice.recommendation import best_by
from ranktape.analyze.advice.verdict import is_lossless, is_square_beyond, verdict_of
from ranktape.analyze.numerics.formats import Rounding
from ranktape.analyze.numerics.sweeps.metrics import METRICS
from ranktape.analyze.numerics.sweeps.options import SweepMode

if TYPE_CHECKING:
    from ranktape.analyze.numerics.sweeps.metrics import Level
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep

PLAIN_FROM, PLAIN_BELOW = 1e-3, 1e6
"""Scales within these are written without an exponent."""

BOX_METRICS = ("mse", "cosine", "psnr", "sqnr", "mae", "relative_error")
"""The figures of the recommended level that the box of statistics names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A place among the levels where the format ends for the tensor."""

    kind: str
    """`largest`, `normal`, `flush`, or `rule`."""
    place: float
    """The exponent, or the offset."""
    text: str
    """What happens there."""


def level_text(sweep: ScaleSweep, level: Level, *, sign: str = ":") -> str:
    """Which level it is: what people call it, and its factor."""
    return f"{level_name(sweep)}{sign} {figure_text(level.exponent)}"


def level_name(sweep: ScaleSweep) -> str:
    """What the number of a level is."""
    return "Scale Offset" if sweep.has_offsets else "Scale Exp"


def figure_text(exponent: float) -> str:
    """An exponent or offset, with two decimals as the legacy tool has it."""
    return f"{exponent:.2f}"


def factor_text(scale: float) -> str:
    """A scale; with six decimals where they say anything."""
    return f"{scale:.6f}" if PLAIN_FROM <= scale < PLAIN_BELOW else f"{scale:.6e}"


def cosine_text(cosine: float) -> str:
    """A cosine; only a true 1 is shown as 1."""
    text = f"{cosine:.6f}"
    return text if text != "1.000000" or cosine == 1 else f"{cosine:.12f}"


def decibel_text(figure: float, level: Level) -> str:
    """A ratio of a level in dB; infinite where nothing is lost. Minus zero is zero."""
    return f"{round(figure, 2) + 0.0:.2f} dB" + (" (nothing is lost)" if is_lossless(level) else "")


def square_text(figure: float, level: Level) -> str:
    """The mean square of a level's errors, which float64 does not always hold."""
    return "beyond float64" if is_square_beyond(level) else f"{figure:.6e}"


def number_of(count: int, thing: str) -> str:
    """How many there are, with the thing in the plural unless there is one."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def share_text(ratio: float) -> str:
    """A part in percent; only a true zero is shown as 0 %."""
    percent = 100 * ratio
    return f"{percent:.2f}%" if ratio == 0 or percent >= 0.01 else f"{percent:.2e}%"  # noqa: PLR2004 - two decimals


def metric_text(name: str, level: Level) -> str:
    """A figure of a level with its unit."""
    figure = METRICS[name].of(level)
    if name == "cosine":
        return cosine_text(figure)
    if name == "relative_error":
        return share_text(figure)
    if name == "mse":
        return square_text(figure, level)
    return decibel_text(figure, level) if METRICS[name].unit == "dB" else f"{figure:.6e}"


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
        return [Limit(kind="rule", place=0.0, text="tensor scale from the largest value")]
    if sweep.mode is SweepMode.MX:
        return [Limit(kind="rule", place=0.0, text=f"scales as rule {sweep.options.rule.value!r} gives them")]
    if sweep.mode is SweepMode.CHANNEL:
        return [Limit(kind="rule", place=0.0, text="largest value of each channel just fits")]
    row = sweep.target
    ends = (
        ("largest", sweep.largest, row.maximum, f"largest |x| becomes {row.maximum:.4g}, the largest value"),
        ("normal", sweep.smallest, row.min_normal, f"smallest |x| becomes {row.min_normal:.3g}, the smallest normal"),
        (
            *("flush", sweep.smallest, row.min_subnormal),
            f"smallest |x| becomes {row.min_subnormal:.3g}, the smallest nonzero",
        ),
    )
    return [Limit(kind=kind, place=math.log2(end) - math.log2(limit), text=text) for kind, end, limit, text in ends]


def statistics_lines(sweep: ScaleSweep) -> list[str]:
    """The box of statistics: the tensor, the format, the best levels, and the recommended one."""
    return [*_tensor_lines(sweep), "", *_format_lines(sweep), *_best_lines(sweep), *_chosen_lines(sweep)]


def _tensor_lines(sweep: ScaleSweep) -> Iterator[str]:
    yield "TENSOR"
    yield _entry("elements", f"{sweep.num_elements:,}")
    yield _entry("NaN", f"{sweep.nan:,}")
    yield _entry("Inf", f"{sweep.inf:,}")
    if sweep.spoiled:
        yield _entry("spoiled", f"{sweep.spoiled:,}")
    yield _entry("zeros", f"{sweep.zero:,}")
    for name, end in (("minimum", sweep.minimum), ("maximum", sweep.maximum)):
        if end is not None:
            yield _entry(name, f"{end:.4g}")
    if sweep.largest:
        yield _entry("largest |x|", f"{sweep.largest:.4g}")
        yield _entry("smallest |x|", f"{sweep.smallest:.4g}")


def _format_lines(sweep: ScaleSweep) -> Iterator[str]:
    row = sweep.target
    yield f"FORMAT {sweep.scheme.name}"
    yield _entry("largest", f"{row.maximum:.6g}")
    yield _entry("min normal", f"{row.min_normal:.4g}")
    yield _entry("min subnormal", f"{row.min_subnormal:.4g}")
    yield _entry("rounding", rounding_of(sweep))
    if sweep.scheme.block_size:
        yield _entry("block", f"{sweep.scheme.block_size} along axis {sweep.options.axis}")


def _best_lines(sweep: ScaleSweep) -> Iterator[str]:
    if not sweep.levels:
        return
    yield ""
    yield f"BEST {level_name(sweep).upper()}"
    for name, label in (("mse", "by MSE"), ("cosine", "by cosine"), ("psnr", "by PSNR")):
        level = best_by(sweep, name)
        assert level is not None
        yield _entry(label, figure_text(level.exponent))


def _chosen_lines(sweep: ScaleSweep) -> Iterator[str]:
    level = sweep.recommended
    if level is None:
        return
    verdict = verdict_of(level)
    yield ""
    yield "RECOMMENDED"
    yield _entry("offset" if sweep.has_offsets else "exponent", figure_text(level.exponent))
    yield _entry("factor", factor_text(level.scale))
    yield _entry("score", f"{level.score:.4f}")
    labels = {"cosine": "cosine", "relative_error": "rel. error"}
    for name in BOX_METRICS:
        yield _entry(labels.get(name, METRICS[name].label), metric_text(name, level).removesuffix(" (nothing is lost)"))
    if counted_as(sweep):
        yield "AS THE ORIGINAL COUNTS"
    yield _entry("overflow", share_text(verdict.overflow_ratio))
    yield _entry("underflow", share_text(verdict.underflow_ratio))
    yield _entry("flushed", share_text(verdict.flushed_ratio))


def _entry(name: str, text: str) -> str:
    return f"  {name:<15}{text}"
