"""Gives the click group of every command line of ranktape.

Commands are imported when they are used, so that help answers at once, and a `RanktapeError` becomes one line on stderr
with the exit code of its class. Other exceptions are our own mistakes and keep their traceback.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import click

from ranktape.errors import RanktapeError


def _is_stdout_broken() -> bool:
    """Whether stdout takes no more; what it held is in it already, or it has no place for that."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # it is in memory
        return False
    try:
        sys.stdout.flush()
        os.write(descriptor, b"\n")
    except OSError:
        return True
    return False


class RanktapeGroup(click.Group):
    """A group whose commands may be named by where they are, and which turns `RanktapeError` into an exit code."""

    def __init__(self, *args: Any, lazy: Mapping[str, str] | None = None, **options: Any) -> None:
        """Take the usual arguments of a group, and in `lazy` one "module:attribute" for each name of a command."""
        super().__init__(*args, **options)
        self.lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The names in the order in which they were given, those at hand first."""
        return [*self.commands, *self.lazy]

    def load(self, name: str) -> click.Command:
        """The command of one of the names in `lazy`, imported now."""
        module, attribute = self.lazy[name].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; None if there is none."""
        return self.load(cmd_name) if cmd_name in self.lazy else super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the arguments name; an unknown name is answered with the nearest ones."""
        name, names = args[0], self.list_commands(ctx)
        if name not in names and not name.startswith("-"):
            nearest = difflib.get_close_matches(name, names, n=2) or names
            ctx.fail(f"no command {name!r}: use {' or '.join(nearest)}")
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line; where stdout takes no more, one line says so.

        Whoever stops reading (a pipe to `head`) hears nothing.
        """
        try:
            try:
                return super().main(*args, **extra)
            finally:
                # What is written at the end of the process is beyond every handler.
                if sys.stdout is not None:  # it was closed before we began
                    sys.stdout.flush()
        except OSError as error:
            if not _is_stdout_broken():
                raise
            # What it still holds goes nowhere: Python writes it when the process ends, and would complain.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
            if error.errno != errno.EPIPE:
                click.echo(f"Error: stdout cannot be written: {error.strerror or error}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a `RanktapeError` leaves as one line with its exit code.

        Raises:
            ClickException: the command met a `RanktapeError`.
        """
        try:
            return super().invoke(ctx)
        except RanktapeError as error:
            from ranktape.storage.places.failures import printable

            # Names in it may be a stranger's.
            failure = click.ClickException("\n".join(printable(line) for line in str(error).splitlines()))
            failure.exit_code = error.exit_code  # type: ignore[misc]  # click reads it from the instance
            raise failure from error
