"""Writes the report of a sweep in the sections of the legacy tool, and the texts of its plots."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ranktape.analyze.numerics.formats import Rounding
from ranktape.analyze.numerics.quantization.encoded import LossSeverity
from ranktape.analyze.numerics.sweeps.metrics import METRICS, Level
from ranktape.analyze.numerics.sweeps.options import SweepMode
from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep
from ranktape.analyze.questions.advice import (
    Recommendation,
    Verdict,
    best_by,
    is_lossless,
    is_square_beyond,
    range_after,
    range_before,
)

DOUBLE, SINGLE, SHORT = "=" * 80, "-" * 80, "-" * 40
"""The rules between sections, as in the legacy tool."""

PLAIN_FROM, PLAIN_BELOW = 1e-3, 1e6
"""Scales in this range are written without an exponent."""

BOX_METRICS = ("mse", "cosine", "psnr", "sqnr", "mae", "relative_error")
"""The metrics of the recommended level in the box of statistics."""

MODE_WORDS = {
    SweepMode.MX: "one scale for each block, an integer offset is added to the exponent of each",
    SweepMode.TENSOR: "one scale for the tensor",
    SweepMode.CHANNEL: "one scale for each channel, an offset is added to the exponent of each",
    SweepMode.LEGACY: "one scale for the tensor, in the bfloat16 arithmetic of the legacy tool",
}
"""A one-line description of each mode."""


class Subject(NamedTuple):
    """The tensor of a report: its name and source, its dtypes as captured and as judged, and its shape."""

    name: str
    source: str
    dtype: str
    judged_as: str
    shape: tuple[int, ...]


def subject_lines(subject: Subject) -> Iterator[str]:
    """The lines about the tensor before the sweep."""
    yield f"Tensor: {subject.name}"
    yield f"Source: {subject.source}"
    as_what = "" if subject.judged_as == subject.dtype else f", evaluated as {subject.judged_as}"
    yield f"Shape: {list(subject.shape)}, Data Type: {subject.dtype}{as_what}"


def parameter_lines(sweep: ScaleSweep) -> Iterator[str]:
    """The lines about the values of the tensor and the parameters of the sweep."""
    spoiled = f", in a block with NaN or Inf: {sweep.spoiled}" if sweep.spoiled else ""
    yield f"Elements: {sweep.num_elements}, NaN: {sweep.nan}, Inf: {sweep.inf}, zeros: {sweep.zero}{spoiled}"
    if sweep.minimum is not None and sweep.maximum is not None:
        yield f"Value Range: [{sweep.minimum:.6e}, {sweep.maximum:.6e}]"
    if sweep.largest:
        yield f"Largest Magnitude: {sweep.largest:.6e}, Smallest Nonzero Magnitude: {sweep.smallest:.6e}"
    row, options = sweep.target, sweep.options
    yield f"Format: {_format_name(sweep)}"
    yield f"Max Normal: {row.maximum:.6e}, Min Normal: {row.min_normal:.6e}, Min Subnormal: {row.min_subnormal:.6e}"
    yield f"Mode: {sweep.mode.value} ({MODE_WORDS[sweep.mode]})"
    if sweep.mode is SweepMode.CHANNEL:
        yield f"Axis: {options.axis}"
    if sweep.mode is SweepMode.MX:
        yield f"Block Size: {sweep.scheme.block_size}, Axis: {options.axis}"
        rule = f"Scale Rule: {options.rule.value}, Scale Bits: {options.bits}"
        yield "Scales: fp8_e4m3 for each block, float32 for the tensor" if sweep.scheme.has_tensor_scale else rule
    yield f"Rounding: {rounding_of(sweep)}"
    if counted_as(sweep):
        yield "Original counts are those of the legacy tool, of all elements: overflow above the largest value,"
        yield "  underflow below the smallest subnormal value, flushed below the smallest normal value"
    if sweep.levels:
        ends = f"{exponent_text(sweep.levels[0].exponent)} to {exponent_text(sweep.levels[-1].exponent)}"
        what = "Scale Offsets" if sweep.has_offsets else "Scale Exponents"
        yield f"{what}: {ends}, {number_of(len(sweep.levels), 'level')}"
    if sweep.note:
        yield f"Note: {sweep.note}"


def level_lines(sweep: ScaleSweep) -> Iterator[str]:
    """A line for each level."""
    digits = len(str(len(sweep.levels)))
    for number, level in enumerate(sweep.levels, start=1):
        head = f"Level {number:{digits}d}/{len(sweep.levels)}: {_level_text(sweep, level)}"
        yield f"{head} (Factor: {factor_text(level.scale)}) - {_metrics(level)}, {_shares(sweep, Verdict(level))}"


def analysis_lines(found: Recommendation) -> Iterator[str]:
    """The lines about the best level by each metric, the recommended level, and how much the choice matters."""
    sweep, chosen = found.sweep, found.recommended
    yield from _section("SCALING FACTOR ANALYSIS & RECOMMENDATIONS", around=DOUBLE)
    yield f"Format: {_format_name(sweep)}"
    if chosen is None:
        yield from ("Tested 0 scaling levels", *found.advice.conclusion, DOUBLE)
        return
    exponents = [level.exponent for level in sweep.levels]
    ends = f"from {exponent_text(min(exponents))} to {exponent_text(max(exponents))}"
    yield f"Tested {number_of(len(exponents), 'scaling level')} {ends}"
    yield from _section("INDIVIDUAL METRIC OPTIMA:")
    for name, label in (("mse", "MSE"), ("cosine", "Cosine Similarity"), ("psnr", "PSNR"), ("mae", "MAE")):
        level = found.best[name]
        yield f"Best {label}: {_level_text(sweep, level, sign=' =')}, Factor = {factor_text(level.scale)}"
        yield f"    {_metrics(level)}"
    level = chosen.level
    yield from _section("COMPOSITE RECOMMENDATION:")
    yield f"RECOMMENDED Scaling Factor: {factor_text(level.scale)}"
    yield f"   {'Scale Offset' if sweep.has_offsets else 'Scale Exponent'}: {exponent_text(level.exponent)}"
    yield f"   Composite Score: {level.score:.4f}"
    yield "   Balanced Performance:"
    named = {"cosine": "Cosine Similarity", "max_abs_error": "Max Absolute Error", "relative_error": "Relative Error"}
    for name in ("mse", "rmse", "cosine", "psnr", "sqnr", "mae", "max_abs_error", "relative_error"):
        yield f"     - {named.get(name, name.upper())}: {metric_text(name, level)}"
    yield f"     - {_shares(sweep, chosen)}"
    if found.loses_everything:
        yield "   All levels lose nearly everything: this one is no worse than the others"
    mse, cosine, psnr = (found.spreads[name] for name in ("mse", "cosine", "psnr"))
    lowest, highest = cosine_text(cosine.lowest), cosine_text(cosine.highest)
    yield from _section("PERFORMANCE ANALYSIS:")
    yield (
        "MSE Range: outside the range of float64"
        if found.is_mse_beyond
        else f"MSE Range: {mse.lowest:.6e} to {mse.highest:.6e} (delta: {mse.width:.6e})"
    )
    yield f"Cosine Range: {lowest} to {highest} (delta: {cosine.width:.6f})"
    yield f"PSNR Range: {psnr.lowest:.2f} to {psnr.highest:.2f} dB (delta: {psnr.width:.2f} dB)"
    if not found.is_mse_beyond:
        yield f"MSE Stability (std): {mse.deviation:.6e} ({mse.variation.value})"
    yield f"Cosine Stability (std): {cosine.deviation:.6f} ({cosine.variation.value})"
    yield f"PSNR Stability (std): {psnr.deviation:.2f} dB ({psnr.variation.value})"
    if found.advice.metrics:
        yield from (*_section("RECOMMENDATIONS:"), *found.advice.metrics)
    yield from (*_section("FINAL RECOMMENDATION:"), *found.advice.conclusion, DOUBLE)


def _section(heading: str, *, around: str = "") -> tuple[str, str, str]:
    return around or SINGLE, heading, around or SHORT


def limit_lines(found: Recommendation) -> Iterator[str]:
    """The lines about the values beyond the format's limits at each level."""
    sweep, whose = found.sweep, counted_as(found.sweep)
    num_severe = sum(not verdict.is_clean for verdict in found.verdicts)
    yield from _section("OVERFLOW/UNDERFLOW ANALYSIS SUMMARY", around=DOUBLE)
    yield f"Format: {sweep.scheme.name}"
    yield f"Analyzed {number_of(len(sweep.levels), 'scaling level')}"
    yield f"Significant overflow/underflow detected in {number_of(num_severe, 'level')}"
    yield SINGLE
    for kinds in (("overflow",), ("underflow", "flushed")):
        issues = [verdict for verdict in found.verdicts if verdict.severity_by(*kinds) is not LossSeverity.NONE]
        if issues:
            yield from (f"{kinds[0].upper()} ISSUES:", SHORT)
        for verdict in issues:
            yield from _issue(sweep, verdict, kinds=kinds)
    for kind in ("overflow", "underflow"):
        yield from (f"{kind.upper()} EXTREMES:", SHORT)
        if kind not in found.extremes:
            yield f"No level {kind}s"
        for word, verdict in zip(("Worst", "Best"), found.extremes.get(kind, ()), strict=False):
            share, flushed = (share_text(verdict.ratio(one)) for one in (kind, "flushed"))
            yield f"{word} {kind.capitalize()}: {level_name(sweep)} {exponent_text(verdict.level.exponent)}"
            rest = f", {flushed} {whose.lower()}flushed to zero" if kind == "underflow" else ""
            yield f"  {share} {whose.lower()}{kind}{rest}"
    yield from _section("OVERFLOW/UNDERFLOW RECOMMENDATIONS:")
    yield from found.advice.limits or ("No levels to avoid",)
    if found.least_bad is not None:
        yield f"Least problematic scaling: {exponent_text(found.least_bad.level.exponent)}"
        yield f"   {_shares(sweep, found.least_bad)}"
    yield DOUBLE


