"""Runs an unmodified script as if Python itself had started it.

`runpy.run_path` removes its `__main__` module after the last line of the script. With `python train.py`, the module
stays until the process exits, and threads that are still saving a checkpoint may look up classes in it. This module
therefore creates a `__main__` module, which replaces the current one permanently.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ranktape.errors import RanktapeError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script: a file, or a module as in `python -m`."""

    name: str
    """Name on the command line, such as `train.py` or `package.train`."""
    arguments: tuple[str, ...]
    """The arguments after the name, unchanged."""
    is_module: bool
    """Whether `name` is that of a module."""

    def check(self) -> None:
        """Check that the file or the top-level module exists, without running it.

        Raises:
            UsageError: it does not exist.
        """
        if self.is_module:
            top = self.name.partition(".")[0]
            # `python -m` searches the working directory first, but `sys.path` of this process may not contain it.
            here = [] if sys.flags.safe_path else [str(Path.cwd())]
            if not top or not (PathFinder.find_spec(top, here) or importlib.util.find_spec(top)):
                raise UsageError(f"no module named {top!r}: give an importable module after -m, or drop -m for a file")
            return
        path = Path(self.name)
        if path.is_dir():
            raise UsageError(f"{self.name} is a folder: give the training script, such as {path / 'train.py'}")
        if not path.is_file():
            raise UsageError(
                f"no script {self.name!r} in {Path.cwd()}: give the path of the training script after the options"
            )

    def enter(self) -> None:
        """Set `sys.argv` and `sys.path[0]` to what the script expects."""
        sys.argv[:] = [self.name, *self.arguments]
        # With -P or PYTHONSAFEPATH, `sys.path` has no entry for the script.
        if not self.is_module and not sys.flags.safe_path:
            sys.path[0] = str(Path(self.name).resolve().parent)

    def run(self) -> bool:
        """Run the script as `__main__`, which remains afterwards; returns whether it ended with `sys.exit(0)`.

        The traceback of an exception is printed as by Python, without the frames of this module.

        Raises:
            SystemExit: the script failed.
        """
        try:
            self._execute()
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
            return True
        except (KeyboardInterrupt, RanktapeError):
            raise
        except BaseException as error:
            _show(error)
            raise SystemExit(1) from error
        return False

    def _execute(self) -> None:
        if self.is_module:
            spec = _find_module(self.name)
            assert spec.loader is not None and spec.origin is not None  # noqa: PT018  (one fact)
            sys.argv[0] = spec.origin
            loader, path, package = spec.loader, spec.origin, spec.parent
            code = loader.get_code(spec.name)  # type: ignore[attr-defined]
        else:
            path = str(Path(self.name).absolute())
            spec, package = None, None
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
        main = types.ModuleType("__main__")
        # multiprocessing imports the script in spawned workers by `__spec__`, or by its path if that is None.
        vars(main).update(
            __file__=path,
            __loader__=loader,
            __package__=package,
            __spec__=spec,
            __cached__=spec.cached if spec else None,
            __builtins__=builtins,
        )
        sys.modules["__main__"] = main
        exec(code, vars(main))  # noqa: S102  (runs the user's script)


def _find_module(name: str) -> ModuleSpec:
    """The module that `python -m name` would run. This imports its parent packages.

    Raises:
        UsageError: there is no such module.
    """
    for candidate in (name, f"{name}.__main__"):
        try:
            spec = importlib.util.find_spec(candidate)
        except ModuleNotFoundError as error:
            # The command line is only wrong if the module itself or a parent package is missing.
            if error.name is None or not f"{candidate}.".startswith(f"{error.name}."):
                raise
            break
        if spec is None:
            break
        if spec.submodule_search_locations is None and hasattr(spec.loader, "get_code"):
            return spec
    raise UsageError(f"no module to run named {name!r}: give one that 'python -m {name}' can run")


def _show(error: BaseException) -> None:
    """Print a traceback with `sys.excepthook`, from the script's first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
        trace = trace.tb_next
    shown = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(shown), shown, trace
    sys.stdout.flush()
    sys.excepthook(type(shown), shown, trace)
    sys.stderr.flush()
