"""Copies tensors from an accelerator to the ring while the training goes on.

    compute stream   clones the tensor, so that later changes do not reach the record
    side stream      copies the clone into pinned memory: the ring itself if the backend registers its memory (CUDA),
                     else a block of a pool, which the publisher copies into the ring
    publisher        a thread that waits for the copy, without the GIL, and publishes its slot

The training thread queries no event and waits for no stream. A tensor beyond the budget of clones is copied on the
compute stream without a clone, which delays the device but not the host. If the device raises an error for a tensor,
its slot is published as lost.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ranktape.capture.guard import failure_text
from ranktape.capture.staging.ring import RingProducer
from ranktape.capture.staging.ring_file import Slot
from ranktape.capture.torch_private import is_accelerator_error
from ranktape.errors import CaptureError

CLONE_BUDGET_NBYTES = 256 << 20
"""Largest size of the clones that are being copied, in bytes, on each device."""

POOL_NBYTES = 256 << 20
"""Size of the pinned pool, in bytes, if the ring itself cannot be registered; never more than the ring."""

_NUM_TRIES = 3
"""Number of consecutive waits that raise after which a device counts as failed."""


class Driver:
    """Functions that `torch.accelerator` lacks. The base class is for backends that cannot register host memory."""

    def register(self, memory: torch.Tensor, device: torch.device) -> bool:  # noqa: ARG002  (for subclasses)
        """Pin memory that is allocated already, for all devices; returns whether that succeeded."""
        return False

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`."""

    def relax_capture_mode(self) -> None:
        """Prevent waits of this thread from invalidating a graph that another thread captures."""

    def is_capturing(self, device: torch.device) -> bool:
        """Whether the current stream of a device captures a graph."""
        # In torch 2.11 and earlier, only CUDA has this function.
        asks = getattr(torch.accelerator.current_stream(device), "is_capturing", None)
        return asks is not None and bool(asks())

    def record(self, stream: torch.Stream) -> torch.Event:
        """Record an event after the current work of a stream."""
        return stream.record_event()


class CudaDriver(Driver):
    """The driver of CUDA, and of ROCm, which torch also calls CUDA."""

    def register(self, memory: torch.Tensor, device: torch.device) -> bool:
        """Pin memory that is allocated already, for all devices; returns whether that succeeded."""
        portable = 1
        with torch.cuda.device(device):  # otherwise, this would create a context on the current device
            if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable)) == 0:
                return True
            try:
                # A failure stays CUDA's last error until the next launch raises it. This launch clears it.
                torch.empty(1, device=device).zero_()
            except RuntimeError as error:
                if not is_accelerator_error(error):
                    raise
        return False

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def relax_capture_mode(self) -> None:
        """Prevent waits of this thread from invalidating a graph that another thread captures."""
        name, function = ("libcudart", "cuda") if torch.version.hip is None else ("libamdhip64", "hip")
        maps = Path("/proc/self/maps").read_text().splitlines()
        # torch has no binding for it, so it is called in the library that torch has loaded.
        for path in {line.split()[-1] for line in maps if name in line}:
            relaxed = ctypes.byref(ctypes.c_int(2))
            getattr(ctypes.CDLL(path), f"{function}ThreadExchangeStreamCaptureMode")(relaxed)

    def is_capturing(self, device: torch.device) -> bool:
        """Whether the current stream of a device captures a graph."""
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def record(self, stream: torch.Stream) -> torch.Event:
        """Record an event after the current work of a stream."""
        event = torch.cuda.Event(blocking=True)  # `torch.Event` ignores the flag, and waiting would spin
        # It only accepts streams of `torch.cuda`.
        event.record(
            torch.cuda.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            )
        )
        return event


DRIVERS: dict[str, Driver] = {"cuda": CudaDriver()}
"""The drivers by type of device; other types use the base class."""


def driver_of(device: torch.device) -> Driver:
    """The driver of a device."""
    return DRIVERS.get(device.type) or Driver()


