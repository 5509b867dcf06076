"""Tells the calls that a recomputation repeats from new ones.

Activation checkpointing runs a segment of the forward again in the backward pass. What is recorded there must be
named like the first pass, whose microbatch may long be over, and a layer that is called twice in a segment must
not exchange its calls. So every function that is handed to a checkpoint carries the moment at which it ran first.
Under a checkpoint of a kind that is not listed here, calls are taken from the last to the first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.capture.hooks.hook import Replacement, as_itself

if TYPE_CHECKING:
    from ranktape.capture.guard import Guard
    from ranktape.capture.passes.tracker import Tracker


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A function that is handed the function of a segment."""

    module: str
    """Where it is; it is replaced once that is loaded."""
    name: str
    """What it is called there."""
    position: int
    """The argument that is the segment's function."""
    runs_first: bool = True
    """Whether the first pass calls what it was handed, too."""


CHECKPOINTS = (
    Checkpoint(module="torch.utils.checkpoint", name="CheckpointFunction.forward", position=1),
    Checkpoint(
        module="torch.utils.checkpoint",
        name="_checkpoint_without_reentrant_generator",
        position=0,
        runs_first=False,
    ),
    Checkpoint(
        module="torch.distributed._composable.checkpoint_activation",
        name="_checkpoint_without_reentrant_generator",
        position=0,
        runs_first=False,
    ),
    Checkpoint(module="megatron.core.tensor_parallel.random", name="CheckpointFunction.forward", position=1),
    Checkpoint(module="megatron.core.tensor_parallel.random", name="CheckpointWithoutOutput.checkpoint", position=1),
    Checkpoint(module="transformer_engine.pytorch.distributed", name="_CheckpointFunction.forward", position=1),
    Checkpoint(
        module="deepspeed.runtime.activation_checkpointing.checkpointing",
        name="CheckpointFunction.forward",
        position=1,
    ),
)
"""The kinds of checkpoints that are known."""


class CheckpointHooks:
    """What stands between checkpoints and their segments while an iteration is captured."""

    def __init__(self, *, tracker: Tracker, guard: Guard) -> None:
        """Put it in place.

        Args:
            tracker: Knows the moment.
            guard: Contains what goes wrong.
        """
        self._tracker = tracker
        self._guard = guard
        self._replacements: dict[Checkpoint, Replacement | None] = {}
        self.refresh()

    def refresh(self) -> None:
        """Put it in place for frameworks that were loaded since."""
        for kind in CHECKPOINTS:
            if kind not in self._replacements and kind.module in sys.modules:
                self._replacements[kind] = Replacement.put(
                    kind.module, kind.name, functools.partial(self._around, kind)
                )

    def remove(self) -> None:
        """Put the originals back."""
        for replacement in self._replacements.values():
            if replacement is not None:
                replacement.remove()
        self._replacements.clear()

    def _around(self, kind: Checkpoint, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def around(*args: Any, **kwargs: Any) -> Any:
            handed = args
            with self._guard:
                handed = self._with_segment(kind, args)
            return original(*handed, **kwargs)

        return around

    def _with_segment(self, kind: Checkpoint, args: tuple[Any, ...]) -> tuple[Any, ...]:
        before, rest = args[: kind.position], args[kind.position :]
        if not rest or not callable(rest[0]):
            return args
        segment = Segment(rest[0], tracker=self._tracker, runs_first=kind.runs_first)
        return (*before, segment, *rest[1:])


class Segment:
    """A function that a checkpoint runs again, and that says so to the tracker."""

    def __init__(self, function: Callable[..., Any], *, tracker: Tracker, runs_first: bool) -> None:
        self._function = function
        self._tracker = tracker
        self._is_first = runs_first
        self._moment = tracker.moment()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        if self._is_first:
            self._is_first = False
            return self._function(*args, **kwargs)
        with self._tracker.repeating(self._moment):
            return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the function has."""
        return getattr(self._function, name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """As the function: a framework keeps it on a module until the backward pass."""
        return as_itself(self._function)
