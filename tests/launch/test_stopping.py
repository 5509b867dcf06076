"""Does a training end by itself when all is stored, and are late ranks waited for?"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from ranktape.storage import open_run
from tests.exhaustive import exhaustive
from tests.launch.processes import Ended, errors, own_lines, python, torchrun
from tests.launch.test_autoload import RUN
from tests.launch.test_runner import LAUNCH

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


@exhaustive("make test ends a training of the launcher")
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


pytestmark = pytest.mark.distributed

LATE_SCRIPT = """
    import pathlib
    import datetime
    import os
    import sys
    import time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if seconds := os.environ.get("GROUP_SECONDS"):
        dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=float(seconds)))
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    late, seconds = sys.argv[1:]
    begun = [pathlib.Path(f"forward_of_{other}") for other in range(3)]
    model.module.register_forward_hook(lambda *_: begun[rank].touch())
    if rank == int(late):
        time.sleep(float(seconds or 0))
        # While they wait for a capture to begin, they do not forward.
        while not seconds and not all(path.exists() for path in begun if path != begun[rank]):
            time.sleep(0.05)
    for _ in range(2):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write(f"{rank} {sum(float(p.sum()) for p in model.parameters()).hex()}\\n")
    sys.stdout.flush()
    dist.barrier()  # torchrun ends all ranks with the first that has an exit status of its own
    del model
    dist.destroy_process_group()
"""

TOO_LATE = "waited 1 s for rank 0 to begin its capture, so no rank begins one"


def train(folder: Path, *words: str, late: int, seconds: float | None, **env: str) -> Ended:
    """Three ranks, one of them late: by so much, or where that is None until the others wait for it no more."""
    for path in folder.glob("forward_of_*"):
        path.unlink()
    (folder / "train.py").write_text(textwrap.dedent(LATE_SCRIPT))
    return torchrun(
        *words, "train.py", str(late), "" if seconds is None else str(seconds), cwd=folder, num_ranks=3, env=env
    )


def trained(ended: Ended) -> list[str]:
    """Each rank's sum of weights."""
    return sorted(ended.stdout.splitlines())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What they are without us."""
    return trained(train(tmp_path_factory.mktemp("plain"), late=0, seconds=0))


@exhaustive("it waits")
def test_a_rank_0_that_is_too_late_costs_the_capture_and_not_the_training(plain: list[str], tmp_path: Path) -> None:
    # Half of the time for which a collective of the training waits.
    launched = train(tmp_path, *LAUNCH, "--capture", "run", late=0, seconds=None, GROUP_SECONDS="2")
    assert trained(launched) == plain
    # The training has ended well; that nothing is stored is an error of the launcher, as ever.
    assert launched.returncode == 1
    *early, late, last = errors(launched)
    assert [line.partition("]")[0] for line in early] in (["[rank 1"], ["[rank 2"])  # the first to give up speaks
    assert all(TOO_LATE in line and line.endswith("the training continues without a capture") for line in early)
    assert TOO_LATE in late
    assert "give the process group a longer timeout" in late
    assert not late.startswith("[")
    assert last.startswith("minimum not met: 0 of 1")
    assert TOO_LATE in last
    assert not (tmp_path / "run").exists()

    by_variable = train(tmp_path, late=0, seconds=None, **RUN, GROUP_SECONDS="2")
    assert (by_variable.returncode, trained(by_variable)) == (0, plain)
    assert len(errors(by_variable)) == 2

    strict = train(tmp_path, *LAUNCH, "--capture", "run", "--strict", late=0, seconds=None, GROUP_SECONDS="2")
    assert strict.returncode == 1
    assert strict.stdout == ""
    assert any(TOO_LATE in line for line in errors(strict))


@pytest.mark.parametrize(
    ("late", "seconds"), [pytest.param(0, 12, marks=exhaustive("a late rank 0 is in the test above")), (2, 2)]
)
def test_a_rank_that_is_late_is_waited_for(late: int, seconds: int, plain: list[str], tmp_path: Path) -> None:
    ended = train(tmp_path, *LAUNCH, "--capture", "run", late=late, seconds=seconds)
    assert (ended.returncode, trained(ended)) == (0, plain), ended.stderr
    assert open_run(tmp_path / "run").select(iteration=0, tensor_name="weight").column("rank").tolist() == [0, 1, 2]
    # gloo's collectives wait for half an hour.
    words = "waiting for rank 0 to begin its capture, at most 900 s"
    assert len([line for line in own_lines(ended) if words in line]) == (late == 0)
