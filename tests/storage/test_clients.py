"""Which client speaks to a store, with whose credentials, and what becomes of it in a forked process?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranktape.errors import StorageError, UsageError
from ranktape.storage.places.fsspec_backend import S3Backend
from ranktape.storage.places.obstore_backend import ObstoreBackend
from ranktape.storage.places.urls import open_backend
from tests.s3 import S3Server
from tests.storage.conformance import in_fork

PAIR = {"key": "test", "secret": "test"}
HERE = {"endpoint_url": "http://127.0.0.1:9"}


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "DEFAULT_PROFILE", "REGION"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    for name in ("DEFAULT_REGION", "ENDPOINT_URL", "ENDPOINT_URL_S3", "CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def client_of(url: str, options: dict[str, Any]) -> str:
    return type(open_backend(url, storage_options=options)._backend).__name__


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (PAIR | HERE, None),
        ({"anon": True} | HERE, None),
        (PAIR | {"token": "t", "client_kwargs": {"region_name": "eu-central-1"}}, None),
        (PAIR | {"client_kwargs": HERE}, None),
        (PAIR | HERE | {"use_listings_cache": None}, None),
        (PAIR, "no region is given"),
        (HERE, "no key and secret are given"),
        ({"key": "test"} | HERE, "no key and secret are given"),
        (PAIR | HERE | {"profile": "x"}, "does not know the option profile"),
        (PAIR | HERE | {"config_kwargs": {}}, "does not know the option config_kwargs"),
        (PAIR | {"client_kwargs": {"verify": False}}, "does not know the option verify"),
        (PAIR | {"endpoint_url": "http://x y"}, "not a plain http"),
    ],
)
def test_obstore_is_taken_where_it_does_the_same(options: dict[str, Any], reason: str | None) -> None:
    if reason is None:
        assert client_of("s3://bucket/run", options) == "ObstoreBackend"
        assert client_of("s3://bucket/run", options | {"client": "fsspec"}) == "S3Backend"
    else:
        assert client_of("s3://bucket/run", options) == "S3Backend"
        with pytest.raises(UsageError, match=f"with the client obstore: .*{reason}"):
            open_backend("s3://bucket/run", storage_options=options | {"client": "obstore"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config_kwargs": "x"}, "the storage option config_kwargs is of the kind str: give an object"),
        ({"client_kwargs": [1]}, "the storage option client_kwargs is of the kind list: give an object"),
        ({"client_kwargs": {"endpoint_url": 5}}, "client_kwargs.endpoint_url is of the kind int: give text"),
        ({"client_kwargs": {"region_name": "a\nb"}}, "client_kwargs.region_name has a line break"),
        ({"endpoint_url": 5}, "the storage option endpoint_url is of the kind int: give text"),
        ({"key": 5}, "the storage option key is of the kind int: give text"),
        ({"secret": b"x"}, "the storage option secret is of the kind bytes: give text"),
        ({"key": "a\n"}, "the storage option key has a line break"),
        ({"token": "a\x7f"}, "the storage option token has a line break or another character"),
        ({"anon": "false"}, "the storage option anon is of the kind str: give true or false"),
        (["key"], "the storage options are a list: give a mapping"),
    ],
)
def test_options_of_the_wrong_kind_are_named(options: Any, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    for client in ("auto", "fsspec", "obstore"):
        chosen = PAIR | HERE | options | {"client": client} if isinstance(options, dict) else options
        with pytest.raises(UsageError, match=message):
            open_backend("s3://bucket/run", storage_options=chosen)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("options", [{"config_kwargs": None}, {"client_kwargs": None}, {"key": None}, {"anon": None}])
def test_options_without_a_value_are_not_given(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    for client in ("obstore", "fsspec"):
        assert client_of("s3://bucket/run", HERE | options | {"client": client})


def test_a_token_may_be_a_dictionary() -> None:
    with pytest.raises(UsageError, match="with the client obstore: obstore knows no token but anon"):
        open_backend("gs://bucket/run", storage_options={"token": {"type": "x"}, "client": "obstore"})


def test_what_http_does_not_take_is_not_given_to_obstore(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with pytest.raises(UsageError, match="access_key_id has a character that HTTP does not take, such as a line break"):
        open_backend("s3://bucket/run", storage_options=HERE | {"client": "obstore"})
    with pytest.raises(StorageError):
        open_backend("s3://bucket/run", storage_options=HERE, timeout_seconds=0.3).get("a")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    assert client_of("s3://bucket/run", {"client_kwargs": {"region_name": "ö"}}) == "S3Backend"
    assert "panic" not in capfd.readouterr().err


@pytest.mark.parametrize("url", ["s3://bucket/a\nb", "s3://bucket/a\0b", "s3://bucket/\ud800", "memory://a\x1b"])
def test_urls_can_be_printed(url: str) -> None:
    with pytest.raises(UsageError, match=r"is not a URL: it has characters that cannot be printed") as caught:
        open_backend(url)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("url", "options", "client"),
    [
        ("s3a://bucket/run", PAIR | HERE, "ObstoreBackend"),
        ("S3://bucket/run", PAIR | HERE, "ObstoreBackend"),
        ("gs://bucket/run", {"token": "anon"}, "ObstoreBackend"),
        ("az://container/run", {"account_name": "a", "account_key": "MTIz"}, "ObstoreBackend"),
        ("memory://bucket/run", {}, "RemoteBackend"),
    ],
)
def test_each_protocol_has_its_client(url: str, options: dict[str, Any], client: str) -> None:
    assert client_of(url, options) == client


def test_the_environment_chooses_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKTAPE_STORAGE_CLIENT", "fsspec")
    assert client_of("s3://bucket/run", PAIR | HERE) == "S3Backend"
    assert client_of("s3://bucket/run", PAIR | HERE | {"client": "auto"}) == "ObstoreBackend"
    monkeypatch.setenv("RANKTAPE_STORAGE_CLIENT", "boto")
    with pytest.raises(UsageError, match="RANKTAPE_STORAGE_CLIENT is 'boto': give one of auto, fsspec, obstore"):
        open_backend("s3://bucket/run")
    with pytest.raises(UsageError, match="the storage option client is 'x': give one of"):
        open_backend("s3://bucket/run", storage_options={"client": "x"})


def test_what_the_environment_says_differently_is_left_to_botocore(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another key")
    assert client_of("s3://bucket/run", PAIR | HERE) == "S3Backend"
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    assert client_of("s3://bucket/run", HERE) == "ObstoreBackend"
    monkeypatch.setenv("AWS_PROFILE", "x")
    assert client_of("s3://bucket/run", HERE) == "S3Backend"
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert client_of("s3://bucket/run", {}) == "ObstoreBackend"
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text("[default]\nendpoint_url = http://elsewhere\n")
    assert client_of("s3://bucket/run", {}) == "S3Backend"


@pytest.mark.s3
@pytest.mark.parametrize("client", ["fsspec", "obstore"])
@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_environment_names_server_and_credentials(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, client: str, variable: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv(variable, s3_server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("RANKTAPE_STORAGE_CLIENT", client)
    backend = open_backend(s3_server.new_url())
    backend.put("a", [b"."])
    assert backend.get("a") == b"."


@pytest.mark.s3
def test_profiles_of_the_files_are_read(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = test\naws_secret_access_key = test\n")
    (tmp_path / "config").write_text(f"[profile mine]\nendpoint_url = {s3_server.endpoint_url}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    backend = open_backend(s3_server.new_url(), storage_options={"profile": "mine"})
    backend.put("a", [b"."])
    assert backend.get("a") == b"."


@pytest.mark.s3
@pytest.mark.parametrize("client", ["fsspec", "obstore"])
def test_what_is_sent_is_not_copied(s3_server: S3Server, client: str) -> None:
    options = json.dumps(s3_server.storage_options | {"client": client})
    # Above 128 MiB an object goes in parts; the first object is there so that the client is.
    program = f"""
