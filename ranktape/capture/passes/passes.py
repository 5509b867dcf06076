"""The passes of a training, their calls, and which of these are counted together."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Mode

if TYPE_CHECKING:
    import torch
    from torch import nn


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Those of a call: positional and by keyword."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module, bound to its gradients' hooks when it happens."""

    iteration: int
    """Training step."""
    microbatch: int
    """Index of the pass within the step, among those of its mode."""
    index: int
    """How many calls of the module came before in the microbatch."""
    compute_dtype: str
    """What the operation computes in; autocast included."""
    batch_size: int | None
    """Samples in the microbatch; None where it is not known."""
    sample_ids: tuple[int | str, ...] | None = None
    """The user's identifiers of the samples; None where none were given."""
    mode: Mode = Mode.TRAIN
    """Whether it was a training pass."""
    key: tuple[Mode, int, int] = field(init=False, repr=False, compare=False)
    """Mode, microbatch and index: what it is counted by among the calls of its module in the iteration."""

    def __post_init__(self) -> None:
        """Made once, and not for each of its tensors."""
        object.__setattr__(self, "key", (self.mode, self.microbatch, self.index))

    @property
    def quant_type(self) -> str:
        """The tag of a run that names none: what the operation computes in."""
        return QUANT_TYPES.get(self.compute_dtype, self.compute_dtype)


QUANT_TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""The field's short words for dtypes."""


class Frame(NamedTuple):
    """A module and where it is in its model."""

    path: str
    """Its dotted path."""
    module: nn.Module
    """The module."""
    layer_idx: int
    """Its layer; -1 outside of the stack."""
    layer_stack: str = ""
    """Dotted path of the list that holds its layer, the same on every rank that has the layer; empty outside of any."""


@dataclass(slots=True)
class Microbatch:
    """What is counted of one microbatch."""

    mode: Mode
    index: int
    num_calls: dict[str, int] = field(default_factory=dict)
    """Calls so far, of each module or function."""
    num_failed: int = 0
    """Calls of those that have none yet: as many as the furthest had when a pass failed."""
    roots: set[int] = field(default_factory=set)
    """The outermost modules that were entered."""

    def count(self, key: str) -> int:
        """The index of the call that begins."""
        index = self.num_calls.get(key, self.num_failed)
        self.num_calls[key] = index + 1
        return index

    def fail(self) -> None:
        """A pass ended in an exception: the one that takes its place has calls of one number in all modules."""
        self.num_failed = max(self.num_calls.values(), default=self.num_failed)
        self.num_calls.clear()


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One outermost forward."""

    iteration: int
    microbatch: Microbatch
    batch_size: int | None = None
    sample_ids: tuple[int | str, ...] | None = None
    is_recorded: bool = True


def checked_sample_ids(sample_ids: Iterable[int | str] | torch.Tensor) -> tuple[int | str, ...]:
    """The identifiers of samples as records carry them.

    Raises:
        UsageError: one is neither a number nor text.
    """
    # What a loader gives is often a tensor.
    listed = sample_ids.tolist() if hasattr(sample_ids, "tolist") else list(sample_ids)
    if wrong := [item for item in listed if not isinstance(item, int | str)]:
        raise UsageError(f"sample id {wrong[0]!r} is a {type(wrong[0]).__name__}: give whole numbers or text")
    return tuple(listed)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The dtype in a record's words."""
    return str(dtype).removeprefix("torch.")
