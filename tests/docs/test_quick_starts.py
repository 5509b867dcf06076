"""Do the quick starts of README run as they stand?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of, run_block
from tests.exhaustive import exhaustive
from tests.launch.processes import CHECKOUT

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
