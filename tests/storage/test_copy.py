"""Is a copy the run, whole or not at all, whatever interrupts it and wherever it goes?"""

from __future__ import annotations

import dataclasses
import re
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ranktape.errors import DataError, RunExistsError, RunNotFoundError, StorageError, UsageError
from ranktape.launch.cli import cli
from ranktape.storage import open_run
from ranktape.storage.format.progress import open_iteration
from ranktape.storage.maintenance import OnProgress
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.copy import copy_run, list_run
from ranktape.storage.maintenance.prune import drop_iteration, prune_run
from ranktape.storage.places.backend import Backend, MemoryBudget
from ranktape.storage.places.urls import open_backend
from ranktape.storage.recording.writer import RankWriter
from tests.exhaustive import exhaustive
from tests.runs import start
from tests.s3 import S3Server
from tests.storage.whole_run import record, tensors, whole_run
from tests.storage.wrapped import wrapped


def contents(backend: Backend) -> dict[str, bytes | None]:
    """Every object of a run."""
    return {key: backend.get(key) for key in backend.list_keys("")}


@pytest.fixture
def target(tmp_path: Path) -> Backend:
    """Where the copy goes."""
    return open_backend(tmp_path / "copy")


def failing_after(backend: Backend, num_puts: int) -> Any:
    """A store that is lost after some writes."""
    lock = threading.Lock()
    left = [num_puts]

    def put(key: str, parts: Any) -> None:
        with lock:
            left[0] -= 1
            if left[0] < 0:
                raise StorageError("the store was lost")
        backend.put(key, parts)

    return wrapped(backend, put=put)


def test_a_copy_is_the_run_byte_by_byte(sound: Path, target: Backend) -> None:
    source = open_backend(sound)
    seen: list[tuple[int, int]] = []
    report = copy_run(source, target, on_progress=lambda done, total: seen.append((done, total)))
    assert contents(target) == contents(source)
    assert check_run(target, deep=True).findings == []
    assert (report.num_copied, report.num_present, report.left_out) == (len(contents(source)), 0, [])
    assert seen == [(done, report.num_copied) for done in range(1, report.num_copied + 1)]
    again = copy_run(source, target)
    assert (again.num_copied, again.num_present) == (0, report.num_copied)
    assert again.nbytes_present == report.nbytes_copied


@pytest.mark.s3
@exhaustive("make test copies between folders")
def test_a_run_goes_to_an_object_store_and_back(short: Path, tmp_path: Path, s3_server: S3Server) -> None:
    source = open_backend(short)
    url = s3_server.new_url()
    remote = open_backend(url, storage_options=s3_server.storage_options)
    copy_run(source, remote)
    back = open_backend(tmp_path / "back")
    copy_run(remote, back)
    assert contents(back) == contents(source)
    assert open_run(url, storage_options=s3_server.storage_options).iterations == [0]


def test_an_interrupted_copy_is_no_run_and_goes_on_where_it_stopped(
    sound: Path, tmp_path: Path, target: Backend
) -> None:
    source = open_backend(sound)
    num_objects = len(contents(source))
    with pytest.raises(StorageError, match="the store was lost"):
        copy_run(source, failing_after(target, num_objects - 1))
    with pytest.raises(RunNotFoundError):
        open_run(tmp_path / "copy")
    report = copy_run(source, target)
    assert (report.num_copied, report.num_present) == (1, num_objects - 1)
    assert contents(target) == contents(source)


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_what_is_committed_in_an_interrupted_copy_is_whole(sound: Path, target: Backend, part: float) -> None:
    source = open_backend(sound)
    with pytest.raises(StorageError):
        copy_run(source, failing_after(target, int(part * len(contents(source)))))
    document = source.get("zarr.json")
    assert document is not None
    target.put("zarr.json", [document])
    for name in target.list_names(""):
        data = source.get(f"{name}/zarr.json")
        if data is not None:
            target.put(f"{name}/zarr.json", [data])
    # The documents that come last are forced here: only groups and ranks may lack theirs.
    found = check_run(target, deep=True).errors
    assert {one.message for one in found} <= {"the group's document is missing", "the rank's document is missing"}


