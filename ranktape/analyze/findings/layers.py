"""Layers whose figures are far from those of the layers around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.findings.finding import Severity
from ranktape.analyze.findings.peers import codes_of, middles_of, robust_z
from ranktape.analyze.findings.sign import Judgement, Sign, count_text, factor_text, named_numbers, number_text, sign_of
from ranktape.analyze.findings.thresholds import (
    EDGE_LAYER_OCTAVES,
    GRADIENT_TAIL_OCTAVES,
    LAYER_OCTAVES,
    MIN_LAYERS,
    NUM_EDGE_NEIGHBOURS,
    ROBUST_Z,
    SERIOUS_OCTAVES,
    VANISHING_OCTAVES,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.findings.survey import Survey

    Floats = NDArray[np.float64]
    Codes = NDArray[np.int64]

FIGURES = ("rms", "absmax")
"""What layers are compared by, unless something else is asked for."""

_SIZES = ("absmax", "rms", "norm", "std", "mean_magnitude")
"""Figures by which a gradient can be said to vanish or to explode."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Profile:
    """A figure over the layers of one kind of place, in one iteration: the middle over ranks and microbatches."""

    records: Codes
    """Those that it is made of."""
    layers: Codes
    """The layer of each of these."""
    depths: Codes
    """The layers that there are, ascending."""
    values: Floats
    """The figure of each of those, in octaves: two rows, for the two in the middle of an even number of records. So a
    fault of one of two ranks, which the other does not share, is none of the layer."""

    def of_layer(self, layer: int) -> Codes:
        """The records of a layer."""
        found: Codes = self.records[self.layers == layer]
        return found


def differing_layers(
    survey: Survey, *, figures: Sequence[str] = FIGURES, threshold: float = ROBUST_Z
) -> Iterator[Sign]:
    """A sign for each place of a layer, by the figure that shows it best.

    A layer stands out if it does so from the layers on both sides, in the same direction. Of a gradient that is said
    as `gradient_vanishing` or `gradient_exploding`.
    """
    is_gradient = survey.is_gradient
    found: dict[tuple[int, str], list[tuple[float, Sign]]] = {}
    for name in figures:
        for profile in _profiles(survey, name):
            is_of_gradient = bool(is_gradient[profile.records[0]])
            standing_out = _standing_out(profile, is_gradient=is_of_gradient, threshold=threshold)
            for layer, apart, score, is_edge in standing_out:
                place = profile.of_layer(layer)
                sign = _sign(survey, name, place, apart=apart, score=score, is_edge=is_edge, is_gradient=is_gradient)
                found.setdefault((int(survey.sites[place[0]]), sign.kind), []).append((abs(apart), sign))
    for signs in found.values():
        worst = max(signs, key=lambda pair: pair[0])[1]
        others = [position for _, sign in signs for position in sign.positions]
        yield _with_all(survey, worst, others)


def vanishing_gradients(survey: Survey) -> Iterator[Sign]:
    """Gradients whose norm falls, or grows, by a large factor from the last layer to the first, step by step."""
    is_gradient = survey.is_gradient
    best: dict[int, Sign] = {}
    for profile in _profiles(survey, "norm"):
        if not is_gradient[profile.records[0]] or profile.depths.size < MIN_LAYERS:
            continue
        totals = [_steady_change(row) for row in profile.values]
        total = min(totals, key=abs)
        if abs(total) < VANISHING_OCTAVES or totals[0] * totals[1] < 0:
            continue
        role = int(survey.roles[profile.records[0]])
        sign = _over_depth(survey, profile, total=total)
        if role not in best or sign.score > best[role].score:
            best[role] = sign
    yield from best.values()


_MOST = 0.75
"""Of the steps from layer to layer go in one direction, for a trend over depth."""


def _profiles(survey: Survey, name: str) -> Iterator[_Profile]:
    values = survey.octaves(name)
    layers = survey.fields["layer_idx"].astype(np.int64)
    known = np.flatnonzero(np.isfinite(values) & survey.is_floating & (layers >= 0))
    if not known.size:
        return
    groups = codes_of(survey.roles[known], survey.fields["attempt"][known], survey.fields["iteration"][known])
    cells = codes_of(groups, layers[known])
    middles = np.stack(middles_of(cells, values[known]))
    order = np.lexsort((known, layers[known], groups))
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    for part in np.split(order, starts[1:]):
        depths, firsts = np.unique(layers[known[part]], return_index=True)
        if depths.size > 1:
            yield _Profile(
                records=known[part], layers=layers[known[part]], depths=depths, values=middles[:, part][:, firsts]
            )


