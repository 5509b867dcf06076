"""Creates a command from a function: options from the signature, help from the docstring.

The source of the function is parsed, not imported, so that help is fast. The docstring before `Args:` is the help of
the command; an entry `name (METAVAR): text` there is that of an option. Names of parameters in backticks become options
in the help. These parameters have the same meaning in every command:

- `records` and other parameters of type `Records` are runs that are opened and filtered by the options of fields. A
  function with `selection` or `selections` opens them itself. Several sources may be given, or if a second run is the
  other side of a comparison, several of that one.
- `filters` with `run`, `where` and `storage_options` is a selection of that run.
- `storage_options`, `by`, `view`, `engine` and an `output` of type `Output` have the options of
  `ranktape.analyze.options`.
- Parameters that start with `on_` are callbacks and have no option.

The result of a function of records is the answer, which is written according to the options of `output`. Commands that
manage runs write their answers themselves (`ranktape.launch.place`).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ranktape.analyze.group import RanktapeCommand
from ranktape.analyze.options import OPTIONS, JsonObject, NamedPath, Output, Selection, flag_of

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A decorator that adds an option to a command."""

_TYPES = {"int": int, "float": float, "str": str}

_LITERALS = (ast.Constant, ast.UnaryOp, ast.Tuple)

_ENTRY = re.compile(r"^    (\w+)(?: \(([^)]*)\))?: ((?:.*)(?:\n      .*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a function."""

    name: str
    """Its name in Python. The option has dashes instead of underscores."""
    annotation: str
    """Its type, as in the source."""
    default: Any
    """The default value; None if it is not a literal."""
    is_positional: bool
    """Whether it may be given by position."""

    @property
    def shared(self) -> str:
        """The key of its options in `OPTIONS`; empty if it has its own option."""
        is_shared = self.name in OPTIONS and (self.name != "output" or self.annotation == "Output")
        return "selection" if self.name in {"records", "filters"} else self.name if is_shared else ""

    @property
    def is_run(self) -> bool:
        """Whether it takes the records of a further run."""
        return self.name != "records" and self.annotation.split(" |")[0] == "Records"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The parts of a function's source from which a command is created."""

    name: str
    """Name of the function."""
    text: str
    """The docstring before `Args:`."""
    parameters: list[Parameter]
    """The parameters that have an option or an argument."""
    option_help: dict[str, tuple[str, str]]
    """For each parameter, the metavar and the help."""

    def command(self, run: Callable[..., Any], *, more: Sequence[Decorator] = ()) -> click.Command:
        """A command that calls `run` with the values of the parameters and of the options in `more`."""
        shared = {one.shared for one in self.parameters}
        if self._takes_several:
            shared = shared - {"selection"} | {"selection_of_several"}
        options = [
            *(add for name, add in OPTIONS.items() if name in shared and name.startswith("selection")),
            *(self._option(one) for one in self.parameters if not one.shared),
            *(add for name, add in OPTIONS.items() if name in shared and not name.startswith("selection")),
            *more,
        ]
        decorated = run
        for add in reversed(options):
            decorated = add(decorated)
        help_text = self._with_flags(self.text.split("\n\nRaises:")[0])
        return click.command(name=self.name.replace("_", "-"), cls=RanktapeCommand, help=help_text)(decorated)

    @property
    def _takes_several(self) -> bool:
        """Whether it takes several sources at once. It does not if a second run is the other side of a comparison."""
        has_sides = any(one.is_run and one.is_positional for one in self.parameters)
        return self.parameters[0].name in {"records", "selection"} and not has_sides

    def _with_flags(self, text: str) -> str:
        names = {one.name for one in self.parameters}
        return re.sub(r"`(\w+)`", lambda match: flag_of(match[1]) if match[1] in names else f"'{match[1]}'", text)

    def _option(self, one: Parameter) -> Decorator:
        """The option of a parameter. Its value is None or empty if it is not given and has no literal default."""
        metavar, text = self.option_help.get(one.name, ("", ""))
        settings: dict[str, Any] = {"help": self._with_flags(text), "metavar": metavar or None}
        flag = flag_of(one.name)
        if one.annotation == "bool":
            pair = f"{flag}/--no-{flag[2:]}" if one.default else flag
            return click.option(pair, one.name, default=one.default, is_flag=True, show_default=one.default, **settings)
        if one.is_run and one.is_positional:
            return click.argument(one.name, metavar=f"[{one.name.upper()}]...", nargs=-1, required=False)
        if one.is_positional:
            is_folder = one.annotation == "Path"
            kind = NamedPath(path_type=Path) if is_folder else str
            is_required = one.default is None and "None" not in one.annotation.split(" | ")
            name = metavar or ("DIR" if is_folder else one.name.upper())
            shown = name if is_required else f"[{name}]"
            default = {} if one.default is None else {"default": one.default}
            return click.argument(one.name, metavar=shown, type=kind, required=is_required, **default)
        if one.annotation.startswith("Literal"):
            settings["type"] = click.Choice(re.findall(r"'(\w+)'", one.annotation))
        elif "Path" in one.annotation:
            settings["type"] = NamedPath(path_type=Path)
        elif one.annotation.startswith("Mapping"):
            settings["type"] = JsonObject()
        else:
            kinds = one.annotation.split(" | ")
            settings["type"] = str if "str" in kinds else _TYPES.get(kinds[0], str)
        if "Sequence" in one.annotation:
            settings["multiple"] = True
        if one.default not in {None, ()}:
            settings |= {"default": one.default, "show_default": True}
        return click.option(*(["-o"] if one.name == "output" else []), flag, one.name, **settings)


def describe(module: str, name: str) -> Description:
    """The description of a function, from the source of its module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.loader is not None
    source = spec.loader.get_source(module)  # type: ignore[attr-defined]  # a loader of source has it
    (function,) = (one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and one.name == name)
    parameters = [one for one in _parameters(function) if not one.name.startswith("on_")]
    if any(one.name == "filters" for one in parameters):
        parameters = [one for one in parameters if one.name not in {"run", "where", "storage_options"}]
    text, _, rest = inspect.cleandoc(ast.get_docstring(function) or "").partition("\n\nArgs:\n")
    option_help = {
        key: (metavar, " ".join(words.split())) for key, metavar, words in _ENTRY.findall(rest.split("\n\n")[0])
    }
    return Description(name=name, text=text, parameters=parameters, option_help=option_help)


def make_command(module: str, name: str) -> click.Command:
    """The command of a function, with the same name."""
    described = describe(module, name)
    is_question = described.parameters[0].name == "records"

    def run(**values: Any) -> None:
        called = getattr(importlib.import_module(module), name)
        with _few_collections():
            if is_question:
                _answer(called, described.parameters, **values)
            else:
                called(**values)

    return described.command(run, more=[OPTIONS["output"]] if is_question else [])


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Collect cyclic garbage rarely. Tables have no cycles, but collection took a quarter of the time."""
    before = gc.get_threshold()
    gc.set_threshold(_MANY_OBJECTS, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


_MANY_OBJECTS = 200_000
"""Number of new objects after which the youngest generation is collected."""


def _answer(
    function: Callable[..., Any], parameters: list[Parameter], *, selection: Selection, output: Output, **values: Any
) -> None:
    """Call the function of a question and write its answer. Raises an error if rows fail a check."""
    runs = {}
    for one in (one for one in parameters if one.is_run and values[one.name]):
        urls = values.pop(one.name)
        run, *more = [urls] if isinstance(urls, str) else urls
        runs[one.name] = dataclasses.replace(selection, run=run, more=tuple(more)).records()
    arguments = {name: value for name, value in values.items() if value is not None and value != ()}
    output.write(function(selection.records(), **arguments, **runs))


def _parameters(function: ast.FunctionDef) -> Iterator[Parameter]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = [*zip(positional, [*defaults, *arguments.defaults], strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for index, (argument, default) in enumerate(pairs):
        assert argument.annotation is not None
        yield Parameter(
            name=argument.arg,
            annotation=ast.unparse(argument.annotation),
            default=ast.literal_eval(default) if isinstance(default, _LITERALS) else None,
            is_positional=index < len(positional),
        )
