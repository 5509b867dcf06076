"""Writes a page of all commands and their options, from their own help: commands.py FOLDER (`make docs`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ranktape.launch.cli import cli
from ranktape.launch.runner import PROGRAM
from ranktape.launch.runner import command as launcher

COLUMNS = 100

HEAD = """\
# Commands

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 a check found something.
"""


def walk(command: click.Command, *, name: str, parent: click.Context | None = None) -> Iterator[click.Context]:
    """The command and all below it, outer ones first, each as the context in which its help is written."""
    context = click.Context(command, info_name=name, parent=parent, terminal_width=COLUMNS, max_content_width=COLUMNS)
    yield context
    if isinstance(command, click.Group):
        for child_name in command.list_commands(context):
            child = command.get_command(context, child_name)
            if child is None:
                raise LookupError(f"{context.command_path} lists {child_name!r} and does not have it")
            yield from walk(child, name=child_name, parent=context)


def page() -> str:
    """The whole page, in Markdown."""
    contexts = [*walk(cli, name="ranktape"), *walk(launcher, name=PROGRAM)]
    sections = [f"\n## {item.command_path}\n\n```text\n{item.command.get_help(item)}\n```\n" for item in contexts]
    return HEAD + "".join(sections)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "commands.md").write_text(page(), encoding="utf-8")
