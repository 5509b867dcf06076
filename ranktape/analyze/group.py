"""The click classes of all command lines of ranktape.

Commands are imported when they are used, so that help is fast. A `RanktapeError` becomes one line on stderr with the
exit code of its class; other exceptions are bugs and keep their traceback. Help shows the command's own options first.
Filters and rarely used settings are folded into one line each, with an option that prints them.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import errno
import importlib
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ranktape.errors import RanktapeError

MAX_NAMED_RUNS = 6
"""Maximum number of runs in the message for a missing RUN."""


class Section(enum.Enum):
    """A part of a command's help: title, and for a folded one, the option that prints it and examples. In order."""

    OWN = ("Options", None, "")
    """The options of this command alone."""
    CAPTURE = ("More settings", "--help-capture", "--policy, --compression, --keep-last, ...")
    """The settings of a capture that are rarely needed."""
    RECORDS = ("Which records", "--help-filters", "--iteration, --rank, --layer-idx, --module, --where, ...")
    """The filters."""
    WORK = ("Work", "--help-work", "--workers, --scheduler, --no-cache")
    """How the answer is computed."""
    OUTPUT = ("Output", None, "")
    """How the answer is written."""

    def __init__(self, title: str, flag: str | None, some: str) -> None:
        """Take the parts of the value.

        Args:
            title: The heading.
            flag: The option that prints a folded section; None if help prints the section itself.
            some: Options of a folded section that help names.
        """
        self.title, self.flag, self.some = title, flag, some


class SectionOption(click.Option):
    """An option that help shows in a given section."""

    def __init__(self, *args: Any, section: Section, **options: Any) -> None:
        """Take the arguments of `click.Option`, and the section."""
        super().__init__(*args, **options)
        self.section = section


