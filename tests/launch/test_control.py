"""`ranktape trigger`: all ranks of a training that runs obey at the same iteration."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from ranktape.errors import CaptureError, RunNotFoundError, UsageError
from ranktape.launch import trigger
from ranktape.launch.control import ControlReply
from ranktape.storage import open_run
from ranktape.storage.format.attempt import Launch, read_attempts
from ranktape.storage.format.live import read_answer
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.places.urls import open_backend
from ranktape.storage.recording.start import begin_attempt
from tests.exhaustive import exhaustive
from tests.launch.processes import Ended, python, torchrun
from tests.launch.test_runner import command
from tests.s3 import S3Server
from tests.storage.flaky import SLOW, flaky_proxy
from tests.waiting import until

SCRIPT = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

end = pathlib.Path(sys.argv[1])
if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
if dist.is_initialized():
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
go_on = torch.ones(())
step = 0
while go_on:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()  # what has no least value grows until it overflows
    time.sleep(0.01)
    optimizer.step()
    step += 1
    if step == 20:
        end.with_name("twenty steps").touch()
    go_on = torch.tensor(0.0 if end.exists() else 1.0)
    if dist.is_initialized():
        dist.broadcast(go_on, 0)
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""


class Training:
    """One that runs until it is told to end."""

    def __init__(
        self, folder: Path, *options: str, num_ranks: int = 2, url: str | None = None, storage_options: Any = None
    ) -> None:
        self.folder = folder
        self._storage_options = storage_options
        self.url = str(folder / "run") if url is None else url
        script = folder / "train.py"
        script.write_text(SCRIPT)
        words = ("-m", "ranktape.launch", "--capture", self.url, *options, script, folder / "end")
        self._ended: Ended | None = None
        run: Callable[..., Ended] = python if num_ranks == 1 else torchrun

        def train() -> None:
            self._ended = run(*words, cwd=folder)

        self._thread = threading.Thread(target=train)
        self._thread.start()

    def end(self) -> Ended:
        """Have it end, and wait for that."""
        (self.folder / "end").touch()
        self._thread.join()
        assert self._ended is not None
        return self._ended

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Until something holds, while it runs."""
        until(lambda: _is_so(holds) or not self._thread.is_alive(), seconds=240)
        assert self._thread.is_alive() or _is_so(holds), self._ended

    def has(self, *iterations: int) -> Callable[[], bool]:
        """Whether these are stored complete."""
        return lambda: set(iterations) <= set(open_run(self.url, storage_options=self._storage_options).iterations)


def _is_so(holds: Callable[[], bool]) -> bool:
    try:
        return holds()
    except RunNotFoundError:
        return False


@contextlib.contextmanager
def training(folder: Path, *options: str, **more: Any) -> Iterator[Training]:
    """One that has stored its first iteration; it ends with the block."""
    found = Training(folder, *options, **more)
    try:
        found.wait_for(found.has(0))
        yield found
    finally:
        found.end()


