"""What does every place that can hold a run promise?

A class of tests for all of them, and the fork that some need.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ranktape.errors import ObjectTooLargeError, StorageError
from ranktape.storage.places.backend import Backend


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
        assert backend.size("none") == 0
        assert backend.exists("none")

    def test_what_is_not_there_is_none(self, backend: Backend) -> None:
        assert backend.get("missing/key") is None
        assert not backend.exists("missing/key")
        assert backend.list_keys("missing") == []
        assert backend.list_names("missing") == []
        assert backend.get("missing", max_nbytes=1) is None
        assert backend.get_range("missing", 0, 1) is None
        assert backend.get_range("missing", -1, 1) is None
        assert backend.get_range("missing", 0, 0) is None
        assert backend.size("missing/key") is None
        assert backend.list_objects("missing") == []
        assert backend.list_unfinished() == []
        backend.delete("missing")
        backend.delete_keys(["missing/key", "missing"])
        backend.delete_keys([])
        backend.remove_unfinished([])

    def test_a_folder_is_no_object(self, backend: Backend) -> None:
        backend.put("a/b", [b"."])
        assert not backend.exists("a")
        assert backend.size("a") is None

    def test_what_is_too_large_is_not_read(self, backend: Backend) -> None:
        backend.put("a", [b"12345"])
        backend.put("empty", [b""])
        assert backend.get("a", max_nbytes=5) == b"12345"
        assert backend.get("empty", max_nbytes=0) == b""
        with pytest.raises(ObjectTooLargeError, match="a is larger than 4 bytes"):
            backend.get("a", max_nbytes=4)
        assert backend.get("a") == b"12345"

    @pytest.mark.parametrize(
        ("start", "nbytes", "expected"),
        [
            (0, 3, b"012"),
            (7, 3, b"789"),
            (7, 30, b"789"),
            (10, 1, b""),
            (99, 1, b""),
            (3, 0, b""),
            (-3, 3, b"789"),
            (-3, 2, b"78"),
            (-3, 30, b"789"),
            (-99, 99, b"0123456789"),
            (-99, 2, b"01"),
            (-1, 0, b""),
        ],
    )
    def test_ranges_are_clipped_to_the_object(self, backend: Backend, start: int, nbytes: int, expected: bytes) -> None:
        backend.put("digits", [b"0123456789"])
        backend.put("empty", [])
        assert backend.get_range("digits", start, nbytes) == expected
        assert backend.get_range("empty", start, nbytes) == b""

    def test_sizes_and_times_are_listed(self, backend: Backend) -> None:
        before = time.time()
        backend.put("x/b", [bytes(7)])
        backend.put("x/a/c", [b""])
        backend.put("y", [b"."])
        found = backend.list_objects("x")
        assert [(info.key, info.nbytes) for info in found] == [("a/c", 0), ("b", 7)]
        # S3 tells whole seconds, and a file system's clock ticks in steps.
        assert all(before - 2 < info.modified < time.time() + 2 for info in found)
        assert [info.key for info in backend.list_objects("")] == ["x/a/c", "x/b", "y"]

    def test_many_are_deleted_at_once(self, backend: Backend) -> None:
        keys = [f"many/{index}/{index}" for index in range(30)]
        for key in keys:
            backend.put(key, [b"."])
        backend.put("many/stays", [b"."])
        backend.delete_keys([*keys, "many/was never there"])
        assert backend.list_names("many") == ["stays"]
        backend.put(keys[0], [b"again"])
        assert backend.get(keys[0]) == b"again"

    def test_more_are_listed_than_fit_a_page(self, backend: Backend) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda index: backend.put(f"page/{index:04}/x", [b"."]), range(1005)))
        assert len(backend.list_keys("page")) == len(backend.list_names("page")) == 1005
        backend.delete("page")
        assert backend.list_keys("") == []

    def test_one_object_can_be_deleted(self, backend: Backend) -> None:
        backend.put("a", [b"."])
        backend.put("ab", [b"."])
        backend.delete("a")
        assert backend.list_keys("") == ["ab"]

    @pytest.mark.parametrize(
        ("key", "match"),
        [
            *((key, "leads out of the run") for key in ("../a", "a/../../b", "/etc/passwd", "a\0b", "..")),
            *((key, "it is no text") for key in ("a\ud800", "\udcff/a")),
        ],
    )
    def test_keys_are_text_and_do_not_lead_out_of_the_run(self, backend: Backend, key: str, match: str) -> None:
        works: list[Callable[[], object]] = [
            lambda: backend.get(key),
            lambda: backend.put(key, [b"."]),
            lambda: backend.create(key, b"."),
            lambda: backend.size(key),
            lambda: backend.list_keys(key),
            lambda: backend.delete(key),
            lambda: backend.delete_keys([key]),
        ]
        for work in works:
            with pytest.raises(StorageError, match=match):
                work()

    def test_a_process_that_is_forked_uses_it(self, backend: Backend) -> None:
        if not backend.is_shared:
            pytest.skip("each process has a memory of its own")
        backend.put("parent", [b"."])
        assert in_fork(lambda: backend.put("child", [backend.get("parent") or b""])) == 0
        begin = time.monotonic()
        assert backend.get("child") == b"."
        assert time.monotonic() - begin < 12  # the child did not take the parent's connection away

    def test_it_can_be_sent_to_another_process(self, backend: Backend) -> None:
        backend.put("a", [b"."])
        assert pickle.loads(pickle.dumps(backend)).get("a") == b"."  # noqa: S301  # our own

    def test_an_object_is_created_once(self, backend: Backend) -> None:
        assert backend.create("deep/er/once", b"first")
        assert not backend.create("deep/er/once", b"second")
        assert backend.get("deep/er/once") == b"first"

    def test_one_of_many_creators_wins(self, backend: Backend) -> None:
        barrier = threading.Barrier(4)

        def create(number: int) -> bool:
            barrier.wait()
            return backend.create("race", str(number).encode())

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(create, range(4)))
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

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4)))
        assert len(backend.list_keys("")) == 20
        assert backend.get("t3/4") == b"\x03" * 1000

    def test_flushing_raises_nothing(self, backend: Backend) -> None:
        backend.put("a", [b"."])
        backend.flush()


def in_fork(work: Callable[[], object]) -> int:
    """The exit status of a forked process that does the work; 0 when it raised nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 and later: this process has threads
        child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001  # whatever it is, this process must not go on
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the forked process hangs")
