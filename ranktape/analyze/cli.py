"""Gives the commands that ask questions of a run.

`ranktape analyze` and `python -m ranktape.analyze` are this group. Nothing of them is imported before it is asked for.
"""

from __future__ import annotations

import click

from ranktape.analyze.group import RanktapeGroup

COMMANDS = {
    "ls": "questions.ls:ls",
    "overflow": "questions.overflow:overflow",
    "stats": "questions.stats:stats",
    "distribution": "questions.distribution:distribution",
    "sweep": "questions.sweep_command:sweep",
    "findings": "questions.findings:findings",
    "trend": "questions.trend:trend",
    "trace": "questions.trace:trace",
    "replay": "questions.replay:replay",
    "compare": "questions.compare:compare",
    "plot": "commands:plot",
    "report": "commands:report",
}
"""The function in this package that each command is made of."""


class _AnalyzeGroup(RanktapeGroup):
    """Makes commands of functions when they are used."""

    def load(self, name: str) -> click.Command:
        """The command made of its function, with what no function says."""
        from ranktape.analyze.command import make_command

        module, _, function = self.lazy[name].partition(":")
        command = make_command(f"ranktape.analyze.{module}", function)
        if name == "sweep":
            next(one for one in command.params if one.name == "format").opts.append("--elem-format")
        elif name == "plot":
            from ranktape.analyze.commands import kinds_text

            command.epilog = kinds_text()
        return command


@click.group(name="analyze", cls=_AnalyzeGroup, lazy=COMMANDS, context_settings={"max_content_width": 100})
def cli() -> None:
    """Ask a recorded run what its numbers do.

    RUN is a URL or a path; a folder of .pt files of the legacy tools, or one such file, will do as well.
    Filters are the names of a record's fields; a value may be a text with * and ?, a number, a range (0-3, 10:20:2)
    or alternatives (0,2,5), and an option may be repeated.
    """
