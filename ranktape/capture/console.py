"""What a capture tells the person at the terminal.

Everything goes to stderr, once for the whole launch: from rank 0, but for a rank's own trouble. No colour: the lines
of several ranks and of the training run together there.
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
    """One line, control characters escaped; a progress bar of the training stands below it then, not before it."""
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
"""Disabled sites that are warned of one by one."""
_DRAIN_INTERVAL = 5
"""Calls of `show_drain` between two lines."""


class Console:
    """Lines on stderr."""

    def __init__(self, *, rank: int, wording: Callable[[str], str] = str) -> None:
        self.rank = rank
        self._wording = wording
        self._told: set[str] = set()
        self._ways: set[str | None] = set()
        """How compiled code is recorded, as far as that was said."""
        self._num_drains = 0
        self._num_sites = 0

    def say(self, text: str) -> None:
        """One line, from rank 0."""
        if self.rank == 0:
            write_line(self._wording(text))

    def warn(self, text: str, *, is_for_all_ranks: bool = False) -> None:
        """One line of a warning; from every rank where each has its own."""
        if is_for_all_ranks or self.rank == 0:
            prefix = f"[rank {self.rank}] " if is_for_all_ranks else ""
            write_line(f"warning: {prefix}{self._wording(' '.join(text.split()))}")

    def pass_on(self, words: Mapping[str, Any]) -> None:
        """What the writer of this rank has to say, each thing once."""
        for text in (*words.get("notices", ()), words.get("problem")):
            if text is not None:
                self.warn_once(str(text))

    def warn_once(self, text: str, *, is_for_all_ranks: bool = True) -> None:
        """A line of a warning of this rank, or of rank 0 for all, unless it was there before."""
        if text not in self._told:
            self._told.add(text)
            self.warn(text, is_for_all_ranks=is_for_all_ranks)

    def warn_of_site(self, text: str) -> None:
        """Of a site of this rank that is disabled; of the first ones only, where it is many."""
        self._num_sites += 1
        if self._num_sites <= _MAX_SITES + 1:
            is_named = self._num_sites <= _MAX_SITES
            self.warn_once(text if is_named else "further sites are disabled: 'ranktape status' names them")

    def warn_of_unmatched(self, notes: Sequence[str]) -> None:
        """Of names in the selection that match nothing; of the first ones one by one."""
        for note in notes[:_MAX_UNMATCHED]:
            self.warn_once(note)
        if len(notes) > _MAX_UNMATCHED:
            self.warn_once(f"{len(notes) - _MAX_UNMATCHED} more names of the selection match nothing")

    def warn_of(self, options: CaptureOptions) -> None:
        """Of settings that do not what they seem to do."""
        keep_last, target = options.keep_last, options.target_iterations
        if keep_last is not None and keep_last >= target:
            self.warn(
                f"--keep-last {keep_last} deletes nothing, as capture ends after {target} iterations: give a larger "
                f"--max-iterations"
            )

    def tell_of_past(self, options: CaptureOptions, *, past: Sequence[int], planned: Sequence[int]) -> None:
        """Of iterations that were asked for, are not complete and come before the training's first step."""
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
        """What is captured of which sources, and what it costs, once the first iteration has shown it.

        `silent` says of gaps.
        """
        kinds = Counter(source.layer_type for source in sources)
        layers = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        kept = "".join(f", {count} as {keep}" for keep, count in sorted(tally.kept.items()) if keep != "values")
        stored = kept and f", of which {nbytes_text(tally.stored_nbytes)} are stored"
        if tally.stored_nbytes > tally.nbytes:
            stored = f", for which {nbytes_text(tally.stored_nbytes)} are stored"
        if tally.kept["histogram"]:
            stored += " before compression"
        what = f"{tally.num_tensors} tensors{kept}, {nbytes_text(tally.nbytes)} per iteration and rank"
        budget = f"(host budget {nbytes_text(budget_nbytes)})"
        if record_last is not None:
            self.say(
                f"flight recorder of {layers} layers: {what} {budget}; the last {record_last} iterations are stored in "
                f"{url} when something happens, and nothing until then"
            )
        else:
            self.say(
                f"capturing {layers} layers into {url}: {what}{stored} {budget}; iterations {_shown(iterations)}; "
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
        """How compiled code is recorded, in which iterations; each way once."""
        if why_eager in self._ways:
            return
        what = "another part of what the training compiles" if self._ways else "what the training compiles"
        self._ways.add(why_eager)
        if why_eager is None:
            how = "is recorded inside of its graphs ({}): each is compiled once more for that"
        else:
            how = "runs eagerly in captured iterations ({}), where results may differ in the last bits: "
        self.say(f"{what} {how.format(_shown(iterations))}{why_eager or ''}")

    def show_drain(self, pending_nbytes: int, state: str) -> None:
        """How far the storing of what was staged is; called about each second."""
        if self._num_drains % _DRAIN_INTERVAL == 0:
            left = f"storing what was captured: {nbytes_text(pending_nbytes)} left" if pending_nbytes else None
            waits = "stored; waiting for the other ranks" if state == "waiting" else "committing what was captured"
            self.say(left or waits)
        self._num_drains += 1

    def end_drain(self) -> None:
        """Everything is stored, or the wait is over."""
        if self._num_drains:
            self.say("done storing")


def _shown(iterations: Sequence[int]) -> str:
    more = f", ... {iterations[-1]}" if len(iterations) > _MAX_NAMED else ""
    return ", ".join(map(str, iterations[:_MAX_NAMED])) + more
