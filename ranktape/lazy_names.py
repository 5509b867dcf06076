"""How a package gives its public names without importing their files."""

import importlib
import sys
from collections.abc import Callable
from typing import Any


def public_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package whose public names live in other files.

    They are what it imports under `TYPE_CHECKING`, each in a line `from file import name as name`: the package's own
    source is the table, and type checkers read the same. A name is imported when it is first used, and stays in the
    package from then on.
    """
    loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]  # a package that is imported has one
    words = [line.split() for line in loader.get_source(package).splitlines() if line.startswith("    from ")]
    home_of = {line[3]: line[1] for line in words}

    def fetch(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return list(home_of), fetch, lambda: list(home_of)
