"""Does a secret stay where it was given, whatever goes wrong?"""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.staging.process import WriterConfig
from ranktape.errors import AccessDeniedError, RanktapeError, StorageError, UsageError
from ranktape.storage.places.failures import Redactor, chain
from ranktape.storage.places.remote import RemoteBackend
from ranktape.storage.places.urls import open_backend, parse_storage_options
from tests.exhaustive import exhaustive_but
from tests.s3 import S3Server
from tests.storage.flaky import ECHO, flaky_proxy

SECRET = "canary/Secret+0123456789abcdef"
KEY = "CANARYKEY01234567890"
TOKEN = "canaryToken//abcdefghijklmnop=="
CANARIES = (SECRET, KEY, TOKEN, "canary")


def refused(work: Callable[[], object]) -> RanktapeError:
    """What a call raises, after it was looked at from all sides for a canary."""
    with pytest.raises(RanktapeError) as caught:
        work()
    shown = "".join(traceback.format_exception(caught.value))
    # The lines of this file that a traceback shows are not what anybody else sees.
    texts = [line for line in shown.splitlines() if "^" not in line and "storage_options" not in line]
    texts += [text for link in chain(caught.value) for text in (str(link), repr(link), repr(link.args))]
    for text in texts:
        assert not any(canary.lower() in text.lower() for canary in CANARIES), text
    return caught.value


