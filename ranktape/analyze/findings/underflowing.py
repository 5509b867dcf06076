"""Gradients that are lost below the smallest numbers of their type or of a format, or would be in an 8-bit format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.findings.finding import Severity
from ranktape.analyze.findings.peers import codes_of, medians_of
from ranktape.analyze.findings.sign import (
    Judgement,
    Sign,
    count_text,
    named_numbers,
    number_text,
    percent_text,
    sign_of,
)
from ranktape.analyze.findings.spoiled import by_place, shares
from ranktape.analyze.findings.survey import NARROW_FORMAT
from ranktape.analyze.findings.thresholds import (
    FLOOR_RATIO,
    FLUSHED_RATIO,
    LOST_RATIO,
    LOST_RATIO_SERIOUS,
    MIN_FLOOR_ELEMENTS,
    ZERO_EXCESS,
)
from ranktape.analyze.numerics.formats import FORMATS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.findings.survey import Survey

    Floats = NDArray[np.float64]
    Mask = NDArray[np.bool_]


_SMALLEST = {row.min_subnormal: row.name for row in reversed(FORMATS.values())}
"""Formats by their smallest number; of those that share it the best known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Losses:
    """Parts of each record that are small or zero, and what would be usual."""

    subnormal: Floats
    """Below the smallest normal number of the type."""
    zeros: Floats
    """Zero."""
    by_peers: Floats
    """Zeros in that layer of the same kind which has the fewest, up to the iteration of the record."""
    by_forward: Floats
    """Zeros in that tensor of the forward pass of the same layer which has the most; NaN where none is known."""


def underflowing(survey: Survey) -> Iterator[Sign]:
    """A sign for each place whose gradient underflows in its own type, and one for each kind that 8 bits would flush.

    What was flushed already is zero. Rounding made the zeros where many of the other values are just above a smallest
    one; else masks, ReLU or tokens without a loss did. A gradient that is nothing but zeros is lost if the layer's
    tensors of the forward pass are not, or the same gradient of other layers.
    """
    is_judged = survey.is_gradient & survey.is_floating
    losses = _losses(survey, is_judged)
    excess = np.where(_is_unreached(survey), 0.0, losses.zeros - losses.by_peers)
    is_rounded = is_judged & _is_floored(survey) & (losses.zeros - np.nan_to_num(losses.by_forward) > FLUSHED_RATIO)
    is_alone = (excess > ZERO_EXCESS) | (losses.zeros - losses.by_forward > ZERO_EXCESS)
    is_empty = is_judged & (losses.zeros == 1) & is_alone
    is_small = is_judged & (losses.subnormal > LOST_RATIO)
    is_sparse = is_judged & (excess > ZERO_EXCESS) & ~is_rounded & ~is_empty & ~is_small
    lost = losses.subnormal + np.where(is_rounded, losses.zeros, 0.0)
    for positions in by_place(survey, is_small | is_rounded, lost):
        yield _rounded(survey, positions, losses, lost=lost, is_zero=bool(is_rounded[positions[0]]))
    for mask, is_lost in ((is_empty, True), (is_sparse, False)):
        for positions in by_place(survey, mask, losses.zeros):
            yield _zero(survey, positions, losses, is_lost=is_lost)
    yield from _too_wide(survey, is_judged)


def _losses(survey: Survey, is_judged: Mask) -> _Losses:
    zeros = shares(survey, survey.counts["zero"])
    return _Losses(
        subnormal=shares(survey, survey.counts["underflow"]),
        zeros=zeros,
        by_peers=_least_of_layers(survey, zeros, is_judged),
        by_forward=_most_of_forward(survey, zeros),
    )


def _is_floored(survey: Survey) -> Mask:
    """Whether values end at a smallest one, as those do that rounding did not make zero."""
    nonzero = survey.figures["elements"] - survey.counts["zero"] - survey.counts["nan"]
    is_many = (survey.floored >= MIN_FLOOR_ELEMENTS) & (survey.floored >= FLOOR_RATIO * nonzero)
    # One number beside zero may be anything: a mean has such a gradient.
    is_grid: Mask = (survey.floored < nonzero) | np.isin(survey.figures["smallest_nonzero"], list(_SMALLEST))
    return is_many & is_grid


def _most_of_forward(survey: Survey, zeros: Floats) -> Floats:
    fields = survey.fields
    # Outside of the stack a module is a layer of its own.
    layers = np.where(fields["layer_idx"] < 0, fields["module"], "")
    names = ("attempt", "iteration", "rank", "layer_stack", "layer_idx")
    groups = codes_of(layers, *(fields[name] for name in names))
    is_forward = (fields["operation"] == "forward") & survey.is_floating & (survey.figures["elements"] > 0)
    most = np.full(int(groups.max(initial=0)) + 1, -1.0)
    np.maximum.at(most, groups[is_forward], zeros[is_forward])
    return np.where(most < 0, np.nan, most)[groups]


def _least_of_layers(survey: Survey, zeros: Floats, mask: Mask) -> Floats:
    """For each record the part of zeros that was usual, up to its iteration, in that layer of its kind with the fewest.

    Up to it: the gradients of an adapter begin as zeros in all layers, and that they do so once more is worth a word.
    """
    found = np.zeros(len(survey))
    chosen = np.flatnonzero(mask & (survey.figures["elements"] > 0))
    if not chosen.size:
        return found
    iterations = survey.fields["iteration"][chosen]
    usual = medians_of(codes_of(survey.sites[chosen], survey.fields["attempt"][chosen], iterations), zeros[chosen])
    kinds = codes_of(survey.roles[chosen], survey.fields["attempt"][chosen])
    least: dict[int, dict[int, float]] = defaultdict(dict)
    order = np.argsort(iterations, kind="stable")
    for kind, iteration, value in zip(
        kinds[order].tolist(), iterations[order].tolist(), usual[order].tolist(), strict=True
    ):
        course = least[kind]
        before = course[next(reversed(course))] if course else np.inf
        course[iteration] = min(before, value)
    found[chosen] = [least[kind][now] for kind, now in zip(kinds.tolist(), iterations.tolist(), strict=True)]
    return found


