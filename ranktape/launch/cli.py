"""The commands of `ranktape`. Each is imported when it is used, so that help is fast."""

from __future__ import annotations

import click

from ranktape._version import __version__
from ranktape.analyze.cli import COMMANDS as QUESTIONS
from ranktape.analyze.group import RanktapeGroup
from ranktape.launch.worker import disable_autostart

COMMANDS = {
    "demo": "ranktape.launch.demo:command",
    "record": "ranktape.launch.runner:record_command",
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
    "doctor": "ranktape.launch.maintain:doctor_command",
    "analyze": "ranktape.analyze.cli:cli",
}
"""The module and function of each command."""

SECTIONS = {
    "Record": {
        "record": "Run a training script, unmodified, with every rank recorded.",
        "collect": "Train a script once in each precision, and compare.",
        "demo": "Train and record a small GPT on this machine.",
        "trigger": "Make a running training record its next iterations.",
    },
    "Look": {
        "analyze": "Ask questions about a run: findings, overflow, replay, ...",
        "status": "Which iterations are complete, and what is missing.",
        "runs": "List the runs at and below a URL.",
    },
    "Keep": {
        "export": "Write a run for other programs: Parquet, TensorBoard, ...",
        "import": "Store a folder of .pt files as a run.",
        "cp": "Copy a run, or a part of it.",
        "push": "Copy the iterations in a --spill-dir to their run.",
    },
    "Maintain": {
        "check": "Verify that a run is complete and undamaged.",
        "repair": "Finish or remove what lost processes left behind.",
        "prune": "Delete iterations from a run.",
        "rm": "Delete a run.",
        "doctor": "Check that this machine has what ranktape needs.",
    },
}
"""The sections of the help page, with their commands and summaries."""

EXAMPLES = {
    "record": (
        "ranktape record --nproc-per-node 2 -- train.py --lr 1e-3",
        "ranktape record --capture s3://bucket/run --every 100 --nnodes 2 --nproc-per-node 8 -- train.py",
    ),
    "collect": (
        "ranktape collect --quant bf16,mxfp8,nvfp4 -- --nproc-per-node 2 train.py",
        "ranktape collect --quant bf16,mxfp4 --min-iterations 5 -- python train.py",
    ),
    "demo": ("ranktape demo", "ranktape demo --output runs/nvfp4 --quant nvfp4"),
    "trigger": ("ranktape trigger runs/x", "ranktape trigger runs/x --iterations 5 --select 'layer_type=attention'"),
    "status": ("ranktape status runs/x --follow", "ranktape status runs/x --require-minimum"),
    "runs": ("ranktape runs runs", "ranktape runs s3://bucket/experiments --depth 2"),
    "export": (
        "ranktape export runs/x tensorboard --to tensorboard",
        "ranktape export runs/x statistics.parquet --to parquet",
    ),
    "import": ("ranktape import dump runs/imported", "ranktape import dump runs/imported --skip-unreadable"),
    "cp": ("ranktape cp runs/x s3://bucket/x", "ranktape cp runs/x small --iteration 20 --layer-type linear"),
    "push": ("ranktape push /scratch/spill", "ranktape push /scratch/spill --to s3://bucket/run"),
    "check": ("ranktape check runs/x", "ranktape check runs/x --deep"),
    "repair": ("ranktape repair runs/x --dry-run", "ranktape repair runs/x"),
    "prune": ("ranktape prune runs/x --keep-last 5", "ranktape prune runs/x --iteration 0:100 --dry-run"),
    "rm": ("ranktape rm runs/x --dry-run", "ranktape rm s3://bucket/x --yes"),
    "doctor": ("ranktape doctor", "ranktape doctor s3://bucket/runs"),
}
"""Examples for the help page of each command."""


@click.group(
    cls=RanktapeGroup,
    lazy=COMMANDS,
    sections=SECTIONS,
    examples=EXAMPLES,
    below=dict.fromkeys(QUESTIONS, "analyze"),
    context_settings={"max_content_width": 100},
)
@click.version_option(__version__, prog_name="ranktape", message="%(prog)s %(version)s")
def cli() -> None:
    """A flight recorder for the numbers inside distributed PyTorch training.

    Record a training: ranktape record --nproc-per-node 2 -- train.py. Then: ranktape analyze findings runs/train.
    """


def main() -> None:
    """Run the `ranktape` command, and exit with its exit code."""
    disable_autostart()
    cli(prog_name="ranktape")


if __name__ == "__main__":
    main()
