"""How does a training script take the options of a capture among its own arguments?"""

from __future__ import annotations

import argparse
from typing import Any

from ranktape.capture.settings.options import SETTINGS

_DEST = "capture_"
"""Beginning of the names in a script's namespace: the script may have a `--dtype` of its own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--capture URL` and the options of a capture to a script's own parser, after the script's own.

    Each option has two names, `--every` and `--capture-every`; where the parser has the first one already it stays
    the script's, and ours is the second. An option that was not given stays None in the namespace, so that defaults
    live in one place.
    """
    taken = parser._option_string_actions  # noqa: SLF001  (argparse tells it in no other way)
    group = parser.add_argument_group("capture (ranktape)")
    group.add_argument("--capture", metavar="URL", default=None, help="Record tensors into the run at this URL.")
    for setting in SETTINGS:
        names = (setting.flag, "--capture-" + setting.flag.removeprefix("--").removeprefix("capture-"))
        flags = [name for name in dict.fromkeys(names) if name not in taken]
        # A percent sign in a help text is argparse's own.
        about: dict[str, Any] = {"dest": _DEST + setting.name, "default": None, "help": setting.help.replace("%", "%%")}
        if setting.kind is bool:
            group.add_argument(*flags, action="store_true", **about)
            continue
        group.add_argument(
            *flags,
            type=setting.kind,
            action="append" if setting.multiple else "store",
            choices=setting.choices or None,
            metavar=None if setting.choices else setting.metavar,
            **about,
        )


def given_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The values of `add_arguments`' options, by the settings' names, and by `capture` the URL."""
    given = {setting.name: getattr(args, _DEST + setting.name, None) for setting in SETTINGS}
    return {"capture": getattr(args, "capture", None), **given}
