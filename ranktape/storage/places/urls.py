"""Opens the backend that a URL names, with its options."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ranktape.errors import UsageError
from ranktape.storage.places.backend import is_text, without_credentials
from ranktape.storage.places.retry import TIMEOUT_SECONDS, RetryingBackend

if TYPE_CHECKING:
    from ranktape.storage.places.fsspec_backend import RemoteBackend

_LOCAL_PROTOCOLS = frozenset({"file", "local"})
_S3_PROTOCOLS = frozenset({"s3", "s3a"})

_TEXT_OPTIONS = {
    "s3": {"key", "secret", "token", "username", "password", "profile"},
    "s3a": {"key", "secret", "token", "username", "password", "profile"},
    "az": {"account_name", "account_key", "sas_token", "connection_string"},
}
"""By protocol; `endpoint_url` is text for all of them."""
_OBJECT_OPTIONS = ("client_kwargs", "config_kwargs")
_FLAG_OPTIONS = {"s3": {"anon", "use_ssl"}, "s3a": {"anon", "use_ssl"}}

_CLIENTS = ("auto", "fsspec", "obstore")
_CLIENT_VARIABLE = "RANKTAPE_STORAGE_CLIENT"


def open_backend(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> RetryingBackend:
    """The backend for a URL; a plain path and `file://` are local directories. Nothing is created.

    A `file://` URL is percent-decoded, a plain path is taken as it is. The storage options are fsspec's, and one of
    ours: `client` (auto, fsspec or obstore; RANKTAPE_STORAGE_CLIENT says it for all). What fails for a reason that may
    pass is tried again until `timeout_seconds` are over.

    Raises:
        UsageError: the URL is empty or mistyped, its protocol is not one that fsspec knows, it holds credentials or a
            query, or it names a file of another host; or a storage option is not what it must be.
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
    options = dict(storage_options or {})
    given = options.pop("client", None)
    client = os.environ.get(_CLIENT_VARIABLE, "auto") if given is None else given
    if client not in _CLIENTS:
        source = _CLIENT_VARIABLE if given is None else "the storage option client"
        raise UsageError(f"{source} is {client!r}: give one of {', '.join(_CLIENTS)}")
    fsspec = _Fsspec(url=text, options=options)
    config = None if client == "fsspec" else _obstore_config(text, options, is_required=client == "obstore")
    if config is None:
        return RetryingBackend(fsspec(), timeout_seconds=timeout_seconds)
    from ranktape.storage.places.obstore_backend import ObstoreBackend

    backend = ObstoreBackend(text, config=config, storage_options=options, fsspec=fsspec)
    return RetryingBackend(backend, timeout_seconds=timeout_seconds, reopen=fsspec)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class _Fsspec:
    """Makes the backend over fsspec; a value and not a closure, since what holds it is sent to other processes."""

    url: str
    options: dict[str, Any]

    def __call__(self) -> RemoteBackend:
        from ranktape.storage.places.fsspec_backend import RemoteBackend, S3Backend

        is_s3 = self.url.partition("://")[0].lower() in _S3_PROTOCOLS
        return (S3Backend if is_s3 else RemoteBackend)(self.url, storage_options=self.options)


def _check_options(protocol: str, options: Any) -> None:
    """Of the options that are known: that they are what clients take for granted. Their values are never shown."""
    if not isinstance(options, Mapping):
        raise UsageError(f"the storage options are a {type(options).__name__}: give a mapping such as {{'anon': True}}")
    texts = {"endpoint_url", *_TEXT_OPTIONS.get(protocol, ())}
    nested: dict[str, Any] = {}
    for name in _OBJECT_OPTIONS:
        if not isinstance(given := options.get(name), Mapping | None):
            raise _wrong_option(name, given, "an object, such as {'region_name': 'eu-central-1'}")
        nested |= {f"{name}.{inner}": value for inner, value in (given or {}).items()}
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


def _obstore_config(url: str, options: Mapping[str, Any], *, is_required: bool) -> dict[str, Any] | None:
    """What obstore is given; None where fsspec's client is the one to take."""
    reason = ""
    try:
        config = _translated(url.partition("://")[0].lower(), options)
        from ranktape.storage.places.obstore_backend import is_usable_here

        if is_usable_here():
            return config
        reason = "this process was forked after obstore was loaded, where it would wait for ever"
    except NotTranslatableError as error:
        reason = str(error)
    except ImportError:
        reason = "obstore is not installed: pip install 'ranktape[fast]'"
    if is_required:
        raise UsageError(
            f"{without_credentials(url)} cannot be opened with the client obstore: {reason}; the client fsspec can do "
            f"it"
        )
    return None


def _refuse_credentials(url: str) -> None:
    """Of a URL: that nothing in it is secret, for it is shown, stored and typed into shells."""
    protocol, _, rest = url.partition("://")
    address, _, path = without_credentials(url).partition("://")[2].partition("/")
    has_user = protocol.lower() in _S3_PROTOCOLS and not rest.startswith(f"{address}/{path}".rstrip("/"))
    if has_user or "?" in rest or "#" in rest:
        what = "a user name or password" if has_user else "a query or fragment"
        raise UsageError(
            f"the URL {without_credentials(url)} comes with {what}, which ends up in logs: leave it out and give "
            f"credentials as storage options or in the environment"
        )


def _refuse_single_slash(text: str) -> None:
    """Of a plain path: that it is not a URL with a slash too few, which would become a directory."""
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


