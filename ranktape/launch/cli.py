"""The commands of `ranktape`, each imported when it is asked for, so that help answers at once."""

from __future__ import annotations

import click

from ranktape.analyze.group import RanktapeGroup
from ranktape.launch.worker import stand_aside
from ranktape.lazy_names import __version__

COMMANDS = {
    "demo": "ranktape.launch.demo:command",
    "collect": "ranktape.launch.collect:command",
    "status": "ranktape.launch.run_status:status_command",
    "trigger": "ranktape.launch.control:trigger_command",
    "runs": "ranktape.launch.maintain:runs_command",
    "check": "ranktape.launch.maintain:check_command",
    "repair": "ranktape.launch.maintain:repair_command",
    "push": "ranktape.launch.exchange:push_command",
    "cp": "ranktape.launch.exchange:cp_command",
    "prune": "ranktape.launch.maintain:prune_command",
    "rm": "ranktape.launch.maintain:rm_command",
    "export": "ranktape.launch.exchange:export_command",
    "import": "ranktape.launch.exchange:import_command",
    "doctor": "ranktape.launch.machine:command",
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
