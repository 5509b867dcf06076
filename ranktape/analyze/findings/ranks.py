"""Ranks whose figures are far from those of the other ranks at the same place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.findings.finding import Severity
from ranktape.analyze.findings.peers import codes_of, deviations_of, medians_of, middles_of, robust_z, sizes_of
from ranktape.analyze.findings.sign import Judgement, Sign, count_text, factor_text, named_numbers, number_text, sign_of
from ranktape.analyze.findings.spoiled import by_place
from ranktape.analyze.findings.thresholds import (
    GRADIENT_RANK_OCTAVES,
    GRADIENT_TAIL_OCTAVES,
    MAX_POOLED_MAD_OCTAVES,
    RANK_OCTAVES,
    ROBUST_Z,
    SERIOUS_OCTAVES,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.findings.survey import Survey

    Floats = NDArray[np.float64]
    Codes = NDArray[np.int64]

FIGURES = ("absmax", "rms")
"""What ranks are compared by, unless something else is asked for."""

_PAIR = 2
_CLEARLY_NEARER = 1.0
"""By so many octaves one of two ranks is nearer to its own neighbours than the other is, to be the healthy one."""


def differing_ranks(survey: Survey, *, figures: Sequence[str] = FIGURES, threshold: float = ROBUST_Z) -> Iterator[Sign]:
    """A sign for each place and rank, by the figure that shows it best.

    The same place is compared in the same iteration, microbatch and call. Where a single sample is larger it is the
    sample that stands out: the gradient of a rank does if the median of its samples does. Of two ranks the one is
    meant whose figure is farther from the layers around it, and from its own in other iterations; where neither is,
    both are.
    """
    best: dict[tuple[int, int], Sign] = {}
    least = _least(survey)
    for name in figures:
        for sign in _by_figure(survey, name=name, threshold=threshold, least=least):
            key = (int(survey.sites[sign.positions[0]]), min(sign.ranks))
            if key not in best or sign.score > best[key].score:
                best[key] = sign
    yield from best.values()


def _by_figure(survey: Survey, *, name: str, threshold: float, least: Floats) -> Iterator[Sign]:
    values = survey.octaves(name)
    known, groups = _compared(survey, values)
    if not known.size:
        return
    apart, mads = _deviations(groups, values[known], roles=survey.roles[known])
    scores = robust_z(apart, mads)
    is_far = (np.abs(scores) > threshold) & (np.abs(apart) >= least[known] * threshold / ROBUST_Z)
    is_pair = sizes_of(groups) == _PAIR
    culprits = _culprits(survey, values, known, groups, chosen=is_far & is_pair)
    # Arrays over all records, as places are told apart by them.
    apart_all, z_all = np.zeros(len(survey)), np.zeros(len(survey))
    apart_all[known], z_all[known] = apart, scores
    for mask, is_sure in (
        (is_far & ~is_pair | culprits, True),
        (is_far & is_pair & ~_settled(groups, culprits), False),
    ):
        chosen = np.zeros(len(survey), dtype=bool)
        chosen[known] = mask
        for positions in by_place(survey, chosen, np.abs(apart_all)):
            ranks = survey.fields["rank"][positions]
            for part in [positions[ranks == rank] for rank in np.unique(ranks)] if is_sure else [positions]:
                yield _sign(survey, name, part, apart=apart_all, scores=z_all, is_sure=is_sure)


def _compared(survey: Survey, values: Floats) -> tuple[Codes, Codes]:
    """The records with a value that have peers on other ranks, and which are peers."""
    known = np.flatnonzero(np.isfinite(values) & survey.is_floating)
    fields = (survey.fields[field][known] for field in ("attempt", "iteration", "microbatch", "call"))
    groups = codes_of(*fields, survey.sites[known])
    has_peers = sizes_of(groups) > 1
    return known[has_peers], groups[has_peers]


def _least(survey: Survey) -> Floats:
    """For each record by how many octaves it differs from its peers, at the least, to be told."""
    # Of shards each is another part of the tensor, and a few large channels are on one rank alone.
    is_shard = np.array(["shard(" in text for text in survey.records.column("placement").tolist()], dtype=bool)
    usual = np.where(survey.is_gradient, GRADIENT_TAIL_OCTAVES, RANK_OCTAVES)
    usual[survey.is_gradient & _is_far_by_median(survey)] = GRADIENT_RANK_OCTAVES
    return np.where(is_shard, SERIOUS_OCTAVES, usual)


def _is_far_by_median(survey: Survey) -> NDArray[np.bool_]:
    """Whether not a single sample of a record, but the median of three and more, is far from that of other ranks."""
    middles = survey.middle_samples()
    known, groups = _compared(survey, middles)
    found = np.zeros(len(survey), dtype=bool)
    if known.size:
        apart, _ = _deviations(groups, middles[known], roles=survey.roles[known])
        found[known] = np.abs(apart) >= GRADIENT_RANK_OCTAVES
    return found


def _deviations(groups: Codes, values: Floats, *, roles: Codes) -> tuple[Floats, Floats]:
    """How far each value is from its peers, and the spread among them."""
    apart, mads = deviations_of(groups, values)
    is_pair = sizes_of(groups) == _PAIR
    # Of two the middle is half way: the peer of each is the other one, and both are as far apart to the last bit.
    low, high = middles_of(groups, values)
    apart = np.where(is_pair, np.where(values == high, high - low, low - high), apart)
    pooled = medians_of(roles, np.abs(apart))
    # A handful of ranks says little about their own spread; the same tensor of all layers says more.
    return apart, np.where(is_pair, np.minimum(pooled, MAX_POOLED_MAD_OCTAVES), np.maximum(mads, pooled))


def _culprits(
    survey: Survey, values: Floats, known: Codes, groups: Codes, *, chosen: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Of pairs that differ the one that is clearly farther from what its own rank has around the place."""
    found = np.zeros(known.size, dtype=bool)
    places = np.flatnonzero(chosen)
    if not places.size:
        return found
    distances = _distances(survey, values, known[places])
    order = np.argsort(groups[places], kind="stable")
    for one, two in order.reshape(-1, _PAIR).tolist():
        gap = distances[one] - distances[two]
        if abs(gap) >= _CLEARLY_NEARER:
            found[places[one if gap > 0 else two]] = True
    return found


