"""What must a place be able to do to hold a run?

`Backend` is the whole of it: seven verbs over keys. Below it are a local directory (`local.py`) and any
fsspec file system (`remote.py`); everything above speaks only to this protocol.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from urllib.parse import unquote, urlsplit, urlunsplit

from ranktape.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from zarr.abc.store import Store

Buffer: TypeAlias = "bytes | memoryview | np.ndarray[Any, Any]"
"""Bytes to write; an array is contiguous."""


_LOCAL_PROTOCOLS = frozenset({"file", "local"})


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


def open_backend(url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Backend:
    """The backend for a URL; a plain path and `file://` are local directories. Nothing is created.

    A `file://` URL is percent-decoded, a plain path is taken as it is.

    Raises:
        UsageError: the URL is empty or mistyped, its protocol is not one that fsspec knows, or it names a file of
            another host.
    """
    text = os.fspath(url)
    if not text:
        raise UsageError("the URL of the run is empty: give a directory or a URL such as s3://bucket/run")
    protocol, separator, path = text.partition("://")
    if not separator or protocol.lower() in _LOCAL_PROTOCOLS:
        from ranktape.storage.local import LocalBackend

        if not separator:
            _refuse_single_slash(text)
        return LocalBackend(_local_path(text, path) if separator else text)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.:-]*", protocol):
        raise UsageError(f"{text!r} is not a URL: give a directory or a URL such as s3://bucket/run")
    from ranktape.storage.remote import RemoteBackend

    return RemoteBackend(text, storage_options=storage_options or {})


def _refuse_single_slash(text: str) -> None:
    """Of a plain path: that it is not a URL with a slash too few, which would become a directory."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):(/.*)", text)
    if match is None:
        return
    import fsspec

    protocol = match[1].lower()
    if protocol in _LOCAL_PROTOCOLS:
        raise UsageError(f"{text!r} is not a URL: write {protocol}://{match[2]}, or the path alone")
    if protocol in fsspec.available_protocols():
        raise UsageError(
            f"{text!r} is not a URL: write {protocol}:/{match[2]}, or ./{text} for a directory of that name"
        )


def _local_path(url: str, rest: str) -> str:
    """The path that a URL of a file names; `rest` is what follows its `://`."""
    host, slash, path = rest.partition("/")
    if not slash or host not in {"", "localhost"}:
        raise UsageError(
            f"{url!r} does not name a directory of this machine: write file:///absolute/path, or a path without file://"
        )
    return "/" + unquote(path)


def parse_storage_options(text: str) -> dict[str, Any]:
    """The storage options that a command line has as JSON.

    Raises:
        UsageError: it is not a JSON object.
    """
    try:
        options = json.loads(text)
    except ValueError as error:
        raise UsageError(
            f"--storage-options is not JSON ({error}): give an object such as '{{\"anon\": true}}'"
        ) from error
    if not isinstance(options, dict):
        kind = type(options).__name__
        raise UsageError(f"--storage-options is not a JSON object but a {kind}: give one such as '{{\"anon\": true}}'")
    return options


def without_credentials(url: str) -> str:
    """The URL without a user name, password or query, fit to be shown and stored."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
