"""Do the pages say what is there: the tree, the files, the commands, the links?"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import os
import re
import subprocess
import sysconfig
from pathlib import Path

from ranktape.analyze.numerics.sweeps.metrics import Level
from ranktape.analyze.numerics.sweeps.options import SweepMode
from tests.docs.blocks import blocks_of, run_block
from tests.exhaustive import exhaustive
from tests.kernels import load
from tests.launch.processes import CHECKOUT

MAX_WORDS = 700
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = sorted([*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md"), *CHECKOUT.glob("benchmarks/*.md")])


def _documented_tree() -> set[str]:
    """Paths under "The tree" in CONTRIBUTING: two spaces for each level, then what the entry is for."""
    found = re.search(r"## The tree\n.*?```text\n(.*?)```", CONTRIBUTING, re.DOTALL)
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


def _real_folders() -> set[str]:
    """The folders at the top level, but those that git ignores, and those of the package."""
    ignored = [line.rstrip("/") for line in (CHECKOUT / ".gitignore").read_text(encoding="utf-8").splitlines()]
    folders = [entry for entry in (*CHECKOUT.iterdir(), *CHECKOUT.glob("ranktape/*")) if entry.is_dir()]
    return {
        str(folder.relative_to(CHECKOUT))
        for folder in folders
        if folder.name != ".git" and not any(fnmatch.fnmatch(folder.name, pattern) for pattern in ignored)
    }


def test_the_tree_in_contributing_has_every_folder_and_nothing_else() -> None:
    documented = _documented_tree()
    assert {path for path in documented if (CHECKOUT / path).is_dir()} == _real_folders()
    assert [path for path in documented if not (CHECKOUT / path).exists()] == []


def test_what_examples_import_is_there() -> None:
    imports = {
        (page.name, node.module or "", one.name)
        for page in PAGES
        for language, source in blocks_of(page.read_text(encoding="utf-8"))
        if language == "python"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ranktape")
        for one in node.names
    }
    assert len(imports) > 20
    missing = [one for one in sorted(imports) if not hasattr(importlib.import_module(one[1]), one[2])]
    assert missing == []


def test_readme_is_short() -> None:
    assert len(README.split()) <= MAX_WORDS


def test_every_path_a_page_names_is_there() -> None:
    lost = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        links = [page.parent / link for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", text)]
        named = re.findall(r"`((?:ranktape|tests|docs|examples|benchmarks|\.ci)/[\w./-]+)`", text)
        lost += [f"{page.name}: {path}" for path in (*links, *(CHECKOUT / one for one in named)) if not path.exists()]
    assert lost == []


@exhaustive("the links of each page are tested without it")
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    done = subprocess.run(
        [f"{sysconfig.get_path('scripts')}/mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=CHECKOUT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "ranktape analyze findings" in (tmp_path / "commands.html").read_text(encoding="utf-8")
    assert "fake_quantize" in (tmp_path / "api.html").read_text(encoding="utf-8")
    assert "min_iterations" in (tmp_path / "api" / "Capture.html").read_text(encoding="utf-8")


@exhaustive("each command and function of the page has tests of its own")
def test_the_examples_of_sweeps_run(tmp_path: Path) -> None:
    page = (CHECKOUT / "docs" / "sweep.md").read_text(encoding="utf-8")
    blocks = blocks_of(page)
    assert [language for language, _ in blocks] == ["python", "sh", "python"]
    done = [run_block(language, block, folder=tmp_path) for language, block in blocks]
    assert [one.stderr for one in done] == [""] * 3
    tree = set(re.findall(r"^    (mxfp_\S+)  ", page, re.MULTILINE))
    assert {entry.name for entry in (tmp_path / "results" / "weights").iterdir()} == tree
    assert "All tests completed successfully!" in done[1].stdout
    assert done[2].stdout.startswith("use scale exponent ")


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


def test_the_page_of_sweeps_defines_every_mode_and_metric() -> None:
    page = (CHECKOUT / "docs" / "sweep.md").read_text(encoding="utf-8")
    modes = re.findall(r"^\| `(\w+)` \| one ", page, re.MULTILINE)
    assert modes == list(SweepMode)
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| .* \| .* \|$", page.partition("## The metrics")[2], re.MULTILINE)
    defined = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    metrics = {name.removesuffix("_ratio") for name in Level.__dataclass_fields__ if not name.endswith("_count")}
    assert metrics - {"exponent", "scale", "score"} == defined