def _distances(survey: Survey, values: Floats, positions: Codes) -> Floats:
    """How far each record is from those of its rank: of other layers, and of other iterations; the larger one."""
    fields, sites = survey.fields, survey.sites
    moments = codes_of(*(fields[name] for name in ("rank", "attempt", "iteration")))
    layers, times = _Peers(codes_of(moments, survey.roles), values), _Peers(codes_of(fields["rank"], sites), values)
    found = np.zeros(positions.size)
    for place, position in enumerate(positions.tolist()):
        of_layers, of_times = layers.of(position), times.of(position)
        others = (of_layers[sites[of_layers] != sites[position]], of_times[moments[of_times] != moments[position]])
        known = [abs(float(np.median(values[peers])) - float(values[position])) for peers in others if peers.size]
        found[place] = max(known, default=0.0)
    return found


class _Peers:
    """The records of each group that have a value."""

    def __init__(self, groups: Codes, values: Floats) -> None:
        self._groups = groups
        order = np.argsort(groups, kind="stable")
        self._order = order[np.isfinite(values[order])]
        self._sorted = groups[self._order]

    def of(self, position: int) -> Codes:
        """Those in the group of a record."""
        first, last = np.searchsorted(self._sorted, self._groups[position] + np.arange(2))
        return self._order[first:last]


def _settled(groups: Codes, culprits: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether one of the pair is known to be the wrong one."""
    return np.isin(groups, groups[culprits])


def _sign(
    survey: Survey, name: str, positions: NDArray[np.int64], *, apart: Floats, scores: Floats, is_sure: bool
) -> Sign:
    worst = int(positions[0])
    value, far = float(survey.figures[name][worst]), float(apart[worst])
    expected = survey.figure_at(name, float(survey.octaves(name)[worst]) - far, position=worst)
    size = abs(far)
    iterations = named_numbers("iteration", survey.fields["iteration"][positions].tolist())
    peers = "the other rank" if survey.num_ranks[worst] == _PAIR else "the other ranks"
    text = (
        f"has an {name} of {factor_text(far)} times that of {peers}"
        if is_sure
        else f"differs by {factor_text(size)} in {name} between its two ranks, of which either may be wrong"
    )
    return sign_of(
        survey,
        kind="rank_differs",
        severity=Severity.HIGH if size >= SERIOUS_OCTAVES else Severity.MEDIUM,
        score=size,
        text=text.replace("an rms", "an RMS").replace(" in rms", " in RMS"),
        evidence=(
            f"{name} {number_text(value)}, {peers} {number_text(expected)}: "
            f"{number_text(size)} octaves, robust z {number_text(abs(float(scores[worst])))}; "
            f"in {count_text(len(positions), 'record')} of {iterations}"
        ),
        positions=positions,
        judgement=Judgement(figure=name, value=value, expected=expected, deviation=float(scores[worst]), octaves=far),
    )
