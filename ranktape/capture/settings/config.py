"""Gathers a capture's settings from a command line, the environment, a file and the legacy tools' variables.

The command line has precedence over the environment (`RANKTAPE_EVERY=10`), which has precedence over the file that
`--capture-config` or `RANKTAPE_CAPTURE_CONFIG` names. Last are the defaults of `CaptureOptions`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranktape.capture.settings.options import SETTINGS, CaptureOptions
from ranktape.capture.settings.setting import FILE_HELP, PREFIX, SWITCH_WORDS, Setting, is_given, shown
from ranktape.errors import UsageError, nearest
from ranktape.storage.places.urls import parse_storage_options

DEFAULT_SAVE_DIR = "./enhanced_tensor_logs"
"""The default directory of the legacy tools."""


def legacy_environment(environment: Mapping[str, str] = os.environ) -> tuple[bool, str, int]:
    """Whether the legacy tools' variables enable a capture, its directory, and the number of its first iteration.

    Raises:
        UsageError: a variable has a value that is not allowed.
    """
    enabled = environment.get("TENSOR_SAVE_ENABLED", "").strip().lower()
    if enabled and enabled not in SWITCH_WORDS:
        raise UsageError(f"TENSOR_SAVE_ENABLED={enabled!r} is not allowed: set it to true or false")
    iteration = environment.get("TENSOR_SAVER_ITERATION", "").strip() or "0"
    if not iteration.isdecimal():
        raise UsageError(f"TENSOR_SAVER_ITERATION={iteration!r} is not allowed: set it to a number from 0 on")
    save_dir = environment.get("TENSOR_SAVE_DIR") or DEFAULT_SAVE_DIR
    return SWITCH_WORDS.get(enabled, False), save_dir, int(iteration)


OTHER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        *("CACHE_DIR", "CAPTURE", "CAPTURE_CONFIG", "LAUNCHED", "LAUNCHED_WITH", "OWNER_PID"),
        *("QUANT", "QUANT_PLAN", "QUANT_ATTENTION"),
    )
)
"""The variables of ranktape that are not settings of a capture."""

_URL, _FILE = "capture", "capture_config"

_BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}


def resolve(
    given: Mapping[str, Any], *, environment: Mapping[str, str] | None = None, iteration: int | None = None
) -> tuple[str, CaptureOptions] | None:
    """The URL to record to and the options; None if no URL is given.

    If nothing else gives a URL, the legacy tools' variables do: `TENSOR_SAVE_ENABLED`, `TENSOR_SAVE_DIR`,
    `TENSOR_SAVER_ITERATION`.

    Args:
        given: Values of a command line by the settings' names, with the URL as `capture` and the file as
            `capture_config`. None means 'not given'.
        environment: The variables; those of the process by default.
        iteration: The number of the first iteration of a capture that replaces the legacy tools. It starts at once
            and adds to an existing run, unless other settings are given.

    Raises:
        UsageError: a value is not allowed.
    """
    variables = os.environ if environment is None else environment
    said = _from_environment(variables)
    path = given.get(_FILE) or variables.get(PREFIX + _FILE.upper(), "").strip() or None
    values = {**({} if path is None else read_config(path)), **said, **given_settings(given)}
    in_file = values.pop(_URL, None)
    url = given.get(_URL) or variables.get(PREFIX + "CAPTURE") or in_file
    if url is None:
        is_enabled, save_dir, iteration = legacy_environment(variables)
        url = save_dir if is_enabled else None
    if url is None:
        return None
    if iteration is not None:
        first = values.get("first_iteration", iteration)
        adds = not (values.get("resume") or values.get("overwrite"))
        values = {"start_at": first, "adds": adds, **values, "first_iteration": first}
    return url, CaptureOptions(**values)


def given_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The given values of a parsed command line, in Python's form. None means 'not given'."""
    return {one.name: _in_python(one, values[one.name]) for one in SETTINGS if is_given(values.get(one.name))}


def _in_python(setting: Setting, value: Any) -> Any:
    """A value from a command line, a file or the environment, in Python's form."""
    if setting.name == "storage_options" and isinstance(value, str):
        return parse_storage_options(value)
    if setting.takes_several:
        return tuple(value) if isinstance(value, list | tuple) else (value,)
    return value