import json, resource
from ranktape.storage.places.urls import open_backend
backend = open_backend({s3_server.new_url()!r}, storage_options=json.loads({options!r}))
value = b"." * (140 << 20)
backend.put("a", [value[: 2 << 20]])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
backend.put("b", [memoryview(value)[: 90 << 20]])
backend.put("c", [value])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 50 << 10  # KiB


@pytest.mark.s3
def test_a_forked_process_is_given_the_client_that_works_there(s3_server: S3Server) -> None:
    url, options = s3_server.new_url(), s3_server.storage_options
    backend = open_backend(url, storage_options=options)
    backend.put("a", [b"."])
    opened = backend._backend
    assert isinstance(opened, ObstoreBackend)

    def child() -> None:
        assert isinstance(backend._backend, S3Backend)
        assert backend.get("a") == b"."
        anew = open_backend(url, storage_options=options)
        assert isinstance(anew._backend, S3Backend)
        assert anew.get("a") == b"."
        raises(StorageError, "in a forked process: .*open the run again", lambda: opened.get("a"))
        required = options | {"client": "obstore"}
        raises(UsageError, "forked after obstore was loaded", lambda: open_backend(url, storage_options=required))

    assert in_fork(child) == 0
    assert backend._backend is opened
    assert backend.get("a") == b"."


def raises(kind: type[Exception], match: str, work: Callable[[], object]) -> None:
    with pytest.raises(kind, match=match):
        work()
