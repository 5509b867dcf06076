"""Reads and writes the documents that a running training exchanges: triggers, requests and answers.

A trigger is an event that makes all ranks store the iterations that they hold. It is one small document, written by
the rank on which the event happened. Ranks need no agreement and no lock, because the name of the document gives the
iteration.

A request is a user's request to a running training. It is one document that never changes. Its answer is another
document, written by the coordinator only. A training validates the request before it uses it.

Each of these documents has a name of its own below the attempt.
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
"""The longest text of a trigger, in characters."""


class TriggerKind(enum.StrEnum):
    """The kind of a trigger."""

    NAN = "nan"
    """A recorded tensor contained NaN."""
    INF = "inf"
    """A recorded tensor contained an infinity."""
    METRIC = "metric"
    """A metric of a recorded tensor exceeded its limit (`--trigger`)."""
    USER = "user"
    """The program called `capture.trigger`."""
    SIGNAL = "signal"
    """The process received a signal."""
    EXCEPTION = "exception"
    """The training ended with an uncaught exception, such as a collective that timed out."""
    DEATH = "death"
    """The training process died."""


_LATE_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
"""The signals that a launcher sends to the other ranks when one has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """An event on one rank."""

    kind: TriggerKind
    """Kind of the event."""
    iteration: Count
    """Training step in which it happened."""
    rank: Count
    """Rank on which it happened."""
    text: str
    """Description in one sentence: the value and the limit, the exception, or the signal."""
    where: dict[str, Any] = field(default_factory=dict)
    """The fields of the record that caused it; empty if no record did."""
    metric: str = ""
    """The metric that exceeded its limit; empty if there is none."""
    value: float | None = None
    """The value of the metric; None if there is none or it is not finite."""
    signal: str = ""
    """The signal that ended the process or requested the trigger; empty if there was none or it is not known."""
    traceback: str = ""
    """The last frames of the exception; empty if there was none."""
    time: float = 0.0
    """Time at which it was noticed, in seconds since 1970."""
    attempt: int = 0
    """Number of the attempt."""
    is_stored: bool = True
    """Whether the iterations around it are stored; False after `MAX_STORED` triggers of one kind."""
    count: Count = 1
    """Number of triggers of this kind and rank that it stands for: this one and later ones."""
    last_iteration: Count | None = None
    """The iteration of the last of them; None if it stands for itself only."""

    def __post_init__(self) -> None:
        """Refuse values by which triggers cannot be sorted."""
        if type(self.where.get("counter", 0)) is not int:
            raise ValueError(f"Expected `int` as `counter` of the record, got {self.where['counter']!r:.60}")

    @property
    def order(self) -> tuple[int, int, int, int, float]:
        """The sort key: a value precedes the crash it led to, and a crash precedes its effect on other ranks."""
        if self.kind is TriggerKind.EXCEPTION:
            rank_of_kind = 2
        elif self.kind is TriggerKind.DEATH:
            rank_of_kind = 3 if self.signal in _LATE_SIGNALS else 1
        else:
            rank_of_kind = 0
        return self.attempt, self.iteration, rank_of_kind, self.where.get("counter", 0), self.time

    def message(self) -> str:
        """The trigger as one line of text."""
        repeated = "" if self.count == 1 else f", and {self.count - 1} more until iteration {self.last_iteration}"
        noted = "" if self.is_stored else "; nothing is stored for it, as this kind of trigger happened too often"
        return f"iteration {self.iteration}, rank {self.rank}: {self.text}{repeated}{noted}"

    def to_json(self) -> dict[str, Any]:
        """The trigger as a dictionary for JSON and Zarr attributes."""
        return {**dataclasses.asdict(self), "kind": self.kind.value, "where": dict(self.where)}


MAX_STORED = 100
"""The number of triggers of one kind for which all ranks store their iterations. Later triggers are only counted."""


def write_trigger(backend: Backend, *, attempt: Attempt, trigger: Trigger, number: int = 0) -> None:
    """Write a trigger for all ranks of an attempt; `number` distinguishes those of one rank and iteration."""
    check_attempt(backend, attempt)
    if number == 0:
        write_group(backend, layout.triggers_path(attempt.path), {})
    path = layout.trigger_path(attempt.path, trigger.iteration, trigger.rank, number=number)
    write_group(backend, path, {**trigger.to_json(), "text": trigger.text[:MAX_TEXT]})


def list_triggers(backend: Backend, attempt: Attempt) -> set[str]:
    """The names of an attempt's triggers. It takes one LIST request."""
    return {name for name in backend.list_names(layout.triggers_path(attempt.path)) if layout.is_trigger(name)}


def count_triggers(backend: Backend, attempt: Attempt) -> int:
    """The number of triggers of an attempt. Documents are read only if one of them may stand for several triggers."""
    names = list_triggers(backend, attempt)
    if len(names) <= MAX_STORED:
        return len(names)
    return sum(trigger.count for trigger in read_triggers(backend, attempt, names))


