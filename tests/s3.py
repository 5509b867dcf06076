"""Where does a test get an S3 server from?

moto, as a server of its own process that speaks HTTP: conditional writes are right there, credentials are
not checked.
"""

from __future__ import annotations

import itertools
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

_SECRETS = {"key": "test", "secret": "test"}


class S3Server:
    """A server on a port of its own."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint_url = f"http://{host}:{port}"
        self.storage_options: dict[str, Any] = {"endpoint_url": self.endpoint_url, **_SECRETS}
        self._numbers = itertools.count()
        self.client().create_bucket(Bucket="bucket")

    def client(self) -> Any:
        """A client that does not go through the code under test."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )

    def new_url(self) -> str:
        """A prefix that nothing lies under yet."""
        return f"s3://bucket/run-{next(self._numbers)}"

    def stop(self) -> None:
        """End the server."""
        self._server.stop()
