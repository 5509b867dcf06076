"""Adds the generated pages to the site: all commands from their help, and the public Python names (`make docs`)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

PACKAGES = ("ranktape", "ranktape.capture", "ranktape.storage", "ranktape.analyze")
"""The packages whose public names are documented."""

PRIVATE = frozenset({"__version__"})


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Called by MkDocs with the files of the site; gives them with those that are generated."""
    for name, text in (("commands.md", _commands().page()), ("api.md", api_page())):
        files.append(File.generated(config, name, content=text))
    return files


def api_page() -> str:
    """The page of the public names, each once, under the first package that has it; mkdocstrings fills it."""
    lines, seen = ["# Python", ""], set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines += [f"## {package}", "", (module.__doc__ or "").strip(), ""]
        for name in module.__all__:
            one = getattr(module, name)
            if name in PRIVATE or name in seen:
                continue
            seen.add(name)
            lines += [f"::: {getattr(one, '__module__', package)}.{name}" if callable(one) else f"### `{name}`", ""]
    return "\n".join(lines)


def _commands() -> Any:
    path = Path(__file__).with_name("commands.py")
    spec = importlib.util.spec_from_file_location("commands", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["commands"] = module
    spec.loader.exec_module(module)
    return module
