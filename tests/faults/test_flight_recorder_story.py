"""Does the first finding say where a training that died of an overflow began to go wrong? The story of its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranktape.analyze.findings.find import find
from ranktape.storage import open_run
from ranktape.storage.format.live import TriggerKind
from tests.exhaustive import exhaustive
from tests.faults.test_flight_recorder import closed
from tests.launch.processes import CHECKOUT, torchrun

SCRIPT = CHECKOUT / "examples" / "overflow_story.py"
OVERFLOW, DEATH = 137, 140


@pytest.mark.slow
@pytest.mark.timeout(240)
@exhaustive("make test has each trigger in tests/faults/test_flight_recorder.py")
def test_the_story_of_the_page(tmp_path: Path) -> None:
    launcher = ("-m", "ranktape.launch", "--capture", "runs/story", "--record-last", "4")
    ended = torchrun(*launcher, SCRIPT, cwd=tmp_path)
    assert ended.returncode != 0
    assert f"FloatingPointError: the loss is nan in step {DEATH}" in ended.stderr
    closed(tmp_path / "runs" / "story")
    run = open_run(tmp_path / "runs" / "story")
    assert run.iterations == list(range(OVERFLOW - 4, DEATH + 1))
    assert run.verdict().complete == list(range(OVERFLOW - 4, DEATH))
    first, *others = run.triggers()
    assert (first.kind, first.iteration, first.rank) == (TriggerKind.INF, OVERFLOW, 1)
    assert f"FloatingPointError: the loss is nan in step {DEATH}" in {one.text for one in others}
    finding = find(run.select())[0]
    assert finding.kind == "triggered"
    where = {name: finding.where[name] for name in ("iteration", "rank", "layer_idx", "module", "operation", "phase")}
    assert where == {
        "iteration": OVERFLOW,
        "rank": 1,
        "layer_idx": 5,
        "module": "layers.5.up",
        "operation": "forward",
        "phase": "post",
    }
    [place] = finding.places
    record = list(run.select())[place]
    assert (record.module, record.tensor_name, record.iteration, record.rank) == ("layers.5.up", "output", OVERFLOW, 1)
