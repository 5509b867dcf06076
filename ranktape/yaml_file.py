"""Reads YAML and TOML as data: small, nothing in it run, and nothing in it stands for something larger than itself."""

from __future__ import annotations

import re
import stat
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import yaml

from ranktape.errors import UsageError

MAX_NBYTES = 1 << 16
"""Bytes of a file."""

MAX_DEPTH = 8
"""Lists and mappings within one another."""

_MAX_DOTS = 100
"""Dots in one word of TOML."""


def read_text(path: Path, *, option: str, wanted: str, holds: str) -> str:
    """The text of a file.

    Args:
        path: The file.
        option: The option that names it.
        wanted: What is to be given instead of something else, such as `a .yaml file`.
        holds: What it should list, such as `rules`.

    Raises:
        UsageError: it cannot be read, is too large, or is no text; the message names the file.
    """
    try:
        # A pipe or a device would be waited for, or never end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{option} {path} is not a file: give {wanted}")
        with path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
    except (OSError, ValueError) as error:  # the latter for a name with a zero in it
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{option} {path} cannot be read ({reason}): give {wanted}") from error
    if len(data) > MAX_NBYTES:
        raise UsageError(f"{path} has more than {MAX_NBYTES} bytes: that is no list of {holds}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8 (byte {error.start}): save it as UTF-8") from error


def parse_yaml(text: str, *, place: str) -> Any:
    """What a text in YAML 1.2 says; `place` is what messages call it.

    Raises:
        UsageError: it is not YAML, or has aliases, tags, names given twice, or too many levels.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader, and with fewer tags)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f"line {mark.line + 1}: "
        told = _line(error.problem or error.context or "")
        raise UsageError(f"{place} is not YAML that is read here: {line}{told}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{place} cannot be read as YAML: {_line(str(error))}") from error


def parse_toml(text: str, *, place: str) -> dict[str, Any]:
    """What a text in TOML says; `place` is what messages call it.

    Raises:
        UsageError: it is not TOML, or has too many levels.
    """
    try:
        # The time that a dotted name takes grows with the square of its parts.
        if any(part.count(".") > _MAX_DOTS for part in re.split(r"[=,{\[\n]", text)):
            raise RecursionError
        words = tomllib.loads(text)
        _check_depth(words, depth=0)
    except RecursionError as error:
        raise UsageError(f"{place} is nested too deep: give at most {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise UsageError(f"{place} cannot be read as TOML: {_line(str(error))}") from error
    return words


def _check_depth(words: Any, *, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RecursionError
    inner = words.values() if isinstance(words, dict) else words if isinstance(words, list) else ()
    for one in inner:
        _check_depth(one, depth=depth + 1)


def _line(text: str) -> str:
    return " ".join(text.split())[:200]


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values: YAML 1.1 takes 10:20:2 for a number to the base of sixty, and `no` for false."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012  (PyYAML declares it so)
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node; neither an alias, by which a small file becomes a large one, nor tagged, nor too deep."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        start = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed", problem_mark=start)
        if event.tag is not None:
            raise yaml.MarkedYAMLError(problem=f"the tag {event.tag!r:.60} is not allowed", problem_mark=start)
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(
                problem=f"it is nested too deep: give at most {MAX_DEPTH} levels", problem_mark=start
            )
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def _mapping(loader: _Loader, node: Any) -> dict[str, Any]:
    words: dict[str, Any] = {}
    for key, value in node.value:
        name = loader.construct_object(key, deep=True)
        if not isinstance(name, str):
            raise yaml.MarkedYAMLError(problem=f"the name {name!r:.40} is no text", problem_mark=key.start_mark)
        if name in words:
            raise yaml.MarkedYAMLError(problem=f"{name!r:.40} is given twice", problem_mark=key.start_mark)
        words[name] = loader.construct_object(value, deep=True)
    return words


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""], lambda _: None),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF"), lambda text: text.lower() == "true"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789"), lambda text: int(text, _base(text))),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
        _float,
    ),
)
"""Plain values of YAML 1.2's core schema: tag, form, first characters, meaning."""


def _base(text: str) -> int:
    return 0 if text[1:2] in {"o", "x"} else 10


def _constructor(meaning: Any) -> Any:
    return lambda loader, node: meaning(loader.construct_scalar(node))


for _name, _form, _firsts, _meaning in _SCALARS:
    _tag = f"tag:yaml.org,2002:{_name}"
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_form})\Z"), _firsts)
    _Loader.add_constructor(_tag, _constructor(_meaning))

_CONSTRUCTORS: dict[str | None, Any] = {
    "tag:yaml.org,2002:str": lambda loader, node: loader.construct_scalar(node),
    "tag:yaml.org,2002:seq": lambda loader, node: loader.construct_sequence(node, deep=True),
    "tag:yaml.org,2002:map": _mapping,
}
_Loader.yaml_constructors.update(_CONSTRUCTORS)