def check_sound(url: str) -> None:
    """That nothing is damaged, and every iteration is complete."""
    assert not [one.text() for one in check_run(open_backend(url), deep=True).findings if one.is_error]
    assert {status.state.value for status in open_run(url).status()} == {"complete"}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A training of two ranks that was asked for much, one thing after the other, and the answers."""
    folder = tmp_path_factory.mktemp("asked")
    said: dict[str, Any] = {}
    with training(folder, "--every", "1000000") as one:
        said["plain"] = trigger(one.url, iterations=3)
        # What the capture had to store is stored: it goes on for the request alone.
        one.wait_for(one.has(*said["plain"].iterations))
        together: list[ControlReply] = []
        threads = [threading.Thread(target=lambda: together.append(trigger(one.url, iterations=2))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        said["together"] = together
        said["select"] = trigger(one.url, select=["operation=forward tensor_name=input keep=statistics"])
        said["command"] = command("trigger", one.url, "--select", "layer_idx=1 phase=pre", "--json")
        said["text"] = command("trigger", one.url, "--iterations", "2")
        said["refused"] = [
            command("trigger", one.url, "--select", "layer_type=hidden"),
            command("trigger", one.url, "--select", "where='loss > 3'"),
            command("trigger", one.url, "--iterations", "0"),
        ]
        one.wait_for(one.has(*said["select"].iterations, *json.loads(said["command"].stdout)["iterations"]))
        said["ended"] = one.end()
    said["url"] = one.url
    return said


class TestAnswers:
    def test_all_ranks_record_the_iterations_that_were_named(self, asked: dict[str, Any]) -> None:
        plain: ControlReply = asked["plain"]
        assert plain.is_answered
        assert plain.num_ranks == 2
        first = plain.iterations[0]
        assert plain.iterations == [first, first + 1, first + 2]
        run = open_run(asked["url"])
        for iteration in plain.iterations:
            records = run.select(iteration=iteration)
            assert sorted(set(records.column("rank"))) == [0, 1]
            # As many as the first one has: what the capture selects.
            assert len(records) == len(run.select(iteration=0))

    def test_two_who_ask_at_once_have_iterations_each(self, asked: dict[str, Any]) -> None:
        one, other = (set(reply.iterations) for reply in asked["together"])
        assert len(one) == len(other) == 2
        assert not one & other
        assert one | other <= set(open_run(asked["url"]).iterations)

    def test_a_selection_holds_in_its_iterations_alone(self, asked: dict[str, Any]) -> None:
        run = open_run(asked["url"])
        (iteration,) = asked["select"].iterations
        records = run.select(iteration=iteration)
        assert {(one.tensor_name, one.operation, one.keep) for one in records} == {("input", "forward", "statistics")}
        assert sorted(set(records.column("rank"))) == [0, 1]

    def test_the_command_says_what_will_be(self, asked: dict[str, Any]) -> None:
        ended: Result = asked["command"]
        assert ended.exit_code == 0, ended.stderr
        reply = json.loads(ended.stdout)
        assert reply.keys() == {"run", "request", "is_answered", "iterations", "num_ranks", "is_held"}
        records = open_run(asked["url"]).select(iteration=reply["iterations"][0])
        assert {(one.phase, one.layer_idx) for one in records} == {("pre", 1)}
        first = reply["iterations"][-1] + 1
        named = re.fullmatch(r"recording iterations (\d+), (\d+) on all 2 ranks\n", asked["text"].stdout)
        assert named is not None, asked["text"].stdout
        assert first <= int(named[1]) == int(named[2]) - 1

    def test_mistakes_are_refused_before_anything_is_asked(self, asked: dict[str, Any]) -> None:
        kinds, where, number = asked["refused"]
        assert (kinds.exit_code, where.exit_code, number.exit_code) == (2, 2, 2)
        assert "the capture attaches to linear, attention only: 'hidden' cannot be requested" in kinds.stderr
        assert "loss" in where.stderr
        assert "--iterations 0 is not allowed: give 1 to 1000" in number.stderr

    def test_everything_is_whole(self, asked: dict[str, Any]) -> None:
        check_sound(asked["url"])

    def test_a_run_that_has_ended_is_not_asked(self, asked: dict[str, Any]) -> None:
        attempt = read_attempts(open_backend(asked["url"]))[-1]
        before = sorted((Path(asked["url"]) / attempt.path / "control").iterdir())
        with pytest.raises(CaptureError, match="has ended: it accepts no requests"):
            trigger(asked["url"])
        assert sorted((Path(asked["url"]) / attempt.path / "control").iterdir()) == before


@pytest.mark.s3
@exhaustive("make test asks a training whose store is fast")
def test_a_store_that_is_slow(tmp_path: Path, s3_server: S3Server) -> None:
    with flaky_proxy(s3_server.endpoint_url) as proxy:
        url = s3_server.new_url()
        slow = json.dumps(s3_server.storage_options | {"endpoint_url": proxy.endpoint_url})
        with training(
            tmp_path,
            "--every",
            "1000000",
            "--storage-options",
            slow,
            url=url,
            storage_options=s3_server.storage_options,
        ) as one:
            proxy.faults += [SLOW] * 100_000
            reply = trigger(url, iterations=1, storage_options=s3_server.storage_options)
            one.wait_for(one.has(*reply.iterations))
            proxy.faults.clear()
    run = open_run(url, storage_options=s3_server.storage_options)
    for iteration in reply.iterations:
        assert sorted(set(run.select(iteration=iteration).column("rank"))) == [0, 1]
    assert {status.state.value for status in run.status()} == {"complete"}


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="there is no run at"):
        trigger(tmp_path / "nothing")
    assert command("trigger", tmp_path / "nothing").exit_code == 1


def test_a_run_that_cannot_be_written(tmp_path: Path) -> None:
    """A user who may read it alone; ours is root, who may do everything, so that it is another one who asks."""
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    with training(tmp_path, num_ranks=1) as one:
        for folder in (tmp_path, *tmp_path.parents[:-2]):
            folder.chmod(folder.stat().st_mode | 0o055)
        words = [sys.executable, "-c", AS_ANOTHER_USER, one.url]
        ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/", env=_environment())
        assert ended.returncode == 1
        assert "AccessDeniedError" in ended.stderr
        assert "/control/" in ended.stderr
        assert one.has(0)()


AS_ANOTHER_USER = """
import os, sys
from ranktape.launch import trigger
try:
    trigger(sys.argv[1], iterations=1, timeout_seconds=0)  # so that all is imported: this user may not read it
