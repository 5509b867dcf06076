"""Runs an unmodified training script and records every rank.

    torchrun --nproc-per-node 4 -m ranktape.launch --capture URL [options] train.py [its own arguments]
    torchrun --nproc-per-node 4 -m ranktape.launch --capture URL [options] -m package.train [its own arguments]
    torchrun --nproc-per-node 4 -m ranktape.launch --capture URL --quant mxfp8 [options] train.py [its own arguments]

The options of ranktape end at the script's name. Most mistakes are found before the script runs. The capture starts
with the first training forward. torch is imported before the script runs, so that variables which a script sets for the
import of torch have to be set outside the script.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ranktape.analyze.group import RanktapeCommand
from ranktape.capture.settings.setting import FILE_HELP
from ranktape.errors import MinimumNotMetError, RanktapeError, UsageError
from ranktape.launch.collect import launcher_words, split_words
from ranktape.launch.options import QUANT_VARIABLES, Quantization, capture_arguments, capture_options, quant_options
from ranktape.launch.script import Script
from ranktape.launch.worker import LAUNCHED, LAUNCHED_WITH, disable_autostart, global_rank, report, restarts, say

if TYPE_CHECKING:
    from ranktape.launch.autostart import AutoStart, Order
    from ranktape.storage import RunVerdict
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.places.backend import Backend

PROGRAM = "torchrun [its options] -m ranktape.launch"
"""The name of the program on the help page."""


@click.command(
    name="ranktape.launch",
    cls=RanktapeCommand,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["--help"], "max_content_width": 100},
)
@click.option("--capture", "url", metavar="URL", help="Record tensors into the run at this URL or path.")
@quant_options
# No `--module` as a second name of `-m`: that is the filter over the modules of a model.
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module's name, as in 'python -m'.")
@click.option("--capture-config", metavar="FILE", help=FILE_HELP)
@capture_options()
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    url: str | None,
    *,
    quant: str | None,
    quant_plan: str | None,
    quant_attention: bool | None,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
    **values: Any,
) -> Callable[[], int]:
    """Run a training script, unmodified, and record its tensors from every rank; with --quant in low precision.

    Fails if the script fails, and, on torchrun's last attempt, if fewer iterations than guaranteed are stored complete.
    If the script exits with 0 before any model runs, as with --help, the exit code is 0.
    """
    # The script does not run inside the command, because click handles KeyboardInterrupt itself.
    read = functools.partial(Quantization.of_options, quant, quant_plan, attention=quant_attention)
    if quant is None and quant_plan is None and quant_attention is None:
        read = functools.partial(Quantization.read, os.environ)
    return functools.partial(
        _run, url, values, Script(name=script, arguments=arguments, is_module=is_module), read=read
    )


class _RecordCommand(RanktapeCommand):
    """Requires -- before the script, because its options may have the same names as those of ranktape."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Unknown ones are those of torchrun and of the script, in order."""
        if "--" not in args and not any(word.startswith("--help") for word in args):
            ctx.fail("no -- before the script: ranktape record [OPTIONS] [TORCHRUN_OPTIONS] -- train.py [ARGUMENTS]")
        return super().parse_args(ctx, args)


@click.command(
    name="record",
    cls=_RecordCommand,
    context_settings={"ignore_unknown_options": True, "max_content_width": 100},
    options_metavar="[OPTIONS] [TORCHRUN_OPTIONS] --",
)
@click.option(
    "--capture", "url", metavar="URL", help="The run to record into; runs/ with the script's name by default."
)
@quant_options
@capture_options()
@click.option("--capture-config", metavar="FILE", help=FILE_HELP)
@click.argument("words", metavar="SCRIPT [ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def record_command(
    url: str | None,
    *,
    quant: str | None,
    quant_plan: str | None,
    quant_attention: bool | None,
    capture_config: str | None,
    words: tuple[str, ...],
    **values: Any,
) -> None:
    """Run a training script, unmodified, under torchrun, and record its tensors from every rank.

    Options that are not listed here are passed to torchrun. After -- comes the script with its arguments, or
    '-m package.train', or 'python train.py' for one process without torchrun. It is short for
    'torchrun [TORCHRUN_OPTIONS] -m ranktape.launch --capture URL [OPTIONS] SCRIPT [ARGUMENTS]', and has its exit code.
    """
    from ranktape.capture.roles.known import known_layer_types
    from ranktape.capture.settings.config import resolve
    from ranktape.capture.settings.options import check_layer_types
    from ranktape.capture.starting import open_shared_store

    options = click.get_current_context().command.params
    launcher, script = split_words(words, known=[name for option in options for name in option.opts])
    is_module = script[0] == "-m"
    # Mistakes are reported here instead of on each rank.
    Script(name=script[is_module], arguments=(), is_module=is_module).check()
    given = {**values, "capture_config": capture_config}
    if (resolved := resolve({**given, "capture": url})) is None:
        url = f"runs/{script[1].rpartition('.')[2] if is_module else Path(script[0]).stem}"
        resolved = resolve({**given, "capture": url})
    assert resolved is not None, "a URL is given"
    check_layer_types(resolved[1], known=known_layer_types())
    open_shared_store(*resolved)
    own = ["--capture-config", capture_config] if capture_config is not None else []
    own += ["--capture", url] if url is not None else []
    quantization = Quantization.of_options(quant, quant_plan, attention=quant_attention)
    own += [] if quantization is None else quantization.options
    call = [*launcher_words(launcher), *own, *capture_arguments(values), *script]
    say(shlex.join(["python", *call[1:]]))
    os.execv(call[0], call)  # noqa: S606 - the launch replaces this process


