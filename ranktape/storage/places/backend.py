"""The protocol of a store, the deadlines of its requests, and the memory that they may take.

`Backend` is a protocol of a few operations on keys. It is implemented by a local directory (`local.py`), and by S3 and
any other file system of fsspec (`remote.py`). All other code uses the protocol only. `open_backend` (`urls.py`) returns
a backend that retries transient errors.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

from ranktape.errors import ObjectTooLargeError, StorageError
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    import numpy as np
    from _typeshed import WriteableBuffer


def available_nbytes(*, root: Path = Path("/")) -> int:
    """The memory that is available on the machine and in each memory cgroup of this process, in bytes.

    Page cache that the kernel can drop (`inactive_file`) counts as available. `root` is the parent of `/proc` and
    `/sys`.
    """
    amounts = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    lines = _read(root / "proc/meminfo").splitlines()
    amounts += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for group, names in _memory_cgroups(root):
        limit = _read(group / names.limit).strip()
        if not limit.isdigit() or int(limit) >= amounts[0]:
            continue
        rows = (line.split() for line in _read(group / "memory.stat").splitlines())
        droppable = sum(int(row[1]) for row in rows if row[0] == names.droppable)
        amounts.append(max(0, int(limit) - max(0, int(_read(group / names.usage) or 0) - droppable)))
    return min(amounts)


class _CgroupFiles(NamedTuple):
    """Names of the files of a memory cgroup, in one version of the interface."""

    limit: str
    usage: str
    droppable: str
    """The row of `memory.stat` with the page cache that the kernel drops first."""


_VERSION_2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")
_VERSION_1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@functools.cache
def _memory_cgroups(root: Path) -> list[tuple[Path, _CgroupFiles]]:
    """The cgroups that limit this process, from its own to the outermost one."""
    files = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", _VERSION_2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", _VERSION_1
        else:
            continue
        # A container that sees only its own part of the tree has its limits at the root, whatever the path.
        inner = PurePosixPath(path.removeprefix("/"))
        files += [(top / part, names) for part in (inner, *inner.parents) if ".." not in part.parts]
    return files


def expect_memory(nbytes: int, *, place: str) -> None:
    """Check that there is memory for an object before it is read; `place` is its URL.

    Raises:
        ObjectTooLargeError: there is not enough memory.
    """
    available = available_nbytes()
    if nbytes > available:
        raise ObjectTooLargeError(
            f"{place} takes {nbytes:,} bytes of memory, and {available:,} are available: it was not written by "
            f"ranktape, or has to be read on a larger machine"
        )


BUDGET_NBYTES = 256 << 20
"""The default budget for objects in memory, in bytes."""


class MemoryBudget:
    """A number of bytes that several threads share. A thread that needs more than the budget waits to be alone."""

    def __init__(self, nbytes: int = BUDGET_NBYTES) -> None:
        self._nbytes = nbytes
        self._num_taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Take some bytes of the budget, after waiting until they are available."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_taken or self._num_taken + nbytes <= self._nbytes)
            self._num_taken += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._num_taken -= nbytes
                self._changed.notify_all()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not on this system
        return ""


def nbytes_text(nbytes: float) -> str:
    """A size as text in decimal units, such as `1.5 MB`."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:  # noqa: PLR2004  (decimal units)
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"


Params = ParamSpec("Params")
Result = TypeVar("Result")

Buffer: TypeAlias = "bytes | memoryview | np.ndarray[Any, Any]"
"""Bytes to write. An array must be contiguous."""


