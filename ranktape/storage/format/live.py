"""Writes and reads what is said to and by a training that runs: triggers, requests and their answers.

A trigger is something that happened, for which the ranks of a training store the iterations that they hold. It is one
small document, written by the rank on which the thing happened: ranks need no agreement and no lock, and whoever looks
at the names knows which iterations are to be stored.

A request is what people ask of a training. It is one document, never changed, and its answer another one, written by
the coordinator alone. What a request says is read by a training: it is compared with what it may be, and only data.

All of these lie below the attempt, each under a name of its own.
"""

from __future__ import annotations

import dataclasses
import enum
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from ranktape.errors import DataError, RunFormatError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt, check_attempt
from ranktape.storage.format.documents import Count, encode_document, for_each, group_document, read_as, write_group
from ranktape.storage.places.backend import Backend

MAX_TEXT = 2000
"""Characters of a text in a trigger."""


class TriggerKind(enum.StrEnum):
    """What kind of thing happened."""

    NAN = "nan"
    """A recorded tensor held a NaN."""
    INF = "inf"
    """A recorded tensor held an infinity."""
    METRIC = "metric"
    """A metric of a recorded tensor was beyond a limit that was given (`--trigger`)."""
    USER = "user"
    """The program said so (`capture.trigger`)."""
    SIGNAL = "signal"
    """A signal asked for it."""
    EXCEPTION = "exception"
    """The training ended with an error: an uncaught exception, as of a collective that timed out."""
    DEATH = "death"
    """The training process died, without a word."""


_LATE_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
"""What a launcher sends to the other ranks when one has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """Something that happened on one rank."""

    kind: TriggerKind
    """What kind of thing it is."""
    iteration: Count
    """The training step in which it happened."""
    rank: Count
    """The rank on which."""
    text: str
    """What happened, in a sentence: the value and the limit, the exception, the signal."""
    where: dict[str, Any] = field(default_factory=dict)
    """The fields of the record that showed it; empty where no record did."""
    metric: str = ""
    """The metric that was judged; empty where none was."""
    value: float | None = None
    """That metric; None where there is none, and where it is not finite."""
    signal: str = ""
    """The signal that ended the process or asked for it; empty where none did, or it is not known."""
    traceback: str = ""
    """The last frames of the exception; empty where there was none."""
    time: float = 0.0
    """When it was noticed, in seconds since 1970."""
    attempt: int = 0
    """Number of the attempt."""
    is_stored: bool = True
    """Whether the iterations around it are stored; not where iterations of many triggers of its kind are."""
    count: Count = 1
    """How many triggers of its kind and rank it stands for, this one and later ones."""
    last_iteration: Count | None = None
    """The iteration of the last of them; None where it stands for itself alone."""

    def __post_init__(self) -> None:
        """Refuse what could not be put in order."""
        if type(self.where.get("counter", 0)) is not int:
            raise ValueError(f"Expected `int` as `counter` of the record, got {self.where['counter']!r:.60}")

    @property
    def order(self) -> tuple[int, int, int, int, float]:
        """What came first: a value before the crash it led to, a crash before what it did to the other ranks."""
        if self.kind is TriggerKind.EXCEPTION:
            rank_of_kind = 2
        elif self.kind is TriggerKind.DEATH:
            rank_of_kind = 3 if self.signal in _LATE_SIGNALS else 1
        else:
            rank_of_kind = 0
        return self.attempt, self.iteration, rank_of_kind, self.where.get("counter", 0), self.time

    def message(self) -> str:
        """One line for a person."""
        repeated = "" if self.count == 1 else f", and {self.count - 1} more until iteration {self.last_iteration}"
        noted = "" if self.is_stored else "; nothing is stored for it, as this kind of trigger happened too often"
        return f"iteration {self.iteration}, rank {self.rank}: {self.text}{repeated}{noted}"

    def to_json(self) -> dict[str, Any]:
        """A dictionary for JSON and for Zarr attributes."""
        return {**dataclasses.asdict(self), "kind": self.kind.value, "where": dict(self.where)}


MAX_STORED = 100
"""Iterations of triggers of one kind for which all ranks store what they hold; later triggers are counted."""


def write_trigger(backend: Backend, *, attempt: Attempt, trigger: Trigger, number: int = 0) -> None:
    """Say to all ranks of an attempt what happened; `number` tells those of one rank and iteration apart."""
    check_attempt(backend, attempt)
    if number == 0:
        write_group(backend, layout.triggers_path(attempt.path), {})
    path = layout.trigger_path(attempt.path, trigger.iteration, trigger.rank, number=number)
    write_group(backend, path, {**trigger.to_json(), "text": trigger.text[:MAX_TEXT]})


def list_triggers(backend: Backend, attempt: Attempt) -> set[str]:
    """The names of an attempt's triggers; one LIST."""
    return {name for name in backend.list_names(layout.triggers_path(attempt.path)) if layout.is_trigger(name)}


