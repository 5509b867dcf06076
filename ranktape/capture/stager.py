"""Puts tensors into the ring: their values, or what these add up to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ranktape.capture.guard import failure_text
from ranktape.capture.staging.device import DeviceStage
from ranktape.capture.staging.ring import RingProducer
from ranktape.capture.staging.ring_file import SlotKind
from ranktape.capture.tensors.taking import StatisticsTaker
from ranktape.errors import CaptureError, RanktapeError

_Answer = TypeVar("_Answer")


class Stager:
    """Puts tensors into one ring; safe for several threads."""

    def __init__(self, ring: RingProducer, *, takes_statistics: bool, timeout_seconds: float) -> None:
        """Where it `takes_statistics`, be ready for that; the time is the longest wait for room."""
        self._ring = ring
        self._taker = StatisticsTaker() if takes_statistics else None
        self._timeout_seconds = timeout_seconds
        self._device: DeviceStage | None = None

    def begin(self) -> None:
        """An iteration begins."""
        if self._taker is not None:
            self._taker.begin()

    def takes(self, tensor: torch.Tensor, *, is_reduced: bool) -> bool:
        """Whether of a tensor of which statistics are kept they are put in, and not its values."""
        return is_reduced and self._taker is not None and not tensor.is_cuda

    def put_statistics(self, tensor: torch.Tensor, header: bytes, *, sample_dim: int | None) -> None:
        """What the values add up to.

        Raises:
            CaptureError: as `RingProducer.reserve`.
        """
        assert self._taker is not None, "only called where `takes` says so"
        taken = self._taker.take(tensor, sample_dim=sample_dim)
        _of_ring(self._ring.put_whole, SlotKind.TENSOR, header, taken, timeout_seconds=self._timeout_seconds)

    def put_values(self, tensor: torch.Tensor, header: bytes, *, nbytes: int) -> None:
        """The values, which take so many bytes.

        Raises:
            CaptureError: as `RingProducer.reserve`.
        """
        seconds = self._timeout_seconds
        slot = _of_ring(self._ring.reserve, SlotKind.TENSOR, header, nbytes, timeout_seconds=seconds)
        try:
            if nbytes and tensor.is_cuda:
                self._device = self._device or DeviceStage(self._ring)
                self._device.copy(tensor, slot)  # publishes the slot when the copy has arrived
                return
            if nbytes:
                _copy(tensor, slot.payload)
        except BaseException:
            # A slot that is never published would hold up all that come after it.
            self._ring.cancel(slot)
            raise
        _of_ring(self._ring.publish, slot)

    def poll(self, *, waits: bool = False) -> None:
        """Publish what has arrived from a device; where it `waits`, everything that is on its way."""
        if self._device is not None:
            self._device.poll(waits=waits)


def _of_ring(ask: Callable[..., _Answer], *args: Any, **kwargs: Any) -> _Answer:
    """What the ring answers; all sites share it: its failure is not the site's.

    Raises:
        CaptureError: whatever failed in it.
    """
    try:
        return ask(*args, **kwargs)
    except RanktapeError:
        raise
    except Exception as error:
        raise CaptureError(f"the ring failed: {failure_text(error)}") from error


def _copy(tensor: torch.Tensor, payload: memoryview) -> None:
    source = tensor.detach() if tensor.requires_grad else tensor
    dtype = source.dtype
    if dtype.itemsize == 1:
        # Copying between 8-bit floats is not implemented for every layout; their bytes are.
        dtype = torch.uint8
        source = source.view(dtype)
    torch.frombuffer(payload, dtype=dtype).view_as(source).copy_(source)
