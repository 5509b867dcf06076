"""Puts tensors into the ring: their values, or what these add up to."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ranktape.capture.guard import failure_text
from ranktape.capture.staging.device import DeviceStage, Reduction, driver_of
from ranktape.capture.staging.ring import RingProducer
from ranktape.capture.staging.ring_file import Slot, SlotKind
from ranktape.capture.tensors.parts import UnrecordableError
from ranktape.capture.writing.counting import device_nbytes
from ranktape.errors import CaptureError, RanktapeError

if TYPE_CHECKING:
    from ranktape.capture.tensors.taking import StatisticsTaker

_Answer = TypeVar("_Answer")

SMALL_NBYTES = 1 << 16
"""A copy of at most so many bytes is made while other threads cannot reserve room."""

CAPTURING = "a graph is being captured on its device: what it computes has no values yet"
"""Why nothing is copied meanwhile."""


class Stager:
    """Puts tensors into one ring; safe for several threads."""

    def __init__(self, ring: RingProducer, *, takes_statistics: bool, timeout_seconds: float) -> None:
        """Where it `takes_statistics`, be ready for that; the time is the longest wait for room."""
        self._ring = ring
        self._taker: StatisticsTaker | None = None
        if takes_statistics:
            # Imports numba, which a capture of values does without.
            from ranktape.capture.tensors.taking import StatisticsTaker

            self._taker = StatisticsTaker()
        self._timeout_seconds = timeout_seconds
        self._device: DeviceStage | None = None
        self._refusal: str | None = None
        self._lock = threading.RLock()  # a signal handler may close what it has interrupted

    def begin(self) -> None:
        """An iteration begins."""
        if self._taker is not None:
            self._taker.begin()

    def check(self, tensor: torch.Tensor) -> None:
        """Pass a tensor that can be copied off its device now; asked before anything is allocated for it.

        Raises:
            UnrecordableError: it cannot.
        """
        if not tensor.is_cpu and (reason := self._why_not(tensor)) is not None:
            raise UnrecordableError(reason)

    def _why_not(self, tensor: torch.Tensor) -> str | None:
        try:
            if driver_of(tensor.device).is_capturing(tensor.device):
                return CAPTURING
        except (RuntimeError, AttributeError) as error:
            return f"torch has no streams for {tensor.device.type}: {failure_text(error)}"
        with self._lock:
            if self._device is None and self._refusal is None:
                try:
                    self._device = DeviceStage(self._ring, device=tensor.device, timeout_seconds=self._timeout_seconds)
                except RuntimeError as error:
                    self._refusal = f"no pinned memory for copies off {tensor.device.type}: {failure_text(error)}"
        return self._refusal if self._device is None else self._device.failure

    def takes(self, tensor: torch.Tensor, *, is_reduced: bool) -> str:
        """Where statistics are taken that are put in, and not the values: on the `host`, the `device`; or nowhere.

        A flight recorder takes those of a device's tensor also if its values would leave little room in the ring.
        """
        if tensor.is_cpu:
            return "host" if is_reduced and self._taker is not None else ""
        spare_nbytes = self._ring.free_nbytes // 2 - self._ring.capacity // 8
        is_short = self._taker is not None and tensor.nbytes > spare_nbytes
        if not (is_reduced or is_short):
            return ""
        from ranktape.capture.tensors.taking import is_summable

        return "device" if is_summable(tensor) else ""

    def put_statistics(self, tensor: torch.Tensor, header: bytes, *, sample_dim: int | None) -> None:
        """What the values add up to.

        Raises:
            CaptureError: as `RingProducer.reserve`.
        """
        if not tensor.is_cpu:
            from ranktape.capture.tensors.taking import take_on_device

            nbytes = device_nbytes(1 if sample_dim is None else tensor.shape[sample_dim])
            self.put_values(tensor, header, nbytes=nbytes, reduce=partial(take_on_device, sample_dim=sample_dim))
            return
        assert self._taker is not None, "only called where `takes` says so"
        taken = self._taker.take(tensor, sample_dim=sample_dim)
        _of_ring(self._ring.put_copy, SlotKind.TENSOR, header, taken, len(taken), timeout_seconds=self._timeout_seconds)

    def put_values(
        self,
        tensor: torch.Tensor,
        header: bytes,
        *,
        nbytes: int,
        reduce: Reduction | None = None,
        kind: SlotKind = SlotKind.TENSOR,
    ) -> None:
        """The values, which take so many bytes; with `reduce`, what that makes of them on their device.

        Raises:
            CaptureError: as `RingProducer.reserve`.
        """
        seconds = self._timeout_seconds
        if nbytes <= SMALL_NBYTES and tensor.is_cpu and ((address := _address(tensor)) or not nbytes):
            _of_ring(self._ring.put_copy, kind, header, address, nbytes, timeout_seconds=seconds)
            return
        slot = _of_ring(self._ring.reserve, kind, header, nbytes, timeout_seconds=seconds)
        try:
            if nbytes and not tensor.is_cpu:
                assert self._device is not None, "only called after `check`"
                self._device.copy(tensor, slot, reduce=reduce)  # publishes the slot when the copy has arrived
                return
            if nbytes:
                _copy(tensor, slot)
        except BaseException:
            # A slot that is never published would hold up all that come after it.
            self._ring.cancel(slot)
            raise
        _of_ring(self._ring.publish, slot)

    def close(self, *, timeout_seconds: float) -> None:
        """Nothing more is put in; wait for what is on its way from a device."""
        with self._lock:
            if self._device is not None:
                self._device.close(timeout_seconds=timeout_seconds)
            self._device, self._refusal = None, "the capture has ended"


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


def _address(tensor: torch.Tensor) -> int:
    """Where the values of a tensor lie in its order of dimensions; 0 where they do not."""
    # Zeros that autograd makes without memory have no address.
    return tensor.data_ptr() if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()) else 0


def _copy(tensor: torch.Tensor, slot: Slot) -> None:
    if address := _address(tensor):
        # A quarter of the time of torch's copy for small tensors, and the same for large ones.
        ctypes.memmove(slot.address, address, len(slot.payload))
        return
    source = tensor.detach() if tensor.requires_grad else tensor
    dtype = source.dtype
    if dtype.itemsize == 1:
        # Copying between 8-bit floats is not implemented for every layout; their bytes are.
        dtype = torch.uint8
        source = source.view(dtype)
    torch.frombuffer(slot.payload, dtype=dtype).view_as(source).copy_(source)
