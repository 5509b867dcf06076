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


def runs(url: str, *, depth: int | None = None, storage_options: Mapping[str, Any] | None = None) -> list[RunSummary]:
    """List the runs at and below URL.

    A run is met or unmet (it is closed, and its guaranteed minimum is there or not), open (it is being recorded,
    or its processes were lost), empty or unreadable. The size is that of the values of its complete iterations.

    Args:
        depth (N): Levels of names that are looked through. [default: 4]
    """
    from ranktape.storage.maintenance.runs import MAX_DEPTH, find_runs, suggest_nearest

    with suggest_nearest(url, storage_options=storage_options):
        return find_runs(url, storage_options=storage_options, max_depth=MAX_DEPTH if depth is None else depth)


@command_of(runs)
def runs_command(found: Sequence[RunSummary], given: Mapping[str, Any]) -> CommandAnswer:
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
        for run in found
    )
    unreadable = tuple(f"{run.path or '.'}: {run.message}" for run in found if run.state == "unreadable")
    notes = unreadable if found else ("no run lies here",)
    return CommandAnswer(
        text=Table(title=shown(given["url"]), columns=COLUMNS, rows=rows, notes=notes),
        document={"url": shown(given["url"]), "runs": [dataclasses.asdict(run) for run in found]},
    )


