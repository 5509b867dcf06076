"""Which commands ask questions of a run?

`ranktape analyze` and `python -m ranktape.analyze` are this group. Nothing of them is imported before it is asked for.
"""

from __future__ import annotations

import click

from ranktape.analyze.group import RanktapeGroup

COMMANDS = {
    name: f"ranktape.analyze.commands.{name}:command"
    for name in (
        "ls",
        "overflow",
        "stats",
        "distribution",
        "sweep",
        "outliers",
        "trend",
        "trace",
        "gradients",
        "compare",
        "plot",
        "gate",
        "report",
    )
}
"""Where each command is."""


@click.group(name="analyze", cls=RanktapeGroup, lazy=COMMANDS, context_settings={"max_content_width": 100})
def cli() -> None:
    """Ask a recorded run what its numbers do.

    RUN is a URL or a path; a folder of .pt files that the tools before us wrote, or one such file, will do as well.
    Filters are the names of a record's fields; a value may be a text with * and ?, a number, a range (0-3, 10:20:2)
    or alternatives (0,2,5), and an option may be repeated.
    """
