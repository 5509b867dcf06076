"""Gives `ranktape trigger`: asks a running training to record iterations."""

from __future__ import annotations

import dataclasses
import getpass
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ranktape.analyze.console import say, say_json
from ranktape.capture.settings.options import ASKED_SETTINGS, SETTINGS
from ranktape.errors import CaptureError, UsageError, expect_least
from ranktape.launch.options import capture_options
from ranktape.launch.place import open_backend_of, read_options, shown

if TYPE_CHECKING:
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.format.control import Answer, Request
    from ranktape.storage.places.backend import Backend

TIMEOUT_SECONDS = 60.0
"""Longest wait for the answer, by default."""

_PAUSE_SECONDS = 0.25
_MAX_PAUSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReply:
    """What becomes of a request."""

    run: str
    """Where the run is, as it was given, without credentials."""
    request: str
    """The request's name in the run."""
    is_answered: bool
    """Whether the training has answered; it is only left there where nobody waited."""
    iterations: list[int]
    """The iterations that all ranks record."""
    num_ranks: int
    """How many ranks there are."""
    is_held: bool = False
    """Whether the training is recorded by a flight recorder, whose ranks store what they hold around the iteration."""


def trigger(
    run: str | os.PathLike[str],
    *,
    iterations: int = 1,
    timeout_seconds: float = TIMEOUT_SECONDS,
    no_wait: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    **selection: Any,
) -> ControlReply:
    """Have all ranks of the training that records into RUN record the next iterations that they can, the same ones.

    What they record is what the capture selects, whatever its cadence; with `select` or `keep` what these do. It can
    only be of what the capture attaches to: its kinds of layers.

    Args:
        run: A URL or a path.
        iterations: How many.
        timeout_seconds: Longest wait for the answer.
        no_wait: Leave the request there, and do not wait for the answer.
        storage_options: For fsspec.
        selection: The settings `select` and `keep` of a capture.

    Raises:
        UsageError: a value is not allowed.
        RunNotFoundError: there is no run.
        CaptureError: the training has ended, refuses, or did not answer in time.
        StorageError: the store cannot be read, or not be written.
    """
    from ranktape.storage.format.control import MAX_ITERATIONS, Request

    if not 1 <= iterations <= MAX_ITERATIONS:
        raise UsageError(f"--iterations {iterations} is not allowed: give 1 to {MAX_ITERATIONS}")
    settings = _texts_of(selection)
    request = Request(num_iterations=iterations, settings=settings, by=_myself())
    return _ask(os.fspath(run), request, seconds=None if no_wait else timeout_seconds, storage_options=storage_options)


def _ask(
    run: str, request: Request, *, seconds: float | None, storage_options: Mapping[str, Any] | None
) -> ControlReply:
    from ranktape.storage.format.attempt import read_attempts, read_run, run_attributes
    from ranktape.storage.format.control import write_request

    expect_least(0, timeout_seconds=seconds)
    with open_backend_of(run, storage_options) as opened:
        backend: Backend = opened
        run_attributes(read_run(backend), place=backend.url)
        attempts = read_attempts(backend)
        if not attempts:
            raise CaptureError(f"no training records into {shown(run)} yet: no attempt has begun")
        attempt = attempts[-1]
        if _has_ended(backend, attempt):
            raise CaptureError(
                f"the training that recorded into {shown(run)} has ended: nothing more can be asked of it"
            )
        _check_layer_types(backend, attempt, request.settings)
        name = write_request(backend, attempt=attempt, request=request)
        reply = ControlReply(
            run=shown(run), request=name, is_answered=False, iterations=[], num_ranks=attempt.launch.world_size
        )
        if seconds is None:
            return reply
        answer = _wait(backend, attempt, name, seconds=seconds)
    if answer.refusal:
        raise CaptureError(f"the training refuses: {answer.refusal}")
    return dataclasses.replace(reply, is_answered=True, iterations=list(answer.iterations), is_held=answer.is_held)


def _wait(backend: Backend, attempt: Attempt, name: str, *, seconds: float) -> Answer:
    """What the training answers.

    Raises:
        CaptureError: it did not, in time or before it ended.
    """
    from ranktape.storage.format.attempt import is_attempt_there, lost_message
    from ranktape.storage.format.control import read_answer

    deadline = time.monotonic() + seconds
    pause = _PAUSE_SECONDS
    while True:
        has_ended = _has_ended(backend, attempt)  # before the answer, which comes before the end
        answer = read_answer(backend, attempt=attempt, name=name)
        if answer is not None:
            return answer
        if has_ended:
            raise CaptureError("the training ended before it answered: nothing was done")
        left = deadline - time.monotonic()
        if left <= 0:
            if not is_attempt_there(backend, attempt):
                raise CaptureError(lost_message(backend))
            raise CaptureError(
                f"the training did not answer within {seconds:g} s: its rank 0 may be lost, or not reach the store; "
                f"the request stays, and is obeyed should it come back"
            )
        time.sleep(min(pause, left))
        pause = min(_MAX_PAUSE_SECONDS, 1.5 * pause)


