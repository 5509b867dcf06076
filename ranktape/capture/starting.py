"""Starts a capture on all ranks together, with a writer on each, and gives its verdict at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ranktape._version import __version__
from ranktape.capture.console import Console
from ranktape.capture.rendezvous import RankPlace, Rendezvous, collective_seconds
from ranktape.capture.settings.options import SETTINGS, CaptureOptions
from ranktape.capture.staging.process import WriterConfig, WriterProcess
from ranktape.errors import LateError, RanktapeError, StorageError, UsageError
from ranktape.storage.format.progress import RunVerdict
from ranktape.storage.places.backend import Backend
from ranktape.storage.places.urls import RetryingBackend, open_backend

_GIT_TIMEOUT_SECONDS = 5


@cache
def describe_environment() -> dict[str, Any]:
    """The host, versions, program and git revision for the documents of the run."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # unpickling torch's own string class would import torch in the writer
        "numpy": np.__version__,
        "ranktape": __version__,
        "program": Path(sys.argv[0]).name,
        "git_revision": _git_revision(),
    }


def _git_revision() -> str | None:
    """The commit of the working directory; None outside a repository, or without git."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"],  # noqa: S607  (whichever git the user has)
            capture_output=True,
            text=True,
            check=False,
            timeout=_GIT_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git, or a repository on a file system that hangs
        return None
    return result.stdout.strip() or None


WRITER_TIMEOUT_SECONDS = 300.0
"""Longest wait for the writer to be ready. It loads and compiles its kernels, which takes minutes on a busy machine."""


def open_shared_store(url: str, options: CaptureOptions) -> RetryingBackend:
    """The store at the URL of a run.

    Raises:
        UsageError: the store cannot be shared between processes.
    """
    backend = open_backend(url, storage_options=options.storage_options)
    if not backend.is_shared:
        raise UsageError(
            f"{backend.url} exists inside of one process only, and a writer of its own records: "
            f"give a directory or a URL such as s3://bucket/run"
        )
    return backend


def check_can_start(backend: RetryingBackend, options: CaptureOptions) -> None:
    """Check that a later capture can start; a directory is tried with a small file, and left unchanged.

    Raises:
        RanktapeError: a capture could not start.
    """
    # Not at the top: importing `Capture` should not import the code that reads runs.
    from ranktape.storage.recording.start import check_target

    checked = backend.with_deadline(timeout_seconds=options.block_timeout_seconds)
    check_target(checked, resume=options.resume or options.adds, overwrite=options.overwrite)
    # Not an object store, which may let a writer add objects but not delete them.
    if "://" not in checked.url:
        try_writing(checked)


def try_writing(backend: Backend) -> None:
    """Write, read and delete a small object, and remove the directories that were created for it.

    Raises:
        StorageError: the store cannot be written, or returns other data.
    """
    path = Path(backend.url)
    folders = [] if "://" in backend.url else [folder for folder in (path, *path.parents) if not folder.exists()]
    key, content = f"ranktape-trial-{secrets.token_hex(4)}", secrets.token_bytes(1024)
    try:
        backend.put(key, [content])
        if backend.get(key) != content:
            raise StorageError(f"{backend.url}/{key} was written, and something else is read")
        backend.delete_keys([key])
    finally:
        for folder in folders:
            # Another rank or another program may already use it.
            with contextlib.suppress(OSError):
                folder.rmdir()


def start_writer(
    process: WriterProcess,
    *,
    url: str,
    options: CaptureOptions,
    place: RankPlace,
    on_wait: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], Rendezvous]:
    """Start the writer and wait until it is ready; returns its words and the rendezvous of the ranks.

    If rank 0 is late, `on_wait` is called with a message for the user.
    """
    status: dict[str, Any] = {}
    rendezvous: Rendezvous | None = None

    def is_ready() -> bool:
        status.update(process.poll_ready() or {})
        return bool(status)

    try:
        rendezvous = Rendezvous(place, seconds=_meeting_seconds(options), on_wait=on_wait)
        process.start(_writer_config(options, url=url, place=place, launch_id=rendezvous.launch_id))
        if not rendezvous.wait(is_ready, seconds=WRITER_TIMEOUT_SECONDS):
            raise LateError(f"the writer was not ready within {WRITER_TIMEOUT_SECONDS:g} s: try again")
    except BaseException as error:
        if rendezvous is not None and place.rank == place.first_rank:
            rendezvous.report_failure(str(error), is_late=isinstance(error, LateError))
        elif rendezvous is not None:
            rendezvous.give_up(str(error))
        process.finish(reason=str(error), timeout_seconds=0, on_progress=lambda *_: None)
        process.close()
        raise
    return status, rendezvous


def _meeting_seconds(options: CaptureOptions) -> float:
    """Longest wait for rank 0. If ranks wait for each other in a cycle, it has to time out before the collectives."""
    training = collective_seconds()
    return options.block_timeout_seconds if training is None else training / 2


def _writer_config(options: CaptureOptions, *, url: str, place: RankPlace, launch_id: str) -> WriterConfig:
    from ranktape.storage.format.attempt import Launch

    # Only the trainer needs the settings that select tensors and end iterations.
    trainers = ("select", "layers", "advance_on")
    changed: dict[str, Any] = {setting.name: setting.default for setting in SETTINGS if setting.name in trainers}
    if options.spill_dir is not None:
        # The program may change its working directory before the path is used.
        changed["spill_dir"] = str(Path(options.spill_dir).expanduser().absolute())
    plain = CaptureOptions(**{**options.plain(), **changed})
    return WriterConfig(
        url=url,
        rank=place.rank,
        trainer_pid=os.getpid(),
        launch=Launch(
            launch_id=launch_id, restart=place.restart, world_size=place.world_size, first_rank=place.first_rank
        ),
        options=plain,
        document=options.document(),
        environment=describe_environment(),
        cadence=plain.cadence,
    )


def verdict_of(
    status: Mapping[str, Any],
    *,
    rank: int,
    backend: Backend,
    process: WriterProcess,
    console: Console,
    required: int,
    waited_seconds: float,
) -> RunVerdict:
    """The writer's verdict. If it has none, the verdict follows from the run, on rank 0, and this rank's problems.

    `words` are the writer's last words. Problems are printed on the console.
    """
    console.pass_on(status)
    if "verdict" in status:
        return RunVerdict(**status["verdict"])
    state = status.get("state")
    problem = status.get("error") or status.get("problem")
    if "error" not in status and (num_more := status.get("num_more_problems")):
        problem = f"{problem}; {num_more} more problem{'s' * (num_more > 1)} came after it"
    if state == "late":
        problem = f"not everything was stored within {waited_seconds:g} s; the writer goes on"
    elif state not in {"closed", "failed"}:
        problem = f"the writer process ended: {process.ending()}"
    if problem is not None:
        console.warn_once(str(problem))
    missing = [] if problem is None else [f"rank {rank}: {problem}"]
    # Only rank 0 has a coordinator. Other ranks only judge what they stored themselves.
    if rank == 0:
        # Not at the top: importing `Capture` should not import the code that reads runs.
        from ranktape.storage.format.progress import read_verdict

        try:
            # Not the verdict of another launch that has taken over the run.
            judged = read_verdict(backend, until=status.get("attempt"))
        except RanktapeError as error:
            judged = None
            console.warn(str(error))
        if judged is not None:
            stored = judged[0]
            return stored if stored.met else dataclasses.replace(stored, missing=[*stored.missing, *missing])
    is_met = (rank != 0 or not required) and problem is None
    return RunVerdict(met=is_met, required=required, complete=[], missing=missing, final=False)