def _local_path(url: str, rest: str) -> str:
    """The path that a URL of a file names; `rest` is what follows its `://`."""
    host, slash, path = rest.partition("/")
    if not slash or host not in {"", "localhost"}:
        raise UsageError(
            f"{without_credentials(url)!r} does not name a directory of this machine: write file:///absolute/path, or "
            f"a path without file://"
        )
    return "/" + unquote(path)


def parse_storage_options(text: str) -> dict[str, Any]:
    """The storage options that a command line has as JSON.

    Raises:
        UsageError: it is not a JSON object.
    """
    options: Any = None
    reason = ""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error)
    if reason:
        # Raised out here, the parser's error, which has the whole text, is not even the context of this one.
        raise UsageError(f"--storage-options is not JSON ({reason}): give an object such as '{{\"anon\": true}}'")
    if not isinstance(options, dict):
        kind = type(options).__name__
        raise UsageError(f"--storage-options is not a JSON object but a {kind}: give one such as '{{\"anon\": true}}'")
    return options


_S3_OPTIONS = {"key", "secret", "token", "endpoint_url", "client_kwargs", "anon"}
_CLIENT_OPTIONS = {"endpoint_url", "region_name"}
_AZURE_NAMES = {"account_name": "account_name", "account_key": "account_key", "sas_token": "sas_key"}


class NotTranslatableError(Exception):
    """obstore would not do what the options or the environment ask for; the text says what."""


def _translated(protocol: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What obstore is given, by names of its own, for fsspec's options; some are secrets.

    The options are fsspec's, since those are what people have. obstore is taken only where it would do exactly what
    the fsspec client would: the same credentials, the same endpoint. Anything it would read differently, or not at
    all (the files of AWS, profiles, single sign-on), says so here.

    Raises:
        NotTranslatableError: it would not do the same as fsspec's client.
    """
    translators = {"s3": _s3, "s3a": _s3, "gs": _gs, "gcs": _gs, "az": _az}
    if protocol not in translators:
        raise NotTranslatableError(f"obstore takes {', '.join(sorted(translators))} URLs")
    config = translators[protocol](options)
    for name, value in config.items():
        # obstore ends in a panic, with a page of its own on stderr, where HTTP takes no such header.
        if isinstance(value, str) and not (value.isascii() and value.isprintable()):
            raise NotTranslatableError(f"{name} has a character that HTTP does not take, such as a line break")
    return config


def _s3(options: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others(options, _S3_OPTIONS)
    client = options.get("client_kwargs") or {}
    _refuse_others(client, _CLIENT_OPTIONS)
    endpoint = options.get("endpoint_url") or client.get("endpoint_url") or _endpoint_of_environment()
    region = client.get("region_name") or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint is None and _has_file("AWS_CONFIG_FILE", ".aws/config"):
        raise NotTranslatableError("AWS's config file may name an endpoint, which obstore does not read")
    if endpoint is None and region is None:
        raise NotTranslatableError("no region is given, and obstore does not follow a bucket to its own")
    if endpoint is not None and not _is_plain(endpoint):
        raise NotTranslatableError("the endpoint is not a plain http:// or https:// address")
    return {
        **_s3_credentials(options),
        "region": region or "us-east-1",
        # The hash of a body protects it on the way; TLS does that already, and the hash costs more than the rest.
        "unsigned_payload": not str(endpoint).startswith("http://"),
        **({"endpoint": endpoint} if endpoint else {}),
    }


def _s3_credentials(options: Mapping[str, Any]) -> dict[str, Any]:
    given = (options.get("key"), options.get("secret"), options.get("token"))
    if options.get("anon"):
        return {"skip_signature": True}
    if any(given):
        if os.environ.get("AWS_SESSION_TOKEN") and not given[2]:
            raise NotTranslatableError("obstore would add the session token of the environment to the key given")
        return _key_pair(*given)
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    if os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE"):
        raise NotTranslatableError("a profile is set, and obstore does not read AWS's files")
    return _key_pair(*(os.environ.get(name) for name in names))


def _key_pair(key: str | None, secret: str | None, token: str | None) -> dict[str, str]:
    if not key or not secret:
        raise NotTranslatableError("no key and secret are given, and obstore does not read AWS's files")
    pair = {"access_key_id": key, "secret_access_key": secret}
    return pair | {"session_token": token} if token else pair


def _endpoint_of_environment() -> str | None:
    if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return None
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def _is_plain(endpoint: str) -> bool:
    """Whether an address has no more than a host, a port and a path; obstore ends the process at some others."""
    return re.fullmatch(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?(/[\w./~-]*)?", endpoint) is not None


def _gs(options: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others(options, {"token"})
    if options.get("token") not in (None, "anon"):  # a dictionary is in no set
        raise NotTranslatableError("obstore knows no token but anon")
    return {"skip_signature": True} if options.get("token") == "anon" else {}


def _az(options: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others(options, {*_AZURE_NAMES, "anon"})
    values: dict[str, Any] = {ours: options[name] for name, ours in _AZURE_NAMES.items() if options.get(name)}
    if options.get("anon"):
        values["skip_signature"] = True
    if "account_name" not in values and not os.environ.get("AZURE_STORAGE_ACCOUNT_NAME"):
        raise NotTranslatableError("no account_name is given")
    return values


def _refuse_others(options: Mapping[str, Any], known: set[str]) -> None:
    others = sorted(str(name) for name, value in options.items() if name not in known and value is not None)
    if others:
        raise NotTranslatableError(f"obstore does not know the option {others[0]}")


def _has_file(variable: str, default: str) -> bool:
    return Path(os.environ.get(variable) or Path.home() / default).expanduser().exists()
