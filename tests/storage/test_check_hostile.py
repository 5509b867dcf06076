"""A check bears what strangers write, and what an object store shows."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ranktape.errors import ObjectTooLargeError, RunFormatError
from ranktape.storage.format.documents import MAX_WORLD_SIZE
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.copy import copy_run
from ranktape.storage.maintenance.finding import FindingKind, Repair
from ranktape.storage.maintenance.repair import repair_run
from ranktape.storage.maintenance.runs import RunState, find_runs
from ranktape.storage.places.local import LocalBackend
from ranktape.storage.places.urls import open_backend
from ranktape.storage.records.run import open_run
from tests.exhaustive import exhaustive
from tests.s3 import S3Server
from tests.storage.flaky import flaky_proxy
from tests.storage.whole_run import forge, keys_of, put_in, tensors, whole_run

JUNK: list[Any] = [None, True, -1, 2**70, 1e308, "", "x", "../..", [], {}, [[]], {"a": 1}, {"a": {}}, "\ud800"]


def branches(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a document."""
    if path:
        yield path
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from branches(value, (*path, name))


def test_documents_of_a_stranger_are_findings_and_never_a_traceback(short_path: Path) -> None:
    chance = random.Random(3)  # noqa: S311 - the same documents in every run
    documents = keys_of(short_path, "attempt*/**/zarr.json")
    backend = open_backend(short_path)

    def spoil(document: dict[str, Any]) -> None:
        way = chance.choice(list(branches(document)))
        # A checksum can be written into a dictionary alone.
        put_in(document, way, chance.choice([one for one in JUNK if way != ("attributes",) or isinstance(one, dict)]))

    for _ in range(80):
        key = chance.choice(documents)
        old = (short_path / key).read_bytes()
        forge(short_path, key, spoil)
        check_run(backend, deep=True)
        repair_run(backend, dry_run=True)
        (short_path / key).write_bytes(old)
    assert check_run(backend).findings == []


@pytest.mark.parametrize("depth", [200, 100_000])
def test_a_document_that_is_nested_deep_is_refused_by_name(depth: int, short_path: Path) -> None:
    deep = "[" * depth + "]" * depth
    text = f'{{"zarr_format":3,"node_type":"group","attributes":{{"launch_id":{deep},"options":{deep}}}}}'
    refused = set()
    documents = keys_of(short_path, "**/zarr.json")
    for key in documents:
        old = (short_path / key).read_bytes()
        (short_path / key).write_text(text)
        found = check_run(open_backend(short_path), deep=True).errors
        refused |= {key for one in found if "nested deeper than 128" in one.message}
        (short_path / key).write_bytes(old)
    assert {*documents} - refused == {*keys_of(short_path, "attempt*/commits/*/rank*/zarr.json")}
    (short_path / "zarr.json").write_text(text)
    with pytest.raises(RunFormatError, match=r"is not JSON that can be read .lists and dictionaries nested"):
        open_run(short_path)


@pytest.mark.parametrize("commit", [[], {}, 5])
def test_a_marker_that_names_no_commit_is_a_finding(commit: Any, short_path: Path) -> None:
    key = keys_of(short_path, "attempt*/commits/iter_00000000/rank_00001.committed/zarr.json")[0]
    forge(short_path, key, lambda document: document["attributes"].update(commit=commit))
    assert [one.key for one in check_run(open_backend(short_path)).errors] == [key]


def test_many_forged_ranks_are_counted_and_not_told_one_by_one(path: Path) -> None:
    (key,) = keys_of(path, "attempt*/zarr.json")
    forge(path, key, lambda document: put_in(document, ("attributes", "launch", "world_size"), MAX_WORLD_SIZE))
    errors = check_run(open_backend(path)).errors
    assert len(errors) < 1000
    assert any(f"but {MAX_WORLD_SIZE - 102} more ranks have no commit in it" in one.message for one in errors)
    statuses = open_run(path).status()
    assert [len(status.missing) for status in statuses] == [1000, 1000]
    forge(path, key, lambda document: put_in(document, ("attributes", "launch", "world_size"), MAX_WORLD_SIZE + 1))
    (error,) = [one for one in check_run(open_backend(path)).errors if one.kind is FindingKind.DAMAGED]
    assert "Expected `int` <= 131072 - at `attributes.launch.world_size`" in error.message
    (listed,) = find_runs(path)
    assert listed.state is RunState.UNREADABLE