def check(
    run: str,
    *,
    deep: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> CheckReport:
    """Verify that RUN is whole.

    Errors are committed data that is lost or wrong; they exit with 3. Notes are everything else: leftovers of lost
    writers, unfinished iterations, foreign objects. Nothing is changed: 'ranktape repair' does that.

    Args:
        deep: Read every byte and compare it with its checksums.
    """
    from ranktape.storage.maintenance.check import check_run

    with open_backend_of(run, storage_options) as backend:
        return check_run(backend, deep=deep, on_progress=on_progress)


@command_of(check, working="checking")
def check_command(report: CheckReport, _given: Mapping[str, Any]) -> CommandAnswer:
    """One line for each finding, errors first, and a summary of what was checked."""
    partial = f", {count_text(report.num_partial, 'partial iteration')}" if report.num_partial else ""
    looked = (
        f"{count_text(report.num_iterations - report.num_partial, 'complete iteration')}{partial}, "
        f"{count_text(report.num_records, 'record')}, "
        f"{count_text(report.num_objects, 'object')}, {nbytes_text(report.nbytes)}"
    )
    how = "every byte was read" if report.deep else "sizes and documents were compared, --deep reads every byte"
    errors = count_text(len(report.errors), "error")
    summary = f"{errors}, {count_text(len(report.notes), 'note')}; {looked} ({how})"
    return CommandAnswer(
        text="\n".join([*(one.text() for one in (*report.errors, *report.notes)), summary]),
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
    lost markers. Exits with 3 if errors remain. If a spill directory is left, run 'ranktape push' first: it needs what
    is removed here.

    Args:
        dry_run: Change nothing, and say what would be done.
        min_age (SECONDS): What was written since may belong to a writer at work, and is left alone.
    """
    from ranktape.storage.maintenance.repair import repair_run

    with open_backend_of(run, storage_options) as backend:
        return repair_run(backend, dry_run=dry_run, min_age_seconds=min_age, on_done=on_done, on_progress=on_progress)


def _mend(finding: CheckFinding) -> str:
    return f"{finding.mend}: {finding.text()}"


@command_of(repair, working="checking", each=_mend)
def repair_command(report: RepairReport, given: Mapping[str, Any]) -> CommandAnswer:
    """What was repaired, what was left because it is too young, and what cannot be repaired."""
    word = "to be mended" if report.dry_run else "mended"
    lines = [f"would {_mend(finding)}" for finding in report.done] if report.dry_run else []
    lines += [f"left alone, as it is younger than {given['min_age']:g} s: {_mend(one)}" for one in report.young]
    lines += [f"cannot be mended: {finding.text()}" for finding in report.left]
    lines.append(f"{len(report.done)} {word}, {len(report.young)} left alone, {len(report.left)} cannot be mended")
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
        dry_run: Change nothing, and say what would be removed.
    """
    from ranktape.storage.maintenance.prune import prune_run

    with open_backend_of(run, storage_options) as backend:
        return prune_run(backend, keep_last=keep_last, iteration=iteration, dry_run=dry_run, on_progress=on_progress)


def _prune_question(plan: PruneReport) -> str | None:
    what = f"{count_text(len(plan.removed), 'iteration')} ({_named(plan.removed)})"
    return f"Remove {what} from {plan.url}?" if plan.removed else None


@command_of(prune, working="removing", question=_prune_question)
def prune_command(report: PruneReport, _given: Mapping[str, Any]) -> CommandAnswer:
    """The iterations that were removed, or would be, and those that are kept."""
    word = "to be removed" if report.dry_run and report.removed else "removed"
    removed = f" ({_named(report.removed)})" if report.removed else ""
    kept = f" ({_named(report.kept)})" if report.kept else ""
    count = count_text(len(report.removed), "iteration")
    return CommandAnswer(
        text=f"{report.url}: {count} {word}{removed}, {len(report.kept)} kept{kept}",
        document=dataclasses.asdict(report),
    )


def _named(iterations: tuple[int, ...]) -> str:
    from ranktape.storage.records.tables import spans

    return spans(iterations)


def rm(run: str, *, dry_run: bool = False, storage_options: Mapping[str, Any] | None = None) -> str:
    """Delete RUN, and nothing else that is in its place.

    A damaged run is deleted, too; one that is being recorded is refused. Run the command again to resume.

    Args:
        dry_run: Change nothing, and say what would be deleted.
    """
    from ranktape.storage.maintenance.prune import delete_run, expect_run

    with open_backend_of(run, storage_options) as backend:
        expect_run(backend)
        what = _described(backend)
        if not dry_run:
            delete_run(backend)
    return f"{'to be deleted' if dry_run else 'deleted'}: {what}"


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
class Examined:
    """The result of one check of the machine."""

    name: str
    """Name of the checked item."""
    found: str
    """Description of what was found."""
    is_lacking: bool = False
    """Whether something is missing that a capture or an analysis needs."""
    way_out: str = ""
    """How to get what is missing, and what needs it; empty if nothing is missing."""


def doctor(url: str | None = None, *, storage_options: Mapping[str, Any] | None = None) -> list[Examined]:
    """Show what this machine has of what ranktape needs, and how to get what is missing.

    Checks versions of Python and packages, backends of torch.distributed, GPUs, the C++ compiler of torch.compile, the
    compiled kernels and the memory. At URL, where one is given, a small object is written, read and removed. Exits with
    3 when something is lacking that a capture or an analysis needs.
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
    of_gpus, build = "for trainings on GPUs: a build of torch", "for trainings on CPUs: a build of torch with gloo"
    examined = [
        Examined("ranktape", __version__),
        Examined("Python", f"{platform.python_version()} ({sys.executable})"),
        Examined("platform", f"{platform.platform()}, {os.cpu_count()} cores"),
        *_packages(),
        _needed("gloo", has_gloo and "available", way_out=build, is_needed=not gpus),
        _needed("nccl", has_nccl and "available", way_out=f"{of_gpus} with NCCL", is_needed=bool(gpus)),
        _needed("GPUs", gpus, way_out=f"{of_gpus} for CUDA, and its driver", is_needed=False),
        _needed(
            "C++ compiler",
            shutil.which(compiler),
            absent=f"no {compiler} on the PATH",
            way_out="for torch.compile: apt-get install g++, or set CXX",
            is_needed=False,
        ),
        _needed(
            "kernels",
            cache and f"cached in {cache}",
            absent="compiled anew by each process",
            way_out="set NUMBA_CACHE_DIR to a folder that can be written",
        ),
        Examined("memory", f"{nbytes_text(available_nbytes())} available"),
    ]
    return examined if url is None else [*examined, _place(url, storage_options)]


def _needed(name: str, there: Any, *, way_out: str, absent: str = "not available", is_needed: bool = True) -> Examined:
    """The result for an item: `there` if it is available, otherwise `absent` with the way to get it."""
    return Examined(name, there) if there else Examined(name, absent, is_needed, way_out)


def _packages() -> Iterator[Examined]:
    """The packages that the metadata of ranktape requires, with the installed versions."""
    from packaging.requirements import Requirement

    known: set[str] = set()
    needed = [Requirement(text) for text in importlib.metadata.requires("ranktape") or ()]
    for extra, one in itertools.product(EXTRAS, needed):
        if one.name in known or not (one.marker is None or one.marker.evaluate({"extra": extra})):
            continue
        known.add(one.name)
        try:
            version = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            way_out = f"pip install 'ranktape[{extra}]'" if extra else "pip install ranktape"
            yield Examined(one.name, "not installed", not extra, way_out)
            continue
        is_good, absent = (
            one.specifier.contains(version, prereleases=True),
            f"{version}, but {one.specifier} is required",
        )
        way_out = f"pip install --upgrade '{one.name}{one.specifier}'"
        yield _needed(one.name, is_good and version, absent=absent, way_out=way_out, is_needed=not extra)


def _place(url: str, storage_options: Mapping[str, Any] | None) -> Examined:
    """The result for a URL: whether an object can be written, read and removed there."""
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.starting import open_place, try_writing

    try:
        try_writing(open_place(url, CaptureOptions(storage_options=storage_options)))
    except RanktapeError as error:
        way_out = "correct what the message names, and try again"
        return Examined(shown(url), f"cannot be used: {error}", is_lacking=True, way_out=way_out)
    return Examined(shown(url), "an object can be written, read and removed")


@command_of(doctor)
def doctor_command(found: Sequence[Examined], given: Mapping[str, Any]) -> CommandAnswer:  # noqa: ARG001 - its signature
    """One line for each item, with the way to get it if it is missing, and the verdict at the end."""
    lacking = [one.name for one in found if one.is_lacking]
    width = max(len(one.name) for one in found if "://" not in one.name)
    lines = [
        f"{'lacking' if one.is_lacking else 'optional' if one.way_out else 'good':<8}  {one.name:<{width}}  {one.found}"
        + (f" ({one.way_out})" if one.way_out else "")
        for one in found
    ]
    verdict = "nothing is lacking" if not lacking else f"{count_text(len(lacking), 'thing')} lacking"
    document = {"findings": [dataclasses.asdict(one) for one in found], "lacking": lacking}
    problem = f"{', '.join(map(printable, lacking))}: see above how to get it" if lacking else None
    return CommandAnswer(text="\n".join([*map(printable, lines), verdict]), document=document, problem=problem)
