"""One setting of a capture: its name in each source, its type, its default and its allowed values."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ranktape.errors import UsageError, nearest

PREFIX = "RANKTAPE_"
"""The prefix of ranktape's environment variables."""

MAX_NUMBER = 2**53
"""The largest allowed number, so that calculations with settings stay within 64 bits."""

SWITCH_WORDS: Mapping[str, bool] = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
"""The values of an environment variable that sets a flag."""

COLLECTIONS = (list, tuple, set, frozenset)
"""The types of several values in Python."""

FILE_HELP = "YAML or TOML file with settings of these names; the command line overrides it."
"""Help text of the option `--capture-config`."""

_MAX_SHOWN = 60
"""Number of characters of a wrong value that a message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one field of `CaptureOptions` is written on a command line, in a file and in the environment."""

    name: str
    """Name of the field."""
    type_name: str
    """Annotation of the field. If it is neither a number, a text nor a bool, Python may give a value of any type."""
    default: Any
    """Value if the setting is not given."""
    help: str
    """One sentence for the help page."""
    choices: tuple[str, ...] = ()
    """The allowed values; empty if any value is allowed."""
    least: float | None = None
    """The smallest number allowed; None if any number is allowed, and for text."""
    most: float = MAX_NUMBER
    """The largest number allowed."""
    takes_several: bool = False
    """Whether a command line may give the setting several times."""
    parse: Callable[[str], Any] | None = None
    """Converts a text of a command line, a file or a variable; None if it is the value."""
    validate: Callable[[Any], object] | None = None
    """Raises `UsageError` for a value that is not allowed, besides the check of type and range; None for no check."""
    metavar: str | None = None
    """Name of the value on a help page; if None, the name of the type."""

    @property
    def kind(self) -> type[int | float | str | bool]:
        """Type into which a text is parsed; `bool` is a flag without a value."""
        return _KINDS.get(self.type_name.removesuffix(" | None"), str)

    @property
    def flag(self) -> str:
        """Name of the option on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return PREFIX + self.name.upper()

    def to_python(self, value: Any) -> Any:
        """A value from a command line, a file or the environment, as Python gives it."""
        if self.parse is not None and isinstance(value, str):
            return self.parse(value)
        if self.takes_several:
            return tuple(value) if isinstance(value, list | tuple) else (value,)
        return value

    def check(self, value: Any) -> None:
        """Check that the setting allows a value.

        Raises:
            UsageError: the value is not allowed; the message names the option.
        """
        is_typed = self.type_name.removesuffix(" | None") in _KINDS
        if is_typed and value is not None and (allowed := self._allowed(value)) is not None:
            if self.choices and isinstance(value, str):
                hint = nearest(value, self.choices, otherwise="give one of", cutoff=0.6)
                raise UsageError(f"{self.flag} {value} is not allowed: {hint}")
            raise UsageError(f"{self.flag} {shown(value)} is not allowed: give {allowed}")
        if self.validate is not None:
            self.validate(value)

    def _allowed(self, value: Any) -> str | None:
        """A description of the allowed values; None if the value is allowed."""
        types, description = _ALLOWED[self.kind]
        if not isinstance(value, types) or (isinstance(value, bool) and self.kind is not bool):
            return description
        if self.kind is int and abs(value) > self.most:
            return f"{self.most} or less"
        if self.kind is float and not abs(value) <= self.most:
            # JSON cannot represent infinity.
            return "a number" if math.isnan(value) else f"a finite number, {self.most} or less"
        if self.least is not None and not value >= self.least:
            return f"{self.least} or more"
        return f"one of {', '.join(self.choices)}" if self.choices and value not in self.choices else None


_KINDS: Mapping[str, type[int | float | str | bool]] = {"int": int, "float": float, "str": str, "bool": bool}

_ALLOWED: Mapping[type, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    str: (str | os.PathLike, "a text"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
}
"""The types that a value may have, and their description in messages, by the kind of setting."""


def shown(value: Any) -> str:
    """A value as text for a message, shortened if it is long."""
    if isinstance(value, Mapping):
        return "{...}"
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Python refuses to format integers with thousands of digits, and deeply nested values.
        return f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def is_given(value: Any) -> bool:
    """Whether a value was given. None and an empty collection mean 'not given'."""
    return not (value is None or (isinstance(value, COLLECTIONS) and not value))


def option(default: Any, help_: str, *, choices: Iterable[str] = (), is_secret: bool = False, **attributes: Any) -> Any:
    """A field of `CaptureOptions` with the attributes of its `Setting`; its name and type are those of the field."""
    metadata = {"help": help_, "choices": tuple(map(str, choices)), **attributes}
    return field(default=default, metadata=metadata, repr=not is_secret)


def flag(help_: str) -> Any:
    """A field that is False unless its flag is given."""
    return option(default=False, help_=help_)
