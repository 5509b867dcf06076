"""The iterations in which anything is captured, and those that this rank still captures.

Every rule has its own distance between iterations, counted from the first one, and may ask for certain iterations.
An iteration is captured when one rule is due in it. The trainers and the coordinator, which knows no rules, agree on
this from one description. The first iterations follow from the options and are the same on every rank. Later ones are
named by the coordinator, through the writer, when those were not enough.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ranktape.storage.query.filters import Filter
from ranktape.storage.query.where import parse_where

_CHUNK = 1 << 12
"""Iterations that are looked at together, at first."""

_MAX_CHUNK = 1 << 20

_MAX_LOOKED_AT = 1 << 22
"""Iterations of one rule that are looked at before it is given up."""

_LAST = 2**62
"""No iteration is above it: what is computed with them stays within 64 bits."""

_KNOWN = ("iteration",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The iterations in which one rule is due."""

    every: int
    """Their distance, from the first one of the capture on."""
    filters: tuple[Filter, ...] = ()
    """Which of these; all of the filters must hold."""
    wheres: tuple[str, ...] = ()
    """Expressions that must be able to hold in it."""

    @property
    def is_limited(self) -> bool:
        """Whether not each of the iterations of that distance is one."""
        return bool(self.filters or self.wheres)

    def mask(self, iterations: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Which of these iterations, all of the right distance, are its."""
        found = np.ones(len(iterations), dtype=np.bool_)
        for one in self.filters:
            found &= one.mask(lambda _: iterations, len(iterations))
        for text in self.wheres:
            where = parse_where(text)
            found &= where.can_hold(lambda _: iterations, known=_KNOWN, num_rows=len(iterations))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """The iterations in which at least one rule is due."""

    start: int
    """The first that may be captured."""
    beats: tuple[Beat, ...]
    """Those of each rule."""
    first: int = 0
    """The training's first step: none before it can be captured."""

    @classmethod
    def regular(cls, *, start: int, every: int, first: int = 0) -> Cadence:
        """Each so manieth iteration."""
        return cls(start=start, beats=(Beat(every=every),), first=first)

    @property
    def is_limited(self) -> bool:
        """Whether there may be an end to it."""
        return all(beat.is_limited for beat in self.beats)

    def due(self, iteration: int) -> tuple[bool, ...]:
        """For each rule, whether it is due."""
        away = iteration - self.start
        return tuple(
            away >= 0 and away % beat.every == 0 and bool(beat.mask(np.array([iteration]))[0]) for beat in self.beats
        )

    def following(self, after: int = -1, *, count: int, without: Collection[int] = ()) -> tuple[int, ...]:
        """The next iterations above `after`, ascending; fewer where there are no more.

        Iterations that are chosen one by one are looked for among the next four million.
        """
        if count <= 0:
            return ()
        begin = max(after, self.first - 1, self.start - 1)
        merged = heapq.merge(*(self._of(beat, after=begin) for beat in self.beats))
        distinct = (iteration for iteration, _ in itertools.groupby(merged) if iteration not in without)
        return tuple(itertools.islice(distinct, count))

    def past(self, *, count: int, without: Collection[int] = ()) -> list[int]:
        """Those of the first iterations from the start on that come before the training's first step."""
        asked = dataclasses.replace(self, first=0).following(count=count, without=without)
        return [iteration for iteration in asked if iteration < self.first]

    def _of(self, beat: Beat, *, after: int) -> Iterator[int]:
        first = self.start + ((after - self.start) // beat.every + 1) * beat.every
        if not beat.is_limited:
            yield from itertools.takewhile(_LAST.__gt__, itertools.count(first, beat.every))
            return
        size, looked_at = _CHUNK, 0
        while looked_at < _MAX_LOOKED_AT and first < _LAST:
            size = min(size, (_LAST - first) // beat.every + 1)
            iterations = first + beat.every * np.arange(size, dtype=np.int64)
            yield from iterations[beat.mask(iterations)].tolist()
            first += beat.every * size
            looked_at += size
            size = min(4 * size, _MAX_CHUNK)


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
            return "the training ended before its first pass in training mode (--mode=eval records inference)"
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
        if may_begin and any(self._cadence.due(iteration)):
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
        return any(self._cadence.due(iteration))

    def learn(self, words: Mapping[str, Any], *, iteration: int) -> list[int]:
        """Nothing: no iteration is named."""
        del words, iteration
        return []
