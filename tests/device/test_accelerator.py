"""Does the simulated accelerator behave as an accelerator does?"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

import pytest
import torch

from tests.device.accelerator import Accelerator
from tests.device.models import Training


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_training_computes_what_it_does_on_the_cpu(sim: Accelerator, optimizer: str) -> None:
    sim.set_delay(kernel_us=20, copy_us=200, is_random=True)
    losses = Training("sim:1", optimizer=optimizer).run()
    assert torch.equal(losses.cpu(), Training("cpu", optimizer=optimizer).run())


@pytest.mark.usefixtures("sim")
def test_the_host_cannot_read_memory_of_the_device() -> None:
    tensor = torch.ones(4, device="sim")
    torch.accelerator.synchronize()
    if (pid := os.fork()) == 0:
        faulthandler.disable()
        ctypes.string_at(tensor.data_ptr(), 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV


@pytest.mark.parametrize("waits", [True, False])
def test_a_side_stream_must_wait_for_the_compute_stream(sim: Accelerator, *, waits: bool) -> None:
    source, host, side = torch.zeros(8, device="sim"), torch.zeros(8, pin_memory=True), torch.Stream("sim")
    torch.accelerator.synchronize()
    sim.set_delay(kernel_us=20_000)
    source.fill_(1)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(source, non_blocking=True)
    torch.accelerator.synchronize()
    assert host.sum() == (8 if waits else 0)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_clone_must_live_until_it_is_copied(sim: Accelerator, *, keeps: bool) -> None:
    source, host, side = torch.ones(8, device="sim"), torch.zeros(8, pin_memory=True), torch.Stream("sim")
    sim.set_delay(copy_us=20_000)
    clone = source.clone()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(clone, non_blocking=True)
    if not keeps:
        del clone
    another = torch.full((8,), 5.0, device="sim")  # takes the memory of what was freed
    torch.accelerator.synchronize()
    assert host.sum() == (8 if keeps else 40), another


def test_waits_of_the_host_are_counted(sim: Accelerator) -> None:
    with sim.watching() as waits:
        x = torch.ones(3, device="sim")
        y = (x * 2).sum()
        assert waits.here == {}
        assert y.item() == 6
        x.cpu()
        x.nonzero()
        torch.accelerator.current_stream().record_event().synchronize()
    assert waits.here == {"item": 1, "copy to the host": 1, "values of aten::nonzero": 1, "event": 1}


def test_errors_come_when_they_are_injected(sim: Accelerator) -> None:
    x = torch.ones(3, device="sim")
    sim.fail_next("alloc")
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        torch.ones(3, device="sim")
    torch.accelerator.synchronize()
    sim.fail_next("async", sticky=True)
    x.add_(1)
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        torch.accelerator.synchronize()
    with pytest.raises(torch.AcceleratorError, match="sticky"):
        x.add_(1)