def results_text(found: Recommendation, *, subject: Subject) -> str:
    """The file of results: the parameters, all metrics of every level, and the analysis."""
    sweep = found.sweep
    lines = ["MXFP SCALING TEST RESULTS", DOUBLE, *subject_lines(subject), *parameter_lines(sweep), DOUBLE]
    lines += ["ALL LEVELS:", *_table(sweep), DOUBLE, ""]
    lines += [*analysis_lines(found), ""]
    lines += limit_lines(found) if sweep.levels else []
    return "\n".join(lines) + "\n"


def _format_name(sweep: ScaleSweep) -> str:
    row = sweep.target
    return f"{sweep.scheme.name} (e{row.exponent_bits}m{row.mantissa_bits})"


def _issue(sweep: ScaleSweep, verdict: Verdict, *, kinds: Sequence[str]) -> Iterator[str]:
    row, before, after = sweep.target, range_before(sweep), range_after(sweep, level=verdict.level)
    yield f"  {_level_text(sweep, verdict.level)} (Factor: {factor_text(verdict.level.scale)})"
    for kind in kinds:
        label = {"flushed": "Flush to Zero"}.get(kind, kind.capitalize())
        yield f"    {counted_as(sweep)}{label}: {verdict.count(kind)} ({share_text(verdict.ratio(kind))})"
    is_overflow = kinds[0] == "overflow"
    yield f"    Max Normal: {row.maximum:.2e}" if is_overflow else f"    Min Normal: {row.min_normal:.2e}"
    yield f"    Tensor Range: {' -> '.join(f'[{one.minimum:.2e}, {one.maximum:.2e}]' for one in (before, after))}"
    yield f"    Severity: {verdict.severity_by(kinds[0]).value.upper()}"


