"""Does every place that can hold a run keep the promises of `Backend`?

One class for all of them (conformance.py). The raw reads and writes go around the code under test.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from ranktape.errors import NoBucketError, StorageError, UsageError
from ranktape.storage.places.backend import Backend, without_credentials
from ranktape.storage.places.urls import open_backend
from tests.exhaustive import exhaustive
from tests.s3 import S3Server
from tests.storage.conformance import BackendTests


class TestLocal(BackendTests):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        return open_backend(tmp_path / "run")

    @pytest.fixture
    def raw(self, tmp_path: Path) -> Callable[[str], bytes]:
        return lambda key: (tmp_path / "run" / key).read_bytes()

    def test_no_partial_file_is_left_or_listed(self, backend: Backend, tmp_path: Path) -> None:
        backend.put("a/b", [b"."])
        backend.create("a/b", b"no")
        (tmp_path / "run" / "a" / "1-2-3.partial").write_bytes(b"debris of a crash")
        assert backend.list_keys("") == ["a/b"]
        assert backend.list_names("a") == ["b"]
        assert sorted(path.name for path in (tmp_path / "run" / "a").iterdir()) == ["1-2-3.partial", "b"]

    def test_a_file_in_the_way_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("not a directory")
        with pytest.raises(StorageError, match=r"cannot write .*run/a/b: .*choose another URL"):
            open_backend(tmp_path / "run").put("a/b", [b"."])

    def test_a_full_disk_is_named_and_leaves_nothing(self, backend: Backend, tmp_path: Path) -> None:
        # /dev/full cannot hold a directory: a tiny tmpfs would need root. A write beyond the limit of file sizes
        # fails in the same place, with the same clean-up.
        resource = pytest.importorskip("resource")
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
        try:
            with pytest.raises(StorageError, match="File too large"):
                backend.put("a", [bytes(2000)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            signal.signal(signal.SIGXFSZ, handler)
        assert list((tmp_path / "run").iterdir()) == []

    @pytest.mark.parametrize("url", ["{}", "file://{}", "local://{}"])
    def test_the_spellings_of_a_path(self, tmp_path: Path, url: str) -> None:
        backend = open_backend(url.format(tmp_path / "run"))
        backend.put("a", [b"."])
        assert backend.url == str(tmp_path / "run")
        assert (tmp_path / "run" / "a").exists()


class TestMemory(BackendTests):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        yield open_backend("memory://bucket/run")
        fsspec.filesystem("memory").store.clear()

    @pytest.fixture
    def raw(self) -> Callable[[str], bytes]:
        return lambda key: bytes(fsspec.filesystem("memory").cat_file(f"/bucket/run/{key}"))

    # The memory file system of fsspec checks and creates in two steps: it holds one process, and no races.
    test_one_of_many_creators_wins = None  # type: ignore[assignment]


def bucket_of(backend: Backend) -> tuple[str, str]:
    """The bucket of a place, and the prefix of its keys."""
    bucket, _, prefix = backend.url.removeprefix("s3://").partition("/")
    return bucket, prefix


class S3Tests(BackendTests):
    """What holds for every S3 server; a subclass gives `server`."""

    @pytest.fixture
    def backend(self, server: S3Server) -> Backend:
        return open_backend(server.new_url(), storage_options=server.storage_options)

    @pytest.fixture
    def raw(self, server: S3Server, backend: Backend) -> Callable[[str], bytes]:
        def read(key: str) -> bytes:
            bucket, prefix = bucket_of(backend)
            return bytes(server.client().get_object(Bucket=bucket, Key=f"{prefix}/{key}")["Body"].read())

        return read

    def test_a_bucket_that_is_not_there_is_named(self, server: S3Server) -> None:
        backend = open_backend("s3://no-such-bucket/run", storage_options=server.storage_options)
        for work in (
            lambda: backend.put("a", [b"."]),
            lambda: backend.create("a", b"."),
            lambda: backend.get("a"),
            lambda: backend.get_range("a", -1, 1),
            lambda: backend.size("a"),
            lambda: backend.exists("a"),
            lambda: backend.list_keys(""),
            lambda: backend.list_names(""),
            lambda: backend.delete("a"),
            backend.list_unfinished,
        ):
            with pytest.raises(NoBucketError, match=r"cannot .* s3://no-such-bucket/run.*create the bucket"):
                work()

    def test_uploads_that_were_not_finished_are_debris(self, server: S3Server, backend: Backend) -> None:
        bucket, prefix = bucket_of(backend)
        client = server.client()
        for key in (f"{prefix}/a/b", f"{prefix}0/not ours"):
            upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
            client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=b".")
        found = backend.list_unfinished()
        assert [one.key.partition("?")[0] for one in found] == ["a/b"]
        assert 0 < found[0].modified < time.time() + 60  # moto began all its uploads in 2010
        assert backend.list_keys("") == []
        backend.remove_unfinished(found)
        backend.remove_unfinished(found)
        assert backend.list_unfinished() == []

    def test_large_objects_are_sent_in_parts(self, server: S3Server, backend: Backend, part_nbytes: int) -> None:
        # The first byte of each part tells it from the others; the size is above the one from where parts are used.
        data = bytearray(2 * part_nbytes + 2)
        data[0], data[part_nbytes], data[2 * part_nbytes], data[-1] = b"1234"
        backend.put("large", [memoryview(data)[:5], memoryview(data)[5:]])
        bucket, prefix = bucket_of(backend)
        head = server.client().head_object(Bucket=bucket, Key=f"{prefix}/large")
        assert head["ContentLength"] == len(data)
        assert head["ETag"].strip('"').endswith("-3")
        found = [backend.get_range("large", at, 1) for at in (0, part_nbytes, 2 * part_nbytes, -1)]
        assert found == [b"1", b"2", b"3", b"4"]
        assert backend.list_unfinished() == []

    def test_views_of_any_size_are_sent_in_their_order(self, backend: Backend) -> None:
        data = np.random.default_rng(0).integers(0, 256, 3 * 2**20, dtype=np.uint8).tobytes()
        cuts = [0, 1, 1, 20, 2**18 + 5, 2**19, 2**19, 2 * 2**20, len(data)]
        backend.put("many", [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)])
        assert backend.get("many") == data

    def test_a_run_may_have_the_whole_bucket(self, server: S3Server) -> None:
        client = server.client()
        client.create_bucket(Bucket="whole")
        backend = open_backend("s3://whole", storage_options=server.storage_options)
        backend.put("a/b", [b"."])
        assert (backend.list_keys(""), backend.list_names(""), backend.get("a/b")) == (["a/b"], ["a"], b".")
        backend.delete("")
        assert backend.list_objects("") == []
        client.delete_bucket(Bucket="whole")  # it was still there, and empty


@pytest.mark.s3
class TestMoto(S3Tests):
    @pytest.fixture
    def server(self, s3_server: S3Server) -> S3Server:
        return s3_server

    # A thousand requests take moto ten seconds; Ceph is asked.
    test_more_are_listed_than_fit_a_page = None  # type: ignore[assignment]


@pytest.mark.ceph
@exhaustive("make test has these over moto, and trainings over Ceph's gateway")
class TestCeph(S3Tests):
    @pytest.fixture
    def server(self, ceph_server: S3Server) -> S3Server:
        return ceph_server


@pytest.mark.parametrize(
    ("url", "match"),
    [
        *(("", "empty"), ("nosuch://x", "nosuch://x cannot be opened"), ("what ever://x", "not a URL")),
        ("file:/x/run", "not a URL: write file:///x/run"),
        ("s3:/bucket/x", "not a URL: write s3://bucket/x"),
        ("S3:/bucket/x", "not a URL: write s3://bucket/x"),
        ("memory:/x", "not a URL: write memory://x"),
        *((url, "write file:///absolute/path") for url in ("file://server/x", "file://relative", "file://")),
    ],
)
def test_unusable_urls_are_refused(url: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        open_backend(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:secret@bucket/run?token=1", "s3://bucket/run"),
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://key:sec/ret@bucket/run", "s3://bucket/run"),
        ("S3://bucket:1/run@2", "s3://bucket:1/run@2"),
        ("s3://bucket/run@2/x:y", "s3://bucket/run@2/x:y"),
    ],
)
def test_credentials_are_never_shown(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


@pytest.mark.parametrize("path", ["runs/a:b", "a:b", "a:/b", "C:/runs", "runs/s3:/x", "./s3:/x"])
def test_colons_in_paths_are_characters(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path(open_backend(path).url) == tmp_path / path


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///x/y", "/x/y"),
        ("file://localhost/x", "/x"),
        ("FILE:///x", "/x"),
        ("file:///a%20b/%25", "/a b/%"),
        ("local:///x#1?2", "/x#1?2"),
        ("/a%20b", "/a%20b"),
    ],
)
def test_file_urls_name_local_directories(url: str, path: str) -> None:
    assert open_backend(url).url == path


def test_only_shared_places_say_so(tmp_path: Path) -> None:
    assert open_backend(tmp_path).is_shared
    assert not open_backend("memory://bucket/run").is_shared
