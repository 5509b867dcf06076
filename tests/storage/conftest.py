"""Gives the runs that many tests damage, each written once and copied for every test; and stores that fail."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ranktape.storage.places import remote
from ranktape.storage.places.urls import RetryingBackend, open_backend
from tests.s3 import S3Server
from tests.storage.flaky import FlakyProxy, OpenFlaky, flaky_proxy
from tests.storage.whole_run import whole_run


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is whole and closed; nobody changes it."""
    path = tmp_path_factory.mktemp("sound") / "run"
    whole_run(path)
    return path


@pytest.fixture
def path(sound: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "run"))


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of a single iteration; nobody changes it."""
    path = tmp_path_factory.mktemp("short") / "run"
    whole_run(path, iterations=(0,))
    return path


@pytest.fixture
def short_path(short: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(short, tmp_path / "run"))


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FlakyProxy]:
    """Before an S3 server."""
    with flaky_proxy(s3_server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture
def open_flaky(s3_server: S3Server, proxy: FlakyProxy) -> OpenFlaky:
    """Opens a place behind the proxy."""

    def open_it(timeout_seconds: float = 20) -> RetryingBackend:
        options = s3_server.storage_options | {"endpoint_url": proxy.endpoint_url}
        return open_backend(s3_server.new_url(), storage_options=options, timeout_seconds=timeout_seconds)

    return open_it


@pytest.fixture
def part_nbytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """Large objects go to S3 in parts of the least size that it takes, which is given."""
    nbytes = 5 * 2**20
    monkeypatch.setattr(remote, "PART_NBYTES", nbytes)
    return nbytes
