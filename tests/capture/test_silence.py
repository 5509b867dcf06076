"""Is a run that holds nothing at all told from one that holds what was promised?"""

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


@pytest.mark.parametrize("options", [{"tensor_name": "gradinput"}, {"manual": True}])
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
