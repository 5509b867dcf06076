"""Does one launch at a time have the right to record into a run, and does nobody keep it beyond its end?"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ranktape.errors import AccessDeniedError, NoSpaceError, RunExistsError, StorageError, UnreachableError
from ranktape.storage import open_run
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Launch
from ranktape.storage.format.documents import write_group
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.copy import copy_run
from ranktape.storage.places import local
from ranktape.storage.places.urls import RetryingBackend, open_backend
from ranktape.storage.recording import start as lease
from ranktape.storage.recording.start import Lease, claim_run
from tests.exhaustive import exhaustive_but
from tests.runs import start
from tests.s3 import S3Server
from tests.storage.flaky import HANG, FlakyProxy, OpenFlaky

RENEW_SECONDS = 0.1
EXPIRY_SECONDS = 1.0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", RENEW_SECONDS)
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", EXPIRY_SECONDS)
    monkeypatch.setattr(lease, "_LOOK_SECONDS", RENEW_SECONDS / 2)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> RetryingBackend:
    if request.param == "local":
        return open_backend(tmp_path / "run")
    server: S3Server = request.getfixturevalue("s3_server")
    return open_backend(server.new_url(), storage_options=server.storage_options)


def launch(name: str, *, restart: int = 0) -> Launch:
    return Launch(launch_id=name, restart=restart, world_size=1)


def leave(backend: RetryingBackend, name: str) -> None:
    """A lease whose holder was killed."""
    left = Lease(backend, launch=launch(name))
    left._is_over.set()
    left._thread.join()


def test_a_run_that_is_recorded_is_nobody_elses(backend: RetryingBackend) -> None:
    with Lease(backend, launch=launch("first")):
        with pytest.raises(RunExistsError) as caught:
            Lease(backend, launch=launch("second"))
        assert f"another launch records into the run at {backend.url}" in str(caught.value)
        assert f"(process {os.getpid()} on {socket.gethostname()})" in str(caught.value)
        assert "once its processes are gone, the run is free after 1 s" in str(caught.value)
    assert backend.list_keys("") == []
    with Lease(backend, launch=launch("second")):
        assert backend.list_names("") == ["lease_000"]


def test_of_two_that_ask_at_once_none_is_sure(backend: RetryingBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(key: str, data: bytes) -> bool:
        # The other one had seen a lease that is gone by now, and has the next number.
        write_group(backend, layout.lease_path(1), {"launch_id": "other", "host": "there", "process": 7})
        return made(key, data)

    made = backend.create
    monkeypatch.setattr(backend, "create", create)
    with pytest.raises(RunExistsError, match=r"another launch records into the run at .* \(process 7 on there\)"):
        Lease(backend, launch=launch("ours"))
    assert backend.list_names("") == ["lease_001"]


@exhaustive_but("local", reason="a folder is in make test")
def test_a_lease_of_the_dead_is_passed_over(backend: RetryingBackend) -> None:
    leave(backend, "killed")
    begin = time.monotonic()
    with Lease(backend, launch=launch("next")):
        assert time.monotonic() - begin > EXPIRY_SECONDS
        assert backend.list_names("") == ["lease_001"]


def test_a_restart_of_the_same_launch_takes_over_at_once(
    backend: RetryingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(backend, "other")
    with Lease(backend, launch=launch("same")) as first:
        monkeypatch.setattr(lease, "EXPIRY_SECONDS", 600.0)  # who waits for that is refused: the first one renews
        with Lease(backend, launch=launch("same", restart=1)):
            first._thread.join(timeout=60)  # it renews no more
            assert first.lost is None
            assert backend.list_names("") == ["lease_002"]
    assert backend.list_keys("") == []


@pytest.mark.parametrize("left", [False, True])
@exhaustive_but("local-False", "local-True", reason="a folder is in make test")
def test_one_of_many_who_want_it_gets_it(backend: RetryingBackend, *, left: bool) -> None:
    if left:
        leave(backend, "killed")

    def want(number: int) -> Lease | str:
        try:
            return Lease(backend, launch=launch(f"launch-{number}"))
        except RunExistsError as error:
            return str(error)

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(want, range(6)))
    [held] = [result for result in results if isinstance(result, Lease)]
    assert all("another launch records into the run" in result for result in results if isinstance(result, str))
    assert backend.list_names("") == [f"lease_{held._number:03}"]
    held.release()


def test_a_lease_that_is_just_being_written_is_anothers(tmp_path: Path) -> None:
    backend = open_backend(tmp_path / "run")
    (tmp_path / "run" / "lease_000").mkdir(parents=True)  # before its document, as the directory of any file
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(Lease, backend, launch=launch("later"))
        time.sleep(EXPIRY_SECONDS / 3)
        write_group(backend, layout.lease_path(0), {"launch_id": "first", "host": "h", "process": 1, "renewed": 0.0})
        with pytest.raises(RunExistsError, match="another launch records"):
            later.result()
    assert backend.list_names("") == ["lease_000"]


@pytest.mark.parametrize("said", [{}, {"launch_id": "other", "host": "node-3"}, {"process": 7}])
def test_a_lease_of_another_version_is_anothers(backend: RetryingBackend, said: dict[str, Any]) -> None:
    numbers = iter(range(100))

    def renew() -> None:
        write_group(backend, layout.lease_path(0), {**said, "renewed": float(next(numbers))})

    renew()
    is_over = threading.Event()

    def holder() -> None:
        while not is_over.wait(0.2):
            renew()

    thread = threading.Thread(target=holder)
    thread.start()
    try:
        with pytest.raises(RunExistsError, match=r"another launch records .* process"):
            Lease(backend, launch=Launch(launch_id="mine", restart=0, world_size=1))
    finally:
        is_over.set()
        thread.join()


def test_who_was_not_heard_of_learns_that_another_has_the_run(
    backend: RetryingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled = Lease(backend, launch=launch("stalled"))
    with monkeypatch.context() as patched:
        # As after an outage: nothing of it arrives for longer than a lease lasts.
        patched.setattr(lease, "write_group", lambda *_: None)
        other = Lease(backend, launch=launch("other"))
    stalled._thread.join(timeout=60)
    assert "another launch continues the run" in str(stalled.lost)
    stalled.release()
    assert backend.list_names("") == ["lease_001"]
    assert other.lost is None
    other.release()


def test_a_lease_is_a_part_of_a_run_and_of_no_copy(tmp_path: Path) -> None:
    start(str(tmp_path / "run"))
    backend = open_backend(tmp_path / "run")
    leave(backend, "killed")
    assert not [finding for finding in check_run(backend).findings if "lease" in finding.text()]
    report = copy_run(backend, open_backend(tmp_path / "copy"))
    assert report.left_out == []
    assert not [name for name in open_backend(tmp_path / "copy").list_names("") if "lease" in name]
    assert open_run(tmp_path / "run").iterations == []


def test_nothing_is_written_where_nothing_may_be_recorded(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(RunExistsError, match=r"not empty and holds no run \(there is 'notes.txt'\)"):
        claim_run(open_backend(tmp_path / "mine"), launch=launch("new"), resume=False, overwrite=True)
    start(str(tmp_path / "run"))
    with pytest.raises(RunExistsError, match="add --resume"):
        claim_run(open_backend(tmp_path / "run"), launch=launch("new"), resume=False, overwrite=False)
    assert not list(tmp_path.rglob("lease*"))


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, NoSpaceError), (errno.EACCES, AccessDeniedError), (errno.EROFS, AccessDeniedError)],
)
def test_a_disk_that_takes_no_lease_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageError]
) -> None:
    backend = open_backend(tmp_path / "run")
    with monkeypatch.context() as patched:

        def refuse(*_: object) -> int:
            raise OSError(number, os.strerror(number))

        patched.setattr(local, "_write_all", refuse)
        with pytest.raises(kind, match=r"cannot write .*run/lease_000/zarr\.json: .*choose another URL"):
            Lease(backend, launch=launch("first"))
        assert backend.list_unfinished() == []
    with Lease(backend, launch=launch("second")) as held:
        with monkeypatch.context() as patched:
            patched.setattr(local, "_write_all", refuse)
            time.sleep(3 * RENEW_SECONDS)
            assert held._thread.is_alive()
        assert backend.list_keys("") == [f"lease_{held._number:03}/zarr.json"]
    assert backend.list_keys("") == []


@pytest.mark.s3
def test_a_server_that_dies_keeps_nobody(proxy: FlakyProxy, open_flaky: OpenFlaky) -> None:
    backend = open_flaky(timeout_seconds=300)
    held = Lease(backend, launch=launch("first"))
    proxy.stop()
    held.release()  # by the deadline of a renewal, and not by that of the backend, which is longer than a test
    with pytest.raises(UnreachableError, match=r"cannot list s3://bucket/run-\d+.*check the URL"):
        Lease(backend.with_deadline(timeout_seconds=1), launch=launch("second"))


@pytest.mark.s3
def test_a_store_that_refuses_or_hangs_is_named(proxy: FlakyProxy, open_flaky: OpenFlaky) -> None:
    backend = open_flaky(timeout_seconds=30)
    proxy.faults += ["", (403, "AccessDenied")]
    with pytest.raises(AccessDeniedError, match=r"cannot write s3://.*lease_000.*lack the permission"):
        Lease(backend, launch=launch("first"))
    proxy.faults += [HANG] * 100
    with pytest.raises(UnreachableError, match=r"cannot list s3://"):
        Lease(backend.with_deadline(timeout_seconds=2), launch=launch("first"))
    proxy.faults.clear()
    with Lease(backend, launch=launch("first")) as held:
        proxy.faults += [(503, "SlowDown")] * 100
        time.sleep(3 * RENEW_SECONDS)
        proxy.faults.clear()
        assert held._thread.is_alive()
    assert backend.list_keys("") == []
