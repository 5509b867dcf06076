"""Follows pipeline schedules and activation checkpoints of frameworks.

A schedule of `torch.distributed.pipelining` runs its microbatches in its own order, and rehearses once with meaningless
data. Its calls of its stages, which are wrapped while an iteration is captured, tell what it runs.

Activation checkpointing runs a segment of the forward pass again in the backward pass. Tensors that are recorded there
must be named as in the first pass, even if its microbatch is over, and two calls of a layer in one segment must not be
swapped. Therefore each function that is passed to a checkpoint remembers the state of the pass at its first run. Under
a checkpoint that is not listed here, calls are assumed to be repeated from the last to the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ranktape.capture.hooks.hook import MODE, Make, as_itself
from ranktape.capture.passes.python_stack import is_running

if TYPE_CHECKING:
    from torch import nn

    from ranktape.capture.guard import Guard
    from ranktape.capture.passes.tracker import Tracker


_REHEARSALS = ("_prepare_forward_infra", "_prepare_backward_infra")


def is_rehearsing() -> bool:
    """Whether a schedule is rehearsing on this thread. Asks the stack, as wrappers may have been put on too late."""
    return any(is_running(name) for name in _REHEARSALS)


def stage_prefix(stage: int, layer_indexes: list[int]) -> str:
    """The prefix of the paths of a pipeline stage's modules, so that paths differ between stages.

    It is empty for the first stage, and if the layers are numbered continuously over all stages.
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
"""The functions that take the function of a segment, with the position of that argument, and whether the first pass
also calls the argument."""


def framework_replacements(
    tracker: Tracker, guard: Guard, on_stage: Callable[[nn.Module, int], None]
) -> Iterator[tuple[str, Make]]:
    """The replacements that follow pipeline schedules and checkpoints, by dotted names.

    `on_stage` is called with the module of a stage that is about to run and its index. The guard handles exceptions.
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
    """The function of a checkpoint's segment, which tells the tracker when it runs again."""

    def __init__(self, function: Callable[..., Any], *, tracker: Tracker, runs_first: bool) -> None:
        self._function = function
        self._is_first = runs_first
        self._repeating = tracker.repetition()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if self._is_first:
            self._is_first = False
            return self._function(*args, **kwargs)
        with self._repeating(), MODE.active():
            return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle as the function, because a framework stores it on a module until the backward pass."""
        return as_itself(self._function)
