"""The iterations that may be captured, and those that this rank still has to capture.

Every N-th iteration may be captured, from a first one on. The first iterations follow from the options and are the same
on every rank. If they are not enough, the coordinator names later ones, through the writer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

_LAST = 2**62
"""Limit of an iteration's number, so that calculations with it stay within 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """Every N-th iteration from a first one on."""

    start: int
    """The first iteration that may be captured."""
    every: int
    """Distance between two iterations."""
    first: int = 0
    """The training's first step. No iteration before it can be captured."""

    def due(self, iteration: int) -> bool:
        """Whether an iteration may be captured."""
        return iteration >= self.start and (iteration - self.start) % self.every == 0

    def following(self, after: int = -1, *, count: int, without: Collection[int] = ()) -> tuple[int, ...]:
        """The next `count` iterations above `after`, ascending; fewer if there are no more."""
        begin = max(0, (max(after, self.first - 1) - self.start) // self.every + 1)
        numbers = itertools.takewhile(_LAST.__gt__, itertools.count(self.start + begin * self.every, self.every))
        return tuple(itertools.islice((number for number in numbers if number not in without), max(0, count)))

    def past(self, *, count: int, without: Collection[int] = ()) -> list[int]:
        """The iterations before the training's first step, among the first `count` from the start on."""
        planned = dataclasses.replace(self, first=0).following(count=count, without=without)
        return [iteration for iteration in planned if iteration < self.first]


_MAX_LISTED = 3


class Schedule:
    """The wanted iterations that this rank knows of."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Take the state that the writer sends at the start."""
        self._wanted: set[int] = set(state["iterations"])
        self.is_done = bool(state["is_done"])
        """Whether no further iteration is captured."""
        self.is_enough = bool(state["is_enough"])
        """Whether enough iterations are complete."""
        self._requested: dict[int, Mapping[str, Any]] = {}

    @property
    def iterations(self) -> list[int]:
        """All iterations that are or were wanted, ascending."""
        return sorted(self._wanted)

    def wants(self, iteration: int) -> bool:
        """Whether to capture an iteration."""
        return not self.is_done and iteration in self._wanted

    def settings_of(self, iteration: int) -> Mapping[str, Any] | None:
        """The settings of an iteration that was requested during the training; None for any other iteration."""
        return self._requested.get(iteration)

    def between(self, before: int, after: int) -> list[int]:
        """The wanted iterations that a training skips if it goes from `before` to `after`."""
        if after == before + 1:
            return []  # at once, as this is called at each step of the training
        return [wanted for wanted in self.iterations if before < wanted < after and self.wants(wanted)]

    def update(self, message: Mapping[str, Any], *, iteration: int) -> list[int]:
        """Update the state from the writer's message; returns the new iterations that are already past, ascending."""
        named = set(message.get("iterations", self._wanted))
        late = sorted(new for new in named - self._wanted if new < iteration)
        self._wanted |= named
        self.is_done = bool(message.get("is_done", self.is_done))
        self.is_enough = bool(message.get("is_enough", self.is_enough))
        for request in message.get("asked", ()):
            self._requested |= dict.fromkeys(request["iterations"], request["settings"])
        return late

    def describe_end(
        self, *, iteration: int, num_steps: int, num_recorded: int, is_interrupted: bool, why_unended: str | None
    ) -> str:
        """A message on how the training ended in `iteration`, with the iterations that are still wanted.

        Args:
            iteration: The iteration that was running.
            num_steps: Number of iterations that the training finished.
            num_recorded: Number of finished iterations that were captured.
            is_interrupted: Whether the training ended in the middle of a captured iteration.
            why_unended: Why no iteration finished although the training ran; None if one did, or if nothing ran.
        """
        left = [wanted for wanted in self.iterations if wanted >= iteration]
        if self.is_done or not left:
            return "the training ended"
        if why_unended is not None:
            return f"the training ended in iteration {iteration}: {why_unended}"
        if is_interrupted:
            return f"the training ended in iteration {iteration}, before its optimizer stepped"
        if num_steps == 0:
            return "the training ended before its first pass in training mode (--select mode=eval records inference)"
        listed = ", ".join(map(str, left[:_MAX_LISTED])) + (", ..." if len(left) > _MAX_LISTED else "")
        which = "the first captured iteration" if num_recorded == 0 else "the captured iteration"
        return (
            f"the training ended after {num_steps} iterations, before {which} {left[0]} (still wanted: {listed}): "
            f"lower --start-at or --every, or train longer"
        )


class ManualSchedule(Schedule):
    """The schedule of a process that records by hand: the first iterations in which it records are captured."""

    def __init__(self, state: Mapping[str, Any], *, cadence: Cadence) -> None:
        """Take the state that the writer sends at the start, and the iterations that may be captured."""
        super().__init__({**state, "iterations": []})
        self._cadence = cadence
        self._completed = set(state["completed"])
        self._max_wanted = len(state["iterations"])

    def wants(self, iteration: int) -> bool:
        """Whether to capture an iteration in which something is being recorded."""
        may_begin = len(self._wanted) < self._max_wanted and iteration not in self._completed
        if may_begin and self._cadence.due(iteration):
            self._wanted.add(iteration)
        return super().wants(iteration)

    def update(self, message: Mapping[str, Any], *, iteration: int) -> list[int]:
        """Update the number of wanted iterations from the writer's message; no iteration is ever past."""
        self._max_wanted = len(message.get("iterations", range(self._max_wanted)))
        return super().update({**message, "iterations": []}, iteration=iteration)


class RecorderSchedule(Schedule):
    """The schedule of a flight recorder, which holds every iteration of the cadence."""

    def __init__(self, state: Mapping[str, Any], *, cadence: Cadence) -> None:
        """Take the cadence; no iterations are planned."""
        super().__init__({**state, "iterations": [], "is_done": False})
        self._cadence = cadence

    def wants(self, iteration: int) -> bool:
        """Whether to hold an iteration."""
        return self._cadence.due(iteration)

    def update(self, message: Mapping[str, Any], *, iteration: int) -> list[int]:
        """Ignore the writer's message: the writer names no iterations."""
        del message, iteration
        return []
