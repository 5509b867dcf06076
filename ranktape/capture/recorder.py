"""How does a tensor that a hook holds get into the ring, and what is known of the iteration so far?"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ranktape.capture.device import DeviceStage
from ranktape.capture.ring_file import SlotKind
from ranktape.capture.tracker import Call, Tracker, dtype_name
from ranktape.errors import CaptureError
from ranktape.storage.dtypes import DTYPES
from ranktape.storage.names import Site
from ranktape.storage.record import Operation

if TYPE_CHECKING:
    from ranktape.capture.options import CaptureOptions
    from ranktape.capture.ring import RingProducer

MAX_PASSES = 4096
"""Forward passes of one iteration after which nobody will end it any more."""

_LAYOUTS = {
    # By kind of layer, dimension of samples and number of dimensions.
    ("linear", 0, 2): "BH",
    ("linear", 0, 3): "BTH",
    ("linear", 1, 3): "TBH",
    ("linear", None, 2): "OI",
    ("attention", 0, 4): "BHTD",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A module, or what stands for one, whose tensors are recorded."""

    module: str
    """Dotted path, without the wrappers' prefixes."""
    layer_type: str
    """`linear`, `attention`, or the user's own."""
    layer_idx: int
    """Layer in the stack; -1 outside of it."""
    component: str
    """`linear`, `FA`, `unknown`, or the user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a tensor is to its source."""

    operation: Operation
    """Forward or backward."""
    phase: str
    """`pre`, `post`, or the user's own."""
    tensor_name: str
    """`input`, `grad_output`, ..."""
    has_samples: bool = True
    """Whether one of its dimensions holds samples; weights have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What the user says of a tensor that is recorded by hand."""

    quant_type: str | None = None
    """What it was computed in; the capture's own tag where None."""
    sample_ids: tuple[int | str, ...] | None = None
    """Identifiers of its samples."""
    metadata: str = "null"
    """The user's own words, as JSON."""


NO_TAGS = Tags()
"""Of a tensor that a hook recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A tensor with everything that is known of it."""

    source: Source
    role: Role
    tensor: torch.Tensor
    call: Call
    tags: Tags

    @property
    def site(self) -> tuple[Source, Role, int]:
        """What it is counted by."""
        return self.source, self.role, self.call.microbatch

    @property
    def name(self) -> str:
        """What a person is told."""
        return _name(self.source, self.role)


@dataclass(slots=True)
class Tally:
    """What one iteration has come to."""

    iteration: int
    """Training step."""
    is_staged: bool
    """Whether tensors are recorded, or only counted."""
    num_tensors: int = 0
    """Tensors seen."""
    nbytes: int = 0
    """Bytes of their values."""
    sources: set[Source] = field(default_factory=set)
    """What they came from."""


class Guard:
    """A context that reports exceptions and swallows them: a defect of ours must not end somebody's training."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Report an exception; interrupts and exits pass."""
        if not isinstance(error, Exception):
            return False
        self._on_failure(str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}")
        return True