Reduction = Callable[[torch.Tensor], torch.Tensor]
"""A function that reduces a tensor to a small one, on its device and without waiting for it."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Copy:
    """A copy in progress."""

    slot: Slot
    """Slot that receives the tensor."""
    device: torch.device
    """Device of the tensor."""
    clone: torch.Tensor | None = None
    """The clone that is copied; None if the tensor is copied without one."""
    block: torch.Tensor | None = None
    """The block of pinned memory in between; None if the ring is registered."""
    block_end: int = 0
    """Total bytes taken from the pool, including this block; 0 for a block outside the pool."""
    stream: torch.Stream | None = None
    """The stream that copies; None if nothing was submitted."""
    event: torch.Event | None = None
    """The event after the copy; None if recording it failed."""
    error: str | None = None
    """Why the tensor is lost; None if it is not."""


class DeviceStage:
    """Copies tensors from the accelerators of this process into a ring. It is thread-safe."""

    def __init__(self, ring: RingProducer, *, device: torch.device, timeout_seconds: float) -> None:
        """Register the ring, or allocate the pool; `timeout_seconds` is the longest wait for room in the pool.

        Raises:
            RuntimeError: the backend allocates no pinned memory.
        """
        self._ring = ring
        self._timeout_seconds = timeout_seconds
        self._driver = driver_of(device)
        self._memory = torch.frombuffer(ring.view, dtype=torch.uint8)
        self._is_registered = self._driver.register(self._memory, device)
        pool_nbytes = 0 if self._is_registered else min(POOL_NBYTES, ring.capacity)
        # Now, because the first pinned allocation would synchronise the device in a captured step.
        self._pool = torch.empty(pool_nbytes, dtype=torch.uint8, pin_memory=not self._is_registered)
        self._pool_taken = self._pool_freed = 0
        self._clone_nbytes: Counter[torch.device] = Counter()
        self._sides: dict[torch.device, torch.Stream] = {}
        self._failure: str | None = None
        self._is_abandoned = False
        self._open: deque[_Copy] = deque()
        self._changed = threading.Condition()
        # One thread submits at a time, because blocks of the pool are freed in the order in which they are taken.
        self._submitting = threading.Lock()
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._publisher = threading.Thread(target=self._publish, name="ranktape-publisher", daemon=True)
        self._publisher.start()

    @property
    def failure(self) -> str | None:
        """Why the device failed for good; None if it has not."""
        return self._failure

    def copy(self, tensor: torch.Tensor, slot: Slot, *, reduce: Reduction | None = None) -> None:
        """Submit the copy of a tensor, or of the result of `reduce`, into its slot.

        It never raises. If the device does, the tensor is lost.
        """
        copy = _Copy(slot=slot, device=tensor.device, error="interrupted")
        with self._submitting:
            try:
                self._submit(tensor.detach() if reduce is None else reduce(tensor), copy)
                copy.error = None
            except Exception as error:  # noqa: BLE001  # a device may fail with anything
                copy.error = failure_text(error)
            finally:
                with self._changed:
                    self._open.append(copy)
                self._queue.put(copy)

    def _submit(self, tensor: torch.Tensor, copy: _Copy) -> None:
        target = torch.frombuffer(copy.slot.payload, dtype=torch.uint8)
        if not self._is_registered:
            target = copy.block = self._take_block(copy, target.numel())
        compute = torch.accelerator.current_stream(copy.device)
        with self._changed:
            is_cloned = self._clone_nbytes[copy.device] + tensor.nbytes <= CLONE_BUDGET_NBYTES
        if is_cloned:
            source = copy.clone = _plain(tensor.clone(memory_format=torch.contiguous_format))
            with self._changed:
                self._clone_nbytes[copy.device] += source.nbytes
            copy.stream = self._side(copy.device)
            copy.stream.wait_stream(compute)
        else:
            # No clone is needed to keep the memory: only this stream can reuse it, after the copy.
            source, copy.stream = _plain(tensor.contiguous()), compute
        with copy.stream:
            target.copy_(source.view(-1).view(torch.uint8), non_blocking=True)
        copy.event = self._driver.record(copy.stream)

    def _side(self, device: torch.device) -> torch.Stream:
        if device not in self._sides:
            self._sides[device] = torch.Stream(device)
        return self._sides[device]

    def _take_block(self, copy: _Copy, nbytes: int) -> torch.Tensor:
        """Pinned memory for a copy. If the pool is full, this waits until earlier copies are published.

        Raises:
            CaptureError: the pool had no room in time.
        """
        size = self._pool.numel()
        if nbytes > size:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        with self._changed:
            rest = size - self._pool_taken % size
            start = self._pool_taken + (rest if rest < nbytes else 0)
            if not self._changed.wait_for(
                lambda: self._pool_freed == self._pool_taken or start + nbytes <= self._pool_freed + size,
                self._timeout_seconds,
            ):
                raise CaptureError(f"{size} bytes of pinned memory had no room for it: raise --host-budget-nbytes")
            copy.block_end = self._pool_taken = start + nbytes
        return self._pool[start % size :][:nbytes]

    def _publish(self) -> None:
        self._driver.relax_capture_mode()
        while (copy := self._queue.get()) is not None:
            self._wait_for(copy)
            with self._changed:
                if self._is_abandoned:
                    return
            if copy.error is None and copy.block is not None:
                torch.frombuffer(copy.slot.payload, dtype=torch.uint8).copy_(copy.block)
            with self._changed:
                self._open.popleft()
                if copy.clone is not None:
                    self._clone_nbytes[copy.device] -= copy.clone.nbytes
                copy.clone = copy.block = None
                self._pool_freed = max(self._pool_freed, copy.block_end)
                if copy.error is None:
                    self._ring.publish(copy.slot)
                else:
                    self._ring.lose(copy.slot, copy.error)
                self._changed.notify_all()

    def _wait_for(self, copy: _Copy) -> None:
        """Wait until the device no longer writes into the slot, even after an error, so that the slot can be reused."""
        if copy.stream is None:
            return
        for _ in range(_NUM_TRIES):
            try:
                (copy.stream if copy.event is None else copy.event).synchronize()
            except Exception as error:  # noqa: BLE001  # a device may fail with anything
                copy.error = copy.error or failure_text(error)
                copy.event = None
            else:
                return
        self._failure = f"the device failed: {copy.error}"

    def close(self, *, timeout_seconds: float) -> None:
        """Publish all copies in progress, stop the publisher and unregister the ring, before the ring is unmapped.

        If a device hangs, the copies that do not finish in time are lost, and the ring stays registered.
        """
        with self._changed:
            is_done = self._changed.wait_for(lambda: not self._open, timeout_seconds)
            if not is_done:
                self._is_abandoned = True
                while self._open:
                    self._ring.lose(self._open.popleft().slot)
        self._queue.put(None)
        if not is_done:
            return
        self._publisher.join()
        if self._is_registered:
            self._driver.unregister(self._memory)
        self._is_registered = False
        self._memory = self._pool = torch.empty(0)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg()
