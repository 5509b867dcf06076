"""How do the ranks begin a capture together, each with a writer that is ready?"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ranktape.capture.environment import describe_environment
from ranktape.capture.rendezvous import Rendezvous
from ranktape.capture.settings.cadence import cadence_of
from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.staging.ring_file import boot_id, new_ring_path
from ranktape.capture.writing.writer_config import WriterConfig
from ranktape.errors import CaptureError

if TYPE_CHECKING:
    from ranktape.capture.rendezvous import Place
    from ranktape.capture.staging.process import WriterProcess

START_TIMEOUT_SECONDS = 120.0
"""Longest wait for the writer to be ready: it loads and compiles its kernels."""


def ring_path(options: CaptureOptions, *, rank: int) -> Path | None:
    """Where the ring of this rank lies; None for in memory."""
    return None if options.ring_dir is None else new_ring_path(_absolute(options.ring_dir), rank=rank)


def start_writer(
    process: WriterProcess, *, url: str, shown_url: str, options: CaptureOptions, place: Place
) -> tuple[dict[str, Any], Rendezvous]:
    """The words of the writer, once it is ready, and where the ranks have met.

    Args:
        process: Not started yet.
        url: Of the run.
        shown_url: The same without credentials.
        options: Of the capture.
        place: This rank's.

    Raises:
        CaptureError: the writer cannot start, or another rank's cannot.
        RanktapeError: the writer could not start; the class and the text are its own.
    """
    words: dict[str, Any] = {}
    rendezvous: Rendezvous | None = None

    def is_ready() -> bool:
        words.update(process.poll_ready() or {})
        return bool(words)

    try:
        rendezvous = Rendezvous(place, seconds=START_TIMEOUT_SECONDS)
        path = process.ring.path
        config = _writer_config(options, url=url, place=place, launch_id=rendezvous.launch_id, path=path)
        process.start(config)
        if not rendezvous.wait(is_ready, seconds=START_TIMEOUT_SECONDS):
            raise CaptureError(f"the writer was not ready within {START_TIMEOUT_SECONDS:g} s: try again")
    except BaseException as error:
        if rendezvous is not None:
            (rendezvous.report_failure if place.rank == place.first_rank else rendezvous.give_up)(str(error))
        process.finish(reason=str(error), timeout_seconds=0, on_progress=lambda *_: None)
        process.close(has_captured=False)
        raise
    if path is not None:
        process.ring.describe(_about(config, url=shown_url, attempt=str(words["attempt"])))
    return words, rendezvous


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
