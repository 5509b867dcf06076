"""Follows which stage and which microbatch a pipeline schedule runs.

A schedule of `torch.distributed.pipelining` runs its microbatches in an order of its own, and rehearses once on data
that is none. It says what it runs to its stages: there we listen while an iteration is captured.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ranktape.capture.hooks.hook import Replacement
from ranktape.capture.passes.circumstances import is_running
from ranktape.capture.passes.passes import StagePass

if TYPE_CHECKING:
    from torch import nn

    from ranktape.capture.guard import Guard
    from ranktape.capture.passes.tracker import Tracker

MODULE = "torch.distributed.pipelining.stage"
_FORWARD = "_PipelineStageBase.forward_one_chunk"
_WEIGHTS = "_PipelineStageBase.backward_weight_one_chunk"
_REHEARSALS = ("_prepare_forward_infra", "_prepare_backward_infra")
_REHEARSING = ("PipelineStage", "_PipelineStage")


class PipelineHooks:
    """What listens to pipeline schedules while an iteration is captured."""

    def __init__(self, *, tracker: Tracker, guard: Guard, on_stage: Callable[[nn.Module, int], None]) -> None:
        """Listen, once a pipeline is loaded.

        Args:
            tracker: Is told the stage and the microbatch.
            guard: Contains what goes wrong.
            on_stage: Called with the module and the index of a stage that is about to run.
        """
        self._tracker = tracker
        self._guard = guard
        self._on_stage = on_stage
        self._replacements: list[Replacement] = []
        self._is_listening = False
        self._is_late = False
        self.refresh()

    def refresh(self) -> bool:
        """Listen to what was loaded since; whether a schedule is rehearsing already."""
        if not self._is_listening and MODULE in sys.modules:
            self._is_listening = True
            self._listen()
            self._is_late = True
        # What was loaded in the middle of a rehearsal was not told when that began.
        self._is_late = self._is_late and any(is_running(name) for name in _REHEARSALS)
        return self._is_late

    def _listen(self) -> None:
        wrappers = {_FORWARD: self._around_forward, _WEIGHTS: self._around_weights}
        wrappers |= dict.fromkeys((f"{owner}.{name}" for owner in _REHEARSING for name in _REHEARSALS), self._rehearsal)
        for path, make in wrappers.items():
            replacement = Replacement.put(MODULE, path, make)
            if replacement is not None:
                self._replacements.append(replacement)

    def remove(self) -> None:
        """Listen no more."""
        for replacement in self._replacements:
            replacement.remove()
        self._replacements.clear()

    def _around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward_one_chunk(stage: Any, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            with self._guard:
                self._on_stage(stage.submod, stage.stage_index)
            with self._tracker.staged(_stage_pass(stage, fwd_chunk_id)):
                return original(stage, fwd_chunk_id, *args, **kwargs)

        return forward_one_chunk

    def _around_weights(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward_weight_one_chunk(*args: Any, **kwargs: Any) -> Any:
            with self._tracker.adding_weights():
                return original(*args, **kwargs)

        return backward_weight_one_chunk

    def _rehearsal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def rehearsal(*args: Any, **kwargs: Any) -> Any:
            rehearsing: AbstractContextManager[None] = self._tracker.rehearsing()
            with rehearsing:
                return original(*args, **kwargs)

        return rehearsal


def _stage_pass(stage: Any, microbatch: int) -> StagePass:
    num_microbatches = getattr(stage, "chunks", None)
    return StagePass(
        stage=int(stage.stage_index),
        microbatch=int(microbatch),
        num_microbatches=num_microbatches if isinstance(num_microbatches, int) else None,
    )


def stage_prefix(stage: int, layer_indexes: list[int]) -> str:
    """What the paths of a stage's modules begin with, so that no two stages have the same.

    Empty where the layers are numbered through all stages: the first stage has none, so its own begin at 0.

    Args:
        stage: Index of the stage.
        layer_indexes: Of its modules; -1 of those that are in no layer.
    """
    known = [index for index in layer_indexes if index >= 0]
    return "" if stage == 0 or (known and min(known) > 0) else f"stage{stage}."
