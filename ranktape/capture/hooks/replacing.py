"""How is a framework's own function replaced while an iteration is captured, and put back as it was?"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Self


class Replacement:
    """A function, or a method of a class, under whose name another one stands."""

    def __init__(self, owner: Any, name: str, original: Any, replacement: Any) -> None:
        self._owner = owner
        self._name = name
        self._original = original
        self._replacement = replacement
        setattr(owner, name, replacement)

    @classmethod
    def put(cls, module: str, path: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Self | None:
        """Replace what a loaded module has under a dotted path; None where it has nothing there.

        Args:
            module: Name of the module.
            path: A function, or a class and its method.
            make: Makes the replacement from the original.
        """
        owner: Any = sys.modules[module]
        *owners, name = path.split(".")
        for part in owners:
            owner = getattr(owner, part, None)
        original = getattr(owner, "__dict__", {}).get(name)
        if original is None:
            return None
        if isinstance(original, staticmethod):
            return cls(owner, name, original, staticmethod(make(original.__func__)))
        return cls(owner, name, original, make(original))

    def remove(self) -> None:
        """Put the original back, unless somebody has replaced the replacement."""
        if self._owner.__dict__.get(self._name) is self._replacement:
            setattr(self._owner, self._name, self._original)
