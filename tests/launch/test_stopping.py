"""`--stop-when-stored`: the training ends on all ranks before one iteration, cleanly, once all is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ranktape.storage import open_run
from tests.launch.processes import errors, own_lines, python, torchrun

SCRIPT = """
import atexit, json, os, pathlib, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

out, steps, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(os.environ.get("RANK", "0"))
said = {"num_steps": 0}

def at_end():
    said["at_exit"] = True
    said["has_group"] = dist.is_initialized()
    (out / f"rank{rank}.json").write_text(json.dumps(said))

atexit.register(at_end)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(8, 8)
if dist.is_initialized():
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
BEGIN
try:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        time.sleep(0.002 * rank)
        optimizer.step()
        said["num_steps"] += 1
    said["ended_by_itself"] = True
finally:
    if dist.is_initialized():
        dist.barrier()  # all of them are here
    said["finally"] = True
"""


def program(folder: Path, *, begin: str = "") -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.replace("BEGIN", begin))
    return path


def said(folder: Path, *, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def check_stopped(folder: Path, *, num_ranks: int, num_iterations: int, has_group: bool = False) -> int:
    """That all ranks ended before the same iteration, as a script does, with everything stored; which iteration."""
    ranks = said(folder, num_ranks=num_ranks)
    steps = {rank["num_steps"] for rank in ranks}
    assert len(steps) == 1, ranks
    for rank in ranks:
        assert rank == {"num_steps": rank["num_steps"], "finally": True, "at_exit": True, "has_group": has_group}
    run = open_run(folder / "run")
    assert len(run.iterations) == num_iterations
    verdict = run.verdict()
    assert verdict.met
    assert verdict.final
    # The step in which it ended was taken, and not counted by the script any more.
    stopped = int(steps.pop()) + 1
    assert verdict.ended == f"the training was ended before iteration {stopped} (--stop-when-stored)"
    assert verdict.message().endswith(f"stored complete ({', '.join(map(str, run.iterations))}); {verdict.ended}")
    assert {status.state.value for status in run.status()} == {"complete"}
    return stopped


def test_a_launched_training_ends_when_all_is_stored(tmp_path: Path) -> None:
    script = program(tmp_path)
    words = ("--capture", tmp_path / "run", "--stop-when-stored", "--min-iterations", "2", "--every", "3")
    ended = torchrun("-m", "ranktape.launch", *words, script, tmp_path, "100000", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    # What the script does at its end may still need the other ranks.
    stopped = check_stopped(tmp_path, num_ranks=2, num_iterations=2, has_group=True)
    assert any(f"ended before iteration {stopped} (--stop-when-stored)" in line for line in own_lines(ended))
    assert not errors(ended)
    assert "destroy_process_group" not in ended.stderr


def test_a_training_that_is_recorded_by_the_variable_ends_too(tmp_path: Path) -> None:
    variables = {"RANKTAPE_CAPTURE": str(tmp_path / "run"), "RANKTAPE_STOP_WHEN_STORED": "true"}
    ended = torchrun(program(tmp_path), tmp_path, "100000", cwd=tmp_path, env=variables)
    assert ended.returncode == 0, ended.stderr
    check_stopped(tmp_path, num_ranks=2, num_iterations=1)


def test_a_program_that_captures_itself_ends_alone(tmp_path: Path) -> None:
    begin = (
        "from ranktape.capture import Capture\n"
        "Capture(out / 'run', model=model, stop_when_stored=True, max_iterations=3).__enter__()\n"
        "import contextlib; stack = contextlib.ExitStack(); stack.push(Capture.current)\n"
        "atexit.register(stack.close)"
    )
    ended = python(program(tmp_path, begin=begin), tmp_path, "1000000", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    check_stopped(tmp_path, num_ranks=1, num_iterations=3)


@pytest.mark.parametrize("options", [("--stop-when-stored",), ()])
def test_a_training_that_ends_before_is_not_said_to_be_ended(tmp_path: Path, options: tuple[str, ...]) -> None:
    script = program(tmp_path)
    words: tuple[str | Path, ...] = ("--capture", tmp_path / "run", "--min-iterations", "5", *options)
    ended = python("-m", "ranktape.launch", *words, script, tmp_path, "5", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert said(tmp_path, num_ranks=1)[0]["ended_by_itself"]
    assert open_run(tmp_path / "run").verdict().ended == ""
