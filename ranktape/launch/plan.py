"""`ranktape plan`: says what a capture would take, before it is run.

ranktape plan --capture URL [options] train.py [its own arguments], in one process; for all ranks of a launch

    torchrun [its options] -m ranktape.launch.plan --capture URL [options] train.py [its own arguments]

The script runs for a few steps, as the launcher would run it, and is stopped then. What it prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ranktape.analyze.console import say, say_json
from ranktape.errors import CaptureError
from ranktape.launch.options import SCRIPT_CONTEXT, capture_request, run_command, script_options
from ranktape.launch.place import MAX_NAMED, by_reason, count_text

if TYPE_CHECKING:
    from ranktape.capture.plans.forecast import Forecast, RankPlan
    from ranktape.capture.plans.planning import PlanningCapture
    from ranktape.launch.script import Script

PROGRAM = "torchrun [its options] -m ranktape.launch.plan"
"""What the help page calls us under torchrun."""


@click.command(name="plan", context_settings=SCRIPT_CONTEXT)
@click.option("--capture", "url", metavar="URL", help="Where the run would be recorded.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document, with every module named.")
@click.option("--verbose", is_flag=True, help="Name the modules that match.")
@click.option("--num-ranks", type=click.IntRange(1), help="Plan for so many ranks, each of which takes as much.")
@click.option("--num-hosts", type=click.IntRange(1), default=1, show_default=True, help="Machines that they share.")
@script_options
def command(
    url: str | None,
    *,
    as_json: bool,
    verbose: bool,
    num_ranks: int | None,
    num_hosts: int,
    script: Script,
    **values: Any,
) -> None:
    """Say what a capture of SCRIPT would take, and whether it fits; nothing is recorded.

    The script is run with its hooks on for a few training steps and stopped: it does what it does in them. Fails,
    and names the option to change, if the capture could not work.
    """
    url, settings = capture_request(url, values)
    script.check()
    # Before the heavy imports, so that a folder called `zarr` in the working directory is not taken for the package.
    script.enter()

    from ranktape.capture.plans.planning import PlanningCapture

    capture = PlanningCapture(url, **settings)
    with contextlib.redirect_stdout(sys.stderr), capture:
        script.run()
    forecast = _agree(capture, num_ranks=num_ranks, num_hosts=num_hosts)
    if forecast is None:
        return
    if as_json:
        say_json(dataclasses.asdict(forecast))
    else:
        say("\n".join(forecast_lines(forecast, verbose=verbose)))
    sys.stdout.flush()
    if forecast.refusals:
        raise CaptureError(f"this capture cannot work: {'; '.join(forecast.refusals)}")


def _agree(capture: PlanningCapture, *, num_ranks: int | None, num_hosts: int) -> Forecast | None:
    """The forecast from what all ranks found out; None on all ranks but the first.

    Raises:
        UsageError: a number of ranks was given, and there are several.
        CaptureError: a rank said nothing, or no rank has seen a step of the training.
    """
    import torch.distributed as dist

    from ranktape.capture.plans.forecast import RankPlan, make_forecast, spread
    from ranktape.capture.plans.planning import MEET_SECONDS

    rendezvous = capture.rendezvous
    rendezvous.share("plan", json.dumps(dataclasses.asdict(capture.plan())))
    forecast = None
    try:
        if capture.rank == 0:
            texts = rendezvous.gather("plan", seconds=MEET_SECONDS)
            plans = [RankPlan.from_json(json.loads(text)) for text in texts]
            if num_ranks is not None:
                plans = spread(plans, num_ranks=num_ranks, num_hosts=num_hosts, options=capture.options)
            forecast = make_forecast(plans, options=capture.options, iterations=capture.iterations, url=capture.url)
        return forecast
    finally:
        # Together: the first rank may hold the store, and a group that some have left keeps the others waiting.
        rendezvous.share("planned", "")
        with contextlib.suppress(CaptureError):
            rendezvous.gather("planned", seconds=MEET_SECONDS)
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def forecast_lines(forecast: Forecast, *, verbose: bool) -> list[str]:
    """The forecast for a person."""
    from ranktape.storage.format.memory import nbytes_text

    one = forecast.ranks[forecast.largest_rank]
    footprint = one.footprint
    where = f" on rank {one.rank}, which takes most" if len(forecast.ranks) > 1 else ""
    # What a histogram is packed to depends on the values: a tenth and less.
    packed = ", before compression" if footprint.kept.get("histogram") else ""
    reduced = ", ".join(f"{count} as {keep}" for keep, count in footprint.kept.items() if keep != "values")
    kept = reduced and f" ({reduced}: {nbytes_text(footprint.stored_nbytes)} are stored{packed})"
    free = "" if one.free_nbytes is None else f", {nbytes_text(one.free_nbytes)} free"
    layers = ", ".join(f"{count} {kind}" for kind, count in one.num_layers.items()) or "none"
    rows = [
        ("layers", layers + where),
        ("tensors", f"{footprint.num_tensors}, {nbytes_text(footprint.nbytes)} per iteration{kept}"),
        *([("coverage", one.coverage)] if one.coverage else []),
        ("largest", f"{footprint.largest}, {nbytes_text(footprint.largest_nbytes)}"),
        (
            "iterations",
            f"{_iterations(forecast)}; {nbytes_text(forecast.iteration_nbytes)} each from all ranks{packed}",
        ),
        ("run", f"{nbytes_text(forecast.run_nbytes)} for {count_text(forecast.num_stored, 'iteration')}{packed}"),
        ("objects", f"{forecast.num_objects} per iteration"),
        ("memory", f"{nbytes_text(forecast.host_nbytes)} per host; {_room(one, forecast)}"),
        ("step", _step(forecast)),
        (
            "store",
            f"takes an iteration in {_time(forecast.store_seconds)}, at {nbytes_text(round(one.write_rate))}/s{free}",
        ),
        ("slowdown", _slowdown(forecast)),
    ]
    lines = [f"plan of a capture into {forecast.url}, {count_text(len(forecast.ranks), 'rank')}"]
    lines += [f"  {name:<11}{text}" for name, text in rows]
    if verbose:
        lines += [f"  {kind}: {module}" for kind, modules in one.layers.items() for module in modules]
    silent = by_reason((reason, place) for place, reason in one.silent_sites.items())
    lines += [f"  not recorded ({reason}): {places}" for reason, places in silent.items()]
    return [*lines, *([f"cannot work: {refusal}" for refusal in forecast.refusals] or ["it fits"])]


def _iterations(forecast: Forecast) -> str:
    if forecast.held_nbytes is None:
        return _listed(forecast.iterations)
    return f"all are held, none is stored until something happens, and {forecast.num_stored} then"


def _listed(iterations: Sequence[int]) -> str:
    named = ", ".join(str(iteration) for iteration in iterations[:MAX_NAMED])
    return named if len(iterations) <= MAX_NAMED else f"{named}, ... {iterations[-1]} ({len(iterations)})"


def _room(one: RankPlan, forecast: Forecast) -> str:
    from ranktape.storage.format.memory import nbytes_text

    num_iterations, held_nbytes = len(forecast.iterations), forecast.held_nbytes
    if held_nbytes is not None:
        needed = f"{nbytes_text(held_nbytes)} for each rank hold the iterations whole"
        if held_nbytes <= one.budget_nbytes:
            return needed
        return f"{needed} (--host-budget-nbytes {held_nbytes}): of the oldest, histograms or statistics are kept"
    count = one.budget_nbytes // max(1, one.footprint.staged_nbytes)
    if count >= num_iterations:
        return "room for all iterations, should the store take none"
    if count:
        return f"room for {count_text(count, 'iteration')} that the store has not taken yet"
    return "an iteration does not fit as a whole: the training waits for the store in the middle of it"


def _step(forecast: Forecast) -> str:
    if forecast.step_seconds is None or forecast.captured_seconds is None:
        return f"not known: the training had only {count_text(forecast.ranks[0].num_steps, 'step')}"
    return f"{_time(forecast.step_seconds)}, {_time(forecast.captured_seconds)} when it is captured"


def _slowdown(forecast: Forecast) -> str:
    if forecast.captured_slowdown is None or forecast.sustained_slowdown is None:
        return "not known"
    return (
        f"{forecast.captured_slowdown:.1%} of a captured step, {forecast.sustained_slowdown:.1%} of the training while "
        f"it is captured"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


if __name__ == "__main__":
    sys.exit(run_command(command, sys.argv[1:], program=PROGRAM, help_of="ranktape plan"))