def test_the_order_is_that_of_writing(short: Path) -> None:
    items, left_out = list_run(open_backend(short))
    assert left_out == []
    (attempt,) = (one.name for one in short.glob("attempt*"))
    stages = {item.key.removeprefix(f"{attempt}/"): item.stage for item in items if item.key != "zarr.json"}
    [run] = (item.stage for item in items if item.key == "zarr.json")
    values = {"rank_00000/zarr.json", "iterations/iter_00000000/c.0"}
    order = [
        stages["rank_00000/iter_00000000/zarr.json"],
        stages["commits/iter_00000000/rank_00001.committed/zarr.json"],
        stages["iterations/iter_00000000/zarr.json"],
        stages["closed/rank_00000/zarr.json"],
        stages["zarr.json"],
        run,
    ]
    assert {stages[key] for key in values} == {min(stages.values())}
    assert [min(stages.values()), *order] == sorted({min(stages.values()), *order})
    assert stages["verdict/zarr.json"] == stages["closed/rank_00000/zarr.json"]


def test_a_run_that_is_recorded_is_copied_as_far_as_it_is_committed(tmp_path: Path, target: Backend) -> None:
    source, attempt, writers = whole_run(tmp_path / "run", close=False)
    open_iteration(source, attempt=attempt, iteration=20)
    for array, info in tensors(20, 0):
        writers[0].write(array, info=info)
    writers[0].flush_stacks()
    report = copy_run(source, target)
    assert report.left_out
    assert all("rank_00000/iter_00000020/" in key for key in report.left_out)
    assert check_run(target, deep=True).errors == []
    assert open_run(tmp_path / "copy").iterations == [0, 10]
    record(source, attempt, writers[1:], iteration=30, finish=False)
    writers[0].commit(20, expected=[], silent_sites={})
    assert copy_run(source, target).left_out == []
    assert check_run(target, deep=True).errors == []


def test_what_is_committed_while_the_source_is_listed_is_not_copied_without_its_parts(
    tmp_path: Path, target: Backend
) -> None:
    source, attempt, writers = whole_run(tmp_path / "run", close=False)

    def list_objects(prefix: str) -> list[Any]:
        found = source.list_objects(prefix)
        record(source, attempt, writers, iteration=20)
        # A listing is not of one moment: these came after the values of their iteration had been passed by.
        late = [
            info for info in source.list_objects(prefix) if info.key.startswith(("commits", "iterations", "verdict"))
        ]
        return sorted({info.key: info for info in [*found, *late]}.values(), key=lambda info: info.key)

    moving = wrapped(source, list_objects=list_objects)
    copy_run(moving, target)
    assert open_run(tmp_path / "copy").iterations == [0, 10]
    assert check_run(target, deep=True).errors == []
    copy_run(source, target)
    assert open_run(tmp_path / "copy").iterations == [0, 10, 20]


def test_an_iteration_that_is_removed_meanwhile_is_left_out_whole(tmp_path: Path, target: Backend) -> None:
    source, attempt, _ = whole_run(tmp_path / "run", close=False)

    def get(key: str, **limits: Any) -> bytes | None:
        return None if "rank_00001/iter_00000000/large" in key else source.get(key, **limits)

    moving = wrapped(source, get=get)
    report = copy_run(moving, target)
    assert f"{attempt.path}/iterations/iter_00000000/zarr.json" in report.left_out
    assert open_run(tmp_path / "copy").iterations == [10]


def test_a_store_that_changes_what_is_written_is_found(short: Path, target: Backend) -> None:
    source = open_backend(short)

    def put(key: str, parts: Any) -> None:
        data = b"".join(bytes(part) for part in parts)
        target.put(key, [data[:-1] + bytes([data[-1] ^ 1])])

    changing = wrapped(target, put=put)
    with pytest.raises(DataError, match="does not read back as it was written"):
        copy_run(source, changing)


def test_values_of_an_earlier_copy_are_compared_unless_told_otherwise(
    short: Path, tmp_path: Path, target: Backend
) -> None:
    source = open_backend(short)
    copy_run(source, target)
    (values,) = (tmp_path / "copy").glob("attempt*/rank_00000/iter_00000000/large*/c.0.0")
    data = values.read_bytes()
    values.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert copy_run(source, target, verify=False).num_copied == 0
    assert copy_run(source, target).num_copied == 1
    assert values.read_bytes() == data
    values.write_bytes(data + b"more")
    assert copy_run(source, target).num_copied == 1
    assert values.read_bytes() == data


