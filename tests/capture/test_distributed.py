"""Does a run stay true when one of several ranks dies?"""

from __future__ import annotations

from pathlib import Path

import pytest

from ranktape.storage import IterationState, open_run
from tests.capture.models import NUM_TENSORS
from tests.capture.programs import ddp
from tests.launch.processes import torchrun
from tests.waiting import until


@pytest.mark.distributed
def test_a_rank_that_is_killed_leaves_a_partial_iteration_and_whole_ones(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    killed = torchrun(Path(ddp.__file__), "1:3", "--capture", url, "--min-iterations=6", cwd=tmp_path)
    assert killed.returncode != 0
    assert killed.stderr.count("ranktape: capturing") == 1
    # The coordinator outlives the training, and closes the attempt.
    until(lambda: open_run(url).verdict().final, said=lambda: open_run(url).status())
    run = open_run(url)
    states = {status.iteration: status for status in run.status()}
    assert [states[iteration].state for iteration in (0, 1, 2)] == [IterationState.COMPLETE] * 3
    assert states[3].state is IterationState.PARTIAL
    assert "tensors: the training process died" in states[3].missing[1]
    assert run.iterations == [0, 1, 2]
    verdict = run.verdict()
    assert (verdict.met, verdict.complete) == (False, [0, 1, 2])
    assert "iteration 3 is partial" in verdict.message()
    records = run.select()
    assert len(records) == 3 * 2 * (ddp.MICROBATCHES * (NUM_TENSORS - 13) + 13)
    for record in records:
        record.read()  # compares with the checksum that was taken when it was written
