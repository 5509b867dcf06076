"""Which microbatch is it where a framework says so, or where several threads run models?"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from ranktape.capture.passes.passes import Call, Frame
from ranktape.capture.passes.tracker import Tracker
from ranktape.storage.format.record_info import Mode


class Layer(nn.Module):
    """A layer that Megatron-core's schedules would tell the microbatch."""

    current_microbatch: int

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def call_in(tracker: Tracker, model: nn.Module, *, size: int = 2) -> Call:
    """The call of a layer in a pass of the model."""
    tracker.enter(Frame(module=model, path="", layer_idx=-1), (), {"hidden": torch.zeros(size, 3)})
    call = tracker.begin_call("layer", dtype=torch.float32, device_type="cpu")
    tracker.leave(model, torch.zeros(size, 3))
    return call


def place(call: Call) -> tuple[int, int, int | None]:
    return call.microbatch, call.index, call.batch_size


@pytest.fixture
def tracker() -> Tracker:
    """Of an iteration that has just begun."""
    tracker = Tracker(modes=("train", "eval"))
    tracker.reset(3)
    return tracker


def test_the_microbatch_that_a_schedule_writes_onto_the_layers_is_taken(tracker: Tracker) -> None:
    layer = Layer()
    model = nn.Sequential(layer)
    found = []
    # As in one forward, one backward: a backward pass between two forwards says nothing of their microbatches.
    for microbatch in (0, 1, 2, 3):
        layer.current_microbatch = microbatch
        found.append(place(call_in(tracker, model)))
        if microbatch % 2:
            tracker.note_backward()
    assert found == [(microbatch, 0, 2) for microbatch in range(4)]


def test_the_stage_of_a_pipeline_and_the_share_of_its_samples_are_taken(tracker: Tracker) -> None:
    tracker.sample_ids = tuple(range(10))
    model, loss = Layer(), Layer()
    for microbatch in (2, 0, 1):
        with tracker.staged(microbatch, of=3):
            call = call_in(tracker, model)
        assert (call.microbatch, call.index) == (microbatch, 0)
        # Whole batches are split as torch.tensor_split does.
        assert call.sample_ids == tuple(torch.arange(10).tensor_split(3)[microbatch].tolist())
        tracker.note_backward()
        # The loss is a module, too: it belongs to the pass that ran last.
        assert call_in(tracker, loss).microbatch == microbatch


def test_a_long_validation_in_a_training_is_no_training_without_an_end(tracker: Tracker) -> None:
    model = Layer()
    for _ in range(3):
        call_in(tracker, model)
    assert tracker.num_unended == 3
    tracker.reset(4)
    model.eval()
    for _ in range(5):
        call_in(tracker, model)
    assert (tracker.num_unended, tracker.num_passes) == (0, 5)


def test_a_rehearsal_is_no_pass(tracker: Tracker) -> None:
    model = Layer()
    with tracker.rehearsing():
        tracker.enter(Frame(module=model, path="", layer_idx=-1), (torch.zeros(2, 3),), {})
        assert not tracker.is_active
        tracker.leave(model, torch.zeros(2, 3))
    assert tracker.num_passes == 0
    assert place(call_in(tracker, model)) == (0, 0, 2)


def test_a_validation_on_another_thread_changes_nothing_for_the_training(tracker: Tracker) -> None:
    model, other = Layer(), Layer().eval()
    found: list[Call] = []
    tracker.enter(Frame(module=model, path="", layer_idx=-1), (torch.zeros(2, 3),), {})
    thread = threading.Thread(target=lambda: found.append(call_in(tracker, other, size=7)))
    thread.start()
    thread.join()
    call = tracker.begin_call("layer", dtype=torch.float32, device_type="cpu")
    assert (place(call), call.mode) == ((0, 0, 2), Mode.TRAIN)
    assert (place(found[0]), found[0].mode) == ((0, 0, 7), Mode.EVAL)


def test_what_is_recorded_by_hand_after_a_validation_belongs_to_the_training(tracker: Tracker) -> None:
    model = Layer()
    call_in(tracker, model)
    tracker.note_backward()
    call_in(tracker, model)
    model.eval()
    with torch.no_grad():
        call_in(tracker, model, size=5)
        by_hand = tracker.free_call(index=0, dtype=torch.float32, device_type="cpu")
        assert (place(by_hand), by_hand.mode) == ((0, 0, 5), Mode.EVAL)
    by_hand = tracker.free_call(index=0, dtype=torch.float32, device_type="cpu")
    assert (place(by_hand), by_hand.mode) == ((1, 0, 2), Mode.TRAIN)