def test_what_is_no_part_of_the_run_stays_where_it_is(tmp_path: Path, target: Backend) -> None:
    source, _, _ = whole_run(tmp_path / "run", iterations=(0,))
    source.put("notes.txt", [b"mine"])
    source.put("attempt_009-ab/commits/zarr.json", [b"{}"])
    assert copy_run(source, target).left_out == ["attempt_009-ab", "notes.txt"]
    assert open_run(tmp_path / "copy").iterations == [0]


@pytest.mark.parametrize("name", ["../../out", "a//b", "./a", "a\\..\\b", "a\0b"])
def test_a_name_that_would_leave_its_folder_is_not_copied(tmp_path: Path, target: Backend, name: str) -> None:
    source, attempt, _ = whole_run(tmp_path / "run", iterations=(0,))
    (one, *_) = source.list_objects(attempt.path)

    def list_objects(prefix: str) -> list[Any]:
        return [*source.list_objects(prefix), dataclasses.replace(one, key=name)]

    hostile = wrapped(source, list_objects=list_objects)
    assert copy_run(hostile, target).left_out == [f"{attempt.path}/{name}"]
    assert not (tmp_path / "out").exists()


def test_another_run_at_the_target_is_refused(tmp_path: Path) -> None:
    source, _, _ = whole_run(tmp_path / "run", iterations=(0,))
    other, _, _ = whole_run(tmp_path / "other", iterations=(0,), launch_id="other")
    before = contents(other)
    with pytest.raises(RunExistsError, match="another run, or something else, is at"):
        copy_run(source, other)
    assert contents(other) == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(RunExistsError, match=r"is not empty .*'thesis\.tex'"):
        copy_run(source, open_backend(tmp_path / "full"))
    with pytest.raises(UsageError, match="overlaps with"):
        copy_run(source, open_backend(tmp_path / "run" / "copy"))
    with pytest.raises(UsageError, match="overlaps with"):
        copy_run(source, open_backend(tmp_path / "run"))
    with pytest.raises(RunNotFoundError):
        copy_run(open_backend(tmp_path / "nothing"), open_backend(tmp_path / "copy"))


def test_memory_is_bounded_and_what_is_larger_goes_alone() -> None:
    budget = MemoryBudget(10)
    inside: list[int] = []
    most: list[int] = []
    lock = threading.Lock()

    def work(nbytes: int) -> None:
        with budget.taken(nbytes):
            with lock:
                inside.append(nbytes)
                most.append(sum(inside))
                assert sum(inside) <= 10 or inside == [25]
            with lock:
                inside.remove(nbytes)

    threads = [threading.Thread(target=work, args=(nbytes,)) for nbytes in (4, 25, 6, 3, 10, 25, 1) * 5]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(most) == 35
    assert max(most) == 25
    waiting = threading.Thread(target=work, args=(7,))
    with budget.taken(4):
        waiting.start()
        waiting.join(timeout=0.2)
        assert waiting.is_alive()
    waiting.join(timeout=30)
    assert not waiting.is_alive()


def test_a_copy_keeps_what_is_removed_at_the_source_later(tmp_path: Path, target: Backend) -> None:
    source, attempt, writers = whole_run(tmp_path / "run", close=False)
    copy_run(source, target)
    drop_iteration(source, attempt=attempt, iteration=0)
    record(source, attempt, writers, iteration=20)
    drop_iteration(source, attempt=attempt, iteration=10)
    report = copy_run(source, target)
    assert report.left_out == [f"{attempt.path}/dropped/iter_{step:08d}/zarr.json" for step in (0, 10)]
    assert check_run(target, deep=True).errors == []
    assert open_run(tmp_path / "copy").iterations == [0, 10, 20]
    other = open_backend(tmp_path / "other")
    assert copy_run(source, other).left_out == []
    assert {key for key in other.list_keys(f"{attempt.path}/dropped") if "iter" in key} == {
        "iter_00000000/zarr.json",
        "iter_00000010/zarr.json",
    }