except Exception as error:
    assert "did not answer within 0 s" in str(error), error
os.seteuid(65534)
trigger(sys.argv[1])
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_the_minimum_is_what_was_planned(tmp_path: Path) -> None:
    """Iterations that were asked for are no part of it, and the capture that goes on for them goes on as planned."""
    with training(tmp_path, "--every", "1000000", "--min-iterations", "2", num_ranks=1) as one:
        reply = trigger(one.url, iterations=2)
        one.wait_for(one.has(*reply.iterations))
        ended = one.end()
    assert ended.returncode == 1, ended.stderr
    verdict = open_run(one.url).verdict()
    assert not verdict.met
    assert verdict.complete == [0, *reply.iterations]
    assert "were requested while the training ran, and do not count for the minimum" in verdict.message()


def test_nobody_answers_whose_rank_0_is_gone(tmp_path: Path) -> None:
    with training(tmp_path, num_ranks=1) as one:
        pass
    backend = open_backend(one.url)
    attempt = read_attempts(backend)[-1]
    backend.delete(f"{attempt.path}/verdict/zarr.json")  # as if its writer had been lost before
    ended = command("trigger", one.url, "--timeout-seconds", "1")
    assert ended.exit_code == 1
    assert "did not answer within 1 s: its rank 0 may be lost" in ended.stderr
    assert ended.stdout == ""
    left = trigger(one.url, no_wait=True)
    assert not left.is_answered
    assert left.iterations == []
    assert (Path(one.url) / attempt.path / "control" / f"request_{left.request}" / "zarr.json").exists()


def _armed(folder: Path, **more: Any) -> Training:
    """One with a flight recorder that holds some iterations."""
    one = Training(folder, "--record-last", "3", **more)
    one.wait_for(lambda: (folder / "twenty steps").exists() and bool(open_run(one.url).verdict()))
    return one


@exhaustive("make test stores what other triggers ask for")
def test_a_flight_recorder_stores_what_it_holds(tmp_path: Path) -> None:
    one = _armed(tmp_path)
    replies: list[ControlReply] = []
    try:
        threads = [threading.Thread(target=lambda: replies.append(trigger(one.url))) for _ in range(2)]
        for thread in threads:
            thread.start()
        with pytest.raises(CaptureError, match="a flight recorder stores the iterations that it holds"):
            trigger(one.url, iterations=2)
        for thread in threads:
            thread.join()
        one.wait_for(lambda: len(open_run(one.url).iterations) >= 3)
        ended = command("trigger", one.url, "--json")
        assert ended.exit_code == 0, ended.stderr
        assert json.loads(ended.stdout)["is_held"]
    finally:
        (tmp_path / "end").touch()
    # While it ends: each of these is obeyed or refused, and who is told that it is stored has it stored.
    late = []
    with contextlib.suppress(CaptureError):
        for _ in range(12):
            late.append(trigger(one.url, no_wait=True).request)
            time.sleep(0.3)
    assert one.end().returncode == 0
    backend = open_backend(one.url)
    attempt = read_attempts(backend)[-1]
    answers = [read_answer(backend, attempt=attempt, name=name) for name in late]
    told = [answer for answer in answers if answer is not None and answer.is_held]
    refused = [answer.refusal for answer in answers if answer is not None and not answer.is_held]
    assert set(refused) <= {"the training has ended"}
    run = open_run(one.url)
    happened = run.triggers()
    assert {(trigger.kind.value, trigger.text.partition(" ")[2]) for trigger in happened} == {
        ("user", "requested it (ranktape trigger)")
    }
    assert len(happened) == len(replies) + 1 + len(told)
    for reply in replies:
        assert any(abs(trigger.iteration - reply.iterations[0]) < 100 for trigger in happened)
    for iteration in run.iterations:
        assert sorted(set(run.select(iteration=iteration).column("rank"))) == [0, 1]
    assert {trigger.iteration for trigger in happened} <= {status.iteration for status in run.status()}


def test_a_capture_of_layers_alone_can_be_asked_for_nothing_else(tmp_path: Path) -> None:
    launch = Launch(launch_id="launch", restart=0, world_size=1)
    options = {"layers": "all", "min_iterations": 1}
    backend = open_backend(tmp_path / "run")
    begin_attempt(backend, launch=launch, options=options, environment={}, resume=False, overwrite=False)
    assert trigger(tmp_path / "run", no_wait=True, select="layer_type=hidden").request
    with pytest.raises(UsageError, match="attaches to embedding, hidden only: 'linear' cannot be requested"):
        trigger(tmp_path / "run", no_wait=True, select="layer_type=linear")