def test_objects_of_terabytes_are_findings_and_take_no_memory(short_path: Path, tmp_path: Path) -> None:
    backend = open_backend(short_path)
    for key in keys_of(short_path, "**/*"):
        data = (short_path / key).read_bytes()
        os.truncate(short_path / key, 1 << 40)
        if key == "zarr.json":
            assert [one.kind for one in check_run(backend).errors] == [FindingKind.DAMAGED]
        else:
            kinds = {one.kind for one in check_run(backend, deep=True).errors}
            assert kinds & {FindingKind.DAMAGED, FindingKind.SIZE}, key
        if not key.endswith("zarr.json"):
            with pytest.raises(ObjectTooLargeError, match="is larger than"):
                copy_run(backend, open_backend(tmp_path / "copy"))
        (short_path / key).write_bytes(data)


class Scarce(LocalBackend):
    """A directory on a machine that has no memory for one object."""

    key = ""

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        if key == self.key:
            raise ObjectTooLargeError(f"{key} takes 9 bytes of memory, 8 are left here")
        return super().get(key, max_nbytes=max_nbytes)


def test_what_a_machine_has_no_memory_for_is_unchecked_and_no_error(short_path: Path) -> None:
    backend = Scarce(str(short_path))
    groups = ("iterations", "catalogue", "large*", "stack*")
    keys = {key for group in groups for key in keys_of(short_path, f"**/{group}/**/c.*")}
    assert len(keys) == 7
    for backend.key in sorted(keys):
        (note,) = check_run(backend, deep=True).findings
        assert (note.kind, note.is_error, note.key, note.mend) == (FindingKind.UNCHECKED, False, backend.key, None)
        assert note.message == f"{backend.key} takes 9 bytes of memory, 8 are left here"


def test_a_shape_that_no_object_can_have_takes_no_memory(short_path: Path) -> None:
    (key,) = keys_of(short_path, "attempt*/rank_00000/iter_00000000/large*/zarr.json")

    def enlarge(large: dict[str, Any]) -> None:
        large["shape"] = large["attributes"]["shape"] = [2, 1 << 50]
        large["chunk_grid"]["configuration"]["chunk_shape"] = [2, 1 << 50]
        large["codecs"][0]["configuration"]["chunk_shape"] = [1, 1 << 50]
        large["dimension_names"] = ["dim0_2", f"dim1_{1 << 50}"]

    forge(short_path, key, enlarge)
    kinds = {
        one.kind for one in check_run(open_backend(short_path), deep=True).errors if one.record.startswith("large")
    }
    assert kinds == {FindingKind.SIZE, FindingKind.MISMATCH}


@pytest.mark.s3
def test_where_uploads_may_not_be_listed_the_rest_is_checked(s3_server: S3Server) -> None:
    url = s3_server.new_url()
    with flaky_proxy(s3_server.endpoint_url) as proxy:
        options = {**s3_server.storage_options, "endpoint_url": proxy.endpoint_url}
        backend, _, _ = whole_run(url, iterations=(0,), storage_options=options)
        for status, code in ((403, "AccessDenied"), (501, "NotImplemented")):
            proxy.refused["uploads"] = (status, code)
            (note,) = check_run(backend, deep=True).findings
            assert (note.kind, note.is_error) == (FindingKind.UNCHECKED, False)
            assert note.message.startswith("writes that were not ended were not looked for: cannot list")
            assert str(status) in note.message
            assert repair_run(backend).left == ()


@pytest.mark.s3
@exhaustive("make test checks and repairs in a folder")
def test_a_run_in_an_object_store_is_checked_and_repaired(s3_server: S3Server) -> None:
    url = s3_server.new_url()
    options = s3_server.storage_options
    backend, attempt, writers = whole_run(url, iterations=(0,), close=False, storage_options=options)
    assert check_run(backend, deep=True).errors == []
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = s3_server.client()
    upload = f"{prefix}/{attempt.path}/rank_00000/iter_00000020/stack/c.0"
    client.create_multipart_upload(Bucket=bucket, Key=upload)
    for array, info in tensors(20, 0):
        writers[0].write(array, info=info)
    writers[0].flush_stacks()
    client.delete_object(Bucket=bucket, Key=f"{prefix}/{attempt.path}/iterations/iter_00000000/zarr.json")
    mends = {one.mend for one in check_run(backend).findings} - {None}
    assert mends == {Repair.REMOVE_UNFINISHED_WRITE, Repair.REMOVE_OBJECTS, Repair.FINISH_ITERATION}
    assert repair_run(backend).done == ()
    assert {one.mend for one in repair_run(backend, min_age_seconds=0).done} == mends
    assert client.list_multipart_uploads(Bucket=bucket, Prefix=prefix).get("Uploads", []) == []
    assert [one.message for one in check_run(backend, deep=True).findings] == [
        "no verdict closes the attempt: it is being recorded, or its processes were lost"
    ]
