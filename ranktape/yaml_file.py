"""Reads YAML and TOML files safely: bounded in size and depth, without aliases, tags or code."""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ranktape.errors import UsageError

MAX_NBYTES = 1 << 16
"""The largest file, in bytes."""

MAX_DEPTH = 8
"""The deepest nesting of lists and mappings."""

_MAX_DOTS = 100
"""The largest number of dots in a TOML key."""


def read_text(path: Path, *, option: str, wanted: str, holds: str, max_nbytes: int = MAX_NBYTES) -> str:
    """The text of a file.

    Args:
        path: The file.
        option: The option that names it.
        wanted: The expected file for error messages, such as `a .yaml file`.
        holds: The expected contents for error messages, such as `rules`.
        max_nbytes: The largest size, in bytes.

    Raises:
        UsageError: the file cannot be read, is too large, or is not text. The message names the file.
    """
    try:
        # A pipe or a device could block or never end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{option} {path} is not a file: give {wanted}")
        with path.open("rb") as file:
            data = file.read(max_nbytes + 1)
    except (OSError, ValueError) as error:  # ValueError for a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{option} {path} cannot be read ({reason}): give {wanted}") from error
    if len(data) > max_nbytes:
        raise UsageError(f"{path} has more than {max_nbytes} bytes: that is no list of {holds}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8 (byte {error.start}): save it as UTF-8") from error


def parse_yaml(text: str, *, place: str) -> Any:
    """The value of a YAML 1.2 text; `place` is its name in messages.

    Raises:
        UsageError: the text is not YAML, or has aliases, tags, duplicate keys, or too deep nesting.
    """
    try:
        return _value(_Loader(text).get_single_node())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f"line {mark.line + 1}: "
        told = _line(error.problem or error.context or "")
        raise UsageError(f"{place} is not YAML that is read here: {line}{told}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{place} cannot be read as YAML: {_line(str(error))}") from error


def parse_toml(text: str, *, place: str) -> dict[str, Any]:
    """The value of a TOML text; `place` is its name in messages.

    Raises:
        UsageError: the text is not TOML, or has too deep nesting.
    """
    try:
        # Parsing a dotted key takes time quadratic in the number of its parts.
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
    """Composes the nodes of a text within bounds. `_value` converts them."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012  (PyYAML declares it so)
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node. Aliases, which can expand a small file, tags and too deep nesting are refused."""
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


_SCALARS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    (r"~|null|Null|NULL|", lambda _: None),
    (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    (r"[-+]?[0-9]+", int),
    (r"0o[0-7]+|0x[0-9a-fA-F]+", lambda text: int(text, 0)),
    (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", float),
    (r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", lambda text: float(text.replace(".", ""))),
)
"""The plain scalars of YAML 1.2's core schema, and their conversions.

In YAML 1.1, 10:20:2 would be a number in base 60 and `no` would be false.
"""


def _value(node: Any) -> Any:
    """The value of a node; None without a node."""
    if node is None:
        return None
    if isinstance(node, yaml.SequenceNode):
        return [_value(one) for one in node.value]
    if isinstance(node, yaml.ScalarNode):
        if node.style is not None:  # quoted, or a block
            return node.value
        meanings = (meaning for form, meaning in _SCALARS if re.fullmatch(form, node.value))
        return next(meanings, str)(node.value)
    words: dict[str, Any] = {}
    for key, value in node.value:
        name = _value(key)
        if not isinstance(name, str):
            raise yaml.MarkedYAMLError(problem=f"the name {name!r:.40} is no text", problem_mark=key.start_mark)
        if name in words:
            raise yaml.MarkedYAMLError(problem=f"{name!r:.40} is given twice", problem_mark=key.start_mark)
        words[name] = _value(value)
    return words
