"""How does a command get the settings of a capture as options, from the one table that defines them?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import click

from ranktape.capture.options import SETTINGS, CaptureOptions, Setting

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


def capture_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The checked settings, as keyword arguments for `ranktape.capture.Capture`.

    Raises:
        UsageError: a value is not allowed; the message names its option.
    """
    options = CaptureOptions.from_mapping(values)
    return {setting.name: getattr(options, setting.name) for setting in SETTINGS}


def capture_arguments(values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that say the same as `values`; what was not given is left out."""
    words: list[str] = []
    for setting in SETTINGS:
        value = values.get(setting.name)
        if value is None or value is False:
            continue
        if setting.kind is bool:
            words.append(setting.flag)
            continue
        for item in value if setting.multiple else (value,):
            words += [setting.flag, str(item)]
    return words


def _option(setting: Setting, *, default: Any) -> Callable[[AnyCommand], AnyCommand]:
    shown = setting.default if default is None else default
    is_plain = not setting.choices and setting.kind is not bool
    return click.option(
        setting.flag,
        setting.name,
        type=click.Choice(setting.choices) if setting.choices else setting.kind,
        is_flag=setting.kind is bool,
        multiple=setting.multiple,
        default=default,
        metavar=_METAVARS.get(setting.name, setting.kind.__name__.upper()) if is_plain else None,
        # click's own `show_default` knows only the command's default, which is None for "not given".
        help=setting.help if shown is None or shown is False or shown == () else f"{setting.help} [default: {shown}]",
    )


_METAVARS = {"modules": "GLOB", "quant_type": "TAG", "storage_options": "JSON"}
