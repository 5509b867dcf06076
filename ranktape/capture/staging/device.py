"""Copies tensors off a CUDA device without the training waiting for it.

    compute stream   a clone: from here on nothing that the training does changes what is recorded
    side stream      the clone's copy into the ring, which is pinned memory
    host             publishes the slot once the copy's event has passed; looks at each call, waits at none

The clones that are under way are bounded: beyond the bound the oldest copy is waited for.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from ranktape.capture.staging.ring import RingProducer
from ranktape.capture.staging.ring_file import Slot
from ranktape.errors import CaptureError

DEVICE_BUDGET_NBYTES = 256 << 20
"""Device memory that clones under way may take, on each device's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceCopy:
    """A copy that is under way."""

    event: torch.cuda.Event
    """Passes when the copy is done."""
    slot: Slot
    """Where it goes."""
    clone: torch.Tensor
    """Kept until then."""


class DeviceStage:
    """Copies from CUDA devices into a ring; made when the first CUDA tensor comes. Safe for several threads."""

    def __init__(self, ring: RingProducer) -> None:
        """Pin the ring's memory.

        Raises:
            CaptureError: the driver does not pin it.
        """
        self._ring = ring
        self._copies: deque[_DeviceCopy] = deque()
        self._nbytes = 0
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.RLock()
        # Who waits for room may be waiting for what is still on its way.
        ring.on_wait = self.poll
        memory = torch.frombuffer(ring.view, dtype=torch.uint8)
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if status != 0:
            raise CaptureError(
                f"the driver cannot pin the {memory.nbytes} bytes of the ring (cudaHostRegister gives {status}): "
                f"lower --host-budget-nbytes, or raise the limit of locked memory"
            )

    def copy(self, tensor: torch.Tensor, slot: Slot) -> None:
        """Copy a tensor into its slot and publish that when the copy is done; returns before it is."""
        with self._lock:
            # Asked for before the stream changes: inside of the block it would be the side stream itself.
            compute = torch.cuda.current_stream(tensor.device)
            clone = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
            if tensor.device not in self._sides:
                self._sides[tensor.device] = torch.cuda.Stream(tensor.device)
            side = self._sides[tensor.device]
            side.wait_stream(compute)
            target = torch.frombuffer(slot.payload, dtype=torch.uint8)
            with torch.cuda.stream(side):
                target.copy_(clone.view(-1).view(torch.uint8), non_blocking=True)
                event = torch.cuda.Event()
                event.record(side)
            self._copies.append(_DeviceCopy(event=event, slot=slot, clone=clone))
            self._nbytes += clone.nbytes
            while self._nbytes > DEVICE_BUDGET_NBYTES:
                self._copies[0].event.synchronize()
                self.poll()
            self.poll()

    def poll(self, *, waits: bool = False) -> None:
        """Publish what has arrived; where it `waits`, everything that is under way, as it arrives."""
        with self._lock:
            while self._copies and (waits or self._copies[0].event.query()):
                if waits:
                    self._copies[0].event.synchronize()
                copy = self._copies.popleft()
                self._nbytes -= copy.clone.nbytes
                self._ring.publish(copy.slot)
