"""What does a directory that came from a stranger, or that others change too, do to who reads and writes it?"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ranktape.errors import ObjectTooLargeError, StorageError, UsageError
from ranktape.storage.places import local
from ranktape.storage.places.local import LocalBackend
from ranktape.storage.places.urls import RetryingBackend, open_backend
from tests.storage.test_retry import names_in, spoil


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def backend(root: Path) -> RetryingBackend:
    backend = open_backend(root, timeout_seconds=60)
    backend.put("a/b", [b"mine"])
    return backend


def in_time(work: Callable[[], object]) -> BaseException:
    """What a call raises that must not hang."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # it is looked at below
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    return raised[0]


def test_a_pipe_in_the_place_of_a_file_is_named_at_once(backend: RetryingBackend, root: Path) -> None:
    os.mkfifo(root / "a" / "pipe")
    for work in (lambda: backend.get("a/pipe"), lambda: backend.get_range("a/pipe", 0, 1)):
        error = in_time(work)
        assert isinstance(error, StorageError)
        assert str(error).startswith(f"{root}/a/pipe is a pipe, a socket or a device and not a file: ")
    assert backend.size("a/pipe") is None
    assert backend.list_keys("") == ["a/b"]


def test_a_directory_in_the_place_of_a_file_is_named(backend: RetryingBackend) -> None:
    with pytest.raises(StorageError, match="run/a is a directory and not a file: move aside"):
        backend.get("a")


def test_a_file_of_holes_is_known_by_its_size(backend: RetryingBackend, root: Path) -> None:
    os.truncate(root / "a" / "b", 2**40)
    with pytest.raises(ObjectTooLargeError, match="larger than 1,073,741,824 bytes"):
        backend.get("a/b", max_nbytes=2**30)
    assert backend.get_range("a/b", -2, 9) == b"\0\0"


