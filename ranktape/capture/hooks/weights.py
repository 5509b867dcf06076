"""Weights and biases, each recorded once as it is.

In one iteration a weight is recorded with its first call, and again when it was written to. Where nothing updates the
weights, as in a generation of which each token is an iteration, one that is stored as it is is not stored again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ranktape.capture.source import NO_TAGS, Tags

if TYPE_CHECKING:
    from ranktape.capture.passes.tracker import Call
    from ranktape.capture.recorder import Recorder
    from ranktape.capture.source import Source, TensorRole

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of weights whose alias is as good as they are, and that have an address."""


def is_lasting(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter, or a part of one, and not computed for one call."""
    return any(isinstance(one, torch.nn.Parameter) for one in (tensor, tensor._base))  # noqa: SLF001  (no public name)


class Weights:
    """Those that need not be recorded again."""

    def __init__(self) -> None:
        """None yet."""
        self._seen: set[tuple[Source, str, str, int]] = set()
        self._stored: set[tuple[Source, str, str, int, int]] = set()

    def begin(self, *, keeps: bool) -> None:
        """An iteration begins; whether it may rely on those before it."""
        self._seen.clear()
        if not keeps:
            self._stored.clear()

    def record(
        self,
        recorder: Recorder,
        source: Source,
        role: TensorRole,
        tensor: torch.Tensor,
        *,
        call: Call,
        placement: str | None,
        tags: Tags = NO_TAGS,
    ) -> None:
        """Record one, unless it was."""
        # Tensors of `inference_mode` do not count what is done to them.
        is_counted = not tensor.is_inference()
        version = tensor._version if is_counted else 0  # noqa: SLF001  (torch has no public name for it)
        key = (source, role.tensor_name, call.mode, version)
        if key in self._seen:
            return
        self._seen.add(key)
        is_known = is_counted and type(tensor) in PLAIN
        stored = (*key, tensor.data_ptr() if is_known else 0)
        if is_known and stored in self._stored:
            recorder.expected.excuse(source, role, call)
            return
        recorder.record(source, role, tensor, call=call, placement=placement, tags=tags)
        if is_known and recorder.has_staged(source, role, call):
            self._stored.add(stored)
