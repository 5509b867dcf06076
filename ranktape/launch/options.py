"""Gives a command the settings of a capture as options, from the table that defines them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import click

from ranktape.analyze.group import Section, SectionOption
from ranktape.capture.settings.options import SETTINGS
from ranktape.capture.settings.setting import Setting, is_given

AnyCommand = TypeVar("AnyCommand", bound=Callable[..., Any])


def capture_options(
    *, without: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> Callable[[AnyCommand], AnyCommand]:
    """A decorator that adds one option for each setting of a capture.

    The command receives the values by the settings' names; None, or an empty tuple, stands for "not
    given". `without` names settings that the command leaves out, `defaults` those for which it has a
    default of its own.
    """

    def decorate(command: AnyCommand) -> AnyCommand:
        decorated = command
        for setting in reversed(SETTINGS):
            if setting.name not in without:
                decorated = _option(setting, default=(defaults or {}).get(setting.name))(decorated)
        return decorated

    return decorate


def capture_arguments(values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that say the same as `values`; what was not given is left out."""
    words: list[str] = []
    for setting in SETTINGS:
        value: Any = values.get(setting.name)
        if not is_given(value) or value is False:
            continue
        if setting.kind is bool:
            words.append(setting.flag)
            continue
        for item in value if setting.takes_several and not isinstance(value, str) else (value,):
            words += [setting.flag, str(item)]
    return words


_FIRST = frozenset({"start", "every", "min_iterations", "max_iterations", "select", "layers", "keep", "overwrite"})
"""The settings that help always shows; --help-capture shows the others."""


def _option(setting: Setting, *, default: Any) -> Callable[[AnyCommand], AnyCommand]:
    shown = setting.default if default is None else default
    is_plain = not setting.choices and setting.kind is not bool
    return click.option(
        setting.flag,
        setting.name,
        cls=SectionOption,
        section=Section.OWN if setting.name in _FIRST else Section.CAPTURE,
        type=click.Choice(setting.choices) if setting.choices else setting.kind,
        is_flag=setting.kind is bool,
        multiple=setting.takes_several,
        default=default,
        metavar=(setting.metavar or setting.kind.__name__.upper()) if is_plain else None,
        # click's own `show_default` knows only the command's default, which is None for "not given".
        help=setting.help if shown is None or shown is False or shown == () else f"{setting.help} [default: {shown}]",
    )