def read_triggers(backend: Backend, attempt: Attempt, names: Collection[str] | None = None) -> list[Trigger]:
    """The triggers of an attempt, or those with the given names, sorted by `order`. Damaged ones are ignored."""
    chosen = sorted(list_triggers(backend, attempt) if names is None else names)
    triggers = for_each(lambda name: _read_trigger(backend, attempt, name), chosen)
    return sorted((trigger for trigger in triggers if trigger is not None), key=lambda trigger: trigger.order)


def merge_repeated(triggers: Iterable[Trigger]) -> list[Trigger]:
    """The triggers with repetitions merged: of those of one rank, kind and text, the first with their total count."""
    merged: dict[tuple[Any, ...], Trigger] = {}
    for trigger in triggers:
        key = trigger.attempt, trigger.rank, trigger.kind, trigger.metric or trigger.text, trigger.is_stored
        first = merged.setdefault(key, trigger)
        if first is not trigger:
            last = trigger.iteration if trigger.last_iteration is None else trigger.last_iteration
            merged[key] = dataclasses.replace(first, count=first.count + trigger.count, last_iteration=last)
    return list(merged.values())


def _read_trigger(backend: Backend, attempt: Attempt, name: str) -> Trigger | None:
    try:
        return read_as(backend, f"{layout.triggers_path(attempt.path)}/{name}", Trigger, attempt=attempt.number)
    except (DataError, RunFormatError):
        return None  # 'ranktape check' names it


MAX_ITERATIONS = 1000
"""The largest number of iterations of one request."""

MAX_SELECTION = 4000
"""The longest selection of a request, in characters. Every rank receives it through its ring."""

_MAX_NAME = 200
"""The longest name of a requester, in characters."""

_MAX_VALUES = 200
"""The largest number of texts of a selection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to a running training to record iterations."""

    num_iterations: Annotated[int, Meta(ge=1, le=MAX_ITERATIONS)]
    """Number of iterations."""
    settings: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """The selection, by the names of the capture's settings; empty for the capture's own selection."""
    by: str = ""
    """The requester: user and host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The coordinator's answer to a request."""

    iterations: tuple[Count, ...] = ()
    """The iterations that all ranks record; empty if the request is refused."""
    is_held: bool = False
    """Whether a flight recorder answers: the iterations that its ranks hold around the named one are stored."""
    refusal: str = ""
    """Why the request is refused; empty if it is not."""


def write_request(backend: Backend, *, attempt: Attempt, request: Request) -> str:
    """Write a request to the coordinator of an attempt, and return its name, which the answer will have."""
    # Names sort by time, as far as clocks agree.
    name = f"{int(time.time() * 1000):012x}{secrets.token_hex(4)}"
    attributes = {**dataclasses.asdict(request), "by": request.by[:_MAX_NAME], "written": time.time()}
    key = layout.document_key(layout.request_path(attempt.path, name))
    write_group(backend, layout.control_path(attempt.path), {})
    backend.create(key, encode_document(group_document(attributes), key=key))
    return name


def list_requests(backend: Backend, attempt: Attempt) -> tuple[list[str], set[str]]:
    """The names of all requests in order of time, and of those that are answered. It takes one LIST request."""
    requests, answers = [], set()
    for name in backend.list_names(layout.control_path(attempt.path)):
        kind, token = layout.parse_control(name)
        if kind is layout.KeyKind.REQUEST:
            requests.append(token)
        elif kind is layout.KeyKind.ANSWER:
            answers.add(token)
    return sorted(requests), answers


def read_request(backend: Backend, *, attempt: Attempt, name: str) -> Request | None:
    """The request of that name; None if there is none."""
    path = layout.request_path(attempt.path, name)
    request = read_as(backend, path, Request)
    if request is None:
        return None
    texts = [text for one in request.settings.values() for text in ([one] if isinstance(one, str) else one)]
    if len(texts) > _MAX_VALUES or sum(map(len, [*request.settings, *texts])) > MAX_SELECTION:
        raise RunFormatError(f"{backend.url}/{path} selects with more than {MAX_SELECTION} characters")
    return dataclasses.replace(request, by=request.by[:_MAX_NAME])


def write_answer(backend: Backend, *, attempt: Attempt, name: str, answer: Answer) -> None:
    """Write the answer to a request."""
    attributes = {**dataclasses.asdict(answer), "written": time.time()}
    write_group(backend, layout.answer_path(attempt.path, name), attributes)


def read_answer(backend: Backend, *, attempt: Attempt, name: str) -> Answer | None:
    """The answer to a request; None if there is none yet."""
    return read_as(backend, layout.answer_path(attempt.path, name), Answer)
