"""`ranktape trigger`, which requests iterations of a running training."""

from __future__ import annotations

import dataclasses
import getpass
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ranktape.errors import CaptureError, UsageError, expect_least
from ranktape.launch.place import CommandAnswer, command_of, open_backend_of, shown

if TYPE_CHECKING:
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.format.live import Answer
    from ranktape.storage.places.backend import Backend

_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReply:
    """The outcome of a request."""

    run: str
    """URL or path of the run as given, without credentials."""
    request: str
    """Name of the request in the run."""
    is_answered: bool
    """Whether the training has answered; False if the command did not wait."""
    iterations: list[int]
    """The iterations that all ranks record."""
    num_ranks: int
    """Number of ranks."""
    is_held: bool = False
    """Whether the capture is a flight recorder, whose ranks store the iterations that they hold around this one."""


def trigger(
    run: str | os.PathLike[str],
    *,
    iterations: int = 1,
    select: Sequence[str] = (),
    keep: str | None = None,
    timeout_seconds: float = 60.0,
    no_wait: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ControlReply:
    """Make a running training record its next iterations, on all ranks.

    It records what the capture selects, regardless of --every, or what `select` selects among the layers that the
    capture attaches to. These iterations do not count for the guaranteed minimum. A flight recorder stores the
    iterations that it holds.

    Args:
        iterations (N): Number of iterations to record.
        select (RULE): Fields and what is kept, as in a capture; repeatable.
        keep (KEEP): What is kept of each tensor: values, histogram or statistics.
        timeout_seconds (SECONDS): Longest wait for the answer.
        no_wait: Write the request, and do not wait for the answer.

    Raises:
        UsageError: a value is not allowed.
        RunNotFoundError: there is no run.
        CaptureError: the training has ended, refuses the request, or did not answer in time.
        StorageError: the store cannot be read or written.
    """
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.storage.format.attempt import read_attempts, read_run, run_attributes
    from ranktape.storage.format.live import MAX_ITERATIONS, MAX_SELECTION, Request, write_request

    if not 1 <= iterations <= MAX_ITERATIONS:
        raise UsageError(f"--iterations {iterations} is not allowed: give 1 to {MAX_ITERATIONS}")
    expect_least(0, timeout_seconds=timeout_seconds)
    rules = (select,) if isinstance(select, str) else tuple(select)
    settings: dict[str, Any] = {**({"select": rules} if rules else {}), **({} if keep is None else {"keep": keep})}
    if not all(isinstance(rule, str) for rule in rules):
        raise UsageError(f"select {rules!r:.60} is not allowed: give texts, as on a command line")
    if sum(map(len, rules)) > MAX_SELECTION:
        raise UsageError(f"the selection has more than {MAX_SELECTION} characters: choose with fewer")
    CaptureOptions().for_request(settings)
    request = Request(num_iterations=iterations, settings=settings, by=_user_at_host())
    url = os.fspath(run)
    with open_backend_of(url, storage_options) as backend:
        run_attributes(read_run(backend), place=backend.url)
        attempts = read_attempts(backend)
        if not attempts:
            raise CaptureError(f"no training records into {shown(url)} yet: no attempt has begun")
        attempt = attempts[-1]
        if _has_ended(backend, attempt):
            raise CaptureError(f"the training that recorded into {shown(url)} has ended: it accepts no requests")
        _check_layer_types(backend, attempt, request.settings)
        name = write_request(backend, attempt=attempt, request=request)
        answer = None if no_wait else _wait(backend, attempt, name, seconds=timeout_seconds)
    if answer is not None and answer.refusal:
        raise CaptureError(f"the training refuses the request: {answer.refusal}")
    return ControlReply(
        run=shown(url),
        request=name,
        is_answered=answer is not None,
        iterations=[] if answer is None else list(answer.iterations),
        num_ranks=attempt.launch.world_size,
        is_held=answer is not None and answer.is_held,
    )


def _wait(backend: Backend, attempt: Attempt, name: str, *, seconds: float) -> Answer:
    """Wait for the training's answer.

    Raises:
        CaptureError: the training has ended, was lost, or did not answer in time.
    """
    from ranktape.storage.format.attempt import is_attempt_there, lost_message
    from ranktape.storage.format.live import read_answer

    deadline = time.monotonic() + seconds
    pause = _PAUSE_SECONDS
    while True:
        has_ended = _has_ended(backend, attempt)  # first, because a last answer is written before the end
        answer = read_answer(backend, attempt=attempt, name=name)
        if answer is not None:
            return answer
        if has_ended:
            raise CaptureError("the training ended before it answered: nothing was recorded")
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            if not is_attempt_there(backend, attempt):
                raise CaptureError(lost_message(backend))
            raise CaptureError(
                f"the training did not answer within {seconds:g} s: its rank 0 may be lost, or may not reach the "
                f"store; the request remains, and is carried out if rank 0 continues"
            )
        time.sleep(min(pause, remaining))
        pause = min(_MAX_PAUSE_SECONDS, 1.5 * pause)


def _has_ended(backend: Backend, attempt: Attempt) -> bool:
    from ranktape.storage.format.documents import read_attributes
    from ranktape.storage.format.layout import verdict_path

    return read_attributes(backend, verdict_path(attempt.path)) is not None


def _check_layer_types(backend: Backend, attempt: Attempt, settings: Mapping[str, Any]) -> None:
    """Check that the capture attaches to the requested layer types.

    Raises:
        UsageError: it does not attach to one of them.
    """
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.settings.rules import fits
    from ranktape.storage.format.documents import converted, read_attributes

    if "select" not in settings:
        return
    options = (read_attributes(backend, attempt.path) or {}).get("options", {})
    recorded = converted(options, dict[str, Any], place=f"{backend.url}/{attempt.path}, options")
    selection = {name: recorded[name] for name in ("layers", "select") if recorded.get(name)}
    attached = CaptureOptions(**selection).wanted_layer_types
    for layer_type in CaptureOptions().for_request({"select": settings["select"]}).wanted_layer_types:
        if not (fits(attached, layer_type) or any(fits((layer_type,), name) for name in attached)):
            raise UsageError(
                f"the capture attaches to {', '.join(attached)} only: {layer_type!r:.60} cannot be requested"
            )


def _user_at_host() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user has no name, as in some containers
        user = f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


@command_of(trigger)
def trigger_command(reply: ControlReply, given: Mapping[str, Any]) -> CommandAnswer:  # noqa: ARG001 - its signature
    """The iterations that are recorded or stored, and the number of ranks."""
    from ranktape.storage.records.tables import spans

    action = "storing the held iterations around" if reply.is_held else "recording"
    ranks = "1 rank" if reply.num_ranks == 1 else f"all {reply.num_ranks} ranks"
    plural = "s" * (len(reply.iterations) != 1)
    text = f"{action} iteration{plural} {spans(reply.iterations)} on {ranks}"
    if not reply.is_answered:
        text = "requested: a running training answers within a few seconds"
    return CommandAnswer(text=text, document=dataclasses.asdict(reply))
