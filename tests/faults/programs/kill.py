"""Kills recording processes at random moments, again and again, and prints what is wrong afterwards.

kill.py {storage,ring} URL --trials N --seed N [--storage-options JSON]

storage: ranks that write straight into the store; ring: trainers with their writers. A line of JSON for each trial.
Every process is forked from this one, which holds no thread and no connection: a trial costs what it does, not what it
imports.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranktape.analyze.numerics.histograms.moments import warm_up
from ranktape.capture import writer
from ranktape.capture.settings.cadence import Cadence
from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.staging.process import WriterConfig
from ranktape.capture.staging.ring import RingProducer
from ranktape.capture.staging.ring_file import Counter, SlotKind
from ranktape.errors import CaptureError, RanktapeError
from ranktape.storage.format.attempt import Launch
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.progress import open_iteration, read_progress, write_verdict
from ranktape.storage.format.record_info import RecordInfo
from ranktape.storage.places.urls import open_backend
from ranktape.storage.recording.start import begin_attempt, join_attempt
from ranktape.storage.recording.writer import RankWriter
from tests.faults.judge import problems
from tests.faults.truth import ITERATIONS, NUM_RANKS, tensors

PATIENCE_SECONDS = 60.0
"""After which a process that should have ended hangs."""

_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a trial records, and what it promises there."""

    url: str
    storage_options: dict[str, Any]
    folder: Path
    """On this machine, for what is promised."""

    @property
    def ledger(self) -> Path:
        """A line for each rank and iteration that must survive from then on."""
        return self.folder / "ledger"

    def promise(self, rank: int, iteration: int) -> None:
        with self.ledger.open("a") as ledger:
            ledger.write(f"{rank} {iteration}\n")

    def promised(self) -> set[tuple[int, int]]:
        lines = self.ledger.read_text().splitlines() if self.ledger.exists() else []
        return {(int(rank), int(iteration)) for rank, iteration in (line.split() for line in lines)}


def record(place: Place, rank: int) -> None:
    """One rank, straight into the store."""
    backend = open_backend(place.url, storage_options=place.storage_options)
    launch = Launch(launch_id="launch", restart=0, world_size=NUM_RANKS)
    options = {"min_iterations": len(ITERATIONS)}
    if rank == 0:
        attempt = begin_attempt(backend, launch=launch, options=options, environment={}, resume=False, overwrite=False)
    else:
        attempt = join_attempt(backend, launch=launch, timeout_seconds=2)
    writer = RankWriter(backend, attempt=attempt, rank=rank, environment={})
    for iteration in ITERATIONS:
        if rank == 0:
            open_iteration(backend, attempt=attempt, iteration=iteration)
        for array, info in tensors(iteration, rank):
            writer.write(array, info=info)
        writer.commit(iteration, expected=[], silent_sites={})
        place.promise(rank, iteration)
        if rank == 0:
            for ready in read_progress(backend, attempt).ready():
                finish_iteration(backend, attempt=attempt, iteration=ready)
    writer.close(reason="done")
    if rank == 0:
        write_verdict(backend, attempt=attempt, problems={})


def trial(level: str, place: Place, *, delay: float | None, draw: random.Random) -> dict[str, Any]:
    """Record, kill after a while (or not at all), wait for those that live, and judge."""
    started = time.monotonic()
    groups: list[dict[str, int]] = []
    for rank in range(NUM_RANKS):
        if level == "storage":
            groups.append({"rank": fork(lambda rank=rank: record(place, rank))})  # type: ignore[misc]
        else:
            groups.append(start(place.url, place.storage_options, rank, fork=fork, promise=place.promise))
    killed: list[str] = []
    if delay is not None:
        time.sleep(delay)
        living = [(rank, name) for rank, group in enumerate(groups) for name in group]
        # Mostly one; sometimes everything at once, as when a node dies.
        for rank, name in draw.sample(living, draw.choice([1, 1, 1, 2, len(living)])):
            killed.append(f"{name} of rank {rank}")
            os.kill(groups[rank][name], signal.SIGKILL)
    hung = wait([pid for group in groups for pid in group.values()])
    seconds = time.monotonic() - started
    promised = place.promised()
    if level == "ring":
        # What lay in a ring went with its writer.
        promised = {(rank, iteration) for rank, iteration in promised if f"writer of rank {rank}" not in killed}

    def judge() -> list[str]:
        return problems(place.url, promised=promised, storage_options=place.storage_options)

    found = in_child(judge)
    return {
        "url": place.url,
        "killed": killed,
        "delay": delay,
        "seconds": seconds,
        "promised": len(promised),
        "problems": [*found, *(f"process {pid} hung" for pid in hung)],
    }


def fork(work: Callable[[], object]) -> int:
    """A child that does it; mistakes that we report are no surprise in a process whose peers are killed."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except (RanktapeError, SystemExit) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    except BaseException:  # noqa: BLE001  # nothing may return into the copy of the parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def in_child(work: Callable[[], list[str]]) -> list[str]:
    """What it returns, worked out by a child: this process must stay without threads."""
    read_end, write_end = os.pipe()

    def report() -> None:
        with os.fdopen(write_end, "w") as out:
            try:
                json.dump(work(), out)
            except Exception:  # noqa: BLE001  # a judge that fails is a finding
                json.dump([traceback.format_exc()], out)

    pid = fork(report)
    os.close(write_end)
    with os.fdopen(read_end) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return list(json.loads(text or '["the judge died"]'))


def wait(pids: list[int]) -> list[int]:
    """Wait for all of them; those that had to be ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    hung = []
    for pid in pids:
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                hung.append(pid)
                break
            time.sleep(0.002)
    return hung


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("level", choices=["storage", "ring"])
    parser.add_argument("url")
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--storage-options", type=json.loads, default={})
    args = parser.parse_args()
    # Children of a killed process become ours: they are waited for like our own.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warm_up()
    for iteration in ITERATIONS:
        for rank in range(NUM_RANKS):
            tensors(iteration, rank)  # every child has them from then on
    draw = random.Random(args.seed)  # noqa: S311  # moments, no secrets; drawn alike in each run
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = 0.0
        for number in range(-1, args.trials):
            place = Place(
                url=f"{args.url}/{args.seed}-{number}",
                storage_options=args.storage_options,
                folder=Path(folder) / str(number),
            )
            place.folder.mkdir(parents=True)
            delay = None if number < 0 else draw.uniform(0.0, undisturbed)
            outcome = trial(args.level, place, delay=delay, draw=draw)
            # The machine may be busier than it was, or idler: a kill that found nothing to disturb came too late.
            is_late = outcome["promised"] == NUM_RANKS * len(ITERATIONS)
            undisturbed = undisturbed * (0.8 if is_late else 1.05) or outcome["seconds"]
            sys.stdout.write(f"{json.dumps(outcome)}\n")
            sys.stdout.flush()


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


if __name__ == "__main__":
    main()
