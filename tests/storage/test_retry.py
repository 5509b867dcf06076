"""What do a server that fails, hangs or loses its answers, and a file system that stumbles, do to a backend?"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranktape.errors import AccessDeniedError, NoSpaceError, StorageError, UnreachableError
from ranktape.storage.places import remote
from ranktape.storage.places.urls import RetryingBackend, open_backend
from tests.exhaustive import exhaustive_but
from tests.s3 import S3Server
from tests.storage.flaky import CUT, DROP, HANG, LOSE, SLOW, TRICKLE, FlakyProxy, OpenFlaky

TRANSIENT = ((500, "InternalError"), (503, "SlowDown"), (429, "TooManyRequests"), (403, "RequestTimeTooSkewed"))


@pytest.mark.s3
class TestServers:
    @pytest.mark.parametrize("fault", [DROP, LOSE, *TRANSIENT])
    def test_what_may_pass_is_tried_again(self, proxy: FlakyProxy, open_flaky: OpenFlaky, fault: Any) -> None:
        backend = open_flaky()
        proxy.faults += [fault, fault]
        backend.put("a", [b"content"])
        assert proxy.requests == ["PUT"] * 3
        assert backend.failing_since is None
        proxy.faults += [fault, fault]
        assert backend.get("a") == b"content"
        proxy.faults += [fault]
        assert backend.list_keys("") == ["a"]

    def test_an_answer_that_is_cut_is_asked_for_again(self, proxy: FlakyProxy, open_flaky: OpenFlaky) -> None:
        backend = open_flaky()
        backend.put("a", [b"content"])
        for work, answer in ((lambda: backend.get("a"), b"content"), (lambda: backend.list_keys(""), ["a"])):
            proxy.faults += [CUT, CUT]
            assert work() == answer

    @pytest.mark.parametrize("fault", [DROP, LOSE, (409, "ConditionalRequestConflict")])
    @exhaustive_but("drop", reason="one fault is in make test")
    def test_who_lost_the_answer_to_a_creation_knows_that_it_was_his(
        self, proxy: FlakyProxy, open_flaky: OpenFlaky, fault: str
    ) -> None:
        backend = open_flaky()
        proxy.faults += [fault]
        assert backend.create("a", b"mine")
        proxy.faults += [fault]
        assert not backend.create("a", b"another's")
        assert backend.get("a") == b"mine"

    @pytest.mark.parametrize(
        ("fault", "kind"),
        [
            ((403, "AccessDenied"), AccessDeniedError),
            ((401, "Unauthorized"), AccessDeniedError),
            ((403, "QuotaExceeded"), NoSpaceError),
            ((507, "InsufficientStorage"), NoSpaceError),
            ((400, "InvalidRequest"), StorageError),
            ((501, "NotImplemented"), StorageError),
        ],
    )
    def test_what_will_not_pass_is_said_at_once(
        self, proxy: FlakyProxy, open_flaky: OpenFlaky, fault: tuple[int, str], kind: type[StorageError]
    ) -> None:
        backend = open_flaky()
        proxy.faults += [fault]
        said = rf"cannot write s3://bucket/run-\d+/a: .*(?:{fault[0]}|{fault[1]})"
        with pytest.raises(StorageError, match=said) as caught:
            backend.put("a", [b"."])
        assert type(caught.value) is kind
        assert not caught.value.is_transient
        assert proxy.requests == ["PUT"]

    @pytest.mark.parametrize("fault", [DROP, LOSE, (503, "SlowDown")])
    @exhaustive_but("drop", reason="one fault is in make test")
    def test_a_large_object_is_sent_again_whole(self, proxy: FlakyProxy, open_flaky: OpenFlaky, fault: Any) -> None:
        data = os.urandom(3 * 2**20)
        backend = open_flaky()
        proxy.faults += [fault, fault]
        backend.put("a", [memoryview(data)[:7], memoryview(data)[7:]])
        assert backend.get("a") == data

    @pytest.mark.parametrize(
        ("kind", "fault"), [(NoSpaceError, (507, "InsufficientStorage")), (AccessDeniedError, (403, "AccessDenied"))]
    )
    @pytest.mark.usefixtures("part_nbytes")
    def test_why_a_large_object_is_refused_is_said_at_once(
        self, proxy: FlakyProxy, open_flaky: OpenFlaky, kind: type[StorageError], fault: tuple[int, str]
    ) -> None:
        backend = open_flaky()
        # Of an object in parts it is the first part that is refused.
        passed_on: tuple[tuple[int, list[str]], ...] = ((3, []), (11, [""]))
        for num_mebibytes, before in passed_on:
            proxy.faults += [*before, fault]
            with pytest.raises(kind, match=r"cannot write s3://bucket/run-\d+/a: "):
                backend.put("a", [bytes(num_mebibytes * 2**20)])
            assert backend.size("a") is None
            assert backend.list_unfinished() == []

    @pytest.mark.usefixtures("part_nbytes")
    def test_a_part_that_failed_is_tried_again(self, proxy: FlakyProxy, open_flaky: OpenFlaky) -> None:
        backend = open_flaky()
        proxy.faults += ["", (503, "SlowDown")]
        backend.put("a", [bytes(11 * 2**20)])
        assert backend.size("a") == 11 * 2**20
        assert backend.list_unfinished() == []

    @pytest.mark.alone
    def test_a_server_that_hangs_ends_by_the_deadline(self, proxy: FlakyProxy, open_flaky: OpenFlaky) -> None:
        backend = open_flaky()
        backend.put("a", [b"."])
        hurried = backend.with_deadline(timeout_seconds=1)
        works: list[Callable[[], object]] = [
            lambda: hurried.put("b", [b"."]),
            lambda: hurried.put("b", [bytes(3 * 2**20)]),
            lambda: hurried.get("a"),
            lambda: hurried.list_keys(""),
        ]
        for work in works:
            proxy.faults[:] = [HANG] * 100
            begin = time.monotonic()
            with pytest.raises(UnreachableError, match=r"cannot .* s3://bucket/run"):
                work()
            assert time.monotonic() - begin < 12  # a client ends the silence of a server after 15
        proxy.faults.clear()
        assert backend.get("a") == b"."

    @pytest.mark.alone
    def test_a_server_that_is_gone_is_named(self, proxy: FlakyProxy, open_flaky: OpenFlaky) -> None:
        proxy.stop()
        backend = open_flaky(timeout_seconds=6)
        said = r"cannot read s3://bucket/run-\d+/a: .*check the URL.*tried [2-9] times"
        begin = time.monotonic()
        with pytest.raises(UnreachableError, match=said):
            backend.get("a")
        assert begin <= (backend.failing_since or 0) <= time.monotonic()

    def test_who_gives_up_is_not_kept(self, proxy: FlakyProxy, open_flaky: OpenFlaky) -> None:
        backend = open_flaky(timeout_seconds=60).with_deadline(give_up=lambda: len(proxy.requests) >= 3)
        proxy.faults += [(503, "SlowDown")] * 100
        begin = time.monotonic()
        with pytest.raises(UnreachableError, match="503"):
            backend.put("a", [b"."])
        assert len(proxy.requests) == 3
        assert time.monotonic() - begin < 40

    @pytest.mark.alone
    def test_a_view_has_a_deadline_of_its_own(self, proxy: FlakyProxy, open_flaky: OpenFlaky) -> None:
        backend = open_flaky(timeout_seconds=60)
        view = backend.with_deadline(timeout_seconds=0.5)
        proxy.faults += [(503, "SlowDown")] * 100
        with pytest.raises(UnreachableError):
            view.put("a", [b"."])
        proxy.faults.clear()
        since = view.failing_since
        assert since is not None
        assert backend.failing_since is None
        view.put("a", [b"."])
        assert view.failing_since is None
        assert backend.get("a") == b"."


@pytest.mark.alone
@pytest.mark.s3
def test_an_upload_that_goes_on_is_not_silence(
    proxy: FlakyProxy, open_flaky: OpenFlaky, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(remote._CONFIG, "read_timeout", 1)
    backend = open_flaky()
    proxy.faults += [TRICKLE]
    begin = time.monotonic()
    backend.put("a", [bytes(24 * 2**20)])
    assert time.monotonic() - begin > 2
    assert proxy.requests == ["PUT"]
    assert backend.size("a") == 24 * 2**20


@pytest.mark.alone
@pytest.mark.s3
def test_many_requests_that_are_answered_have_the_time_that_they_need(s3_server: S3Server, proxy: FlakyProxy) -> None:
    options = s3_server.storage_options | {"endpoint_url": proxy.endpoint_url}
    backend = open_backend(s3_server.new_url(), storage_options=options, timeout_seconds=1.5)
    keys = [f"{number:04}" for number in range(3000)]
    backend.put(keys[0], [b"."])
    proxy.faults += [SLOW] * 3
    begin = time.monotonic()
    backend.delete_keys(keys)
    assert time.monotonic() - begin > 2
    assert proxy.requests == ["PUT", "POST", "POST", "POST"]
    assert backend.list_keys("") == []


class TestFileSystems:
    """Habits of NFS and Lustre, played by the calls that Python makes of the operating system."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> RetryingBackend:
        backend = open_backend(tmp_path, timeout_seconds=60)
        backend.put("a/b", [b"old"])
        return backend

    @pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
    def test_attributes_that_are_stale_for_a_moment(
        self, backend: RetryingBackend, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        works: dict[str, Callable[[], bool]] = {
            "open": lambda: backend.get("a/b") == b"old",
            "lstat": lambda: backend.size("a/b") == 3,
            "scandir": lambda: backend.list_keys("") == ["a/b"],
            "listdir": lambda: backend.list_names("a") == ["b"],
        }
        for name, work in works.items():
            with monkeypatch.context() as patch:
                calls = spoil(patch, name, number, times=2)
                assert work()
                assert calls[0] >= 3, name

    def test_a_file_system_that_stays_stale_is_named(
        self, backend: RetryingBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spoil(monkeypatch, "lstat", errno.ESTALE, times=10**6)
        with pytest.raises(UnreachableError, match=r"cannot read .*a/b: Stale file handle: check the disk or the file"):
            backend.with_deadline(timeout_seconds=0.5).size("a/b")

    @pytest.mark.parametrize(
        ("number", "is_done"), [(errno.ENOENT, True), (errno.EIO, True), (errno.ESTALE, True), (errno.EIO, False)]
    )
    def test_a_rename_is_done_again_only_where_it_was_not_done(
        self, backend: RetryingBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, *, is_done: bool
    ) -> None:
        calls = spoil(monkeypatch, "rename", number, times=1, is_done=is_done)
        backend.put("a/b", [b"new"])
        assert calls[0] == (1 if is_done else 2)
        assert backend.get("a/b") == b"new"
        assert names_in(tmp_path / "a") == ["b"]

    def test_a_rename_that_stops_half_way_is_found_as_debris(
        self, backend: RetryingBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Not atomic: another name for the file, and the old one not taken away.
        def rename(source: str, target: str) -> None:
            Path(target).unlink(missing_ok=True)
            os.link(source, target)

        monkeypatch.setattr(os, "rename", rename)
        backend.put("a/b", [b"new"])
        assert backend.get("a/b") == b"new"
        found = backend.list_unfinished()
        assert [one.nbytes for one in found] == [3]
        backend.remove_unfinished(found)
        assert (backend.list_unfinished(), backend.get("a/b")) == ([], b"new")

    def test_a_link_that_was_done_counts_whatever_was_answered(
        self, backend: RetryingBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        spoil(monkeypatch, "link", errno.EEXIST, times=1, is_done=True)
        assert backend.create("a/c", b"mine")
        spoil(monkeypatch, "link", errno.EIO, times=1, is_done=True)
        assert backend.create("a/d", b"mine")
        assert not backend.create("a/c", b"another's")
        assert names_in(tmp_path / "a") == ["b", "c", "d"]

    @pytest.mark.parametrize(
        ("number", "kind"),
        [
            (errno.ENOSPC, NoSpaceError),
            (errno.EDQUOT, NoSpaceError),
            (errno.EROFS, AccessDeniedError),
            (errno.EACCES, AccessDeniedError),
            (errno.EPERM, AccessDeniedError),
            (errno.ENAMETOOLONG, StorageError),
        ],
    )
    def test_what_will_not_pass_is_said_at_once(
        self, backend: RetryingBackend, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageError]
    ) -> None:
        calls = spoil(monkeypatch, "writev", number, times=10)
        said = f"cannot write .*a/b: {os.strerror(number)}: .*choose another"
        with pytest.raises(StorageError, match=said) as caught:
            backend.put("a/b", [b"new"])
        assert type(caught.value) is kind
        assert calls[0] == 1
        assert backend.get("a/b") == b"old"
        assert names_in(Path(backend.url) / "a") == ["b"]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def spoil(patch: pytest.MonkeyPatch, name: str, number: int, *, times: int, is_done: bool = False) -> list[int]:
    """Let the next calls of a function of `os` fail, or be done and say that they failed; the count of its calls."""
    calls = [0]
    original = getattr(os, name)

    def spoiled(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] > times:
            return original(*arguments, **options)
        if is_done:
            original(*arguments, **options)
        raise OSError(number, os.strerror(number))

    patch.setattr(os, name, spoiled)
    return calls
