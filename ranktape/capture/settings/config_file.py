"""What does a configuration file say, before anybody asks whether its words are settings?

YAML or TOML, by the suffix. A file is data, and may come from anywhere: it is small, it is read as text, nothing in
it is run, and nothing in it stands for something larger than itself.
"""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Callable
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


def read_config_file(path: Path) -> dict[str, Any]:
    """The words of a file, by name.

    Raises:
        UsageError: it cannot be read, or is not a mapping in its language; the message names the file.
    """
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        raise UsageError(f"--capture-config {path} is neither .yaml nor .toml: name it by its language")
    text = _read(path)
    try:
        words = parse(text)
        _check_depth(words, depth=0)
    except yaml.MarkedYAMLError as error:
        raise UsageError(f"{path} is not YAML that is read here: {_told(error)}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as {path.suffix[1:].upper()}: {_line(str(error))}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deep: give at most {MAX_DEPTH} levels") from error
    if words is None:
        return {}
    if not isinstance(words, dict):
        raise UsageError(
            f"{path} holds a {type(words).__name__}, not settings by name: write lines such as 'every: 10'"
        )
    return words


def _read(path: Path) -> str:
    try:
        # A pipe or a device would be waited for, or never end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"--capture-config {path} is not a file: give a .yaml or .toml file")
        with path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
    except (OSError, ValueError) as error:  # the latter for a name with a zero in it
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--capture-config {path} cannot be read ({reason}): give a .yaml or .toml file") from error
    if len(data) > MAX_NBYTES:
        raise UsageError(f"{path} has more than {MAX_NBYTES} bytes: that is no list of settings")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8 (byte {error.start}): save it as UTF-8") from error


def _check_depth(words: Any, *, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RecursionError
    inner = words.values() if isinstance(words, dict) else words if isinstance(words, list) else ()
    for one in inner:
        _check_depth(one, depth=depth + 1)


def _line(text: str) -> str:
    return " ".join(text.split())[:200]


def _told(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = "" if mark is None else f"line {mark.line + 1}: "
    return place + _line(error.problem or error.context or "")


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values: YAML 1.1 takes 10:20:2 for a number to the base of sixty, and `no` for false."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012  (PyYAML declares it so)
    yaml_constructors: ClassVar[dict[str | None, Any]] = {}
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node; neither an alias, by which a small file becomes a large one, nor deeper than a config is."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        start = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed", problem_mark=start)
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


def _refused(_: _Loader, node: Any) -> Any:
    raise yaml.MarkedYAMLError(problem=f"the tag {node.tag!r:.40} is not allowed", problem_mark=node.start_mark)


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
    None: _refused,  # every other tag
}
_Loader.yaml_constructors.update(_CONSTRUCTORS)


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader, and with fewer tags)


def _parse_toml(text: str) -> Any:
    # The time that a dotted name takes grows with the square of its parts.
    if any(part.count(".") > _MAX_DOTS for part in re.split(r"[=,{\[\n]", text)):
        raise RecursionError
    return tomllib.loads(text)


_PARSERS: dict[str, Callable[[str], Any]] = {".yaml": _parse_yaml, ".yml": _parse_yaml, ".toml": _parse_toml}
