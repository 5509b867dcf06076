"""Finds layers that are far from those around them, and metrics that change over the layers or the iterations.

A trend is one by the test of Mann (1945) and Kendall, and as steep as the median of the slopes between all pairs of
iterations says: Sen, "Estimates of the Regression Coefficient Based on Kendall's Tau" (1968).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.findings import thresholds as limit
from ranktape.analyze.findings.finding import (
    Finding,
    Severity,
    factor_text,
    far_finding,
    finding_of,
    named_numbers,
    number_text,
    records_text,
)
from ranktape.analyze.findings.survey import Codes, Course, Floats, Survey, binades, codes_of, courses_of, robust_z
from ranktape.analyze.metrics.target import largest_value

LAYER_METRICS = ("rms", "absmax")
"""What layers are compared by."""

TREND_Z = 2.2
"""Of Kendall's test: five values in one order reach it, four do not."""

_MAX_PAIRS = 500
"""Iterations of which all pairs are compared; of more, evenly chosen ones."""

_MOST = 0.75
"""Of the steps from layer to layer go in one direction, for a trend over depth."""

_SIZES = ("absmax", "rms", "norm", "std", "mean_magnitude")
"""Metrics by which a gradient can be said to vanish or to explode."""


def kendall_z(values: Floats) -> float:
    """How sure it is that values rise (positive) or fall, in standard deviations of what chance would do.

    S = sum of sign(x_j - x_i) over i < j has the variance n (n - 1) (2 n + 5) / 18 if the order is chance, ties apart.
    """
    count = values.size
    signs = np.sign(values[None, :] - values[:, None])[np.triu_indices(count, k=1)].sum()
    if not signs:
        return 0.0
    return float((signs - np.sign(signs)) / math.sqrt(count * (count - 1) * (2 * count + 5) / 18))


def sen_slope(times: NDArray[np.int64], values: Floats) -> float:
    """The median of the slopes between all pairs; NaN of less than two."""
    first, second = np.triu_indices(values.size, k=1)
    if not first.size:
        return math.nan
    return float(np.median((values[second] - values[first]) / (times[second] - times[first])))


def _layers(survey: Survey, name: str) -> Iterator[Course]:
    """A metric over the layers of one kind of place, in one iteration."""
    layers = survey.fields["layer_idx"].astype(np.int64)
    groups = codes_of(survey.roles, survey.codes("attempt", "iteration"))
    known = survey.is_floating & (layers >= 0)
    yield from courses_of(groups, layers, binades(survey.metrics[name]), known=known, min_steps=limit.MIN_LAYERS)


def _iterations(survey: Survey, values: Floats) -> Iterator[Course]:
    """A metric of one place over the iterations."""
    groups, steps = codes_of(survey.sites, survey.codes("attempt")), survey.fields["iteration"]
    # A gradient of a skipped step is scaled by another loss scale than those after it.
    known = survey.is_floating & ~(survey.is_gradient & survey.skipped_times[survey.times])
    yield from courses_of(groups, steps, values, known=known, min_steps=limit.MIN_ITERATIONS_OF_JUMP)


def differing_layers(survey: Survey) -> Iterator[Finding]:
    """One for each place of a layer, by the metric that shows it best.

    A layer stands out if it does so from the layers on both sides, in the same direction. Of a gradient that is said
    as `gradient_vanishing` or `gradient_exploding`.
    """
    found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for name in LAYER_METRICS:
        for course in _layers(survey, name):
            for known in _standing_out(survey, course, name):
                found[(int(survey.sites[known["places"][0]]), known["kind"])].append(known)
    for several in found.values():
        worst = max(several, key=lambda known: abs(known["binades"]))
        # With the records of every iteration in which it shows.
        places = list(dict.fromkeys(place for known in (worst, *several) for place in known["places"].tolist()))
        seen = f"{worst['seen']}, in {named_numbers('iteration', survey.fields['iteration'][places].tolist())}"
        yield far_finding(survey, **worst | {"places": places, "seen": seen})


