"""Which gradients are lost below the smallest numbers of their type, or would be in an 8-bit format?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
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
from ranktape.analyze.findings.thresholds import FLUSHED_RATIO, LOST_RATIO, LOST_RATIO_SERIOUS, ZERO_EXCESS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.findings.survey import Survey


def underflowing(survey: Survey) -> Iterator[Sign]:
    """A sign for each place whose gradient underflows in its own type, and one for each kind that 8 bits would flush.

    What was flushed already is zero: the part of zeros counts where the same gradient has few of them in some layer.
    """
    is_judged = survey.is_gradient & survey.is_floating
    subnormal = shares(survey, survey.counts["underflow"])
    zeros = shares(survey, survey.counts["zero"])
    excess = np.where(_is_unreached(survey), 0.0, zeros - _least_of_layers(survey, zeros, is_judged))
    is_lost = is_judged & ((subnormal > LOST_RATIO) | (excess > ZERO_EXCESS))
    lost = np.where(excess > ZERO_EXCESS, subnormal + zeros, subnormal)
    for positions in by_place(survey, is_lost, lost):
        yield _lost(survey, positions, subnormal=subnormal, zeros=zeros, lost=lost)
    yield from _too_wide(survey, is_judged)


def _least_of_layers(survey: Survey, zeros: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
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


def _is_unreached(survey: Survey) -> NDArray[np.bool_]:
    """Whether a module had a tensor without elements at the same moment: an expert to which no token was sent."""
    fields = survey.fields
    moments = codes_of(*(fields[name] for name in ("rank", "attempt", "iteration", "microbatch", "module")))
    return np.isin(moments, moments[survey.figures["elements"] == 0])


def _lost(
    survey: Survey,
    positions: NDArray[np.int64],
    *,
    subnormal: NDArray[np.float64],
    zeros: NDArray[np.float64],
    lost: NDArray[np.float64],
) -> Sign:
    worst = int(positions[0])
    dtype, ratio = survey.dtypes[worst], float(lost[worst])
    is_all_zero = bool(zeros[worst] == 1)
    is_peer = survey.roles == survey.roles[worst]
    peers = is_peer & (survey.sites != survey.sites[worst])
    expected = float(np.median(lost[peers])) if peers.any() else None
    text = (
        "is all zero, and that of other layers is not: it underflowed, or nothing reached it"
        if is_all_zero
        else f"underflows in {dtype}: {percent_text(ratio)} of it is below the smallest normal number"
    )
    absmax = float(np.nan_to_num(survey.figures["absmax"][worst]))
    iterations = named_numbers("iteration", survey.fields["iteration"][positions].tolist())
    beside = "" if expected is None else f", in other layers {percent_text(expected)}"
    return sign_of(
        survey,
        kind="gradient_underflow",
        severity=Severity.HIGH if ratio >= LOST_RATIO_SERIOUS and not is_all_zero else Severity.MEDIUM,
        score=ratio,
        text=text,
        evidence=(
            f"subnormal {percent_text(float(subnormal[worst]))}, zero {percent_text(float(zeros[worst]))}{beside}; "
            f"absmax {number_text(absmax)}; in {count_text(len(positions), 'record')} of {iterations}"
        ),
        positions=positions,
        judgement=Judgement(figure="overflow.underflow.ratio", value=ratio, expected=expected),
    )


def _too_wide(survey: Survey, is_judged: NDArray[np.bool_]) -> Iterator[Sign]:
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
