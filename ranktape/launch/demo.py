"""`ranktape demo`: trains a small model with capture on every rank, and analyses the run.

The training is started with torchrun, as a user would start it. The run is analysed with the commands that a user
would type; each is printed first.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ranktape.analyze.console import say
from ranktape.analyze.group import RanktapeCommand
from ranktape.errors import CaptureError, RunExistsError, RunNotFoundError, UsageError
from ranktape.launch.options import Quantization, capture_arguments, capture_options, quant_options
from ranktape.launch.place import read_options

NUM_ITERATIONS = 3
"""Default number of captured iterations."""

_PRESET = ("first_iteration", "manual", "advance_on", "record_last", "trigger")
"""The settings of a capture that are not options of the demo, because it sets them or has no use for them."""


@click.command(name="demo", cls=RanktapeCommand)
@click.option("--output", metavar="URL", default="runs/demo", show_default=True, help="The run to record into.")
@click.option(
    "--nproc-per-node",
    "num_ranks",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Number of ranks on this machine.",
)
@click.option("--steps", type=click.IntRange(min=1), default=100, show_default=True, help="Number of training steps.")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp32"]),
    default="bf16",
    show_default=True,
    help="What the layers compute in: bf16 by autocast, or fp32.",
)
@quant_options
@capture_options(without=_PRESET, defaults={"min_iterations": NUM_ITERATIONS})
def command(
    output: str,
    *,
    num_ranks: int,
    steps: int,
    dtype: str,
    quant: str | None,
    quant_plan: str | None,
    quant_attention: bool | None,
    **values: Any,
) -> None:
    """Train a small GPT on this machine with capture, then analyse what was captured.

    Needs no GPU, no server and no download. By default the captured iterations are spread over the whole
    training.
    """
    from ranktape.storage import open_run

    quantization = Quantization.of_options(quant, quant_plan, attention=quant_attention)
    settings = plan_capture(values, steps=steps, quant_type=quantization.tag if quantization else dtype)
    # The launcher checks this too, but under torchrun that takes seconds and prints a page of output.
    with contextlib.suppress(RunNotFoundError):
        if not (settings["overwrite"] or settings["resume"]):
            open_run(output, storage_options=read_options(settings.get("storage_options")))
            raise RunExistsError(
                f"there is a run at {output} already: add --overwrite to delete it, or choose another --output"
            )
    script = ["--steps", str(steps), "--dtype", dtype]
    quant_words = quantization.options if quantization else []
    train(["--capture", output, *quant_words, *capture_arguments(settings)], script=script, num_ranks=num_ranks)
    show(output, storage_options=settings.get("storage_options"))


def plan_capture(values: Mapping[str, Any], *, steps: int, quant_type: str) -> dict[str, Any]:
    """The settings of the capture; those that are not given are adapted to the length of the training.

    Raises:
        UsageError: the training is too short for the iterations.
    """
    # Not at the top, so that the help page is fast.
    from ranktape.capture.settings.config import given_settings
    from ranktape.capture.settings.options import CaptureOptions

    target = max(1, values.get("max_iterations") or values.get("min_iterations") or 1)
    # Evenly spread over the training, without its first and last step.
    share = steps // (target + 2)
    defaults = {"start_at": share, "every": max(1, share), "quant_type": quant_type}
    settings = {**values, **{name: default for name, default in defaults.items() if values.get(name) is None}}
    options = CaptureOptions(**given_settings(settings))
    last = options.start_at + (options.min_iterations - 1) * options.every
    if last >= steps:
        raise UsageError(
            f"--steps {steps} ends before iteration {last}, the last of the {options.min_iterations} to capture:"
            f" give {last + 1} steps or more, or a smaller --start-at, --every or --min-iterations"
        )
    return settings


def train(capture: Sequence[str], *, script: Sequence[str], num_ranks: int) -> None:
    """Run the demo's training under torchrun; its output goes to that of this process.

    Raises:
        CaptureError: the training failed.
    """
    arguments = ["--standalone", "--nproc-per-node", str(num_ranks), "-m", "ranktape.launch", *capture]
    arguments += ["-m", "ranktape.launch.demo_train", *script]
    _echo(["torchrun", *arguments])
    started = time.monotonic()
    # One thread for each rank, because the ranks share the machine with each other and with their writers.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", *arguments], env=environment, check=False)
    if done.returncode != 0:
        raise CaptureError(f"the training ended with exit code {done.returncode}: see its output above")
    say(f"trained and stored in {time.monotonic() - started:.1f} s")


def show(url: str, *, storage_options: str | None) -> None:
    """Run the commands that show what is stored and which formats it tolerates."""
    from ranktape.launch.cli import cli
    from ranktape.storage import open_run

    last = open_run(url, storage_options=read_options(storage_options)).iterations[-1]
    access = ["--storage-options", storage_options] if storage_options else []
    # Next to the run, because a run contains only Zarr.
    prefix = "" if "://" in url else f"{url.rstrip('/')}-"
    values = {"RUN": url, "LAST": str(last), "PLOT": f"{prefix}overflow.png", "REPORT": f"{prefix}report.html"}
    for words in COMMANDS:
        arguments = [*(values.get(word, word) for word in words), *access]
        _echo(["ranktape", *arguments])
        cli.main(arguments, prog_name="ranktape", standalone_mode=False)
    say(f"open it in a browser: {Path(values['REPORT']).resolve().as_uri()}")


COMMANDS = (
    ("status", "RUN"),
    ("analyze", "overflow", "RUN", "--format", "fp8_e4m3", "--by", "layer_type,operation"),
    (
        *("analyze", "sweep", "RUN", "--iteration", "LAST", "--rank", "0", "--format", "mxfp8,mxfp4,nvfp4"),
        *("--by", "layer_type,operation", "--target-sqnr", "20"),
    ),
    ("analyze", "findings", "RUN", "--limit", "8"),
    ("analyze", "plot", "RUN", "--format", "fp8_e4m3", "--output", "PLOT"),
    ("analyze", "report", "RUN", "--output", "REPORT"),
)
"""The commands at the end of the demo: what is stored, what fp8 would lose, which format each kind of layer tolerates,
the findings, a plot, and a report."""


def _echo(words: Sequence[str]) -> None:
    # Storage options may contain a password.
    shown = [
        "JSON" if before == "--storage-options" else word for before, word in zip(["", *words], words, strict=False)
    ]
    say(f"\n$ {shlex.join(shown)}")
