"""The protocol of a place that holds a run, the deadlines of requests to it, and the memory that they may take.

`Backend` is the whole of it: a few verbs over keys. Its implementations are a local directory (`local.py`), and S3 and
any other file system of fsspec (`remote.py`); everything above uses only this protocol. `open_backend` (`urls.py`)
gives one that tries again what may succeed later.
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
    """Bytes of memory that can still be taken, on the machine and in each memory cgroup that holds this process.

    Page cache that the kernel can drop (`inactive_file`) counts as available. `root` is where `/proc` and `/sys` are.
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
    """The cgroups that limit this process, the innermost first: its own and those around it."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", _VERSION_2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", _VERSION_1
        else:
            continue
        # A container that sees only its own part of the tree has its limits at the top, whatever the path says.
        inner = PurePosixPath(path.removeprefix("/"))
        found += [(top / part, names) for part in (inner, *inner.parents) if ".." not in part.parts]
    return found


def expect_memory(nbytes: int, *, place: str) -> None:
    """Make sure, before it is taken, that there is memory for so many bytes of what lies at a place.

    Raises:
        ObjectTooLargeError: there is not.
    """
    left = available_nbytes()
    if nbytes > left:
        raise ObjectTooLargeError(
            f"{place} takes {nbytes:,} bytes of memory, {left:,} are left here: it was not written by ranktape, or "
            f"has to be read on a larger machine"
        )


BUDGET_NBYTES = 256 << 20
"""Bytes of objects held in memory at once; one that is larger is held alone."""


class MemoryBudget:
    """Bytes that several threads may hold together; one that needs more than all of them holds them alone."""

    def __init__(self, nbytes: int = BUDGET_NBYTES) -> None:
        self._nbytes = nbytes
        self._num_taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Hold so many bytes; waits for others to give theirs back."""
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
    except OSError:  # not on this system; the machine's count stands
        return ""


def nbytes_text(nbytes: float) -> str:
    """A size for people, in units of 1,000 bytes: `1.5 MB`."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:  # noqa: PLR2004  (decimal units)
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"


Params = ParamSpec("Params")
Result = TypeVar("Result")

Buffer: TypeAlias = "bytes | memoryview | np.ndarray[Any, Any]"
"""Bytes to write; an array is contiguous."""


def byte_view(part: Buffer) -> memoryview:
    """The bytes of a part, without copying them."""
    view: memoryview = memoryview(part)  # type: ignore[arg-type]  # numpy's arrays are buffers; their stubs say 3.12+
    return view.cast("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """What a listing tells of an object, or of debris: a partial file, an upload that nobody completed."""

    key: str
    """Relative to the prefix that was listed; of debris it names it to `remove_debris`, and holds the key to write."""
    nbytes: int
    """Its size; of debris 0 where the store does not say."""
    modified: float
    """When it was written by the store's clock, in seconds since the epoch; 0.0 where the store does not say."""


