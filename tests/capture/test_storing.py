"""Does what is staged survive a store that is away for a while, and is everything that does not named?

The store is a directory that refuses while the test says so; the rest is what a writer process has.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranktape.analyze.numerics.histograms.histogram import count_values
from ranktape.analyze.numerics.histograms.moments import statistics_of
from ranktape.capture.settings.cadence import Cadence
from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.staging.process import WriterConfig
from ranktape.capture.staging.ring import RingConsumer, RingProducer
from ranktape.capture.staging.ring_file import Counter, SlotKind
from ranktape.capture.writing import storing
from ranktape.capture.writing.committing import Committer
from ranktape.capture.writing.storing import Staged, Storer
from ranktape.errors import AccessDeniedError, NoSpaceError, StorageError, UnreachableError
from ranktape.storage import IterationState, Records, open_run
from ranktape.storage.format.attempt import Attempt, Launch
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.places.backend import Buffer
from ranktape.storage.places.local import LocalBackend
from ranktape.storage.places.urls import RetryingBackend
from ranktape.storage.recording.start import begin_attempt
from tests.capture.light import check_arrays, end_of, header_of, tensors
from tests.waiting import until


class Moody(LocalBackend):
    """A directory that takes nothing while it has an error to give."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.error: type[StorageError] | None = None
        self.slowness_seconds = 0.0

    def put(self, key: str, parts: Iterable[Buffer]) -> None:
        self._refuse()
        time.sleep(self.slowness_seconds)
        super().put(key, parts)

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        self._refuse()
        return super().get(key, max_nbytes=max_nbytes)

    def _refuse(self) -> None:
        if self.error is not None:
            raise self.error("the store is in a bad mood")


