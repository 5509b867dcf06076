"""Is what the page of traps says there: each test that it names, and each limit?"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| trap |")]


@functools.cache
def _tests_of(stem: str) -> set[str]:
    """The tests in the module of that name."""
    [path] = ROOT.glob(f"tests/**/{stem}.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_trap_has_a_test_or_a_limit() -> None:
    assert ROWS
    assert [row for row in ROWS if not re.search(r"`test_\w+::test_\w+`|limit: \"", row)] == []


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(test_\w+)::(test_\w+)`", PAGE)
    assert named
    assert [f"{stem}::{name}" for stem, name in named if name not in _tests_of(stem)] == []


def test_every_limit_that_is_named_is_there() -> None:
    limits = [line for page in ROOT.glob("docs/*.md") for line in page.read_text(encoding="utf-8").splitlines()]
    named = re.findall(r"limit: \"(.+?)\"", PAGE)
    assert named
    assert [words for words in named if not any(line.startswith(f"- {words}") for line in limits)] == []


def test_every_test_of_a_trap_is_on_the_page() -> None:
    paths = list(ROOT.glob("tests/capture/test_traps*.py"))
    assert paths
    for path in paths:
        tests = [name for name in _tests_of(path.stem) if name.startswith("test_")]
        assert [name for name in tests if f"`{path.stem}::{name}`" not in PAGE] == []
