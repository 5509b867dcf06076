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

DEFAULT_SAVE_DIR = "./enhanced_tensor_logs"
"""The default directory of the legacy tools."""

OTHER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        *("CACHE_DIR", "CAPTURE", "CAPTURE_CONFIG", "LAUNCHED", "LAUNCHED_WITH", "OWNER_PID"),
        *("QUANT", "QUANT_PLAN", "QUANT_ATTENTION"),
    )
)
"""The variables of ranktape that are not settings of a capture."""

_URL, _FILE = "capture", "capture_config"

_BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}


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
    from_environment = {
        setting.name: _labelled(setting, text, label=setting.variable, is_text=True)
        for setting in SETTINGS
        if (text := variables.get(setting.variable, "").strip())
    }
    path = given.get(_FILE) or variables.get(PREFIX + _FILE.upper(), "").strip()
    values = {**(read_config(path) if path else {}), **from_environment, **given_settings(given)}
    url_in_file = values.pop(_URL, None)
    url = given.get(_URL) or variables.get(PREFIX + _URL.upper()) or url_in_file
    if url is None:
        is_enabled, save_dir, iteration = legacy_environment(variables)
        if not is_enabled:
            return None
        url = save_dir
    if iteration is not None:
        first = values.get("first_iteration", iteration)
        adds = not (values.get("resume") or values.get("overwrite"))
        values = {"start_at": first, "adds": adds, **values, "first_iteration": first}
    return url, CaptureOptions(**values)


def given_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The given values of a parsed command line, as Python gives them. None means 'not given'."""
    return {
        setting.name: setting.to_python(values[setting.name])
        for setting in SETTINGS
        if is_given(values.get(setting.name))
    }


def options_of(settings: Mapping[str, Any], *, capture_config: str | os.PathLike[str] | None) -> CaptureOptions:
    """The options from Python's settings, with those that are not given from a file."""
    known = sorted(item.name for item in dataclasses.fields(CaptureOptions))
    if unknown := sorted(set(settings) - set(known)):
        raise UsageError(f"{unknown[0]!r} is not an option of a capture: {nearest(unknown[0], known)}")
    in_file = {} if capture_config is None else read_config(capture_config)
    in_file.pop(_URL, None)
    return CaptureOptions(**{**in_file, **settings})


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings of a file as Python gives them, with the URL as `capture`."""
    # Not at the top: PyYAML is loaded only if there is such a file.
    from ranktape.yaml_file import parse_toml, parse_yaml, read_text

    file = Path(path).expanduser()
    parser = {".yaml": parse_yaml, ".yml": parse_yaml, ".toml": parse_toml}.get(file.suffix.lower())
    if parser is None:
        raise UsageError(f"--capture-config {file} is neither .yaml nor .toml: rename it to match its language")
    text = read_text(file, option="--capture-config", wanted="a .yaml or .toml file", holds="settings")
    document = parser(text, place=str(file))
    if not isinstance(document, dict | None):
        kind = type(document).__name__
        raise UsageError(f"{file} holds a {kind}, not settings by name: write lines such as 'every: 10'")
    values: dict[str, Any] = {}
    for key, value in (document or {}).items():
        name, label = key.replace("-", "_"), f"{file}: {key}"
        if name == _FILE:
            raise UsageError(f"{label} is not allowed: a file names no other file")
        if name == _URL and not (isinstance(value, str) and value):
            raise UsageError(f"{label} {shown(value)} is not allowed: give the URL of a run")
        if name != _URL and name not in _BY_NAME:
            raise UsageError(f"{file}: there is no setting {key!r:.60}: {nearest(name, sorted((*_BY_NAME, _URL)))}")
        if name in values:
            raise UsageError(f"{file}: {name} is given twice, with hyphens and with underscores: give it once")
        if value is not None:
            values[name] = value if name == _URL else _labelled(_BY_NAME[name], value, label=label)
    return values


def stray_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """A message for each `RANKTAPE_` variable that is not a setting, with the nearest name."""
    variables = os.environ if environment is None else environment
    known = {*OTHER_VARIABLES, *(setting.variable for setting in SETTINGS)}
    return [
        f"the environment has {name}, which is not a setting: {nearest(name, sorted(known))}"
        for name in sorted(variables)
        if name.startswith(PREFIX) and name not in known
    ]


def _labelled(setting: Setting, value: Any, *, label: str, is_text: bool = False) -> Any:
    """A value as Python gives it, checked by itself so that an error names its source, `label`."""
    typed = value
    if is_text and setting.kind is not str:
        try:
            typed = SWITCH_WORDS[value.lower()] if setting.kind is bool else setting.kind(value)
        except (KeyError, ValueError) as error:
            allowed = "true or false" if setting.kind is bool else "a number"
            raise UsageError(f"{label}={value!r:.60} is not allowed: set it to {allowed}") from error
    try:
        converted = setting.to_python(typed)
        setting.check(converted)
    except UsageError as error:
        raise type(error)(f"{label}: {error}") from error
    return converted


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
        # argparse formats help texts with `%`.
        keywords: dict[str, Any] = {
            "dest": _DEST + setting.name,
            "default": None,
            "help": setting.help.replace("%", "%%"),
        }
        if setting.kind is bool:
            keywords["action"] = "store_true"
        else:
            keywords |= {"type": setting.kind, "action": "append" if setting.takes_several else "store"}
            keywords |= {"choices": setting.choices} if setting.choices else {"metavar": setting.metavar}
        group.add_argument(*(name for name in names if name not in taken), **keywords)


def given_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the options of `add_arguments`, by the settings' names, with the URL and the file."""
    settings = {setting.name: getattr(args, _DEST + setting.name, None) for setting in SETTINGS}
    return {**{name: getattr(args, name, None) for name in (_URL, _FILE)}, **settings}
