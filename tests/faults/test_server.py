"""Does a recording outlive its S3 server, and name what it cannot outlive?

A real server that is ended, hung, filled, closed and emptied while a writer process stores into it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from ranktape.storage.format.progress import IterationState
from tests.capture.light import LightTrainer
from tests.ceph import CephServer
from tests.exhaustive import exhaustive
from tests.faults.recording import check_whole, stage, status_of, wait_for_commit, wait_for_problem
from tests.s3 import BUCKET

pytestmark = [pytest.mark.ceph, pytest.mark.slow]

Fault = tuple[Callable[[CephServer], None], Callable[[CephServer], None]]
"""How the server fails, and how it comes back."""

FAULTS: dict[str, Fault] = {
    "killed": (CephServer.kill_gateway, CephServer.start_gateway),
    "hung": (CephServer.hang_gateway, CephServer.continue_gateway),
}

OUTAGE_SECONDS = 30.0

PROMPT_SECONDS = 40.0
"""In which a mistake that waiting does not mend must be named: less than a store is waited for."""


def record(server: CephServer, **options: Any) -> tuple[str, LightTrainer]:
    """A training with two iterations stored."""
    url = server.new_url()
    trainer = LightTrainer(url, budget_nbytes=64 << 20, storage_options=server.storage_options, **options)
    stage(trainer, 0, 1)
    for iteration in (0, 1):
        wait_for_commit(url, iteration, options=server.storage_options)
    return url, trainer


def wait_until_storing(server: CephServer, url: str, iteration: int) -> None:
    """Until some of an iteration is stored, and not all of it."""
    client = server.client()
    while True:
        keys = [item["Key"] for item in client.list_objects_v2(Bucket=BUCKET, Prefix=key_of(url))["Contents"]]
        if any(f"rank_00000/iter_{iteration:08d}/" in key for key in keys):
            return


def key_of(url: str) -> str:
    return url.removeprefix(f"s3://{BUCKET}/") + "/"


@pytest.fixture
def server(new_ceph_server: Callable[[], CephServer]) -> CephServer:
    """A server that nobody else uses."""
    return new_ceph_server()


@exhaustive("half a minute of outage; shorter ones are in tests/capture/test_outage.py")
def test_an_outage_in_the_middle_of_writing_costs_nothing(new_ceph_server: Callable[[], CephServer]) -> None:
    servers = {fault: new_ceph_server() for fault in FAULTS}
    recordings = {fault: record(server) for fault, server in servers.items()}
    for fault, (fail, _) in FAULTS.items():
        url, trainer = recordings[fault]
        stage(trainer, 2, 3)
        wait_until_storing(servers[fault], url, 2)
        fail(servers[fault])
        stage(trainer, 4, 5)
    time.sleep(OUTAGE_SECONDS)
    for fault, (_, mend) in FAULTS.items():
        url, trainer = recordings[fault]
        mend(servers[fault])
        words = trainer.close(timeout_seconds=120)
        assert words.get("problem") is None, (fault, words)
        check_whole(url, range(6), options=servers[fault].storage_options)


@pytest.mark.parametrize(
    "fault", ["killed", pytest.param("hung", marks=exhaustive("tests/capture/test_outage.py hangs"))]
)
@exhaustive("make test has shorter outages in tests/capture/test_outage.py")
def test_an_outage_that_outlasts_its_deadline_costs_the_iteration_and_no_other(fault: str, server: CephServer) -> None:
    options = server.storage_options
    url, trainer = record(server, block_timeout_seconds=10.0)
    fail, mend = FAULTS[fault]
    fail(server)
    began = time.monotonic()
    stage(trainer, 2)
    problem = wait_for_problem(trainer, about="iteration 2")
    assert time.monotonic() - began < PROMPT_SECONDS
    assert url in problem
    mend(server)
    stage(trainer, 3)
    wait_for_commit(url, 3, options=options)
    trainer.close()
    check_whole(url, [0, 1, 3], options=options)
    status = status_of(url, 2, options=options)
    assert status.state is not IterationState.COMPLETE
    assert "tried" in status.missing[0] or "answer" in status.missing[0], status


QUOTA = ("--quota-scope=bucket", f"--bucket={BUCKET}")
REFUSALS: dict[str, tuple[list[tuple[str, ...]], tuple[str, ...]]] = {
    "403": ([("user", "suspend", "--uid=test")], ("user", "enable", "--uid=test")),
    "quota": (
        [("quota", "set", *QUOTA, "--max-size=16000000"), ("quota", "enable", *QUOTA)],
        ("quota", "disable", *QUOTA),
    ),
}
"""By a word of what is said: what an administrator does to have the server refuse, and to have it take again."""


@pytest.mark.parametrize("word", REFUSALS)
@exhaustive("make test has refusals of every kind in tests/storage/test_retry.py")
def test_a_refusal_is_named_at_once(word: str, server: CephServer) -> None:
    refuse, mend = REFUSALS[word]
    url, trainer = record(server)
    for words in refuse:
        server.admin(*words)
    began = time.monotonic()
    stage(trainer, 2)
    assert word in wait_for_problem(trainer, about="iteration 2").lower()
    assert time.monotonic() - began < PROMPT_SECONDS
    server.admin(*mend)
    stage(trainer, 3)
    trainer.close()
    check_whole(url, [0, 1, 3], options=server.storage_options)


@exhaustive("make test names a right that is taken away")
def test_a_bucket_that_is_gone_is_named_at_once(server: CephServer) -> None:
    _, trainer = record(server)
    client = server.client()
    began = time.monotonic()
    keys = [{"Key": item["Key"]} for item in client.list_objects_v2(Bucket=BUCKET)["Contents"]]
    client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys})
    client.delete_bucket(Bucket=BUCKET)
    stage(trainer, 2)
    assert BUCKET in wait_for_problem(trainer, about="iteration 2")
    words = trainer.close()
    assert time.monotonic() - began < PROMPT_SECONDS
    assert "bucket" in str(words.get("error") or words.get("problem"))
