"""Follows pipeline schedules, and tells the calls that a recomputation repeats from new ones.

A schedule of `torch.distributed.pipelining` runs its microbatches in an order of its own, and rehearses once on data
that is none. It says what it runs to its stages: there we listen while an iteration is captured.

Activation checkpointing runs a segment of the forward again in the backward pass. What is recorded there must be
named like the first pass, whose microbatch may long be over, and a layer that is called twice in a segment must
not exchange its calls. So every function that is handed to a checkpoint carries the moment at which it ran first.
Under a checkpoint of a kind that is not listed here, calls are taken from the last to the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ranktape.capture.hooks.hook import MODE, Make, as_itself
from ranktape.capture.passes.passes import is_running

if TYPE_CHECKING:
    from torch import nn

    from ranktape.capture.guard import Guard
    from ranktape.capture.passes.tracker import Tracker


_REHEARSALS = ("_prepare_forward_infra", "_prepare_backward_infra")


def is_rehearsing() -> bool:
    """Whether a schedule rehearses on this thread; what was loaded in the middle of it has not seen it begin."""
    return any(is_running(name) for name in _REHEARSALS)


def stage_prefix(stage: int, layer_indexes: list[int]) -> str:
    """What the paths of a stage's modules begin with, so that no two stages have the same.

    Empty where the layers are numbered through all stages: the first stage has none, so its own begin at 0.
    """
    known = [index for index in layer_indexes if index >= 0]
    return "" if stage == 0 or (known and min(known) > 0) else f"stage{stage}."


_HANDED = (
    ("torch.utils.checkpoint.CheckpointFunction.forward", 1, True),
    ("torch.utils.checkpoint._checkpoint_without_reentrant_generator", 0, False),
    ("torch.distributed._composable.checkpoint_activation._checkpoint_without_reentrant_generator", 0, False),
    ("megatron.core.tensor_parallel.random.CheckpointFunction.forward", 1, True),
    ("megatron.core.tensor_parallel.random.CheckpointWithoutOutput.checkpoint", 1, True),
    ("transformer_engine.pytorch.distributed._CheckpointFunction.forward", 1, True),
    ("deepspeed.runtime.activation_checkpointing.checkpointing.CheckpointFunction.forward", 1, True),
)
"""Functions that are handed the function of a segment: which argument that is, and whether the first pass calls what it
was handed, too."""


def framework_replacements(
    tracker: Tracker, guard: Guard, on_stage: Callable[[nn.Module, int], None]
) -> Iterator[tuple[str, Make]]:
    """What listens to pipeline schedules, and stands between checkpoints and their segments, by dotted names.

    `on_stage` is called with a stage that is about to run, and its index; the guard contains what goes wrong.
    """

    def staged(stage: Any, fwd_chunk_id: int, *_args: Any, **_kwargs: Any) -> AbstractContextManager[None]:
        with guard:
            on_stage(stage.submod, stage.stage_index)
        num_microbatches = getattr(stage, "chunks", None)
        return tracker.staged(int(fwd_chunk_id), of=num_microbatches if isinstance(num_microbatches, int) else None)

    def within(
        context: Callable[..., AbstractContextManager[None]], original: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            with context(*args, **kwargs):
                return original(*args, **kwargs)

        return replacement

    def around(position: int, original: Callable[..., Any], *, runs_first: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            handed = list(args)
            with guard:
                if len(args) > position and callable(args[position]):
                    handed[position] = Segment(args[position], tracker=tracker, runs_first=runs_first)
            return original(*handed, **kwargs)

        return replacement

    contexts = {
        "_PipelineStageBase.forward_one_chunk": staged,
        "_PipelineStageBase.backward_weight_one_chunk": lambda *_args, **_kwargs: tracker.adding_weights(),
        **{
            f"{owner}.{name}": lambda *_args, **_kwargs: tracker.rehearsing()
            for owner in ("PipelineStage", "_PipelineStage")
            for name in _REHEARSALS
        },
    }
    for path, context in contexts.items():
        yield f"torch.distributed.pipelining.stage.{path}", functools.partial(within, context)
    for name, position, runs_first in _HANDED:
        yield name, functools.partial(around, position, runs_first=runs_first)


class Segment:
    """A function that a checkpoint runs again, and that says so to the tracker."""

    def __init__(self, function: Callable[..., Any], *, tracker: Tracker, runs_first: bool) -> None:
        self._function = function
        self._is_first = runs_first
        self._repeating = tracker.repetition()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        if self._is_first:
            self._is_first = False
            return self._function(*args, **kwargs)
        with self._repeating(), MODE.active():
            return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """As the function: a framework keeps it on a module until the backward pass."""
        return as_itself(self._function)
