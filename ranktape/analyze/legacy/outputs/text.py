"""Writes the report of a sweep in the sections of the legacy tool, under its headings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.analyze.advice.verdict import verdict_of
from ranktape.analyze.legacy.outputs.words import (
    cosine_text,
    counted_as,
    decibel_text,
    factor_text,
    figure_text,
    level_name,
    level_text,
    metric_text,
    number_of,
    rounding_of,
    share_text,
    square_text,
)
from ranktape.analyze.numerics.quantization.encoded import LossSeverity
from ranktape.analyze.numerics.sweeps.options import SweepMode

if TYPE_CHECKING:
    from ranktape.analyze.advice.recommendation import Recommendation
    from ranktape.analyze.advice.verdict import Range, Verdict
    from ranktape.analyze.numerics.sweeps.metrics import Level
    from ranktape.analyze.numerics.sweeps.sweep import ScaleSweep

DOUBLE, SINGLE, SHORT = "=" * 80, "-" * 80, "-" * 40
"""Rules between sections, as the legacy tool has them."""

MODE_WORDS = {
    SweepMode.MX: "scales of blocks, a whole offset is added to the exponent of each",
    SweepMode.TENSOR: "one scale for the tensor",
    SweepMode.CHANNEL: "one scale for each channel, an offset is added to the exponent of each",
    SweepMode.LEGACY: "one scale for the tensor, in the bfloat16 arithmetic of the older tool",
}
"""What a mode is, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Which tensor a report is about."""

    name: str
    """What it is called."""
    source: str
    """Where it was read."""
    dtype: str
    """As captured."""
    judged_as: str
    """The element type of the numbers that were judged."""
    shape: tuple[int, ...]
    """In elements."""


def subject_lines(subject: Subject) -> Iterator[str]:
    """What is known of the tensor before it is swept."""
    yield f"Tensor: {subject.name}"
    yield f"Source: {subject.source}"
    as_what = "" if subject.judged_as == subject.dtype else f", judged as {subject.judged_as}"
    yield f"Shape: {list(subject.shape)}, Data Type: {subject.dtype}{as_what}"


def parameter_lines(sweep: ScaleSweep) -> Iterator[str]:
    """What was found in the tensor, and what was tried on it."""
    spoiled = f", spoiled by NaN or Inf in their block: {sweep.spoiled}" if sweep.spoiled else ""
    yield f"Elements: {sweep.num_elements}, NaN: {sweep.nan}, Inf: {sweep.inf}, zeros: {sweep.zero}{spoiled}"
    if sweep.minimum is not None and sweep.maximum is not None:
        yield f"Value Range: [{sweep.minimum:.6e}, {sweep.maximum:.6e}]"
    if sweep.largest:
        yield f"Largest Magnitude: {sweep.largest:.6e}, Smallest Nonzero Magnitude: {sweep.smallest:.6e}"
    row = sweep.target
    yield f"Format: {_format_name(sweep)}"
    yield f"Max Normal: {row.maximum:.6e}, Min Normal: {row.min_normal:.6e}, Min Subnormal: {row.min_subnormal:.6e}"
    yield f"Mode: {sweep.mode.value} ({MODE_WORDS[sweep.mode]})"
    yield from _scale_lines(sweep)
    yield f"Rounding: {rounding_of(sweep)}"
    if counted_as(sweep):
        yield "Original counts are those of the older tool, of all elements: overflow above the largest value,"
        yield "  underflow below the smallest subnormal value, flushed below the smallest normal value"
    if sweep.levels:
        first, last = sweep.levels[0].exponent, sweep.levels[-1].exponent
        what = "Scale Offsets" if sweep.has_offsets else "Scale Exponents"
        yield f"{what}: {figure_text(first)} to {figure_text(last)}, {number_of(len(sweep.levels), 'level')}"
    if sweep.note:
        yield f"Note: {sweep.note}"


def level_lines(sweep: ScaleSweep) -> Iterator[str]:
    """One line for each level."""
    digits = len(str(len(sweep.levels)))
    for number, level in enumerate(sweep.levels, start=1):
        head = f"Level {number:{digits}d}/{len(sweep.levels)}: {level_text(sweep, level)}"
        yield f"{head} (Factor: {factor_text(level.scale)}) - {_metrics(level)}, {_shares(sweep, verdict_of(level))}"


def analysis_lines(sweep: ScaleSweep, found: Recommendation) -> Iterator[str]:
    """Which level is best by each metric, which is recommended, and how much the choice matters."""
    yield DOUBLE
    yield "SCALING FACTOR ANALYSIS & RECOMMENDATIONS"
    yield DOUBLE
    yield f"Format: {_format_name(sweep)}"
    if found.recommended is None or found.stability is None:
        yield "Tested 0 scaling levels"
        yield from found.advice.conclusion
        yield DOUBLE
        return
    exponents = [level.exponent for level in sweep.levels]
    yield (
        f"Tested {number_of(len(exponents), 'scaling level')} "
        f"from {figure_text(min(exponents))} to {figure_text(max(exponents))}"
    )
    yield SINGLE
    yield "INDIVIDUAL METRIC OPTIMA:"
    yield SHORT
    for name, label in (("mse", "MSE"), ("cosine", "Cosine Similarity"), ("psnr", "PSNR"), ("mae", "MAE")):
        level = found.best[name].level
        yield f"Best {label}: {level_text(sweep, level, sign=' =')}, Factor = {factor_text(level.scale)}"
        yield f"    {_metrics(level)}"
    yield SINGLE
    yield from _composite_lines(sweep, found.recommended)
    if found.keeps_nothing:
        yield "   No level keeps anything: this one is no worse than the others"
    yield SINGLE
    yield from _performance_lines(found)
    if found.advice.metrics:
        yield SINGLE
        yield "RECOMMENDATIONS:"
        yield SHORT
        yield from found.advice.metrics
    yield SINGLE
    yield "FINAL RECOMMENDATION:"
    yield SHORT
    yield from found.advice.conclusion
    yield DOUBLE


def limit_lines(sweep: ScaleSweep, found: Recommendation) -> Iterator[str]:
    """Which levels put how much of the tensor beyond the format's limits."""
    yield DOUBLE
    yield "OVERFLOW/UNDERFLOW ANALYSIS SUMMARY"
    yield DOUBLE
    yield f"Format: {sweep.scheme.name}"
    yield f"Analyzed {number_of(len(sweep.levels), 'scaling level')}"
    yield f"Significant overflow/underflow detected in {number_of(found.num_severe, 'level')}"
    yield SINGLE
    pairs = list(zip(found.verdicts, found.after, strict=True))
    for kind, is_one in (("overflow", _overflows), ("underflow", _underflows)):
        issues = [(verdict, after) for verdict, after in pairs if is_one(verdict)]
        if issues:
            yield f"{kind.upper()} ISSUES:"
            yield SHORT
        for verdict, after in issues:
            yield from _issue(sweep, found, verdict, after, kind=kind)
    yield from _extreme_lines(sweep, found)
    yield SINGLE
    yield "OVERFLOW/UNDERFLOW RECOMMENDATIONS:"
    yield SHORT
    yield from found.advice.limits or ("Nothing to avoid",)
    if found.least_bad is not None:
        yield f"Least problematic scaling: {figure_text(found.least_bad.level.exponent)}"
        yield f"   {_shares(sweep, found.least_bad)}"
    yield DOUBLE