@pytest.mark.parametrize(
    ("words", "filters"),
    [
        (["--module", "layers.*", "--iteration", "10"], {"module": "layers.*", "iteration": 10}),
        (["--rank", "1"], {"rank": 1}),
    ],
)
def test_a_copy_of_some_records_is_a_run_that_says_what_was_left_out(
    sound: Path, tmp_path: Path, words: list[str], filters: dict[str, Any]
) -> None:
    shutil.copytree(sound, tmp_path / "a")
    chosen = open_run(tmp_path / "a").select(**filters)
    answer = CliRunner().invoke(cli, ["cp", str(tmp_path / "a"), str(tmp_path / "b"), *words], catch_exceptions=False)
    copied = open_run(tmp_path / "b")
    assert [record.info for record in copied.select()] == [record.info for record in chosen]
    for one, other in zip(copied.select(), chosen, strict=True):
        assert one.read().tobytes() == other.read().tobytes()
    assert check_run(open_backend(tmp_path / "b"), deep=True).findings == []
    assert copied.verdict().met
    num_left_out = 12 * len(copied.iterations) - len(chosen)
    assert f"{num_left_out} others left out" in answer.output
    status = CliRunner().invoke(cli, ["status", str(tmp_path / "b")]).output
    assert "records were left out of the copy: " in status
    assert " ".join(words[:2]) in status
    again = CliRunner().invoke(cli, ["cp", str(tmp_path / "a"), str(tmp_path / "b"), *words])
    assert (again.exit_code, "there is a run at" in again.output) == (1, True)
    none = CliRunner().invoke(cli, ["cp", str(tmp_path / "a"), str(tmp_path / "c"), "--module", "nowhere"])
    assert none.exit_code == 1
    assert not (tmp_path / "c").exists()


def test_progress_counts_every_item_up_to_their_number(sound: Path, tmp_path: Path) -> None:
    target = open_backend(tmp_path / "copy")
    works: dict[str, Callable[[OnProgress], object]] = {
        "copy": lambda tell: copy_run(open_backend(sound), target, on_progress=tell),
        "check": lambda tell: check_run(target, on_progress=tell),
        "deep check": lambda tell: check_run(target, deep=True, on_progress=tell),
        "prune": lambda tell: prune_run(target, keep_last=1, on_progress=tell),
    }
    for name, work in works.items():
        seen: list[tuple[int, int]] = []
        work(lambda done, known, seen=seen: seen.append((done, known)))  # type: ignore[misc]
        total = seen[-1][1]
        assert max(seen) == (total, total), name
        assert sorted(done for done, _ in seen) == list(range(1, total + 1)), name


LEVELS = (
    r"/(rank_\d+|iterations)/iter_\d+/",
    r"/rank_\d+/iter_\d+/zarr\.json$",
    r"/commits/iter_\d+/rank_\d+\.committed/zarr\.json$",
    r"/iterations/iter_\d+/zarr\.json$",
)
"""The keys of an iteration in their order: values and catalogues, commits of the ranks, their markers, the commit."""


def test_what_a_commit_names_is_flushed_before_it(sound: Path, tmp_path: Path) -> None:
    """Else a crash of the machine may leave the document on the disk without its data."""
    written: list[int] = []

    def watching(backend: Backend) -> Any:
        waiting: list[int] = []

        def write(verb: str, key: str, data: Any) -> Any:
            if levels := [level for level, pattern in enumerate(LEVELS) if re.search(pattern, key)]:
                assert levels[-1] == 0 or min(waiting, default=levels[-1]) >= levels[-1], key
                waiting.append(levels[-1])
                written.append(levels[-1])
            return getattr(backend, verb)(key, data)

        def flush() -> None:
            waiting.clear()
            backend.flush()

        return wrapped(backend, put=partial(write, "put"), create=partial(write, "create"), flush=flush)

    backend, attempt, _ = start(tmp_path / "run", world_size=2)
    watched = watching(backend)
    writers = [RankWriter(watched, attempt=attempt, rank=rank, environment={}) for rank in range(2)]
    record(watched, attempt, writers, iteration=0)
    assert [written.count(level) for level in (1, 2, 3)] == [2, 2, 1]
    copy_run(open_backend(sound), watching(open_backend(tmp_path / "copy")))
    assert [written.count(level) for level in (1, 2, 3)] == [2 + 4, 2 + 4, 1 + 2]
