"""How does a user store what killed processes left in their rings?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ranktape.analyze.console import say, say_json
from ranktape.errors import CheckFoundError, RanktapeError
from ranktape.launch.place import read_options, storage_options_option

if TYPE_CHECKING:
    from ranktape.capture.writing.recover import RingReport


@click.command(name="recover")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--trust-other-boots",
    is_flag=True,
    help="Take rings that another host wrote, or an earlier start of this one: what it wrote last may be missing if "
    "it did not go down in order.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@storage_options_option
def command(directory: Path, *, trust_other_boots: bool, as_json: bool, storage_options: str | None) -> None:
    """Store what killed processes left in the rings in DIR, the --ring-dir of a capture.

    An iteration is committed when every tensor of it is found, in the ring or in the store; of others the run says
    why they are lost. A ring is removed once nothing in it is of use. Rings whose processes run are left alone. Exits
    with 3 when a ring remains or an iteration is lost.
    """
    from ranktape.capture.writing.recover import RingReport, find_rings, recover_ring
    from ranktape.storage.places.retry import RetryingBackend
    from ranktape.storage.places.urls import open_backend

    options = read_options(storage_options)

    def open_run(url: str) -> RetryingBackend:
        return open_backend(url, storage_options=options if "://" in url else None)

    reports = []
    for path in find_rings(directory):
        try:
            report = recover_ring(path, open_run=open_run, trusts_other_boots=trust_other_boots)
        except RanktapeError as error:
            report = RingReport(path=path, remains=str(error))
        reports.append(report)
    if as_json:
        rings = [{**dataclasses.asdict(report), "path": str(report.path)} for report in reports]
        say_json({"directory": str(directory), "rings": rings})
    else:
        say("\n".join(line for report in reports for line in _lines(report)) or f"no ring in {directory}")
    if left := [report for report in reports if report.remains is not None]:
        raise CheckFoundError(f"{len(left)} of {len(reports)} rings remain in {directory}")
    if lost := sum(len(report.failed) for report in reports):
        raise CheckFoundError(f"{lost} iterations are lost; the status of the run says why")


def _lines(report: RingReport) -> list[str]:
    if report.remains is not None:
        return [f"{report.path} remains: {report.remains}"]
    whose = f"rank {report.rank} of {report.url}" if report.url else "nothing was captured"
    lines = [f"{report.path} ({whose}) is settled and removed"]
    if report.committed:
        named = ", ".join(str(iteration) for iteration in report.committed)
        lines.append(f"  committed: iterations {named} ({report.num_tensors} tensors from the ring)")
    if report.finished:
        lines.append(f"  complete with all ranks: iterations {', '.join(str(one) for one in report.finished)}")
    return lines + [f"  lost: iteration {iteration}: {reason}" for iteration, reason in report.failed.items()]
