"""Gives the commands that ask questions of a run.

`ranktape analyze` and `python -m ranktape.analyze` are this group. Nothing of them is imported before it is asked for.
"""

from __future__ import annotations

import click

from ranktape.analyze.group import RanktapeGroup

_QUESTIONS = "ranktape.analyze.questions"
_COMMANDS = "ranktape.analyze.commands"

COMMANDS = {
    "ls": f"{_QUESTIONS}.ls:ls",
    "overflow": f"{_QUESTIONS}.overflow:overflow",
    "stats": f"{_QUESTIONS}.stats:stats",
    "distribution": f"{_QUESTIONS}.distribution:distribution",
    "sweep": f"{_COMMANDS}:sweep",
    "outliers": f"{_QUESTIONS}.outliers:outliers",
    "trend": f"{_QUESTIONS}.trend:trend",
    "trace": f"{_QUESTIONS}.trace:trace",
    "gradients": f"{_QUESTIONS}.gradients:gradients",
    "compare": f"{_QUESTIONS}.compare:compare",
    "compare-map": f"{_QUESTIONS}.compare:compare_map",
    "plot": f"{_COMMANDS}:plot",
    "gate": "ranktape.analyze.rules.gate:gate",
    "report": f"{_COMMANDS}:report",
}
"""Where each command is: a question, of which the command is made, or a command."""


class _AnalyzeGroup(RanktapeGroup):
    """Makes the commands of questions when they are used."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; None if there is none."""
        module, _, name = self.lazy.get(cmd_name, "").partition(":")
        if not module or module.startswith(_COMMANDS):
            return super().get_command(ctx, cmd_name)
        from ranktape.analyze.command import question_command

        command = question_command(module, name)
        if cmd_name == "gate":
            command.params.append(_SHOW_DEFAULTS)
        return command


def _show_defaults(context: click.Context, _: click.Parameter, is_wanted: bool) -> None:  # noqa: FBT001 - click's
    if is_wanted and not context.resilient_parsing:
        from ranktape.analyze.console import say
        from ranktape.analyze.rules.rule import DEFAULT_RULES

        say(DEFAULT_RULES.rstrip("\n"))
        context.exit()


_SHOW_DEFAULTS = click.Option(
    ["--show-defaults"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_defaults,
    help="Print the rules that hold where none are given, as a file for --rule-file, and exit.",
)
"""It asks nothing of a run."""


@click.group(name="analyze", cls=_AnalyzeGroup, lazy=COMMANDS, context_settings={"max_content_width": 100})
def cli() -> None:
    """Ask a recorded run what its numbers do.

    RUN is a URL or a path; a folder of .pt files of the legacy tools, or one such file, will do as well.
    Filters are the names of a record's fields; a value may be a text with * and ?, a number, a range (0-3, 10:20:2)
    or alternatives (0,2,5), and an option may be repeated.
    """
