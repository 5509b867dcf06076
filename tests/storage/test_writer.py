"""Does the writer keep small tensors together, give every array back once, and refuse what it cannot keep whole?"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from ranktape.errors import CaptureError, DataError, StorageError, UsageError
from ranktape.storage import open_run
from ranktape.storage.format.commit import finish_iteration, open_catalogue
from ranktape.storage.format.layout import TensorSite, site_path
from ranktape.storage.format.progress import open_iteration
from ranktape.storage.format.record_info import Keep
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.prune import drop_iteration
from ranktape.storage.places.backend import Buffer
from ranktape.storage.places.local import LocalBackend
from ranktape.storage.query.columns import StringColumn
from ranktape.storage.recording import writer as writer_module
from ranktape.storage.recording.writer import RankWriter
from tests.runs import complete, describe, start


class Releases:
    """Counts how often each array was given back."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def of(self, number: int) -> Callable[[], None]:
        return lambda: self.counts.update([number])


def small(value: int) -> np.ndarray[Any, Any]:
    return np.full((3, 4), value, np.float32)


def refuse_keys(patch: pytest.MonkeyPatch, part: str) -> None:
    """Let no object be written whose key has this in it."""
    put = LocalBackend.put

    def refuse(self: LocalBackend, key: str, parts: Any) -> None:
        if part in key:
            raise StorageError(f"cannot write {key}")
        put(self, key, parts)

    patch.setattr(LocalBackend, "put", refuse)


def test_small_tensors_share_few_objects_and_large_ones_have_their_own(tmp_path: Path) -> None:
    backend, attempt, [writer] = start(tmp_path / "run")
    released = Releases()
    for index in range(1000):
        array = small(index)
        writer.write(array, info=describe(array, call=index, counter=index), on_release=released.of(index))
    assert not released.counts
    assert writer.waiting_nbytes == 1000 * 48
    large = np.ones(writer_module.STACK_BELOW_NBYTES, np.uint8)
    writer.write(large, info=describe(large, module="large", counter=1000), on_release=released.of(1000))
    assert released.counts == {1000: 1}
    writer.commit(0, expected=[], silent_sites={})
    assert released.counts == dict.fromkeys(range(1001), 1)
    group = tmp_path / "run" / attempt.path / "rank_00000/iter_00000000"
    names = sorted(path.relative_to(group).as_posix() for path in group.rglob("*") if path.is_file())
    assert names[:4] == ["catalogue/c.0", "catalogue/zarr.json", names[2], names[3]]
    assert names[4:] == ["stack_float32_3x4_0/c.0.0.0", "stack_float32_3x4_0/zarr.json", "zarr.json"]
    finish_iteration(backend, attempt=attempt, iteration=0)
    records = open_run(tmp_path / "run").select()
    assert [record.counter for record in records] == list(range(1001))
    assert all((record.read() == record.call).all() for record in records[:1000:37])
    assert records[1000].read().tobytes() == large.tobytes()


def test_stacks_are_written_when_they_are_full_and_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_STACK_RECORDS", 4)
    backend, attempt, [writer] = start(tmp_path / "run")
    released = Releases()
    for index in range(6):
        writer.write(small(index), info=describe(small(0), call=index), on_release=released.of(index))
    assert set(released.counts) == {0, 1, 2, 3}
    writer.flush_stacks()
    assert set(released.counts) == set(range(6))
    assert writer.waiting_nbytes == 0
    writer.write(small(6), info=describe(small(0), call=6), on_release=released.of(6))
    records = complete(backend, attempt, [writer])
    assert {record.location.stack for record in records} == {"stack_float32_3x4_0", "stack_float32_3x4_1", ""}
    assert sorted(int(record.read()[0, 0]) for record in records) == list(range(7))


