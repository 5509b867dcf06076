"""How does a tensor that a hook holds get into the ring, and what is known of the iteration so far?"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ranktape.capture.expected import Expected
from ranktape.capture.guard import Guard, Naming, StrictCaptureError, failure_text
from ranktape.capture.hooks.hook import Hook
from ranktape.capture.passes.circumstances import TRANSFORMED, is_transformed
from ranktape.capture.passes.tracker import Call, Tracker, dtype_name
from ranktape.capture.settings.sampling import Kept, keep_samples
from ranktape.capture.settings.unmatched import find_unmatched
from ranktape.capture.source import NO_TAGS, Source, Tags, TensorRole, site_name
from ranktape.capture.staging.device import DeviceStage
from ranktape.capture.staging.ring_file import SlotKind
from ranktape.capture.tally import Tally
from ranktape.capture.tensors.layout import find_sample_dim, layout_of
from ranktape.capture.tensors.parts import Part, UnrecordableError, take_apart
from ranktape.errors import CaptureError, RanktapeError
from ranktape.storage.record import Mode, Operation

if TYPE_CHECKING:
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.settings.selecting import Selecting
    from ranktape.capture.staging.ring import RingProducer

MAX_PASSES = 4096
"""Forward passes of one iteration after which nobody will end it any more."""


@dataclass(slots=True, kw_only=True)
class _Taken:
    """A tensor with everything that is known of it."""

    source: Source
    role: TensorRole
    tensor: torch.Tensor
    call: Call
    tags: Tags
    placement: str | None = None

    @property
    def site(self) -> tuple[Source, TensorRole, Mode, int]:
        """What it is counted by."""
        return self.source, self.role, self.call.mode, self.call.microbatch


class Recorder:
    """Takes tensors from hooks; copies them into the ring while an iteration is captured, counts them else."""

    def __init__(
        self,
        *,
        ring: RingProducer,
        tracker: Tracker,
        options: CaptureOptions,
        selecting: Selecting,
        on_failure: Callable[[str], None],
        on_site_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare.

        Args:
            ring: Where tensors go.
            tracker: Knows microbatch and pass.
            options: Of the capture.
            selecting: Knows which tensors are taken, and what is kept of them.
            on_failure: Called with the reason when nothing more can be recorded; the training goes on.
            on_site_failure: Called with the reason when nothing more of one site can be; the others go on.
        """
        self._ring = ring
        self._tracker = tracker
        self._options = options
        self._selecting = selecting
        self._prefixes: dict[tuple[Any, ...], str] = {}
        self._on_failure = on_failure
        self._on_site_failure = on_site_failure
        self._guard = Guard(self._fail)
        self._owner = os.getpid()
        self._device: DeviceStage | None = None
        self._counter = 0
        self._taken: dict[tuple[Source, TensorRole, Mode, int], set[int]] = {}
        self._naming_ring = Naming("the ring")
        self.expected = Expected()
        self.explain_endless: Callable[[], str] = lambda: "call capture.step() after each iteration"
        """Says why no iteration ends, and the way out."""
        self.tally: Tally | None = None
        self.num_left_out = 0

    def begin(self, iteration: int, *, is_staged: bool) -> None:
        """An iteration begins."""
        self.tally = Tally(iteration=iteration, is_staged=is_staged)
        self.num_left_out = 0
        # What the first captured iteration will cost is counted before it is due.
        self._selecting.begin(iteration if is_staged else self._selecting.first)
        self.expected.begin()
        self._taken.clear()

    def end(self) -> dict[str, Any]:
        """The iteration ended: what the commit must say of the expected and the silent tensors."""
        self.tally = None
        for source, role in self.expected.remembered():
            if not self._selecting.may_take(source, role):
                self.expected.excuse(source, role)
        return self.expected.end()

    def record(
        self,
        source: Source,
        role: TensorRole,
        tensor: torch.Tensor,
        *,
        call: Call,
        tags: Tags = NO_TAGS,
        placement: str | None = None,
    ) -> None:
        """Take a copy of the tensor as it is now; the only thing that happens on the training thread.

        Raises nothing unless the capture is strict: what goes wrong is reported, and the training goes on.
        """
        tally = self.tally
        # A forked process has the hooks too, and must not write into its parent's ring.
        if tally is None or os.getpid() != self._owner or self.expected.is_disabled(source, role):
            return
        with self.guarded(source, role):
            taken = _Taken(source=source, role=role, tensor=tensor, call=call, tags=tags, placement=placement)
            self._record(tally, taken)

    def guarded(self, source: Source | None = None, role: TensorRole | None = None) -> Guard:
        """A context in which what goes wrong is reported, and the training goes on.

        With a source, it disables that source for the rest of the run, or one role of it: the others go on. Without
        one, or where it is the ring's or the writer's failure, nothing more is recorded.
        """
        if source is None:
            return self._guard
        return Guard(lambda error: self._fail(error, source, role))

    def attach(self, source: Source, roles: Iterable[TensorRole]) -> None:
        """Say that hooks were put on a module, and which roles they will show when it runs with gradients."""
        left_out = () if Mode.TRAIN in self._options.wanted_modes else (Operation.BACKWARD,)
        known = [role for role in roles if role.operation not in left_out and self._selecting.may_take(source, role)]
        self.expected.attach(source, known)

    def called(self, source: Source, call: Call) -> None:
        """Say that a module or function runs, which has that call."""
        is_training = call.mode == Mode.TRAIN
        self.expected.called(source, has_gradients=torch.is_grad_enabled(), is_training=is_training)
        if self._selecting.asks_for_calls:
            for role in self.expected.known(source):
                if not self.wants(source, role, call):
                    self.expected.excuse(source, role, call)

    def record_grad(
        self,
        source: Source,
        role: TensorRole,
        tensor: torch.Tensor,
        *,
        call: Call,
        part: Callable[[torch.Tensor], torch.Tensor] | None = None,
        placement: str | None = None,
        on_grad: Callable[[Call], None] | None = None,
    ) -> None:
        """Take the gradient of the tensor when a backward pass reaches it, as a tensor of that role and call.

        With `part`, what that makes of the gradient is recorded: another shape, or one of several operands in it.
        """

        def hook(grad: torch.Tensor) -> None:
            with self.guarded():
                self._tracker.note_backward()
            with self.guarded(source, role):
                if on_grad is not None:
                    on_grad(call)
                site = source, role, call.mode, call.microbatch
                if self._tracker.is_adding_weights and call.index in self._taken.get(site, ()):
                    return  # it came with the gradients of the inputs
                seen = grad if part is None else part(grad)
                self.record(source, role, seen, call=call, placement=placement)

        tensor.register_hook(Hook(hook))
        if call.mode == Mode.TRAIN and self.wants(source, role, call):
            self.expected.expect(source, role, call)

    def wants(self, source: Source, role: TensorRole, call: Call) -> bool:
        """Whether a tensor of that source, role and call may be taken in this iteration, before it is seen."""
        return self._selecting.may_take(source, role, call)

    def find_unmatched(self, paths: Collection[str]) -> list[str]:
        """What the selection names and the iteration has not had; asked once, when it has ended."""
        seen, self._selecting.sightings = self._selecting.sightings, None
        return [] if seen is None else list(find_unmatched(self._options, seen, paths=paths))

    def poll(self) -> None:
        """Publish what has arrived from a device; called once in each step."""
        if self._device is not None:
            self._device.poll()

    def drain(self) -> None:
        """Wait for what is on its way from a device; called once at the end."""
        if self._device is not None:
            self._device.drain()

    def refuse(self, source: Source, role: TensorRole, reason: str, *, call: Call | None = None) -> None:
        """Say of a tensor of the running iteration, or of one call in it, that it is not recorded, and why."""
        if self._selecting.may_take(source, role, call):
            self.expected.refuse(source, role, reason)
        else:
            self.expected.excuse(source, role, call)

    def pass_by(self, source: Source, roles: Iterable[TensorRole] = ()) -> None:
        """Say of a call inside of a transform of `torch.func` that what it shows, at least these roles, is not seen."""
        for role in dict.fromkeys((*self.expected.known(source), *roles)):
            self.refuse(source, role, TRANSFORMED)

    def next_index(self, source: Source, role: TensorRole) -> int:
        """How many tensors of that source and role came before in the microbatch; for those without a call."""
        return len(self._taken.get((source, role, self._tracker.mode, self._tracker.microbatch), ()))

    def _fail(self, error: Exception, source: Source | None = None, role: TensorRole | None = None) -> None:
        """Disable what failed, or end the training with it where that was asked for."""
        text = failure_text(error)
        # Our own words are of the ring, the writer or the iteration, whichever site met them.
        is_of_all = source is None or isinstance(error, RanktapeError)
        if source is not None and not is_of_all:
            is_new = self.expected.disable(source, role, text)
            if is_new and not self._options.strict:
                name = source.module if role is None else site_name(source, role)
                self._on_site_failure(f"nothing more is recorded of {name}: {text}")
        else:
            self._on_failure(text)
        if self._options.strict:
            name = "" if source is None else f" at {source.module if role is None else site_name(source, role)}"
            raise StrictCaptureError(f"the capture failed{name}: {text} (it is strict)") from error

    def _record(self, tally: Tally, taken: _Taken) -> None:
        if taken.call.iteration != tally.iteration:
            late = f"it belongs to iteration {taken.call.iteration}, and came after that had ended"
            self.refuse(taken.source, taken.role, late)
            return
        if is_transformed():
            self.refuse(taken.source, taken.role, TRANSFORMED, call=taken.call)
            return
        try:
            parts = take_apart(taken.tensor, placement=taken.placement)
        except UnrecordableError as error:
            self.refuse(taken.source, taken.role, str(error), call=taken.call)
            return
        if self._tracker.num_unended > MAX_PASSES:
            raise CaptureError(f"{MAX_PASSES} forward passes went by in one iteration: {self.explain_endless()}")
        call = taken.call
        taken = self._distinct(taken)
        selected = [kept for part in parts if (kept := self._select(taken, part)) is not None]
        if not selected:
            self.num_left_out += 1
            self.expected.excuse(taken.source, taken.role, call)
            return
        for kept in selected:
            if tally.is_staged:
                self._stage(taken, kept)
            # Only now: what failed is neither counted nor seen.
            tally.count(kept, compute_dtype=call.compute_dtype)
        self.expected.saw(taken.source, taken.role, call)
        tally.sources.add(taken.source)

    def _select(self, taken: _Taken, part: Part) -> Kept | None:
        """The part as the selection has it; None where it leaves it out."""
        tensor, role, call = part.tensor, taken.role, taken.call
        shape = tuple(tensor.shape)
        decision = self._selecting.of_all or self._selecting.decide(
            taken.source,
            role,
            call,
            dtype=dtype_name(tensor.dtype),
            shape=shape,
            nbytes=tensor.nbytes,
            quant_type=self._quant_type(taken),
            suffix=part.suffix,
        )
        if decision is None:
            return None
        given = self._options.sample_dim
        sample_dim = None
        if role.has_samples:
            sample_dim = find_sample_dim(shape, batch_size=call.batch_size, given=given, layouts=role.layouts)
        return keep_samples(part, decision=decision, sample_dim=sample_dim)

    def _quant_type(self, taken: _Taken) -> str:
        return taken.tags.quant_type or self._options.quant_type or taken.call.quant_type

    def _stage(self, taken: _Taken, kept: Kept) -> None:
        tensor = kept.part.tensor
        header = self._header(taken, kept)
        with self._naming_ring:
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
            # A slot that is never published would hold up all that come after it.
            self._ring.cancel(slot)
            raise
        with self._naming_ring:
            self._ring.publish(slot)

    def _device_stage(self) -> DeviceStage:
        if self._device is None:
            self._device = DeviceStage(self._ring)
        return self._device

    def _distinct(self, taken: _Taken) -> _Taken:
        """The tensor under a call of its own: two backward passes over one graph bring each gradient twice."""
        indices = self._taken.setdefault(taken.site, set())
        index = taken.call.index
        while index in indices:
            index += 1
        indices.add(index)
        if index == taken.call.index:
            return taken
        return dataclasses.replace(taken, call=dataclasses.replace(taken.call, index=index))

    def _header(self, taken: _Taken, kept: Kept) -> bytes:
        call, tags, part, sample_dim = taken.call, taken.tags, kept.part, kept.sample_dim
        dtype, shape = dtype_name(part.tensor.dtype), tuple(part.tensor.shape)
        quant_type = self._quant_type(taken)
        key = (
            taken.source,
            taken.role,
            part.suffix,
            part.placement,
            dtype,
            shape,
            sample_dim,
            call.compute_dtype,
            call.batch_size,
            call.mode,
            quant_type,
            kept.keep,
        )
        prefix = self._prefixes.get(key)
        if prefix is None:
            fixed = {
                "module": taken.source.module,
                "layer_type": taken.source.layer_type,
                "layer_idx": taken.source.layer_idx,
                "component": taken.source.component,
                "operation": str(taken.role.operation),
                "phase": taken.role.phase,
                "tensor_name": taken.role.tensor_name + part.suffix,
                "quant_type": quant_type,
                "dtype": dtype,
                "shape": list(shape),
                "layout": layout_of(
                    taken.source.layer_type, sample_dim=sample_dim, num_dims=len(shape), layouts=taken.role.layouts
                ),
                "compute_dtype": call.compute_dtype,
                "sample_dim": sample_dim,
                "batch_size": call.batch_size,
                "mode": str(call.mode),
                "keep": kept.keep,
                "placement": None if part.placement is None else json.loads(part.placement),
            }
            prefix = self._prefixes[key] = json.dumps(fixed)[:-1]
        counter, self._counter = self._counter, self._counter + 1
        sample_ids = kept.sample_ids(tags.sample_ids or (call.sample_ids if sample_dim is not None else None))
        ids = "null" if sample_ids is None else json.dumps(sample_ids)
        return (
            f'{prefix},"iteration":{call.iteration},"microbatch":{call.microbatch},"call":{call.index},'
            f'"counter":{counter},"timestamp":{time.time()!r},"sample_ids":{ids},'
            f'"metadata":{tags.metadata}}}'
        ).encode()


def _copy(tensor: torch.Tensor, payload: memoryview) -> None:
    # Copying between 8-bit floats is not implemented for every layout; their bytes are.
    dtype = torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype
    source = tensor.detach().view(dtype) if dtype is not tensor.dtype else tensor.detach()
    torch.frombuffer(payload, dtype=dtype).view(tensor.shape).copy_(source)
