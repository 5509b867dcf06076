"""Does the page of replay run as it stands?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of, run_block
from tests.exhaustive import exhaustive
from tests.launch.processes import CHECKOUT


@exhaustive("tests/analyze and tests/launch run each of these commands")
@pytest.mark.distributed
def test_the_page_of_replay_runs_from_a_recording_to_a_training_by_the_plan(tmp_path: Path) -> None:
    page = (CHECKOUT / "docs" / "replay.md").read_text(encoding="utf-8")
    blocks = blocks_of(page)
    # A quarter of the training: what it has learned is no part of the test.
    short = [block.replace("ranktape demo ", "ranktape demo --steps 25 ") for _, block in blocks]
    assert sum(block.count("--steps 25") for block in short) == 2
    done = [run_block(language, block, folder=tmp_path) for (language, _), block in zip(blocks, short, strict=True)]
    assert [language for language, _ in blocks] == [*["sh"] * 5, "python"]
    assert done[-1].stdout.startswith("head 1")
