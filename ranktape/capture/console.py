"""The messages of a capture to the user.

They go to stderr, once for the whole launch: from rank 0, except for problems of a single rank. They have no colour,
because the output of several ranks and of the training is mixed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ranktape.storage.places.backend import nbytes_text
from ranktape.storage.places.failures import printable

if TYPE_CHECKING:
    from ranktape.capture.hooks.coverage import Coverage
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.capture.sites import IterationTally
    from ranktape.capture.source import Source


def write_line(text: str) -> None:
    """Write one line to stderr, with control characters escaped. A progress bar of tqdm moves below it."""
    line = f"ranktape: {printable(text)}"
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if tqdm is None:
        sys.stderr.write(f"{line}\n")
    else:
        tqdm.write(line, file=sys.stderr)
    sys.stderr.flush()


_MAX_NAMED = 5
_MAX_SITES = 8
_MAX_UNMATCHED = 8
"""Maximum number of unmatched names with a warning each."""
_MAX_WAITING = 100
"""Largest number of iterations that fit into the host budget by their bytes alone; small tensors take more memory."""
_DRAIN_INTERVAL = 5
"""Number of calls of `show_drain` for each line."""


class Console:
    """Writes the messages of one rank to stderr."""

    def __init__(self, *, rank: int, wording: Callable[[str], str] = str) -> None:
        self.rank = rank
        self._wording = wording
        self._written: set[str] = set()
        self._reported_modes: set[str | None] = set()
        """The ways of recording compiled code that have been reported: reasons for eager mode, or None."""
        self._num_drains = 0
        self._num_sites = 0

    def say(self, text: str) -> None:
        """Write a line, only on rank 0."""
        if self.rank == 0:
            write_line(self._wording(text))

    def warn(self, text: str, *, is_for_all_ranks: bool = False) -> None:
        """Write a warning, on rank 0 or, if `is_for_all_ranks`, on any rank with its number."""
        if is_for_all_ranks or self.rank == 0:
            prefix = f"[rank {self.rank}] " if is_for_all_ranks else ""
            write_line(f"warning: {prefix}{self._wording(' '.join(text.split()))}")

    def pass_on(self, status: Mapping[str, Any]) -> None:
        """Write the warnings in a message from the writer process, each one once."""
        for text in (*status.get("notices", ()), status.get("problem")):
            if text is not None:
                self.warn_once(str(text))

    def warn_once(self, text: str, *, is_for_all_ranks: bool = True) -> None:
        """Write a warning unless it has been written before. See `warn`."""
        if text not in self._written:
            self._written.add(text)
            self.warn(text, is_for_all_ranks=is_for_all_ranks)

    def warn_of_site(self, text: str) -> None:
        """Warn that a site of this rank is disabled. If there are many, only the first ones are named."""
        self._num_sites += 1
        if self._num_sites <= _MAX_SITES + 1:
            is_named = self._num_sites <= _MAX_SITES
            self.warn_once(text if is_named else "further sites are disabled: 'ranktape status' names them")

    def warn_of_unmatched(self, notes: Sequence[str]) -> None:
        """Warn of names in the selection that match nothing. If there are many, only the first ones are named."""
        for note in notes[:_MAX_UNMATCHED]:
            self.warn_once(note)
        if len(notes) > _MAX_UNMATCHED:
            self.warn_once(f"{len(notes) - _MAX_UNMATCHED} more names of the selection match nothing")

    def warn_of(self, options: CaptureOptions) -> None:
        """Warn of settings without the effect that they seem to have."""
        keep_last, target = options.keep_last, options.target_iterations
        if keep_last is not None and keep_last >= target:
            self.warn(
                f"--keep-last {keep_last} deletes nothing, as capture ends after {target} iterations: give a larger "
                f"--max-iterations"
            )

    def tell_of_past(self, options: CaptureOptions, *, past: Sequence[int], planned: Sequence[int]) -> None:
        """Warn of requested iterations that are not complete and come before the first iteration of the training."""
        if past and (options.start_at or not planned):
            self.warn(
                f"iterations {_shown(past)} come before --first-iteration {options.first_iteration} and cannot be "
                f"captured: {_shown(planned) or 'none'} will be"
            )

    def show_matched(
        self,
        tally: IterationTally,
        *,
        sources: Collection[Source],
        iterations: Sequence[int],
        min_iterations: int,
        record_last: int | None,
        budget_nbytes: int,
        url: str,
        coverage: Coverage | None,
        silent: Sequence[str],
    ) -> None:
        """Tell which layers are captured and how large an iteration is, after the first one.

        `silent` has messages about missing tensors.
        """
        kinds = Counter(source.layer_type for source in sources)
        layers = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        by_keep = "".join(f", {count} as {keep}" for keep, count in sorted(tally.kept.items()) if keep != "values")
        stored = by_keep and f", of which {nbytes_text(tally.stored_nbytes)} are stored"
        if tally.stored_nbytes > tally.nbytes:
            stored = f", for which {nbytes_text(tally.stored_nbytes)} are stored"
        if tally.kept["histogram"]:
            stored += " before compression"
        size = f"{tally.num_tensors} tensors{by_keep}, {nbytes_text(tally.nbytes)} per iteration and rank"
        num_waiting = budget_nbytes // max(tally.nbytes, 1)
        capacity = f"{num_waiting} iteration{'s' * (num_waiting > 1)}" if num_waiting else "less than one iteration"
        if num_waiting > _MAX_WAITING:
            capacity = f"more than {_MAX_WAITING} iterations"
        budget = f"(host budget {nbytes_text(budget_nbytes)}: memory for {capacity})"
        if record_last is not None:
            self.say(
                f"flight recorder of {layers} layers: {size} {budget}; the last {record_last} iterations are stored in "
                f"{url} after a trigger, and nothing before it"
            )
        else:
            self.say(
                f"capturing {layers} layers into {url}: {size}{stored} {budget}; iterations {_shown(iterations)}; "
                f"{min_iterations} guaranteed complete"
            )
        if coverage is not None:
            self.say(coverage.text())
            for line in coverage.lines(count=_MAX_NAMED):
                self.warn(f"not recorded: {line}")
        for line in silent[:_MAX_NAMED]:
            self.warn(f"not recorded: {line}")
        if len(silent) > _MAX_NAMED:
            self.warn(f"not recorded: {len(silent) - _MAX_NAMED} more: 'ranktape status' lists them")

    def tell_of_compiled(self, iterations: Sequence[int], *, why_eager: str | None) -> None:
        """Tell how compiled code is recorded, and in which iterations, once for each way."""
        if why_eager in self._reported_modes:
            return
        subject = "another part of the compiled code" if self._reported_modes else "the compiled code of the training"
        self._reported_modes.add(why_eager)
        if why_eager is None:
            description = "is recorded inside of its graphs ({}): each is compiled once more for that"
        else:
            description = "runs eagerly in captured iterations ({}), where results may differ in the last bits: "
        self.say(f"{subject} {description.format(_shown(iterations))}{why_eager or ''}")

    def show_drain(self, pending_nbytes: int, state: str) -> None:
        """Show the progress of storing the staged tensors. To be called about each second."""
        if self._num_drains % _DRAIN_INTERVAL == 0:
            remaining = f"storing captured tensors: {nbytes_text(pending_nbytes)} left" if pending_nbytes else None
            waits = "stored; waiting for the other ranks" if state == "waiting" else "committing captured iterations"
            self.say(remaining or waits)
        self._num_drains += 1

    def end_drain(self) -> None:
        """Tell that storing has finished, or has timed out."""
        if self._num_drains:
            self.say("done storing")


def _shown(iterations: Sequence[int]) -> str:
    more = f", ... {iterations[-1]}" if len(iterations) > _MAX_NAMED else ""
    return ", ".join(map(str, iterations[:_MAX_NAMED])) + more
