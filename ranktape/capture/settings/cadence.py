"""The iterations in which anything is captured, and those that this rank still captures.

Every N-th iteration is captured, from the first one on. The first iterations follow from the options and are the same
on every rank. Later ones are named by the coordinator, through the writer, when those were not enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

_LAST = 2**62
"""No iteration is above it: what is computed with them stays within 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """Every N-th iteration from a first one on."""

    start: int
    """The first that may be captured."""
    every: int
    """The distance between two of them."""
    first: int = 0
    """The training's first step: none before it can be captured."""

    def due(self, iteration: int) -> bool:
        """Whether an iteration is one of them."""
        return iteration >= self.start and (iteration - self.start) % self.every == 0

    def following(self, after: int = -1, *, count: int, without: Collection[int] = ()) -> tuple[int, ...]:
        """The next iterations above `after`, ascending; fewer where there are no more."""
        return self._following(max(after, self.first - 1), count=count, without=without)

    def past(self, *, count: int, without: Collection[int] = ()) -> list[int]:
        """Those of the first iterations from the start on that come before the training's first step."""
        asked = self._following(-1, count=count, without=without)
        return [iteration for iteration in asked if iteration < self.first]

    def _following(self, after: int, *, count: int, without: Collection[int]) -> tuple[int, ...]:
        begin = max(0, (after - self.start) // self.every + 1)
        numbers = itertools.takewhile(_LAST.__gt__, itertools.count(self.start + begin * self.every, self.every))
        return tuple(itertools.islice((one for one in numbers if one not in without), max(0, count)))


_MAX_NAMED = 3


class Schedule:
    """The iterations that are wanted, as far as this rank knows."""

    def __init__(self, words: Mapping[str, Any]) -> None:
        """Take over what the writer says at the start."""
        self._wanted: set[int] = set(words["iterations"])
        self.is_done = bool(words["is_done"])
        """Whether none is captured any more."""
        self.is_enough = bool(words["is_enough"])
        """Whether enough iterations are complete."""
        self._asked: dict[int, Mapping[str, Any]] = {}

    @property
    def iterations(self) -> list[int]:
        """All that are or were wanted, ascending."""
        return sorted(self._wanted)

    def wants(self, iteration: int) -> bool:
        """Whether an iteration is to be captured."""
        return not self.is_done and iteration in self._wanted

    def settings_of(self, iteration: int) -> Mapping[str, Any] | None:
        """What is selected in an iteration that somebody asked for; None for one that nobody did."""
        return self._asked.get(iteration)

    def between(self, before: int, after: int) -> list[int]:
        """Those that are wanted and that a training never enters which goes from one iteration to another."""
        is_jump = after > before + 1  # asked at each step of the training
        return (
            [wanted for wanted in self.iterations if before < wanted < after and self.wants(wanted)] if is_jump else []
        )

    def learn(self, words: Mapping[str, Any], *, iteration: int) -> list[int]:
        """Take over what the writer says now; those of the new iterations that are past already."""
        named = set(words.get("iterations", self._wanted))
        late = sorted(new for new in named - self._wanted if new < iteration)
        self._wanted |= named
        self.is_done = bool(words.get("is_done", self.is_done))
        self.is_enough = bool(words.get("is_enough", self.is_enough))
        self._asked |= {iteration: one["settings"] for one in words.get("asked", ()) for iteration in one["iterations"]}
        return late

    def describe_end(
        self, *, iteration: int, num_steps: int, num_recorded: int, is_interrupted: bool, why_unended: str | None
    ) -> str:
        """How the training ended, as far as the wanted iterations are concerned.

        Args:
            iteration: The one that was running.
            num_steps: Iterations that the training had ended.
            num_recorded: Those of them that were captured.
            is_interrupted: The training ended in the middle of a captured one.
            why_unended: Why no iteration has ended, though the training ran; None where one has, or nothing ran.
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
        named = ", ".join(str(wanted) for wanted in left[:_MAX_NAMED]) + (", ..." if len(left) > _MAX_NAMED else "")
        first = "the first captured iteration" if num_recorded == 0 else "the captured iteration"
        return (
            f"the training ended after {num_steps} iterations, before {first} {left[0]} (still wanted: {named}): "
            f"lower --start-at or --every, or train longer"
        )


class ScheduleOfOne(Schedule):
    """Of a process that records for itself: the first iterations in which it does, whichever they are."""

    def __init__(self, words: Mapping[str, Any], *, cadence: Cadence) -> None:
        """Take over what the writer says at the start, and which iterations may be captured."""
        super().__init__({**words, "iterations": []})
        self._cadence = cadence
        self._completed = set(words["completed"])
        self._num_named = len(words["iterations"])

    def wants(self, iteration: int) -> bool:
        """Whether an iteration is to be captured, in which something is recorded now."""
        may_begin = len(self._wanted) < self._num_named and iteration not in self._completed
        if may_begin and self._cadence.due(iteration):
            self._wanted.add(iteration)
        return super().wants(iteration)

    def learn(self, words: Mapping[str, Any], *, iteration: int) -> list[int]:
        """Take over how many iterations the writer names now; none of them has passed."""
        self._num_named = len(words.get("iterations", range(self._num_named)))
        return super().learn({**words, "iterations": []}, iteration=iteration)


class ScheduleOfRecorder(Schedule):
    """Of a flight recorder: every iteration in which a rule is due is held."""

    def __init__(self, words: Mapping[str, Any], *, cadence: Cadence) -> None:
        """Plan nothing."""
        super().__init__({**words, "iterations": [], "is_done": False})
        self._cadence = cadence

    def wants(self, iteration: int) -> bool:
        """Whether an iteration is to be held."""
        return self._cadence.due(iteration)

    def learn(self, words: Mapping[str, Any], *, iteration: int) -> list[int]:
        """Nothing: no iteration is named."""
        del words, iteration
        return []
