"""How long does the training thread spend on a captured tensor, beside a plain copy into warm memory?

Processor time of the calling thread, in turn, one tensor after the other. The bar is 1.5 for tensors of
1 MB and more.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from ranktape.capture.passes.tracker import Call, Tracker
from ranktape.capture.recorder import Recorder
from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.settings.selecting import Selecting
from ranktape.capture.source import Source, TensorRole
from ranktape.capture.staging.ring import RingConsumer, RingProducer
from ranktape.storage.format.record_info import Operation

NUM_TENSORS = 300
RING_NBYTES = 512 << 20
SHAPES = ((32, 32), (4, 128, 192), (4, 128, 768), (8, 512, 1024))
BAR = 1.5

SOURCE = Source(module="layers.0.query", layer_type="linear", layer_idx=0, component="linear")
ROLE = TensorRole(operation=Operation.FORWARD, phase="pre", tensor_name="input")


def thread_seconds(work: Callable[[], object]) -> float:
    """Processor time that this thread takes for it."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def main() -> None:
    """Record and copy the same tensor in turn; print the medians and their ratio."""
    torch.set_num_threads(1)
    ring = RingProducer(RING_NBYTES, keep_alive=lambda: None)
    consumer = RingConsumer(os.dup(ring.descriptor))
    options = CaptureOptions()
    selecting = Selecting(options, rank=0)
    recorder = Recorder(ring=ring, tracker=Tracker(), options=options, selecting=selecting, on_failure=print)
    warm = torch.zeros(RING_NBYTES // 4)
    for shape in SHAPES:
        tensor = torch.randn(shape)
        recorder.begin(0, is_staged=True)
        records, copies = [], []
        offset = 0
        for number in range(NUM_TENSORS):
            call = Call(iteration=0, microbatch=0, index=number, compute_dtype="float32", batch_size=shape[0])
            records.append(thread_seconds(partial(recorder.record, SOURCE, ROLE, tensor, call=call)))
            while (slot := consumer.take()) is not None:
                consumer.free(slot)
            offset = offset + tensor.numel() if offset + 2 * tensor.numel() < warm.numel() else 0
            copies.append(thread_seconds(partial(warm[offset : offset + tensor.numel()].view(shape).copy_, tensor)))
        record, copy = (statistics.median(times[NUM_TENSORS // 10 :]) for times in (records, copies))
        print(f"{tensor.nbytes / 1e6:8.3f} MB: recorded {record * 1e6:7.1f} us, copied {copy * 1e6:7.1f} us,", end=" ")
        print(f"ratio {record / copy:.2f}")
    print(f"bar: {BAR} for 1 MB and more")


if __name__ == "__main__":
    main()
