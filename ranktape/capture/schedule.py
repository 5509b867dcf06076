"""The iterations that this rank still captures.

The first ones follow from the options and are the same on every rank. Later ones are named by the
coordinator, through the writer, when those were not enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ranktape.capture.settings.cadence import Cadence

_MAX_NAMED = 3


class Schedule:
    """The iterations that are wanted, as far as this rank knows."""

    def __init__(self, words: Mapping[str, Any]) -> None:
        """Take over what the writer says at the start."""
        self._wanted: set[int] = set(words["iterations"])
        self.is_done = bool(words["is_done"])
        """Whether enough iterations are complete."""

    @property
    def iterations(self) -> list[int]:
        """All that are or were wanted, ascending."""
        return sorted(self._wanted)

    def wants(self, iteration: int) -> bool:
        """Whether an iteration is to be captured."""
        return not self.is_done and iteration in self._wanted

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
        return late

    def describe_end(self, *, iteration: int, num_steps: int, num_recorded: int, is_interrupted: bool) -> str:
        """How the training ended, as far as the wanted iterations are concerned.

        Args:
            iteration: The one that was running.
            num_steps: Iterations that the training had ended.
            num_recorded: Those of them that were captured.
            is_interrupted: The training ended in the middle of a captured one.
        """
        left = [wanted for wanted in self.iterations if wanted >= iteration]
        if self.is_done or not left:
            return "the training ended"
        if is_interrupted:
            return f"the training ended in iteration {iteration}, before its optimizer stepped"
        if num_steps == 0 and left[0] == iteration:
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
