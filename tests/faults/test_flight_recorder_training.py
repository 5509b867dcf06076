"""Does a flight recorder see what it says it sees, and leave every bit of the training as it is?"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.storage import IterationState, open_run
from ranktape.storage.format.live import TriggerKind
from tests.capture.light import Gate
from tests.exhaustive import exhaustive
from tests.faults.programs import flight_events
from tests.launch.processes import python
from tests.s3 import S3Server

PROGRAM = Path(flight_events.__file__)


@exhaustive("make test has each happening in tests/faults/test_flight_recorder.py")
def test_everything_that_may_happen_to_one_process_is_recorded(tmp_path: Path) -> None:
    ended = python(PROGRAM, tmp_path / "run", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    run = open_run(tmp_path / "run")
    assert {(one.kind, one.iteration) for one in run.triggers()} == {
        (TriggerKind.METRIC, flight_events.LARGE),
        (TriggerKind.NAN, flight_events.NAN),
        (TriggerKind.SIGNAL, flight_events.USR1),
        (TriggerKind.SIGNAL, flight_events.TERM),
        (TriggerKind.USER, flight_events.USER),
    }
    by_iteration = {one.iteration: one for one in run.triggers()}
    assert by_iteration[flight_events.USR1].signal == "SIGUSR1"
    assert by_iteration[flight_events.TERM].signal == "SIGTERM"
    large = by_iteration[flight_events.LARGE]
    assert (large.metric, large.value) == ("maximum", 50.0)
    assert large.text == f"0 forward pre input has maximum = 50 ({flight_events.LIMITS[0]})"
    happened = {one.iteration for one in run.triggers()}
    assert run.iterations == sorted({iteration + away for iteration in happened for away in (-1, 0, 1)})


class Block(nn.Module):
    """Linear layers, a norm and attention, as a model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + nn.functional.gelu(self.out(attended))


def train(url: Path | None, *, compiles: bool, **options: Any) -> list[torch.Tensor]:
    """Losses, norms and the weights at the end; armed where a URL is given."""
    torch.manual_seed(3)
    torch.compiler.reset()
    model = nn.Sequential(Block(), Block())
    forward = torch.compile(model) if compiles else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[torch.Tensor] = []
    with Capture(url, model=model, record_last=2, **options) if url is not None else torch.enable_grad():
        for _ in range(8):
            optimizer.zero_grad()
            loss = forward(torch.randn(2, 4, 12, 16)).square().mean()
            loss.backward()
            found += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
            optimizer.step()
    return [*found, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.filterwarnings("ignore")  # dynamo meets deprecated parts of torch itself
@pytest.mark.parametrize(
    "compiles",
    [
        pytest.param(False, id="eager"),
        pytest.param(
            True, id="compiled", marks=exhaustive("tests/capture/test_compiled_graphs.py has other recorders")
        ),
    ],
)
def test_an_armed_training_has_the_bits_of_an_unarmed_one(tmp_path: Path, *, compiles: bool) -> None:
    expected = train(None, compiles=compiles)
    for keep in ("values", "statistics"):
        found = train(tmp_path / keep, compiles=compiles, keep=keep)
        for one, other in zip(found, expected, strict=True):
            assert one.numpy().tobytes() == other.numpy().tobytes(), keep
        assert open_run(tmp_path / keep).status() == []


def test_the_first_line_names_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = [nn.Linear(8, 8) for _ in range(3)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with Capture(tmp_path / "run", model=model, record_last=2) as capture:
        for iteration in range(12):
            if iteration == 8:
                with torch.no_grad():
                    layers[0].weight.mul_(1e39)
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            if iteration == 8:
                capture.trigger("the loss is no number")
            optimizer.step()
    lines = [line for line in capsys.readouterr().err.splitlines() if "the held iterations are stored:" in line]
    # A NaN in the next layer and the program's own word follow from it.
    assert re.search(r"iteration 8, rank 0: \d+ of 64 values of 0 forward pre weight are infinite", lines[0]), lines
    assert sum("iteration 8" in line for line in lines) == 1
    run = open_run(tmp_path / "run")
    assert {one.kind for one in run.triggers()} == {TriggerKind.INF, TriggerKind.NAN, TriggerKind.USER}


@pytest.mark.s3
@exhaustive("half a minute of outage")
def test_a_store_that_is_dead_when_something_happens_holds_nobody_up(s3_server: S3Server) -> None:
    """The ring has room for two iterations, which wait for the store; the training goes on, without what comes then."""
    gate = Gate(s3_server.storage_options["endpoint_url"])
    url, options = s3_server.new_url(), {**s3_server.storage_options, "endpoint_url": gate.endpoint_url}
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    capture = Capture(url, model=model, record_last=1, host_budget_nbytes=24 << 20, storage_options=options)
    longest = 0.0

    def step() -> None:
        nonlocal longest
        began = time.monotonic()
        optimizer.zero_grad()
        model(torch.randn(512, 256)).square().mean().backward()
        optimizer.step()
        longest = max(longest, time.monotonic() - began)

    with capture:
        for _ in range(8):
            step()
        gate.is_refusing = True
        capture.trigger("the validation fell")  # in iteration 8: 7, 8 and 9
        for _ in range(60):
            step()
        assert longest < 10, "far less than --block-timeout-seconds"
        gate.is_refusing = False
        deadline = time.monotonic() + 60
        while not set(open_run(url, storage_options=s3_server.storage_options).iterations) >= {7, 8, 9}:
            assert time.monotonic() < deadline
            step()
        capture.trigger("it fell again")
        step()
        step()
    gate.close()
    run = open_run(url, storage_options=s3_server.storage_options)
    first, second = run.triggers()
    assert first.iteration == 8
    assert {7, 8, 9, second.iteration - 1, second.iteration} <= set(run.iterations)
    for status in run.status():
        assert status.state is IterationState.COMPLETE or status.missing
