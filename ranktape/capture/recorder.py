"""Copies tensors from hooks into the ring, and counts them for each iteration."""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ranktape.capture.expected import TRANSFORMED, Expected, Site
from ranktape.capture.guard import Guard, StrictCaptureError, failure_text
from ranktape.capture.hooks.hook import Hook
from ranktape.capture.passes.tracker import Call, Tracker, dtype_name
from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.settings.selecting import Selecting, find_unmatched
from ranktape.capture.sites import IterationTally, RecordForm, form_of, ids_at, narrow
from ranktape.capture.source import DIFFERENTIABLE, NO_TAGS, Source, Tags, TensorRole, site_name, source_name
from ranktape.capture.staging.device import DeviceStage, Reduction, driver_of
from ranktape.capture.staging.ring import NoRoomError, RingProducer
from ranktape.capture.staging.ring_file import Slot, SlotKind
from ranktape.capture.tensors.parts import PlainPart, UnrecordableError, is_plain, parts_of
from ranktape.capture.torch_private import is_transformed, transform_level
from ranktape.capture.writing.counting import device_nbytes
from ranktape.errors import CaptureError, RanktapeError
from ranktape.storage.format.record_info import Keep, Mode, Operation

if TYPE_CHECKING:
    from ranktape.capture.tensors.taking import HostStatistics

MAX_PASSES = 4096
"""Maximum number of forward passes in one iteration. With more, it is assumed that no event will finish it."""

CAPTURING = "a graph is being captured on its device: what it computes has no values yet"
"""The reason why a tensor is not copied during the capture of a CUDA graph."""

_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A forked child has the hooks, too, but must not write to its parent's ring.
    for recorder in list(_recorders):
        recorder.tally = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


