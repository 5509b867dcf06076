"""Which client speaks to a store, with whose credentials, and what becomes of it in a forked process."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ranktape.errors import (
    AccessDeniedError,
    NoBucketError,
    NoSpaceError,
    StorageError,
    UnreachableError,
    UsageError,
)
from ranktape.storage.places.failures import Redactor, store_error
from ranktape.storage.places.urls import open_backend
from tests.exhaustive import exhaustive
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
    chosen = PAIR | HERE | options if isinstance(options, dict) else options
    with pytest.raises(UsageError, match=message):
        open_backend("s3://bucket/run", storage_options=chosen)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("options", [{"config_kwargs": None}, {"client_kwargs": None}, {"key": None}, {"anon": None}])
@exhaustive("nothing but the options' table")
def test_options_without_a_value_are_not_given(
    s3_server: S3Server, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    backend = open_backend(s3_server.new_url(), storage_options={"endpoint_url": s3_server.endpoint_url, **options})
    assert backend.get("a") is None


def test_a_key_that_no_header_can_hold_is_an_error_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with pytest.raises(StorageError, match="cannot read s3://bucket/run/a"):
        open_backend("s3://bucket/run", storage_options=HERE, timeout_seconds=0.3).get("a")


FULL, BUSY, BUCKET = "free space or raise the quota", "try again later", "create the bucket"
KEYS, REFUSED, CERTIFICATES = "check key and secret", "give credentials", "check the endpoint and the certificates"
ANSWER, SILENT, OTHER = "check the URL, the endpoint and the", "that the server answers", "lies in the way"


def test_an_error_of_a_client_has_the_class_and_the_advice_of_its_cause() -> None:
    """By the class, the HTTP status, the code of an answer, or errno; the first rule that holds."""
    cases: list[tuple[str, int | None, str, type[StorageError], str]] = [
        ("ClientError", 403, "QuotaExceeded", NoSpaceError, FULL),
        ("ClientError", 507, "", NoSpaceError, FULL),
        ("ClientError", 404, "NoSuchBucket", NoBucketError, BUCKET),
        ("ClientError", 400, "RequestTimeout", UnreachableError, f"answered 400.*{BUSY}"),
        ("ClientError", None, "SlowDown", UnreachableError, f"answered so.*{BUSY}"),
        ("ClientError", 500, "", UnreachableError, f"answered 500.*{BUSY}"),
        ("ClientError", 429, "", UnreachableError, f"answered 429.*{BUSY}"),
        ("ClientError", 400, "ExpiredToken", AccessDeniedError, KEYS),
        ("ClientError", 401, "", AccessDeniedError, KEYS),
        ("ClientError", 400, "", StorageError, ANSWER),
        ("ClientError", 501, "", StorageError, ANSWER),
        ("ClientError", None, "InvalidRequest", StorageError, ANSWER),
        ("ClientError", 399, "", UnreachableError, SILENT),
        ("ClientError", None, "", UnreachableError, SILENT),
        ("HttpProcessingError", 400, "", StorageError, OTHER),
        ("NoCredentialsError", None, "", AccessDeniedError, REFUSED),
        ("SSLError", None, "", StorageError, CERTIFICATES),
        ("ValueError", None, "", StorageError, OTHER),
    ]
    errors: list[tuple[Exception, type[StorageError], str]] = [
        (OSError(errno.ENOSPC, ""), NoSpaceError, FULL),
        (OSError(errno.EROFS, ""), AccessDeniedError, REFUSED),
        (OSError(errno.EHOSTDOWN, ""), UnreachableError, SILENT),
    ]
    for name, status, code, kind, advice in cases:
        answer: dict[str, Any] = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        errors.append((type(name, (Exception,), {"response": answer} if code else {"status": status})(), kind, advice))
    for error, kind, advice in errors:
        outer = RuntimeError("outer")
        outer.__cause__ = error
        for one in (error, outer):
            found = store_error(one, verb="read", place="s3://bucket/a", redact=Redactor("s3://bucket", {}))
            assert type(found) is kind, error
            assert re.fullmatch(rf"cannot read s3://bucket/a: .*{advice}.*", str(found)), vars(error)


@pytest.mark.parametrize("url", ["s3://bucket/a\nb", "s3://bucket/a\0b", "s3://bucket/\ud800", "memory://a\x1b"])
def test_urls_can_be_printed(url: str) -> None:
    with pytest.raises(UsageError, match=r"is not a URL: it has characters that cannot be printed") as caught:
        open_backend(url)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("url", "client"),
    [
        *((f"{protocol}://bucket/run", "S3Backend") for protocol in ("s3", "s3a", "S3")),
        ("memory://bucket/run", "RemoteBackend"),
    ],
)
def test_each_protocol_has_its_client(url: str, client: str) -> None:
    assert type(open_backend(url)._backend).__name__ == client


@pytest.mark.s3
@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_environment_names_server_and_credentials(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv(variable, s3_server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
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
def test_what_is_sent_is_not_copied(s3_server: S3Server) -> None:
    options = json.dumps(s3_server.storage_options)
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


FOUR_TENSORS = """
import http.server, json, resource, sys, threading
from concurrent.futures import ThreadPoolExecutor
import fsspec
from ranktape.storage.places.urls import open_backend

class Sink(http.server.BaseHTTPRequestHandler):
    # Takes PUTs and multipart uploads of S3, and keeps nothing.
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_PUT(self):
        if self.headers.get("Expect"):
            self.send_response_only(100)
            self.end_headers()
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            left -= len(self.rfile.read(min(left, 1 << 16)))
        body = b"<Answer><UploadId>u</UploadId></Answer>" if self.command == "POST" else b""
        self.send_response(200)
        self.send_header("ETag", "e")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT

class Nowhere(fsspec.AbstractFileSystem):
    protocol = "nowhere"

    def pipe_file(self, path, value, **options):
        threading.Event().wait(0.2)

fsspec.register_implementation("nowhere", Nowhere)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
threading.Thread(target=server.serve_forever, daemon=True).start()
pair = {"endpoint_url": f"http://127.0.0.1:{server.server_port}", "key": "k", "secret": "s"}
url = sys.argv[1]
backend = open_backend(url, storage_options=pair if url.startswith("s3") else {}, timeout_seconds=300)
tensor = memoryview(bytes(1) * 200_000_000)
backend.put("a", [tensor[: 2 << 20]])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with ThreadPoolExecutor(4) as pool:
    list(pool.map(lambda number: backend.put(f"t{number}", [tensor, b"crc."]), range(4)))
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.parametrize("url", ["s3://bucket/run", "nowhere://run"])
@exhaustive("make test sees that bodies are not copied")
def test_four_tensors_of_200_mb_take_at_most_300_mb_beside_them(url: str) -> None:
    command = [sys.executable, "-c", FOUR_TENSORS, url]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 300_000_000


@pytest.mark.s3
def test_a_forked_process_opens_connections_of_its_own(s3_server: S3Server) -> None:
    backend = open_backend(s3_server.new_url(), storage_options=s3_server.storage_options)
    backend.put("a", [b"."])

    def child() -> None:
        assert backend.get("a") == b"."
        backend.put("b", [b"of the child"])

    assert in_fork(child) == 0
    assert backend.get("a") == b"."
    assert backend.get("b") == b"of the child"
