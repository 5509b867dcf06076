"""The commands that copy tensors between places, each with its function: `cp`, `push`, `export` and `import`.

What the store did not accept is in the `--spill-dir` of the host, under the same keys as in the store. `push` copies it
to the store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ranktape.analyze.console import say
from ranktape.analyze.options import MAX_NAMED_FILES, Selection
from ranktape.errors import RanktapeError, UsageError
from ranktape.launch.place import CommandAnswer, command_of, count_text, shown
from ranktape.storage.maintenance import OnProgress, Work
from ranktape.storage.places.backend import nbytes_text
from ranktape.storage.places.urls import open_backend

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine
    from ranktape.analyze.engine.values import View
    from ranktape.analyze.legacy.export import ExportReport
    from ranktape.analyze.legacy.into_run import ImportReport
    from ranktape.analyze.views.export import Exported
    from ranktape.storage import Records
    from ranktape.storage.maintenance.copy import CopyReport, PushReport, SelectionReport, Spill

Pushed = tuple["Spill", "PushReport | None", "str | None"]
"""What a rank has spilled, and the report of its push, or why it could not be pushed."""


def cp(
    run: str,
    url: str,
    *,
    filters: Mapping[str, Sequence[str]] | None = None,
    where: str | None = None,
    no_verify: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    target_storage_options: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> CopyReport | SelectionReport:
    """Copy RUN to URL: a directory or an object store.

    Every object is read back and compared. Run the command again to resume; a copy is a run only when it is whole. A
    run that is being recorded is copied as far as it is committed; copying it again adds the rest.

    With filters, the matching records become a run of their own: its iterations are complete when those records are
    there, and say how many others were left out. Such a copy cannot be resumed.

    Args:
        no_verify: Trust the sizes of values instead of reading them back.
        target_storage_options: The same for URL; those of RUN by default.
    """
    from ranktape.storage.maintenance.copy import copy_records, copy_run
    from ranktape.storage.maintenance.runs import suggest_nearest
    from ranktape.storage.records.run import Run

    chosen = {field: tuple(texts) for field, texts in (filters or {}).items()}
    with suggest_nearest(run, storage_options=storage_options):
        source = open_backend(run, storage_options=storage_options)
        others = storage_options if target_storage_options is None else target_storage_options
        target = open_backend(url, storage_options=others)
        if not chosen and not where:
            return copy_run(source, target, verify=not no_verify, on_progress=on_progress)
        selection = Selection(run=run, filters=chosen, where=where, storage_options=storage_options)
        opened = selection.source()
        if not isinstance(opened, Run):
            raise UsageError(f"{run} is a folder of files and no run: use 'ranktape import'")
        said = [f"--{field.replace('_', '-')} {text}" for field, texts in chosen.items() for text in texts]
        said += [f"--where {where!r}"] if where else []
        records = selection.chosen(opened)
        return copy_records(
            source, target, run=opened, records=records, filters=" ".join(said), on_progress=on_progress
        )


@command_of(cp, working="copying")
def cp_command(report: CopyReport | SelectionReport, given: Mapping[str, Any]) -> CommandAnswer:
    """The number and size of the copied objects or records."""
    from ranktape.storage.maintenance.copy import CopyReport

    if isinstance(report, CopyReport):
        text = f"{report.num_copied} objects ({nbytes_text(report.nbytes_copied)}) copied"
        if report.num_present:
            text += f"; {report.num_present} ({nbytes_text(report.nbytes_present)}) were there"
        if report.left_out:
            text += f"; {len(report.left_out)} that are no part of what is committed were left out"
    else:
        text = f"{count_text(report.num_records, 'record')} ({nbytes_text(report.nbytes)}) of "
        text += f"{count_text(len(report.iterations), 'iteration')} copied; {report.num_left_out} others left out"
    places = {"run": shown(given["run"]), "url": shown(given["url"])}
    return CommandAnswer(text=f"{places['url']}: {text}", document={**places, **dataclasses.asdict(report)})


def push(
    directory: Path, *, to: str | None = None, keep: bool = False, storage_options: Mapping[str, Any] | None = None
) -> list[Pushed]:
    """Copy the iterations that wait in DIR, the --spill-dir of a capture, to their run.

    Everything that a commit names is read back and compared before the commit is made; what was copied is deleted from
    DIR. Run the command again to resume. Exits with 3 if something had to stay.

    Args:
        to (URL): The run, where it is not the one that DIR names.
        keep: Leave everything in DIR, too.
    """
    from ranktape.storage.maintenance.copy import find_spills, push_spill

    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory: give the --spill-dir of a capture")
    results: list[Pushed] = []
    for spill in find_spills(directory):
        try:
            report = push_spill(spill, open_backend(to or spill.url, storage_options=storage_options), keep=keep)
            results.append((spill, report, None))
        except RanktapeError as error:
            results.append((spill, None, str(error)))
    return results


@command_of(push)
def push_command(results: Sequence[Pushed], given: Mapping[str, Any]) -> CommandAnswer:
    """The pushed iterations of each rank, and those that remain."""
    from ranktape.storage.records.tables import spans

    directory = given["directory"]
    lines: list[str] = []
    spills = []
    num_staying = 0
    for spill, report, error in results:
        head = f"rank {spill.rank} of {spill.url}, {spill.attempt}"
        about = {"url": spill.url, "attempt": spill.attempt, "rank": spill.rank, "error": error}
        spills.append({**about, "pushed": None if report is None else dataclasses.asdict(report)})
        if report is None:
            num_staying += 1
            lines.append(f"{head}: not pushed: {error}")
            continue
        num_staying += bool(report.problems or report.unfinished)
        named = spans(report.iterations)
        lines.append(f"{head}: iterations {named} pushed ({report.num_objects} objects, {nbytes_text(report.nbytes)})")
        others = {
            "complete with all ranks": report.finished,
            "never committed": report.uncommitted,
            "still being recorded": report.unfinished,
        }
        lines += [f"  {what}: iterations {spans(iterations)}" for what, iterations in others.items() if iterations]
        lines += [f"  stays: iteration {iteration}: {reason}" for iteration, reason in report.problems.items()]
    return CommandAnswer(
        text="\n".join(lines or [f"nothing waits in {directory}"]),
        document={"directory": str(directory), "spills": spills},
        problem=f"something of {num_staying} of {len(results)} ranks stays in {directory}" if num_staying else None,
    )


def export(
    records: Records,
    target: str,
    *,
    to: Literal["pt", "tensorboard", "parquet"] = "pt",
    metric: Sequence[str] = (),
    kind: Sequence[str] = (),
    no_histograms: bool = False,
    form: Literal["tensors", "layers"] | None = None,
    per_sample: bool = False,
    overwrite: bool = False,
    view: View | None = None,
    by: Sequence[str] = (),
    engine: Engine | None = None,
    on_progress: OnProgress | None = None,
) -> ExportReport | Exported:
    """Give what RUN holds to other programs.

    As .pt files: the tensors, under the names of the legacy tools, and `ranktape import` makes the same run of them. To
    tensorboard: metrics and histograms of each place of the model (or of each group of --by) over the iterations, all
    ranks together, and plots as pictures; histograms are counted from all values; 'wandb sync' uploads them to W&B. As
    parquet: the catalogue, one row for each record, which DuckDB, pandas and polars open. Filters are those of the
    analyze commands. Files that are there and hold the same are left as they are.

    Args:
        target (DIR): The folder.
        to: Which program.
        metric (NAME): Which metrics: absmax, std, p99.9, overflow.ratio; repeatable. Of tensorboard absmax, rms, std
            and parts beyond limits by default; of parquet none, as values are read for them.
        kind (NAME): Plots that go along as pictures, as of 'ranktape analyze plot', or none; repeatable. overflow and
            layer_binades by default.
        no_histograms: Metrics and pictures alone.
        form: Of .pt files: one tagged file for each tensor (the default), or embedding_output.pt, layer_N_output.pt and
            their statistics.
        per_sample: Of .pt files: one for each sample, where a tensor has samples.
        overwrite: Replace files that hold something else.
    """
    from ranktape.analyze.views.export import export_view, refuse_strangers

    if not target:
        raise UsageError("an empty name is not allowed: give a folder")
    viewed: dict[str, Any] = {"metric": tuple(metric), "kind": tuple(kind), "no_histograms": no_histograms}
    viewed |= {"overwrite": overwrite, "view": view, "by": tuple(by)}
    refuse_strangers(to, form=form, per_sample=per_sample, **viewed)
    if to != "pt":
        return export_view(records, target, to=to, engine=engine, **viewed)
    from ranktape.analyze.legacy.export import ExportForm, export_records

    return export_records(
        records,
        Path(target),
        form=ExportForm(form or "tensors"),
        per_sample=per_sample,
        overwrite=overwrite,
        on_record=Work(on_progress, len(records)).step,
    )


@command_of(export, working=lambda given: "exporting" if given["to"] == "pt" else "", has_json=False)
def export_command(report: ExportReport | Exported, given: Mapping[str, Any]) -> CommandAnswer:
    """The number of written files."""
    from ranktape.analyze.views.export import Exported

    if isinstance(report, Exported):
        return CommandAnswer(text=report.message())
    kept = f"; {report.num_kept} were there already" if report.num_kept else ""
    values = nbytes_text(report.nbytes)
    return CommandAnswer(text=f"{report.num_written} files written to {given['target']}, {values} of values{kept}")


def import_files(
    folder: Path,
    run: str,
    *,
    skip_unreadable: bool = False,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    on_progress: OnProgress | None = None,
) -> ImportReport:
    """Store the .pt files of DIR as the run RUN.

    DIR holds files under the names of the legacy tools, or outputs of layers; nothing in them is executed. Run the
    command again to resume.

    Args:
        skip_unreadable: Name and leave out files that cannot be read or are not known.
        overwrite: Delete the run that is at RUN.
    """
    from ranktape.analyze.legacy.into_run import import_folder
    from ranktape.analyze.legacy.open import open_folder

    opened = open_folder(folder, skip_unreadable=skip_unreadable)
    return import_folder(
        opened,
        run,
        storage_options=None if storage_options is None else dict(storage_options),
        overwrite=overwrite,
        skip_unreadable=skip_unreadable,
        on_record=Work(on_progress, len(opened)).step,
    )


@command_of(import_files, working="importing", has_json=False)
def import_command(report: ImportReport, given: Mapping[str, Any]) -> CommandAnswer:
    """The number of stored tensors; the files that were left out are printed on stderr."""
    for name, reason in list(report.left_out.items())[:MAX_NAMED_FILES]:
        say(f"left out: {name}: {reason}", err=True)
    if len(report.left_out) > MAX_NAMED_FILES:
        say(f"left out: {len(report.left_out)} files in all", err=True)
    stored = f"{report.num_records} tensors stored in {given['run']}, {nbytes_text(report.nbytes)}"
    already = "everything was stored before" if not report.num_records else stored
    return CommandAnswer(text=f"{already}; {report.verdict.message()}")
