"""Registers our data types with zarr, whichever of the two is imported first.

zarr never loads the data types that packages announce by entry point, so that somebody has to register them.
`import ranktape.storage` must not import zarr, which takes longer than a command may take to print its help;
so where zarr is not there yet, a finder waits for it, registers right after it, and leaves.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import types
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

_AWAITED = "zarr"

_lock = threading.Lock()
"""Held while `sys.meta_path` is changed, so that two threads install one finder."""


def register() -> None:
    """Register the small floats with zarr, so that plain `zarr.open` reads them; doing it again changes nothing.

    A type that has been registered under the same name by somebody else, such as a later zarr, is kept. Imports
    zarr.
    """
    # First the whole of zarr: where another thread is in the middle of importing it, this waits for its end, which
    # an import of a part of it would not, and would break both.
    import zarr  # noqa: F401

    # No name of it is asked for: where its import is what imports zarr, it goes on and registers when this returns.
    import ranktape.storage.format.zarr_floats  # noqa: F401


def register_on_import() -> None:
    """Register now if zarr has been imported, otherwise right after it will be.

    Never raises, and never makes `import zarr` fail: a failure of ours is reported as a RuntimeWarning. Safe to
    call from any thread, and more than once.
    """
    with _lock:
        if _AWAITED not in sys.modules and not any(isinstance(finder, _AwaitZarr) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AwaitZarr())
    # Looked at again: another thread may have imported zarr past a finder that was not there yet.
    if _AWAITED in sys.modules:
        _stop_waiting()
        _register_and_report()


def _register_and_report() -> None:
    try:
        register()
    except Exception as error:  # noqa: BLE001 - whatever it is, it may not break somebody's `import zarr`
        message = (
            f"ranktape could not register its data types with zarr ({type(error).__name__}: {error}): arrays of "
            "bfloat16 and of 8-bit floats will not open; call ranktape.storage.register() for the whole traceback"
        )
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:
            # Under `-W error` the warning would end the import.
            with contextlib.suppress(OSError, AttributeError):
                sys.stderr.write(message + "\n")


def _stop_waiting() -> None:
    with _lock:
        # A new list, as another thread may be walking the old one, and would skip a finder if it shrank.
        sys.meta_path = [finder for finder in sys.meta_path if not isinstance(finder, _AwaitZarr)]


class _AwaitZarr(MetaPathFinder):
    """Finds zarr where the other finders find it, and asks to be told when it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' answer for zarr, with a loader that registers afterwards; None for anything else."""
        if fullname != _AWAITED:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if isinstance(finder, _AwaitZarr) or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _RegisterAfter(spec.loader)
                return spec
        return None


class _RegisterAfter(Loader):
    """Loads as another loader does, puts that one back in its place, and registers."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        # For those who only look for zarr and then ask its loader, as importlib.resources does.
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        """What the other loader makes."""
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module as if nobody waited for it, then register."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        _stop_waiting()
        _register_and_report()