class Bench:
    """A rank's share of a run, with the threads of a writer process and a ring that the test fills."""

    def __init__(
        self,
        path: Path,
        *,
        block_timeout_seconds: float = 30.0,
        spill_dir: Path | None = None,
        budget_nbytes: int = 64 << 20,
    ) -> None:
        self.url = path / "run"
        self.store = Moody(str(self.url))
        backend = RetryingBackend(self.store, timeout_seconds=0.5)
        self.attempt: Attempt = begin_attempt(
            backend,
            launch=Launch(launch_id="launch", restart=0, world_size=1),
            options={"min_iterations": 1},
            environment={},
            resume=False,
            overwrite=False,
        )
        self.producer = RingProducer(budget_nbytes, keep_alive=lambda: None)
        self.ring = RingConsumer(os.dup(self.producer.descriptor))
        self.storer = Storer(
            WriterConfig(
                url=str(self.url),
                rank=0,
                trainer_pid=os.getpid(),
                launch=self.attempt.launch,
                options=CaptureOptions(
                    block_timeout_seconds=block_timeout_seconds,
                    spill_dir=None if spill_dir is None else str(spill_dir),
                ),
                document={},
                environment={},
                cadence=Cadence(start=0, every=1),
            ),
            backend=backend,
            attempt=self.attempt,
            ring=self.ring,
        )
        self.words: dict[str, Any] = {}
        self.committer = Committer(self.storer, report=self._say, on_settled=lambda _: None)
        self._staged: dict[int, Staged] = {}

    def stage(
        self,
        iteration: int,
        arrays: dict[str, np.ndarray[Any, Any]],
        *,
        said: dict[str, dict[str, Any]] | None = None,
    ) -> Staged:
        """Stage the tensors of an iteration, and have the threads store them; `said` are further fields of headers."""
        staged = self.storer.begin(iteration)
        for counter, (module, array) in enumerate(arrays.items()):
            fields = header_of(array, iteration=iteration, module=module, counter=counter)
            header = json.dumps(fields | (said or {}).get(module, {})).encode()
            slot = self.producer.reserve(SlotKind.TENSOR, header, array.nbytes, timeout_seconds=60)
            slot.payload[:] = array.tobytes()
            self.producer.publish(slot)
            taken = self.ring.take()
            assert taken is not None
            self.storer.submit(taken, staged)
        return staged

    def put(
        self,
        iteration: int,
        arrays: dict[str, np.ndarray[Any, Any]],
        *,
        said: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Stage an iteration to its end, and have the threads store and commit it."""
        staged = self.stage(iteration, arrays, said=said)
        self.producer.put(SlotKind.END, end_of(iteration, arrays), timeout_seconds=60)
        taken = self.ring.take()
        assert taken is not None
        self.committer.commit(staged, taken)

    def close(self) -> None:
        """Wait for everything, and end the rank."""
        self.committer.close()
        self.storer.shutdown()
        if self.store.error is None:
            self.storer.rank_writer.close(reason="done")
        assert self.producer.pending_nbytes == 0, "a slot was never freed"

    def stop(self) -> None:
        """End the threads, whatever they still have to do."""
        self.store.error = None
        self.storer.give_up_at = 0.0
        self.committer.stop()
        self.storer.shutdown()

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Until something holds."""
        until(holds, said=lambda: self.words)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While the training waits for room."""
        self.producer.set_counter(Counter.WAITING, 1)
        yield
        self.producer.set_counter(Counter.WAITING, 0)

    def records(self, iteration: int) -> Records:
        """What is committed of an iteration; its commit is made first."""
        from ranktape.storage.format.commit import finish_iteration

        finish_iteration(self.store, attempt=self.attempt, iteration=iteration)
        return open_run(self.url).select(iteration=iteration)

    def check(self, iteration: int, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """That an iteration has every value."""
        check_arrays(self.records(iteration), arrays)

    def _say(self, **changes: Any) -> None:
        self.words |= changes


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Makes a bench, whose threads end with the test, however that ends."""
    benches: list[Bench] = []

    def one(**options: Any) -> Bench:
        benches.append(Bench(tmp_path, **options))
        return benches[-1]

    yield one
    for bench in benches:
        bench.stop()


def after(seconds: float, work: Callable[[], None]) -> threading.Timer:
    """Do something later."""
    timer = threading.Timer(seconds, work)
    timer.start()
    return timer


def test_an_outage_that_ends_in_time_loses_nothing(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.store.error = UnreachableError
    bench.put(0, tensors(0))
    bench.put(1, tensors(1))

    def mend() -> None:
        bench.store.error = None

    after(1.0, mend)
    bench.close()
    assert bench.words == {"num_committed": 2}
    for iteration in (0, 1):
        bench.check(iteration, tensors(iteration))


@pytest.mark.parametrize("error", [UnreachableError, NoSpaceError, AccessDeniedError])
def test_what_lasts_fails_its_iteration_by_name_and_no_other(
    make: Callable[..., Bench], error: type[StorageError]
) -> None:
    bench = make(block_timeout_seconds=0.5)
    bench.put(0, tensors(0))
    bench.wait_for(lambda: bench.committer.num_committed == 1)
    bench.store.error = error
    began = time.monotonic()
    bench.put(1, tensors(1, num_small=40, num_large=8))
    bench.wait_for(lambda: bench.ring.counter(Counter.SETTLED) == 2)
    assert time.monotonic() - began < 20, "half a second was given, and is 30 s where nothing is"
    assert bench.producer.pending_nbytes == 0
    bench.wait_for(lambda: bool(bench.committer._pending_marks))
    bench.store.error = None
    bench.put(2, tensors(2))
    bench.close()
    bench.wait_for(lambda: not bench.committer._pending_marks)
    for iteration in (0, 2):
        bench.check(iteration, tensors(iteration))
    statuses = {status.iteration: status for status in open_run(bench.url).status()}
    assert statuses[1].state is IterationState.PARTIAL
    assert "the store is in a bad mood" in statuses[1].missing[0]
    assert ("--spill-dir" in statuses[1].missing[0]) is (error is NoSpaceError)
    leftovers = list((bench.url / bench.attempt.path / "rank_00000").glob("iter_00000001/**/*.json"))
    assert error is not NoSpaceError or not leftovers, "what failed for lack of space still takes it"


@pytest.mark.parametrize("fields", [{"dtype": "float99"}, {"shape": [7]}, {"rank": -1}], ids=str)
def test_a_tensor_that_cannot_be_stored_gives_its_slot_back_and_fails_its_iteration(
    make: Callable[..., Bench], fields: dict[str, Any]
) -> None:
    bench = make()
    array = np.ones(9000, np.float32)
    bench.put(0, {"whole": array, "wrong": array}, said={"wrong": fields})
    bench.put(1, {"whole": array})
    bench.close()
    bench.check(1, {"whole": array})
    assert [bool(status.missing) for status in open_run(bench.url).status()] == [True, False]


def test_an_iteration_that_fails_gives_back_what_it_had_stored(make: Callable[..., Bench]) -> None:
    bench = make()
    staged = bench.stage(0, {f"layer.{number}": np.ones(100, np.float32) for number in range(5)})
    for future in staged.futures:
        future.result()
    assert bench.storer.rank_writer.waiting_nbytes == 2000
    bench.storer.fail(staged, "the training was cut off")
    assert bench.storer.rank_writer.waiting_nbytes == 0
    assert bench.producer.pending_nbytes == 0


def test_a_commit_whose_marker_was_refused_counts_all_the_same(make: Callable[..., Bench]) -> None:
    bench = make(block_timeout_seconds=0.3)
    put = bench.store.put

    def refuse_markers(key: str, parts: Iterable[Buffer]) -> None:
        if ".committed" in key and bench.store.error is not None:
            raise bench.store.error("no marker now")
        put(key, parts)

    bench.store.put = refuse_markers  # type: ignore[method-assign]
    bench.store._refuse = lambda: None  # type: ignore[method-assign]
    bench.store.error = UnreachableError
    bench.put(0, tensors(0))
    bench.wait_for(lambda: bool(bench.committer._pending_marks))
    bench.store.error = None
    bench.close()
    bench.check(0, tensors(0))


ASKED = {
    "bf16": ("bfloat16", {"keep": "histogram"}, "histogram"),
    "wide": ("float32", {"keep": "histogram"}, "histogram"),
    "fp32": ("float32", {"keep": "histogram", "compute_dtype": "float32"}, "values"),
    "codes": ("uint8", {"keep": "histogram", "compute_dtype": "uint8"}, "values"),
    "sums": ("float32", {"keep": "statistics"}, "statistics"),
    "eval": ("bfloat16", {"keep": "values", "mode": "eval"}, "values"),
    "plain": ("bfloat16", {}, "values"),
}
"""By module: the dtype of a tensor, what its header says, and what is kept of it then."""


@pytest.mark.parametrize("count", [0, 300, 700_000])
def test_what_a_header_asks_for_is_kept_at_once(make: Callable[..., Bench], count: int) -> None:
    bench = make()
    values = np.random.default_rng(0).standard_normal(count)
    arrays = {name: values.astype(numpy_dtype(dtype)) for name, (dtype, _, _) in ASKED.items()}
    bench.put(0, arrays, said={name: said for name, (_, said, _) in ASKED.items()})
    bench.close()
    assert "notice" not in bench.words
    records = {record.module: record for record in bench.records(0)}
    assert {name: record.keep for name, record in records.items()} == {name: kept for name, (*_, kept) in ASKED.items()}
    assert {record.mode for name, record in records.items() if name != "eval"} == {"train"}
    assert records["eval"].mode == "eval"
    for name, record in records.items():
        assert (record.dtype, record.shape) == (arrays[name].dtype.name, arrays[name].shape)
        if record.keep == "values":
            assert record.read().tobytes() == arrays[name].tobytes()
    halves = values.astype(numpy_dtype("bfloat16"))
    assert np.array_equal(records["bf16"].histogram()[:65536], count_values(halves).counts)
    assert np.array_equal(records["wide"].histogram()[:65536], count_values(arrays["wide"].astype(halves.dtype)).counts)
    assert records["sums"].statistics() == statistics_of(arrays["sums"])


def test_a_tensor_is_kept_in_both_passes(make: Callable[..., Bench]) -> None:
    bench = make()
    array = np.arange(4, dtype=np.float32)
    said = {"b": {"module": "a", "mode": "eval"}}
    bench.put(0, {"a": array, "b": array + 1}, said=said)
    bench.close()
    records = bench.records(0)
    assert records.column("mode").tolist() == ["train", "eval"]
    assert records.select(mode="eval")[0].read().tolist() == [1, 2, 3, 4]
    assert records.where("mode == 'train'")[0].read().tolist() == [0, 1, 2, 3]
    assert [key for key, _ in records.group_by(["mode"])] == [{"mode": "eval"}, {"mode": "train"}]


def test_what_stands_for_tensors_fails_as_they_do_in_an_outage(make: Callable[..., Bench]) -> None:
    bench = make(block_timeout_seconds=1.0)
    bench.store.error = UnreachableError
    arrays = {f"layer.{number}": np.ones(9000, np.float32) for number in range(40)}
    bench.put(0, arrays, said={name: {"keep": "statistics"} for name in arrays})
    bench.wait_for(lambda: bench.ring.counter(Counter.SETTLED) == 1)
    assert bench.ring.pending_nbytes == 0
    bench.store.error = None
    bench.put(1, arrays, said={name: {"keep": "statistics"} for name in arrays})
    bench.close()
    assert len(bench.records(1)) == 40
    statuses = {status.iteration: status for status in open_run(bench.url).status()}
    assert statuses[0].missing


def test_what_finds_no_memory_ends_with_its_iteration(
    make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "MAX_WAITING_NBYTES", 0)
    bench = make()
    arrays = {"a": np.ones(9000, np.float32)}
    staged = bench.stage(0, arrays, said={"a": {"keep": "statistics"}})
    staged.refuse("the test refuses it")
    bench.producer.put(SlotKind.END, end_of(0, arrays), timeout_seconds=60)
    taken = bench.ring.take()
    assert taken is not None
    bench.committer.commit(staged, taken)
    bench.wait_for(lambda: bench.ring.counter(Counter.SETTLED) == 1)
    assert bench.ring.pending_nbytes == 0


def test_small_tensors_do_not_keep_the_ring(make: Callable[..., Bench]) -> None:
    bench = make(budget_nbytes=1 << 20)
    array = np.ones(1000, dtype=np.float32)
    is_over = threading.Event()

    def relieve() -> None:
        while not is_over.wait(0.01):
            bench.storer.relieve()

    thread = threading.Thread(target=relieve)
    thread.start()
    try:
        bench.put(0, {f"m{index}": array for index in range(600)})
    finally:
        is_over.set()
        thread.join()
    bench.close()
    assert len(bench.records(0)) == 600
    # How many there are depends on who is faster; an object for each tensor would be 600.
    assert 1 <= len(list(bench.url.rglob("stack_*"))) < 100


def test_tensors_that_never_came_out_of_the_ring_fail_the_iteration(make: Callable[..., Bench]) -> None:
    bench = make()
    staged = bench.storer.begin(0)
    bench.producer.put(SlotKind.END, end_of(0, tensors(0, num_small=0)), timeout_seconds=1)
    taken = bench.ring.take()
    assert taken is not None
    bench.committer.commit(staged, taken)
    bench.close()
    assert "0 of the 2 tensors were read from the ring" in open_run(bench.url).status()[0].missing[0]
