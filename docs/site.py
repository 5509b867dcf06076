"""Adds the generated pages to the site: all commands from their help, and the public Python names (`make docs`)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

from ranktape.capture.settings.options import SETTINGS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

PACKAGES = ("ranktape", "ranktape.capture", "ranktape.storage", "ranktape.analyze")
"""The packages whose public names are documented."""

PRIVATE = frozenset({"__version__"})


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Called by MkDocs with the files of the site; gives them with those that are generated."""
    for name, text in {"commands.md": _commands().page(), **api_pages()}.items():
        files.append(File.generated(config, name, content=text))
    return files


def api_pages() -> dict[str, str]:
    """A page for each public name, which mkdocstrings fills, under the first package that has it; and their list."""
    lines, pages, seen = ["# Python", ""], {}, set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines += [f"## {package}", "", (module.__doc__ or "").strip(), "", "| name | is |", "|---|---|"]
        for name in module.__all__:
            if name in PRIVATE or name in seen:
                continue
            seen.add(name)
            one = getattr(module, name)
            home = f"{getattr(one, '__module__', package)}.{name}"
            about = inspect.getdoc(one) if callable(one) else ""
            first = (about or "").partition("\n")[0].replace("|", "\\|")
            if callable(one):
                more = settings_table() if name == "Capture" else ""
                pages[f"api/{name}.md"] = f"# {name}\n\n`from {package} import {name}`\n\n::: {home}\n{more}"
                lines.append(f"| [{name}](api/{name}.md) | {first} |")
            else:
                lines.append(f"| `{name}` | {first} |")
        lines.append("")
    return {"api.md": "\n".join(lines), **pages}


def settings_table() -> str:
    """The settings of a capture: keyword arguments of `Capture`, options of the launcher, and variables."""
    rows = [
        f"| `{one.name}` | `{one.flag}` | {'' if one.default in {None, ()} else f'`{one.default}`'} | "
        f"{one.help.replace('|', chr(92) + '|')} |"
        for one in SETTINGS
    ]
    head = "\n## Settings\n\n| keyword | option | default | is |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def _commands() -> Any:
    path = Path(__file__).with_name("commands.py")
    spec = importlib.util.spec_from_file_location("commands", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["commands"] = module
    spec.loader.exec_module(module)
    return module
