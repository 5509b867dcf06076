"""Where does a test get an S3 server from?

Two kinds, with one surface: moto, in a thread of this process, quick, whose credentials are not checked; and Ceph's
gateway (tests/ceph.py), which is a server that people run.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

BUCKET = "bucket"


class S3Server:
    """A server on loopback with one bucket."""

    def __init__(self, endpoint_url: str, *, key: str, secret: str) -> None:
        self.endpoint_url = endpoint_url
        self.storage_options: dict[str, Any] = {"endpoint_url": endpoint_url, "key": key, "secret": secret}
        self._numbers = itertools.count()
        self.client().create_bucket(Bucket=BUCKET)

    def client(self) -> Any:
        """A client that does not go through the code under test."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.storage_options["key"],
            aws_secret_access_key=self.storage_options["secret"],
            region_name="us-east-1",
            config=Config(connect_timeout=5, read_timeout=20),
        )

    def new_url(self) -> str:
        """A prefix that nothing lies under yet."""
        return f"s3://{BUCKET}/run-{next(self._numbers)}"

    def stop(self) -> None:
        """End the server."""
        raise NotImplementedError


class MotoServer(S3Server):
    """moto on a port of its own."""

    def __init__(self) -> None:
        self._moto: WSGIApplication = DomainDispatcherApplication(create_backend_app)
        self._conditional = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        super().__init__(f"http://127.0.0.1:{self._server.server_port}", key="test", secret="test")

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ and "HTTP_IF_MATCH" not in environ:
            return self._moto(environ, start_response)
        # moto looks and then writes, so that two threads can both create one object. S3 lets one of them win.
        with self._conditional:
            return self._moto(environ, start_response)

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