def _standing_out(
    profile: _Profile, *, is_gradient: bool, threshold: float
) -> Iterator[tuple[int, float, float, bool]]:
    """Each layer that stands out: which, by how much, its robust z, and whether it is the first or the last."""
    if profile.depths.size < MIN_LAYERS:
        return
    low, high = map(_apart, profile.values)
    apart = np.where(low * high > 0, np.where(np.abs(low) < np.abs(high), low, high), 0.0)
    spread = float(np.median(np.abs(apart)))
    scores = robust_z(apart, np.full(apart.size, spread))
    for place, (far, score) in enumerate(zip(apart.tolist(), scores.tolist(), strict=True)):
        is_edge = place in {0, profile.depths.size - 1}
        edge = GRADIENT_TAIL_OCTAVES if is_gradient else EDGE_LAYER_OCTAVES
        least = edge if is_edge else LAYER_OCTAVES
        if abs(score) > threshold and abs(far) >= least * threshold / ROBUST_Z:
            yield int(profile.depths[place]), far, score, is_edge


def _apart(values: Floats) -> Floats:
    """How far each layer is from those on both sides, the nearer ones; 0 where it lies between them."""
    below, above = values - _before(values), values - _before(values[::-1])[::-1]
    nearer = np.where(np.abs(below) <= np.abs(above), below, above)
    apart = np.where(below * above > 0, nearer, 0.0)
    apart[0] = values[0] - np.median(values[1 : 1 + NUM_EDGE_NEIGHBOURS])
    apart[-1] = values[-1] - np.median(values[:-1][-NUM_EDGE_NEIGHBOURS:])
    return apart


def _before(values: Floats) -> Floats:
    """The mean of the two layers before each; of the second the first, and of the first itself."""
    means = np.concatenate((values[:2], (values[:-2] + values[1:-1]) / 2))
    means[1] = values[0]
    return means


def _sign(
    survey: Survey,
    name: str,
    positions: Codes,
    *,
    apart: float,
    score: float,
    is_edge: bool,
    is_gradient: NDArray[np.bool_],
) -> Sign:
    sizes = survey.octaves(name)[positions]
    middle, worst = float(np.median(sizes)), int(positions[0])
    value, expected = (survey.figure_at(name, size, position=worst) for size in (middle, middle - apart))
    direction = "gradient_exploding" if apart > 0 else "gradient_vanishing"
    neighbours = "the next layers" if is_edge else "the layers on both sides"
    # Of all that a layer has, its weights are most like those of the layers around it.
    is_serious = not is_edge and (abs(apart) >= SERIOUS_OCTAVES or bool(survey.is_weight[worst]))
    return sign_of(
        survey,
        kind=direction if is_gradient[positions[0]] and name in _SIZES else "layer_differs",
        severity=Severity.MEDIUM if is_serious else Severity.LOW,
        score=abs(apart),
        text=f"has an {name} of {factor_text(apart)} times that of {neighbours}".replace("an rms", "an RMS"),
        evidence=(
            f"{name} {number_text(value)}, {neighbours} {number_text(expected)}: {number_text(abs(apart))} octaves, "
            f"robust z {number_text(abs(score))}; median of {count_text(len(positions), 'record')}"
        ),
        positions=positions[np.argsort(-np.abs(sizes - middle + apart), kind="stable")],
        judgement=Judgement(figure=name, value=value, expected=expected, deviation=score, octaves=apart),
    )


def _with_all(survey: Survey, sign: Sign, positions: Sequence[int]) -> Sign:
    """The sign with the records of every iteration in which it shows."""
    together = list(dict.fromkeys((*sign.positions, *positions)))
    iterations = named_numbers("iteration", survey.fields["iteration"][together].tolist())
    return sign_of(
        survey,
        kind=sign.kind,
        severity=sign.severity,
        score=sign.score,
        text=sign.text,
        evidence=f"{sign.evidence}, in {iterations}",
        positions=together,
        judgement=sign.judgement,
    )


def _steady_change(values: Floats) -> float:
    """By how much values change from the first to the last, if most steps go there and none is half of it; else 0."""
    steps, total = np.diff(values), float(values[-1] - values[0])
    # Most of it in one step is a layer that stands out, and is said so.
    is_steady = np.abs(steps).max() < abs(total) / 2 and (np.sign(steps) == np.sign(total)).mean() > _MOST
    return total if is_steady else 0.0


def _over_depth(survey: Survey, profile: _Profile, *, total: float) -> Sign:
    first, last = int(profile.depths[0]), int(profile.depths[-1])
    smallest = profile.of_layer(first if total > 0 else last)
    ends = [float(2.0**value) for value in profile.values.mean(axis=0)[[0, -1]]]
    iteration = int(survey.fields["iteration"][smallest[0]])
    return sign_of(
        survey,
        kind="gradient_vanishing" if total > 0 else "gradient_exploding",
        severity=Severity.LOW,
        score=abs(total),
        text=f"has a norm that changes by {factor_text(abs(total))} over the layers",
        evidence=(
            f"norm {number_text(ends[0])} in layer {first}, {number_text(ends[1])} in layer {last}, "
            f"step by step; iteration {iteration}"
        ),
        positions=smallest,
        judgement=Judgement(
            figure="norm", value=ends[0 if total > 0 else 1], expected=ends[1 if total > 0 else 0], octaves=-abs(total)
        ),
    )