def results_text(sweep: ScaleSweep, found: Recommendation, *, subject: Subject) -> str:
    """The file of results: the parameters, every figure of every level, and what follows."""
    lines = ["MXFP SCALING TEST RESULTS", DOUBLE, *subject_lines(subject), *parameter_lines(sweep), DOUBLE]
    lines += ["ALL LEVELS:", *_table(sweep), DOUBLE, ""]
    lines += [*analysis_lines(sweep, found), ""]
    if sweep.levels:
        lines += limit_lines(sweep, found)
    return "\n".join(lines) + "\n"


def _format_name(sweep: ScaleSweep) -> str:
    row = sweep.target
    return f"{sweep.scheme.name} (e{row.exponent_bits}m{row.mantissa_bits})"


def _scale_lines(sweep: ScaleSweep) -> Iterator[str]:
    options = sweep.options
    if sweep.mode is SweepMode.CHANNEL:
        yield f"Axis: {options.axis}"
    if sweep.mode is SweepMode.MX:
        yield f"Block Size: {sweep.scheme.block_size}, Axis: {options.axis}"
        if sweep.scheme.has_tensor_scale:
            yield "Scales: fp8_e4m3 for each block, float32 for the tensor"
        else:
            yield f"Scale Rule: {options.rule.value}, Scale Bits: {options.bits}"


def _composite_lines(sweep: ScaleSweep, chosen: Verdict) -> Iterator[str]:
    level = chosen.level
    yield "COMPOSITE RECOMMENDATION:"
    yield SHORT
    yield f"RECOMMENDED Scaling Factor: {factor_text(level.scale)}"
    yield f"   {'Scale Offset' if sweep.has_offsets else 'Scale Exponent'}: {figure_text(level.exponent)}"
    yield f"   Composite Score: {level.score:.4f}"
    yield "   Balanced Performance:"
    named = {"cosine": "Cosine Similarity", "max_abs_error": "Max Absolute Error", "relative_error": "Relative Error"}
    for name in ("mse", "rmse", "cosine", "psnr", "sqnr", "mae", "max_abs_error", "relative_error"):
        label = named.get(name, name.upper())
        yield f"     - {label}: {metric_text(name, level)}"
    yield f"     - {_shares(sweep, chosen)}"


