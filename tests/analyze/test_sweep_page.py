"""Do the examples on the page of sweeps run as they stand, one after the other?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from ranktape.analyze.numerics.sweeps.metrics import Level
from ranktape.analyze.numerics.sweeps.options import SweepMode
from tests.exhaustive import exhaustive

PAGE = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text(encoding="utf-8")


@exhaustive("each command and function of the page has tests of its own")
def test_the_examples_run(tmp_path: Path) -> None:
    blocks = re.findall(r"```(sh|python)\n(.*?)```", PAGE, re.DOTALL)
    assert [language for language, _ in blocks] == ["python", "sh", "python", "python"]
    said = []
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    for language, block in blocks:
        command = ["bash", "-euo", "pipefail", "-c"] if language == "sh" else [sys.executable, "-c"]
        done = subprocess.run(
            [*command, block],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        assert done.stderr == ""
        said.append(done.stdout)
    tree = set(re.findall(r"^    (mxfp_\S+)  ", PAGE, re.MULTILINE))
    assert {entry.name for entry in (tmp_path / "results" / "weights").iterdir()} == tree
    assert "All tests completed successfully!" in said[1]
    assert said[2].startswith("use scale exponent ")


def test_the_page_defines_every_mode_and_figure() -> None:
    modes = re.findall(r"^\| `(\w+)` \| one ", PAGE, re.MULTILINE)
    assert modes == list(SweepMode)
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| .* \| .* \|$", PAGE.partition("## The figures")[2], re.MULTILINE)
    defined = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    figures = {name.removesuffix("_ratio") for name in Level.__dataclass_fields__ if not name.endswith("_count")}
    assert figures - {"exponent", "scale", "score"} == defined