def byte_view(part: Buffer) -> memoryview:
    """The bytes of a part, without a copy."""
    view: memoryview = memoryview(part)  # type: ignore[arg-type]  # numpy's arrays are buffers; their stubs say 3.12+
    return view.cast("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """An object in a listing, or a leftover: a partial file or an unfinished upload."""

    key: str
    """Key relative to the listed prefix. For a leftover, a name for `remove_unfinished` with the intended key in it."""
    nbytes: int
    """Size in bytes; 0 for a leftover whose size the store does not give."""
    modified: float
    """Time of the write by the store's clock, in seconds since the epoch; 0.0 if the store does not give it."""


class Backend(Protocol):
    """The store of a run, addressed by keys relative to the run's root.

    Every method, and every function that takes a backend, raises a `StorageError` with the URL and advice if the store
    cannot be reached, read or written: `UnreachableError` if a retry may help, otherwise one that names the reason.
    Safe for several threads, and in a forked child.
    """

    url: str
    """URL of the run, without credentials."""
    is_shared: bool
    """Whether other processes see written objects. Otherwise, runs can be read but not recorded."""

    def put(self, key: str, parts: Iterable[Buffer]) -> None:
        """Write an object from parts. Atomic: readers see the whole object or the previous one.

        Parts may be created while they are written. Each retry iterates them again.
        """
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if it does not exist, atomically; False if it exists."""
        ...

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        """The bytes of an object; None if it does not exist.

        Raises:
            ObjectTooLargeError: it is larger than `max_nbytes`. No more than that is read into memory.
        """
        ...

    def get_range(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of an object, clipped to its size; None if it does not exist.

        A negative `start` counts from the end.
        """
        ...

    def size(self, key: str) -> int | None:
        """The size of an object, in bytes; None if it does not exist."""
        ...

    def exists(self, key: str) -> bool:
        """Whether an object exists."""
        return self.size(key) is not None

    def list_keys(self, prefix: str) -> list[str]:
        """The keys of all objects below a prefix, relative to it, sorted; empty if there are none."""
        return [info.key for info in self.list_objects(prefix)]

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """All objects below a prefix with size and time, sorted by key; empty if there are none."""
        ...

    def list_names(self, prefix: str) -> list[str]:
        """The first segments of all keys below a prefix, sorted; empty if there are none."""
        ...

    def delete(self, prefix: str) -> None:
        """Delete an object, or every object below a prefix, if there are any."""
        folder = f"{prefix}/" if prefix else ""
        self.delete_keys([*([prefix] if prefix else []), *(folder + key for key in self.list_keys(prefix))])

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete many objects. Those that do not exist are ignored."""
        ...

    def list_unfinished(self) -> list[ObjectInfo]:
        """Unfinished writes, sorted by key. Those of running writers are included."""
        return []

    def remove_unfinished(self, debris: Sequence[ObjectInfo]) -> None:
        """Delete results of `list_unfinished`. Those that no longer exist are ignored."""
        assert not debris, "none was listed"

    def flush(self) -> None:
        """Make all writes survive a loss of power. Object stores do this before they answer a PUT."""
        return  # not abstract


def _forwarded(verb: Callable[Concatenate[Any, Params], Result]) -> Callable[Concatenate[Any, Params], Result]:
    @functools.wraps(verb)
    def forwarded(self: Any, /, *arguments: Params.args, **options: Params.kwargs) -> Result:
        result: Result = self.forward(lambda backend: getattr(backend, verb.__name__)(*arguments, **options))
        return result

    return forwarded


class ForwardingBackend(Backend):
    """A backend on top of another one, to which all methods are forwarded by `forward`."""

    def forward(self, work: Callable[[Any], Result]) -> Result:
        """The result of `work` on the wrapped backend."""
        raise NotImplementedError

    put = _forwarded(Backend.put)
    create = _forwarded(Backend.create)
    get = _forwarded(Backend.get)
    get_range = _forwarded(Backend.get_range)
    size = _forwarded(Backend.size)
    exists = _forwarded(Backend.exists)
    list_keys = _forwarded(Backend.list_keys)
    list_objects = _forwarded(Backend.list_objects)
    list_names = _forwarded(Backend.list_names)
    delete = _forwarded(Backend.delete)
    delete_keys = _forwarded(Backend.delete_keys)
    list_unfinished = _forwarded(Backend.list_unfinished)
    remove_unfinished = _forwarded(Backend.remove_unfinished)
    flush = _forwarded(Backend.flush)


def range_within(size: int, start: int, nbytes: int) -> tuple[int, int]:
    """The start and stop of a range, which may count from the end, in an object of `size` bytes."""
    begin = max(size + start, 0) if start < 0 else min(start, size)
    stop = min(begin + nbytes, size)
    return begin, stop


def too_large(place: str, max_nbytes: int) -> ObjectTooLargeError:
    """The error for an object that is larger than the limit for its kind."""
    return ObjectTooLargeError(
        f"{printable(place)} is larger than {max_nbytes:,} bytes, the most that is read of it here: it was not written "
        f"by ranktape, is damaged, or has to be read on a larger machine"
    )


def is_text(name: str) -> bool:
    """Whether a name is valid text. Python represents other file names with lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_escape(url: str, key: str) -> None:
    """Refuse a key that could name an object outside the run, or that stores do not allow.

    Raises:
        StorageError: the key is absolute, contains `..` or NUL, or is not valid text.
    """
    is_out = key.startswith("/") or "\0" in key or ".." in key.split("/")
    if is_out or not is_text(key):
        reason = "it leads out of the run" if is_out else "it is no text"
        raise StorageError(
            f"{key!r} is not the key of an object in {url}: {reason}: whoever wrote that made a mistake or means harm"
        )


def without_credentials(url: str) -> str:
    """The URL without user name, password and query, to be shown and stored."""
    protocol, separator, location = url.partition("://")
    location = location.partition("?")[0].partition("#")[0]
    host, slash, path = location.partition("/")
    _, colon, port = host.partition(":")
    if colon and "@" not in host and "@" in path and not port.isdigit():
        # The password contains a slash, so that it continues in what looks like the path.
        host, slash, path = location.rpartition("@")[2].partition("/")
    return f"{protocol.lower()}{separator}{host.rpartition('@')[2]}{slash}{path}"


class RangeFile(io.RawIOBase):
    """A file over bytes in a store. `fill` writes those from a position into a buffer and returns their number."""

    def __init__(self, nbytes: int, fill: Callable[[int, memoryview], int]) -> None:
        self._nbytes = nbytes
        self._fill = fill
        self._position = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill a buffer with the next bytes, and return their number."""
        target = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._position)]
        done = self._fill(self._position, target) if target.nbytes else 0
        self._position += done
        return done


REQUEST_SECONDS = 30.0
"""The default timeout of a request, in seconds."""

_SHORTEST_SECONDS = 0.05
"""The shortest timeout of a request, in seconds, so that a request at the deadline fails with its own error."""


class Deadline:
    """The time by which the requests of a call must end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Start the time again."""
        self.until = time.monotonic() + self._seconds


_current: ContextVar[Deadline | None] = ContextVar("ranktape_deadline", default=None)


@contextlib.contextmanager
def ended_by(deadline: Deadline) -> Iterator[None]:
    """A context in which the requests of this thread end by a deadline."""
    token = _current.set(deadline)
    try:
        yield
    finally:
        _current.reset(token)


def seconds_left() -> float:
    """The timeout of a request that starts now, in seconds; never 0."""
    deadline = _current.get()
    return REQUEST_SECONDS if deadline is None else max(deadline.until - time.monotonic(), _SHORTEST_SECONDS)


def answered() -> None:
    """Note that one of several requests of a call was answered, so that the next one has the full time."""
    deadline = _current.get()
    if deadline is not None:
        deadline.restart()
