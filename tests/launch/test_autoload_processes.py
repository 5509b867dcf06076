"""Which processes does RANKTAPE_CAPTURE=URL record, among ranks, workers, children, commands and tests?"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ranktape.storage import open_run
from tests.exhaustive import exhaustive, exhaustive_but
from tests.launch.processes import PLAIN, errors, own_lines, python, torchrun
from tests.launch.test_autoload import RUN, reason_of, run_script
from tests.launch.test_runner import LAUNCH, write_script

ALIKE = exhaustive("it takes the way of its neighbours")


WITH_WORKERS = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self): return 12
        def __getitem__(self, index): return nn.Linear(8, 8)(torch.full((1, 8), float(index))).detach()[0] * 0 + index

    def main():
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1])
        for batch in loader:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {loss.item().hex()}\\n", end="", flush=True)

    # In one write: several processes share stdout.
    print(f"loaded as {__name__}\\n", end="", flush=True)
    if __name__ == "__main__":
        main()
"""


DOORS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "launcher": ((*LAUNCH, "--capture", "run", "--min-iterations", "3"), {}),
    "variable": ((), {**RUN, "RANKTAPE_MIN_ITERATIONS": "3"}),
}
"""The words before a script and the variables that have three of its iterations recorded."""


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("method", "num_loads"),
    [pytest.param("spawn", 2, marks=exhaustive("in make test they are forked")), ("fork", 0)],
)
@exhaustive("make test has processes that record nothing")
def test_data_workers_train_nothing_and_record_nothing(method: str, num_loads: int, door: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(WITH_WORKERS))
    plain = python("train.py", method, cwd=tmp_path)
    words, environment = DOORS[door]
    ended = python(*words, "train.py", method, cwd=tmp_path, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert ended.stdout.count("loaded as __mp_main__") == num_loads
    assert ended.stdout.count("step") == 3
    assert errors(ended) == []
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1, 2]
    # One linear layer, whose input needs no gradient: three values and a bias, three of their gradients.
    assert len(run.select()) == 3 * 7


@exhaustive("make test has workers that record nothing")
def test_a_child_of_the_trainer_is_not_recorded_and_the_child_of_a_launcher_is(tmp_path: Path) -> None:
    write_script(tmp_path, name="child.py")
    child = "import subprocess, sys\nsubprocess.run([sys.executable, 'child.py'], check=True)"
    write_script(tmp_path, after=child)
    ended = python("train.py", cwd=tmp_path, env=RUN)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained") == 2
    assert errors(ended) == []
    assert len(open_run(tmp_path / "run").status()) == 1

    (tmp_path / "parent.py").write_text(f"import torch\n{child}\n")
    ended = python("parent.py", cwd=tmp_path, env={"RANKTAPE_CAPTURE": "launched"})
    assert ended.returncode == 0, ended.stderr
    assert open_run(tmp_path / "launched").iterations == [0]


def test_our_own_commands_and_launcher_do_not_record_where_the_variable_says(tmp_path: Path) -> None:
    write_script(tmp_path)
    exported = {"RANKTAPE_CAPTURE": "exported"}
    ended = python(*LAUNCH, "--capture", "run", "train.py", cwd=tmp_path, env=exported)
    assert ended.returncode == 0, ended.stderr
    assert errors(ended) == []
    assert open_run(tmp_path / "run").iterations == [0]
    told = python("-m", "ranktape.launch.cli", "status", "run", cwd=tmp_path, env=exported)
    assert told.returncode == 0
    assert "minimum met" in told.stdout
    assert not (tmp_path / "exported").exists()


USERS_TEST = """
    import torch

    def test_training():
        model = torch.nn.Linear(3, 3)
        model(torch.ones(2, 3)).sum().backward()
        torch.optim.SGD(model.parameters()).step()
"""


def test_the_tests_of_somebody_are_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(textwrap.dedent(USERS_TEST))
    ended = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py", cwd=tmp_path, env=RUN)
    assert ended.returncode == 0, ended.stdout
    assert not (tmp_path / "run").exists()


OWN_CAPTURE = """
    import torch
    from ranktape.capture import Capture

    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(WARM_UP):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    with Capture("own"):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    print("trained")
"""


