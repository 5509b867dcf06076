"""Figures that grow or shrink steadily over the iterations, or jump from one to the next.

A trend is one by the test of Mann (1945) and Kendall, and as steep as the median of the slopes between all pairs of
iterations says: Sen, "Estimates of the Regression Coefficient Based on Kendall's Tau" (1968).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ranktape.analyze.findings.finding import Severity
from ranktape.analyze.findings.peers import codes_of, middles_of, octaves
from ranktape.analyze.findings.sign import Judgement, Sign, factor_text, number_text, sign_of
from ranktape.analyze.findings.thresholds import (
    GRADIENT_SERIOUS_OCTAVES,
    JUMP_OCTAVES,
    MIN_ITERATIONS_OF_JUMP,
    MIN_MAD_OCTAVES,
    MIN_TREND_ITERATIONS,
    NORMAL_MAD,
    ROBUST_Z,
    TREND_OCTAVES,
)
from ranktape.analyze.metrics.target import largest_value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ranktape.analyze.findings.survey import Survey

    Floats = NDArray[np.float64]
    Codes = NDArray[np.int64]

TREND_Z = 2.2
"""Of Kendall's test: five values in one order reach it, four do not."""

_MAX_PAIRS = 500
"""Iterations of which all pairs are compared; of more, evenly chosen ones."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Course:
    """A figure of one place over the iterations: the middle over ranks and microbatches."""

    records: Codes
    """Those that it is made of."""
    moments: Codes
    """The iteration of each of these."""
    iterations: Codes
    """The iterations that there are, ascending."""
    values: Floats
    """The figure in each of those, in octaves: two rows, for the two in the middle of an even number of records. So a
    change of one of two ranks, which the other does not share, is none of the place."""

    @property
    def means(self) -> Floats:
        """The median of each iteration."""
        found: Floats = self.values.mean(axis=0)
        return found


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


def changing(survey: Survey, *, figure: str = "absmax") -> Iterator[Sign]:
    """A sign for each name of a tensor that grows or shrinks somewhere, and for each place that jumps."""
    growing: dict[tuple[str, bool], list[tuple[float, _Course]]] = defaultdict(list)
    sizes, middles = octaves(survey.figures[figure]), survey.middle_samples()
    # What a single sample does is none of the iteration's.
    shared = middles if np.isfinite(middles[survey.is_gradient]).any() else sizes
    usual = _usual_steps(_courses(survey, np.where(survey.is_gradient, shared, np.nan)))
    for course in _courses(survey, sizes):
        jump = _jump(course)
        if jump is not None:
            if not survey.is_gradient[course.records[0]] or _is_shared(course, jump, usual):
                yield _jumping(survey, course, figure=figure, place=jump)
            continue
        total = _steady_change(course)
        if total is not None:
            name = str(survey.fields["tensor_name"][course.records[0]])
            growing[(name, total > 0)].append((total, course))
    for found in growing.values():
        yield _trend(survey, found, figure=figure)


def _courses(survey: Survey, values: Floats) -> Iterator[_Course]:
    known = np.flatnonzero(np.isfinite(values) & survey.is_floating)
    if not known.size:
        return
    moments = survey.fields["iteration"][known].astype(np.int64)
    groups = codes_of(survey.sites[known], survey.fields["attempt"][known])
    middles = np.stack(middles_of(codes_of(groups, moments), values[known]))
    order = np.lexsort((known, moments, groups))
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    for part in np.split(order, starts[1:]):
        iterations, firsts = np.unique(moments[part], return_index=True)
        if iterations.size >= MIN_ITERATIONS_OF_JUMP:
            yield _Course(
                records=known[part], moments=moments[part], iterations=iterations, values=middles[:, part][:, firsts]
            )


def _steady_change(course: _Course) -> float | None:
    """By how many octaves the figure changes over the run, if it does so steadily."""
    if course.iterations.size < MIN_TREND_ITERATIONS:
        return None
    chosen = np.unique(np.linspace(0, course.iterations.size - 1, _MAX_PAIRS).astype(np.int64))
    times = course.iterations[chosen]
    span = float(times[-1] - times[0])
    low, high = (sen_slope(times, row[chosen]) * span for row in course.values)
    is_sure = all(abs(kendall_z(row[chosen])) >= TREND_Z for row in course.values)
    total = min(low, high, key=abs)
    return total if is_sure and low * high > 0 and abs(total) >= TREND_OCTAVES else None


def _jump(course: _Course) -> int | None:
    """The step with the largest jump, if it is one against the other steps."""
    low, high = (_jump_of(row) for row in course.values)
    return low if low == high else None


def _jump_of(values: Floats) -> int | None:
    steps = np.diff(values)
    place = int(np.argmax(np.abs(steps)))
    others = np.delete(steps, place)
    usual = float(np.median(others))
    spread = NORMAL_MAD * max(MIN_MAD_OCTAVES, float(np.median(np.abs(others - usual))))
    is_jump = abs(steps[place]) >= JUMP_OCTAVES and abs(steps[place] - usual) > ROBUST_Z * spread
    return place if is_jump else None


def _usual_steps(courses: Iterable[_Course]) -> dict[tuple[int, int], float]:
    """For each two iterations that follow one another the median step of all courses, in octaves."""
    steps: dict[tuple[int, int], list[float]] = defaultdict(list)
    for course in courses:
        for pair, step in zip(itertools.pairwise(course.iterations.tolist()), np.diff(course.means), strict=True):
            steps[pair].append(float(step))
    return {pair: float(np.median(found)) for pair, found in steps.items()}


def _is_shared(course: _Course, place: int, usual: dict[tuple[int, int], float]) -> bool:
    """Whether a gradient jumps with most others, or farther than one does that begins to learn."""
    step = float(course.means[place + 1] - course.means[place])
    before, after = course.iterations[place : place + 2].tolist()
    together = usual.get((before, after), 0.0) * np.sign(step)
    return bool(together >= JUMP_OCTAVES or abs(step) >= GRADIENT_SERIOUS_OCTAVES)


def _jumping(survey: Survey, course: _Course, *, figure: str, place: int) -> Sign:
    before, after = (float(2.0 ** course.means[one]) for one in (place, place + 1))
    iteration, previous = int(course.iterations[place + 1]), int(course.iterations[place])
    apart = float(course.means[place + 1] - course.means[place])
    return sign_of(
        survey,
        kind="trend",
        severity=Severity.MEDIUM,
        score=abs(apart),
        text=f"jumps by {factor_text(apart)} in {figure} from iteration {previous} to {iteration}",
        evidence=f"{figure} {number_text(before)} in iteration {previous}, {number_text(after)} in {iteration}",
        positions=course.records[course.moments == iteration],
        judgement=Judgement(figure=figure, value=after, expected=before, octaves=apart),
    )


def _trend(survey: Survey, found: Sequence[tuple[float, _Course]], *, figure: str) -> Sign:
    ordered = sorted(found, key=lambda pair: -abs(pair[0]))
    total, course = ordered[0]
    first, last = int(course.iterations[0]), int(course.iterations[-1])
    ends = [float(2.0 ** course.means[one]) for one in (0, -1)]
    worst = course.records[course.moments == last]
    limit = largest_value(str(survey.dtypes[worst[0]]))
    # At this rate, in as many iterations again.
    is_near = total > 0 and course.means[-1] + total > math.log2(limit)
    word = "grows" if total > 0 else "shrinks"
    of_dtype = f"{number_text(limit)}, the limit of {survey.dtypes[worst[0]]}"
    soon = f", and reaches {of_dtype}, at this rate" if is_near else ""
    return sign_of(
        survey,
        kind="trend",
        severity=Severity.MEDIUM if is_near else Severity.LOW,
        score=abs(total),
        text=f"{word} steadily by {factor_text(total)} in {figure} from iteration {first} to {last}{soon}",
        evidence=(
            f"{figure} {number_text(ends[0])} to {number_text(ends[1])}; "
            f"{len(found)} places of this tensor {word.removesuffix('s')} so"
        ),
        positions=worst,
        judgement=Judgement(figure=figure, value=ends[1], expected=ends[0], octaves=total),
    )