def options_of(settings: Mapping[str, Any], *, capture_config: str | os.PathLike[str] | None) -> CaptureOptions:
    """The options from Python's settings, with those that are not given from a file."""
    known = sorted(one.name for one in dataclasses.fields(CaptureOptions))
    if unknown := sorted(set(settings) - set(known)):
        raise UsageError(f"{unknown[0]!r} is no option of a capture: {nearest(unknown[0], known)}")
    words = {} if capture_config is None else read_config(capture_config)
    words.pop(_URL, None)
    return CaptureOptions(**{**words, **settings})


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings of a file in Python's form, with the URL as `capture`."""
    file = Path(path).expanduser()
    values: dict[str, Any] = {}
    for key, value in _read_file(file).items():
        name = key.replace("-", "_")
        label = f"{file}: {key}"
        if name == _URL:
            if not (isinstance(value, str) and value):
                raise UsageError(f"{label} {shown(value)} is not allowed: give the URL of a run")
            values[_URL] = value
            continue
        if name == _FILE:
            raise UsageError(f"{label} is not allowed: a file names no other file")
        setting = _BY_NAME.get(name)
        if setting is None:
            raise UsageError(f"{file}: there is no setting {key!r:.60}: {nearest(name, sorted((*_BY_NAME, _URL)))}")
        if setting.name in values:
            raise UsageError(f"{file}: {setting.name} is given twice, with hyphens and with underscores: give it once")
        if value is not None:
            values[setting.name] = _alone(setting, value, label=label)
    return values


def _read_file(path: Path) -> dict[str, Any]:
    # Not at the top: PyYAML is loaded only if there is such a file.
    from ranktape.yaml_file import parse_toml, parse_yaml, read_text

    suffix = path.suffix.lower()
    if suffix not in {".yaml", ".yml", ".toml"}:
        raise UsageError(f"--capture-config {path} is neither .yaml nor .toml: name it by its language")
    text = read_text(path, option="--capture-config", wanted="a .yaml or .toml file", holds="settings")
    words = (parse_toml if suffix == ".toml" else parse_yaml)(text, place=str(path))
    if not isinstance(words, dict | None):
        raise UsageError(
            f"{path} holds a {type(words).__name__}, not settings by name: write lines such as 'every: 10'"
        )
    return words or {}


def stray_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """A message for each `RANKTAPE_` variable that is not a setting, with the nearest name."""
    variables = os.environ if environment is None else environment
    known = {*OTHER_VARIABLES, *(setting.variable for setting in SETTINGS)}
    return [
        f"the environment has {name}, which is no setting: {nearest(name, sorted(known))}"
        for name in sorted(variables)
        if name.startswith(PREFIX) and name not in known
    ]


def _from_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    given = ((one, variables.get(one.variable, "").strip()) for one in SETTINGS)
    return {
        one.name: _alone(one, _of_text(one, text, label=one.variable), label=one.variable)
        for one, text in given
        if text
    }


def _alone(setting: Setting, value: Any, *, label: str) -> Any:
    """A value in Python's form. It is checked separately, so that the message can name its source."""
    try:
        read = _in_python(setting, value)
        # `trigger` is only allowed for a flight recorder.
        CaptureOptions(**{setting.name: read, **({"record_last": 1} if setting.name == "trigger" else {})})
    except UsageError as error:
        raise type(error)(f"{label}: {error}") from error
    return read


def _of_text(setting: Setting, text: str, *, label: str) -> Any:
    """The value of a variable's text, as a file would give it."""
    if setting.kind is bool:
        if text.lower() not in SWITCH_WORDS:
            raise UsageError(f"{label}={text!r:.60} is not allowed: set it to true or false")
        return SWITCH_WORDS[text.lower()]
    try:
        return setting.kind(text)
    except ValueError as error:
        raise UsageError(f"{label}={text!r:.60} is not allowed: set it to a number") from error


_DEST = "capture_"
"""Prefix of the names in a script's namespace, because the script may have options of the same names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--capture URL` and the options of a capture to a script's parser, after the script's own options.

    Each option has two names, such as `--every` and `--capture-every`. If the parser already has the first, only the
    second is added. An option that is not given is None in the namespace, so that defaults are defined in one place.
    """
    taken = parser._option_string_actions  # noqa: SLF001  (argparse has no public attribute for it)
    group = parser.add_argument_group("capture (ranktape)")
    group.add_argument("--capture", metavar="URL", default=None, help="Record tensors into the run at this URL.")
    group.add_argument("--capture-config", metavar="FILE", default=None, help=FILE_HELP)
    for setting in SETTINGS:
        names = (setting.flag, "--capture-" + setting.flag.removeprefix("--"))
        flags = [name for name in dict.fromkeys(names) if name not in taken]
        # argparse formats help texts with `%`.
        about: dict[str, Any] = {"dest": _DEST + setting.name, "default": None, "help": setting.help.replace("%", "%%")}
        if setting.kind is bool:
            group.add_argument(*flags, action="store_true", **about)
            continue
        group.add_argument(
            *flags,
            type=setting.kind,
            action="append" if setting.takes_several else "store",
            choices=setting.choices or None,
            metavar=None if setting.choices else setting.metavar,
            **about,
        )


def given_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the options of `add_arguments`, by the settings' names, with the URL and the file."""
    given = {setting.name: getattr(args, _DEST + setting.name, None) for setting in SETTINGS}
    return {**{name: getattr(args, name, None) for name in (_URL, _FILE)}, **given}