@pytest.mark.ceph
@pytest.mark.parametrize("changed", [{"secret": SECRET}, {"key": KEY, "secret": SECRET}])
def test_a_wrong_secret_is_named_403_and_not_shown(
    ceph_server: S3Server, changed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    options = ceph_server.storage_options | changed
    backend = open_backend(ceph_server.new_url(), storage_options=options)
    caplog.set_level(logging.INFO)
    works: list[Callable[[], object]] = [
        lambda: backend.put("a", [b"."]),
        lambda: backend.create("a", b"."),
        lambda: backend.get("a"),
        lambda: backend.size("a"),
        lambda: backend.list_keys(""),
        lambda: backend.delete("a"),
        backend.list_unfinished,
    ]
    for work in works:
        error = refused(work)
        assert isinstance(error, AccessDeniedError)
        assert "403" in str(error)
        assert "check key and secret" in str(error)
    assert not any(canary in caplog.text for canary in CANARIES)
    assert not any(canary in repr(vars(backend)) for canary in CANARIES)


@pytest.mark.s3
@pytest.mark.parametrize("is_in_environment", [False, True])
@exhaustive_but("False", reason="one way is in make test")
def test_a_server_that_repeats_the_request_is_not_quoted(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, *, is_in_environment: bool
) -> None:
    given = {"key": KEY, "secret": SECRET, "token": TOKEN}
    if is_in_environment:
        for name, value in zip(("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"), given.values(), strict=True):
            monkeypatch.setenv(f"AWS_{name}", value)
        given = {}
    with flaky_proxy(s3_server.endpoint_url) as proxy:
        options = {"endpoint_url": proxy.endpoint_url, **given}
        backend = open_backend(s3_server.new_url(), storage_options=options)
        works: list[Callable[[], object]] = [
            lambda: backend.put("a", [b"."]),
            lambda: backend.get("a"),
            lambda: backend.list_keys(""),
        ]
        for work in works:
            proxy.faults[:] = [ECHO]
            error = refused(work)
            assert isinstance(error, AccessDeniedError)
            assert "403" in str(error)
            assert "SignatureDoesNotMatch" in str(error)


@pytest.mark.parametrize("password", [SECRET, "canarySecret"])
def test_an_endpoint_with_a_password_is_not_shown(password: str) -> None:
    options = {"key": KEY, "secret": SECRET, "endpoint_url": f"http://me:{password}@127.0.0.1:9"}
    backend = open_backend("s3://bucket/run", storage_options=options, timeout_seconds=0.3)
    refused(lambda: backend.get("a"))


@pytest.mark.parametrize(
    "url",
    [
        f"s3://{KEY}:canarySecret@bucket/run",
        f"s3://bucket/run?X-Amz-Signature={TOKEN}",
        f"https://host/run?sig={TOKEN}",
        "s3://key:canary/Secret@bucket/run",
        f"https://me:canarySecret@host/run?sig={TOKEN}",
        "s3://bucket/run#canary",
        "nosuch://me:canarySecret@host/run",
        "file://me:canarySecret@host/run",
        f"s3:/bucket/run?X-Amz-Signature={TOKEN}",
        f"s3:/{KEY}:canarySecret@bucket/run",
        "what ever://me:canarySecret@host/run",
    ],
)
def test_secrets_in_urls_are_refused_and_not_shown(url: str) -> None:
    assert isinstance(refused(lambda: open_backend(url)), UsageError)


def test_options_that_a_file_system_does_not_take_are_not_shown() -> None:
    options = {"key": KEY, "secrets": {"password": SECRET}}
    refused(lambda: open_backend("zip://x", storage_options=options))


def test_a_cause_that_repeats_a_secret_is_dropped_and_any_other_kept() -> None:
    store = RemoteBackend("memory://bucket/run", storage_options={"secret": SECRET})

    def fail(first: str, second: str) -> None:
        try:
            raise OSError(first)
        except OSError as error:
            raise ValueError(second) from error

    for words in ((SECRET, "clean"), ("clean", f"with {SECRET}")):
        error = refused(lambda words=words: store._call("read", "a", lambda: fail(*words)))  # type: ignore[misc]
        assert (error.__cause__, error.__context__) == (None, None)
    with pytest.raises(StorageError, match="cannot read memory://bucket/run/a: ValueError: clean") as caught:
        store._call("read", "a", lambda: fail("clean", "clean"))
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"with {SECRET}.", "with ***."),
        (f"key={SECRET[:-1]}", f"key={SECRET[:-1]}"),
        ("short one: ab, about", "short one: ***, about"),
        ("http://me:pass@host/a", "http://***@host/a"),
        ("GET https://host/a?X-Amz-Signature=1&b=2 failed", "GET https://host/a?*** failed"),
        ("is it there? yes", "is it there? yes"),
        ("<StringToSign>AWS4\nabc</StringToSign>", "<StringToSign>***</StringToSign>"),
        ("Signature=abc, Credential=def/2026", "Signature=***, Credential=***"),
        ("'Authorization': 'Bearer abc.def'", "'Authorization=***'"),
        ("X-Amz-Security-Token: abc", "X-Amz-Security-Token=***"),
        ("a path s3://bucket/key/token", "a path s3://bucket/key/token"),
    ],
)
def test_what_is_taken_out_of_texts(text: str, expected: str) -> None:
    redact = Redactor("s3://bucket", {"secret": SECRET, "client_kwargs": {"auth": ["ab"]}, "anon": False, "token": ""})
    assert redact(text) == expected


def test_options_that_are_not_json_are_not_kept() -> None:
    error = refused(lambda: parse_storage_options(f'{{"secret": "{SECRET}"'))
    assert "is not JSON (Expecting" in str(error)
    assert (error.__cause__, error.__context__) == (None, None)
    with pytest.raises(UsageError, match="is not JSON"):
        parse_storage_options("[" * 100_000)


def test_the_settings_of_a_capture_are_shown_without_secrets() -> None:
    options = {"key": KEY, "secret": SECRET}
    names = [item.name for item in dataclasses.fields(WriterConfig)]
    settings = CaptureOptions(storage_options=options)
    values: dict[str, Any] = dict.fromkeys(names) | {"options": settings}
    assert settings.storage_options == options
    for thing in (settings, WriterConfig(**values)):
        assert not any(canary in repr(thing) for canary in CANARIES)


def test_what_backends_are_made_of_is_not_shown() -> None:
    options: dict[str, Any] = {"key": KEY, "secret": SECRET, "endpoint_url": "http://127.0.0.1:9"}
    backend = open_backend("s3://bucket/run", storage_options=options)
    for thing in (backend, vars(backend), *vars(backend).values()):
        assert not any(canary in repr(thing) for canary in CANARIES), thing
