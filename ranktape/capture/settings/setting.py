"""What is a setting of a capture: its name in Python, its flag, and the values that it allows?"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ranktape.errors import UsageError

MAX_NUMBER = 2**53
"""Whole numbers above it are no number of anything: what is computed with them stays within 64 bits."""

SWITCH_WORDS: Mapping[str, bool] = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
"""What a variable of the environment may say of a switch."""

_SHOWN = 60
"""Characters of a wrong value that a message shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How one field of `CaptureOptions` is written on a command line, in a file and in the environment."""

    name: str
    """The field's name."""
    flag: str
    """The long option."""
    kind: type[int | float | str | bool]
    """What the text is parsed into; `bool` is a flag without a value."""
    multiple: bool
    """May be given several times."""
    choices: tuple[str, ...]
    """The allowed values; empty where any is."""
    default: Any
    """What holds when the option is not given."""
    least: float | None
    """The smallest number allowed; None where any is, and for text."""
    help: str
    """One sentence for the help page."""
    filters: str | None
    """The field of a record that it filters, in the forms of `ranktape.storage.query.filters`; None for others."""
    is_free: bool
    """Whether Python may give it a value of another kind, which is checked where it is read."""
    metavar: str | None
    """What stands for its value on a help page; the kind's name where None."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """The names by which a file may call it: the field's, and that of the flag."""
        return tuple(dict.fromkeys((self.name, self.flag.removeprefix("--").replace("-", "_"))))

    def from_texts(self, value: Any) -> Any:
        """A value as a command line has it: of a filter each comma separates alternatives."""
        if not self.multiple:
            return value
        texts = (value,) if isinstance(value, str) else tuple(value)
        return split_texts(texts) if self.filters is not None else texts

    def check(self, value: Any, *, label: str | None = None) -> None:
        """Let a value pass that the setting allows; `label` is what the message calls the setting, else its flag.

        Raises:
            UsageError: it does not; the message names the option.
        """
        name = label or self.flag
        if value is None or self.is_free or (self.filters is not None and not self.choices):
            return
        for item in value if self.multiple and isinstance(value, list | tuple | set | frozenset) else (value,):
            self._check_kind(item, name=name)
            if self.least is not None and not item >= self.least:
                raise UsageError(f"{name} {item} is not allowed: give {self.least} or more")
            if self.choices and item not in self.choices:
                raise UsageError(f"{name} {item} is not allowed: give one of {', '.join(self.choices)}")

    def _check_kind(self, item: Any, *, name: str) -> None:
        if self.kind is bool:
            fits, wanted = isinstance(item, bool), "true or false"
        elif self.kind is str:
            fits, wanted = isinstance(item, str | os.PathLike), "a text"
        elif self.kind is int:
            fits, wanted = isinstance(item, numbers.Integral) and not isinstance(item, bool), "a whole number"
        else:
            fits, wanted = isinstance(item, numbers.Real) and not isinstance(item, bool), "a number"
        if not fits:
            raise UsageError(f"{name} {shown(item)} is not allowed: give {wanted}")
        if self.kind is int and abs(item) > MAX_NUMBER:
            raise UsageError(f"{name} {shown(item)} is not allowed: give {MAX_NUMBER} or less")
        if self.kind is float and not abs(item) <= MAX_NUMBER:
            # Documents in JSON have no word for infinity.
            allowed = "a number" if math.isnan(item) else f"a finite number, {MAX_NUMBER} or less"
            raise UsageError(f"{name} {shown(item)} is not allowed: give {allowed}")


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


def split_texts(values: Iterable[Any]) -> tuple[Any, ...]:
    """Alternatives of which each text may hold several, with commas between them."""
    return tuple(
        part for value in values for part in (map(str.strip, value.split(",")) if isinstance(value, str) else (value,))
    )


def is_given(value: Any) -> bool:
    """Whether a value says anything: None and an empty list stand for 'not given'."""
    return not (value is None or (isinstance(value, list | tuple | set | frozenset) and not value))


def option(
    default: Any,
    *,
    help: str,  # noqa: A002  (argparse's and click's word)
    kind: type = str,
    multiple: bool = False,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    flag: str | None = None,
    filters: str | None = None,
    is_secret: bool = False,
    is_free: bool = False,
    metavar: str | None = None,
) -> Any:
    """A field of `CaptureOptions` with what `Setting` says of it; one that filters may be given several times."""
    is_filter = filters is not None
    metadata = {
        "help": help,
        "kind": kind,
        "multiple": multiple or is_filter,
        "choices": choices,
        "least": least,
        "flag": flag,
        "filters": filters,
        "is_free": is_free,
        "metavar": "VALUE" if is_filter and metavar is None and not choices else metavar,
    }
    return field(default=default, metadata=metadata, repr=not is_secret)


def setting_of(item: Any) -> Setting:
    """The setting that a dataclass field made by `option` stands for."""
    given = dict(item.metadata)
    flag = given.pop("flag") or _flag_of(item.name, multiple=given["multiple"])
    return Setting(name=item.name, default=item.default, flag=flag, **given)


def _flag_of(name: str, *, multiple: bool) -> str:
    return "--" + name.replace("_", "-").removesuffix("s" if multiple else "")