def _has_ended(backend: Backend, attempt: Attempt) -> bool:
    from ranktape.storage.format.documents import read_attributes
    from ranktape.storage.format.layout import verdict_path

    return read_attributes(backend, verdict_path(attempt.path)) is not None


def _check_layer_types(backend: Backend, attempt: Attempt, settings: Mapping[str, Any]) -> None:
    """Let kinds of layers pass that the capture attaches to.

    Raises:
        UsageError: one is not.
    """
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.settings.rules import fits
    from ranktape.storage.format.documents import converted, read_attributes

    if "select" not in settings:
        return
    options = (read_attributes(backend, attempt.path) or {}).get("options", {})
    given = converted(options, dict[str, Any], place=f"{backend.url}/{attempt.path}, options")
    chosen = {name: given[name] for name in ("layers", "select") if given.get(name)}
    attached = CaptureOptions(**chosen).wanted_layer_types
    asked = CaptureOptions().asked({"select": settings["select"]})
    for one in asked.wanted_layer_types:
        if not (fits(attached, one) or any(fits((one,), kind) for kind in attached)):
            raise UsageError(f"the capture attaches to {', '.join(attached)} only: {one!r:.60} cannot be asked for")


def _texts_of(selection: Mapping[str, Any]) -> dict[str, str | tuple[str, ...]]:
    """The settings that select, as texts.

    Raises:
        UsageError: one is none, or has a value that it cannot have.
    """
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.settings.setting import COLLECTIONS, is_given
    from ranktape.storage.format.control import MAX_SELECTION

    found: dict[str, str | tuple[str, ...]] = {}
    for name, value in selection.items():
        if not is_given(value):
            continue
        texts = tuple(value) if isinstance(value, COLLECTIONS) else (value,)
        if not all(isinstance(text, str | int) for text in texts):
            raise UsageError(f"{name} {value!r:.60} is not allowed: give texts, as on a command line")
        found[name] = tuple(map(str, texts)) if isinstance(value, COLLECTIONS) else str(value)
    if sum(len(one) for value in found.values() for one in value) > MAX_SELECTION:
        raise UsageError(f"the selection has more than {MAX_SELECTION} characters: choose with fewer")
    CaptureOptions().asked(found)
    return found


def _myself() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = f"user {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def _listed(iterations: list[int]) -> str:
    spans: list[list[int]] = []
    for iteration in iterations:
        if spans and spans[-1][1] == iteration - 1:
            spans[-1][1] = iteration
        else:
            spans.append([iteration, iteration])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"iteration{'s' * (len(iterations) != 1)} {', '.join(texts)}"


_NOT_SELECTING = [one.name for one in SETTINGS if one.name not in {*ASKED_SETTINGS, "storage_options"}]


@click.command(name="trigger")
@click.option("--iterations", type=int, default=1, show_default=True, metavar="N", help="How many are recorded.")
@click.option("--json", "as_json", is_flag=True, help="Write one JSON document.")
@click.option("--no-wait", is_flag=True, help="Leave the request there, and do not wait for the answer.")
@click.option(
    "--timeout-seconds", type=float, default=TIMEOUT_SECONDS, show_default=True, help="Longest wait for the answer."
)
@click.argument("run")
@capture_options(without=_NOT_SELECTING)
def trigger_command(
    run: str, *, iterations: int, timeout_seconds: float, no_wait: bool, as_json: bool, **selection: Any
) -> None:
    """Have all ranks of the training that records into RUN record the next iterations, the same ones.

    What is recorded is what the capture selects, whatever its cadence; with options that select, what these do. It can
    only be of what the capture attaches to: its kinds of layers. Iterations that were asked for guarantee nothing: the
    capture goes on as it was planned. A flight recorder stores the iterations that it holds.
    """
    options = read_options(selection.pop("storage_options"))
    reply = trigger(
        run,
        iterations=iterations,
        timeout_seconds=timeout_seconds,
        no_wait=no_wait,
        storage_options=options,
        **selection,
    )
    what = f"storing what is held around {_listed(reply.iterations)}" if reply.is_held else ""
    _write(reply, f"{what or f'recording {_listed(reply.iterations)}'} on {_ranks(reply)}", as_json=as_json)


def _ranks(reply: ControlReply) -> str:
    return "1 rank" if reply.num_ranks == 1 else f"all {reply.num_ranks} ranks"


def _write(reply: ControlReply, text: str, *, as_json: bool) -> None:
    if as_json:
        say_json(dataclasses.asdict(reply))
    elif reply.is_answered:
        say(text)
    else:
        say("asked: the training answers within some seconds, if it runs")
