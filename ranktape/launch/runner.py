"""How is an unmodified training script run with every rank recorded?

    torchrun --nproc-per-node 4 -m ranktape.launch --capture URL [options] train.py [its own arguments]
    torchrun --nproc-per-node 4 -m ranktape.launch --capture URL [options] -m package.train [its own arguments]

Our options end at the script's name. torch is imported before the script runs: what a script sets in the
environment for the import of torch itself must be set outside of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click

from ranktape.errors import MinimumNotMetError, RanktapeError
from ranktape.launch.options import capture_options, capture_request
from ranktape.launch.owner import stand_aside
from ranktape.launch.script import Script
from ranktape.launch.worker import Worker

PROGRAM = "torchrun [its options] -m ranktape.launch"
"""What the help page calls us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a command line asks for."""

    url: str | None
    """The run to record into, where the command line names it."""
    values: dict[str, Any]
    """The options, as the command line has them."""
    script: Script
    """What to run."""


@click.command(
    name="ranktape.launch",
    # What follows the script is the script's, though it begins with a dash.
    context_settings={"allow_interspersed_args": False, "help_option_names": ["--help"], "max_content_width": 100},
)
@click.option("--capture", "url", metavar="URL", help="Record tensors into the run at this URL or path.")
# No `--module` beside it: that is the filter over the modules of the model.
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module's name, as in 'python -m'.")
@capture_options()
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def command(url: str | None, *, is_module: bool, script: str, arguments: tuple[str, ...], **values: Any) -> Request:
    """Run a training script, unmodified, and record its tensors from every rank.

    Fails if the script failed; and, on torchrun's last attempt, if fewer iterations than guaranteed are
    stored complete.
    """
    return Request(
        url=url,
        values=values,
        script=Script(name=script, arguments=arguments, is_module=is_module),
    )


def main(arguments: Sequence[str]) -> int:
    """Run the launcher with these command line arguments; returns the exit code of the process.

    Users' mistakes end as one line on stderr and in torchrun's summary.

    Raises:
        SystemExit: the script failed, with its own exit code.
        KeyboardInterrupt: it was interrupted.
    """
    # The command line says what is recorded, whatever the environment says.
    stand_aside()
    worker = Worker.from_environment(os.environ)
    try:
        request = command.main(list(arguments), prog_name=PROGRAM, standalone_mode=False)
        # click answers --help itself, and returns an exit code.
        return _run(request, worker=worker) if isinstance(request, Request) else int(request or 0)
    except click.ClickException as error:
        worker.report(f"{error.format_message()} See 'python -m ranktape.launch --help'.")
        return error.exit_code
    except RanktapeError as error:
        worker.report(str(error))
        return error.exit_code


def _failure_name(stop: SystemExit) -> str:
    return f"exit code {stop.code}" if stop.__cause__ is None else type(stop.__cause__).__name__


def _run(request: Request, *, worker: Worker) -> int:
    script = request.script
    script.check()
    # Before the heavy imports, so that a folder called `zarr` in the working directory is not taken for the package.
    script.enter()

    from ranktape.capture import Capture

    url, settings = capture_request(request.url, request.values)
    with Capture(url, **settings) as capture:
        try:
            script.run()
        except SystemExit as stop:
            if not capture.is_forked:
                capture.close(reason=f"the training failed ({_failure_name(stop)})")
            raise
        if capture.is_forked:
            return 0
        verdict = capture.close()
    # The other ranks have done their part: were they to fail first, torchrun would end rank 0 before it can say why.
    if verdict.met or worker.rank != 0:
        return 0
    if worker.is_last_attempt:
        raise MinimumNotMetError(verdict.message())
    left = worker.max_restarts - worker.restart_count
    worker.warn(
        f"{verdict.message()} (exit code 0, because torchrun would train again, {left} more times;"
        f" 'ranktape status {url} --require-minimum' tells a shell)"
    )
    return 0
