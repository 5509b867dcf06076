"""What is a training without torch: something that stages tensors for a real writer process?"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ranktape.capture.rendezvous import RankPlace
from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.staging.process import WriterProcess
from ranktape.capture.staging.ring_file import Counter, SlotKind
from ranktape.capture.starting import start_writer
from ranktape.storage import Records, open_run
from ranktape.storage.format.dtypes import dtype_name
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.places.urls import open_backend

SMALL = (8, 16)
LARGE = (512, 1024)
"""Of float32: 2 MiB."""


class LightTrainer:
    """Stages iterations, with the ring and the writer process that a training has."""

    def __init__(self, url: Path | str, *, budget_nbytes: int = 16 << 20, **options: Any) -> None:
        is_planned = options.get("record_last") is None
        planned = {"min_iterations": 1, "max_iterations": 100} if is_planned else {}
        values = {**planned, "block_timeout_seconds": 60.0, **options}
        self.url = str(url)
        self.options = CaptureOptions(**values)
        self.process = WriterProcess(host_budget_nbytes=budget_nbytes)
        place = RankPlace(rank=0, world_size=1, num_local_ranks=1, restart=0)
        self.words, _ = start_writer(self.process, url=str(url), options=self.options, place=place)
        self.process.ring.is_patient = not is_planned
        self.num_staged = 0

    def stage(self, iteration: int, arrays: dict[str, np.ndarray[Any, Any]], *, ends: bool = True) -> None:
        """One iteration: tensors by the names of their modules."""
        seconds = self.options.block_timeout_seconds
        self.process.ring.set_counter(Counter.STEP, iteration)
        self.process.ring.put(SlotKind.BEGIN, {"iteration": iteration}, timeout_seconds=seconds)
        for module, array in arrays.items():
            header = json.dumps(header_of(array, iteration=iteration, module=module, counter=self.num_staged)).encode()
            slot = self.process.ring.reserve(SlotKind.TENSOR, header, array.nbytes, timeout_seconds=seconds)
            slot.payload[:] = array.tobytes()
            self.process.ring.publish(slot)
            self.num_staged += 1
        if ends:
            self.end(iteration, arrays)

    def end(self, iteration: int, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Say that an iteration was staged."""
        self.process.ring.put(
            SlotKind.END, end_of(iteration, arrays), timeout_seconds=self.options.block_timeout_seconds
        )

    def trigger(self, iteration: int, why: str = "the test said so") -> None:
        """Say that something happened, as `capture.trigger` does."""
        header = {"iteration": iteration, "kind": "user", "text": why}
        self.process.ring.put(SlotKind.TRIGGER, header, timeout_seconds=self.options.block_timeout_seconds)

    def stop_writer(self) -> None:
        """The writer takes nothing more; what it began is begun."""
        assert self.process._process is not None
        os.kill(self.process._process.pid, signal.SIGSTOP)

    def continue_writer(self) -> None:
        """The writer goes on after `stop_writer`."""
        assert self.process._process is not None
        os.kill(self.process._process.pid, signal.SIGCONT)

    def lose_writer(self) -> None:
        """End the writer, as the kernel does that needs its memory."""
        assert self.process._process is not None
        self.process._process.kill()
        self.process._process.wait()

    def kill_writer(self) -> None:
        """End the writer, and have another one take its place."""
        self.lose_writer()
        self.process.keep_alive()

    def hear(self) -> dict[str, Any]:
        """What the writer said last."""
        return self.process.ring.hear() or {}

    def close(self, *, timeout_seconds: float = 60.0) -> dict[str, Any]:
        """End the capture; the writer's last words."""
        words = self.process.finish(
            reason="the training ended", timeout_seconds=timeout_seconds, on_progress=lambda *_: None
        )
        self.process.close()
        return words


def header_of(array: np.ndarray[Any, Any], *, iteration: int, module: str, counter: int) -> dict[str, Any]:
    """What a recorder says of a tensor."""
    return {
        "module": module,
        "layer_type": "linear",
        "layer_idx": 0,
        "component": "linear",
        "operation": "forward",
        "phase": "pre",
        "tensor_name": "input",
        "quant_type": "bf16",
        "dtype": dtype_name(array.dtype),
        "shape": list(array.shape),
        "layout": "",
        "compute_dtype": "bfloat16",
        "sample_dim": None,
        "batch_size": None,
        "placement": None,
        "iteration": iteration,
        "microbatch": 0,
        "call": 0,
        "counter": counter,
        "timestamp": time.time(),
        "sample_ids": None,
        "metadata": None,
    }


def end_of(iteration: int, arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """What a recorder says of an iteration that had these tensors."""
    return {"iteration": iteration, "num_tensors": len(arrays), "expected": sorted(arrays), "silent_sites": {}}


def check_arrays(records: Records, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    """That records are of these tensors, bit for bit, and of no others."""
    assert sorted(records.column("module")) == sorted(expected)
    for record in records:
        assert record.read().tobytes() == expected[record.module].tobytes(), record


def check_whole(
    url: Path | str, expected: dict[int, dict[str, np.ndarray[Any, Any]]], *, options: dict[str, Any] | None = None
) -> None:
    """That these iterations are complete, no others, all of them bit for bit, and that a check finds no error."""
    run = open_run(url, storage_options=options)
    assert run.iterations == sorted(expected)
    for iteration, arrays in expected.items():
        check_arrays(run.select(iteration=iteration), arrays)
    report = check_run(open_backend(url, storage_options=options), deep=True)
    assert not [finding.text() for finding in report.findings if finding.is_error]


def tensors(seed: int, *, num_small: int = 8, num_large: int = 2) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors of two sizes, by module; each iteration of a test has its own."""
    generator = np.random.default_rng(seed)
    small = {f"small.{index}": generator.standard_normal(SMALL, dtype=np.float32) for index in range(num_small)}
    return small | {f"large.{index}": generator.standard_normal(LARGE, dtype=np.float32) for index in range(num_large)}


class Gate:
    """Passes connections on to a server, refuses them, or lets them hang."""

    def __init__(self, endpoint_url: str) -> None:
        parts = urlsplit(endpoint_url)
        self._server = (parts.hostname or "", parts.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_refusing = False
        self.is_hanging = False
        self._is_over = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """End every connection."""
        self._is_over = True
        self.is_hanging = False
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while not self._is_over:
            if not select.select([self._listener], [], [], 0.1)[0]:
                continue
            with contextlib.suppress(OSError):
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._pass, args=(client,))
                self._threads.append(thread)
                thread.start()

    def _pass(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._server) as server:
            while not self._is_over and not self.is_refusing:
                if self.is_hanging:
                    time.sleep(0.05)
                    continue
                for source in select.select([client, server], [], [], 0.1)[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    (server if source is client else client).sendall(data)
