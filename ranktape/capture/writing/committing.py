"""This rank's word on each iteration, and its way into the store.

An iteration is committed once all of its tensors are stored; else a marker says why not. A marker that cannot be
written, as the store does not answer, is owed, and written when it answers again.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ranktape.capture.staging.ring_file import Counter, Slot
from ranktape.capture.writing.recover import Left, Recovery, expectations, lost_tensors
from ranktape.capture.writing.storing import Staged, Storer
from ranktape.errors import RanktapeError
from ranktape.storage.format import layout
from ranktape.storage.format.attempt import check_attempt
from ranktape.storage.format.commit import mark_committed
from ranktape.storage.format.documents import MAX_COMMIT_NBYTES, read_document, write_group
from ranktape.storage.format.layout import Mark
from ranktape.storage.format.progress import open_iteration
from ranktape.storage.maintenance.copy import SPILLED_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwedMark:
    """A marker that is to be written."""

    iteration: int
    """Training step."""
    mark: Mark
    """What became of it."""
    reason: str
    """Why."""
    lacks_space: bool = False
    """Whether what is stored of it must make room."""
    waits_in: str | None = None
    """Where it waits to be pushed: what is stored of it must stay."""


class Committer:
    """Commits iterations in their order, in a thread of its own."""

    def __init__(
        self,
        storer: Storer,
        *,
        say: Callable[..., None],
        on_word: Callable[[int], None],
        num_committed: int = 0,
    ) -> None:
        """Begin; `on_word` is called with each iteration on which the rank has had its word."""
        self._storer = storer
        self._rank_writer = storer.rank_writer
        self._ring = storer.ring
        self._backend = storer.backend
        self._spill = storer.spill
        self._attempt = storer.attempt
        self._rank = storer.config.rank
        self._say = say
        self._on_word = on_word
        # Commits flush the disk: while they do, the tensors of the next iteration are stored.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ranktape-commit")
        self._owed: list[_OwedMark] = []
        self._lock = threading.Lock()
        self.num_committed = num_committed
        """Iterations that the rank has committed into the store."""

    def commit(self, staged: Staged, end: Slot | None) -> None:
        """Commit an iteration when all before it are settled, and free the slot that ended it, if one did."""
        if end is not None:
            # At once: the room behind it is free only when it is, and a commit can take as long as an outage.
            self._ring.free(end)
        self._submit(self._commit, staged, end)

    def commit_cut_off(self, staged: Staged, header: dict[str, Any]) -> None:
        """Commit what came of an iteration that did not end, when all before it are settled; the header says so."""
        self._submit(self._commit, staged, None, header)

    def pass_over(self) -> None:
        """An iteration that was held is let go: nobody is told of it."""
        self._submit(self._ring.advance, Counter.SETTLED)

    def mark(self, iteration: int, mark: Mark, reason: str) -> None:
        """Say of an iteration, when all before it are settled, that it is not recorded."""
        self._submit(self._mark, _OwedMark(iteration=iteration, mark=mark, reason=reason))

    def recover(self, recovery: Recovery, iteration: int, left: Left) -> None:
        """Settle an iteration that had ended when the writer before this one was killed, and free its slots."""
        self._submit(self._recover, recovery, iteration, left)

    def close(self) -> None:
        """Wait for all that was asked for, and try once more to write what is owed."""
        self._pool.shutdown()
        self._settle()

    def stop(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, work: Callable[..., None], *given: Any) -> None:
        def guarded() -> None:
            try:
                work(*given)
            except Exception as error:  # noqa: BLE001  # a defect of ours must cost neither what follows nor our silence
                self._say(problem=f"a commit went wrong: {type(error).__name__}: {error}")
                traceback.print_exc()

        self._pool.submit(guarded)

    def _commit(self, staged: Staged, end: Slot | None, words: dict[str, Any] | None = None) -> None:
        header = words or ({"expected": [], "silent_sites": {}} if end is None else end.header)
        num_tensors = header.get("num_tensors", staged.num_tensors)
        if num_tensors != staged.num_tensors:
            self._storer.fail(staged, f"{staged.num_tensors} of the {num_tensors} tensors came out of the ring")

        why_spilled: str | None = None

        def commit() -> None:
            nonlocal why_spilled
            why_spilled = self._rank_writer.commit(staged.iteration, **expectations(header, notes=staged.notes))

        failure, waits_in = self._storer.finish(staged, commit), None
        if failure is not None and staged.lacks_space and self._spill is None:
            failure = f"{failure}; --spill-dir DIR takes what the store has no room for, until 'ranktape push'"
        if failure is None and self._spill is not None and why_spilled is not None:
            waits_in = self._spill.place
            failure = f"it waits in {waits_in} for 'ranktape push', as the store did not take it ({why_spilled})"
        if failure is None:
            self.num_committed += 1
            if lost := lost_tensors(staged.notes):
                place, reason = next(iter(lost.items()))
                self._say(notice=f"iteration {staged.iteration}: {len(lost)} tensors are lost ({place}: {reason})")
            self._had_word(staged.iteration)
            self._settle()
        else:
            lacks_space = staged.lacks_space and waits_in is None
            self._mark(
                _OwedMark(
                    iteration=staged.iteration,
                    mark=Mark.FAILED,
                    reason=failure,
                    lacks_space=lacks_space,
                    waits_in=waits_in,
                )
            )

    def _recover(self, recovery: Recovery, iteration: int, left: Left) -> None:
        try:
            with self._storer.trying():
                recovery.settle(iteration, left)
        except RanktapeError as error:
            self._rank_writer.abandon(iteration)
            self._mark(_OwedMark(iteration=iteration, mark=Mark.FAILED, reason=str(error)))
        else:
            if (reason := recovery.failed.get(iteration)) is not None:
                self._say(problem=f"iteration {iteration} is not stored by rank {self._rank}: {reason}")
            self.num_committed += iteration in recovery.committed
            self._had_word(iteration)
        finally:
            for slot in (*left.words, *left.tensors):
                self._ring.free(slot)

    def _mark(self, word: _OwedMark) -> None:
        self._say(problem=f"iteration {word.iteration} is not stored by rank {self._rank}: {word.reason}")
        with self._lock:
            self._owed.append(word)
        self._settle()
        self._had_word(word.iteration)

    def _had_word(self, iteration: int) -> None:
        self._ring.advance(Counter.SETTLED)
        self._say(num_committed=self.num_committed)
        self._on_word(iteration)

    def _settle(self) -> None:
        """Write what is owed, until the store refuses."""
        while self._owed:
            word = self._owed[0]
            try:
                self._write(word)
            except RanktapeError as error:
                self._say(problem=f"iteration {word.iteration}: {word.reason}; and that cannot be written: {error}")
                return
            with self._lock:
                self._owed.pop(0)

    def _write(self, word: _OwedMark) -> None:
        attempt, iteration = self._attempt.path, word.iteration
        check_attempt(self._backend, self._attempt)
        group = layout.rank_iteration_path(attempt, self._rank, iteration)
        is_failed = word.mark is Mark.FAILED
        commit = read_document(self._backend, group, max_nbytes=MAX_COMMIT_NBYTES) if is_failed else None
        if commit is not None:
            # The answer to its last request was lost, or its marker could not be written: it is whole all the same.
            self.num_committed += 1
            mark_committed(self._backend, attempt, self._rank, iteration, commit=commit)
            return
        if word.lacks_space:
            # Before anything is written: it may be what fills the store.
            self._backend.delete(group)
        if self._storer.config.is_first:
            open_iteration(self._backend, attempt=self._attempt, iteration=iteration)
        words = {"reason": word.reason} | ({} if word.waits_in is None else {SPILLED_KEY: word.waits_in})
        write_group(self._backend, layout.marker_path(attempt, iteration, self._rank, word.mark), words)
