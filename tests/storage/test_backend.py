"""Does every place that can hold a run keep the promises of `Backend`?

One class for all of them. The raw reads and writes go around the code under test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from ranktape.errors import StorageError, UsageError
from ranktape.storage.backend import Backend, without_credentials
from ranktape.storage.urls import open_backend
from tests.s3 import S3Server


class BackendTests:
    """What holds for every backend; a subclass gives `backend` and `raw`, a way to the objects around it."""

    def test_what_was_put_is_there(self, backend: Backend, raw: Callable[[str], bytes]) -> None:
        backend.put("a/b", [b"one", memoryview(b"two"), np.arange(3, dtype=np.uint8)])
        assert raw("a/b") == b"onetwo\x00\x01\x02"
        assert backend.get("a/b") == b"onetwo\x00\x01\x02"
        assert backend.exists("a/b")

    def test_put_replaces(self, backend: Backend) -> None:
        backend.put("a", [b"long old content"])
        backend.put("a", [b"new"])
        assert backend.get("a") == b"new"

    def test_many_parts_and_no_parts(self, backend: Backend) -> None:
        backend.put("many", [bytes([index % 256]) for index in range(5000)])
        assert backend.get("many") == bytes(index % 256 for index in range(5000))
        backend.put("none", [b"", b""])
        assert backend.get("none") == b""

    def test_what_is_not_there_is_none(self, backend: Backend) -> None:
        assert backend.get("missing/key") is None
        assert not backend.exists("missing/key")
        assert backend.list_keys("missing") == []
        assert backend.list_names("missing") == []
        backend.delete("missing")

    def test_an_object_is_created_once(self, backend: Backend) -> None:
        assert backend.create("deep/er/once", b"first")
        assert not backend.create("deep/er/once", b"second")
        assert backend.get("deep/er/once") == b"first"

    def test_one_of_many_creators_wins(self, backend: Backend) -> None:
        results: list[bool] = []
        barrier = threading.Barrier(4)

        def create(number: int) -> None:
            barrier.wait()
            results.append(backend.create("race", str(number).encode()))

        threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(results) == 1

    def test_listing_sees_what_was_written_just_now(self, backend: Backend) -> None:
        for key in ("x/b", "x/a/1", "x/a/2", "y"):
            backend.put(key, [b"."])
            backend.list_keys("x")
        assert backend.list_keys("x") == ["a/1", "a/2", "b"]
        assert backend.list_keys("") == ["x/a/1", "x/a/2", "x/b", "y"]
        assert backend.list_names("x") == ["a", "b"]
        assert backend.list_names("") == ["x", "y"]

    def test_a_prefix_is_a_folder_not_a_beginning(self, backend: Backend) -> None:
        backend.put("iter_1/a", [b"."])
        backend.put("iter_10/a", [b"."])
        assert backend.list_keys("iter_1") == ["a"]
        backend.delete("iter_1")
        assert backend.list_keys("") == ["iter_10/a"]

    def test_everything_can_be_deleted(self, backend: Backend) -> None:
        backend.put("a/b", [b"."])
        backend.put("c", [b"."])
        backend.delete("")
        assert backend.list_keys("") == []
        backend.put("a/b", [b"again"])
        assert backend.get("a/b") == b"again"

    def test_names_with_escapes_are_kept(self, backend: Backend, raw: Callable[[str], bytes]) -> None:
        key = "a%2Fb,c+d~e%5F/zarr.json"
        backend.put(key, [b"."])
        assert raw(key) == b"."
        assert backend.list_keys("") == [key]

    def test_threads_write_side_by_side(self, backend: Backend) -> None:
        def write(number: int) -> None:
            for index in range(5):
                backend.put(f"t{number}/{index}", [bytes([number]) * 1000])

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(backend.list_keys("")) == 20
        assert backend.get("t3/4") == b"\x03" * 1000

    def test_flushing_raises_nothing(self, backend: Backend) -> None:
        backend.put("a", [b"."])
        backend.flush()


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

    def test_a_full_disk_is_named_and_leaves_nothing(self) -> None:
        # /dev/full cannot hold a directory: a tiny tmpfs would need root. A write beyond the limit of file sizes
        # fails in the same place, with the same clean-up.
        resource = pytest.importorskip("resource")
        signal = pytest.importorskip("signal")
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            self._write_beyond(resource, old)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            signal.signal(signal.SIGXFSZ, handler)

    def _write_beyond(self, resource: Any, old: tuple[int, int]) -> None:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            backend = open_backend(folder)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
            with pytest.raises(StorageError, match="File too large"):
                backend.put("a", [bytes(2000)])
            assert list(Path(folder).iterdir()) == []

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


@pytest.mark.s3
class TestS3(BackendTests):
    @pytest.fixture
    def backend(self, s3_server: S3Server) -> Backend:
        return open_backend(s3_server.new_url(), storage_options=s3_server.storage_options)

    @pytest.fixture
    def raw(self, s3_server: S3Server, backend: Backend) -> Callable[[str], bytes]:
        def read(key: str) -> bytes:
            bucket, _, prefix = backend.url.removeprefix("s3://").partition("/")
            return bytes(s3_server.client().get_object(Bucket=bucket, Key=f"{prefix}/{key}")["Body"].read())

        return read

    def test_a_server_that_is_gone_is_named(self, s3_server: S3Server) -> None:
        options = s3_server.storage_options | {
            "endpoint_url": "http://127.0.0.1:9",
            "config_kwargs": {"retries": {"max_attempts": 0}},
        }
        with pytest.raises(StorageError, match=r"cannot read s3://bucket/run/a: .*check the URL"):
            open_backend("s3://bucket/run", storage_options=options).get("a")

    def test_a_bucket_that_is_not_there_is_named(self, s3_server: S3Server) -> None:
        backend = open_backend("s3://no-such-bucket/run", storage_options=s3_server.storage_options)
        with pytest.raises(StorageError, match="cannot write s3://no-such-bucket/run/a"):
            backend.put("a", [b"."])


def test_unusable_urls_are_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        open_backend("")
    with pytest.raises(UsageError, match="nosuch://x cannot be opened"):
        open_backend("nosuch://x")
    with pytest.raises(UsageError, match="not a URL"):
        open_backend("what ever://x")


def test_credentials_are_never_shown() -> None:
    assert without_credentials("s3://key:secret@bucket/run?token=1") == "s3://bucket/run"
    assert without_credentials("s3://bucket/run") == "s3://bucket/run"


@pytest.mark.parametrize(
    ("url", "right"),
    [
        ("file:/x/run", "file:///x/run"),
        ("s3:/bucket/x", "s3://bucket/x"),
        ("S3:/bucket/x", "s3://bucket/x"),
        ("memory:/x", "memory://x"),
    ],
)
def test_a_url_with_a_slash_too_few_is_no_directory(url: str, right: str) -> None:
    with pytest.raises(UsageError, match=f"not a URL: write {right}"):
        open_backend(url)


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


@pytest.mark.parametrize("url", ["file://server/x", "file://relative", "file://"])
def test_file_urls_of_other_hosts_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="write file:///absolute/path"):
        open_backend(url)


def test_only_shared_places_say_so(tmp_path: Path) -> None:
    assert open_backend(tmp_path).is_shared
    assert not open_backend("memory://bucket/run").is_shared


def test_one_object_can_be_deleted(tmp_path: Path) -> None:
    for url in (str(tmp_path), "memory://one-object"):
        backend = open_backend(url)
        backend.put("a", [b"."])
        backend.put("ab", [b"."])
        backend.delete("a")
        assert backend.list_keys("") == ["ab"]
        backend.delete("ab")
