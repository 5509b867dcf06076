"""Gives a command the settings of a capture as options, from the table that defines them, and a script to run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import click

from ranktape.analyze.group import Section, SectionOption
from ranktape.capture.settings.options import SETTINGS
from ranktape.capture.settings.setting import FILE_HELP, Setting, is_given
from ranktape.errors import RanktapeError
from ranktape.launch.script import Script
from ranktape.launch.worker import report, stand_aside

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


SCRIPT_CONTEXT = {"allow_interspersed_args": False, "help_option_names": ["--help"], "max_content_width": 100}
"""The context of a command with a script: what follows that is the script's, though it begins with a dash."""


def script_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what a command takes that runs a script as a capture would: the settings, the script and its arguments."""

    @functools.wraps(command)
    def run(*, script: str, arguments: tuple[str, ...], is_module: bool, **values: Any) -> Any:
        return command(script=Script(name=script, arguments=arguments, is_module=is_module), **values)

    # No `--module` beside `-m`: that is the filter over the modules of the model.
    made = click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)(run)
    made = click.option("--capture-config", metavar="FILE", help=FILE_HELP)(
        capture_options()(click.argument("script", metavar="SCRIPT")(made))
    )
    return click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module's name, as in 'python -m'.")(made)


def run_command(command: click.Command, arguments: Sequence[str], *, program: str, help_of: str) -> int:
    """Run a command as a process of a launch; what it returns to be done is done then. The exit code of the process.

    Users' mistakes end as one line on stderr and in torchrun's summary.

    Args:
        command: The command.
        arguments: Those of its command line.
        program: What its help page calls it.
        help_of: The command whose help a message names.
    """
    # The command line says what is recorded, whatever the environment says.
    stand_aside()
    try:
        # click answers --help itself, and returns an exit code.
        found = command.main(list(arguments), prog_name=program, standalone_mode=False)
        return int((found() if callable(found) else found) or 0)
    except click.ClickException as error:
        report(f"{error.format_message()} See '{help_of} --help'.")
        return error.exit_code
    except RanktapeError as error:
        report(str(error))
        return error.exit_code


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
