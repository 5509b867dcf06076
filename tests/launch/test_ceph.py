"""Is a run that several ranks captured into an S3 server the same for every library that reads Zarr?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import xarray
import zarr

from ranktape.errors import AccessDeniedError
from ranktape.storage import Record, Run, open_run
from tests.ceph import CephServer
from tests.exhaustive import exhaustive
from tests.launch.processes import PLAIN, torchrun
from tests.s3 import BUCKET
from tests.strategies import raw_bytes

NUM_RANKS = 4
LAUNCH = ("-m", "ranktape.launch")

pytestmark = [pytest.mark.ceph, pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def captured(ceph_server: CephServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a run of four ranks."""
    return capture(ceph_server, tmp_path_factory.mktemp("train"))


def capture(server: CephServer, folder: Path) -> str:
    """Train on four ranks; they find the server and its keys in their environment, as people's jobs do."""
    url = server.new_url()
    options = server.storage_options
    ended = torchrun(
        *(*LAUNCH, "--capture", url, "--min-iterations", "2", PLAIN, "--batch-size", "64", "--steps", "2"),
        cwd=folder,
        num_ranks=NUM_RANKS,
        env={
            "AWS_ACCESS_KEY_ID": options["key"],
            "AWS_SECRET_ACCESS_KEY": options["secret"],
            "AWS_ENDPOINT_URL": options["endpoint_url"],
            "AWS_DEFAULT_REGION": "us-east-1",
        },
    )
    assert ended.returncode == 0, ended.stderr
    assert options["secret"] not in ended.stderr + ended.stdout
    return url


@exhaustive("other captures into a store are in make test")
def test_every_library_reads_the_bits_that_were_captured(
    captured: str, ceph_server: CephServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ceph_server.storage_options["key"])  # tensorstore takes them from here
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ceph_server.storage_options["secret"])
    run = open_run(captured, storage_options=ceph_server.storage_options)
    assert run.verdict().met
    assert run.iterations == [0, 1]
    records = run.select(iteration=1)
    assert set(records.column("rank")) == set(range(NUM_RANKS))
    stacks = [record for record in records if record.location.stack]
    alone = [record for record in records if not record.location.stack]
    assert stacks
    assert alone
    for record in [*stacks[::20], *alone[::20]]:
        # Compared with the checksum that the writer took of the tensor in memory.
        expected = raw_bytes(record.read())
        for library, values in read_with_others(run, record, ceph_server).items():
            assert raw_bytes(values) == expected, (library, record)


def read_with_others(run: Run, record: Record, server: CephServer) -> dict[str, np.ndarray[Any, Any]]:
    """The values as libraries read them that know nothing of us but our types."""
    options = server.storage_options
    where = record.location
    name = where.stack or where.site
    folder, _, array = f"{where.group}/{name}".rpartition("/")
    tensors = tensorstore.open(
        {
            "driver": "zarr3",
            "kvstore": {
                "driver": "s3",
                "bucket": BUCKET,
                "endpoint": options["endpoint_url"],
                "aws_region": "us-east-1",
                "path": f"{run.url.removeprefix(f's3://{BUCKET}/')}/{folder}/{array}/",
                "aws_credentials": {"type": "environment"},
            },
        }
    )
    group = zarr.open_group(run.url, mode="r", storage_options=options)
    dataset = xarray.open_zarr(f"{run.url}/{where.group}", storage_options=options, consolidated=False, chunks=None)
    found: dict[str, Any] = {
        "zarr": group[f"{where.group}/{name}"],
        "tensorstore": tensors.result(),
        "xarray": dataset.get(name),
    }
    return {
        library: np.asarray(values[where.index] if where.stack else values[...])
        for library, values in found.items()
        if values is not None
    }


def test_a_wrong_secret_is_refused_by_the_server_and_named(ceph_server: CephServer) -> None:
    wrong = {**ceph_server.storage_options, "secret": "canary-7f3a"}
    url = ceph_server.new_url()  # whether there is a run is not said to a stranger
    with pytest.raises(AccessDeniedError, match="403") as caught:
        open_run(url, storage_options=wrong)
    assert "canary-7f3a" not in str(caught.value)
    assert url in str(caught.value)
