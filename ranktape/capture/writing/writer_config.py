"""What the trainer tells its writer process at the start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_MAX_TOLD = 8
"""Ends of writers that the run names, the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterConfig:
    """What the trainer tells its writer at the start."""

    url: str
    """Where the run is."""
    storage_options: dict[str, Any] = field(repr=False)
    """For fsspec; may hold secrets, so this document passes through a pipe."""
    rank: int
    """Global rank."""
    trainer_pid: int
    """The process whose end is the end of the capture."""
    launch: dict[str, Any]
    """Fields of `Launch`."""
    options: dict[str, Any]
    """Of the capture, without secrets, for the run's document."""
    environment: dict[str, Any]
    """Of the trainer: host, versions, revision."""
    resume: bool
    """Continue the run that is there."""
    overwrite: bool
    """Delete the run that is there."""
    add: bool
    """Add to the run that is there."""
    is_manual: bool
    """Whether all that is recorded was saved by hand."""
    cadence: dict[str, Any]
    """The iterations that may be captured: `Cadence` as JSON."""
    target: int
    """Complete iterations at which capture stops."""
    min_iterations: int
    """Complete iterations that are guaranteed."""
    keep_last: int | None
    """How many complete iterations stay; None for all."""
    policy: str
    """What happens when there is no room."""
    compression: str
    """How values are packed."""
    store_timeout_seconds: float
    """Longest time that a write is tried again."""
    store_concurrency: int
    """Tensors, or stacks of small ones, that are sent at the same time."""
    ring_path: str | None
    """Where the ring lies, to be removed at the end; None for one in memory."""
    spill_dir: str | None
    """Where iterations go that the store does not take; None for nowhere."""
    join_timeout_seconds: float
    """Longest wait for rank 0's run to appear."""
    finish_timeout_seconds: float
    """Longest wait for other ranks at the end."""
    attempt: str | None = None
    """The attempt to go on with; None for a new one. The rest is about the writers before this one, all killed."""
    deaths: list[str] = field(default_factory=list)
    """How they ended."""
    gives_up: bool = False
    """Whether what the last one left is given up: it may be what killed it."""
    unsettled: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    """The slots that ended an iteration that is not settled: end, kind and header of each."""

    @property
    def trouble(self) -> str:
        """What the run says of those writers; empty where there were none."""
        times = "once" if len(self.deaths) == 1 else f"{len(self.deaths)} times"
        return f"its writer was started again {times} ({'; '.join(self.deaths[-_MAX_TOLD:])})" if self.deaths else ""
