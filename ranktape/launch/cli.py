"""Which commands does `ranktape` have, and where are they?

Nothing of them is imported before it is asked for: help answers at once.
"""

from __future__ import annotations

import click

from ranktape import __version__
from ranktape.analyze.group import RanktapeGroup
from ranktape.launch.worker import stand_aside

COMMANDS = {
    "demo": "ranktape.launch.demo:command",
    "plan": "ranktape.launch.plan:command",
    "status": "ranktape.launch.status:command",
    "watch": "ranktape.launch.watch:command",
    "runs": "ranktape.launch.runs:command",
    "check": "ranktape.launch.check:command",
    "repair": "ranktape.launch.repair:command",
    "recover": "ranktape.launch.recover:command",
    "push": "ranktape.launch.push:command",
    "cp": "ranktape.launch.cp:command",
    "prune": "ranktape.launch.prune:command",
    "rm": "ranktape.launch.rm:command",
    "export": "ranktape.launch.export:command",
    "import": "ranktape.launch.import_:command",
    "analyze": "ranktape.analyze.cli:cli",
}
"""Where each command is."""


@click.group(cls=RanktapeGroup, lazy=COMMANDS, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="ranktape", message="%(prog)s %(version)s")
def cli() -> None:
    """A flight recorder for the numbers inside distributed PyTorch training.

    To record a training: torchrun [its options] -m ranktape.launch --capture URL train.py [its arguments]
    """


def main() -> None:
    """Run the `ranktape` command and end the process with its exit code."""
    stand_aside()
    cli(prog_name="ranktape")


if __name__ == "__main__":
    main()
