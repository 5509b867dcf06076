"""Do the tutorials, the quick starts and the page of replay run as they stand?"""

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


MODEL = """
import torch
from types import SimpleNamespace

class Model(torch.nn.Linear):
    def forward(self, batch):
        return SimpleNamespace(loss=super().forward(batch).square().mean())

model = torch.nn.Sequential(Model(8, 8))
loader = [torch.ones(4, 8)] * 30
optimizer = torch.optim.SGD(model.parameters())
"""
"""What the second quick start takes for granted."""


@exhaustive("tests/launch runs each of these commands")
@pytest.mark.distributed
def test_the_quick_starts_run_as_they_stand(tmp_path: Path) -> None:
    section = (CHECKOUT / "README.md").read_text(encoding="utf-8").partition("## Quick starts")[2].partition("\n## ")[0]
    blocks = blocks_of(section)
    assert [language for language, _ in blocks] == ["sh", "python", "sh", "python"]
    shutil.copytree(CHECKOUT / "examples", tmp_path / "examples")
    for language, block in blocks:
        run_block(language, MODEL + block if "model=model" in block else block, folder=tmp_path)


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
