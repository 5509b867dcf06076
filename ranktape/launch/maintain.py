"""The commands that maintain runs, each with its function, and `doctor`, which checks the machine."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ranktape._version import __version__
from ranktape.analyze.table import Column, Kind, Table
from ranktape.errors import RanktapeError
from ranktape.launch.place import CommandAnswer, command_of, count_text, open_backend_of, shown
from ranktape.storage.maintenance import OnProgress
from ranktape.storage.places.backend import available_nbytes, nbytes_text
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.storage.maintenance.finding import CheckFinding, CheckReport
    from ranktape.storage.maintenance.prune import PruneReport
    from ranktape.storage.maintenance.repair import RepairReport
    from ranktape.storage.maintenance.runs import RunSummary
    from ranktape.storage.places.backend import Backend

COLUMNS = (
    Column(name="run", kind=Kind.TEXT),
    Column(name="state", kind=Kind.TEXT),
    Column(name="iterations", kind=Kind.INTEGER),
    Column(name="ranks", kind=Kind.INTEGER),
    Column(name="attempts", kind=Kind.INTEGER),
    Column(name="records", kind=Kind.INTEGER),
    Column(name="size", kind=Kind.NBYTES, unit="bytes"),
    Column(name="created", kind=Kind.TEXT),
)
"""The columns of the table of runs, which has one row for each run."""


def runs(
    url: str = ".", *, depth: int | None = None, storage_options: Mapping[str, Any] | None = None
) -> list[RunSummary]:
    """List the runs at and below URL, or the current directory.

    A run is met or unmet (it is closed, and its guaranteed minimum is there or not), open (it is being recorded,
    or its processes were lost), empty or unreadable. The size is that of the values of its complete iterations.

    Args:
        depth (N): Number of levels of directories that are searched. [default: 4]
    """
    from ranktape.storage.maintenance.runs import MAX_DEPTH, find_runs, suggest_nearest

    with suggest_nearest(url, storage_options=storage_options):
        return find_runs(url, storage_options=storage_options, max_depth=MAX_DEPTH if depth is None else depth)


@command_of(runs)
def runs_command(summaries: Sequence[RunSummary], given: Mapping[str, Any]) -> CommandAnswer:
    """A table of the runs, with notes on those that cannot be read."""
    rows = tuple(
        (
            run.path or ".",
            run.state.value,
            len(run.iterations),
            run.world_size,
            run.num_attempts,
            run.num_records,
            run.nbytes,
            # UTC, in seconds; empty if it is not known.
            "" if run.created is None else datetime.fromtimestamp(run.created, UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
        )
        for run in summaries
    )
    unreadable = tuple(f"{run.path or '.'}: {run.message}" for run in summaries if run.state == "unreadable")
    notes = unreadable if summaries else ("there is no run here",)
    return CommandAnswer(
        text=Table(title=shown(given["url"]), columns=COLUMNS, rows=rows, notes=notes),
        document={"url": shown(given["url"]), "runs": [dataclasses.asdict(run) for run in summaries]},
    )


def check(
    run: str,
    *,
    deep: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> CheckReport:
    """Verify that RUN is complete and undamaged.

    Errors are committed data that is lost or wrong; they exit with 3. Notes are everything else: leftovers of lost
    writers, unfinished iterations, foreign objects. Nothing is changed; 'ranktape repair' repairs what can be repaired.

    Args:
        deep: Read every byte and compare it with its checksums.
    """
    from ranktape.storage.maintenance.check import check_run

    with open_backend_of(run, storage_options) as backend:
        return check_run(backend, deep=deep, on_progress=on_progress)


@command_of(check, progress="checking")
def check_command(report: CheckReport, _given: Mapping[str, Any]) -> CommandAnswer:
    """One line for each finding, errors first, and a summary of what was checked."""
    partial = f", {count_text(report.num_partial, 'partial iteration')}" if report.num_partial else ""
    checked = (
        f"{count_text(report.num_iterations - report.num_partial, 'complete iteration')}{partial}, "
        f"{count_text(report.num_records, 'record')}, "
        f"{count_text(report.num_objects, 'object')}, {nbytes_text(report.nbytes)}"
    )
    depth = "every byte was read" if report.deep else "sizes and documents were compared, --deep reads every byte"
    errors = count_text(len(report.errors), "error")
    summary = f"{errors}, {count_text(len(report.notes), 'note')}; {checked} ({depth})"
    return CommandAnswer(
        text="\n".join([*(finding.text() for finding in (*report.errors, *report.notes)), summary]),
        document=report.to_json(),
        problem=f"{errors} in {report.url}" if report.errors else None,
    )


def repair(
    run: str,
    *,
    dry_run: bool = False,
    min_age: float = 3600.0,
    storage_options: Mapping[str, Any] | None = None,
    on_done: Callable[[CheckFinding], object] | None = None,
    on_progress: OnProgress | None = None,
) -> RepairReport:
    """Finish or remove what lost processes left in RUN.

    Removes leftovers of crashed writers, writes the commits of iterations that all ranks have committed, and restores
    lost markers. Exits with 3 if errors remain. If there is a spill directory, run 'ranktape push' first: it needs what
    is removed here.

    Args:
        dry_run: Change nothing, and print what would be done.
        min_age (SECONDS): Leave objects that were written more recently, as their writer may still be running.
    """
    from ranktape.storage.maintenance.repair import repair_run

    with open_backend_of(run, storage_options) as backend:
        return repair_run(backend, dry_run=dry_run, min_age_seconds=min_age, on_done=on_done, on_progress=on_progress)


def _repair_text(finding: CheckFinding) -> str:
    return f"{finding.mend}: {finding.text()}"


@command_of(repair, progress="checking", each=_repair_text)
def repair_command(report: RepairReport, given: Mapping[str, Any]) -> CommandAnswer:
    """What was repaired, what was left because it is too recent, and what cannot be repaired."""
    done = "to be repaired" if report.dry_run else "repaired"
    lines = [f"would {_repair_text(finding)}" for finding in report.done] if report.dry_run else []
    lines += [f"left, as it is newer than {given['min_age']:g} s: {_repair_text(finding)}" for finding in report.young]
    lines += [f"cannot be repaired: {finding.text()}" for finding in report.left]
    lines.append(f"{len(report.done)} {done}, {len(report.young)} left, {len(report.left)} cannot be repaired")
    return CommandAnswer(
        text="\n".join(lines),
        document=report.to_json(),
        problem=f"{count_text(len(report.left), 'error')} left in {report.url}" if report.left else None,
    )


def prune(
    run: str,
    *,
    keep_last: int | None = None,
    iteration: str | None = None,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> PruneReport:
    """Delete complete iterations from RUN.

    The commit of an iteration is deleted before its values, so that no reader sees a part of it. Run the command again
    to resume, or 'ranktape repair'. Deleted iterations still count for the guaranteed minimum. A run that is being
    recorded is refused.

    Args:
        keep_last (N): Remove all but the last N iterations.
        iteration (SPEC): Remove these: a number, a range (0-3, 10:20:2) or several (0,2,5).
        dry_run: Change nothing, and print what would be removed.
    """
    from ranktape.storage.maintenance.prune import prune_run

    with open_backend_of(run, storage_options) as backend:
        return prune_run(backend, keep_last=keep_last, iteration=iteration, dry_run=dry_run, on_progress=on_progress)


def _prune_question(plan: PruneReport) -> str | None:
    count = count_text(len(plan.removed), "iteration")
    return f"Remove {count}{_listed(plan.removed)} from {plan.url}?" if plan.removed else None


@command_of(prune, progress="removing", question=_prune_question)
def prune_command(report: PruneReport, _given: Mapping[str, Any]) -> CommandAnswer:
    """The iterations that were removed, or would be, and those that are kept."""
    removed = "to be removed" if report.dry_run and report.removed else "removed"
    return CommandAnswer(
        text=f"{report.url}: {count_text(len(report.removed), 'iteration')} {removed}{_listed(report.removed)}, "
        f"{len(report.kept)} kept{_listed(report.kept)}",
        document=dataclasses.asdict(report),
    )


def _listed(iterations: tuple[int, ...]) -> str:
    from ranktape.storage.records.tables import spans

    return f" ({spans(iterations)})" if iterations else ""


def rm(run: str, *, dry_run: bool = False, storage_options: Mapping[str, Any] | None = None) -> str:
    """Delete RUN, and nothing else at its URL.

    A damaged run is deleted, too; one that is being recorded is refused. Run the command again to resume.

    Args:
        dry_run: Change nothing, and print what would be deleted.
    """
    from ranktape.storage.maintenance.prune import delete_run, expect_run

    with open_backend_of(run, storage_options) as backend:
        expect_run(backend)
        description = _described(backend)
        if not dry_run:
            delete_run(backend)
    return f"{'to be deleted' if dry_run else 'deleted'}: {description}"


@command_of(rm, question=lambda answer: f"Delete {answer.partition(': ')[2]}?", has_json=False)
def rm_command(answer: str, _given: Mapping[str, Any]) -> CommandAnswer:
    """What was deleted."""
    return CommandAnswer(text=answer)


def _described(backend: Backend) -> str:
    """The URL of a run, with the number of its iterations and records and its size if it can be read."""
    from ranktape.storage.maintenance.runs import summarize

    try:
        run = summarize(backend)
    except RanktapeError as error:
        return f"{backend.url}, which cannot be read ({error})"
    complete = count_text(len(run.iterations), "complete iteration")
    return f"{backend.url} ({complete}, {count_text(run.num_records, 'record')}, {nbytes_text(run.nbytes)})"


EXTRAS = ("", "dask", "notebook", "tensorboard", "parquet")
"""The extras for users; the others are for developers."""


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """The result of one check of the machine."""

    name: str
    """Name of the checked item."""
    found: str
    """Description of what was found."""
    is_lacking: bool = False
    """Whether something is missing that a capture or an analysis needs."""
    way_out: str = ""
    """How to get what is missing, and what needs it; empty if nothing is missing."""


def doctor(url: str | None = None, *, storage_options: Mapping[str, Any] | None = None) -> list[MachineFinding]:
    """Show which requirements of ranktape this machine meets, and how to install what is missing.

    Checks versions of Python and packages, backends of torch.distributed, GPUs, the C++ compiler of torch.compile, the
    compiled kernels and the memory. If URL is given, a small object is written, read and removed there. Exits with 3 if
    something is missing that a capture or an analysis needs.
    """
    import torch
    import torch.distributed as dist

    from ranktape.analyze.numerics import digest_kernels
    from ranktape.analyze.numerics.histograms.moments import warm_up

    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = ", ".join(f"{device.name} ({nbytes_text(device.total_memory)})" for device in devices)
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
    warm_up()  # loads the compiled kernels of a writer, or compiles and caches them
    cache = digest_kernels.fill_statistics.stats.cache_path  # type: ignore[attr-defined]  # numba has no types
    has_gloo, has_nccl = (dist.is_available() and has() for has in (dist.is_gloo_available, dist.is_nccl_available))
    for_gpus = "for GPUs: a build of torch"
    findings = [
        MachineFinding("ranktape", __version__),
        MachineFinding("Python", f"{platform.python_version()} ({sys.executable})"),
        MachineFinding("platform", f"{platform.platform()}, {os.cpu_count()} cores"),
        *_packages(),
        _finding("gloo", has_gloo and "available", "for CPUs: a build of torch with gloo", is_needed=not gpus),
        _finding("nccl", has_nccl and "available", f"{for_gpus} with NCCL", is_needed=bool(gpus)),
        _finding("GPUs", gpus, f"{for_gpus} for CUDA, and its driver"),
        _finding("C++ compiler", shutil.which(compiler), f"for torch.compile: install {compiler}, or set CXX"),
        _finding("kernels", cache and f"cached in {cache}", "set NUMBA_CACHE_DIR to a writable folder", is_needed=True),
        MachineFinding("memory", f"{nbytes_text(available_nbytes())} available"),
    ]
    return findings if url is None else [*findings, _test_url(url, storage_options)]


def _finding(
    name: str, present: Any, way_out: str, *, is_needed: bool = False, absent: str = "not available"
) -> MachineFinding:
    """The result for an item: `present` if it is available, otherwise `absent` with the way to get it."""
    return MachineFinding(name, present) if present else MachineFinding(name, absent, is_needed, way_out)


def _packages() -> Iterator[MachineFinding]:
    """The packages that the metadata of ranktape requires, with the installed versions."""
    from packaging.requirements import Requirement

    seen: set[str] = set()
    requirements = [Requirement(text) for text in importlib.metadata.requires("ranktape") or ()]
    for extra, package in itertools.product(EXTRAS, requirements):
        name, allowed = package.name, package.specifier
        if name in seen or not (package.marker is None or package.marker.evaluate({"extra": extra})):
            continue
        seen.add(name)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            install = f"pip install 'ranktape[{extra}]'" if extra else "pip install ranktape"
            yield MachineFinding(name, "not installed", not extra, install)
        else:
            present = version if allowed.contains(version, prereleases=True) else None
            upgrade, absent = f"pip install --upgrade '{name}{allowed}'", f"{version}, but {allowed} is required"
            yield _finding(name, present, upgrade, is_needed=not extra, absent=absent)


def _test_url(url: str, storage_options: Mapping[str, Any] | None) -> MachineFinding:
    """The result for a URL: whether an object can be written, read and removed there."""
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.starting import open_shared_store, try_writing

    try:
        try_writing(open_shared_store(url, CaptureOptions(storage_options=storage_options)))
    except RanktapeError as error:
        way_out = "correct what the message names, and try again"
        return MachineFinding(shown(url), f"cannot be used: {error}", is_lacking=True, way_out=way_out)
    return MachineFinding(shown(url), "an object can be written, read and removed")


@command_of(doctor)
def doctor_command(findings: Sequence[MachineFinding], given: Mapping[str, Any]) -> CommandAnswer:  # noqa: ARG001 - its signature
    """One line for each item, with the way to get it if it is missing, and a summary at the end."""
    missing = [finding.name for finding in findings if finding.is_lacking]
    width = max(len(finding.name) for finding in findings if "://" not in finding.name)
    lines = []
    for finding in findings:
        state = "missing" if finding.is_lacking else "optional" if finding.way_out else "good"
        way_out = f" ({finding.way_out})" if finding.way_out else ""
        lines.append(printable(f"{state:<8}  {finding.name:<{width}}  {finding.found}{way_out}"))
    return CommandAnswer(
        text="\n".join([*lines, f"{count_text(len(missing), 'item')} missing" if missing else "nothing is missing"]),
        document={"findings": list(map(dataclasses.asdict, findings)), "lacking": missing},
        problem=f"{', '.join(map(printable, missing))}: see above how to get it" if missing else None,
    )
