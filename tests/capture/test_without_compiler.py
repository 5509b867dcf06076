"""A training without torch's compiler is captured without it, and one that loads it late gets it as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ranktape.storage import open_run
from tests.exhaustive import exhaustive

ROOT = Path(__file__).parents[2]

TRAINING = """
import sys

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return F.linear(F.relu(self.up(x)), self.down.weight)


def step(model, called):
    # torch's optimizers load the compiler.
    called(torch.randn(2, 4)).square().mean().backward()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:
                weight -= 0.1 * weight.grad
                weight.grad = None


model = Model()
"""

ALONE = """
for _ in range(4):
    step(model, model)
assert "torch._dynamo" not in sys.modules
"""

LATE = """
from ranktape.capture import Capture

num_runs = 0


def backend(graph, inputs):
    def run(*args):
        global num_runs
        num_runs += 1
        return graph(*args)
    return run


with Capture(sys.argv[1], advance_on="step", every=2, min_iterations=3, with_master=True) as capture:
    for _ in range(2):
        step(model, model)
        capture.step()
    assert "torch._dynamo" not in sys.modules
    # In the middle of an iteration that is captured.
    step(model, model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert "torch._dynamo" in sys.modules
    counts = []
    for _ in range(3):
        step(model, compiled)
        counts.append(num_runs)
        capture.step()
assert counts == [0, 1, 1], counts
"""


def run(
    program: str, *arguments: str | Path, launcher: tuple[str | Path, ...] = (), cwd: Path, root: Path = ROOT
) -> None:
    (cwd / "train.py").write_text(program)
    done = subprocess.run(
        [sys.executable, *launcher, "train.py", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(root), "RANKTAPE_MIN_ITERATIONS": "3"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


@exhaustive("a training that loads the compiler late is in make test")
def test_the_launcher_captures_without_the_compiler(tmp_path: Path) -> None:
    launcher = ("-m", "ranktape.launch", "--capture", "run", "--advance-on", "forward")
    run(TRAINING + ALONE, launcher=launcher, cwd=tmp_path)
    assert open_run(tmp_path / "run").iterations == [0, 1, 2]


def test_a_compiler_that_is_loaded_in_a_captured_iteration_works_as_without_a_capture(tmp_path: Path) -> None:
    run(TRAINING + LATE, tmp_path / "run", cwd=tmp_path)
    stored = open_run(tmp_path / "run")
    outputs = {number: stored.select(iteration=number, tensor_name="output") for number in stored.iterations}
    # Iteration 2 has a pass as written, and one that would be compiled.
    assert {number: len(found) for number, found in outputs.items()} == {0: 2, 2: 4, 4: 2}


SEAM = """
import ranktape
from ranktape.capture import Capture

assert ranktape.__file__.startswith(sys.argv[2]), ranktape.__file__


def backend(graph, inputs):
    raise AssertionError("it compiles")


compiled = torch.compile(model, backend=backend)
with Capture(sys.argv[1], advance_on="step", min_iterations=2, strict=True) as capture:
    for _ in range(2):
        step(model, compiled)
        capture.step()
"""


def test_without_the_folder_of_compiled_graphs_captured_iterations_run_eagerly(tmp_path: Path) -> None:
    def left_out(folder: str, names: list[str]) -> set[str]:
        return {"__pycache__", *(["compiled"] if Path(folder).name == "capture" else [])} & set(names)

    shutil.copytree(ROOT / "ranktape", tmp_path / "ranktape", ignore=left_out)
    run(TRAINING + SEAM, tmp_path / "run", tmp_path, cwd=tmp_path, root=tmp_path)
    stored = open_run(tmp_path / "run")
    outputs = stored.select(tensor_name="output")
    assert sorted(zip(outputs.column("module"), outputs.column("iteration"), strict=True)) == [
        ("down", 0),
        ("down", 1),
        ("up", 0),
        ("up", 1),
    ]


HANGING = """
import sys
import time

from ranktape.capture import Capture
from tests.capture.programs.gloo_hang import PART, train

with Capture(sys.argv[1]):
    train()
    train(has_optimizer=True)
    whole = train(has_optimizer=True)  # another group, in an iteration that is not captured
    # A process that ends while gloo still works may be aborted, whoever holds the group.
    while whole[-1] != PART[-1]:
        time.sleep(0.1)
print("ended")
"""
"""Without the capture none of the trainings ends: `programs/gloo_hang.py` says why."""


@exhaustive("five trainings in a row")
def test_no_captured_training_waits_for_ever_for_the_end_of_its_process_group(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HANGING, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    assert open_run(tmp_path / "run").iterations == [0]