def test_a_link_to_a_file_is_neither_read_nor_listed(backend: RetryingBackend, root: Path, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("key")
    (root / "a" / "link").symlink_to(tmp_path / "private")
    (root / "a" / "lost").symlink_to(tmp_path / "nothing")
    for key in ("a/link", "a/lost"):
        with pytest.raises(StorageError, match=f"{key} is a symbolic link, which is not followed .*cp -rL"):
            backend.get(key)
        with pytest.raises(StorageError, match=f"{key} is a symbolic link"):
            backend.get_range(key, 0, 3)
        assert backend.size(key) is None
    assert backend.list_keys("") == ["a/b"]
    assert [info.key for info in backend.list_objects("")] == ["a/b"]
    assert backend.list_names("a") == ["b", "link", "lost"]


def test_nothing_is_listed_or_deleted_through_a_link_to_a_folder(
    backend: RetryingBackend, root: Path, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "key").write_text("key")
    (private / "1.partial").write_text("another's")
    (root / "a" / "link").symlink_to(private)
    works: list[Callable[[], object]] = [
        lambda: backend.delete("a/link/key"),
        lambda: backend.delete_keys(["a/link/key"]),
    ]
    for work in works:
        with pytest.raises(StorageError, match="run/a/link is a symbolic link"):
            work()
    assert backend.list_keys("") == ["a/b"]
    assert backend.list_unfinished() == []
    backend.delete("a/link")
    assert backend.list_names("a") == ["b"]
    assert names_in(private) == ["1.partial", "key"]


def test_a_flush_brings_what_was_written_to_the_disk_and_nothing_else(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def noted(flush: Callable[[int], None]) -> Callable[[int], None]:
        def work(descriptor: int) -> None:
            flushed.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            flush(descriptor)

        return work

    monkeypatch.setattr(os, "fdatasync", noted(os.fdatasync))
    monkeypatch.setattr(os, "fsync", noted(os.fsync))
    monkeypatch.setattr(os, "sync", lambda: flushed.append("everything"))
    backend = LocalBackend(str(root))
    backend.put("a/b/c.0", [b"."])
    backend.create("a/b/zarr.json", b"{}")
    backend.put("gone", [b"."])
    backend.delete_keys(["gone"])
    backend.flush()
    folders = [root.parent, root, root / "a", root / "a" / "b"]
    assert sorted(flushed) == sorted(map(str, [*folders, root / "a" / "b" / "c.0", root / "a" / "b" / "zarr.json"]))
    flushed.clear()
    backend.flush()
    assert flushed == [], "nothing was written since"
    backend.put("zarr.json", [b"{}"])
    backend.flush()
    assert sorted(flushed) == sorted(map(str, [root.parent, root, root / "zarr.json"]))
    flushed.clear()
    monkeypatch.setattr(local, "_MAX_UNFLUSHED", 3)
    for number in range(9):
        backend.put(f"a/{number}", [b"."])
    backend.flush()
    assert flushed == ["everything"]


def test_a_flush_that_failed_is_made_again(backend: RetryingBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spoil(monkeypatch, "fdatasync", errno.EIO, times=1)
    backend.flush()
    assert calls[0] == 2


def test_a_flush_waits_for_what_another_thread_is_flushing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    flush_file = os.fdatasync

    def slow(descriptor: int) -> None:
        has_begun.set()
        may_end.wait(60)
        flush_file(descriptor)

    monkeypatch.setattr(os, "fdatasync", slow)
    backend = LocalBackend(str(root))
    backend.put("a", [b"."])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(backend.flush)
        assert has_begun.wait(60)
        second = pool.submit(backend.flush)
        try:
            # Nothing was written since, and yet "a" is not on the disk.
            with pytest.raises(TimeoutError):
                second.result(timeout=0.5)
        finally:
            may_end.set()
        first.result(60)
        second.result(60)


def test_the_run_itself_may_be_behind_a_link(backend: RetryingBackend, root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    linked = open_backend(tmp_path / "link")
    linked.put("a/c", [b"."])
    assert linked.list_keys("") == backend.list_keys("") == ["a/b", "a/c"]
    assert linked.get("a/b") == b"mine"


@pytest.mark.parametrize("write", ["put", "create"])
def test_a_folder_that_another_process_removed_is_made_again(backend: RetryingBackend, root: Path, write: str) -> None:
    shutil.rmtree(root)
    if write == "put":
        backend.put("a/c", [b"again"])
    else:
        assert backend.create("a/c", b"again")
    assert backend.get("a/c") == b"again"
    assert names_in(root / "a") == ["c"]


def test_a_folder_that_others_empty_is_written_into(root: Path) -> None:
    """Each removal of the last file removes the folder, which the other is about to write into."""

    def make_and_remove(number: int) -> None:
        backend = LocalBackend(str(root))
        for turn in range(300):
            assert backend.create(f"lease/{number}-{turn}", b"1")
            backend.delete_keys([f"lease/{number}-{turn}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make_and_remove, range(4)))


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_is_created_once_without_hard_links(
    backend: RetryingBackend, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    calls = spoil(monkeypatch, "link", number, times=10**6)
    assert backend.create("a/c", b"mine")
    assert not backend.create("a/c", b"another's")
    assert calls[0] == 2
    assert backend.get("a/c") == b"mine"
    assert names_in(root / "a") == ["b", "c"]


def test_who_can_create_a_file_in_no_way_is_told_of_hard_links(
    backend: RetryingBackend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "link", errno.EOPNOTSUPP, times=10**6)
    monkeypatch.setattr(local, "_library", object)  # a C library without renameat2
    with pytest.raises(StorageError, match=r"cannot write .*a/c: its file system has neither hard links nor .*another"):
        backend.create("a/c", b"mine")
    assert names_in(root / "a") == ["b"]


def test_everything_is_deleted_what_a_crash_left_too(backend: RetryingBackend, root: Path) -> None:
    (root / "1-2-3.partial").write_bytes(b".")
    backend.delete("")
    assert names_in(root) == []


def test_names_that_are_no_text_are_no_keys(backend: RetryingBackend, root: Path) -> None:
    Path(os.fsdecode(os.fsencode(root) + b"/a/\xff")).write_bytes(b".")
    Path(os.fsdecode(os.fsencode(root) + b"/\xfe")).mkdir()
    assert backend.list_keys("") == ["a/b"]
    assert (backend.list_names(""), backend.list_names("a")) == (["a"], ["b"])
    backend.delete("")
    assert names_in(root) == []


@pytest.mark.parametrize("path", ["a\0b", "file:///a%00b", "a\ud800", "~no-such-user/run"])
def test_what_cannot_be_a_path_is_a_mistake_in_the_url(path: str) -> None:
    with pytest.raises(UsageError, match="cannot be the path of a directory"):
        open_backend(path)


def test_what_a_terminal_would_obey_is_not_in_an_error(backend: RetryingBackend, root: Path) -> None:
    (root / "\x1b[2J").mkdir()
    (root / "\x1b]0;a").symlink_to(root)
    backend.put("b", [bytes(9)])
    works: list[Callable[[], object]] = [
        lambda: backend.get("\x1b[2J"),
        lambda: backend.get("\x1b]0;a"),
        lambda: backend.get("\x1b" * 300),
    ]
    for work in works:
        with pytest.raises(StorageError, match=r"\\x1b") as caught:
            work()
        assert str(caught.value).isprintable()
