"""Answers people who ask a running training to record iterations.

Each request changes the plan, from an iteration on that no rank has reached, and is answered with what will happen. The
plan says which request each iteration is for, so that a coordinator that follows a killed one answers as that one did.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection

from ranktape.capture.settings.options import CaptureOptions
from ranktape.errors import DataError, RunFormatError, UsageError
from ranktape.storage.format.attempt import Asked, Attempt, IterationPlan
from ranktape.storage.format.live import (
    Answer,
    Request,
    list_requests,
    read_request,
    write_answer,
)
from ranktape.storage.places.backend import Backend

MAX_ASKED = 10_000
"""Iterations that may be asked for in one attempt: all of them stand in the plan, which every rank reads."""

MAX_REPLACED = 3
"""Times that iterations are named anew for a request, where ranks learned of the others too late."""

ENDED = "the training has ended"
"""The refusal to those who ask then."""

_RECORDER = "a flight recorder stores what it holds: how much that is, --record-last has said"


class Requests:
    """What was asked of one attempt."""

    def __init__(
        self,
        backend: Backend,
        *,
        attempt: Attempt,
        options: CaptureOptions,
        first_unknown: Callable[[int], int],
        announce: Callable[[IterationPlan], None],
        store_held: Callable[[str], int | str],
    ) -> None:
        """Know none yet.

        Args:
            backend: Where the run is.
            attempt: The one of which something may be asked.
            options: Of the capture.
            first_unknown: Gives the first iteration that no rank will have reached before it knows of it, by how often
                ranks knew too late.
            announce: Tells all ranks of a plan.
            store_held: Has all ranks of a flight recorder store what they hold, because somebody asked; the iteration
                that the training is in, or the refusal.
        """
        self._backend = backend
        self._attempt = attempt
        self._options = options
        self._first_unknown = first_unknown
        self._announce = announce
        self._store_held = store_held
        self._answered: set[str] = set()
        self._num_replaced: dict[str, int] = {}

    def answer_all(self, plan: IterationPlan, *, refusal: str | None = None) -> IterationPlan:
        """Answer what is not answered yet, all of it with a refusal where there is one; the plan from now on.

        Raises:
            StorageError: the store cannot be read or written; what is not answered is looked at again.
        """
        names, answered = list_requests(self._backend, self._attempt)
        for name in names:
            if name in answered or name in self._answered:
                continue
            try:
                request = read_request(self._backend, attempt=self._attempt, name=name)
            except (DataError, RunFormatError) as error:
                answer = Answer(refusal=f"the request is damaged: {error}")
            else:
                if request is None:
                    continue  # it was taken back
                plan, answer = self._obey(name, request, plan, refusal=refusal)
            write_answer(self._backend, attempt=self._attempt, name=name, answer=answer)
            self._answered.add(name)
        return plan

    def replace(self, plan: IterationPlan, *, settled: Collection[int], complete: Collection[int]) -> IterationPlan:
        """Name further iterations for requests of which some were not recorded everywhere; the plan from now on.

        Args:
            plan: The plan so far.
            settled: The iterations that will not change any more.
            complete: Those of them that are stored complete.

        Raises:
            StorageError: the store cannot be written.
        """
        for one in plan.asked:
            lost = one.num_iterations - len(set(one.iterations) & set(complete))
            num_replaced = self._num_replaced.get(one.name, 0)
            is_open = bool(set(one.iterations) - set(settled))
            if is_open or lost <= 0 or num_replaced >= MAX_REPLACED:
                continue
            self._num_replaced[one.name] = num_replaced + 1
            further = self._free(plan, count=lost, num_late=num_replaced + 1)
            named = dataclasses.replace(one, iterations=(*one.iterations, *further))
            asked = tuple(named if each.name == one.name else each for each in plan.asked)
            plan = self._with(plan, further, asked=asked)
        return plan

    def _obey(
        self, name: str, request: Request, plan: IterationPlan, *, refusal: str | None
    ) -> tuple[IterationPlan, Answer]:
        """The plan with what is asked for, and the answer."""
        known = next((one for one in plan.asked if one.name == name), None)
        if known is not None:
            return plan, Answer(iterations=known.iterations)
        refusal = refusal or self._refusal(request, plan)
        if refusal is not None:
            return plan, Answer(refusal=refusal)
        if self._options.record_last is not None:
            held = self._store_held(request.by)
            return plan, Answer(refusal=held) if isinstance(held, str) else Answer(iterations=(held,), is_held=True)
        iterations = self._free(plan, count=request.num_iterations)
        own = Asked(
            name=name, iterations=iterations, num_iterations=request.num_iterations, settings=dict(request.settings)
        )
        return self._with(plan, iterations, asked=(*plan.asked, own)), Answer(iterations=iterations)

    def _refusal(self, request: Request, plan: IterationPlan) -> str | None:
        """Why nothing is done."""
        if self._options.manual:
            return "the program saves tensors by hand: no hooks are attached in any iteration"
        if self._options.record_last is not None:
            is_plain = request.num_iterations == 1 and not request.settings
            return None if is_plain else _RECORDER
        num_asked = sum(len(one.iterations) for one in plan.asked)
        if num_asked + request.num_iterations > MAX_ASKED:
            return f"{num_asked} iterations were asked for already, and {MAX_ASKED} may be"
        return self._mistake(request)

    def _mistake(self, request: Request) -> str | None:
        """What is wrong with a selection."""
        try:
            self._options.asked(request.settings)
        except UsageError as error:
            return str(error)
        return None

    def _free(self, plan: IterationPlan, *, count: int, num_late: int = 0) -> tuple[int, ...]:
        """The next iterations that are not planned already."""
        taken = {*plan.iterations, *self._attempt.completed}
        later = (iteration for iteration in itertools.count(self._first_unknown(num_late)) if iteration not in taken)
        return tuple(itertools.islice(later, count))

    def _with(self, plan: IterationPlan, iterations: tuple[int, ...], *, asked: tuple[Asked, ...]) -> IterationPlan:
        named = tuple(sorted({*plan.iterations, *iterations}))
        plan = dataclasses.replace(plan, iterations=named, asked=asked, is_done=False)
        self._announce(plan)
        return plan
