"""Samples that are far larger than the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.findings.finding import Severity
from ranktape.analyze.findings.peers import codes_of, medians_of, octaves, robust_z, sizes_of
from ranktape.analyze.findings.sign import Judgement, Sign, count_text, factor_text, named_numbers, number_text, sign_of
from ranktape.analyze.findings.thresholds import (
    GRADIENT_SERIOUS_OCTAVES,
    GRADIENT_TAIL_OCTAVES,
    MIN_SAMPLES,
    ROBUST_Z,
    SAMPLE_OCTAVES,
    SERIOUS_OCTAVES,
)
from ranktape.analyze.identity import sample_names

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.findings.survey import Survey


def outlying_samples(survey: Survey, *, threshold: float = ROBUST_Z) -> Iterator[Sign]:
    """A sign for each sample of each rank and place that is far above its peers, in any of the records.

    Peers are the samples of the place over all ranks, microbatches and iterations. A sample also has to stand out among
    those of its own iteration, and of its own tensor where there are others: when all samples of a rank are larger,
    the rank is what stands out, and when all of an iteration are, the iteration is.
    """
    samples = survey.samples
    values = octaves(samples.absmax)
    known = np.flatnonzero(np.isfinite(values) & survey.is_floating[samples.record])
    if not known.size:
        return
    records, sizes = samples.record[known], values[known]
    places = survey.sites[records]
    moments = codes_of(places, survey.fields["attempt"][records], survey.fields["iteration"][records])
    # What all of an iteration share is no sample's own: learning makes every gradient smaller.
    apart = sizes - medians_of(moments, sizes)
    spread = medians_of(places, np.abs(apart))
    scores = robust_z(apart, spread)
    within = sizes - medians_of(records, sizes)
    is_alone = sizes_of(records) == 1
    is_gradient = survey.is_gradient[records]
    least = np.where(is_gradient, GRADIENT_TAIL_OCTAVES, SAMPLE_OCTAVES) * threshold / ROBUST_Z
    is_far = (
        (scores > threshold)
        & (apart >= least)
        & (sizes_of(places) >= MIN_SAMPLES)
        & (is_alone | (within >= least) | (sizes_of(records) < _MIN_WITHIN) & (within >= least / 2))
    )
    chosen = np.flatnonzero(is_far)
    indices, ranks = samples.index[known], survey.fields["rank"][records]
    names = sample_names(survey.records) if chosen.size else []
    groups: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    for place in chosen[np.argsort(-apart[chosen], kind="stable")].tolist():
        name = str(names[int(records[place])][int(indices[place])])
        groups[(int(places[place]), int(ranks[place]), name)].append(place)
    for (_, _, name), found in groups.items():
        worst = found[0]
        value = float(samples.absmax[known[worst]])
        yield _sign(
            survey,
            records[found],
            name,
            judgement=Judgement(
                figure="absmax",
                value=value,
                expected=value / 2.0 ** float(apart[worst]),
                deviation=float(scores[worst]),
                octaves=float(apart[worst]),
            ),
            num_peers=int((places == places[worst]).sum()) - 1,
        )


def _sign(survey: Survey, records: NDArray[np.int64], sample: str, *, judgement: Judgement, num_peers: int) -> Sign:
    far, expected, score = judgement.octaves or 0.0, judgement.expected or 0.0, judgement.deviation or 0.0
    serious = GRADIENT_SERIOUS_OCTAVES if survey.is_gradient[records[0]] else SERIOUS_OCTAVES
    iterations = named_numbers("iteration", survey.fields["iteration"][records].tolist())
    return sign_of(
        survey,
        kind="sample_outlier",
        severity=Severity.HIGH if far >= serious else Severity.MEDIUM,
        score=far,
        text=f"has an absmax of {factor_text(far)} times that of the other samples",
        evidence=(
            f"absmax {number_text(judgement.value)}, {num_peers} other samples {number_text(expected)}: "
            f"{number_text(far)} octaves, robust z {number_text(score)}; "
            f"in {count_text(len(records), 'record')} of {iterations}, rank {int(survey.fields['rank'][records[0]])}"
        ),
        positions=records,
        judgement=judgement,
        extra={"sample": sample},
    )


_MIN_WITHIN = 3
"""Of two samples in a tensor the median is half way between them."""
