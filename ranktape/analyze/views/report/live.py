"""Keeps the page of a run up to date while it is recorded: built anew when an iteration is complete."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ranktape.analyze.engine.values import View
from ranktape.analyze.options import Selection
from ranktape.analyze.questions.swept import parse_jobs
from ranktape.analyze.views.report.page import FORMATS, Live, model_of, page_bytes, waiting_bytes
from ranktape.errors import RanktapeError, UsageError
from ranktape.storage.format.memory import nbytes_text
from ranktape.storage.maintenance.watch import Snapshot, Watcher
from ranktape.storage.places.failures import printable
from ranktape.storage.places.urls import open_backend
from ranktape.storage.records.run import Run

if TYPE_CHECKING:
    from ranktape.analyze.engine.engine import Engine

MAX_NAMED = 3
"""Iterations that are begun and not complete, and that the text names."""


class LivePage:
    """The page of a selection of a run, as it was when `look` was called last; other threads may read it meanwhile."""

    def __init__(
        self,
        selection: Selection,
        *,
        format: Sequence[str] = (),  # noqa: A002 - the option's name
        view: View | None = None,
        interval: float,
        engine: Engine | None = None,
    ) -> None:
        """Open the run.

        Raises:
            RunNotFoundError: there is no run.
            StorageError: the store cannot be read.
            UsageError: the place holds files and no run; a filter or a format is not allowed.
        """
        source = selection.source()
        if not isinstance(source, Run):
            raise UsageError(
                f"{selection.run} is not one run that grows: name one; of others 'ranktape analyze report' makes a page"
            )
        parse_jobs(format or FORMATS)
        # What no record could answer is refused before there is one.
        empty = source.select().take([])
        empty = empty.select(**selection.filters)
        if selection.where is not None:
            empty.where(selection.where)
        self._selection, self._run = selection, source
        self._formats, self._view, self._engine = format or FORMATS, view or View.COMPUTE, engine
        self._milliseconds = round(1000 * interval)
        self._watcher = Watcher(open_backend(selection.run, storage_options=selection.storage_options))
        self._shown: tuple[int, ...] = ()
        self._not_before = 0.0
        self._state = Live(version=0, text="", milliseconds=self._milliseconds)
        self._say("nothing was looked at yet")
        self.content = waiting_bytes(self._title, live=self._state)
        """The page, as bytes."""

    @property
    def state(self) -> dict[str, Any]:
        """What the page asks for: its number, and how far the run is."""
        return {"version": self._state.version, "text": self._state.text}

    @property
    def _title(self) -> str:
        return f"What the numbers do in {printable(self._run.url)}"

    def look(self) -> None:
        """See how far the run is, and build the page if more is complete.

        A store that cannot be read just now is a text on the page, which stays as it is; so is a selection that nothing
        matches yet. Between two pages passes as much time as the first of them took, at least.
        """
        try:
            snapshot = self._watcher.look()
            self._say(_text(snapshot))
            complete = () if snapshot is None else snapshot.complete
            if complete != self._shown and time.monotonic() >= self._not_before:
                self._build(complete)
        except RanktapeError as error:
            self._say(f"The page stays as it is: {printable(str(error))}")

    def _build(self, complete: tuple[int, ...]) -> None:
        began = time.monotonic()
        self._run.refresh()
        selection = self._selection
        chosen = [f"{field} {','.join(values)}" for field, values in selection.filters.items()]
        try:
            model = model_of(
                selection.chosen(self._run),
                view=self._view,
                format=self._formats,
                url=self._run.url,
                scope=" and ".join([*chosen, *([selection.where] if selection.where else [])]),
                environment=self._run.environment(),
                engine=self._engine,
            )
        finally:
            now = time.monotonic()
            self._not_before = now + (now - began)
        live = Live(version=self._state.version + 1, text=self._state.text, milliseconds=self._milliseconds)
        # First the page: who hears of a new one finds it.
        self.content = page_bytes(model, view=self._view, live=live)
        self._state, self._shown = live, complete

    def _say(self, text: str) -> None:
        self._state = Live(version=self._state.version, text=text, milliseconds=self._milliseconds)

    def check(self) -> None:
        """Build the first page of what is complete already.

        Raises:
            NoRecordsError: iterations are complete, and nothing in them matches the filters.
            RanktapeError: the run cannot be read.
        """
        if not self._run.iterations:
            self.look()
            return
        self._selection.chosen(self._run)
        self.look()


def _text(snapshot: Snapshot | None) -> str:
    """How far a run is, in one line."""
    if snapshot is None:
        return "No rank has begun to record."
    complete = snapshot.complete
    last = f", the last one {complete[-1]}" if complete else ""
    parts = [f"{len(complete)} of {snapshot.required} guaranteed iterations are complete{last}"]
    for iteration, ranks in list(snapshot.waiting.items())[-MAX_NAMED:]:
        parts.append(f"iteration {iteration} is stored by {len(ranks)} of {len(snapshot.ranks)} ranks")
    parts.append(f"{nbytes_text(snapshot.nbytes)} are stored")
    state = "The run is closed" if snapshot.is_closed else "The run is being recorded"
    return f"{state}: {'; '.join(parts)}."
