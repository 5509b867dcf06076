"""Translates fsspec's storage options into those of obstore.

The options are fsspec's, since those are what people have. obstore is taken only where it would do exactly what the
fsspec client would: the same credentials, the same endpoint. Anything it would read differently, or not at all (the
files of AWS, profiles, single sign-on), says so here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROTOCOLS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az"}
"""URL protocols that obstore can take, and what it is to it."""

_S3_OPTIONS = {"key", "secret", "token", "endpoint_url", "client_kwargs", "anon"}
_CLIENT_OPTIONS = {"endpoint_url", "region_name"}
_AZURE_NAMES = {"account_name": "account_name", "account_key": "account_key", "sas_token": "sas_key"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """What obstore is given."""

    protocol: str
    values: dict[str, Any] = field(repr=False)
    """Names of obstore's own; some are secrets."""
    allows_http: bool


class NotTranslatableError(Exception):
    """obstore would not do what the options or the environment ask for; the text says what."""


def translate(url: str, options: Mapping[str, Any]) -> StoreConfig:
    """What obstore is given for a URL and fsspec's options.

    Raises:
        NotTranslatableError: It would not do the same as fsspec's client.
    """
    protocol = PROTOCOLS.get(url.partition("://")[0].lower())
    if protocol is None:
        raise NotTranslatableError(f"obstore takes {', '.join(sorted(PROTOCOLS))} URLs")
    config = {"s3": _s3, "gs": _gs, "az": _az}[protocol](options)
    for name, value in config.values.items():
        # obstore ends in a panic, with a page of its own on stderr, where HTTP takes no such header.
        if isinstance(value, str) and not (value.isascii() and value.isprintable()):
            raise NotTranslatableError(f"{name} has a character that HTTP does not take, such as a line break")
    return config


def _s3(options: Mapping[str, Any]) -> StoreConfig:
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
    allows_http = str(endpoint).startswith("http://")
    values = {
        **_s3_credentials(options),
        "region": region or "us-east-1",
        # The hash of a body protects it on the way; TLS does that already, and the hash costs more than the rest.
        "unsigned_payload": not allows_http,
        **({"endpoint": endpoint} if endpoint else {}),
    }
    return StoreConfig(protocol="s3", values=values, allows_http=allows_http)


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


def _gs(options: Mapping[str, Any]) -> StoreConfig:
    _refuse_others(options, {"token"})
    if options.get("token") not in (None, "anon"):  # a dictionary is in no set
        raise NotTranslatableError("obstore knows no token but anon")
    values = {"skip_signature": True} if options.get("token") == "anon" else {}
    return StoreConfig(protocol="gs", values=values, allows_http=False)


def _az(options: Mapping[str, Any]) -> StoreConfig:
    _refuse_others(options, {*_AZURE_NAMES, "anon"})
    values: dict[str, Any] = {ours: options[name] for name, ours in _AZURE_NAMES.items() if options.get(name)}
    if options.get("anon"):
        values["skip_signature"] = True
    if "account_name" not in values and not os.environ.get("AZURE_STORAGE_ACCOUNT_NAME"):
        raise NotTranslatableError("no account_name is given")
    return StoreConfig(protocol="az", values=values, allows_http=False)


def _refuse_others(options: Mapping[str, Any], known: set[str]) -> None:
    others = sorted(str(name) for name, value in options.items() if name not in known and value is not None)
    if others:
        raise NotTranslatableError(f"obstore does not know the option {others[0]}")


def _has_file(variable: str, default: str) -> bool:
    return Path(os.environ.get(variable) or Path.home() / default).expanduser().exists()
