"""Runs an unmodified script as if Python itself had started it.

`runpy.run_path` takes its `__main__` module away when the script's last line has run; with
`python train.py` it stays until the process ends, and threads that still save a checkpoint look classes
up in it. So a module is made here, put in place of ours, and left there.
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
    """As on the command line: `train.py` or `package.train`."""
    arguments: tuple[str, ...]
    """What follows it there, untouched."""
    is_module: bool
    """Whether `name` is a module's."""

    def check(self) -> None:
        """Return if there is such a file or top-level module; nothing of it is run.

        Raises:
            UsageError: there is none.
        """
        if self.is_module:
            top = self.name.partition(".")[0]
            # Where `python -m` looks first, and a command that starts it has not looked.
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
        # Under -P and PYTHONSAFEPATH there is no such entry, and the first one is not ours to replace.
        if not self.is_module and not sys.flags.safe_path:
            sys.path[0] = str(Path(self.name).resolve().parent)

    def run(self) -> bool:
        """Run it as `__main__` to its end; whether that was `sys.exit(0)`.

        The module remains `__main__` afterwards. An exception is shown as Python shows it, without our
        frames.
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
        # `__spec__` tells multiprocessing how to import the script in spawned workers: None means by path.
        vars(main).update(
            __file__=path,
            __loader__=loader,
            __package__=package,
            __spec__=spec,
            __cached__=spec.cached if spec else None,
            __builtins__=builtins,
        )
        sys.modules["__main__"] = main
        exec(code, vars(main))  # noqa: S102  (what we are for)


def _find_module(name: str) -> ModuleSpec:
    """The module that `python -m name` would run; imports the packages above it."""
    for candidate in (name, f"{name}.__main__"):
        try:
            spec = importlib.util.find_spec(candidate)
        except ModuleNotFoundError as error:
            # Only the lack of the module itself, or of a package above it, is a wrong command line.
            if error.name is None or not f"{candidate}.".startswith(f"{error.name}."):
                raise
            break
        if spec is None:
            break
        if spec.submodule_search_locations is None and hasattr(spec.loader, "get_code"):
            return spec
    raise UsageError(f"no module to run named {name!r}: give one that 'python -m {name}' can run")


def _show(error: BaseException) -> None:
    """Print a traceback by `sys.excepthook`, from the script's first frame on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
        trace = trace.tb_next
    shown = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(shown), shown, trace
    sys.stdout.flush()
    sys.excepthook(type(shown), shown, trace)
    sys.stderr.flush()
