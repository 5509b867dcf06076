"""Do the tutorials run as they stand?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of, run_block
from tests.exhaustive import exhaustive
from tests.launch.processes import CHECKOUT

TUTORIALS = sorted(CHECKOUT.glob("docs/tutorials/*.md"))


@exhaustive("tests/launch and tests/analyze run each of these commands")
@pytest.mark.distributed
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: str(page.stem))
def test_each_tutorial_runs_as_it_stands(tmp_path: Path, page: Path) -> None:
    shutil.copytree(CHECKOUT / "examples", tmp_path / "examples")
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    assert blocks
    for language, block in blocks:
        run_block(language, block, folder=tmp_path)
