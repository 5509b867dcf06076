"""Do users' mistakes end a command with one line, and ours with a traceback?"""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from ranktape.analyze.group import RanktapeGroup
from ranktape.errors import CheckFoundError, RanktapeError, UsageError

LAZY = {"analyze": "ranktape.analyze.cli:cli", "nowhere": "ranktape.analyze.not_there:cli"}


@click.group(cls=RanktapeGroup, lazy=LAZY)
def cli() -> None:
    """A group under test."""


@cli.command()
@click.argument("name")
def fail(name: str) -> None:
    """Fail as asked."""
    raise {error.__name__: error for error in (RanktapeError, UsageError, CheckFoundError, ZeroDivisionError)}[name](
        "what happened"
    )


@pytest.mark.parametrize(("name", "code"), [("RanktapeError", 1), ("UsageError", 2), ("CheckFoundError", 3)])
def test_an_error_of_ours_is_one_line_and_its_exit_code(name: str, code: int) -> None:
    result = CliRunner().invoke(cli, ["fail", name])
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", "Error: what happened\n")


def test_any_other_exception_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError, match="what happened"):
        CliRunner().invoke(cli, ["fail", "ZeroDivisionError"], catch_exceptions=False)


def test_commands_are_listed_in_their_order_and_imported_when_used() -> None:
    context = click.Context(cli)
    assert cli.list_commands(context) == ["fail", "analyze", "nowhere"]
    assert cli.get_command(context, "analyze") is not None
    assert cli.list_commands(context) == ["fail", "analyze", "nowhere"]
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        cli.get_command(context, "nowhere")


def test_an_unknown_command_names_the_nearest() -> None:
    result = CliRunner().invoke(cli, ["analyse"])
    assert result.exit_code == 2
    assert "Error: no command 'analyse': use analyze\n" in result.stderr
    assert "use fail or analyze or nowhere" in CliRunner().invoke(cli, ["xyz"]).stderr
