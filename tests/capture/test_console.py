"""Does a line of ours stand on a line of its own, whatever the training writes?"""

from __future__ import annotations

import sys

import pytest

from ranktape.capture.console import Console


def shown(text: str) -> list[str]:
    """The lines of a terminal to which that was written."""
    lines = []
    for line in text.split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return lines


def test_a_line_stands_above_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    tqdm = pytest.importorskip("tqdm", reason="tqdm is not installed").tqdm
    with tqdm(total=3, desc="training", file=sys.stderr, mininterval=0) as bar:
        bar.update()
        Console(rank=0).say("capturing")
        bar.update()
    above, below, *_ = shown(capsys.readouterr().err)
    assert above == "ranktape: capturing"
    assert below.startswith("training: ")