def count_triggers(backend: Backend, attempt: Attempt) -> int:
    """How many triggers an attempt had; their documents are read only where one may count several."""
    names = list_triggers(backend, attempt)
    if len(names) <= MAX_STORED:
        return len(names)
    return sum(one.count for one in read_triggers(backend, attempt, names))


def read_triggers(backend: Backend, attempt: Attempt, names: Collection[str] | None = None) -> list[Trigger]:
    """An attempt's triggers, or those of these names, what came first before; damaged ones are passed over."""
    chosen = sorted(list_triggers(backend, attempt) if names is None else names)
    found = for_each(lambda name: _read_trigger(backend, attempt, name), chosen)
    return sorted((one for one in found if one is not None), key=lambda one: one.order)


def merge_repeated(triggers: Iterable[Trigger]) -> list[Trigger]:
    """One trigger, the first, for those of one rank and kind that say the same, with their count."""
    merged: dict[tuple[Any, ...], Trigger] = {}
    for one in triggers:
        key = one.attempt, one.rank, one.kind, one.metric or one.text, one.is_stored
        first = merged.setdefault(key, one)
        if first is not one:
            last = one.iteration if one.last_iteration is None else one.last_iteration
            merged[key] = dataclasses.replace(first, count=first.count + one.count, last_iteration=last)
    return list(merged.values())


def _read_trigger(backend: Backend, attempt: Attempt, name: str) -> Trigger | None:
    try:
        return read_as(backend, f"{layout.triggers_path(attempt.path)}/{name}", Trigger, attempt=attempt.number)
    except (DataError, RunFormatError):
        return None  # 'ranktape check' names it


MAX_ITERATIONS = 1000
"""Iterations that one request may ask for."""

MAX_SELECTION = 4000
"""Characters of all texts of a request's selection: every rank is told of it through its ring."""

_MAX_NAME = 200
"""Characters of the name of who asks."""

_MAX_VALUES = 200
"""Texts of a selection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Iterations that somebody asks a running training to record."""

    num_iterations: Annotated[int, Meta(ge=1, le=MAX_ITERATIONS)]
    """How many."""
    settings: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """What to select in them, by the names of the capture's settings; empty for what the capture selects."""
    by: str = ""
    """Who asks: user and host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the coordinator answers."""

    iterations: tuple[Count, ...] = ()
    """The iterations that all ranks record; empty where the request is refused."""
    is_held: bool = False
    """Whether the iterations around the one that is named are stored, which the ranks of a flight recorder hold."""
    refusal: str = ""
    """Why the request is refused; empty where it is not."""


def write_request(backend: Backend, *, attempt: Attempt, request: Request) -> str:
    """Leave a request for the coordinator of an attempt; the name by which it is answered."""
    # Names tell which one came first, as far as clocks agree.
    name = f"{int(time.time() * 1000):012x}{secrets.token_hex(4)}"
    attributes = {**dataclasses.asdict(request), "by": request.by[:_MAX_NAME], "written": time.time()}
    key = layout.document_key(layout.request_path(attempt.path, name))
    write_group(backend, layout.control_path(attempt.path), {})
    backend.create(key, encode_document(group_document(attributes), key=key))
    return name


def list_requests(backend: Backend, attempt: Attempt) -> tuple[list[str], set[str]]:
    """The names of all requests, the first ones first, and of those that are answered; one LIST."""
    requests, answers = [], set()
    for name in backend.list_names(layout.control_path(attempt.path)):
        kind, token = layout.parse_control(name)
        if kind is layout.KeyKind.REQUEST:
            requests.append(token)
        elif kind is layout.KeyKind.ANSWER:
            answers.add(token)
    return sorted(requests), answers


def read_request(backend: Backend, *, attempt: Attempt, name: str) -> Request | None:
    """A request as its document says; None where there is none."""
    path = layout.request_path(attempt.path, name)
    request = read_as(backend, path, Request)
    if request is None:
        return None
    texts = [text for one in request.settings.values() for text in ([one] if isinstance(one, str) else one)]
    if len(texts) > _MAX_VALUES or sum(map(len, [*request.settings, *texts])) > MAX_SELECTION:
        raise RunFormatError(f"{backend.url}/{path} selects with more than {MAX_SELECTION} characters")
    return dataclasses.replace(request, by=request.by[:_MAX_NAME])


def write_answer(backend: Backend, *, attempt: Attempt, name: str, answer: Answer) -> None:
    """Answer a request."""
    attributes = {**dataclasses.asdict(answer), "written": time.time()}
    write_group(backend, layout.answer_path(attempt.path, name), attributes)


def read_answer(backend: Backend, *, attempt: Attempt, name: str) -> Answer | None:
    """What was answered to a request; None where nothing was yet."""
    return read_as(backend, layout.answer_path(attempt.path, name), Answer)
