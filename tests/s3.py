"""Where does a test get an S3 server from?

Two kinds, with one surface: moto, in a thread of this process, quick, whose credentials are not checked; and Ceph's
gateway (tests/ceph.py), which is a server that people run.
"""

from __future__ import annotations

import itertools
from typing import Any

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer

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
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        super().__init__(f"http://{host}:{port}", key="test", secret="test")

    def stop(self) -> None:
        self._server.stop()
