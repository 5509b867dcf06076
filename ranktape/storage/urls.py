"""Which backend does a URL name, and which options go with it?"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ranktape.errors import UsageError

if TYPE_CHECKING:
    from ranktape.storage.backend import Backend

_LOCAL_PROTOCOLS = frozenset({"file", "local"})


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