def _metrics(level: Level) -> str:
    return f"MSE: {square_text(level)}, Cosine: {cosine_text(level.cosine)}, PSNR: {decibel_text(level.psnr, level)}"


def _shares(sweep: ScaleSweep, verdict: Verdict) -> str:
    kinds = ("overflow", "underflow", "flushed")
    return ", ".join(f"{counted_as(sweep)}{kind.capitalize()}: {share_text(verdict.ratio(kind))}" for kind in kinds)


def _table(sweep: ScaleSweep) -> Iterator[str]:
    if not sweep.levels:
        yield f"none: {sweep.note}"
        return
    names = [field.name for field in dataclasses.fields(sweep.levels[0])]
    values = [[getattr(level, name) for name in names] for level in sweep.levels]
    rows = [names, *([str(value) if isinstance(value, int) else f"{value:.9g}" for value in row] for row in values)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))


class Limit(NamedTuple):
    """A level at which the tensor reaches a limit of the format."""

    kind: str
    """`largest`, `normal`, `flush`, or `rule`."""
    place: float
    """The exponent, or the offset."""
    text: str
    """Description of the limit."""


def _level_text(sweep: ScaleSweep, level: Level, *, sign: str = ":") -> str:
    return f"{level_name(sweep)}{sign} {exponent_text(level.exponent)}"


def level_name(sweep: ScaleSweep) -> str:
    """The name of a level's number."""
    return "Scale Offset" if sweep.has_offsets else "Scale Exp"


def exponent_text(exponent: float) -> str:
    """An exponent or offset, with two decimals as in the legacy tool."""
    return f"{exponent:.2f}"


