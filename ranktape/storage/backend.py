"""What must a place be able to do to hold a run?

`Backend` is the whole of it: seven verbs over keys. Below it are a local directory (`local.py`) and any
fsspec file system (`remote.py`); everything above speaks only to this protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    import numpy as np
    from zarr.abc.store import Store

Buffer: TypeAlias = "bytes | memoryview | np.ndarray[Any, Any]"
"""Bytes to write; an array is contiguous."""


def byte_view(part: Buffer) -> memoryview:
    """The bytes of a part, without copying them."""
    view: memoryview = memoryview(part)  # type: ignore[arg-type]  # numpy's arrays are buffers; their stubs say 3.12+
    return view.cast("B")


class Backend(Protocol):
    """A place that holds a run, addressed by keys relative to the run's root.

    Every verb raises `StorageError`, with the place and the way out in its text, when the place cannot
    be reached, read or written. Safe for several threads.
    """

    url: str
    """Where the run is, without credentials."""
    is_shared: bool
    """Whether other processes see what is written; without it a run can be read, but not be recorded into."""

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Write an object of the joined parts. Atomic: readers see the whole of it or what was there before."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none, atomically; False if there was one."""
        ...

    def get(self, key: str) -> bytes | None:
        """The bytes of an object; None where there is none."""
        ...

    def exists(self, key: str) -> bool:
        """Whether there is an object."""
        ...

    def list_keys(self, prefix: str) -> list[str]:
        """The keys of all objects below a prefix, relative to it, sorted; none where nothing is there."""
        ...

    def list_names(self, prefix: str) -> list[str]:
        """The first segments of all keys below a prefix, sorted; none where nothing is there."""
        ...

    def delete(self, prefix: str) -> None:
        """Remove every object below a prefix; nothing happens where none is."""
        ...

    def flush(self) -> None:
        """Make everything that was written survive a loss of power."""
        ...

    def zarr_store(self) -> Store:
        """A read-only Zarr store over the run."""
        ...


def without_credentials(url: str) -> str:
    """The URL without a user name, password or query, fit to be shown and stored."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
