"""What modules import, read from their source: at the top, in a function, under TYPE_CHECKING, or as text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import statement's reach for one module or name."""

    target: str
    """Dotted, absolute: `ranktape.storage.records.run.open_run`."""
    line: int
    """Where it stands."""
    scope: str
    """Names of the enclosing classes and functions, dotted; empty at the top of the module."""
    is_runtime: bool
    """False under `if TYPE_CHECKING`."""


def imports(tree: ast.Module, *, package: str) -> list[Import]:
    """Every import in a module of `package`; text that is exactly the name of a module of ours counts as one."""
    return list(_imports(tree, package=package, scope="", is_runtime=True))


def _imports(node: ast.AST, *, package: str, scope: str, is_runtime: bool) -> Iterator[Import]:
    for target in targets(node, package=package):
        yield Import(target=target, line=getattr(node, "lineno", 0), scope=scope, is_runtime=is_runtime)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        inner_scope = f"{scope}.{node.name}" if scope else node.name
    else:
        inner_scope = scope
    type_checking = isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                runtime = is_runtime and not (type_checking and name == "body")
                yield from _imports(child, package=package, scope=inner_scope, is_runtime=runtime)


def targets(node: ast.AST, *, package: str) -> list[str]:
    """What one node of a module of `package` reaches for; nothing for most."""
    match node:
        case ast.Import(names=names):
            # `import ranktape` reaches for nothing yet; what is then taken from it is the Attribute below.
            return [alias.name for alias in names if alias.name != "ranktape"]
        case ast.ImportFrom(module=module, names=names, level=level):
            parts = package.split(".")
            above = parts[: len(parts) + 1 - level] if level else []
            return [".".join([*above, *([module] if module else []), alias.name]) for alias in names]
        case ast.Attribute(value=ast.Name(id="ranktape"), attr=attribute):
            return [f"ranktape.{attribute}"]
        case ast.Constant(value=str(text)) if found := re.fullmatch(r"(ranktape(?:\.[a-z_]+)+)(?::\w+)?", text):
            return [found[1]]
    return []


def module_of(path: Path, root: Path) -> str:
    """The dotted name of a source below the folder that Python finds it from."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def package_of(path: Path, root: Path) -> str:
    """The dotted name of the package that a source is in; of an `__init__.py` its own."""
    module = module_of(path, root)
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def reached(start: Iterable[str], arrows: dict[str, set[str]]) -> set[str]:
    """All modules that can be come to from `start` along the arrows, without `start` where no arrow leads back."""
    seen: set[str] = set()
    ahead = list(start)
    while ahead:
        new = arrows.get(ahead.pop(), set()) - seen
        seen |= new
        ahead += new
    return seen