class Meeting(LocalBackend):
    """A place whose stacks arrive three at a time, or never."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.barrier = threading.Barrier(3)
        self.side_by_side = [0]
        self.lock = threading.Lock()

    def put(self, key: str, parts: Iterable[Buffer]) -> None:
        if "/stack_" in key and not key.endswith("zarr.json"):
            with self.lock:
                self.side_by_side.append(self.side_by_side[-1] + 1)
            self.barrier.wait(timeout=60)
            with self.lock:
                self.side_by_side.append(self.side_by_side[-1] - 1)
        super().put(key, parts)


def test_stacks_are_sent_side_by_side(tmp_path: Path) -> None:
    _, attempt, _ = start(tmp_path / "run")
    backend = Meeting(tmp_path / "run")
    writer = RankWriter(backend, attempt=attempt, rank=0, environment={}, store_concurrency=3)
    for iteration in range(2):
        for index in range(12):
            array = np.full((1 + index // 2,), index, np.float32)
            writer.write(array, info=describe(array, iteration=iteration, call=index))
        if iteration:
            writer.flush_stacks()
        writer.commit(iteration, expected=[], silent_sites={})
    assert max(backend.side_by_side) == 3
    assert not [finding for finding in check_run(backend).findings if finding.is_error]


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_WAITING_NBYTES", 1000)
    _, _, [writer] = start(tmp_path / "run")
    for index in range(100):
        writer.write(small(index), info=describe(small(0), call=index, iteration=index % 3))
        assert writer.waiting_nbytes <= 1000


def test_an_iteration_given_up_gives_its_tensors_back(tmp_path: Path) -> None:
    _, _, [writer] = start(tmp_path / "run")
    released = Releases()
    for index in range(3):
        writer.write(small(index), info=describe(small(0), call=index), on_release=released.of(index))
    writer.abandon(0)
    assert released.counts == dict.fromkeys(range(3), 1)
    writer.abandon(0)
    assert writer.waiting_nbytes == 0


def test_a_stack_that_cannot_be_written_fails_its_iteration_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, attempt, [writer] = start(tmp_path / "run")
    refuse_keys(monkeypatch, "iter_00000000/stack_")
    released = Releases()
    for index in range(4):
        info = describe(small(0), call=index, iteration=index % 2)
        writer.write(small(index), info=info, on_release=released.of(index))
    writer.flush_stacks()
    assert released.counts == dict.fromkeys(range(4), 1)
    with pytest.raises(StorageError, match=r"cannot write .*/stack_"):
        writer.commit(0, expected=[], silent_sites={})
    writer.commit(1, expected=[], silent_sites={})
    finish_iteration(backend, attempt=attempt, iteration=1)
    assert open_run(tmp_path / "run").iterations == [1]


def test_a_tensor_that_is_refused_is_given_back(tmp_path: Path) -> None:
    _, _, [writer] = start(tmp_path / "run")
    released = Releases()
    writer.write(small(0), info=describe(small(0)), on_release=released.of(0))
    with pytest.raises(CaptureError, match="have the name"):
        writer.write(small(1), info=describe(small(0)), on_release=released.of(1))
    with pytest.raises(DataError, match=r"float64\[3, 4\], 96 bytes, cannot be .* float32\[3, 4\], 48 bytes"):
        writer.write(np.zeros((3, 4)), info=describe(small(0), call=1), on_release=released.of(2))
    assert released.counts == {1: 1, 2: 1}


def test_many_threads_write_one_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_STACK_RECORDS", 7)
    backend, attempt, [writer] = start(tmp_path / "run")
    released = Releases()

    def work(thread: int) -> None:
        for index in range(50):
            number = 100 * thread + index
            info = describe(small(0), call=number, counter=number)
            writer.write(small(number), info=info, on_release=released.of(number))
            if index % 20 == 0:
                writer.flush_stacks()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    records = complete(backend, attempt, [writer])
    assert len(records) == 200
    assert all((record.read() == record.call).all() for record in records)
    assert set(released.counts.values()) == {1}


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_histograms_are_records_too(tmp_path: Path, dtype: type[np.unsignedinteger[Any]]) -> None:
    backend, attempt, [writer] = start(tmp_path / "run")
    counts = np.arange(1 << 16, dtype=dtype)
    kept: dict[str, Any] = {"keep": Keep.HISTOGRAM, "dtype": "bfloat16", "shape": (8192, 1 << 20)}
    for call in range(2):
        writer.write(counts + call, info=describe(small(0), call=call, nbytes=counts.nbytes, **kept))
    records = complete(backend, attempt, [writer]).select(keep="histogram")
    assert [int(record.histogram()[5]) for record in records] == [5, 6]
    assert records[0].shape == (8192, 1 << 20)
    with pytest.raises(Exception, match=r"use histogram\(\)"):
        records[0].read()


@pytest.mark.parametrize("length", [199, 200, 201, 1500])
def test_a_long_name_costs_no_iteration(tmp_path: Path, length: int) -> None:
    backend, attempt, [writer] = start(tmp_path / "run")
    begin = len(site_path(TensorSite.of(describe(small(0), module=""))))
    module = "m" * (length - begin)
    open_iteration(backend, attempt=attempt, iteration=0)
    for call in (1, 10, 11, 100):
        array = np.full((2, 3, call), call, np.float32)  # no two of one shape: each has an array of its own
        writer.write(array, info=describe(array, module=module, call=call, counter=call))
        writer.flush_stacks()
    records = complete(backend, attempt, [writer])
    assert [(record.call, record.read().flat[0]) for record in records] == [(call, call) for call in (1, 10, 11, 100)]
    assert set(records.column("module")) == {module}
    assert not check_run(backend, deep=True).errors
    assert list(zarr.open_group(backend.url, mode="r", use_consolidated=False).members(max_depth=None))


def test_a_commit_that_failed_can_be_made_again_and_one_that_was_made_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, attempt, [writer] = start(tmp_path / "run")
    writer.write(small(1), info=describe(small(1)))
    with monkeypatch.context() as context:
        refuse_keys(context, "iter_00000000/zarr.json")
        with pytest.raises(StorageError, match="cannot write"):
            writer.commit(0, expected=[], silent_sites={})
    records = complete(backend, attempt, [writer])
    for again in (
        lambda: writer.commit(0, expected=[], silent_sites={}),
        lambda: writer.write(small(2), info=describe(small(2), call=1)),
    ):
        with pytest.raises(CaptureError, match="committed or given up"):
            again()
    assert [int(record.read()[0, 0]) for record in records] == [1]


def test_an_array_that_cannot_be_given_back_fails_its_iteration_and_no_more(tmp_path: Path) -> None:
    _, _, [writer] = start(tmp_path / "run")
    released = Releases()

    def refuse() -> None:
        raise RuntimeError("no")

    for index, release in enumerate([refuse, released.of(1), released.of(2)]):
        writer.write(small(index), info=describe(small(0), call=index), on_release=release)
    with pytest.raises(RuntimeError, match="no"):
        writer.commit(0, expected=[], silent_sites={})
    assert released.counts == {1: 1, 2: 1}


def test_metadata_that_json_cannot_hold_are_refused_at_once(tmp_path: Path) -> None:
    _, _, [writer] = start(tmp_path / "run")
    with pytest.raises(UsageError, match="no form in JSON"):
        writer.write(small(0), info=describe(small(0), metadata={"x": math.nan}))
    deep: list[Any] = []
    for depth in range(200):
        if depth in {61, 199}:
            with pytest.raises(UsageError, match="nested deeper than 64"):
                writer.write(small(0), info=describe(small(0), metadata={"x": [deep]}))
        deep = [deep, deep]
    writer.commit(0, expected=[], silent_sites={})


def test_metadata_that_are_equal_and_not_the_same_stay_apart(tmp_path: Path) -> None:
    backend, attempt, [writer] = start(tmp_path / "run")
    kinds = [True, 1, 1.0]
    for call, kind in enumerate(kinds):
        writer.write(small(0), info=describe(small(0), call=call, metadata={"f": kind}))
    complete(backend, attempt, [writer])
    column = open_catalogue(backend, attempt.path, 0).column("metadata")
    assert isinstance(column, StringColumn)
    assert [column.table[code] for code in column.codes] == ['{"f":true}', '{"f":1}', '{"f":1.0}']


def test_records_of_one_stack_are_read_with_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, attempt, [writer] = start(tmp_path / "run")
    for call in range(50):
        writer.write(small(call), info=describe(small(0), call=call, counter=call))
    complete(backend, attempt, [writer])
    requests: Counter[str] = Counter()
    for name in ("get", "get_range", "size"):
        original = getattr(LocalBackend, name)

        def counted(
            self: LocalBackend, *args: Any, _name: str = name, _original: Any = original, **options: Any
        ) -> Any:
            requests[_name] += "stack_" in args[0]
            return _original(self, *args, **options)

        monkeypatch.setattr(LocalBackend, name, counted)
    records = open_run(tmp_path / "run").select()
    assert [int(record.read()[0, 0]) for record in records] == list(range(50))
    assert requests == {"get": 2, "get_range": 2, "size": 1}


def test_a_record_of_an_iteration_that_was_dropped_says_so(tmp_path: Path) -> None:
    backend, attempt, [writer] = start(tmp_path / "run")
    writer.write(small(1), info=describe(small(1)))
    [record] = complete(backend, attempt, [writer])
    drop_iteration(backend, attempt=attempt, iteration=0)
    with pytest.raises(DataError, match=r"iteration 0 was removed .*--keep-last.*: refresh"):
        record.read()


LONE = "x\udcff"
"""As Python has the name of a file that is no text."""


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"module": LONE}, {"module": r"x\udcff"}),
        ({"layout": "\ud800B"}, {"layout": r"\ud800B"}),
        ({"metadata": {LONE: [LONE, 1, {"a": LONE}]}}, {"metadata": {r"x\udcff": [r"x\udcff", 1, {"a": r"x\udcff"}]}}),
        ({"sample_ids": [LONE, 7], "sample_dim": 0}, {"sample_ids": [r"x\udcff", 7]}),
        ({"module": "\ud83d\ude00"}, {"module": r"\ud83d\ude00"}),
        ({"module": "\U0001f600"}, {"module": "\U0001f600"}),
    ],
    ids=["module", "layout", "metadata", "sample_ids", "two halves", "a whole one"],
)
def test_every_reader_of_json_reads_what_came_with_lone_surrogates(
    tmp_path: Path, fields: dict[str, Any], found: dict[str, Any]
) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    backend, attempt, [writer] = start(tmp_path / "run")
    open_iteration(backend, attempt=attempt, iteration=0)
    array = np.ones((2, 3), np.float32)
    for call in range(2):
        writer.write(array, info=describe(array, call=call, **fields))
    writer.commit(0, expected=[LONE], silent_sites={LONE: LONE})
    finish_iteration(backend, attempt=attempt, iteration=0)
    for path in (tmp_path / "run").rglob("zarr.json"):
        json.dumps(json.loads(path.read_bytes()), ensure_ascii=False).encode()  # raises where it is no text
    [stack_path] = (tmp_path / "run").rglob("stack_*/zarr.json")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(stack_path.parent)}}
    assert tensorstore.open(spec).result().read().result().tolist() == [array.tolist()] * 2
    records = open_run(tmp_path / "run").select()
    assert [{name: getattr(record, name) for name in found} for record in records] == [found] * 2
    assert records[0].read().tolist() == array.tolist()
    report = check_run(backend, deep=True)
    assert not [finding.text() for finding in report.findings if finding.is_error]
