"""Makes the command of a question: its options come from the signature of the function, their help from its docstring.

The function is read and not imported, so that help answers at once. What stands before `Args:` in the docstring is the
help of the command; an entry `name (METAVAR): text` there is that of an option. A parameter that is named in backticks
is named as an option in help. These parameters mean the same in every question:

- `records` and other `Records` are runs that are opened, filtered by the options of fields;
- `by`, `view` and `engine` have the options of `ranktape.analyze.options`.
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
from typing import TYPE_CHECKING, Any

import click

from ranktape.analyze.options import (
    NamedPath,
    by_option,
    engine_options,
    output_options,
    selection_options,
    view_option,
)
from ranktape.errors import CheckFoundError

if TYPE_CHECKING:
    from ranktape.analyze.options import Output, Selection

_SHARED: dict[str, Callable[..., Any]] = {"view": view_option, "by": by_option, "engine": engine_options}
"""The decorators that make the options of parameters which every question has."""

_TYPES = {"int": int, "float": float, "str": str}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a question."""

    name: str
    """Its name in Python; that of the option with dashes."""
    annotation: str
    """Its type, as it is written."""
    default: Any
    """What holds where it is not given; None where that is no literal."""
    metavar: str
    """What help writes for its value; empty where it has none."""
    help: str
    """What it is for."""
    is_positional: bool
    """Whether it may be given without its name."""

    @property
    def is_run(self) -> bool:
        """Whether it takes the records of a run."""
        return self.annotation.split(" |")[0] == "Records"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the source of a question says of its command."""

    module: str
    """Where it is."""
    name: str
    """The name of the function, which is that of the command."""
    help: str
    """What it answers."""
    parameters: tuple[Parameter, ...]
    """All but the records."""

    def answer(self, selection: Selection, output: Output, values: dict[str, Any]) -> None:
        """Ask the question, and write the answer.

        Raises:
            CheckFoundError: the answer is that something does not pass.
            RanktapeError: what the question raises.
        """
        function = getattr(importlib.import_module(self.module), self.name)
        runs = {
            one.name: dataclasses.replace(selection, run=values.pop(one.name)).records()
            for one in self.parameters
            if one.is_run and values[one.name] is not None
        }
        given = {name: value for name, value in values.items() if value is not None and value != ()}
        found = function(selection.records(), **given, **runs)
        output.write(found)
        if not getattr(found, "passed", True):
            raise CheckFoundError(found.message)


def read_question(module: str, name: str) -> Question:
    """What the source of a function says of its command."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.loader is not None
    source = spec.loader.get_source(module)  # type: ignore[attr-defined]  # a loader of source has it
    (function,) = (one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and one.name == name)
    text, _, rest = inspect.cleandoc(ast.get_docstring(function) or "").partition("\n\nArgs:\n")
    entries = {key: (metavar, " ".join(said.split())) for key, metavar, said in _ENTRY.findall(rest.split("\n\n")[0])}
    parameters = tuple(_parameters(function, entries))
    names = [one.name for one in parameters]
    plain = [
        dataclasses.replace(one, help=_as_options(one.help, names))
        for one in parameters
        if not one.annotation.startswith("Callable")
    ]
    shown = _as_options(text.split("\n\nRaises:")[0], names)
    return Question(module=module, name=name, help=shown, parameters=tuple(plain))


def question_command(module: str, name: str) -> click.Command:
    """The command of a question."""
    question = read_question(module, name)

    def run(*, selection: Selection, output: Output, **values: Any) -> None:
        question.answer(selection, output, values)

    decorated: Callable[..., Any] = output_options(run)
    names = [one.name for one in question.parameters]
    for shared in ("engine", "by", "view"):
        if shared in names:
            decorated = _SHARED[shared](decorated)
    for one in reversed(question.parameters):
        if one.is_run and one.is_positional:
            decorated = click.argument(one.name, metavar=f"[{one.name.upper()}]", required=False)(decorated)
        elif one.name not in _SHARED:
            decorated = _option(one)(decorated)
    return click.command(name=name.replace("_", "-"), help=question.help)(selection_options(decorated))


_ENTRY = re.compile(r"^    (\w+)(?: \(([^)]*)\))?: ((?:.*)(?:\n      .*)*)", re.MULTILINE)


def _parameters(function: ast.FunctionDef, entries: dict[str, tuple[str, str]]) -> Iterator[Parameter]:
    """The parameters after the records, in order."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = [*zip(positional, [*defaults, *arguments.defaults], strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for place, (argument, default) in enumerate(pairs):
        if place == 0:
            continue
        metavar, said = entries.get(argument.arg, ("", ""))
        assert argument.annotation is not None
        yield Parameter(
            name=argument.arg,
            annotation=ast.unparse(argument.annotation),
            default=default.value if isinstance(default, ast.Constant) else None,
            metavar=metavar,
            help=said,
            is_positional=place < len(positional),
        )


def _as_options(text: str, names: list[str]) -> str:
    """The text with parameters named as options."""
    return re.sub(r"`(\w+)`", lambda found: _flag(found[1]) if found[1] in names else f"'{found[1]}'", text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _option(one: Parameter) -> Callable[..., Any]:
    """The option of a parameter; it gives None, or nothing, where it is not given and has no default to show."""
    settings: dict[str, Any] = {"help": one.help, "metavar": one.metavar or None}
    flag = _flag(one.name)
    if one.annotation == "bool":
        pair = f"{flag}/--no-{flag[2:]}" if one.default else flag
        return click.option(pair, one.name, default=one.default, help=one.help, is_flag=True, show_default=one.default)
    if one.annotation.startswith("Literal"):
        settings |= {"type": click.Choice(re.findall(r"'(\w+)'", one.annotation)), "metavar": None}
    elif "PathLike" in one.annotation:
        settings["type"] = NamedPath(path_type=Path)
    else:
        kinds = one.annotation.split(" | ")
        settings["type"] = str if "str" in kinds else _TYPES.get(kinds[0], str)
    if "Sequence" in one.annotation:
        return click.option(flag, one.name, multiple=True, **settings)
    return click.option(flag, one.name, default=one.default, show_default=one.default is not None, **settings)
