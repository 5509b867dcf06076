"""Names the test files that a change can break: those which import, in the end, a module that was changed.

A change is what differs from a commit (`main`, unless another one is given), committed or not. A file that no module
imports counts for the modules of its folder; a change of what every test stands on (`conftest.py`, `pyproject.toml`,
`constraints.txt`) names `tests`.

affected.py [COMMIT]
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.imported import imports, module_of, package_of, reached

CHECKOUT = Path(__file__).parents[1]
EVERYTHING = {"tests/conftest.py", "pyproject.toml", "constraints.txt"}
NAMED_IN_TEXT = re.compile(r"ranktape(?:\.[a-z_]+)*")
"""Of a test's text: a script that another process runs, or the words of a command line."""


def changed_since(commit: str) -> set[str]:
    """Paths below the checkout that differ from `commit`, new ones among them."""
    differing = _git("diff", "--name-only", commit)
    new = _git("ls-files", "--others", "--exclude-standard")
    return {*differing, *new}


def affected(changed: set[str], *, checkout: Path = CHECKOUT) -> list[str]:
    """The test files, sorted, that a change of these paths can break; `["tests"]` where that may be any."""
    if changed & EVERYTHING:
        return ["tests"]
    paths = {
        module_of(path, checkout): path for top in ("ranktape", "tests") for path in (checkout / top).rglob("*.py")
    }
    trees = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in paths.items()}
    found = {module: imports(tree, package=package_of(paths[module], checkout)) for module, tree in trees.items()}
    # A package fetches a public name when it is first used: its imports for the type checker say from where.
    exported = {
        f"{module}.{item.target.rpartition('.')[2]}": item.target
        for module, items in found.items()
        if paths[module].name == "__init__.py"
        for item in items
        if not item.is_runtime
    }
    arrows: dict[str, set[str]] = {}
    for module, items in found.items():
        names = {item.target for item in items if item.is_runtime}
        if module.startswith("tests."):
            texts = (node.value for node in ast.walk(trees[module]) if isinstance(node, ast.Constant))
            names.update(name for text in texts if isinstance(text, str) for name in NAMED_IN_TEXT.findall(text))
        arrows[module] = {near for name in names for near in _modules(name, exported)} & set(paths)
    hit = {module for module, path in paths.items() if _is_hit(path.relative_to(checkout), changed)}
    return sorted(
        str(path.relative_to(checkout))
        for module, path in paths.items()
        if path.name.startswith("test_") and hit & {module, *reached([module], arrows)}
    )


def _modules(name: str, exported: dict[str, str]) -> set[str]:
    """Those that Python may run for an imported name: itself, the module that it is in, and the packages above."""
    while name in exported:
        name = exported[name]
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


def _is_hit(place: Path, changed: set[str]) -> bool:
    """Whether a module was changed, or a file beside it that no module can import."""
    return str(place) in changed or any(
        Path(name).parent == place.parent and not name.endswith(".py") for name in changed
    )


def _git(*words: str) -> list[str]:
    command = ["git", "-C", str(CHECKOUT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


if __name__ == "__main__":
    sys.stdout.write("\n".join(affected(changed_since(*(sys.argv[1:] or ["main"])))) + "\n")
