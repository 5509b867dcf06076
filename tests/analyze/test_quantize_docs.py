"""Do the examples on the page of quantisation run, and print what they say?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[2] / "docs" / "quantization.md"


def test_the_examples_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - our own page
    said = re.findall(r"print\(.*?\)  # (.*)", "".join(blocks))
    assert capsys.readouterr().out.splitlines() == said
