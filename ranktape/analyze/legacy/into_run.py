"""Imports a folder of `.pt` files as a run with iterations, ranks, commits, and a verdict that is met.

Importing an unchanged folder again continues an interrupted import. A folder that has changed since counts as another
launch, which the run refuses.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ranktape._version import __version__
from ranktape.analyze.legacy.files import NUM_THREADS, Folder, SourceFile
from ranktape.analyze.legacy.names import parse_tensor_file_name
from ranktape.errors import DataError, RanktapeError, RunExistsError, RunNotFoundError, StorageError, UsageError
from ranktape.storage.format.attempt import Attempt, Launch
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.documents import for_each
from ranktape.storage.format.layout import site_path
from ranktape.storage.format.progress import RunVerdict, open_iteration, write_verdict
from ranktape.storage.format.record_info import RecordInfo
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.urls import open_backend
from ranktape.storage.recording.start import begin_attempt, claim_run
from ranktape.storage.recording.writer import RankWriter
from ranktape.storage.records.run import Run

MAX_RANKS = 100_000
"""The largest number of ranks: more than any cluster has."""

MAX_EMPTY_RANKS = 1024
"""The number of ranks without files that is always accepted. Every rank up to the highest one commits every iteration,
so a single name with a high rank would create that many groups by mistake or malice."""

_EMPTY_RANKS_PER_RANK = 16
"""The additional number of ranks without files that is accepted for each rank with files."""


@dataclass(slots=True)
class ImportReport:
    """The result of an import."""

    verdict: RunVerdict
    """Whether every iteration of the folder is stored complete."""
    num_records: int = 0
    """Number of tensors that this call stored, without those stored before."""
    nbytes: int = 0
    """Size of their values, in bytes."""
    left_out: dict[str, str] = field(default_factory=dict)
    """The reason for each file that is not in the run."""


def import_folder(
    folder: Folder,
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    skip_unreadable: bool = False,
    on_record: Callable[[], object] = lambda: None,
) -> ImportReport:
    """Store the tensors of a folder as a run, and call `on_record` after each.

    Raises:
        DataError: the folder has no readable tensor; or a file is damaged or has an unknown name, and
            `skip_unreadable` is false. Tensors stored before are intact, and importing again continues from there.
        RunExistsError: another run exists and `overwrite` is false; or another process records into it.
        StorageError: the store cannot be read or written.
        UsageError: the rank of a file is far above those of the others, or its name is too long for the store, and
            `skip_unreadable` is false; or the URL is invalid.
    """
    strangers = [name for name in folder.foreign if name.endswith(".pt")]
    if strangers and not skip_unreadable:
        raise DataError(
            f"{len(strangers)} .pt files in {folder.url} have unknown names, such as {strangers[0]!r}: "
            f"move them away, or add --skip-unreadable"
        )
    left_out = dict.fromkeys(folder.foreign, "its name is unknown") | folder.unreadable
    if not len(folder):
        raise DataError(f"{folder.url} contains no readable tensor")
    # Finds all errors that do not require reading the values before the run is created.
    for_each(lambda file: file.fields(), folder.files, at_once=NUM_THREADS)
    files = _of_fitting_ranks(folder, left_out, is_skipping=skip_unreadable)
    places: dict[int, dict[int, list[SourceFile]]] = {}
    for file in files:
        places.setdefault(file.field("iteration"), {}).setdefault(file.field("rank"), []).append(file)
    num_ranks = 1 + max(file.field("rank") for file in files)
    backend = open_backend(url, storage_options=storage_options)
    launch = Launch(launch_id=_launch_id(folder), restart=0, world_size=num_ranks)
    before = _imported_before(backend, launch=launch, iterations=places.keys(), source=folder.url, overwrite=overwrite)
    if before is not None:
        return ImportReport(verdict=before, left_out=left_out)
    source = {"imported_from": folder.url, "num_files": len(files), "ranktape": __version__}
    with claim_run(backend, launch=launch, resume=False, overwrite=overwrite):
        attempt = begin_attempt(
            backend,
            launch=launch,
            options={"min_iterations": len(places)},
            environment=source,
            resume=False,
            overwrite=overwrite,
        )
        writers = [RankWriter(backend, attempt=attempt, rank=rank, environment=source) for rank in launch.ranks]
        sizes: list[int] = []
        problems: dict[str, str] = {}
        reason = "the import was interrupted"
        try:
            for iteration in sorted(places.keys() - set(attempt.completed)):
                open_iteration(backend, attempt=attempt, iteration=iteration)
                for nbytes in _store(
                    iteration, places[iteration], writers, attempt, left_out=left_out, is_skipping=skip_unreadable
                ):
                    sizes.append(nbytes)
                    on_record()
                finish_iteration(backend, attempt=attempt, iteration=iteration)
            reason = "the folder is imported"
        except RanktapeError as error:
            reason = problems["import"] = f"the import failed: {error}"
            raise
        finally:
            for writer in writers:
                writer.close(reason=reason)
            verdict = write_verdict(backend, attempt=attempt, problems=problems)
        return ImportReport(verdict=verdict, num_records=len(sizes), nbytes=sum(sizes), left_out=left_out)


def _of_fitting_ranks(folder: Folder, left_out: dict[str, str], *, is_skipping: bool) -> Sequence[SourceFile]:
    """The files except those of ranks far above the others, which are added to `left_out`."""
    ranks = sorted({file.field("rank") for file in folder.files})
    highest, most = -1, 0
    for count, rank in enumerate(ranks, start=1):
        most = min(MAX_RANKS, MAX_EMPTY_RANKS + (1 + _EMPTY_RANKS_PER_RANK) * count)
        highest = rank if rank < most else highest
    beyond = [file for file in folder.files if file.field("rank") > highest]
    if beyond and (highest < 0 or not is_skipping):
        raise UsageError(
            f"{beyond[0].path.name} has rank {beyond[0].field('rank')}, and every rank up to it would be committed: "
            f"with files of {len(ranks)} ranks, at most {most} ranks are imported; change the rank in the names of "
            f"such files, which takes precedence over their contents"
            + (", or add --skip-unreadable to leave them out" if highest >= 0 else "")
        )
    left_out |= {file.path.name: f"rank {file.field('rank')} is far above the ranks with files" for file in beyond}
    return [file for file in folder.files if file.field("rank") <= highest]


def _launch_id(folder: Folder) -> str:
    """An identifier of the folder, from the names, sizes and times of its files, readable or not."""
    listing = hashlib.sha256()
    for path in sorted(folder.paths):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue  # a broken link
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        listing.update(json.dumps([path.name, found.st_size, found.st_mtime_ns]).encode())
    return f"import-{listing.hexdigest()[:32]}"


def _imported_before(
    backend: Backend, *, launch: Launch, iterations: AbstractSet[int], source: str, overwrite: bool
) -> RunVerdict | None:
    """The verdict of a run that already contains the whole folder; None if there is something to import.

    Raises:
        RunExistsError: another run exists and `overwrite` is false.
    """
    try:
        run = Run(backend)
    except RunNotFoundError:
        return None
    if run.attributes.get("launch_id") == launch.launch_id:
        return run.verdict() if iterations <= set(run.iterations) else None
    if not overwrite:
        raise RunExistsError(
            f"a run already exists at {backend.url}, which was not imported from the current {source}: "
            f"add --overwrite to delete it, or choose another URL"
        )
    return None


def _store(
    iteration: int,
    files: Mapping[int, Sequence[SourceFile]],
    writers: Sequence[RankWriter],
    attempt: Attempt,
    *,
    left_out: dict[str, str],
    is_skipping: bool,
) -> Iterator[int]:
    """Store and commit an iteration of every rank, and yield the size of each stored tensor, in bytes.

    If `is_skipping`, a file that cannot be stored is added to `left_out`.
    """
    for rank, writer in enumerate(writers):
        own = files.get(rank, ())
        taken: set[str] = set()
        for file in own:
            try:
                values, overflow, checksum = file.values_measured()
                fields = {name: value for name, value in file.fields().items() if name != "record_checksum"}
                fields |= {"metadata": json.loads(fields["metadata"]), "attempt": attempt.number}
                info = _distinct(RecordInfo(**fields, overflow=overflow, checksum=checksum), taken, place=file.path)
            except (DataError, StorageError, UsageError) as error:
                if not is_skipping:
                    raise
                left_out[file.path.name] = str(error)
                continue
            writer.write(np.ascontiguousarray(values).reshape(info.shape), info=info)
            yield info.nbytes
        missed = {
            name: reason
            for name, reason in left_out.items()
            if (file_name := parse_tensor_file_name(name)) is not None
            and (file_name.iteration, file_name.rank) == (iteration, rank)
        }
        expected = sorted({*missed, *(file.path.name for file in own)}) if taken else []
        writer.commit(iteration, expected=expected, silent_sites=missed)


def _distinct(info: RecordInfo, taken: set[str], *, place: Path) -> RecordInfo:
    """The record with a call number that makes it unique: files of single samples or with short names share one."""
    try:
        while (path := site_path(info)) in taken:
            info = dataclasses.replace(info, call=info.call + 1)
    except UsageError as error:
        raise UsageError(f"{place} cannot be stored: {error}, or leave the file out with --skip-unreadable") from error
    taken.add(path)
    return info
