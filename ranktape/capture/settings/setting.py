"""How one setting of a capture is written on a command line, in a file and in the environment, and what it may be."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ranktape.errors import UsageError

PREFIX = "RANKTAPE_"
"""What our variables begin with."""

MAX_NUMBER = 2**53
"""Whole numbers above it are no number of anything: what is computed with them stays within 64 bits."""

SWITCH_WORDS: Mapping[str, bool] = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
"""The texts that a variable of the environment may have for a switch."""

COLLECTIONS = (list, tuple, set, frozenset)
"""The types in which Python gives several values."""

FILE_HELP = "YAML or TOML file with settings of these names; the command line overrides it."
"""Help of the option `--capture-config`."""

_SHOWN = 60
"""Characters of a wrong value that a message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one field of `CaptureOptions` is written on a command line, in a file and in the environment."""

    name: str = ""
    """The field's name."""
    default: Any
    """The value when it is not given."""
    help: str
    """One sentence for the help page."""
    kind: type[int | float | str | bool] = str
    """The type into which a text is parsed; `bool` is a flag without a value."""
    choices: tuple[str, ...] = ()
    """The allowed values; empty where any is allowed."""
    least: float | None = None
    """The smallest number allowed; None where any is allowed, and for text."""
    most: float = MAX_NUMBER
    """The largest number allowed."""
    takes_several: bool = False
    """Whether a command line may give it several times."""
    is_free: bool = False
    """Whether Python may give a value of another type, which is checked where it is read."""
    metavar: str | None = None
    """The name of its value on a help page; the type's name where None."""

    @property
    def flag(self) -> str:
        """The option on a command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The variable of the environment."""
        return PREFIX + self.name.upper()

    def check(self, value: Any) -> None:
        """Return if the setting allows a value.

        Raises:
            UsageError: it does not; the message names the option.
        """
        if value is None or self.is_free:
            return
        for item in value if self.takes_several and isinstance(value, COLLECTIONS) else (value,):
            if (allowed := self._allowed(item)) is not None:
                text = item if self.choices and isinstance(item, str) else shown(item)
                raise UsageError(f"{self.flag} {text} is not allowed: give {allowed}")

    def _allowed(self, item: Any) -> str | None:
        """The values that are allowed instead of one value; None where it is allowed itself."""
        types, wanted = _KINDS[self.kind]
        if not isinstance(item, types) or (isinstance(item, bool) and self.kind is not bool):
            return wanted
        if self.kind is int and abs(item) > self.most:
            return f"{self.most} or less"
        if self.kind is float and not abs(item) <= self.most:
            # Documents in JSON have no word for infinity.
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
"""For each kind of setting, the types that a value may have, and what they are called."""


def shown(value: Any) -> str:
    """A value as a message shows it, however long it is."""
    if isinstance(value, Mapping):
        return "{...}"
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Python writes no number of thousands of digits.
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def is_given(value: Any) -> bool:
    """Whether a value was given: None and an empty list stand for 'not given'."""
    return not (value is None or (isinstance(value, COLLECTIONS) and not value))


def option(default: Any, help_: str, *, is_secret: bool = False, **about: Any) -> Any:
    """A field of `CaptureOptions`, described by a `Setting`; its kind is the default's where there is one."""
    kind = {"kind": type(default)} if isinstance(default, bool | int | float | str) else {}
    setting = Setting(default=default, help=help_, **{**kind, **about})
    return field(default=default, metadata={"setting": setting}, repr=not is_secret)
