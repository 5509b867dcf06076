"""Do the pages say what is there: the tree, the files, the commands, the links?"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.exhaustive import exhaustive
from tests.kernels import load

CHECKOUT = Path(__file__).parents[1]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md"), *CHECKOUT.glob("benchmarks/*.md")])


def _documented_tree() -> set[str]:
    """Paths in README's tree: the block under "The tree", two spaces for each level, then what the entry is for."""
    found = re.search(r"## The tree\n.*?```text\n(.*?)```", README, re.DOTALL)
    assert found
    above: list[str] = []
    paths = set()
    for line in found[1].splitlines():
        indent = len(line) - len(line.lstrip())
        name, _, purpose = line.strip().partition("  ")
        assert purpose.strip(), f"{name}: say what it is for"
        above[indent // 2 :] = [name.rstrip("/")]
        paths.add("/".join(above))
    return paths


def _real_tree() -> set[str]:
    """The top level and the package's folders and files, without what git ignores and without hidden files but CI's."""
    ignored = [line.rstrip("/") for line in (CHECKOUT / ".gitignore").read_text(encoding="utf-8").splitlines()]
    entries = [*CHECKOUT.iterdir(), *CHECKOUT.glob("ranktape/*"), *CHECKOUT.glob(".ci/*")]
    return {
        str(entry.relative_to(CHECKOUT))
        for entry in entries
        if not any(fnmatch.fnmatch(entry.name, pattern) for pattern in ignored)
        and entry.name not in {".git", ".gitignore"}
    }


def test_the_tree_in_readme_is_the_real_tree() -> None:
    assert _documented_tree() == _real_tree()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_every_path_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [page.parent / link for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", text)]
    named = re.findall(r"`((?:ranktape|tests|docs|examples|benchmarks|\.ci)/[\w./-]+)`", text)
    files = [CHECKOUT / name for name in named]
    assert [str(path) for path in [*links, *files] if not path.exists()] == []


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
    section = README.partition("## Quick starts")[2].partition("\n## ")[0]
    blocks = re.findall(r"```(sh|python)\n(.*?)```", section, re.DOTALL)
    assert [language for language, _ in blocks] == ["sh", "python", "sh", "python"]
    shutil.copytree(CHECKOUT / "examples", tmp_path / "examples")
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    for language, block in blocks:
        source = MODEL + block if "model=model" in block else block
        command = ["bash", "-euo", "pipefail", "-c"] if language == "sh" else [sys.executable, "-c"]
        done = subprocess.run(
            [*command, source],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"


def test_every_target_that_readme_names_is_in_the_makefile() -> None:
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE))
    assert {"demo", "test"} <= named
    assert [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_every_benchmark_is_on_the_page_of_benchmarks() -> None:
    page = (CHECKOUT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    scripts = {str(path.relative_to(CHECKOUT)) for path in CHECKOUT.glob("benchmarks/*.py")}
    assert set(re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)) == scripts


def test_every_command_says_on_the_page_of_commands_what_it_does() -> None:
    page = load(CHECKOUT / "docs" / "commands.py").page()
    sections = re.findall(r"^## (.+)\n\n```text\nUsage: .*\n((?:  +.*\n)*)\n?(.*)", page, re.MULTILINE)
    assert {"ranktape", "ranktape status", "ranktape analyze sweep"} <= {name for name, *_ in sections}
    assert [name for name, _, first in sections if not first.strip() or first.startswith("Options:")] == []
