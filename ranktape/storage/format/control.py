"""Writes and reads what people ask of a training that runs, and what its coordinator answers.

A request is one document below the attempt, created under a name of its own and never changed; its answer another one,
written by the coordinator alone. What a request says is read by a training: it is compared with what it may be, and
only data.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from ranktape.errors import RunFormatError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import Attempt
from ranktape.storage.format.documents import (
    encode_document,
    group_document,
    read_as,
    write_group,
)
from ranktape.storage.format.validation import Count
from ranktape.storage.places.backend import Backend

MAX_ITERATIONS = 1000
"""Iterations that one request may ask for."""

MAX_SELECTION = 4000
"""Characters of all texts of a request's selection: every rank is told of it through its ring."""

_MAX_TEXT = 200
_MAX_VALUES = 200


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
    """Leave a request for the coordinator of an attempt; the name by which it is answered.

    Raises:
        StorageError: the store cannot be written.
    """
    # Names tell which one came first, as far as clocks agree.
    name = f"{int(time.time() * 1000):012x}{secrets.token_hex(4)}"
    attributes = {**dataclasses.asdict(request), "by": request.by[:_MAX_TEXT], "written": time.time()}
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
    """A request as its document says; None where there is none.

    Raises:
        DataError: the document is not what was written.
        RunFormatError: it says what no request does.
    """
    path = layout.request_path(attempt.path, name)
    request = read_as(backend, path, Request)
    if request is None:
        return None
    texts = [text for one in request.settings.values() for text in ([one] if isinstance(one, str) else one)]
    if len(texts) > _MAX_VALUES or sum(map(len, [*request.settings, *texts])) > MAX_SELECTION:
        raise RunFormatError(f"{backend.url}/{path} selects with more than {MAX_SELECTION} characters")
    return dataclasses.replace(request, by=request.by[:_MAX_TEXT])


def write_answer(backend: Backend, *, attempt: Attempt, name: str, answer: Answer) -> None:
    """Answer a request.

    Raises:
        StorageError: the store cannot be written.
    """
    attributes = {**dataclasses.asdict(answer), "written": time.time()}
    write_group(backend, layout.answer_path(attempt.path, name), attributes)


def read_answer(backend: Backend, *, attempt: Attempt, name: str) -> Answer | None:
    """What was answered to a request; None where nothing was yet.

    Raises:
        DataError: the document is not what was written.
        RunFormatError: it says what no answer does.
    """
    return read_as(backend, layout.answer_path(attempt.path, name), Answer)
