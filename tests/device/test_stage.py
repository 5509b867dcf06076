"""Does the device stage bring the right bytes into the ring, without the training thread waiting?"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from ranktape.capture.staging import device as device_module
from ranktape.capture.staging.device import DRIVERS, DeviceStage
from ranktape.capture.staging.ring import RingConsumer, RingProducer
from ranktape.capture.staging.ring_file import Slot, SlotKind
from tests.device.accelerator import Accelerator
from tests.device.conftest import SimDriver
from tests.device.models import Training


@dataclass
class Recording:
    """What is put into a ring through a device stage, as a training on the CPU says that it must be."""

    expected: list[torch.Tensor] = field(default_factory=list)
    num: int = 0
    injected: tuple[int, Callable[[], object]] | None = None
    """Before which tensor to do something, and what."""

    def __post_init__(self) -> None:
        self.ring = RingProducer(8 << 20, keep_alive=lambda: None)
        self.consumer = RingConsumer(os.dup(self.ring.descriptor))
        self.stage = DeviceStage(self.ring, device=torch.device("sim:0"), timeout_seconds=20)
        self.slots: list[Slot] = []

    def take(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if self.injected is not None and self.injected[0] == self.num:
                self.injected[1]()
            header = json.dumps({"number": self.num}).encode()
            slot = self.ring.reserve(SlotKind.TENSOR, header, tensor.nbytes, timeout_seconds=1)
            self.num += 1
            self.stage.copy(tensor, slot)

    def read(self) -> Counter[str]:
        """How many slots of each kind have been published since; every tensor in them is the right one."""
        while (slot := self.consumer.take()) is not None:
            self.slots.append(slot)
            if slot.kind is SlotKind.TENSOR:
                expected = self.expected[slot.header["number"]]
                got = torch.frombuffer(bytearray(slot.payload), dtype=expected.dtype).view(expected.shape)
                assert torch.equal(got, expected), slot.header
        return Counter(slot.kind.name for slot in self.slots)

    @property
    def losses(self) -> list[str]:
        return [slot.header["lost"] for slot in self.slots if slot.kind is SlotKind.LOST]

    def close(self) -> None:
        self.stage.close(timeout_seconds=20)
        self.slots.clear()
        self.consumer.close()
        self.ring.close()


@pytest.fixture
def recording(way: str, sim: Accelerator) -> Iterator[Recording]:
    assert way
    made = Recording()
    yield made
    made.close()
    assert sim.registered_nbytes() == 0


def hook_linears(training: Training, take: Callable[..., Any]) -> None:
    for module in training.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _module, given, output: take(given[0], output))


@pytest.fixture(scope="module")
def truth() -> tuple[list[torch.Tensor], torch.Tensor]:
    """The inputs and outputs of all linear layers, and the losses, of the training on the CPU."""
    tensors: list[torch.Tensor] = []
    training = Training("cpu")
    hook_linears(training, lambda *found: tensors.extend(one.detach().clone() for one in found))
    return tensors, training.run()


def test_every_record_is_right_under_random_delays(
    recording: Recording, sim: Accelerator, truth: tuple[list[torch.Tensor], torch.Tensor]
) -> None:
    recording.expected = truth[0]
    training = Training("sim:0")
    hook_linears(training, recording.take)
    sim.poison(True)  # noqa: FBT003
    for _ in range(3):
        sim.set_delay(kernel_us=random.randint(0, 100), copy_us=random.randint(0, 1000), is_random=True)  # noqa: S311
    with sim.watching() as waits:
        losses = training.run()
        assert waits.here == {}
    assert torch.equal(losses.cpu(), truth[1])
    recording.stage.close(timeout_seconds=30)
    assert recording.read() == {"TENSOR": len(truth[0])}


def test_the_last_tensors_are_published_without_a_further_call(
    recording: Recording, sim: Accelerator, truth: tuple[list[torch.Tensor], torch.Tensor]
) -> None:
    recording.expected = truth[0]
    training = Training("sim:0")
    hook_linears(training, recording.take)
    sim.set_delay(kernel_us=20, copy_us=50)
    training.run()
    torch.accelerator.synchronize()
    time.sleep(0.1)
    assert recording.read() == {"TENSOR": len(truth[0])}


@pytest.mark.parametrize("kind", ["alloc", "launch", "copy", "wait", "record", "sync"])
def test_an_error_costs_one_record(
    recording: Recording, sim: Accelerator, truth: tuple[list[torch.Tensor], torch.Tensor], kind: str
) -> None:
    recording.expected = truth[0]
    recording.injected = 20, lambda: sim.fail_next(kind)
    training = Training("sim:0")
    hook_linears(training, recording.take)
    sim.poison(True)  # noqa: FBT003
    sim.set_delay(kernel_us=20, copy_us=100)
    losses = training.run()
    recording.stage.close(timeout_seconds=30)  # first: the next wait of any thread gets the injected error
    assert torch.equal(losses.cpu(), truth[1])
    assert recording.read() == {"TENSOR": len(truth[0]) - 1, "LOST": 1}
    assert "injected" in recording.losses[0]
    assert recording.stage.failure is None


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_a_sticky_error_stops_the_stage(recording: Recording, sim: Accelerator, kind: str) -> None:
    tensors = [torch.full((64,), float(number), device="sim") for number in range(8)]
    recording.expected = [torch.full((64,), float(number)) for number in range(8)]
    torch.accelerator.synchronize()
    sim.set_delay(copy_us=500)
    recording.injected = 4, lambda: sim.fail_next(kind, sticky=True)
    recording.take(*tensors)
    recording.stage.close(timeout_seconds=30)
    found = recording.read()
    assert found["LOST"] >= 4
    assert found["LOST"] + found["TENSOR"] == 8
    assert recording.stage.failure is not None
    with pytest.raises(torch.AcceleratorError, match="sticky"):
        torch.accelerator.synchronize()


def test_a_tensor_beyond_the_budget_is_copied_without_a_clone(
    recording: Recording, sim: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "CLONE_BUDGET_NBYTES", 1000)
    recording.expected = [torch.arange(1000.0)]
    tensor = torch.arange(1000.0, device="sim")
    before = torch.accelerator.memory_allocated()
    sim.set_delay(kernel_us=1000, copy_us=20_000)
    with sim.watching() as waits:
        recording.take(tensor)
        assert torch.accelerator.memory_allocated() == before
        tensor.fill_(-1)
        assert waits.here == {}
    recording.stage.close(timeout_seconds=30)
    assert recording.read() == {"TENSOR": 1}


def test_clones_under_way_are_bounded(recording: Recording, sim: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "CLONE_BUDGET_NBYTES", 10 * 4096)
    recording.expected = [torch.full((1024,), float(number)) for number in range(50)]
    tensors = [one.to("sim") for one in recording.expected]
    before = torch.accelerator.memory_allocated()
    sim.set_delay(copy_us=5000)
    recording.take(*tensors)
    assert torch.accelerator.memory_allocated() - before <= 10 * 4096
    recording.stage.close(timeout_seconds=30)
    assert recording.read() == {"TENSOR": 50}


def test_a_pool_smaller_than_what_is_under_way(sim: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "POOL_NBYTES", 10_000)
    recording = Recording()
    sizes = [random.randint(1, 3000) for _ in range(200)]  # noqa: S311
    recording.expected = [torch.full((size,), float(size)) for size in (*sizes, 1)]
    tensors = [one.to("sim") for one in recording.expected]
    num_pinned = sim.counters()["pinned_allocations"]
    assert num_pinned == 1
    sim.set_delay(copy_us=100, is_random=True)
    with sim.watching() as waits:
        recording.take(*tensors)
        assert waits.here == {}
    recording.stage.close(timeout_seconds=30)
    assert recording.read() == {"TENSOR": 201}
    # A tensor larger than the pool has a block of its own.
    assert sim.counters()["pinned_allocations"] == 1 + sum(4 * size > 10_000 for size in sizes)
    recording.close()


def test_a_device_that_hangs_does_not_hold_up_the_ring(recording: Recording, sim: Accelerator) -> None:
    recording.expected = [torch.ones(5)]
    x = torch.ones(5, device="sim")
    torch.accelerator.synchronize()
    sim.set_delay(copy_us=2_000_000)
    recording.take(x)
    start = time.monotonic()
    recording.stage.close(timeout_seconds=0.2)
    assert sim.registered_nbytes() == (recording.ring.view.nbytes if "sim" in DRIVERS else 0)
    recording.ring.put(SlotKind.TRIGGER, {}, timeout_seconds=1)
    assert time.monotonic() - start < 1.5
    assert recording.read() == {"LOST": 1, "TRIGGER": 1}
    torch.accelerator.synchronize()
    sim.reset()


def test_a_graph_of_the_training_stays_valid(recording: Recording, sim: Accelerator) -> None:
    sim.set_delay(copy_us=20_000)
    recording.expected = [torch.ones(5)]
    x = torch.ones(5, device="sim")
    recording.take(x)
    sim.begin_graph()
    x.add_(1)
    assert recording.stage._driver.is_capturing(x.device)
    time.sleep(0.1)
    is_valid = sim.end_graph()
    recording.stage.close(timeout_seconds=30)
    if recording.stage._is_registered or "sim" in DRIVERS:
        assert is_valid
        assert recording.read() == {"TENSOR": 1}
    else:
        # A backend without a capture mode for each thread: the wait of the publisher invalidates the graph.
        assert sum(recording.read().values()) == 1


def test_a_refused_registration_leaves_no_error(sim: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRIVERS, "sim", SimDriver(sim))
    sim.fail_next("register")
    recording = Recording(expected=[torch.ones(5)])
    assert sim.get_last_error() == 0
    recording.take(torch.ones(5, device="sim"))
    recording.stage.close(timeout_seconds=30)
    assert recording.read() == {"TENSOR": 1}
    recording.close()


def test_one_process_with_two_devices(recording: Recording, sim: Accelerator) -> None:
    sim.set_delay(kernel_us=50, copy_us=500, is_random=True)
    recording.expected = [torch.full((100,), float(number)) for number in range(20)]
    for number in range(20):
        tensor = torch.zeros(100, device=f"sim:{number % 2}")
        tensor.add_(number)
        recording.take(tensor)
        tensor.fill_(-1)
    recording.stage.close(timeout_seconds=30)
    assert recording.read() == {"TENSOR": 20}
