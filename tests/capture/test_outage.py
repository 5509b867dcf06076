"""Does a capture into an object store survive that the network fails, and say what it did not survive?

A real writer process, a real client, and a gate between it and the server.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zarr
from click.testing import CliRunner

from ranktape.capture import Capture
from ranktape.errors import StorageError
from ranktape.launch.exchange import push_command as command
from ranktape.storage import IterationState, open_run
from tests.capture.light import Gate, LightTrainer, check_arrays, tensors
from tests.capture.models import NUM_TENSORS, Training, train
from tests.exhaustive import exhaustive, exhaustive_but
from tests.s3 import S3Server
from tests.waiting import until

pytestmark = pytest.mark.s3


@pytest.fixture
def gate(s3_server: S3Server) -> Iterator[Gate]:
    """A gate before the server."""
    one = Gate(s3_server.storage_options["endpoint_url"])
    yield one
    one.close()


@pytest.fixture
def begin(gate: Gate, s3_server: S3Server) -> Callable[..., LightTrainer]:
    """Starts a capture through the gate."""

    def make(**options: Any) -> LightTrainer:
        storage_options = {**s3_server.storage_options, "endpoint_url": gate.endpoint_url}
        return LightTrainer(s3_server.new_url(), storage_options=storage_options, **options)

    return make


def wait_for(trainer: LightTrainer, s3_server: S3Server, *iterations: int) -> None:
    """Until iterations are complete."""
    until(lambda: set(iterations) <= set(stored(trainer, s3_server).iterations), said=trainer.hear)


def stored(trainer: LightTrainer, s3_server: S3Server) -> Any:
    """The run, read past the gate."""
    return open_run(trainer.url, storage_options=s3_server.storage_options)


def check(trainer: LightTrainer, s3_server: S3Server, iteration: int) -> None:
    """That an iteration has every value."""
    check_arrays(stored(trainer, s3_server).select(iteration=iteration), tensors(iteration))


@pytest.mark.parametrize("way", ["is_refusing", "is_hanging"])
@exhaustive_but("is_hanging", reason="one kind of outage is in make test")
def test_what_lasts_some_seconds_loses_nothing(
    begin: Callable[..., LightTrainer], gate: Gate, s3_server: S3Server, way: str
) -> None:
    trainer = begin(max_iterations=3)
    trainer.stage(0, tensors(0))
    threading.Timer(0.05, lambda: setattr(gate, way, True)).start()
    threading.Timer(3.0, lambda: setattr(gate, way, False)).start()
    trainer.stage(1, tensors(1))
    time.sleep(0.5)
    trainer.stage(2, tensors(2))
    words = trainer.close()
    assert words["state"] == "closed"
    assert words["verdict"]["complete"] == [0, 1, 2], words
    for iteration in range(3):
        check(trainer, s3_server, iteration)


@exhaustive("half a minute of outage; the others are short")
def test_thirty_seconds_lose_nothing_though_the_ring_is_small(
    begin: Callable[..., LightTrainer], gate: Gate, s3_server: S3Server
) -> None:
    trainer = begin(max_iterations=6, budget_nbytes=8 << 20, block_timeout_seconds=120.0)
    gate.is_hanging = True
    threading.Timer(30.0, lambda: setattr(gate, "is_hanging", False)).start()
    for iteration in range(6):
        trainer.stage(iteration, tensors(iteration))
    words = trainer.close(timeout_seconds=120)
    assert words["verdict"]["complete"] == list(range(6)), words
    for iteration in range(6):
        check(trainer, s3_server, iteration)


@exhaustive("make test has what lasts some seconds")
def test_what_lasts_longer_costs_the_iteration_that_met_it_and_is_told(
    begin: Callable[..., LightTrainer], gate: Gate, s3_server: S3Server
) -> None:
    trainer = begin(max_iterations=9, block_timeout_seconds=8.0)
    trainer.stage(0, tensors(0))
    wait_for(trainer, s3_server, 0)
    gate.is_refusing = True
    trainer.stage(1, tensors(1))
    until(lambda: "iteration 1" in trainer.hear().get("problem", ""))
    gate.is_refusing = False
    trainer.stage(2, tensors(2))
    wait_for(trainer, s3_server, 0, 2)
    trainer.close()
    for iteration in (0, 2):
        check(trainer, s3_server, iteration)
    statuses = {status.iteration: status for status in stored(trainer, s3_server).status()}
    assert statuses[1].state is IterationState.PARTIAL
    assert "tried" in statuses[1].missing[0]


def test_what_spilled_is_named_by_the_verdict_and_pushed(
    begin: Callable[..., LightTrainer], gate: Gate, s3_server: S3Server, tmp_path: Path
) -> None:
    trainer = begin(min_iterations=2, max_iterations=2, block_timeout_seconds=8.0, spill_dir=str(tmp_path / "spill"))
    trainer.stage(0, tensors(0))
    wait_for(trainer, s3_server, 0)
    gate.is_refusing = True
    trainer.stage(1, tensors(1))
    until(lambda: "waits in" in trainer.hear().get("problem", ""))
    gate.is_refusing = False
    words = trainer.close()
    assert not words["verdict"]["met"]
    assert f"{tmp_path / 'spill'} for 'ranktape push'" in words["verdict"]["missing"][0]
    arguments = [str(tmp_path / "spill"), "--storage-options", json.dumps(s3_server.storage_options)]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert "complete on all ranks: iterations 1" in result.stdout
    assert stored(trainer, s3_server).verdict().met
    for iteration in (0, 1):
        check(trainer, s3_server, iteration)


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
