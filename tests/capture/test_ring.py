"""Does everything that was published come out of the ring, in order and unchanged?"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import pytest

from ranktape.capture.staging.ring import RingConsumer, RingProducer
from ranktape.capture.staging.ring_file import Counter, SlotKind
from ranktape.errors import CaptureError


def make(capacity_nbytes: int) -> tuple[RingProducer, RingConsumer]:
    producer = RingProducer(capacity_nbytes, keep_alive=lambda: None)
    return producer, RingConsumer(os.dup(producer.descriptor))


def put(producer: RingProducer, index: int, payload: bytes) -> None:
    header = b'{"index":%d}' % index
    if index % 2:
        producer.put_copy(SlotKind.TENSOR, header, payload, len(payload), timeout_seconds=10)
        return
    slot = producer.reserve(SlotKind.TENSOR, header, len(payload), timeout_seconds=10)
    slot.payload[:] = payload
    producer.publish(slot)


def test_many_sizes_wrap_around_a_small_ring() -> None:
    producer, consumer = make(64 * 64)
    sizes = [0, 1, 63, 64, 65, 500, 2000, 3900, 128, 3000, 64] * 50
    payloads = [os.urandom(size) for size in sizes]

    def produce() -> None:
        for index, payload in enumerate(payloads):
            put(producer, index, payload)

    thread = threading.Thread(target=produce)
    thread.start()
    for index, payload in enumerate(payloads):
        while (slot := consumer.take()) is None:
            time.sleep(0)
        assert slot.header == {"index": index}
        assert bytes(slot.payload) == payload
        consumer.free(slot)
    thread.join()
    assert producer.pending_nbytes == 0


def test_slots_are_freed_in_order_whatever_the_order_of_storing() -> None:
    producer, consumer = make(1 << 16)
    for index in range(3):
        put(producer, index, bytes(100))
    slots = [consumer.take() for _ in range(3)]
    before = producer.pending_nbytes
    consumer.free(slots[2])  # type: ignore[arg-type]
    consumer.free(slots[1])  # type: ignore[arg-type]
    assert producer.pending_nbytes == before
    consumer.free(slots[0])  # type: ignore[arg-type]
    assert producer.pending_nbytes == 0


def test_a_slot_is_published_only_after_those_before_it() -> None:
    producer, consumer = make(1 << 16)
    first = producer.reserve(SlotKind.TENSOR, b"{}", 8, timeout_seconds=1)
    second = producer.reserve(SlotKind.TENSOR, b"{}", 8, timeout_seconds=1)
    producer.publish(second)
    producer.put_copy(SlotKind.TENSOR, b"{}", b"third", 5, timeout_seconds=1)
    assert consumer.take() is None
    producer.publish(first)
    taken = [consumer.take() for _ in range(4)]
    assert [bytes(slot.payload) for slot in taken if slot is not None] == [bytes(8), bytes(8), b"third"]


def test_the_end_of_an_iteration_is_remembered_until_it_is_settled() -> None:
    producer, consumer = make(1 << 16)
    for iteration in range(3):
        producer.put(SlotKind.END, {"iteration": iteration}, timeout_seconds=1)
    assert [header["iteration"] for *_, header in producer.unsettled()] == [0, 1, 2]
    consumer.advance(Counter.SETTLED)
    assert [header["iteration"] for *_, header in producer.unsettled()] == [1, 2]
    producer.put(SlotKind.SKIP, {"iteration": 3}, timeout_seconds=1)
    assert [header["iteration"] for *_, header in producer.unsettled()] == [1, 2, 3]


def test_too_large_for_ever_is_refused_at_once() -> None:
    producer, _ = make(1 << 12)
    with pytest.raises(CaptureError, match="raise --host-budget-nbytes"):
        producer.reserve(SlotKind.TENSOR, b"{}", 1 << 13, timeout_seconds=10)


def test_waiting_for_room_is_bounded() -> None:
    producer, _ = make(1 << 12)
    put(producer, 0, bytes(3000))
    with pytest.raises(CaptureError, match=r"--block-timeout-seconds 0\.05"):
        producer.reserve(SlotKind.TENSOR, b"{}", 3000, timeout_seconds=0.05)


def test_a_long_wait_is_told_once_and_the_writer_knows_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranktape.capture.staging.ring.LONG_WAIT_SECONDS", 0.02)
    producer, consumer = make(1 << 12)
    told: list[int] = []
    producer.on_long_wait = lambda: told.append(consumer.counter(Counter.WAITING))
    put(producer, 0, bytes(3000))
    with pytest.raises(CaptureError):
        producer.reserve(SlotKind.TENSOR, b"{}", 3000, timeout_seconds=0.2)
    assert told == [1]
    assert not consumer.counter(Counter.WAITING)


@pytest.mark.parametrize("place", [0, 4, 8, 16])
def test_damage_is_named(place: int) -> None:
    producer, consumer = make(1 << 16)
    put(producer, 0, b"abc")
    slots = producer.slots(0, 64)
    slots[place : place + 4] = b"\xff\xff\xff\x7f"
    with pytest.raises(CaptureError, match="the ring is damaged at byte 0"):
        consumer.take()


def test_waiting_ends_when_the_writer_is_gone() -> None:
    def gone() -> None:
        raise CaptureError("the writer process ended")

    producer = RingProducer(1 << 12, keep_alive=gone)
    put(producer, 0, bytes(3000))
    with pytest.raises(CaptureError, match="the writer process ended"):
        producer.reserve(SlotKind.TENSOR, b"{}", 3000, timeout_seconds=10)


def test_words_pass_in_both_directions() -> None:
    producer, consumer = make(1 << 12)
    assert producer.hear() is None
    consumer.say({"state": "ready", "attempt": 3})
    assert producer.hear() == {"state": "ready", "attempt": 3}
    consumer.say({"state": "failed", "error": "x" * 2_000_000})
    assert producer.hear() == {"state": "failed", "cut": True}
    assert not consumer.counter(Counter.FINISHED)
    producer.finish({"reason": "done"})
    assert consumer.counter(Counter.FINISHED)
    assert consumer.hear() == {"reason": "done"}


def test_waking_never_blocks() -> None:
    producer, consumer = make(1 << 22)
    for index in range(70_000 // 100):
        for _ in range(100):
            producer.set_counter(Counter.ASLEEP, 1)
            producer._wake()
        put(producer, index, b"")
    assert consumer.take() is not None


def end(producer: RingProducer) -> None:
    producer.put(SlotKind.END, {"iteration": 0}, timeout_seconds=1)


def fill(producer: RingProducer) -> None:
    put(producer, 2, bytes(1 << 15))


@pytest.mark.parametrize("wake", [end, fill])
def test_a_sleeping_consumer_is_woken_by_an_end_or_a_filling_ring_and_a_busy_one_is_left_alone(
    wake: Callable[[RingProducer], None],
) -> None:
    producer, consumer = make(1 << 16)
    put(producer, 0, b"x")
    began = time.monotonic()
    consumer.sleep(producer.wake_read, seconds=60)  # a slot is waiting: no sleep
    consumer.free(consumer.take())  # type: ignore[arg-type]
    timers = [threading.Timer(0.1, put, [producer, 1, b"x"]), threading.Timer(0.3, wake, [producer])]
    for timer in timers:
        timer.start()
    consumer.sleep(producer.wake_read, seconds=60)
    for timer in timers:
        timer.join()
    assert [consumer.take() is not None for _ in range(3)] == [True, True, False]
    assert time.monotonic() - began < 30
    assert os.read(producer.wake_read, 100) == b"\0"


def test_a_consumer_that_waits_for_ends_takes_what_has_ended_or_what_nothing_follows() -> None:
    producer, consumer = make(1 << 16)
    consumer.waits_for_ends = True

    def is_due() -> bool:
        return consumer.is_due

    put(producer, 0, b"x")
    assert not is_due()
    end(producer)
    assert is_due()
    assert [consumer.take() is not None for _ in range(2)] == [True, True]
    put(producer, 1, b"x")
    assert not is_due()
    consumer.sleep(producer.wake_read, seconds=0)  # the end has woken it
    assert is_due()
    put(producer, 2, bytes(1 << 15))
    assert is_due()


@pytest.mark.parametrize("payload_nbytes", [1, 64, 100, 20_000])
@pytest.mark.parametrize("reason", [None, 'it "failed" \\ for a reason', "x" * 1000])
def test_a_lost_slot_tells_what_it_was_and_why(payload_nbytes: int, reason: str | None) -> None:
    producer, consumer = make(1 << 16)
    put(producer, 0, b"before")
    slot = producer.reserve(SlotKind.TENSOR, b'{"index":1}', payload_nbytes, timeout_seconds=1)
    put(producer, 2, b"after")
    producer.lose(slot, reason)
    found = []
    while (read := consumer.take()) is not None:
        found.append((read.kind, read.header["index"], read.header.get("lost", "")))
        consumer.free(read)
    assert [(kind, index) for kind, index, _ in found] == [
        (SlotKind.TENSOR, 0),
        (SlotKind.LOST, 1),
        (SlotKind.TENSOR, 2),
    ]
    shown = "" if reason is None else reason.replace('"', "'").replace("\\", "/")
    assert shown.startswith(found[1][2])
    assert len(found[1][2]) >= min(len(shown), 26)
    assert producer.pending_nbytes == 0


@pytest.mark.parametrize("nbytes", [100, 4 << 20])
def test_an_interrupt_during_a_copy_holds_up_nothing(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = make(64 << 20)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt  # as Python's handler of SIGINT does once a long copy is over

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "memmove", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.put_copy(SlotKind.TENSOR, b"{}", bytes(nbytes), nbytes, timeout_seconds=1)
    producer.put(SlotKind.TRIGGER, {"iteration": 3}, timeout_seconds=1)
    taken = iter(consumer.take, None)
    assert [slot.header for slot in taken if slot.kind is not SlotKind.GAP] == [{"iteration": 3}]
