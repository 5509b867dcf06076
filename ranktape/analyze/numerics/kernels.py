"""Compiles loops over elements with numba when the first of them is called, and caches the machine code.

The loops are written so that the compiler vectorises them; everything that needs Python stays outside. Importing numba
takes longer than many commands, so it is imported when the first loop is called.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

BLOCK = 4096
"""Number of elements that a kernel counts in integers as narrow as the elements, so that it is vectorised."""


def compiled(function: Function) -> Function:
    """Compile a function to machine code that releases the GIL, cached next to its source or in the user's cache.

    If neither directory is writable, as in a read-only container, it is compiled once in each process.
    """
    return _compiled(function, fastmath=False)


def compiled_sums(function: Function) -> Function:
    """As `compiled`, but sums of floats may be reordered, which makes them ten times as fast."""
    return _compiled(function, fastmath={"reassoc"})


def compiled_products(function: Function) -> Function:
    """As `compiled_sums`, but a product may be added without rounding it first, in one fused instruction."""
    return _compiled(function, fastmath={"reassoc", "contract"})


class _Kernel:
    """A loop that is compiled when it, or any other loop, is first called."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self._function, self._options = function, options

    def __call__(self, *values: Any) -> Any:
        load_compiler()
        return self.dispatcher(*values)

    @functools.cached_property
    def dispatcher(self) -> Any:
        """The compiled loop."""
        import numba

        try:
            return numba.njit(nogil=True, cache=True, **self._options)(self._function)
        except RuntimeError:  # numba found no directory for its cache
            return numba.njit(nogil=True, **self._options)(self._function)


_is_loaded = False
_loading = threading.RLock()


def load_compiler() -> None:
    """Replace each loop of the loaded modules by its numba dispatcher, so that compiled loops can call each other."""
    global _is_loaded  # noqa: PLW0603  # once for each process
    with _loading:
        if _is_loaded:
            return
        package = __name__.partition(".")[0]
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == package:
                for attribute, value in list(vars(module).items()):
                    if isinstance(value, _Kernel):
                        setattr(module, attribute, value.dispatcher)
        _is_loaded = True


def _compiled(function: Function, **options: Any) -> Function:
    kernel = _Kernel(function, options)
    return cast("Function", kernel.dispatcher if _is_loaded else kernel)