def main(arguments: Sequence[str]) -> int:
    """Run the launcher with command line arguments, and return the exit code.

    Mistakes of the user are reported in one line on stderr and in torchrun's summary.
    """
    # Only the command line decides what is recorded, not the hook of `import torch`.
    disable_autostart()
    try:
        # click answers --help itself, and returns an exit code.
        result = command.main(list(arguments), prog_name=PROGRAM, standalone_mode=False)
        return int((result() if callable(result) else result) or 0)
    except click.ClickException as error:
        report(f"{error.format_message()} See 'python -m ranktape.launch --help'.")
        return error.exit_code
    except RanktapeError as error:
        report(str(error))
        return error.exit_code


def _run(
    given_url: str | None, values: dict[str, Any], script: Script, *, read: Callable[[], Quantization | None]
) -> int:
    script.check()
    # Before the imports, so that a folder called `zarr` in the working directory is not imported as the package.
    script.enter()

    from ranktape.capture.settings.config import resolve
    from ranktape.launch.autostart import Order, arm_launched

    quantization = read()
    # The variables of the other options are set to be empty: the command line has precedence.
    variables = {} if quantization is None else {**dict.fromkeys(QUANT_VARIABLES, ""), **quantization.variables}
    resolved = resolve({"capture": given_url, **values})
    if resolved is None:
        if quantization is None:
            raise UsageError(
                "Missing option '--capture': give the URL of the run, set RANKTAPE_CAPTURE, or write 'capture: URL' "
                "into the file of --capture-config"
            )
        say(f"{quantization.tag}: nothing is recorded (add --capture URL to record)")
        arm_launched(variables)
        script.run()
        return 0
    folder = os.getcwd()  # noqa: PTH109  (a text)
    order = Order.of(*resolved, folder=folder, tag=None if quantization is None else quantization.tag)
    return _record(order, {**variables, LAUNCHED: str(os.getpid()), LAUNCHED_WITH: order.to_json()}, script)


def _record(order: Order, variables: Mapping[str, str], script: Script) -> int:
    from ranktape.capture.rendezvous import end_of_process
    from ranktape.capture.roles.known import known_layer_types
    from ranktape.capture.settings.options import check_layer_types
    from ranktape.capture.starting import check_can_start, open_shared_store
    from ranktape.launch.autostart import arm_launched, failure_reason
    from ranktape.storage.format.attempt import read_attempts
    from ranktape.storage.format.progress import read_verdict

    own_pid, options = os.getpid(), order.options
    check_layer_types(options, known=known_layer_types())
    backend = open_shared_store(order.url, options)
    rank, (num_restarts, _) = global_rank(), restarts()
    # After a restart by torchrun, the run of the first start exists.
    earlier: list[Attempt] = []
    if rank == 0 and num_restarts == 0:
        check_can_start(backend, options)
        earlier = [] if options.resume else read_attempts(backend)
    start = arm_launched(variables)
    end_of_process()
    try:
        has_exited = script.run()
    except BaseException as stop:
        if start.capture is not None and os.getpid() == own_pid:
            start.capture.close(reason=failure_reason(stop), error=stop.__cause__ or stop)
        raise
    if os.getpid() != own_pid:
        return 0  # a forked child of the script, which exits as the script does
    verdict = None if start.capture is None else start.capture.close()
    # Only rank 0 fails: if another rank failed first, torchrun would end rank 0 before it could report the reason.
    if rank != 0:
        return 0
    if verdict is None:
        # The verdict on a run into which ranks that the script started have recorded, if there is one.
        read = read_verdict(backend)
        verdict = None if read is None or read_attempts(backend) == earlier else read[0]
    if verdict is None:
        verdict = _without_capture(start, has_exited=has_exited, required=options.min_iterations)
    if verdict is not None:
        _report(verdict, backend=backend, url=order.given_url)
    return 0


def _without_capture(start: AutoStart, *, has_exited: bool, required: int) -> RunVerdict | None:
    """The verdict if no capture started; None if the script has exited with 0 before any model ran."""
    from ranktape.storage import RunVerdict

    message = f"nothing was recorded: {start.why_not_started()}"
    if has_exited and not start.has_seen_models:
        say(message)
        return None
    return RunVerdict(met=False, required=required, complete=[], missing=[message], final=True)


def _report(verdict: RunVerdict, *, backend: Backend, url: str) -> None:
    """Print a summary of the run, or why its minimum is not stored.

    Raises:
        MinimumNotMetError: the minimum is not stored, and torchrun will not restart the training.
    """
    from ranktape.launch.place import shown
    from ranktape.launch.run_status import summary_line

    if verdict.met:
        say(summary_line(backend, url=url))
    elif verdict.ended:
        say(verdict.message())  # the training was ended on purpose and has not failed
    elif (num_restarts := restarts()[1]) == 0:
        raise MinimumNotMetError(verdict.message())
    else:
        say(
            f"{verdict.message()} (exit code 0, as torchrun may restart the training {num_restarts} more times;"
            f" 'ranktape status {shown(url)} --require-minimum' gives the exit code of the run)"
        )
