"""Is what a stranger wrote into a run refused by name, without a traceback, and without the memory that it asks for?"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranktape.analyze.legacy.export import export_records
from ranktape.errors import DataError, ObjectTooLargeError, RunFormatError
from ranktape.storage.format.arrays import WHOLE_NBYTES, blob_key, blob_parts, open_blob, split_checksum
from ranktape.storage.format.attempt import IterationPlan, read_attempts, read_plan, write_plan
from ranktape.storage.format.commit import finish_iteration, read_commit
from ranktape.storage.format.documents import write_group
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.live import Trigger, TriggerKind, write_trigger
from ranktape.storage.format.progress import IterationState, Progress, open_iteration
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.prune import drop_iteration
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.urls import open_backend
from ranktape.storage.records.run import open_run
from tests.runs import describe, start, write_run
from tests.storage.test_hostile_catalogue import npy, packed, table
from tests.storage.whole_run import forge, put_in, whole_run

ITERATION = "iterations/iter_00000000"
COMMIT = "rank_00000/iter_00000000"


@pytest.fixture
def run(short_path: Path) -> Path:
    """The attempt of a whole run of one iteration, as a folder."""
    [attempt] = short_path.glob("attempt_*")
    return attempt


def each(name: str, *values: Any) -> list[tuple[str, Any]]:
    """Cases of one field."""
    return [(name, value) for value in values]


def change(attempt: Path, group: str, *way: str, value: Any) -> None:
    """Put a value into a document."""
    key = (attempt / group / "zarr.json").resolve().relative_to(attempt.parent.resolve())
    forge(attempt.parent, str(key), lambda document: put_in(document, way, value))


@pytest.mark.parametrize(("group", "nbytes"), [("..", 17 << 20), (".", 17 << 20), (COMMIT, 257 << 20)])
def test_documents_that_are_too_large_are_not_read(run: Path, group: str, nbytes: int) -> None:
    # A sparse file, that takes no room where it lies.
    os.truncate(run / group / "zarr.json", nbytes)
    backend = open_backend(run.parent)
    with pytest.raises(RunFormatError, match="is larger than"):
        read_commit(backend, run.name, 0, 0) if group == COMMIT else open_run(run.parent)


def test_an_array_whose_document_is_too_large_is_damaged(run: Path) -> None:
    [document] = (run / COMMIT).glob("large*/zarr.json")
    os.truncate(document, 1 << 40)
    [record] = open_run(run.parent).select(site=[document.parent.name], rank=0)
    with pytest.raises(DataError, match=r"is damaged: .* is larger than"):
        record.read()


def test_bytes_that_grew_are_not_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_backend(run.parent)
    path = f"{run.name}/{ITERATION}"
    os.truncate(run.parent / blob_key(path), WHOLE_NBYTES + 1)
    monkeypatch.setattr(type(backend), "size", lambda *_: 100)
    with pytest.raises(ObjectTooLargeError, match="is larger than"):
        open_blob(backend, path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *each("launch.world_size", 10**12, 0, -1, 1.5, "2", None, []),
        ("launch.world_size", True),
        *each("launch.first_rank", 10**12, -1, 1.5, "2", None, []),
        *each("adds", 1, None, "yes"),
        *each("launch.restart", -1, "0"),
        *each("launch.launch_id", 5),
        *each("launch", None),
        *each("min_iterations", -1, 1.5, "1", 2**70),
        *each("completed", None, {}, [None], [-1], ["1"], [1.5]),
    ],
)
def test_an_attempt_is_what_it_can_be(run: Path, field: str, value: Any) -> None:
    way = field.split(".")
    change(run, ".", "attributes", *way, value=value)
    with pytest.raises(RunFormatError, match=rf"is damaged: Expected `.* - at `attributes\.{field}(\[0\])?`; see"):
        open_run(run.parent)


@pytest.mark.parametrize("value", [True, 0, "2", []])
def test_a_schema_is_a_number(run: Path, value: Any) -> None:
    change(run, "..", "attributes", "ranktape_schema", value=value)
    with pytest.raises(RunFormatError, match="ranktape_schema"):
        open_run(run.parent)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *each("nbytes", -1, 2**70, "x", None, 1.5),
        *each("silent_sites", None, [], {"a": 1}, {"a": [1]}, "x"),
        ("catalogue", 5),
        ("num_records", None),
    ],
)
def test_a_commit_is_what_it_can_be(run: Path, name: str, value: Any) -> None:
    change(run, COMMIT, "attributes", name, value=value)
    backend = open_backend(run.parent)
    [attempt] = read_attempts(backend)
    with pytest.raises(
        RunFormatError, match=rf"is damaged: Expected `.* - at `attributes\.{name}(\[...\]|\[0\])?`; see"
    ):
        finish_iteration(backend, attempt=attempt, iteration=0)


def test_a_commit_counts_what_the_catalogue_holds(run: Path) -> None:
    change(run, COMMIT, "attributes", "num_records", value=99)
    backend = open_backend(run.parent)
    [attempt] = read_attempts(backend)
    with pytest.raises(DataError, match="the rank's commit says 99: the commit is damaged"):
        finish_iteration(backend, attempt=attempt, iteration=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *each("dtype", "x", None, 5),
        *each("shape", ["a"], [-1], None, [2**62, 2**62], [1] * 65),
        *each("sample_dim", 9, -1, "0"),
        *each("sample_ids", {}, [1.5], [[]]),
        *(("operation", "sideways"), ("keep", "nothing"), ("metadata", []), ("rank", -1), ("nbytes", 1.5)),
    ],
)
def test_what_documents_of_arrays_say_is_compared_with_the_catalogue(run: Path, name: str, value: Any) -> None:
    [large] = (path.name for path in (run / COMMIT).iterdir() if path.name.startswith("large"))
    change(run, f"{COMMIT}/{large}", "attributes", name, value=value)
    [error] = check_run(open_backend(run.parent), deep=True).errors
    assert (error.record, error.key) == (large, f"{run.name}/{COMMIT}/{large}/zarr.json")


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("where",), {"counter": "first"}),
        (("where",), {"counter": None}),
        (("value",), 10**400),
        (("time",), -(10**400)),
        (("count",), 2**64),
        (("kind",), "sabotage"),
        (("last_iteration",), -1),
    ],
)
def test_a_trigger_is_what_it_can_be(run: Path, way: tuple[str, ...], value: Any) -> None:
    backend = open_backend(run.parent)
    [attempt] = read_attempts(backend)
    for iteration in (3, 4):
        trigger = Trigger(kind=TriggerKind.NAN, iteration=iteration, rank=0, text="a NaN", value=1.5)
        write_trigger(backend, attempt=attempt, trigger=trigger)
    assert check_run(backend).errors == []
    change(run, "triggers/iter_00000003.rank_00000", "attributes", *way, value=value)
    # The others are told of without it, and a check names it.
    assert [one.iteration for one in open_run(run.parent).triggers()] == [4]
    [error] = check_run(backend).errors
    assert error.key.endswith("triggers/iter_00000003.rank_00000/zarr.json")
    assert re.search(rf"Expected `|Number out of range|Invalid enum value .*`attributes\.{way[0]}", error.message)


@pytest.mark.parametrize(("name", "value"), [("iterations", [1.5]), ("iterations", None), ("is_done", 0)])
def test_a_plan_is_what_it_can_be(run: Path, name: str, value: Any) -> None:
    backend = open_backend(run.parent)
    [attempt] = read_attempts(backend)
    write_plan(backend, attempt=attempt, plan=IterationPlan(iterations=(0, 10), is_done=False))
    change(run, "plan", "attributes", name, value=value)
    with pytest.raises(
        RunFormatError, match=rf"is damaged: Expected `.* - at `attributes\.{name}(\[...\]|\[0\])?`; see"
    ):
        read_plan(backend, attempt=attempt)


DAMAGES: dict[str, Callable[[Path, str], None]] = {
    "empty": lambda attempt, group: os.truncate(attempt / group / "zarr.json", 0),
    "reason": lambda attempt, group: change(attempt, group, "attributes", "reason", value=[1]),
    "problems": lambda attempt, group: change(attempt, group, "attributes", "problems", value=[1]),
    "num_records": lambda attempt, group: change(attempt, group, "attributes", "num_records", value="x"),
    "silent_sites": lambda attempt, group: change(attempt, group, "attributes", "silent_sites", value={"x": {}}),
}


@pytest.mark.parametrize(
    ("group", "damage"),
    [
        *each("commits/iter_00000010/rank_00000.failed", "empty", "reason"),
        *each("closed/rank_00001", "empty", "reason"),
        *each("closed/rank_00000", "empty", "reason"),
        *each("verdict", "empty", "problems"),
        *each(ITERATION, "empty", "num_records", "silent_sites"),
    ],
)
def test_one_damaged_document_hides_no_status(tmp_path: Path, group: str, damage: str) -> None:
    url = str(tmp_path / "run")
    backend, attempt, writers = whole_run(url, iterations=(0,), min_iterations=2, close=False)
    open_iteration(backend, attempt=attempt, iteration=10)
    writers[0].mark(10, mark=Mark.FAILED, attributes={"reason": "no room"})
    for writer in writers:
        writer.close(reason="the training ended")
    whole = open_run(url)
    write_group(backend, f"{attempt.path}/verdict", {"problems": {}})
    DAMAGES[damage](tmp_path / "run" / attempt.path, group)
    first, second = whole.status()
    assert (first.state, second.state) == (IterationState.COMPLETE, IterationState.PARTIAL)
    said = [first.problem, *second.missing.values(), *whole.verdict().missing]
    assert any("its document is damaged" in words for words in said), said
    assert whole.verdict().final
    assert len(whole.select()) > 0


def rewrite(attempt: Path, **columns: Any) -> None:
    """Replace columns of an iteration's catalogue, each by one value."""
    blob = attempt / ITERATION / "c.0"
    archive = zipfile.ZipFile(io.BytesIO(split_checksum(blob.read_bytes(), place="x")))
    content = {name: archive.read(name) for name in archive.namelist()}
    num_rows = len(np.lib.format.read_array(io.BytesIO(content["iteration.npy"])))
    for name, value in columns.items():
        if isinstance(value, str):
            content[f"table:{name}.npy"] = table(value)
            content[f"codes:{name}.npy"] = npy(np.zeros(num_rows, np.uint8))
        else:
            content[f"{name}.npy"] = npy(np.full(num_rows, value))
    blob.write_bytes(b"".join(blob_parts(packed(content))))