class Recorder:
    """Takes tensors from hooks; copies them into the ring while an iteration is captured, counts them else."""

    def __init__(
        self,
        *,
        ring: RingProducer,
        tracker: Tracker,
        options: CaptureOptions,
        on_failure: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            ring: Where tensors go.
            tracker: Knows microbatch and pass.
            options: Of the capture.
            on_failure: Called with the reason when a tensor cannot be recorded; the training goes on.
        """
        self._ring = ring
        self._tracker = tracker
        self._options = options
        self._prefixes: dict[tuple[Any, ...], str] = {}
        self._guard = Guard(on_failure)
        self._owner = os.getpid()
        self._device: DeviceStage | None = None
        self._counter = 0
        self._expected: set[str] | None = None
        self._seen: set[str] = set()
        self._taken: set[tuple[Any, int]] = set()
        self._refused: dict[str, str] = {}
        self._num_by_hand: Counter[tuple[Source, Role, int]] = Counter()
        self.tally: Tally | None = None

    def begin(self, iteration: int, *, is_staged: bool) -> None:
        """An iteration begins."""
        self.tally = Tally(iteration=iteration, is_staged=is_staged)
        self._seen.clear()
        self._taken.clear()
        self._refused.clear()
        self._num_by_hand.clear()

    def end(self) -> dict[str, Any]:
        """The iteration ended: what the commit must say of the expected and the silent tensors."""
        self.tally = None
        expected = self._seen | (set(self._refused) if self._expected is None else self._expected)
        silent = dict.fromkeys(sorted(expected - self._seen), "its hook did not fire") | self._refused
        self._expected = expected
        return {"expected": sorted(expected), "silent_sites": silent}

    def record(
        self,
        source: Source,
        role: Role,
        tensor: torch.Tensor,
        *,
        call: Call,
        tags: Tags = NO_TAGS,
    ) -> None:
        """Take a copy of the tensor as it is now; the only thing that happens on the training thread.

        Never raises: what goes wrong is reported, and the training goes on.
        """
        tally = self.tally
        # A forked process has the hooks too, and must not write into its parent's ring.
        if tally is None or os.getpid() != self._owner:
            return
        with self.guarded():
            self._record(tally, _Taken(source=source, role=role, tensor=tensor, call=call, tags=tags))

    def guarded(self) -> Guard:
        """A context in which what goes wrong is reported, and the training goes on."""
        return self._guard

    def record_grad(
        self,
        source: Source,
        role: Role,
        tensor: torch.Tensor,
        *,
        call: Call,
        shape: torch.Size | None = None,
        on_grad: Callable[[Call], None] | None = None,
    ) -> None:
        """Take the gradient of the tensor when a backward pass reaches it, as a tensor of that role and call.

        With `shape` it is recorded in that shape, with as many elements.
        """

        def hook(grad: torch.Tensor) -> None:
            self._tracker.note_backward()
            if on_grad is not None:
                on_grad(call)
            with self.guarded():
                seen = grad if shape is None or grad.shape == shape else grad.reshape(shape)
                self.record(source, role, seen, call=call)

        tensor.register_hook(hook)

    def poll(self) -> None:
        """Publish what has arrived from a device; called once in each step."""
        if self._device is not None:
            self._device.poll()

    def drain(self) -> None:
        """Wait for what is on its way from a device; called once at the end."""
        if self._device is not None:
            self._device.drain()

    def refuse(self, source: Source, role: Role, reason: str) -> None:
        """Say of a tensor of the running iteration that it is not recorded, and why."""
        self._refused[_name(source, role)] = reason

    def next_index(self, source: Source, role: Role) -> int:
        """How many tensors of that source and role came before in the microbatch; for those without a call."""
        return self._num_by_hand[source, role, self._tracker.microbatch]

    def _record(self, tally: Tally, taken: _Taken) -> None:
        tensor = taken.tensor
        dtype = dtype_name(tensor.dtype)
        refusal = _refusal(tensor, dtype)
        if taken.call.iteration != tally.iteration:
            refusal = f"it belongs to iteration {taken.call.iteration}, and came after that had ended"
        if refusal is not None:
            self._refused[taken.name] = refusal
            return
        if self._tracker.num_passes > MAX_PASSES:
            raise CaptureError(
                f"{MAX_PASSES} forward passes went by and no optimizer stepped: "
                f"call capture.step() after each iteration"
            )
        taken = self._distinct(taken)
        self._seen.add(taken.name)
        self._num_by_hand[taken.site] += 1
        tally.num_tensors += 1
        tally.nbytes += tensor.nbytes
        tally.sources.add(taken.source)
        if not tally.is_staged:
            return
        header = self._header(tally.iteration, taken, dtype=dtype)
        slot = self._ring.reserve(
            SlotKind.TENSOR, header, tensor.nbytes, timeout_seconds=self._options.block_timeout_seconds
        )
        try:
            if tensor.is_cuda and tensor.numel():
                self._device_stage().copy(tensor, slot)  # publishes the slot when the copy has arrived
                return
            if tensor.numel():
                _copy(tensor, slot.payload)
        except BaseException:
            # A slot that is never published would hold up all that come after it; the capture disables itself, so
            # the iteration is not committed with what lies in this one.
            self._ring.publish(slot)
            raise
        self._ring.publish(slot)

    def _device_stage(self) -> DeviceStage:
        if self._device is None:
            self._device = DeviceStage(self._ring)
        return self._device

    def _distinct(self, taken: _Taken) -> _Taken:
        """The tensor under a call of its own: two backward passes over one graph bring each gradient twice."""
        key = (taken.source, taken.role, taken.call.microbatch)
        index = taken.call.index
        while (key, index) in self._taken:
            index += 1
        self._taken.add((key, index))
        if index == taken.call.index:
            return taken
        return dataclasses.replace(taken, call=dataclasses.replace(taken.call, index=index))

    def _header(self, iteration: int, taken: _Taken, *, dtype: str) -> bytes:
        call, tags = taken.call, taken.tags
        shape = tuple(taken.tensor.shape)
        sample_dim = self._sample_dim(shape, call.batch_size) if taken.role.has_samples else None
        quant_type = tags.quant_type or self._options.quant_type or call.quant_type
        key = (taken.source, taken.role, dtype, shape, sample_dim, call.compute_dtype, call.batch_size, quant_type)
        prefix = self._prefixes.get(key)
        if prefix is None:
            fixed = {
                "module": taken.source.module,
                "layer_type": taken.source.layer_type,
                "layer_idx": taken.source.layer_idx,
                "component": taken.source.component,
                "operation": str(taken.role.operation),
                "phase": taken.role.phase,
                "tensor_name": taken.role.tensor_name,
                "quant_type": quant_type,
                "dtype": dtype,
                "shape": list(shape),
                "layout": _LAYOUTS.get((taken.source.layer_type, sample_dim, len(shape)), ""),
                "compute_dtype": call.compute_dtype,
                "sample_dim": sample_dim,
                "batch_size": call.batch_size,
                "placement": None,
            }
            prefix = self._prefixes[key] = json.dumps(fixed)[:-1]
        counter, self._counter = self._counter, self._counter + 1
        sample_ids = tags.sample_ids or (call.sample_ids if sample_dim is not None else None)
        ids = "null" if sample_ids is None else json.dumps(sample_ids)
        return (
            f'{prefix},"iteration":{iteration},"microbatch":{call.microbatch},"call":{call.index},'
            f'"counter":{counter},"timestamp":{time.time()!r},"sample_ids":{ids},'
            f'"metadata":{tags.metadata}}}'
        ).encode()

    def _sample_dim(self, shape: tuple[int, ...], batch_size: int | None) -> int | None:
        given = self._options.sample_dim
        if given is not None:
            return given if given < len(shape) else None
        return next((dim for dim in range(min(2, len(shape) - 1)) if shape[dim] == batch_size), None)


def site_of(source: Source, role: Role, *, call: Call, quant_type: str | None) -> Site:
    """The place of a tensor in its iteration; what it was computed in is the call's where no other is given."""
    return Site(
        module=source.module,
        layer_type=source.layer_type,
        layer_idx=source.layer_idx,
        operation=role.operation,
        phase=role.phase,
        component=source.component,
        quant_type=quant_type or call.quant_type,
        tensor_name=role.tensor_name,
        microbatch=call.microbatch,
        call=call.index,
    )


def _name(source: Source, role: Role) -> str:
    place = source.module or f"{source.layer_type} {source.layer_idx}"
    return f"{place} {role.operation} {role.phase} {role.tensor_name}"


def _refusal(tensor: torch.Tensor, dtype: str) -> str | None:
    """Why a tensor cannot be recorded; None where it can."""
    if dtype not in DTYPES:
        return f"its dtype {dtype} cannot be stored"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"it is a {type(tensor).__name__}, and only plain tensors can be recorded"
    if tensor.layout is not torch.strided or tensor.is_meta:
        return (
            f"it is on {tensor.device} with layout {tensor.layout}, and only dense tensors with values can be recorded"
        )
    return None


def _copy(tensor: torch.Tensor, payload: memoryview) -> None:
    # Copying between 8-bit floats is not implemented for every layout; their bytes are.
    dtype = torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype
    source = tensor.detach().view(dtype) if dtype is not tensor.dtype else tensor.detach()
    torch.frombuffer(payload, dtype=dtype).view(tensor.shape).copy_(source)
