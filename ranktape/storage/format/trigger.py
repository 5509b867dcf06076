"""What happened in a training, for which its ranks stored the iterations that they held."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any


class TriggerKind(enum.StrEnum):
    """What kind of thing happened."""

    NAN = "nan"
    """A recorded tensor held a NaN."""
    INF = "inf"
    """A recorded tensor held an infinity."""
    METRIC = "metric"
    """A metric of a recorded tensor was beyond a limit that was given (`--trigger`)."""
    SPIKE = "spike"
    """The loss, a gradient norm or another logged number was far from what it had been."""
    USER = "user"
    """The program said so (`capture.trigger`)."""
    SIGNAL = "signal"
    """A signal asked for it."""
    EXCEPTION = "exception"
    """The training ended with an error: an uncaught exception, as of a collective that timed out."""
    DEATH = "death"
    """The training process died, without a word."""


_LATE_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
"""What a launcher sends to the other ranks when one has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """Something that happened on one rank."""

    kind: TriggerKind
    """What kind of thing it is."""
    iteration: int
    """The training step in which it happened."""
    rank: int
    """The rank on which."""
    text: str
    """What happened, in a sentence: the value and the limit, the exception, the signal."""
    where: dict[str, Any] = field(default_factory=dict)
    """The fields of the record that showed it; empty where no record did."""
    metric: str = ""
    """The metric that was judged; empty where none was."""
    value: float | None = None
    """That metric; None where there is none, and where it is not finite."""
    expected: float | None = None
    """What the metric had been before, where that is known."""
    signal: str = ""
    """The signal that ended the process or asked for it; empty where none did, or it is not known."""
    traceback: str = ""
    """The last frames of the exception; empty where there was none."""
    time: float = 0.0
    """When it was noticed, in seconds since 1970."""
    attempt: int = 0
    """Number of the attempt."""

    @property
    def order(self) -> tuple[int, int, int, int, float]:
        """What came first: a value before the crash it led to, a crash before what it did to the other ranks."""
        if self.kind is TriggerKind.EXCEPTION:
            rank_of_kind = 2
        elif self.kind is TriggerKind.DEATH:
            rank_of_kind = 3 if self.signal in _LATE_SIGNALS else 1
        else:
            rank_of_kind = 0
        return self.attempt, self.iteration, rank_of_kind, int(self.where.get("counter", 0)), self.time

    def message(self) -> str:
        """One line for a person."""
        return f"iteration {self.iteration}, rank {self.rank}: {self.text}"

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON and for Zarr attributes."""
        return {**dataclasses.asdict(self), "kind": self.kind.value, "where": dict(self.where)}
