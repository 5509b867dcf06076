"""Gives what stands out in a run that is still being recorded, found anew when one more iteration is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ranktape.errors import StorageError

if TYPE_CHECKING:
    from ranktape.analyze.questions.findings import FindingsTable
    from ranktape.storage import Run


class WatchedFindings:
    """Looks for findings beside the watch, which goes on meanwhile; what was counted of a record is kept with the run.

    So of every iteration the values are read once.
    """

    def __init__(self, run: str, storage_options: Mapping[str, Any] | None) -> None:
        self._place = run, storage_options
        self._run: Run | None = None
        self._pool = ThreadPoolExecutor(1)
        self._asked: Future[FindingsTable] | None = None
        self._about: tuple[int, ...] = ()
        self._found: FindingsTable | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def look(self, complete: Sequence[int], *, is_last: bool = False) -> FindingsTable | None:
        """What was found last, and begin to look again where more is complete; None before the first answer.

        The last time it waits for the answer about these iterations.

        Raises:
            DataError: a record's bytes are missing or damaged.
            StorageError: the last time, the store cannot be read.
        """
        if self._asked is not None and (is_last or self._asked.done()):
            self._take(self._asked)
            self._asked = None
        if self._asked is None and tuple(complete) != self._about and complete:
            self._about = tuple(complete)
            self._asked = self._pool.submit(self._find)
        if is_last and self._asked is not None:
            self._found = self._asked.result()
        return self._found

    def _take(self, asked: Future[FindingsTable]) -> None:
        try:
            self._found = asked.result()
        except StorageError:
            # An iteration may be removed while it is read, and a store be away for a moment: it is asked again.
            self._about = ()

    def _find(self) -> FindingsTable:
        from ranktape.analyze.questions.findings import findings
        from ranktape.storage import open_run

        url, options = self._place
        if self._run is None:
            self._run = open_run(url, storage_options=options)
        else:
            self._run.refresh()
        return findings(self._run.select())
