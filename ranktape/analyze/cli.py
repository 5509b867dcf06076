"""The commands that answer questions about a run.

`ranktape analyze` and `python -m ranktape.analyze` are this group. A command is imported when it is used.
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
"""The function in this package from which each command is created."""

SECTIONS = {
    "What was recorded": {
        "ls": "List records, or count them by the values of fields.",
        "stats": "Compute mean, deviation, extremes and percentiles.",
        "distribution": "Show histograms, quantiles and fits of values.",
    },
    "What is wrong": {
        "findings": "Find what is wrong in a run, and where. Start here.",
        "overflow": "Count overflow, underflow, NaN, Inf and zeros.",
        "trend": "Follow metrics over the iterations.",
        "trace": "Follow one sample or call through the layers.",
        "compare": "Find where two runs, ranks or samples differ.",
    },
    "Which precision": {
        "sweep": "Find the best scale of each tensor in a format.",
        "replay": "Compute products again by recipe; make a plan.",
    },
    "Pictures and pages": {
        "plot": "Draw plots, and print the path of each.",
        "report": "Write one HTML page: findings, maps and charts.",
    },
}
"""The commands in the order and sections of the help."""

EXAMPLES = {
    "ls": (
        "ranktape analyze ls runs/demo --by layer_type --by tensor_name",
        "ranktape analyze ls runs/demo --layer-idx 0 --tensor-name 'grad_*'",
    ),
    "overflow": (
        "ranktape analyze overflow runs/demo --format fp8_e4m3 --by layer_idx",
        "ranktape analyze overflow runs/demo --first --check 'overflow.total == 0'",
    ),
    "stats": (
        "ranktape analyze stats runs/demo --by module --tensor-name grad_output",
        "ranktape analyze stats runs/demo --metric absmax --metric p99.9 --sort absmax",
    ),
    "distribution": (
        "ranktape analyze distribution runs/demo --tensor-name weight --by layer_idx",
        "ranktape analyze distribution runs/demo --module head --csv -o head.csv",
    ),
    "sweep": (
        "ranktape analyze sweep runs/demo --tensor-name weight --format mxfp8,nvfp4",
        "ranktape analyze sweep runs/demo --layer-type linear --format fp8_e4m3 --target-sqnr 20",
    ),
    "findings": (
        "ranktape analyze findings runs/demo",
        "ranktape analyze findings runs/demo --severity high --check 'False'",
    ),
    "trend": (
        "ranktape analyze trend runs/demo --metric absmax --tensor-name weight",
        "ranktape analyze trend runs/demo --module head --metric std --csv",
    ),
    "trace": (
        "ranktape analyze trace runs/demo --sample 0",
        "ranktape analyze trace runs/demo --rank 0 --iteration 20 --metric absmax",
    ),
    "replay": (
        "ranktape analyze replay runs/demo --recipe mxfp8,nvfp4",
        "ranktape analyze replay runs/demo --recipe mxfp8,nvfp4 --target-sqnr 18 --plan plan.yaml",
    ),
    "compare": (
        "ranktape analyze compare runs/bf16 runs/nvfp4 --in-order",
        "ranktape analyze compare runs/demo --pair rank=0:1 --tensor-name weight",
    ),
    "plot": (
        "ranktape analyze plot runs/demo --all -o plots",
        "ranktape analyze plot runs/demo --kind layer_binades --tensor-name grad_output",
    ),
    "report": (
        "ranktape analyze report runs/demo -o report.html",
        "ranktape analyze report runs/demo --recipe mxfp8,nvfp4",
    ),
}
"""Example command lines in the help of each command."""


class _AnalyzeGroup(RanktapeGroup):
    """Creates commands from functions when they are used."""

    def load(self, name: str) -> click.Command:
        """The command of a function, with the parts that are not in its signature and docstring."""
        from ranktape.analyze.command import make_command

        module, _, function = self.lazy[name].partition(":")
        command = make_command(f"ranktape.analyze.{module}", function)
        if name == "sweep":
            next(one for one in command.params if one.name == "format").opts.append("--elem-format")
        elif name == "plot":
            from ranktape.analyze.commands import kinds_text

            command.epilog = kinds_text()
        return command


@click.group(
    name="analyze",
    cls=_AnalyzeGroup,
    lazy=COMMANDS,
    sections=SECTIONS,
    examples=EXAMPLES,
    context_settings={"max_content_width": 100},
)
def cli() -> None:
    """Analyze a recorded run.

    RUN is the path or URL of a run, of a folder of .pt files of the legacy tools, or of one such file. Each filter has
    the name of a field of records (--layer-idx, --tensor-name, ...). Its value is a text, in which * and ? are
    wildcards, a number, a range (0-3, 10:20:2) or a list of alternatives (0,2,5). Filters may be repeated.
    """