def _standing_out(survey: Survey, course: Course, name: str) -> Iterator[dict[str, Any]]:
    """What `far_finding` takes of each layer that stands out."""
    is_gradient = bool(survey.is_gradient[course.records[0]])
    low, high = map(_apart, course.values)
    apart = np.where(low * high > 0, np.where(np.abs(low) < np.abs(high), low, high), 0.0)
    scores = robust_z(apart, float(np.median(np.abs(apart))))
    for step, far, score in zip(course.steps.tolist(), apart.tolist(), scores.tolist(), strict=True):
        is_edge = step in {course.steps[0], course.steps[-1]}
        edge = limit.GRADIENT_TAIL_BINADES if is_gradient else limit.EDGE_LAYER_BINADES
        least = edge if is_edge else limit.LAYER_BINADES
        if abs(score) <= limit.ROBUST_Z or abs(far) < least:
            continue
        places = course.at_step(step)
        sizes, worst = binades(survey.metrics[name][places]), int(places[0])
        middle = float(np.median(sizes))
        direction = "gradient_exploding" if far > 0 else "gradient_vanishing"
        # Of all that a layer has, its weights are most like those of the layers around it.
        is_serious = not is_edge and (abs(far) >= limit.SERIOUS_BINADES or bool(survey.is_weight[worst]))
        yield {
            "places": places[np.argsort(-np.abs(sizes - middle + far), kind="stable")],
            "kind": direction if is_gradient and name in _SIZES else "layer_differs",
            "severity": Severity.MEDIUM if is_serious else Severity.LOW,
            "peers": "the next layers" if is_edge else "the layers on both sides",
            "seen": f"median of {records_text(len(places))}",
            "metric": name,
            "value": 2.0**middle,
            "expected": 2.0 ** (middle - far),
            "deviation": score,
            "binades": far,
        }


def _apart(values: Floats) -> Floats:
    """How far each layer is from those on both sides, the nearer ones; 0 where it lies between them."""
    below, above = values - _before(values), values - _before(values[::-1])[::-1]
    nearer = np.where(np.abs(below) <= np.abs(above), below, above)
    apart = np.where(below * above > 0, nearer, 0.0)
    apart[0] = values[0] - np.median(values[1 : 1 + limit.NUM_EDGE_NEIGHBOURS])
    apart[-1] = values[-1] - np.median(values[:-1][-limit.NUM_EDGE_NEIGHBOURS :])
    return apart


def _before(values: Floats) -> Floats:
    """The mean of the two layers before each; of the second the first, and of the first itself."""
    means = np.concatenate((values[:2], (values[:-2] + values[1:-1]) / 2))
    means[1] = values[0]
    return means


def vanishing_gradients(survey: Survey) -> Iterator[Finding]:
    """Gradients whose norm falls, or grows, by a large factor from the last layer to the first, step by step."""
    best: dict[int, tuple[float, Course]] = {}
    for course in _layers(survey, "norm"):
        if not survey.is_gradient[course.records[0]]:
            continue
        totals = [_change_over_layers(row) for row in course.values]
        total, role = min(totals, key=abs), int(survey.roles[course.records[0]])
        if abs(total) < limit.VANISHING_BINADES or totals[0] * totals[1] < 0:
            continue
        if role not in best or abs(total) > abs(best[role][0]):
            best[role] = total, course
    for total, course in best.values():
        first, last = course.steps[[0, -1]].tolist()
        places = course.at_step(first if total > 0 else last)
        ends = np.exp2(course.means[[0, -1]]).tolist()
        where = f"in layer {first}, {number_text(ends[1])} in layer {last}, step by step"
        yield _changed(
            survey,
            places,
            "norm",
            ends if total < 0 else ends[::-1],
            -abs(total),
            kind="gradient_vanishing" if total > 0 else "gradient_exploding",
            severity=Severity.LOW,
            text=f"has a norm that changes by {factor_text(abs(total))} over the layers",
            evidence=f"norm {number_text(ends[0])} {where}; iteration {int(survey.fields['iteration'][places[0]])}",
        )


def _change_over_layers(values: Floats) -> float:
    """By how much values change from the first to the last, if most steps go there and none is half of it; else 0."""
    steps, total = np.diff(values), float(values[-1] - values[0])
    # Most of it in one step is a layer that stands out, and is said so.
    is_steady = np.abs(steps).max() < abs(total) / 2 and (np.sign(steps) == np.sign(total)).mean() > _MOST
    return total if is_steady else 0.0


def _changed(
    survey: Survey, places: Codes, metric: str, ends: Sequence[float], binades: float, **known: Any
) -> Finding:
    """A metric that went from the one end, which was expected, to the other."""
    size: dict[str, Any] = {"score": abs(binades), "binades": binades}
    return finding_of(survey, places=places, metric=metric, expected=ends[0], value=ends[1], **size, **known)