def _is_unreached(survey: Survey) -> Mask:
    """Whether a module had a tensor without elements at the same moment: an expert to which no token was sent."""
    fields = survey.fields
    moments = codes_of(*(fields[name] for name in ("rank", "attempt", "iteration", "microbatch", "module")))
    return np.isin(moments, moments[survey.figures["elements"] == 0])


def _rounded(survey: Survey, positions: NDArray[np.int64], losses: _Losses, *, lost: Floats, is_zero: bool) -> Sign:
    """Values that are subnormal, or zeros that rounding made."""
    worst = int(positions[0])
    zeros, subnormal = float(losses.zeros[worst]), float(losses.subnormal[worst])
    small = f"{percent_text(subnormal)} of it is below the smallest normal number of {survey.dtypes[worst]}"
    flushed = _flushed_text(survey, worst, zeros)
    is_small = subnormal > LOST_RATIO
    return sign_of(
        survey,
        kind="gradient_underflow",
        severity=Severity.HIGH if lost[worst] >= LOST_RATIO_SERIOUS else Severity.MEDIUM,
        score=lost[worst],
        text="underflows: " + "; ".join([*([flushed] if is_zero else []), *([small] if is_small else [])]),
        evidence=_evidence(survey, positions, losses),
        positions=positions,
        judgement=Judgement(
            figure="overflow.zero.ratio" if is_zero else "overflow.underflow.ratio",
            value=zeros if is_zero else subnormal,
            expected=_usual(survey, worst, losses.zeros if is_zero else losses.subnormal),
        ),
    )


def _zero(survey: Survey, positions: NDArray[np.int64], losses: _Losses, *, is_lost: bool) -> Sign:
    """A gradient that is nothing but zeros, or has more of them than those of other layers."""
    worst = int(positions[0])
    zeros, usual = float(losses.zeros[worst]), _usual(survey, worst, losses.zeros)
    others = "that of other layers" if losses.by_peers[worst] < ZERO_EXCESS else "what its layer computed"
    text = f"is all zero, and {others} is not: it underflowed, or nothing reached it"
    masked = f"is {percent_text(zeros)} zeros, none by rounding: tokens without a loss and ReLU have such gradients"
    return sign_of(
        survey,
        kind="gradient_underflow" if is_lost else "zero",
        severity=Severity.MEDIUM if is_lost else Severity.LOW,
        score=zeros,
        text=text if is_lost else masked,
        evidence=_evidence(survey, positions, losses),
        positions=positions,
        judgement=Judgement(figure="overflow.zero.ratio", value=zeros, expected=usual),
    )


def _flushed_text(survey: Survey, position: int, zeros: float) -> str:
    """How much is zero, what the smallest number is, and in which format it is the smallest."""
    floor = float(survey.figures["smallest_nonzero"][position])
    of_format = f", the smallest number of {_SMALLEST[floor]}" if floor in _SMALLEST else ""
    return f"rounding made {percent_text(zeros)} of it zero, and all else is at least {number_text(floor)}{of_format}"


def _usual(survey: Survey, worst: int, ratios: Floats) -> float | None:
    """The median of the same gradient in other layers."""
    is_peer = (survey.roles == survey.roles[worst]) & (survey.sites != survey.sites[worst])
    return float(np.median(ratios[is_peer])) if is_peer.any() else None


def _evidence(survey: Survey, positions: NDArray[np.int64], losses: _Losses) -> str:
    worst = int(positions[0])
    usual = _usual(survey, worst, losses.zeros)
    beside = "" if usual is None else f", in other layers {percent_text(usual)}"
    absmax = float(np.nan_to_num(survey.figures["absmax"][worst]))
    iterations = named_numbers("iteration", survey.fields["iteration"][positions].tolist())
    return (
        f"zero {percent_text(float(losses.zeros[worst]))}{beside}; "
        f"subnormal {percent_text(float(losses.subnormal[worst]))}; "
        f"absmax {number_text(absmax)}; in {count_text(len(positions), 'record')} of {iterations}"
    )


def _too_wide(survey: Survey, is_judged: Mask) -> Iterator[Sign]:
    """Gradients whose range is wider than that of the widest 8-bit format, by name of the tensor."""
    mask = is_judged & (survey.flushed > FLUSHED_RATIO)
    names = survey.fields["tensor_name"]
    for name in sorted(set(names[mask].tolist())):
        chosen = np.flatnonzero(mask & (names == name))
        ordered = chosen[np.argsort(-survey.flushed[chosen], kind="stable")]
        ratio, total = float(survey.flushed[ordered[0]]), int((is_judged & (names == name)).sum())
        yield sign_of(
            survey,
            kind="gradient_underflow",
            severity=Severity.LOW,
            score=ratio,
            text=f"would lose {percent_text(ratio)} in {NARROW_FORMAT}, even with a scale of its own",
            evidence=f"{len(chosen)} of {total} records of {name} would lose more than {percent_text(FLUSHED_RATIO)}",
            positions=ordered,
            judgement=Judgement(figure=f"flushed in {NARROW_FORMAT}", value=ratio),
        )