def _performance_lines(found: Recommendation) -> Iterator[str]:
    assert found.stability is not None
    mse, cosine, psnr = found.stability.mse, found.stability.cosine, found.stability.psnr
    yield "PERFORMANCE ANALYSIS:"
    yield SHORT
    is_beyond = found.stability.is_mse_beyond
    if is_beyond:
        yield "MSE Range: beyond float64"
    else:
        yield f"MSE Range: {mse.lowest:.6e} to {mse.highest:.6e} (delta: {mse.width:.6e})"
    yield f"Cosine Range: {cosine_text(cosine.lowest)} to {cosine_text(cosine.highest)} (delta: {cosine.width:.6f})"
    yield f"PSNR Range: {psnr.lowest:.2f} to {psnr.highest:.2f} dB (delta: {psnr.width:.2f} dB)"
    if not is_beyond:
        yield f"MSE Stability (std): {mse.deviation:.6e} ({mse.variation.value})"
    yield f"Cosine Stability (std): {cosine.deviation:.6f} ({cosine.variation.value})"
    yield f"PSNR Stability (std): {psnr.deviation:.2f} dB ({psnr.variation.value})"


def _overflows(verdict: Verdict) -> bool:
    return verdict.overflow is not LossSeverity.NONE


def _underflows(verdict: Verdict) -> bool:
    return not (verdict.underflow is verdict.flushed is LossSeverity.NONE)


def _issue(sweep: ScaleSweep, found: Recommendation, verdict: Verdict, after: Range, *, kind: str) -> Iterator[str]:
    whose, row, before = counted_as(sweep), sweep.target, found.before
    assert before is not None
    yield f"  {level_text(sweep, verdict.level)} (Factor: {factor_text(verdict.level.scale)})"
    if kind == "overflow":
        severity, limit = verdict.overflow, f"Max Normal: {row.maximum:.2e}"
        yield f"    {whose}Overflow: {verdict.overflow_count} ({share_text(verdict.overflow_ratio)})"
    else:
        severity, limit = verdict.underflow, f"Min Normal: {row.min_normal:.2e}"
        yield f"    {whose}Underflow: {verdict.underflow_count} ({share_text(verdict.underflow_ratio)})"
        yield f"    {whose}Flush to Zero: {verdict.flushed_count} ({share_text(verdict.flushed_ratio)})"
    yield f"    {limit}"
    ends = (f"[{one.minimum:.2e}, {one.maximum:.2e}]" for one in (before, after))
    yield f"    Tensor Range: {' -> '.join(ends)}"
    yield f"    Severity: {severity.value.upper()}"


def _extreme_lines(sweep: ScaleSweep, found: Recommendation) -> Iterator[str]:
    whose = counted_as(sweep).lower()
    for kind, worst, best in (
        ("overflow", found.worst_overflow, found.best_overflow),
        ("underflow", found.worst_underflow, found.best_underflow),
    ):
        yield f"{kind.upper()} EXTREMES:"
        yield SHORT
        if worst is None or best is None:
            yield f"No level {kind}s"
            continue
        for word, verdict in (("Worst", worst), ("Best", best)):
            yield f"{word} {kind.capitalize()}: {level_name(sweep)} {figure_text(verdict.level.exponent)}"
            flushed = f", {share_text(verdict.flushed_ratio)} {whose}flushed to zero" if kind == "underflow" else ""
            ratio = verdict.overflow_ratio if kind == "overflow" else verdict.underflow_ratio
            yield f"  {share_text(ratio)} {whose}{kind}{flushed}"


def _metrics(level: Level) -> str:
    cosine, psnr = cosine_text(level.cosine), decibel_text(level.psnr, level)
    return f"MSE: {square_text(level.mse, level)}, Cosine: {cosine}, PSNR: {psnr}"


def _shares(sweep: ScaleSweep, verdict: Verdict) -> str:
    whose = counted_as(sweep)
    return (
        f"{whose}Overflow: {share_text(verdict.overflow_ratio)}, "
        f"{whose}Underflow: {share_text(verdict.underflow_ratio)}, {whose}Flushed: {share_text(verdict.flushed_ratio)}"
    )


def _table(sweep: ScaleSweep) -> Iterator[str]:
    if not sweep.levels:
        yield f"none: {sweep.note}"
        return
    names = [field.name for field in dataclasses.fields(sweep.levels[0])]
    values = [[getattr(level, name) for name in names] for level in sweep.levels]
    rows = [[str(value) if isinstance(value, int) else f"{value:.9g}" for value in row] for row in values]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
