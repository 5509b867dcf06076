"""Tensors that hold NaN, infinities, nothing but zeros, or one value everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ranktape.analyze.findings.finding import Severity
from ranktape.analyze.findings.sign import (
    Judgement,
    Sign,
    count_text,
    named_numbers,
    number_text,
    percent_text,
    sign_of,
)
from ranktape.analyze.findings.thresholds import MIN_CONSTANT_ELEMENTS, MIN_MASKED_RATIO, MIN_SATURATED_RATIO

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.findings.survey import Survey


def spoiled(survey: Survey) -> Iterator[Sign]:
    """NaN, infinities, values beyond the type that was computed with, zeros and constants: a sign for each place."""
    yield from lost(survey)
    yield from _saturated(survey)
    yield from _zero(survey)
    yield from _constant(survey)


def lost(survey: Survey) -> Iterator[Sign]:
    """What no figure of finite values shows: NaN, infinities, and what the type that was computed with made so."""
    yield from _nan(survey)
    yield from _infinite(survey)
    yield from _overflowing(survey)


def by_place(survey: Survey, mask: NDArray[np.bool_], worst: NDArray[Any]) -> Iterator[NDArray[np.int64]]:
    """The records of a mask, those of one place together, the worst first and equal ones in order."""
    chosen = np.flatnonzero(mask)
    order = np.lexsort((chosen, -worst[chosen], survey.sites[chosen]))
    ordered = chosen[order]
    starts = np.flatnonzero(np.diff(survey.sites[ordered], prepend=-1)) if ordered.size else ordered
    yield from (part for part in np.split(ordered, starts[1:]) if part.size)


def shares(survey: Survey, counts: NDArray[Any]) -> NDArray[np.float64]:
    """The part of all elements; 0 for tensors without any."""
    found: NDArray[np.float64] = counts / np.maximum(survey.figures["elements"], 1)
    return found


def _nan(survey: Survey) -> Iterator[Sign]:
    counts = survey.counts["nan"]
    ratios = shares(survey, counts)
    for positions in by_place(survey, counts > 0, ratios):
        yield _counted(survey, positions, kind="nan", what="NaN", counts=counts, figure="overflow.nan.ratio")


def _infinite(survey: Survey) -> Iterator[Sign]:
    counts = survey.counts["captured_inf"]
    for positions in by_place(survey, (counts > 0) & survey.is_floating, shares(survey, counts)):
        worst = int(positions[0])
        if _is_mask(survey, positions):
            yield _counted(
                survey, positions, kind="inf", what="-Inf, as masks do", counts=counts, severity=Severity.LOW
            )
            continue
        dtype = survey.fields["dtype"][worst]
        yield _counted(
            survey, positions, kind="inf", what="Inf", counts=counts, more=f"; beyond the largest number of {dtype}"
        )


def _is_mask(survey: Survey, positions: NDArray[np.int64]) -> bool:
    """Whether it is what attention adds to its scores, or these: only -Inf, in a tensor that is called so.

    Or in one of a forward pass of which the same large part is -Inf in all records of all layers.
    """
    if not (survey.counts["lower"][positions] == survey.counts["inf"][positions]).all():
        return False
    if all("mask" in str(survey.fields["tensor_name"][position]).lower() for position in positions.tolist()):
        return True
    parts = shares(survey, survey.counts["inf"])[survey.roles == survey.roles[positions[0]]]
    is_forward = survey.fields["operation"][positions[0]] == "forward"
    return bool(is_forward and parts.size > 1 and parts[0] > MIN_MASKED_RATIO and (parts == parts[0]).all())


def _overflowing(survey: Survey) -> Iterator[Sign]:
    counts = survey.counts["inf"] - survey.counts["captured_inf"]
    mask = (counts > 0) & (survey.fields["dtype"] != survey.dtypes) & survey.is_floating
    for positions in by_place(survey, mask, shares(survey, counts)):
        dtype = survey.dtypes[int(positions[0])]
        yield _counted(
            survey,
            positions,
            kind="overflow",
            what=f"values beyond {dtype}, which it was computed in",
            counts=counts,
        )


def _saturated(survey: Survey) -> Iterator[Sign]:
    counts = survey.saturated
    ratios = shares(survey, counts)
    for positions in by_place(survey, (ratios > MIN_SATURATED_RATIO) & (counts > 1), ratios):
        dtype = survey.dtypes[int(positions[0])]
        yield _counted(
            survey,
            positions,
            kind="overflow",
            what=f"values cut off at the largest number of {dtype}",
            counts=counts,
            severity=Severity.MEDIUM,
        )


def _counted(
    survey: Survey,
    positions: NDArray[np.int64],
    *,
    kind: str,
    what: str,
    counts: NDArray[np.int64],
    figure: str = "overflow.ratio",
    severity: Severity = Severity.HIGH,
    more: str = "",
) -> Sign:
    moments = survey.fields["iteration"][positions]
    # What is lost spreads: where it begins is the place, and all others are counted.
    beginning = positions[moments == moments.min()]
    worst = int(beginning[0])
    elements = int(survey.figures["elements"][worst])
    ratio = counts[worst] / max(1, elements)
    ranks = named_numbers("rank", survey.fields["rank"][beginning].tolist())
    return sign_of(
        survey,
        kind=kind,
        severity=severity,
        score=ratio,
        text=f"has {what}",
        evidence=(
            f"{int(counts[worst])} of {elements} elements ({percent_text(float(ratio))}) at worst{more}; "
            f"first in iteration {int(moments.min())} on {ranks}, "
            f"in {count_text(len(positions), 'record')} in all"
        ),
        positions=beginning,
        judgement=Judgement(figure=figure, value=float(ratio)),
    )


def _zero(survey: Survey) -> Iterator[Sign]:
    """Places that are all zero in some record; gradients are judged by `underflowing`."""
    elements = survey.figures["elements"]
    mask = (survey.counts["zero"] == elements) & (elements > 0) & survey.is_floating & ~survey.is_gradient
    # Biases and the second matrix of an adapter begin as zeros.
    for positions in by_place(survey, mask & ~survey.is_weight, -survey.fields["iteration"]):
        alike = survey.sites == survey.sites[positions[0]]
        others = survey.fields["iteration"][alike & ~mask]
        # What is always zero, or begins so as what comes out of an adapter, is that by right.
        is_ordinary = not others.size or survey.fields["iteration"][positions].max() < others.min()
        yield sign_of(
            survey,
            kind="zero",
            severity=Severity.LOW if is_ordinary else Severity.MEDIUM,
            score=len(positions),
            text="is all zero",
            evidence=f"{len(positions)} of {int(alike.sum())} records of this place have no other value",
            positions=positions,
            judgement=Judgement(figure="absmax", value=0.0),
        )


def _constant(survey: Survey) -> Iterator[Sign]:
    low, high = survey.extremes.T
    is_same = (low == high) & (low != 0) & (survey.figures["elements"] >= MIN_CONSTANT_ELEMENTS)
    # Weights of norms begin as ones, and what is not finite is said elsewhere.
    is_clean = (survey.counts["nan"] == 0) & (survey.counts["inf"] == 0) & ~survey.is_weight
    for positions in by_place(survey, is_same & is_clean & survey.is_floating, survey.figures["elements"]):
        value, elements = float(low[positions[0]]), int(survey.figures["elements"][positions[0]])
        yield sign_of(
            survey,
            kind="constant",
            severity=Severity.LOW,
            score=len(positions),
            text=f"is {number_text(value)} everywhere",
            evidence=f"all {elements} elements, in {count_text(len(positions), 'record')}",
            positions=positions,
            judgement=Judgement(figure="absmax", value=abs(value)),
        )
