"""The definition of one setting of a capture: its name in each source, its type, and its allowed values."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ranktape.errors import UsageError

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

_SHOWN = 60
"""Number of characters of a wrong value that a message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one field of `CaptureOptions` is written on a command line, in a file and in the environment."""

    name: str = ""
    """Name of the field."""
    default: Any
    """Value if the setting is not given."""
    help: str
    """One sentence for the help page."""
    kind: type[int | float | str | bool] = str
    """Type into which a text is parsed; `bool` is a flag without a value."""
    choices: tuple[str, ...] = ()
    """The allowed values; empty if any value is allowed."""
    least: float | None = None
    """The smallest number allowed; None if any number is allowed, and for text."""
    most: float = MAX_NUMBER
    """The largest number allowed."""
    takes_several: bool = False
    """Whether a command line may give the setting several times."""
    is_free: bool = False
    """Whether Python may give a value of another type; such values are checked when they are used."""
    metavar: str | None = None
    """Name of the value on a help page; if None, the name of the type."""

    @property
    def flag(self) -> str:
        """Name of the option on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return PREFIX + self.name.upper()

    def check(self, value: Any) -> None:
        """Check that the setting allows a value.

        Raises:
            UsageError: the value is not allowed; the message names the option.
        """
        if value is None or self.is_free:
            return
        for item in value if self.takes_several and isinstance(value, COLLECTIONS) else (value,):
            if (allowed := self._allowed(item)) is not None:
                text = item if self.choices and isinstance(item, str) else shown(item)
                raise UsageError(f"{self.flag} {text} is not allowed: give {allowed}")

    def _allowed(self, item: Any) -> str | None:
        """A description of the allowed values; None if the value is allowed."""
        types, wanted = _KINDS[self.kind]
        if not isinstance(item, types) or (isinstance(item, bool) and self.kind is not bool):
            return wanted
        if self.kind is int and abs(item) > self.most:
            return f"{self.most} or less"
        if self.kind is float and not abs(item) <= self.most:
            # JSON cannot represent infinity.
            return "a number" if math.isnan(item) else f"a finite number, {self.most} or less"
        if self.least is not None and not item >= self.least:
            return f"{self.least} or more"
        return f"one of {', '.join(self.choices)}" if self.choices and item not in self.choices else None


_KINDS: Mapping[type, tuple[Any, str]] = {
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
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def is_given(value: Any) -> bool:
    """Whether a value was given. None and an empty collection mean 'not given'."""
    return not (value is None or (isinstance(value, COLLECTIONS) and not value))


def option(default: Any, help_: str, *, is_secret: bool = False, **about: Any) -> Any:
    """A field of `CaptureOptions` with its `Setting`; its kind is the type of the default, unless `about` gives one."""
    kind = {"kind": type(default)} if isinstance(default, bool | int | float | str) else {}
    setting = Setting(default=default, help=help_, **{**kind, **about})
    return field(default=default, metadata={"setting": setting}, repr=not is_secret)
