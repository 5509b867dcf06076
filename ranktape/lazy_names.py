"""The version, and how a package gives its public names without importing their files."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__version__ = "0.1.0"


def public_names(
    package: str, *, homes: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package whose public names live in its submodules `homes`.

    A name is imported when it is first used, and stays in the package from then on. Type checkers cannot follow:
    the package repeats the names as imports under `TYPE_CHECKING`, and tests/test_packaging.py compares the two.
    """
    home_of = {name: f"{package}.{home}" for home, names in homes.items() for name in names}

    def fetch(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return list(home_of), fetch, lambda: list(home_of)