class Backend(Protocol):
    """A place that holds a run, addressed by keys relative to the run's root.

    Every verb, and so every function that is given a backend, raises a `StorageError`, with the place and the way out
    in its text, when the place cannot be reached, read or written: `UnreachableError` where trying again may help,
    otherwise one that names why.
    Safe for several threads, and in a forked child.
    """

    url: str
    """Where the run is, without credentials."""
    is_shared: bool
    """Whether other processes see what is written; without it a run can be read, but not be recorded into."""

    def put(self, key: str, parts: Iterable[Buffer]) -> None:
        """Write an object of the joined parts. Atomic: readers see the whole of it or what was there before.

        Parts may be made while they are written; each try asks for them anew.
        """
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none, atomically; False if there was another one."""
        ...

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        """The bytes of an object; None where there is none.

        Raises:
            ObjectTooLargeError: it is larger than `max_nbytes`; no more than that was held in memory.
        """
        ...

    def get_range(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of an object, clipped to what it has; a negative `start` counts from its end.

        None where there is no object.
        """
        ...

    def size(self, key: str) -> int | None:
        """The bytes that an object has; None where there is none."""
        ...

    def exists(self, key: str) -> bool:
        """Whether there is an object."""
        return self.size(key) is not None

    def list_keys(self, prefix: str) -> list[str]:
        """The keys of all objects below a prefix, relative to it, sorted; none where nothing is there."""
        return [info.key for info in self.list_objects(prefix)]

    def list_objects(self, prefix: str) -> list[ObjectInfo]:
        """All objects below a prefix with size and time, sorted by key; none where nothing is there."""
        ...

    def list_names(self, prefix: str) -> list[str]:
        """The first segments of all keys below a prefix, sorted; none where nothing is there."""
        ...

    def delete(self, prefix: str) -> None:
        """Remove an object, or every object below a prefix; nothing happens where none is."""
        folder = f"{prefix}/" if prefix else ""
        self.delete_keys([*([prefix] if prefix else []), *(folder + key for key in self.list_keys(prefix))])

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Remove many objects at once; those that are not there are passed over."""
        ...

    def list_debris(self) -> list[ObjectInfo]:
        """What writers left unfinished, sorted by key; a writer that still works at it is not told apart."""
        return []

    def remove_debris(self, debris: Sequence[ObjectInfo]) -> None:
        """Remove what `list_debris` found; what is gone already is passed over."""
        assert not debris, "none was listed"

    def flush(self) -> None:
        """Make everything that was written survive a loss of power; object stores answer a PUT when it does."""
        return  # not abstract


def _forwarded(verb: Callable[Concatenate[Any, Params], Result]) -> Callable[Concatenate[Any, Params], Result]:
    @functools.wraps(verb)
    def forwarded(self: Any, /, *arguments: Params.args, **options: Params.kwargs) -> Result:
        result: Result = self.forward(lambda backend: getattr(backend, verb.__name__)(*arguments, **options))
        return result

    return forwarded


class ForwardingBackend(Backend):
    """A backend over another one: what is not said otherwise goes through `forward`."""

    def forward(self, work: Callable[[Any], Result]) -> Result:
        """What `work` makes of the backend below."""
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
    list_debris = _forwarded(Backend.list_debris)
    remove_debris = _forwarded(Backend.remove_debris)
    flush = _forwarded(Backend.flush)


def range_within(size: int, start: int, nbytes: int) -> tuple[int, int]:
    """Where a range that may count from the end begins and stops in an object of `size` bytes."""
    begin = max(size + start, 0) if start < 0 else min(start, size)
    stop = min(begin + nbytes, size)
    return begin, stop


def too_large(place: str, max_nbytes: int) -> ObjectTooLargeError:
    """The error for an object that is larger than what it is read as may be."""
    return ObjectTooLargeError(
        f"{printable(place)} is larger than {max_nbytes:,} bytes, the most that is read of it here: it was not written "
        f"by ranktape, is damaged, or has to be read on a larger machine"
    )


def is_text(name: str) -> bool:
    """Whether a name is text; what the operating system knows as bytes that are none comes with lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_escape(url: str, key: str) -> None:
    """Raise for a key that could name something outside the run, or that no store can hold.

    Raises:
        StorageError: it is absolute, goes upwards, holds a NUL, or is no text.
    """
    is_out = key.startswith("/") or "\0" in key or ".." in key.split("/")
    if is_out or not is_text(key):
        why = "it leads out of the run" if is_out else "it is no text"
        raise StorageError(
            f"{key!r} is not the key of an object in {url}: {why}: whoever wrote that made a mistake or means harm"
        )


def without_credentials(url: str) -> str:
    """The URL without a user name, password or query, fit to be shown and stored."""
    protocol, separator, rest = url.partition("://")
    rest = rest.partition("?")[0].partition("#")[0]
    host, slash, path = rest.partition("/")
    _, colon, port = host.partition(":")
    if colon and "@" not in host and "@" in path and not port.isdigit():
        # A password with a slash in it: what looks like the path goes on with it.
        host, slash, path = rest.rpartition("@")[2].partition("/")
    return f"{protocol.lower()}{separator}{host.rpartition('@')[2]}{slash}{path}"


class RangeFile(io.RawIOBase):
    """Bytes that lie elsewhere, as a file: `fill` writes those from a position on into a buffer, and says how many."""

    def __init__(self, nbytes: int, fill: Callable[[int, memoryview], int]) -> None:
        self._nbytes = nbytes
        self._fill = fill
        self._position = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill a buffer, as far as there are bytes."""
        target = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._position)]
        done = self._fill(self._position, target) if target.nbytes else 0
        self._position += done
        return done


REQUEST_SECONDS = 30.0
"""What a request may take when nobody said anything."""

_SHORTEST_SECONDS = 0.05
"""A request that is begun at the deadline still gets a moment, so that it fails by its own words."""


class Deadline:
    """By when the requests of a call must end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Count from now."""
        self.until = time.monotonic() + self._seconds


_current: ContextVar[Deadline | None] = ContextVar("ranktape_deadline", default=None)


@contextlib.contextmanager
def ended_by(deadline: Deadline) -> Iterator[None]:
    """Requests that this thread makes in the block end by the deadline."""
    token = _current.set(deadline)
    try:
        yield
    finally:
        _current.reset(token)


def seconds_left() -> float:
    """How long a request that begins now may take; never 0."""
    deadline = _current.get()
    return REQUEST_SECONDS if deadline is None else max(deadline.until - time.monotonic(), _SHORTEST_SECONDS)


def answered() -> None:
    """One of the many requests of a call was answered: the next has the whole time again."""
    deadline = _current.get()
    if deadline is not None:
        deadline.restart()
