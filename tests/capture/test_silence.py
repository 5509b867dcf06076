"""Is a run that holds nothing told from one that holds what was promised, and a name that nothing has told of?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from ranktape.capture import Capture
from ranktape.errors import CaptureError
from ranktape.launch.cli import cli
from ranktape.storage import IterationState, Run, open_run
from tests.capture.trainings import captured
from tests.launch.processes import python, torchrun

PROGRAM = """
import os
import torch
from torch import nn

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
    def forward(self, hidden):
        return hidden * self.weight

rank, silent = os.environ.get("RANK", "0"), os.environ["SILENT"].split(",")
model = Scale() if rank in silent else nn.Sequential(nn.Linear(4, 4))
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("gloo")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if "WORLD_SIZE" in os.environ:
        torch.distributed.barrier()
print("trained")
"""


def train(url: Path, *, silent: str, num_ranks: int = 1) -> Run:
    """Have the variable record a program of which these ranks have no layer that is recorded."""
    program = url.parent / "train.py"
    program.write_text(PROGRAM)
    env = {"RANKTAPE_CAPTURE": str(url), "RANKTAPE_MIN_ITERATIONS": "2", "SILENT": silent}
    ranks = partial(torchrun, num_ranks=num_ranks) if num_ranks > 1 else python
    ended = ranks(program, cwd=url.parent, env=env)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained") == num_ranks  # ranks share one stream: their lines may be woven together
    return open_run(url)


def expect_unmet(url: Path) -> None:
    verdict = open_run(url).verdict()
    assert not verdict.met
    assert any("the training ran no linear" in line for line in verdict.missing)
    assert CliRunner().invoke(cli, ["status", str(url), "--require-minimum"]).exit_code == 3


def test_an_iteration_without_anything_to_record_does_not_meet_the_minimum(tmp_path: Path) -> None:
    url = tmp_path / "run"
    run = train(url, silent="0")
    assert [status.state for status in run.status()] == [IterationState.SKIPPED]
    expect_unmet(url)


@pytest.mark.parametrize("options", [{"select": "tensor_name=gradinput"}, {"manual": True}])
def test_a_program_that_recorded_nothing_is_told_so_and_the_run_says_it_too(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path / "run", model=model, **options):
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(CaptureError, match=r"fits the selection|nothing was recorded"):
            optimizer.step()
    verdict = open_run(tmp_path / "run").verdict()
    assert not verdict.met
    assert verdict.complete == []


@pytest.mark.distributed
def test_where_all_ranks_are_silent_the_minimum_is_not_met(tmp_path: Path) -> None:
    run = train(tmp_path / "run", silent="0,1", num_ranks=2)
    assert run.iterations == []
    expect_unmet(tmp_path / "run")


@pytest.mark.distributed
def test_one_silent_rank_among_others_is_none_of_a_mistake(tmp_path: Path) -> None:
    run = train(tmp_path / "run", silent="1", num_ranks=2)
    assert run.iterations == [0, 1]
    assert run.verdict().met


GRAD, PHASE = "did you mean grad_output?", "did you mean pre?"


def warnings_of(folder: Path, capfd: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    """What a capture of two steps of a small model warns of."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    captured(model, folder / "run", 2, shape=(3, 4), **options)
    lines = capfd.readouterr().err.splitlines()
    prefix = "ranktape: warning: [rank 0] "
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


@pytest.mark.parametrize(
    ("select", "told"),
    [
        ({"tensor_name": ["input", "grad_*"], "phase": "pre", "module": ["0", "[2]"], "dtype": "float32"}, []),
        ({"tensor_name": ["input", "grad_ouput"]}, [("tensor_name 'grad_ouput'", GRAD)]),
        ({"phase": ["post", "prre"]}, [("phase 'prre'", PHASE)]),
        ({"component": ["linear", "fa"]}, [("component 'fa'", "seen: linear")]),
        ({"module": ["0", "3"]}, [("module '3'", "seen: 0, 1, 2")]),
        ({"layer_idx": "0,2,7"}, [("layer_idx '7'", "seen: 0 to 2")]),
        ({"rank": "0,5"}, [("rank '5'", "")]),
        ({"dtype": ["float32", "bfloat61"]}, [("dtype 'bfloat61'", "")]),
        ({"layer_type": ["linear", "attention"]}, [("layer_type 'attention'", "seen: linear")]),
        ({"call": "0,9", "microbatch": "0,9"}, []),
        ({"layer_type": "linear", "where": "phase in ['pre', 'prre']"}, []),
        ("tensor_name=inpt; keep=statistics", [("tensor_name 'inpt'", "input")]),
        ("phase=post tensor_name=weight; keep=statistics", [("matches nothing", "")]),
    ],
)  # fmt: skip
def test_a_name_that_nothing_has_is_told_of_with_the_nearest(
    select: Any, told: list[tuple[str, str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = warnings_of(tmp_path, capfd, select=select)
    assert len(found) == len(told), found
    for line, (begin, end) in zip(found, told, strict=True):
        assert line.startswith(f"--select, rule 1: {begin}")
        assert end in line


def test_many_of_them_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = warnings_of(
        tmp_path, capfd, select={"tensor_name": ["input", *(f"nothing_{number}" for number in range(20))]}
    )
    assert len(found) == 9
    assert found[-1] == "12 more names of the selection match nothing"


HALF = "240 B per iteration and rank"


@pytest.mark.parametrize(
    ("keep", "dtype", "words"),
    [
        ("values", torch.float32, "11 tensors, 480 B per iteration and rank (host"),
        # Only their values can stand for what was computed in 32 bits.
        ("histogram", torch.float32, "11 tensors, 480 B per iteration and rank (host"),
        (
            "histogram",
            torch.bfloat16,
            f"11 tensors, 11 as histogram, {HALF}, for which 3.604 MB are stored before compression",
        ),
        ("statistics", torch.bfloat16, f"11 tensors, 11 as statistics, {HALF}, for which 880 B are stored (host"),
    ],
)
def test_what_is_stored_is_said_beside_what_is_kept_of(
    keep: str, dtype: torch.dtype, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path / "run", keep=keep):
        model(torch.randn(2, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()
    assert words in capfd.readouterr().err


@pytest.mark.parametrize(
    ("width", "room"),
    [(4, "more than 100 iterations"), (256, "3 iterations"), (448, "1 iteration"), (640, "less than")],
)
def test_the_console_says_how_many_iterations_the_budget_has_memory_for(
    width: int, room: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(width, width, bias=False)
    captured(model, tmp_path / "run", shape=(1, width), host_budget_nbytes=2 << 20, policy="skip")
    assert f"(host budget 2.097 MB: memory for {room}" in capfd.readouterr().err
