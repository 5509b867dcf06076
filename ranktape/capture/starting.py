"""Begins a capture on all ranks together, each with a writer that is ready."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape.capture.environment import describe_environment
from ranktape.capture.rendezvous import Rendezvous, collective_seconds
from ranktape.capture.settings.cadence import cadence_of
from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.staging.ring_file import boot_id, new_ring_path
from ranktape.capture.writing.writer_config import WriterConfig
from ranktape.errors import LateError, UsageError
from ranktape.storage.backends.urls import open_backend
from ranktape.storage.start import check_place

if TYPE_CHECKING:
    from ranktape.capture.rendezvous import Place
    from ranktape.capture.staging.process import WriterProcess
    from ranktape.storage.backends.backend import Backend
    from ranktape.storage.backends.retry import RetryingBackend

START_TIMEOUT_SECONDS = 120.0
"""Longest wait for the writer to be ready, which loads and compiles its kernels; and for rank 0 where it is not known
how long the training itself would wait."""


def open_place(url: str, options: CaptureOptions) -> RetryingBackend:
    """The store at the URL of a run.

    Raises:
        UsageError: it is not a URL, or no other process could write there.
    """
    backend = open_backend(url, storage_options=options.storage_options)
    if not backend.is_shared:
        raise UsageError(
            f"{backend.url} exists inside of one process only, and a writer of its own records: "
            f"give a directory or a URL such as s3://bucket/run"
        )
    return backend


def try_place(backend: RetryingBackend, options: CaptureOptions) -> None:
    """Fail now as a capture would that begins later; a directory is written into, and left as it was.

    Raises:
        RunExistsError: there is a run at the URL.
        StorageError: the store cannot be reached, or the directory not be written.
    """
    place = backend.with_deadline(timeout_seconds=options.store_timeout_seconds)
    check_place(place, resume=options.resume or options.add, overwrite=options.overwrite)
    # An object store may let a writer add objects, and not remove them.
    if "://" not in place.url:
        folders = missing_folders(place)
        name = f"trial-{secrets.token_hex(4)}"
        place.put(name, [b""])
        place.delete(name)
        remove_folders(folders)


def missing_folders(backend: Backend) -> list[Path]:
    """The folders, innermost first, that a store in a directory would have to make."""
    if "://" in backend.url:
        return []
    path = Path(backend.url)
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_folders(folders: Iterable[Path]) -> None:
    """Remove folders that are empty, innermost first."""
    for folder in folders:
        # On another node, or by another rank, or by somebody who begins to use it.
        with contextlib.suppress(OSError):
            folder.rmdir()


def ring_path(options: CaptureOptions, *, rank: int) -> Path | None:
    """Where the ring of this rank lies; None for in memory."""
    return None if options.ring_dir is None else new_ring_path(_absolute(options.ring_dir), rank=rank)


def start_writer(
    process: WriterProcess,
    *,
    url: str,
    shown_url: str,
    options: CaptureOptions,
    place: Place,
    on_wait: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], Rendezvous]:
    """The words of the writer, once it is ready, and where the ranks have met.

    Args:
        process: Not started yet.
        url: Of the run.
        shown_url: The same without credentials.
        options: Of the capture.
        place: This rank's.
        on_wait: Called with a line for the person at the terminal where rank 0 is long in coming.

    Raises:
        CaptureError: the writer cannot start, or another rank's cannot.
        LateError: the writer, or another rank, was not ready in time.
        RanktapeError: the writer could not start; the class and the text are its own.
    """
    words: dict[str, Any] = {}
    rendezvous: Rendezvous | None = None

    def is_ready() -> bool:
        words.update(process.poll_ready() or {})
        return bool(words)

    try:
        rendezvous = Rendezvous(place, seconds=_meeting_seconds(options), on_wait=on_wait)
        path = process.ring.path
        config = _writer_config(options, url=url, place=place, launch_id=rendezvous.launch_id, path=path)
        process.start(config)
        if not rendezvous.wait(is_ready, seconds=START_TIMEOUT_SECONDS):
            raise LateError(f"the writer was not ready within {START_TIMEOUT_SECONDS:g} s: try again")
    except BaseException as error:
        if rendezvous is not None and place.rank == place.first_rank:
            rendezvous.report_failure(str(error), is_late=isinstance(error, LateError))
        elif rendezvous is not None:
            rendezvous.give_up(str(error))
        process.finish(reason=str(error), timeout_seconds=0, on_progress=lambda *_: None)
        process.close(has_captured=False)
        raise
    if path is not None:
        process.ring.describe(_about(config, url=shown_url, attempt=str(words["attempt"])))
    return words, rendezvous


def _meeting_seconds(options: CaptureOptions) -> float:
    """How long rank 0 is waited for: where ranks wait for each other in a circle, ours must be the first to end."""
    if options.begin_timeout_seconds is not None:
        return options.begin_timeout_seconds
    seconds = collective_seconds()
    return START_TIMEOUT_SECONDS if seconds is None else seconds / 2


def _writer_config(
    options: CaptureOptions, *, url: str, place: Place, launch_id: str, path: Path | None
) -> WriterConfig:
    return WriterConfig(
        url=url,
        storage_options=dict(options.storage_options or {}),
        rank=place.rank,
        trainer_pid=os.getpid(),
        launch={
            "launch_id": launch_id,
            "restart": place.restart,
            "world_size": place.world_size,
            "first_rank": place.first_rank,
        },
        options=options.document(),
        environment=describe_environment(),
        resume=options.resume,
        overwrite=options.overwrite,
        add=options.add,
        is_manual=options.manual,
        cadence=cadence_of(options).to_json(),
        target=options.target_iterations,
        min_iterations=options.min_iterations,
        keep_last=options.keep_last,
        policy=options.policy,
        compression=options.compression,
        store_timeout_seconds=options.store_timeout_seconds,
        store_concurrency=options.store_concurrency,
        ring_path=None if path is None else str(path),
        spill_dir=None if options.spill_dir is None else str(_absolute(options.spill_dir)),
        join_timeout_seconds=START_TIMEOUT_SECONDS / 2,
        finish_timeout_seconds=options.finish_timeout_seconds,
    )


def _about(config: WriterConfig, *, url: str, attempt: str) -> dict[str, Any]:
    """What `ranktape recover` must know of a ring; no secrets."""
    return {
        "url": url,
        "attempt": attempt,
        "rank": config.rank,
        "environment": config.environment,
        "compression": config.compression,
        "host": socket.gethostname(),
        "boot_id": boot_id(),
        "started": time.time(),
    }


def _absolute(directory: str) -> Path:
    # The program may change its working directory before it is used.
    return Path(directory).expanduser().absolute()