def changing(survey: Survey, *, metric: str = "absmax") -> Iterator[Finding]:
    """One for each name of a tensor that grows or shrinks somewhere, and for each place that jumps."""
    growing: dict[tuple[str, bool], list[tuple[float, Course]]] = defaultdict(list)
    sizes, middles = binades(survey.metrics[metric]), survey.middle_samples()
    # What a single sample does is none of the iteration's.
    shared = middles if np.isfinite(middles[survey.is_gradient]).any() else sizes
    usual = _usual_steps(_iterations(survey, np.where(survey.is_gradient, shared, np.nan)))
    for course in _iterations(survey, sizes):
        low, high = (_jump(row) for row in course.values)
        if low is not None and low == high:
            if not survey.is_gradient[course.records[0]] or _is_shared(course, low, usual):
                yield _jumping(survey, course, metric=metric, place=low)
            continue
        total = _change_over_iterations(course)
        if total is not None:
            name = str(survey.fields["tensor_name"][course.records[0]])
            growing[(name, total > 0)].append((total, course))
    for found in growing.values():
        yield _trend(survey, found, metric=metric)


def _change_over_iterations(course: Course) -> float | None:
    """By how many binades the metric changes over the run, if it does so steadily."""
    if course.steps.size < limit.MIN_TREND_ITERATIONS:
        return None
    chosen = np.unique(np.linspace(0, course.steps.size - 1, _MAX_PAIRS).astype(np.int64))
    times = course.steps[chosen]
    span = float(times[-1] - times[0])
    low, high = (sen_slope(times, row[chosen]) * span for row in course.values)
    is_sure = all(abs(kendall_z(row[chosen])) >= TREND_Z for row in course.values)
    total = min(low, high, key=abs)
    return total if is_sure and low * high > 0 and abs(total) >= limit.TREND_BINADES else None


def _jump(values: Floats) -> int | None:
    """The step with the largest jump, if it is one against the other steps."""
    steps = np.diff(values)
    place = int(np.argmax(np.abs(steps)))
    others = np.delete(steps, place)
    usual = float(np.median(others))
    score = robust_z(steps[place] - usual, float(np.median(np.abs(others - usual))))
    return place if abs(steps[place]) >= limit.JUMP_BINADES and abs(score) > limit.ROBUST_Z else None


def _usual_steps(courses: Iterable[Course]) -> dict[tuple[int, int], float]:
    """For each two iterations that follow one another the median step of all courses, in binades."""
    steps: dict[tuple[int, int], list[float]] = defaultdict(list)
    for course in courses:
        for pair, step in zip(itertools.pairwise(course.steps.tolist()), np.diff(course.means), strict=True):
            steps[pair].append(float(step))
    return {pair: float(np.median(found)) for pair, found in steps.items()}


def _is_shared(course: Course, place: int, usual: dict[tuple[int, int], float]) -> bool:
    """Whether a gradient jumps with most others, or farther than one does that begins to learn."""
    step = float(course.means[place + 1] - course.means[place])
    before, after = course.steps[place : place + 2].tolist()
    together = usual.get((before, after), 0.0) * np.sign(step)
    return bool(together >= limit.JUMP_BINADES or abs(step) >= limit.GRADIENT_SERIOUS_BINADES)


def _jumping(survey: Survey, course: Course, *, metric: str, place: int) -> Finding:
    ends = np.exp2(course.means[place : place + 2]).tolist()
    before, after = course.steps[place : place + 2].tolist()
    apart = float(course.means[place + 1] - course.means[place])
    return _changed(
        survey,
        course.at_step(after),
        metric,
        ends,
        apart,
        kind="trend",
        is_sudden=True,
        severity=Severity.MEDIUM,
        text=f"jumps by {factor_text(apart)} in {metric} from iteration {before} to {after}",
        evidence=f"{metric} {number_text(ends[0])} in iteration {before}, {number_text(ends[1])} in {after}",
    )


def _trend(survey: Survey, found: Sequence[tuple[float, Course]], *, metric: str) -> Finding:
    total, course = max(found, key=lambda pair: abs(pair[0]))
    first, last = course.steps[[0, -1]].tolist()
    ends, worst = np.exp2(course.means[[0, -1]]).tolist(), course.at_step(last)
    largest = largest_value(str(survey.dtypes[worst[0]]))
    # At this rate, in as many iterations again.
    is_near = total > 0 and course.means[-1] + total > math.log2(largest)
    word = "grow" if total > 0 else "shrink"
    of_dtype = f"{number_text(largest)}, the limit of {survey.dtypes[worst[0]]}"
    soon = f", and reaches {of_dtype}, at this rate" if is_near else ""
    return _changed(
        survey,
        worst,
        metric,
        ends,
        total,
        kind="trend",
        severity=Severity.MEDIUM if is_near else Severity.LOW,
        text=f"{word}s steadily by {factor_text(total)} in {metric} from iteration {first} to {last}{soon}",
        evidence=(
            f"{metric} {number_text(ends[0])} to {number_text(ends[1])}; {len(found)} places of this tensor {word} so"
        ),
    )