def test_a_shape_that_no_memory_holds_is_stacked_and_refused(run: Path) -> None:
    rewrite(run, shape=f"[{1 << 50},4]", sample_dim=0.0, sample_ids="null", dtype="float32")
    [record, *_] = records = open_run(run.parent).select(module="layers.0", rank=0)
    for read in (record.read, lambda: record.read(sample=3), records.stack().isel(sample=3).load):
        with pytest.raises(DataError, match="is damaged"):
            read()


def test_samples_without_names_are_exported_by_number(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    run = write_run(tmp_path / "run", {0: [[(array, describe(array, sample_dim=0, sample_ids=["a"]))]]})
    report = export_records(run.select(), tmp_path / "files", per_sample=True)
    assert report.num_written == 4


def resurrecting(backend: Backend, monkeypatch: pytest.MonkeyPatch, drop: Callable[[], None]) -> None:
    """Another coordinator finishes and removes the iteration when this one is about to write its commit."""
    create = type(backend).create

    def late(self: Any, key: str, data: bytes) -> bool:
        monkeypatch.undo()
        drop()
        return create(self, key, data)

    monkeypatch.setattr(type(backend), "create", late)


def test_a_removed_iteration_stays_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "run")
    backend, attempt, _ = whole_run(url, iterations=(0,), close=False)
    backend.delete_keys([f"{attempt.path}/{ITERATION}/zarr.json"])

    def drop() -> None:
        finish_iteration(backend, attempt=attempt, iteration=0)
        drop_iteration(backend, attempt=attempt, iteration=0)

    resurrecting(backend, monkeypatch, drop)
    finish_iteration(backend, attempt=attempt, iteration=0)
    for _ in range(2):
        assert backend.list_keys(f"{attempt.path}/{ITERATION}") == []
        assert open_run(url).iterations == []
        [status] = open_run(url).status()
        assert (status.state, status.missing) == (IterationState.DROPPED, {})
        finish_iteration(backend, attempt=attempt, iteration=0)
    # And where a writer of an earlier version left a commit, or was killed after it.
    write_group(backend, f"{attempt.path}/{ITERATION}", {})
    assert open_run(url).iterations == []
    assert len(open_run(url).select()) == 0


def test_looking_for_what_is_ready_takes_one_union(tmp_path: Path) -> None:
    _, attempt, _ = start(str(tmp_path / "run"))
    unions = []

    class Counted(frozenset[int]):
        def __or__(self, other: Any) -> Any:
            unions.append(1)
            return frozenset(self) | other

    marks = {iteration: {0: Mark.COMMITTED} for iteration in range(50)}
    progress = Progress(
        attempt=attempt, opened=frozenset(marks), marks=marks, complete=Counted(range(48)), closed=frozenset()
    )
    assert progress.ready() == [48, 49]
    assert len(unions) == 1
