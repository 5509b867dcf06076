"""Ends the training of all ranks before one iteration, once what was asked for is stored.

Whichever rank comes first to an iteration says in the ranks' key-value store that it begins, unless rank 0 has said
before that it does not; every rank obeys what was said first. So none needs to be told in time, and none waits.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.util
import os
from collections.abc import Callable

import torch.distributed as dist

from ranktape.capture.rendezvous import Rendezvous

_BEGINS, _STOPS = "begins", "stops"

_KEPT = 64
"""Iterations behind rank 0 of which the word is kept; a rank that is further behind says the same again."""


class EndOfProcess:
    """Ends the process groups with the process, where we have ended its training."""

    def __init__(self) -> None:
        self.is_ours = False
        """Whether we have."""
        self._owner = os.getpid()
        if multiprocessing.parent_process() is None:
            atexit.register(self._end_groups)
        else:  # such a process runs no handlers of `atexit` if it was forked
            multiprocessing.util.Finalize(None, self._end_groups, exitpriority=0)

    def _end_groups(self) -> None:
        """What the script would have done had it come to its end; it may have done so in a `finally`."""
        if self.is_ours and os.getpid() == self._owner and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


@functools.cache
def end_of_process() -> EndOfProcess:
    """That of this process; asked for before a script runs, it comes after what the script does at its end."""
    return EndOfProcess()


class StopGate:
    """What every rank passes before each iteration."""

    def __init__(self, rendezvous: Rendezvous, *, is_first: bool, on_failure: Callable[[str], None]) -> None:
        """Prepare, at the start of a capture.

        Args:
            rendezvous: Where the ranks have met.
            is_first: Whether this rank speaks for all.
            on_failure: Called with why the ranks cannot agree any more: none is stopped then.
        """
        self._rendezvous = rendezvous
        self._is_first = is_first
        self._on_failure = on_failure
        self._stops_at: int | None = None
        self._is_open = False
        self._ending = end_of_process()

    def stops_before(self, iteration: int, *, is_wanted: bool) -> bool:
        """Whether the training ends here; asked once before each iteration, and of rank 0 whether it is to end."""
        if self._is_open:
            return False
        try:
            self._is_open = self._ending.is_ours = self._ask(iteration, is_wanted=is_wanted and self._is_first)
        except dist.DistError as error:
            self._is_open = True
            self._on_failure(f"the training is not ended when all is stored: the ranks cannot agree any more ({error})")
        return self._ending.is_ours

    def _ask(self, iteration: int, *, is_wanted: bool) -> bool:
        if is_wanted and (self._stops_at is None or self._stops_at < iteration):
            # The first that no rank has come to: they all will.
            self._stops_at = iteration
            while self._rendezvous.decide(_name(self._stops_at), _STOPS) != _STOPS:
                self._stops_at += 1
        if self._is_first:
            self._rendezvous.forget(_name(iteration - _KEPT))
        return self._rendezvous.decide(_name(iteration), _BEGINS) == _STOPS


def _name(iteration: int) -> str:
    return f"iteration {iteration}"