class Recorder:
    """Takes tensors from hooks. Copies them into the ring if the iteration is recorded, and otherwise counts them."""

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
        """`on_failure` gets the reason if recording stops altogether, and `on_site_failure` if it stops for a site."""
        self.tracker = tracker
        self.options = options
        self._selecting = self._usual = selecting
        self._on_failure = on_failure
        self._on_site_failure = on_site_failure
        self._guard = Guard(self._fail)
        self._may_train = Mode.TRAIN in options.wanted_modes
        self._owner = os.getpid()
        self._counter = 0
        self.expected = Expected()
        self.explain_endless: Callable[[], str] = lambda: "call capture.step() after each iteration"
        """Returns the reason why no iteration finishes, and the remedy."""
        self.tally: IterationTally | None = None
        self.num_left_out = 0
        self._ring = ring
        self._timeout_seconds = options.block_timeout_seconds
        self._taker: HostStatistics | None = None
        # In other captures, the writer computes statistics from the staged values.
        if options.record_last is not None:
            # Imports numba, which other captures do not need.
            from ranktape.capture.tensors.taking import HostStatistics

            self._taker = HostStatistics()
        self._device: DeviceStage | None = None
        self._refusal: str | None = None
        """The reason why there is no `_device`; None if there was none so far."""
        self._lock = threading.RLock()  # a signal handler may call `close` while this thread holds the lock
        self._is_reduced = False
        _recorders.add(self)

    def begin(
        self, iteration: int, *, is_staged: bool, selecting: Selecting | None = None, is_reduced: bool = False
    ) -> None:
        """Start an iteration, with its own selection if `selecting` is given.

        Unless `is_staged`, tensors are only counted. If `is_reduced`, there is room for statistics, but not for values.
        """
        if os.getpid() != self._owner:
            return
        self._selecting = selecting or self._usual
        if self._taker is not None:
            self._taker.begin()
        self._is_reduced = is_reduced
        self.tally = IterationTally(iteration=iteration, is_staged=is_staged)
        self.num_left_out = 0
        # Also called for iterations that are only counted.
        self.expected.begin()

    def end(self) -> dict[str, Any]:
        """Finish the iteration. Returns the fields of its commit about expected and missing tensors."""
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
    ) -> bool:
        """Copy the present values of a tensor. Returns whether they will be stored.

        Nothing else happens on the training thread. Failures are reported, and raised only if the capture is strict.
        """
        try:
            return self._take(self.expected.site(source, role), tensor, call, placement, tags)
        except Exception as error:  # noqa: BLE001  (a guard)
            self._fail(error, source, role)
        return False

    def _take(self, site: Site, tensor: torch.Tensor, call: Call, placement: str | None, tags: Tags) -> bool:
        """Do the work of `record` for a site."""
        tally, rule = self.tally, self._selecting.only_rule
        if tally is None or site.is_disabled:
            return False
        is_late = call.iteration != tally.iteration
        if is_late or transform_level() is not None:
            late = f"it belongs to iteration {call.iteration}, and came after that had ended"
            self.refuse(site.source, site.role, late if is_late else TRANSFORMED, call=None if is_late else call)
            return False
        if self.tracker.num_unended > MAX_PASSES:
            raise CaptureError(f"{MAX_PASSES} forward passes went by in one iteration: {self.explain_endless()}")
        form = None
        if rule is not None and tensor.is_cpu and is_plain(tensor):
            # If all tensors are selected, a tensor like an earlier one has the same form.
            form = site.forms.get((rule, tensor.dtype, tensor.shape, "", placement, call.kind, tags.quant_type))
        parts = [] if form is not None else self._parts(site, tensor, call, placement)
        if parts is None:
            return False
        own = site.distinct(call)
        if form is not None:
            selected = [(tensor, form)]
        else:
            forms = [(part.tensor, self._form(site, part, own, tags)) for part in parts]
            selected = [(whole, form) for whole, form in forms if form is not None]
            if not selected:
                self.num_left_out += 1
                self.expected.excuse(site.source, site.role, call)
                return False
        for whole, form in selected:
            if tally.is_staged:
                self._stage(whole, form, own, tags)
            # After staging, so that a failed tensor is neither counted nor marked as seen.
            tally.count(form)
        site.seen.add(call.key)
        return tally.is_staged

    def _parts(self, site: Site, tensor: torch.Tensor, call: Call, placement: str | None) -> list[PlainPart] | None:
        """The parts of a tensor to record; None if it is refused."""
        try:
            parts = parts_of(tensor, placement=placement)
            self._check_device(parts[0].tensor)
        except UnrecordableError as error:
            self.refuse(site.source, site.role, str(error), call=call)
            return None
        return parts

    def record_found_inf(self, found_inf: torch.Tensor) -> None:
        """Note that a step of the running iteration is skipped if the tensor is not 0. Does not wait for its device."""
        tally = self.tally
        if tally is None or not tally.is_staged:
            return
        with self._guard, contextlib.suppress(UnrecordableError):
            self._check_device(found_inf)
            if found_inf.is_cpu:
                tally.step_skipped |= bool(found_inf)
                return
            header = json.dumps({"iteration": tally.iteration}).encode()
            self._put_off_device(found_inf, header, nbytes=found_inf.nbytes, kind=SlotKind.FOUND_INF)

    def guarded(self, source: Source | None = None, role: TensorRole | None = None) -> Guard:
        """A context that reports exceptions instead of raising them, unless the capture is strict.

        With a source, an exception disables the source, or only one role of it, for the rest of the run. Without one,
        or if the ring or the writer failed, recording stops altogether.
        """
        return self._guard if source is None else Guard(self._fail, source, role)

    def attach(self, source: Source, roles: Iterable[TensorRole]) -> None:
        """Note that hooks were put on a module, and the roles that they will see when it runs with gradients."""
        left_out = () if self._may_train else (Operation.BACKWARD,)
        known = [role for role in roles if role.operation not in left_out and self._selecting.may_take(source, role)]
        self.expected.attach(source, known)

    def expect(self, source: Source, roles: Iterable[TensorRole]) -> None:
        """Expect roles of a call that the hooks will not see."""
        self.expected.expect(source, [role for role in roles if self._selecting.may_take(source, role)])

    def follows(self, source: Source, roles: Iterable[TensorRole] = ()) -> bool:
        """Whether the running call of a source is recorded. If it is not, it is noted that the source ran."""
        if not self.tracker.is_active:
            self.expected.passed(source)
            return False
        if is_transformed():
            self.expected.passed(source)
            for role in dict.fromkeys((*self.expected.known(source), *roles)):
                self.refuse(source, role, TRANSFORMED)
            return False
        return True

    def begin_call(self, source: Source, tensor: torch.Tensor) -> Call:
        """Start a call of a source, whose compute dtype is determined from a tensor."""
        key = f"{source.layer_type} {source.module}"
        call = self.tracker.begin_call(key, dtype=tensor.dtype, device_type=tensor.device.type)
        is_training = call.mode is Mode.TRAIN
        self.expected.called(source, has_gradients=torch.is_grad_enabled(), is_training=is_training)
        if self._selecting.depends_on_call:
            for role in self.expected.known(source):
                if not self.wants(source, role, call):
                    self.expected.excuse(source, role, call)
        return call

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
        tags: Tags = NO_TAGS,
    ) -> None:
        """Record the gradient of a tensor, with this role and call, when a backward pass computes it.

        With `part`, its result for the gradient is recorded, such as another shape or one of several operands.
        """
        site = self.expected.site(source, role)
        tensor.register_hook(Hook(partial(self._on_grad, site, call, part, placement, on_grad, tags)))
        self._await(site, call)

    def await_grad(self, source: Source, role: TensorRole, call: Call) -> None:
        """Expect a gradient of a call."""
        self._await(self.expected.site(source, role), call)

    def _await(self, site: Site, call: Call) -> None:
        if call.mode is Mode.TRAIN and self.wants(site.source, site.role, call):
            site.hooked.add(call.key)

    def take_grad(
        self,
        source: Source,
        role: TensorRole,
        grad: torch.Tensor,
        *,
        call: Call,
        part: Callable[[torch.Tensor], torch.Tensor] | None = None,
        placement: str | None = None,
    ) -> None:
        """Record a gradient that has been computed, as `record_grad` would."""
        self._on_grad(self.expected.site(source, role), call, part, placement, None, NO_TAGS, grad)

    def _on_grad(  # noqa: PLR0917  (bound to each gradient, on the training thread)
        self,
        site: Site,
        call: Call,
        part: Callable[[torch.Tensor], torch.Tensor] | None,
        placement: str | None,
        on_grad: Callable[[Call], None] | None,
        tags: Tags,
        grad: torch.Tensor,
    ) -> None:
        self.tracker.note_backward()
        try:
            if on_grad is not None:
                on_grad(call)
            if self.tracker.is_adding_weights and call.key in site.taken:
                return  # already recorded with the gradients of the inputs
            own = DIFFERENTIABLE if torch.is_grad_enabled() else tags
            self._take(site, grad if part is None else part(grad), call, placement, own)
        except Exception as error:  # noqa: BLE001  (a guard)
            self._fail(error, site.source, site.role)

    def wants(self, source: Source, role: TensorRole, call: Call) -> bool:
        """Whether a tensor of this source, role and call may be selected in this iteration, before its values exist."""
        return self._selecting.only_rule is not None or self._selecting.may_take(source, role, call)

    def find_unmatched(self, paths: Collection[str]) -> list[str]:
        """The messages about names in the selection that matched nothing. To be called once, after an iteration."""
        if self._selecting is not self._usual:
            return []
        seen, self._selecting.sightings = self._selecting.sightings, None
        return [] if seen is None else list(find_unmatched(self.options, seen, paths=paths))

    def close(self, *, timeout_seconds: float) -> None:
        """Stop recording, and wait for pending copies from the device."""
        with self._lock:
            if self._device is not None:
                self._device.close(timeout_seconds=timeout_seconds)
            self._device, self._refusal = None, "the capture has ended"

    def refuse(self, source: Source, role: TensorRole, reason: str, *, call: Call | None = None) -> None:
        """Report why a tensor of the running iteration, or of one call in it, is not recorded."""
        if self._selecting.may_take(source, role, call):
            self.expected.refuse(source, role, reason)
        else:
            self.expected.excuse(source, role, call)

    def next_index(self, source: Source, role: TensorRole) -> int:
        """Number of earlier tensors of this source and role in the microbatch, as the index of one without a call."""
        mode, microbatch = self.tracker.mode, self.tracker.microbatch
        taken = self.expected.site(source, role).taken
        # Indices without a call are consecutive, so that a search takes few steps however many there are.
        return bisect.bisect_left(range(len(taken)), True, key=lambda index: (mode, microbatch, index) not in taken)  # noqa: FBT003  # positional

    def _fail(self, error: Exception, source: Source | None = None, role: TensorRole | None = None) -> None:
        """Disable what failed, or raise an exception if the capture is strict."""
        if isinstance(error, StrictCaptureError):
            raise error
        text = failure_text(error)
        if isinstance(error, NoRoomError) and self.options.record_last is not None:
            if self.tally is not None and self.tally.is_staged:
                # The ring is full of held iterations, so a flight recorder does without this one.
                self.tally.is_staged, self.tally.loss = False, text
            return
        # A `RanktapeError` is about the ring, the writer or the iteration, not about the site.
        name = "" if source is None else source_name(source) if role is None else site_name(source, role)
        if source is None or isinstance(error, RanktapeError):
            self._on_failure(text)
        elif self.expected.disable(source, role, text) and not self.options.strict:
            self._on_site_failure(f"nothing more is recorded of {name}: {text}")
        if self.options.strict:
            where = f" at {name}" if name else ""
            raise StrictCaptureError(f"the capture failed{where}: {text} (it is strict)") from error

    def _form(self, site: Site, part: PlainPart, call: Call, tags: Tags) -> RecordForm | None:
        """The form in which a part is recorded; None if it is not selected."""
        tensor, selecting = part.tensor, self._selecting
        decision = selecting.only_rule or selecting.decide(
            site.source,
            site.role,
            call,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            nbytes=tensor.nbytes,
            quant_type=self._quant_type(call, tags),
            suffix=part.suffix,
        )
        if decision is None:
            return None
        key = (
            decision,
            tensor.dtype,
            tensor.shape,
            part.suffix,
            part.placement,
            call.kind,
            tags.quant_type,
        )
        form = site.forms.get(key)
        if form is not None:
            return form
        form = form_of(
            site.source,
            site.role,
            part,
            decision=decision,
            call=call,
            quant_type=self._quant_type(call, tags),
            given_sample_dim=self.options.sample_dim,
        )
        return None if form is None else self.expected.keep_form(site, key, form)

    def _quant_type(self, call: Call, tags: Tags) -> str:
        return tags.quant_type or self.options.quant_type or call.quant_type

    def _stage(self, whole: torch.Tensor, form: RecordForm, call: Call, tags: Tags) -> None:
        tensor = whole
        if form.places is not None and form.sample_dim is not None:
            tensor = narrow(whole, form.places, sample_dim=form.sample_dim)
        is_reduced = self._is_reduced or form.keep == Keep.STATISTICS
        if not tensor.is_cpu:
            self._stage_off_device(tensor, form, call, tags, is_reduced=is_reduced)
        elif is_reduced and self._taker is not None:
            taken = self._taker.compute(tensor, sample_dim=form.sample_dim)
            self._put(self._header(form, call, tags, more=',"taken":"host"'), taken, len(taken))
        elif (address := _address(tensor)) or not form.nbytes:
            self._put(self._header(form, call, tags), address, form.nbytes)
        else:
            self._fill(self._header(form, call, tags), form.nbytes, partial(_copy, tensor))

    def _put(self, header: bytes, payload: int | bytes, nbytes: int) -> None:
        """Publish a copy of bytes, or of the memory at an address."""
        try:
            self._ring.put_copy(SlotKind.TENSOR, header, payload, nbytes, timeout_seconds=self._timeout_seconds)
        except Exception as error:
            raise _of_ring(error) from error

    def _fill(
        self, header: bytes, nbytes: int, fill: Callable[[Slot], bool], *, kind: SlotKind = SlotKind.TENSOR
    ) -> None:
        """Reserve a slot and fill it. If `fill` returns False, it publishes the slot itself later."""
        try:
            slot = self._ring.reserve(kind, header, nbytes, timeout_seconds=self._timeout_seconds)
        except Exception as error:
            raise _of_ring(error) from error
        try:
            is_filled = fill(slot)
        except BaseException:
            # A slot that is never published would block all later ones.
            self._ring.cancel(slot)
            raise
        if is_filled:
            self._ring.publish(slot)

    def _stage_off_device(
        self, tensor: torch.Tensor, form: RecordForm, call: Call, tags: Tags, *, is_reduced: bool
    ) -> None:
        """Copy the values, or statistics computed on the device, from a device.

        A flight recorder also copies statistics if the values would leave little room in the ring.
        """
        spare_nbytes = self._ring.free_nbytes // 2 - self._ring.capacity // 8
        if is_reduced or (self._taker is not None and tensor.nbytes > spare_nbytes):
            from ranktape.capture.tensors.taking import is_summable, statistics_on_device

            if is_summable(tensor):
                dim = form.sample_dim
                nbytes = device_nbytes(1 if dim is None else tensor.shape[dim])
                header = self._header(form, call, tags, more=',"taken":"device"')
                self._put_off_device(
                    tensor, header, nbytes=nbytes, reduce=partial(statistics_on_device, sample_dim=dim)
                )
                return
        self._put_off_device(tensor, self._header(form, call, tags), nbytes=form.nbytes)

    def _put_off_device(
        self,
        tensor: torch.Tensor,
        header: bytes,
        *,
        nbytes: int,
        reduce: Reduction | None = None,
        kind: SlotKind = SlotKind.TENSOR,
    ) -> None:
        device = self._device
        assert device is not None, "only called after `_check_device`"

        def fill(slot: Slot) -> bool:
            if nbytes:
                device.copy(tensor, slot, reduce=reduce)  # publishes the slot when the copy has finished
            return not nbytes

        self._fill(header, nbytes, fill, kind=kind)

    def _check_device(self, tensor: torch.Tensor) -> None:
        """Check that a tensor can be copied from its device now, before anything is allocated for it.

        Raises:
            UnrecordableError: it cannot be copied.
        """
        if tensor.is_cpu:
            return
        kind = tensor.device.type
        try:
            if driver_of(tensor.device).is_capturing(tensor.device):
                raise UnrecordableError(CAPTURING)
        except (RuntimeError, AttributeError) as error:
            raise UnrecordableError(f"torch has no streams for {kind}: {failure_text(error)}") from error
        with self._lock:
            if self._device is None and self._refusal is None:
                try:
                    self._device = DeviceStage(self._ring, device=tensor.device, timeout_seconds=self._timeout_seconds)
                except RuntimeError as error:
                    self._refusal = f"no pinned memory for copies off {kind}: {failure_text(error)}"
        reason = self._refusal if self._device is None else self._device.failure
        if reason is not None:
            raise UnrecordableError(reason)

    def _header(self, form: RecordForm, call: Call, tags: Tags, *, more: str = "") -> bytes:
        counter, self._counter = self._counter, self._counter + 1
        given = tags.sample_ids or (call.sample_ids if form.sample_dim is not None else None)
        ids = "null" if given is None and form.places is None else json.dumps(ids_at(form.places, given))
        return (
            f'{form.header},"iteration":{call.iteration},"microbatch":{call.microbatch},"call":{call.index},'
            f'"counter":{counter},"timestamp":{time.time()!r},"sample_ids":{ids},'
            f'"metadata":{tags.metadata}{more}}}'
        ).encode()


def _of_ring(error: Exception) -> RanktapeError:
    """A failure of the ring as a `RanktapeError`, because it concerns all sites."""
    return error if isinstance(error, RanktapeError) else CaptureError(f"the ring failed: {failure_text(error)}")


def _address(tensor: torch.Tensor) -> int:
    """The address of the values of a contiguous tensor; 0 if its values are not in memory in this order."""
    # The address is also 0 for zeros that autograd makes without memory.
    return tensor.data_ptr() if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) else 0


def _copy(tensor: torch.Tensor, slot: Slot) -> bool:
    """Fill a slot with the values of a CPU tensor of any layout. Returns True: the slot is filled."""
    source = tensor.detach() if tensor.requires_grad else tensor
    dtype = source.dtype
    if dtype.itemsize == 1:
        # Copying 8-bit floats is not implemented for every layout, but copying bytes is.
        dtype = torch.uint8
        source = source.view(dtype)
    torch.frombuffer(slot.payload, dtype=dtype).view_as(source).copy_(source)
    return True
