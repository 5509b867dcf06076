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
"""The spilled iterations of a rank, and the report of its push or the error that prevented it."""


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

    Every object is read back and compared. Run the command again to resume; a copy is a run only when it is complete. A
    run that is being recorded is copied as far as it is committed; copying it again adds the rest.

    With filters, the matching records become a separate run: its iterations are complete when those records are there,
    and give the number of records that were left out. Such a copy cannot be resumed.

    Args:
        no_verify: Compare the sizes of values instead of reading them back.
        target_storage_options: The same for URL; those of RUN by default.
    """
    from ranktape.storage.maintenance.copy import copy_records, copy_run
    from ranktape.storage.maintenance.runs import suggest_nearest
    from ranktape.storage.records.run import Run

    selected = {field: tuple(texts) for field, texts in (filters or {}).items()}
    with suggest_nearest(run, storage_options=storage_options):
        source = open_backend(run, storage_options=storage_options)
        target_options = storage_options if target_storage_options is None else target_storage_options
        target = open_backend(url, storage_options=target_options)
        if not selected and not where:
            return copy_run(source, target, verify=not no_verify, on_progress=on_progress)
        selection = Selection(run=run, filters=selected, where=where, storage_options=storage_options)
        opened = selection.source()
        if not isinstance(opened, Run):
            raise UsageError(f"{run} is a folder of files, not a run: use 'ranktape import'")
        options = [f"--{field.replace('_', '-')} {text}" for field, texts in selected.items() for text in texts]
        options += [f"--where {where!r}"] if where else []
        return copy_records(
            source,
            target,
            run=opened,
            records=selection.chosen(opened),
            filters=" ".join(options),
            on_progress=on_progress,
        )


@command_of(cp, progress="copying")
def cp_command(report: CopyReport | SelectionReport, given: Mapping[str, Any]) -> CommandAnswer:
    """The number and size of the copied objects or records."""
    from ranktape.storage.maintenance.copy import CopyReport

    if isinstance(report, CopyReport):
        text = f"{report.num_copied} objects ({nbytes_text(report.nbytes_copied)}) copied"
        if report.num_present:
            text += f"; {report.num_present} ({nbytes_text(report.nbytes_present)}) were already there"
        if report.left_out:
            text += f"; {len(report.left_out)} that are not committed were left out"
    else:
        text = f"{count_text(report.num_records, 'record')} ({nbytes_text(report.nbytes)}) of "
        text += f"{count_text(len(report.iterations), 'iteration')} copied; {report.num_left_out} others left out"
    urls = {"run": shown(given["run"]), "url": shown(given["url"])}
    return CommandAnswer(text=f"{urls['url']}: {text}", document={**urls, **dataclasses.asdict(report)})


def push(
    directory: Path, *, to: str | None = None, keep: bool = False, storage_options: Mapping[str, Any] | None = None
) -> list[Pushed]:
    """Copy the iterations in DIR, the --spill-dir of a capture, to their run.

    Everything that a commit names is read back and compared before the commit is made; what was copied is deleted from
    DIR. Run the command again to resume. Exits with 3 if something remains in DIR.

    Args:
        to (URL): The run, if it is not the one that DIR names.
        keep: Do not delete anything from DIR.
    """
    from ranktape.storage.maintenance.copy import find_spills, push_spill

    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory: give the --spill-dir of a capture")
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
    num_remaining = 0
    for spill, report, error in results:
        label = f"rank {spill.rank} of {spill.url}, {spill.attempt}"
        fields = {"url": spill.url, "attempt": spill.attempt, "rank": spill.rank, "error": error}
        spills.append({**fields, "pushed": None if report is None else dataclasses.asdict(report)})
        if report is None:
            num_remaining += 1
            lines.append(f"{label}: not pushed: {error}")
            continue
        num_remaining += bool(report.problems or report.unfinished)
        pushed = spans(report.iterations)
        size = f"{report.num_objects} objects, {nbytes_text(report.nbytes)}"
        lines.append(f"{label}: iterations {pushed} pushed ({size})")
        others = {
            "complete on all ranks": report.finished,
            "never committed": report.uncommitted,
            "still being recorded": report.unfinished,
        }
        lines += [f"  {state}: iterations {spans(iterations)}" for state, iterations in others.items() if iterations]
        lines += [f"  remains: iteration {iteration}: {reason}" for iteration, reason in report.problems.items()]
    problem = f"iterations of {num_remaining} of {len(results)} ranks remain in {directory}"
    return CommandAnswer(
        text="\n".join(lines or [f"there is nothing to push in {directory}"]),
        document={"directory": str(directory), "spills": spills},
        problem=problem if num_remaining else None,
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
    """Write RUN for other programs.

    pt: the tensors as files, under the names of the legacy tools; `ranktape import` makes the same run of them.
    tensorboard: metrics and histograms of each site of the model (or of each group of --by) over the iterations, all
    ranks together, and plots as images; histograms are counted from all values; 'wandb sync' uploads them to W&B.
    parquet: the catalogue, one row for each record, which DuckDB, pandas and polars open. Filters are those of the
    analyze commands. Existing files with the same contents are not written again.

    Args:
        target (DIR): The folder.
        to: The format.
        metric (NAME): The metrics: absmax, std, p99.9, overflow.ratio; repeatable. With tensorboard, absmax, rms, std
            and the shares beyond limits by default; with parquet none, because the values have to be read.
        kind (NAME): The kinds of 'ranktape analyze plot' that are added as images, or none; repeatable. overflow and
            layer_binades by default.
        no_histograms: Write only metrics and images.
        form: With pt: one tagged file for each tensor (the default), or embedding_output.pt, layer_N_output.pt and
            their statistics.
        per_sample: With pt: one file for each sample, if a tensor has samples.
        overwrite: Replace files with other contents.
    """
    from ranktape.analyze.views.export import check_destination, export_view

    if not target:
        raise UsageError("an empty name is not allowed: give a folder")
    keywords: dict[str, Any] = {"metric": tuple(metric), "kind": tuple(kind), "no_histograms": no_histograms}
    keywords |= {"overwrite": overwrite, "view": view, "by": tuple(by)}
    check_destination(to, form=form, per_sample=per_sample, **keywords)
    if to != "pt":
        return export_view(records, target, to=to, engine=engine, **keywords)
    from ranktape.analyze.legacy.export import ExportForm, export_records

    return export_records(
        records,
        Path(target),
        form=ExportForm(form or "tensors"),
        per_sample=per_sample,
        overwrite=overwrite,
        on_record=Work(on_progress, len(records)).step,
    )


@command_of(export, progress=lambda given: "exporting" if given["to"] == "pt" else "", has_json=False)
def export_command(report: ExportReport | Exported, given: Mapping[str, Any]) -> CommandAnswer:
    """The number of written files."""
    from ranktape.analyze.views.export import Exported

    if isinstance(report, Exported):
        return CommandAnswer(text=report.message())
    unchanged = f"; {report.num_kept} were already there" if report.num_kept else ""
    size = nbytes_text(report.nbytes)
    return CommandAnswer(text=f"{report.num_written} files written to {given['target']}, {size} of values{unchanged}")


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

    DIR contains files with the names of the legacy tools, or outputs of layers; nothing in them is executed. Run the
    command again to resume.

    Args:
        skip_unreadable: Leave out files that cannot be read or whose names are not known, and list them.
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


@command_of(import_files, progress="importing", has_json=False)
def import_command(report: ImportReport, given: Mapping[str, Any]) -> CommandAnswer:
    """The number of stored tensors; the files that were left out are printed on stderr."""
    for name, reason in list(report.left_out.items())[:MAX_NAMED_FILES]:
        say(f"left out: {name}: {reason}", err=True)
    if len(report.left_out) > MAX_NAMED_FILES:
        say(f"left out: {len(report.left_out)} files in all", err=True)
    stored = f"{report.num_records} tensors stored in {given['run']}, {nbytes_text(report.nbytes)}"
    text = stored if report.num_records else "everything was already stored"
    return CommandAnswer(text=f"{text}; {report.verdict.message()}")
