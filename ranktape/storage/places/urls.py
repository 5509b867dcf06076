"""Opens the backend of a URL, which retries requests until a deadline.

A request with a transient error (`StorageError.is_transient`) is repeated after a growing random pause, so that a
thousand ranks do not retry at the same time. All methods can be repeated: writing the same object twice has the effect
of one write, and if `create` finds an object, its contents tell who wrote it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from ranktape.errors import StorageError, UsageError
from ranktape.storage.places.backend import (
    Backend,
    Deadline,
    ForwardingBackend,
    Result,
    available_nbytes,
    ended_by,
    expect_memory,
    is_text,
    without_credentials,
)

TIMEOUT_SECONDS = 30.0
"""The default deadline of a call, in seconds."""

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_GROWTH = 2.0

_LARGE_NBYTES = 64 << 20
"""The size of a range from which the available memory is checked, in bytes."""

_LOOK_SECONDS = 0.25
"""The interval at which `give_up` is called during a pause, in seconds."""


class RetryingBackend(ForwardingBackend):
    """A backend that retries transient errors until a deadline."""

    def __init__(
        self, backend: Backend, *, timeout_seconds: float = TIMEOUT_SECONDS, give_up: Callable[[], bool] | None = None
    ) -> None:
        self.url = backend.url
        self.is_shared = backend.is_shared
        self.failing_since: float | None = None
        """Time of the first failure since the last success, by `time.monotonic`; None if there is none."""
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._give_up = give_up

    def with_deadline(
        self, *, timeout_seconds: float | None = None, give_up: Callable[[], bool] | None = None
    ) -> RetryingBackend:
        """The same store with another deadline. It stops retrying when `give_up` returns True."""
        return RetryingBackend(
            self._backend,
            timeout_seconds=self._timeout_seconds if timeout_seconds is None else timeout_seconds,
            give_up=give_up,
        )

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if it does not exist; False if another one exists."""
        # An earlier attempt, here or in the client, may have succeeded although its answer was lost.
        return self.forward(lambda backend: backend.create(key, data) or backend.get(key) == data)

    def get(self, key: str, *, max_nbytes: int | None = None) -> bytes | None:
        """The bytes of an object; None if it does not exist. Objects larger than the available memory are refused."""
        most = available_nbytes() if max_nbytes is None else max_nbytes
        return self.forward(lambda backend: backend.get(key, max_nbytes=most))

    def get_range(self, key: str, start: int, nbytes: int) -> bytes | None:
        """Some bytes of an object, clipped to its size; None if it does not exist."""
        if nbytes > _LARGE_NBYTES:
            expect_memory(min(nbytes, self.size(key) or 0), place=f"{self.url}/{key}")
        return self.forward(lambda backend: backend.get_range(key, start, nbytes))

    def forward(self, work: Callable[[Backend], Result]) -> Result:
        """The result of `work` on the wrapped backend, retried until success, a lasting error, or the deadline."""
        deadline = Deadline(self._timeout_seconds)
        begin = time.monotonic()
        pause = _FIRST_PAUSE_SECONDS
        for tries in itertools.count(1):
            try:
                with ended_by(deadline):
                    result = work(self._backend)
            except StorageError as error:
                if not error.is_transient:
                    raise
                if self.failing_since is None:
                    self.failing_since = time.monotonic()
                wake = time.monotonic() + random.uniform(pause / 2, pause)  # noqa: S311  # no secret
                if wake >= deadline.until or not self._waited(wake):
                    if tries > 1:
                        error.args = (f"{error} (tried {tries} times in {time.monotonic() - begin:.0f} s)",)
                    raise
                pause = min(pause * _GROWTH, _LONGEST_PAUSE_SECONDS)
            else:
                self.failing_since = None
                return result
        raise AssertionError("there is no last try")

    def _waited(self, wake: float) -> bool:
        """Wait for the end of a pause; False if the caller gives up."""
        while self._give_up is None or not self._give_up():
            remaining = wake - time.monotonic()
            if remaining <= 0:
                return True
            time.sleep(min(remaining, _LOOK_SECONDS))
        return False


_LOCAL_PROTOCOLS = frozenset({"file", "local"})
_S3_PROTOCOLS = frozenset({"s3", "s3a"})

_TEXT_OPTIONS = {
    "s3": {"key", "secret", "token", "username", "password", "profile"},
    "s3a": {"key", "secret", "token", "username", "password", "profile"},
    "az": {"account_name", "account_key", "sas_token", "connection_string"},
}
"""The options that must be strings, by protocol; `endpoint_url` must be one for all protocols."""
_OBJECT_OPTIONS = ("client_kwargs", "config_kwargs")
_FLAG_OPTIONS = {"s3": {"anon", "use_ssl"}, "s3a": {"anon", "use_ssl"}}