class RanktapeCommand(click.Command):
    """A command whose help is divided into sections and ends with examples."""

    examples: tuple[str, ...] = ()
    """Command lines in the help."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters, and the options that print folded sections."""
        sections = {one.section for one in self.params if isinstance(one, SectionOption)}
        folded = [
            click.Option(
                [section.flag],
                is_flag=True,
                expose_value=False,
                is_eager=True,
                callback=_print_section,
                hidden=True,
                help=f"Show the options of '{section.title}'.",
            )
            for section in Section
            if section.flag is not None and section in sections
        ]
        return [*self.params, *folded, *(one for one in super().get_params(ctx) if one not in self.params)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Errors suggest the nearest option, or the runs nearby if RUN is missing."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            options = (one for one in self.get_params(ctx) if isinstance(one, click.Option))
            flags = [flag for one in options for flag in (*one.opts, *one.secondary_opts)]
            near = difflib.get_close_matches(error.option_name, flags, n=1)
            raise click.NoSuchOption(error.option_name, possibilities=near, ctx=ctx) from error
        except click.MissingParameter as error:
            is_run = isinstance(error.param, click.Argument) and error.param.name in _RUN_NAMES
            runs = _runs_here() if is_run else []
            if not runs:
                raise
            raise click.UsageError(f"{error.format_message()} Runs here: {', '.join(runs)}.", ctx=ctx) from error

    def options_of(self, ctx: click.Context, section: Section) -> list[tuple[str, str]]:
        """The options of a section and their help."""
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        params = [one for one in options if getattr(one, "section", Section.OWN) is section]
        return [record for one in params if (record := one.get_help_record(ctx)) is not None]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections. A folded section shows only the names of options."""
        for section in Section:
            records = self.options_of(ctx, section)
            if not records:
                continue
            with formatter.section(section.title):
                if section.flag is None:
                    formatter.write_dl(records)
                else:
                    formatter.write_text(f"{section.some} ({section.flag})")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples after the epilogue."""
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


_RUN_NAMES = ("run", "sources")


def _print_section(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click's signature
    """Print a folded section and exit."""
    if not value or ctx.resilient_parsing:
        return
    assert isinstance(ctx.command, RanktapeCommand)
    formatter = ctx.make_formatter()
    section = next(one for one in Section if one.flag in param.opts)
    with formatter.section(section.title):
        formatter.write_dl(ctx.command.options_of(ctx, section))
    click.echo(formatter.getvalue().rstrip())
    ctx.exit()


def _runs_here() -> list[str]:
    """Paths of runs below the directory `runs`, or in the working directory if there is none."""
    from ranktape.storage.maintenance.runs import find_runs

    folder, depth = (Path("runs"), 2) if Path("runs").is_dir() else (Path(), 1)
    with contextlib.suppress(RanktapeError):
        return [str(folder / one.path) for one in find_runs(folder, max_depth=depth)[:MAX_NAMED_RUNS]]
    return []


def _is_stdout_broken() -> bool:
    """Whether stdout cannot be written. Buffered output is flushed first."""
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
    """A group that suggests commands for unknown names and turns a `RanktapeError` into an exit code."""

    def __init__(
        self,
        *args: Any,
        lazy: Mapping[str, str] | None = None,
        sections: Mapping[str, Mapping[str, str]] | None = None,
        examples: Mapping[str, tuple[str, ...]] | None = None,
        below: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Take the arguments of `click.Group`, and data about commands that are not imported yet.

        Args:
            args: Arguments of `click.Group`.
            lazy: "module:attribute" for each command.
            sections: For each section of the list of commands, their names and descriptions.
            examples: The examples in the help of each command.
            below: For each command of a subgroup, the name of that group.
            options: Further arguments of `click.Group`.
        """
        super().__init__(*args, **options)
        self.lazy = dict(lazy or {})
        self.sections = sections or {}
        self.examples = examples or {}
        self.below = below or {}

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The names in the given order, those of imported commands first."""
        return [*self.commands, *self.lazy]

    def load(self, name: str) -> click.Command:
        """Import the command of one of the names in `lazy`."""
        module, attribute = self.lazy[name].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with this name; None if there is none."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        command = self.load(cmd_name)
        if isinstance(command, RanktapeCommand):
            command.examples = self.examples.get(cmd_name, ())
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section, without importing them."""
        if not self.sections:
            super().format_commands(ctx, formatter)
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command for the arguments. For an unknown name, the error suggests the nearest ones."""
        name, names = args[0], self.list_commands(ctx)
        if name in self.below:
            ctx.fail(f"no command {name!r}: use '{shlex.join([ctx.command_path, self.below[name], *args])}'")
        if name not in names and not name.startswith("-"):
            near = difflib.get_close_matches(name, [*names, *self.below], n=2) or names
            shown = (f"{self.below[one]} {one}" if one in self.below else one for one in near)
            ctx.fail(f"no command {name!r}: use {' or '.join(shown)}")
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line. If stdout cannot be written, print one line to stderr and exit with 1.

        A closed pipe, as with `head`, is not reported.
        """
        try:
            try:
                return super().main(*args, **extra)
            finally:
                # Errors of output that is flushed when the process exits cannot be handled.
                if sys.stdout is not None:  # it was closed before the process started
                    sys.stdout.flush()
        except OSError as error:
            if not _is_stdout_broken():
                raise
            # Discard the buffered output: Python would flush it at exit and print an error.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
            if error.errno != errno.EPIPE:
                click.echo(f"Error: stdout cannot be written: {error.strerror or error}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. A `RanktapeError` becomes one line on stderr with its exit code.

        Raises:
            ClickException: the command raised a `RanktapeError`.
        """
        try:
            return super().invoke(ctx)
        except RanktapeError as error:
            from ranktape.storage.places.failures import printable

            # The message may contain untrusted names.
            failure = click.ClickException("\n".join(printable(line) for line in str(error).splitlines()))
            failure.exit_code = error.exit_code  # type: ignore[misc]  # click reads it from the instance
            raise failure from error