def factor_text(scale: float) -> str:
    """A scale with six decimals, or with an exponent if it is very small or large."""
    return f"{scale:.6f}" if PLAIN_FROM <= scale < PLAIN_BELOW else f"{scale:.6e}"


def cosine_text(cosine: float) -> str:
    """A cosine; only exactly 1 is shown as 1."""
    text = f"{cosine:.6f}"
    return text if text != "1.000000" or cosine == 1 else f"{cosine:.12f}"


def decibel_text(ratio: float, level: Level) -> str:
    """A ratio of a level in dB; infinite if nothing is lost. Negative zero is shown as zero."""
    return f"{round(ratio, 2) + 0.0:.2f} dB" + (" (no error)" if is_lossless(level) else "")


def square_text(level: Level) -> str:
    """The mean squared error of a level, which can be outside the range of float64."""
    return "beyond float64" if is_square_beyond(level) else f"{level.mse:.6e}"


def number_of(count: int, thing: str) -> str:
    """A count with its noun, in the plural unless the count is 1."""
    return f"{count:,} {thing}" + ("" if count == 1 else "s")


def share_text(ratio: float) -> str:
    """A ratio in percent; only exactly zero is shown as 0 %."""
    percent = 100 * ratio
    return f"{percent:.2f}%" if ratio == 0 or percent >= 0.01 else f"{percent:.2e}%"  # noqa: PLR2004 - two decimals


def metric_text(name: str, level: Level) -> str:
    """A metric of a level with its unit."""
    value = METRICS[name].of(level)
    if name in {"cosine", "relative_error"}:
        return cosine_text(value) if name == "cosine" else share_text(value)
    if name == "mse":
        return square_text(level)
    return decibel_text(value, level) if METRICS[name].unit == "dB" else f"{value:.6e}"


def counted_as(sweep: ScaleSweep) -> str:
    """The prefix of count names: in a legacy sweep, counts are those of the original tool."""
    return "Original " if sweep.mode is SweepMode.LEGACY else ""


def rounding_of(sweep: ScaleSweep) -> str:
    """The rounding of values; legacy mode has its own."""
    return Rounding.AWAY.value if sweep.mode is SweepMode.LEGACY else sweep.rounding.value


def limits_of(sweep: ScaleSweep) -> list[Limit]:
    """The levels at which the tensor reaches the format's limits; empty without levels."""
    if not sweep.levels:
        return []
    if sweep.mode in {SweepMode.MX, SweepMode.CHANNEL}:
        rule = f"scales of rule {sweep.options.rule.value!r}"
        if sweep.scheme.has_tensor_scale:
            rule = "tensor scale from the largest value"
        return [Limit("rule", 0.0, rule if sweep.mode is SweepMode.MX else "largest value of each channel aligned")]
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
    row, level, block = sweep.target, sweep.recommended, sweep.scheme.block_size
    sections: dict[str, dict[str, str]] = {
        "TENSOR": {
            "elements": f"{sweep.num_elements:,}",
            "NaN": f"{sweep.nan:,}",
            "Inf": f"{sweep.inf:,}",
            "NaN/Inf block": f"{sweep.spoiled:,}" if sweep.spoiled else "",
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
            "block": f"{block} along axis {sweep.options.axis}" if block else "",
        },
    }
    if level is not None:
        sections[f"\nBEST {level_name(sweep).upper()}"] = {
            f"by {label}": exponent_text((best_by(sweep, name) or level).exponent)
            for name, label in (("mse", "MSE"), ("cosine", "cosine"), ("psnr", "PSNR"))
        }
        labels = {"cosine": "cosine", "relative_error": "rel. error"}
        sections["\nRECOMMENDED"] = {
            "offset" if sweep.has_offsets else "exponent": exponent_text(level.exponent),
            "factor": factor_text(level.scale),
            "score": f"{level.score:.4f}",
        } | {
            labels.get(name, METRICS[name].label): metric_text(name, level).removesuffix(" (no error)")
            for name in BOX_METRICS
        }
        losses = {kind: share_text(Verdict(level).ratio(kind)) for kind in ("overflow", "underflow", "flushed")}
        sections.setdefault("ORIGINAL COUNTS" if counted_as(sweep) else "\nRECOMMENDED", {}).update(losses)
    lines = []
    for heading, entries in sections.items():
        lines += [*heading.splitlines(), *(f"  {name:<15}{text}" for name, text in entries.items() if text)]
    return lines
