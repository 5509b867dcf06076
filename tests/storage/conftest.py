"""Which servers do the tests of storage share?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.storage.s3 import S3Server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """An S3 server on loopback, started once."""
    server = S3Server()
    yield server
    server.stop()