@pytest.mark.parametrize("warm_up", [0, 1])
def test_a_capture_of_the_script_takes_the_place_of_ours(warm_up: int, tmp_path: Path) -> None:
    ended = run_script(tmp_path, OWN_CAPTURE.replace("WARM_UP", str(warm_up)), RANKTAPE_MIN_ITERATIONS="5")
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
    assert errors(ended) == []
    assert open_run(tmp_path / "own").iterations == [0]
    assert (tmp_path / "run").exists() == bool(warm_up)
    if warm_up:
        assert "the training began a capture of its own" in reason_of(tmp_path / "run")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "environment", [{"RANKTAPE_EVERY": "0"}, pytest.param({"RANKTAPE_CAPTURE": "/proc/run"}, marks=ALIKE)]
)
def test_two_ranks_say_a_mistake_once_and_train(environment: dict[str, str], tmp_path: Path) -> None:
    ended = torchrun(PLAIN, "--steps", "2", cwd=tmp_path, env={**RUN, **environment})
    assert ended.returncode == 0, ended.stderr
    assert "final loss" in ended.stdout
    assert len(errors(ended)) == 1, ended.stderr


SPAWNED = """
    import os
    import torch
    import torch.distributed as dist

    def train(rank):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"])
        dist.init_process_group("gloo", rank=rank, world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        if FAILS:
            raise ValueError("mine")
        dist.barrier()
        dist.destroy_process_group()

    if __name__ == "__main__":
        torch.multiprocessing.start_processes(train, nprocs=2, start_method="METHOD")
"""


def free_port() -> str:
    """A port for the ranks of a test to meet at."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("method", "fails"), [pytest.param("spawn", False, marks=ALIKE), ("fork", False), ("fork", True)]
)
def test_processes_that_the_script_starts_as_ranks_are_recorded(method: str, fails: bool, tmp_path: Path) -> None:  # noqa: FBT001
    source = SPAWNED.replace("METHOD", method).replace("FAILS", str(fails))
    ended = run_script(tmp_path, source, PORT=free_port(), RANKTAPE_MIN_ITERATIONS="9" if fails else "2")
    assert (ended.returncode == 0) == (not fails), ended.stderr
    assert errors(ended) == []
    if not fails:
        run = open_run(tmp_path / "run")
        assert run.iterations == [0, 1]
        assert {record.rank for record in run.select()} == {0, 1}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("method", "min_iterations"), [pytest.param("spawn", 2, marks=ALIKE), ("fork", 2), ("fork", 9)]
)
@exhaustive_but("fork-2", reason="two ranks are in make test")
def test_the_launcher_records_ranks_that_the_script_starts(method: str, min_iterations: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SPAWNED).replace("METHOD", method).replace("FAILS", "False"))
    options = ("--capture", "run", "--min-iterations", str(min_iterations))
    ended = python(*LAUNCH, *options, "train.py", cwd=tmp_path, env={"PORT": free_port()})
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1]
    assert {record.rank for record in run.select()} == {0, 1}
    if min_iterations == 2:
        assert (ended.returncode, errors(ended)) == (0, []), ended.stderr
        assert "run holds 2 iterations of 2 ranks" in own_lines(ended)[-1]
    else:
        assert ended.returncode == 1
        (error,) = errors(ended)
        assert "2 of 9 guaranteed iterations are stored complete" in error


@pytest.mark.distributed
@exhaustive("make test has failing ranks in tests/launch/test_autoload.py")
def test_a_rank_that_fails_is_not_held_up_by_the_others(tmp_path: Path) -> None:
    after = "import time\nif os.environ['RANK'] == '1': raise ValueError('mine')\ntime.sleep(60)"
    write_script(tmp_path, after=after)
    ended = torchrun("train.py", cwd=tmp_path, env={**RUN, "RANKTAPE_MIN_ITERATIONS": "9"})
    assert ended.returncode == 1
    assert "ValueError: mine" in ended.stderr
    assert ended.stdout.count("trained") == 2
    assert open_run(tmp_path / "run").iterations == [0, 1, 2]
