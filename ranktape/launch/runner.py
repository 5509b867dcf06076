"""Runs an unmodified training script with every rank recorded.

    torchrun --nproc-per-node 4 -m ranktape.launch --capture URL [options] train.py [its own arguments]
    torchrun --nproc-per-node 4 -m ranktape.launch --capture URL [options] -m package.train [its own arguments]

Our options end at the script's name. What can be known to fail fails before the script runs; the capture begins with
its first training forward. torch is imported before the script runs: what a script sets in the environment for the
import of torch itself must be set outside of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ranktape.errors import MinimumNotMetError, RanktapeError
from ranktape.launch.options import capture_options, capture_request
from ranktape.launch.script import Script
from ranktape.launch.worker import Worker, stand_aside

if TYPE_CHECKING:
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.launch.autostart import AutoStart
    from ranktape.storage import RunVerdict
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.places.backend import Backend

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
    stored complete. A script that exits with 0 before any model runs (--help) is left at that.
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


def _run(request: Request, *, worker: Worker) -> int:
    script = request.script
    script.check()
    # Before the heavy imports, so that a folder called `zarr` in the working directory is not taken for the package.
    script.enter()

    from ranktape.capture.roles.known import known_layer_types
    from ranktape.capture.settings.options import CaptureOptions, check_layer_types
    from ranktape.capture.starting import open_place, try_place
    from ranktape.launch.autostart import AutoStart, Order, hand_down
    from ranktape.storage.format.attempt import read_attempts

    url, settings = capture_request(request.url, request.values)
    order = Order.from_settings(url, settings, folder=os.getcwd(), launcher_pid=os.getpid())  # noqa: PTH109  (a text)
    options = CaptureOptions(**order.settings)
    check_layer_types(options, known=known_layer_types())
    backend = open_place(order.url, options)
    # A restart by torchrun finds the run of the first start.
    earlier: list[Attempt] = []
    if worker.rank == 0 and worker.restart_count == 0:
        try_place(backend, options)
        earlier = [] if options.resume else read_attempts(backend)
    start = AutoStart(lambda: order)
    if "RANK" not in os.environ:
        # The script may start ranks of its own.
        hand_down(order)
    try:
        has_left = script.run()
    except BaseException as stop:
        if start.capture is not None and os.getpid() == order.launcher_pid:
            start.capture.close(reason=_reason(stop))
        raise
    if os.getpid() != order.launcher_pid:
        return 0  # a process that the script has forked, which ends as the script does
    own = None if start.capture is None else start.capture.close()
    # The other ranks have done their part: were they to fail first, torchrun would end rank 0 before it can say why.
    if worker.rank != 0:
        return 0
    verdict = own or _verdict_on_others(backend, earlier)
    if verdict is None:
        verdict = _no_verdict(start, options)
        if has_left and not start.has_seen_models:
            worker.say(verdict.missing[0])
            return 0
    _tell(verdict, backend=backend, url=url, worker=worker)
    return 0


def _tell(verdict: RunVerdict, *, backend: Backend, url: str, worker: Worker) -> None:
    """Say what the run holds.

    Raises:
        MinimumNotMetError: less than was guaranteed, and torchrun will not train again.
    """
    from ranktape.launch.place import shown
    from ranktape.launch.run_status import holdings_line

    if verdict.met:
        worker.say(holdings_line(backend, url=url))
    elif worker.is_last_attempt:
        raise MinimumNotMetError(verdict.message())
    else:
        left = worker.max_restarts - worker.restart_count
        worker.say(
            f"{verdict.message()} (exit code 0, because torchrun would train again, {left} more times;"
            f" 'ranktape status {shown(url)} --require-minimum' tells a shell)"
        )


def _reason(stop: BaseException) -> str:
    """Why the capture ends, as the run says it."""
    if isinstance(stop, RanktapeError):
        return str(stop)
    if isinstance(stop, SystemExit) and stop.__cause__ is None:
        return f"the training failed (exit code {stop.code})"
    return f"the training failed ({type(stop.__cause__ or stop).__name__})"


def _verdict_on_others(backend: Backend, earlier: Sequence[Attempt]) -> RunVerdict | None:
    """The verdict on what ranks have stored that the script started; None where they have not begun a capture."""
    from ranktape.storage.format.attempt import read_attempts
    from ranktape.storage.format.progress import read_verdict

    judged = read_verdict(backend)
    return None if judged is None or read_attempts(backend) == earlier else judged[0]


def _no_verdict(start: AutoStart, options: CaptureOptions) -> RunVerdict:
    """The verdict where no capture has begun."""
    from ranktape.storage import RunVerdict

    why = f"nothing was recorded: {start.explain_nothing()}"
    return RunVerdict(met=False, required=options.min_iterations, complete=[], missing=[why], final=True)