def open_backend(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> RetryingBackend:
    """The backend for a URL. Paths and `file://` URLs are local directories. Nothing is created.

    A `file://` URL is percent-decoded; a path is not. The storage options are fsspec's. Transient errors are retried
    for `timeout_seconds`.

    Raises:
        UsageError: the URL is empty or mistyped, fsspec does not know its protocol, it has credentials or a query, it
            names a file of another host, or a storage option is not valid.
    """
    text = os.fspath(url)
    if not text:
        raise UsageError("the URL of the run is empty: give a directory or a URL such as s3://bucket/run")
    protocol, separator, path = text.partition("://")
    if not separator or protocol.lower() in _LOCAL_PROTOCOLS:
        from ranktape.storage.places.local import LocalBackend

        if not separator:
            _refuse_single_slash(text)
        local = LocalBackend(_local_path(text, path) if separator else text)
        return RetryingBackend(local, timeout_seconds=timeout_seconds)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.:-]*", protocol):
        raise UsageError(
            f"{without_credentials(text)!r} is not a URL: give a directory or a URL such as s3://bucket/run"
        )
    if not (is_text(text) and text.isprintable()):
        raise UsageError(f"{without_credentials(text)!r} is not a URL: it has characters that cannot be printed")
    _refuse_credentials(text)
    _check_options(protocol.lower(), storage_options or {})
    from ranktape.storage.places.remote import RemoteBackend, S3Backend

    kind = S3Backend if protocol.lower() in _S3_PROTOCOLS else RemoteBackend
    remote = kind(f"{protocol.lower()}://{path}", storage_options=storage_options or {})
    return RetryingBackend(remote, timeout_seconds=timeout_seconds)


def _check_options(protocol: str, options: Any) -> None:
    """Check the types of known options, which clients take for granted. Values are never shown."""
    if not isinstance(options, Mapping):
        raise UsageError(f"the storage options are a {type(options).__name__}: give a mapping such as {{'anon': True}}")
    texts = {"endpoint_url", *_TEXT_OPTIONS.get(protocol, ())}
    nested: dict[str, Any] = {}
    for name in _OBJECT_OPTIONS:
        if not isinstance(mapping := options.get(name), Mapping | None):
            raise _wrong_option(name, mapping, "an object, such as {'region_name': 'eu-central-1'}")
        nested |= {f"{name}.{inner}": value for inner, value in (mapping or {}).items()}
    texts |= {"client_kwargs.endpoint_url", "client_kwargs.region_name"}
    for name, value in {**options, **nested}.items():
        if name in texts and not isinstance(value, str | None):
            raise _wrong_option(name, value, "text")
        if name in texts and value and not value.isprintable():
            raise UsageError(
                f"the storage option {name} has a line break or another character that cannot be printed: take it "
                f"away; what was read from a file often ends with one"
            )
        if name in _FLAG_OPTIONS.get(protocol, ()) and not isinstance(value, bool | None):
            raise _wrong_option(name, value, "true or false")


def _wrong_option(name: str, value: object, allowed: str) -> UsageError:
    return UsageError(f"the storage option {name} is of the kind {type(value).__name__}: give {allowed}")


def _refuse_credentials(url: str) -> None:
    """Refuse a URL with secrets, because URLs are shown, stored and kept in shell histories."""
    protocol, _, location = url.partition("://")
    address, _, path = without_credentials(url).partition("://")[2].partition("/")
    has_user = protocol.lower() in _S3_PROTOCOLS and not location.startswith(f"{address}/{path}".rstrip("/"))
    if has_user or "?" in location or "#" in location:
        what = "a user name or password" if has_user else "a query or fragment"
        raise UsageError(
            f"the URL {without_credentials(url)} comes with {what}, which ends up in logs: leave it out and give "
            f"credentials as storage options or in the environment"
        )


def _refuse_single_slash(text: str) -> None:
    """Refuse a path that is a URL with a missing slash, which would become a directory."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):(/.*)", text)
    if match is None:
        return
    import fsspec

    protocol, path = match[1].lower(), re.sub(r"^/[^/]*@", "/", match[2].partition("?")[0])
    if protocol in _LOCAL_PROTOCOLS:
        raise UsageError(f"'{match[1]}:{path}' is not a URL: write {protocol}://{path}, or the path alone")
    if protocol in fsspec.available_protocols():
        raise UsageError(
            f"'{match[1]}:{path}' is not a URL: write {protocol}:/{path}, or ./{match[1]}:{path} for a directory of "
            f"that name"
        )


def _local_path(url: str, location: str) -> str:
    """The path in a `file://` URL; `location` is the part after `://`."""
    host, slash, path = location.partition("/")
    if not slash or host not in {"", "localhost"}:
        raise UsageError(
            f"{without_credentials(url)!r} does not name a directory of this machine: write file:///absolute/path, or "
            f"a path without file://"
        )
    return "/" + unquote(path)


def parse_storage_options(text: str) -> dict[str, Any]:
    """Parse storage options given as JSON on the command line.

    Raises:
        UsageError: the text is not a JSON object.
    """
    options: Any = None
    reason = ""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error)
    if reason:
        # Raised outside the handler, so that the parser's error with the whole text is not the context of this one.
        raise UsageError(f"--storage-options is not JSON ({reason}): give an object such as '{{\"anon\": true}}'")
    if not isinstance(options, dict):
        kind = type(options).__name__
        raise UsageError(f"--storage-options is not a JSON object but a {kind}: give one such as '{{\"anon\": true}}'")
    return options
