"""Does a training record into an object store as it does into a directory?"""

from __future__ import annotations

import pytest
import zarr

from ranktape.capture import Capture
from ranktape.errors import StorageError
from ranktape.storage import open_run
from tests.capture.models import NUM_TENSORS, Training, train
from tests.s3 import S3Server


@pytest.mark.s3
def test_a_training_recorded_into_s3(s3_server: S3Server) -> None:
    url = s3_server.new_url()
    options = s3_server.storage_options
    capture = Capture(url, storage_options=options, min_iterations=2)
    train(Training(steps=3), capture=capture)
    assert capture.close().met
    run = open_run(url, storage_options=options)
    assert run.iterations == [0, 1]
    records = run.select()
    assert len(records) == 2 * NUM_TENSORS
    for record in records[::7]:
        record.read()
    document = s3_server.client().get_object(Bucket="bucket", Key=f"{url.removeprefix('s3://bucket/')}/zarr.json")
    text = document["Body"].read().decode()
    assert s3_server.storage_options["endpoint_url"] not in text
    group = zarr.open_group(url, mode="r", storage_options=options)
    folder = records[-1].path.rpartition("/")[0]
    assert folder.endswith("rank_00000/iter_00000001")
    arrays = dict(group[folder].arrays())  # type: ignore[union-attr]
    assert sum(array.shape[0] for name, array in arrays.items() if name.startswith("stack_")) == NUM_TENSORS


@pytest.mark.s3
def test_a_bucket_that_is_not_there_is_named_at_the_start(s3_server: S3Server) -> None:
    capture = Capture("s3://no-such-bucket/run", storage_options=s3_server.storage_options)
    with pytest.raises(StorageError, match="no-such-bucket"):
        train(Training(steps=1), capture=capture)
