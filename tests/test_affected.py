"""`make affected` runs the tests that a change can break, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.affected import affected

SOURCES = {
    "ranktape/__init__.py": "if TYPE_CHECKING:\n    from ranktape.storage import Run as Run",
    "ranktape/storage/__init__.py": "if TYPE_CHECKING:\n    from ranktape.storage.run import Run as Run",
    "ranktape/storage/run.py": "def f():\n    from . import names",
    "ranktape/storage/names.py": "",
    "ranktape/analyze/__init__.py": "",
    "ranktape/analyze/page.py": "LAZY = 'ranktape.analyze.table:Table'",
    "ranktape/analyze/page.js": "",
    "ranktape/analyze/table.py": "",
    "tests/runs.py": "from ranktape import Run",
    "tests/conftest.py": "",
    "tests/test_run.py": "from tests.runs import Run",
    "tests/test_page.py": "import ranktape.analyze.page",
    "tests/test_script.py": "SCRIPT = 'from ranktape.storage.names import x'",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"ranktape/storage/names.py"}, ["tests/test_run.py", "tests/test_script.py"]),
        ({"ranktape/storage/run.py"}, ["tests/test_run.py"]),
        ({"ranktape/analyze/table.py"}, ["tests/test_page.py"]),
        ({"ranktape/analyze/page.js"}, ["tests/test_page.py"]),
        ({"ranktape/__init__.py"}, ["tests/test_page.py", "tests/test_run.py", "tests/test_script.py"]),
        ({"tests/runs.py"}, ["tests/test_run.py"]),
        ({"tests/test_script.py"}, ["tests/test_script.py"]),
        ({"README.md"}, []),
        ({"README.md", "tests/conftest.py"}, ["tests"]),
        (set(), []),
    ],
)
def test_those_that_a_change_can_break(tmp_path: Path, changed: set[str], expected: list[str]) -> None:
    for name, source in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert affected(changed, checkout=tmp_path) == expected
