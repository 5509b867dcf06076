"""Finds where two runs begin to differ by more than equal runs do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ranktape.analyze.comparison.figures import PairFigure, judged_value

if TYPE_CHECKING:
    from ranktape.analyze.comparison.layouts import Parts
    from ranktape.analyze.numerics.differences.differences import Differences
    from ranktape.analyze.numerics.distributions.distances import Distances
    from ranktape.storage import Records


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPair:
    """Two tensors, and what sets them apart."""

    a: Parts
    """Where in the first side the reference is."""
    b: Parts
    """Where in the second side what is compared with it is."""
    order: int
    """Its place in the order of execution, from 1."""
    differences: Differences | None
    """Element by element; None where the distributions alone are compared."""
    distances: Distances | None
    """Between the distributions; None where they were not asked for."""
    floor: float | None
    """The judged figure between the reference and its twin in an equal run; None without one."""
    ratio: float | None
    """The judged figure over the floor; infinite where the floor is 0 and the figure is not; None without a floor."""
    diverges: bool | None
    """Whether the difference is larger than what is tolerated; None where that cannot be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Says which pairs diverge."""

    figure: PairFigure
    """What is compared with the limits."""
    tolerance: float
    """The figure may be as large as this."""
    margin: float
    """It may be as many times as large as the noise floor."""
    has_noise: bool
    """Whether there is an equal run to know the floor from."""
    is_same_tensor: bool
    """Whether both sides are the same tensors of a model: others do not diverge, they are different."""

    def judge(
        self, differences: Differences | None, twin: Differences | None, distances: Distances | None
    ) -> tuple[float | None, float | None, bool | None]:
        """The floor, the figure over the floor, and whether the pair diverges.

        Distributions alone diverge where they are not the same at all, if nothing is tolerated and no noise is known.
        """
        if differences is None:
            return None, None, self._judge_alone(distances) if self.is_same_tensor else None
        value = judged_value(self.figure, differences)
        floor = None if twin is None else judged_value(self.figure, twin)
        if self.has_noise and floor is None:
            return None, None, None
        limit = max(self.tolerance, self.margin * (floor or 0.0))
        ratio = None if value is None or floor is None else _ratio(value, floor)
        return floor, ratio, None if value is None or not self.is_same_tensor else value > limit

    def _judge_alone(self, distances: Distances | None) -> bool | None:
        return None if distances is None or self.tolerance or self.has_noise else distances.differ


def execution_order(records: Records, rows: list[int]) -> list[int]:
    """For each row its place in the order of execution, from 1: by iteration, microbatch, counter and rank."""
    columns = [records.column(field).tolist() for field in ("iteration", "microbatch", "counter", "rank")]
    ordered = sorted(range(len(rows)), key=lambda place: [column[rows[place]] for column in columns])
    places = [0] * len(rows)
    for order, place in enumerate(ordered, start=1):
        places[place] = order
    return places


def _ratio(value: float, floor: float) -> float | None:
    if math.isinf(floor):
        return None
    return value / floor if floor else (math.inf if value else None)
