"""Compiles the loops over elements when the first of them is called, and keeps what was compiled.

Loops that the compiler turns into vector instructions; everything that needs Python stays outside of them. To import
the compiler takes longer than many questions: it is imported when something is counted.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

BLOCK = 4096
"""Elements that a kernel adds up in integers as narrow as the elements, so that the compiler vectorises it."""


def compiled(function: Function) -> Function:
    """`function` as machine code without the GIL, cached beside the source or in the user's cache.

    Where neither place can be written (a read-only container), it is compiled once for each process.
    """
    return _compiled(function, fastmath=False)


def compiled_sums(function: Function) -> Function:
    """The same, for sums of floats in any order: one after the other they take ten times as long."""
    return _compiled(function, fastmath={"reassoc"})


def compiled_products(function: Function) -> Function:
    """The same, where a product may be added before it is rounded: one instruction for two."""
    return _compiled(function, fastmath={"reassoc", "contract"})


class _Kernel:
    """A loop that is compiled when it, or any other, is first called."""

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
    """Put what the compiler makes in the place of each loop, by which loops find the ones that they call."""
    global _is_loaded  # noqa: PLW0603  # of the process
    with _loading:
        if _is_loaded:
            return
        package = __name__.partition(".")[0]
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == package:
                for own, value in list(vars(module).items()):
                    if isinstance(value, _Kernel):
                        setattr(module, own, value.dispatcher)
        _is_loaded = True


def _compiled(function: Function, **options: Any) -> Function:
    kernel = _Kernel(function, options)
    return cast("Function", kernel.dispatcher if _is_loaded else kernel)
