"""Do several ranks agree on iterations, and does the run stay true when one of them dies?

Real processes under torchrun, over gloo.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from ranktape.storage import IterationState, Run, open_run
from tests.capture.models import NUM_TENSORS
from tests.exhaustive import exhaustive
from tests.launch import processes

PROGRAM = Path(__file__).parent / "programs" / "ddp.py"

pytestmark = pytest.mark.distributed


def torchrun(out: Path, *words: str, num_ranks: int = 2) -> processes.Ended:
    """Run the program on some ranks; `out` is made for what it writes."""
    out.mkdir()
    return processes.torchrun(PROGRAM, out, *words, cwd=out, num_ranks=num_ranks)


@pytest.mark.support(framework="PyTorch", parallelism="DDP", features=("accumulation", "unchanged"))
def test_losses_and_weights_are_equal_bit_for_bit_on_every_rank(tmp_path: Path) -> None:
    plain = torchrun(tmp_path / "plain")
    assert plain.returncode == 0, plain.stderr
    url = str(tmp_path / "run")
    captured = torchrun(tmp_path / "captured", "--capture", url, "--start-at=2", "--every=3", "--min-iterations=2")
    assert captured.returncode == 0, captured.stderr
    for rank in range(2):
        expected = (tmp_path / "plain" / f"rank{rank}").read_text()
        assert (tmp_path / "captured" / f"rank{rank}").read_text() == expected
    assert (tmp_path / "plain" / "rank0").read_text() != (tmp_path / "plain" / "rank1").read_text()
    run = open_run(url)
    assert run.iterations == [2, 5]
    assert run.verdict().met
    for (rank, microbatch), group in (
        ((keys["rank"], keys["microbatch"]), group)
        for keys, group in run.select(iteration=5).group_by(["rank", "microbatch"])
    ):
        assert rank in {0, 1}
        assert microbatch in {0, 1, 2, 3}
        assert len(group) == (NUM_TENSORS if microbatch == 0 else NUM_TENSORS - 13)
        assert "layers.1.attention.query" in group.column("module")
    weights = run.select(iteration=5, module="layers.0.up", tensor_name="weight")
    assert torch.equal(weights[0].tensor(), weights[1].tensor())
    inputs = run.select(iteration=5, module="layers.0.up", tensor_name="input", microbatch=3)
    assert not torch.equal(inputs[0].tensor(), inputs[1].tensor())
    assert captured.stderr.count("ranktape: capturing") == 1


def test_a_rank_that_is_killed_leaves_a_partial_iteration_and_whole_ones(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    killed = torchrun(tmp_path / "out", "--capture", url, "--min-iterations=6", "--kill=1:3")
    assert killed.returncode != 0
    run = wait_for_verdict(url)
    states = {status.iteration: status for status in run.status()}
    assert [states[iteration].state for iteration in (0, 1, 2)] == [IterationState.COMPLETE] * 3
    assert states[3].state is IterationState.PARTIAL
    assert "tensors: the training process died" in states[3].missing[1]
    assert run.iterations == [0, 1, 2]
    verdict = run.verdict()
    assert (verdict.met, verdict.complete) == (False, [0, 1, 2])
    assert "iteration 3 is partial" in verdict.message()
    records = run.select()
    assert len(records) == 3 * 2 * (4 * (NUM_TENSORS - 13) + 13)
    for record in records:
        record.read()  # compares with the checksum that was taken when it was written


@exhaustive("four ranks are in test_parallel.py")
def test_four_ranks(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    done = torchrun(tmp_path / "out", "--capture", url, "--min-iterations=2", num_ranks=4)
    assert done.returncode == 0, done.stderr
    run = open_run(url)
    assert run.iterations == [0, 1]
    assert set(run.select().column("rank")) == {0, 1, 2, 3}


def wait_for_verdict(url: str) -> Run:
    """The run, once its coordinator has closed the attempt: it outlives the training."""
    deadline = time.monotonic() + 60
    while not open_run(url).verdict().final:
        assert time.monotonic() < deadline, open_run(url).status()
        time.sleep(0.2)
    return open_run(url)
