"""What becomes of a training whose ranks reach their first forward long after each other?"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ranktape.storage import open_run
from tests.exhaustive import exhaustive
from tests.launch.processes import Ended, errors, own_lines, torchrun
from tests.launch.test_autoload import RUN
from tests.launch.test_runner import LAUNCH

pytestmark = pytest.mark.distributed

SCRIPT = """
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
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
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
    assert all(TOO_LATE in line and line.endswith("the training goes on without a capture") for line in early)
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
