"""How is a training imitated that has a real ring and a real writer, and no torch?

The trainer's process forks its writer, which runs the writer's own `main`; what one says and the other stores is what
a training would.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranktape.capture import writer
from ranktape.capture.settings.cadence import Cadence
from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.staging.process import WriterConfig
from ranktape.capture.staging.ring import RingProducer
from ranktape.capture.staging.ring_file import Counter, SlotKind
from ranktape.errors import CaptureError
from ranktape.storage.format.attempt import Launch
from ranktape.storage.format.record_info import RecordInfo
from tests.faults.truth import ITERATIONS, NUM_RANKS, tensors

RING_NBYTES = 8 << 20
TIMEOUT_SECONDS = 30.0

Fork = Callable[[Callable[[], object]], int]
"""Makes a child that does something; its process id."""

_NOT_IN_HEADERS = ("rank", "attempt", "nbytes", "overflow", "checksum", "keep")
"""What the writer finds out by itself."""


def start(
    url: str,
    storage_options: dict[str, Any],
    rank: int,
    *,
    fork: Fork,
    promise: Callable[[int, int], None],
) -> dict[str, int]:
    """The processes of one rank, by what they are.

    Args:
        url: Where to record.
        storage_options: For the writer.
        rank: Of the trainer.
        fork: Makes a child that does something.
        promise: Called once nothing but the loss of the ring can lose an iteration.
    """
    read_end, write_end = os.pipe()

    def train() -> None:
        trainer = _Trainer(url, storage_options, rank, fork=fork)
        os.write(write_end, trainer.writer_pid.to_bytes(8, "little"))
        trainer.train(promise)

    pid = fork(train)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        return {"trainer": pid, "writer": int.from_bytes(answer.read(8), "little")}


class _Trainer:
    def __init__(self, url: str, storage_options: dict[str, Any], rank: int, *, fork: Fork) -> None:
        self._rank = rank
        self._ring = RingProducer(RING_NBYTES, keep_alive=self._keep_alive)
        config = WriterConfig(
            url=url,
            rank=rank,
            trainer_pid=os.getpid(),
            launch=Launch(launch_id="launch", restart=0, world_size=NUM_RANKS),
            options=CaptureOptions(
                min_iterations=len(ITERATIONS),
                storage_options=storage_options,
                block_timeout_seconds=20.0,
                finish_timeout_seconds=1.0,
            ),
            document={"min_iterations": len(ITERATIONS)},
            environment={},
            cadence=Cadence(start=ITERATIONS.start, every=ITERATIONS.step),
            join_timeout_seconds=2.0,
        )
        self.writer_pid = fork(lambda: self._write(config))

    def train(self, promise: Callable[[int, int], None]) -> None:
        """Go through the iterations and say that it was all."""
        self._wait_for({"ready"})
        for iteration in ITERATIONS:
            self._ring.set_counter(Counter.STEP, iteration)
            self._ring.put(SlotKind.BEGIN, {"iteration": iteration}, timeout_seconds=TIMEOUT_SECONDS)
            recorded = tensors(iteration, self._rank)
            for array, info in recorded:
                header = json.dumps(_header(info)).encode()
                slot = self._ring.reserve(SlotKind.TENSOR, header, array.nbytes, timeout_seconds=TIMEOUT_SECONDS)
                slot.payload[:] = array.tobytes()
                self._ring.publish(slot)
            end = {"iteration": iteration, "num_tensors": len(recorded), "expected": [], "silent_sites": {}}
            self._ring.put(SlotKind.END, end, timeout_seconds=TIMEOUT_SECONDS)
            promise(self._rank, iteration)
        self._ring.finish({"reason": "done"})
        self._wait_for({"closed"})

    def _write(self, config: WriterConfig) -> None:
        sys.stdin = io.TextIOWrapper(io.BytesIO(pickle.dumps(config)))
        os.dup2(2, 1)  # as `WriterProcess` starts it: what it says on the console is no output of ours
        writer.main([str(self._ring.descriptor), str(self._ring.wake_read)])

    def _wait_for(self, states: set[str]) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (words := self._ring.hear() or {}).get("state") not in states:
            if words.get("state") == "failed" or not self._is_alive() or time.monotonic() > deadline:
                raise SystemExit(f"the writer of rank {self._rank} is gone: {words}")
            time.sleep(0.002)
        return words

    def _keep_alive(self) -> None:
        if not self._is_alive():
            raise CaptureError("the writer process ended")

    def _is_alive(self) -> bool:
        """A child that has ended stays a zombie until somebody waits for it, and whoever started us does."""
        return Path(f"/proc/{self.writer_pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}


def _header(info: RecordInfo) -> dict[str, Any]:
    fields = info.to_json()
    return {name: value for name, value in fields.items() if name not in _NOT_IN_HEADERS}
