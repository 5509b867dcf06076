"""Makes a command of a function: its options come from the signature, their help from the docstring.

The function is read and not imported, so that help answers at once. What stands before `Args:` in the docstring is the
help of the command; an entry `name (METAVAR): text` there is that of an option. A parameter that is named in backticks
is named as an option in help. These parameters mean the same in every command:

- `records` and other `Records` are runs that are opened, filtered by the options of fields; a function that takes
  `selection` or `selections` opens them itself;
- `by`, `view`, `engine` and an `output` of that class have the options of `ranktape.analyze.options`.

What a function of records returns is the answer, and is written as the options of `output` say.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ranktape.analyze.options import OPTIONS, NamedPath, Output, Selection, flag_of
from ranktape.errors import CheckFoundError

_TYPES = {"int": int, "float": float, "str": str}

_LITERALS = (ast.Constant, ast.UnaryOp, ast.Tuple)

_ENTRY = re.compile(r"^    (\w+)(?: \(([^)]*)\))?: ((?:.*)(?:\n      .*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a function."""

    name: str
    """Its name in Python; that of the option with dashes."""
    annotation: str
    """Its type, as it is written."""
    default: Any
    """What holds where it is not given; None where that is no literal."""
    is_positional: bool
    """Whether it may be given without its name."""

    @property
    def shared(self) -> str:
        """The key of its options in `OPTIONS`; empty where it has one of its own."""
        is_shared = self.name in OPTIONS and (self.name != "output" or self.annotation == "Output")
        return "selection" if self.name == "records" else self.name if is_shared else ""

    @property
    def is_run(self) -> bool:
        """Whether it takes the records of a further run."""
        return self.name != "records" and self.annotation.split(" |")[0] == "Records"


def make_command(module: str, name: str) -> click.Command:
    """The command of a function, which has its name."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.loader is not None
    source = spec.loader.get_source(module)  # type: ignore[attr-defined]  # a loader of source has it
    (function,) = (one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and one.name == name)
    parameters = [one for one in _parameters(function) if not one.annotation.startswith("Callable")]
    text, _, rest = inspect.cleandoc(ast.get_docstring(function) or "").partition("\n\nArgs:\n")
    said = {key: (metavar, " ".join(text.split())) for key, metavar, text in _ENTRY.findall(rest.split("\n\n")[0])}
    names = [one.name for one in parameters]

    def as_options(text: str) -> str:
        return re.sub(r"`(\w+)`", lambda found: flag_of(found[1]) if found[1] in names else f"'{found[1]}'", text)

    def run(**values: Any) -> None:
        called = getattr(importlib.import_module(module), name)
        if names[0] == "records":
            _answer(called, parameters, **values)
        else:
            called(**values)

    decorated: Callable[..., Any] = OPTIONS["output"](run) if names[0] == "records" else run
    for one in [one for key in ("output", "engine", "by", "view") for one in parameters if one.shared == key]:
        decorated = OPTIONS[one.shared](decorated)
    for one in reversed(parameters[1:]):
        if one.is_run and one.is_positional:
            decorated = click.argument(one.name, metavar=f"[{one.name.upper()}]", required=False)(decorated)
        elif not one.shared:
            metavar, entry = said.get(one.name, ("", ""))
            decorated = _option(one, metavar=metavar, text=as_options(entry))(decorated)
    decorated = OPTIONS[parameters[0].shared](decorated)
    return click.command(name=name.replace("_", "-"), help=as_options(text.split("\n\nRaises:")[0]))(decorated)


def _answer(
    function: Callable[..., Any], parameters: list[Parameter], *, selection: Selection, output: Output, **values: Any
) -> None:
    """Ask a question, and write the answer; that something does not pass is raised."""
    runs = {
        one.name: dataclasses.replace(selection, run=values.pop(one.name)).records()
        for one in parameters
        if one.is_run and values[one.name] is not None
    }
    given = {name: value for name, value in values.items() if value is not None and value != ()}
    found = function(selection.records(), **given, **runs)
    output.write(found)
    if not getattr(found, "passed", True):
        raise CheckFoundError(found.message)


def _parameters(function: ast.FunctionDef) -> Iterator[Parameter]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = [*zip(positional, [*defaults, *arguments.defaults], strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for place, (argument, default) in enumerate(pairs):
        assert argument.annotation is not None
        yield Parameter(
            name=argument.arg,
            annotation=ast.unparse(argument.annotation),
            default=ast.literal_eval(default) if isinstance(default, _LITERALS) else None,
            is_positional=place < len(positional),
        )


def _option(one: Parameter, *, metavar: str, text: str) -> Callable[..., Any]:
    """The option of a parameter; it gives None, or nothing, where it is not given and has no default to show."""
    settings: dict[str, Any] = {"help": text, "metavar": metavar or None}
    flag = flag_of(one.name)
    if one.annotation == "bool":
        pair = f"{flag}/--no-{flag[2:]}" if one.default else flag
        return click.option(pair, one.name, default=one.default, help=text, is_flag=True, show_default=one.default)
    if one.annotation.startswith("Literal"):
        settings |= {"type": click.Choice(re.findall(r"'(\w+)'", one.annotation)), "metavar": None}
    elif "Path" in one.annotation:
        settings["type"] = NamedPath(path_type=Path)
    else:
        kinds = one.annotation.split(" | ")
        settings["type"] = str if "str" in kinds else _TYPES.get(kinds[0], str)
    if "Sequence" in one.annotation:
        settings["multiple"] = True
    if one.default not in {None, ()}:
        settings |= {"default": one.default, "show_default": True}
    return click.option(*(["-o"] if one.name == "output" else []), flag, one.name, **settings)
