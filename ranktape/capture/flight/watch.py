"""Exchanges triggers between ranks through the store, in a separate thread. No rank waits for another.

Each writer process writes the triggers of its rank as small objects, and polls for those of other ranks. It finds them
even if its trainer hangs in a collective or has died.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ranktape.errors import RanktapeError, StorageError
from ranktape.storage.format.layout import trigger_path
from ranktape.storage.format.live import Trigger, TriggerKind, list_triggers, read_triggers, write_trigger

if TYPE_CHECKING:
    from ranktape.storage.format.attempt import Attempt
    from ranktape.storage.places.backend import Backend

POLL_SECONDS = 0.25
"""Shortest time between two polls of one rank, on a store that answers fast."""

POLLS_PER_SECOND = 200
"""Largest number of polls of all ranks together, as object stores charge for each request."""

MAX_POLL_SECONDS = 10.0
"""Longest time between two polls, on a store that is slow or does not answer."""

_SHARE = 10
"""The time between two polls is at least this many times the duration of one."""

_RETRY_SECONDS = 1.0


def poll_seconds(world_size: int) -> float:
    """The time between two polls of each of `world_size` ranks."""
    return max(POLL_SECONDS, world_size / POLLS_PER_SECOND)


class TriggerWatch:
    """A thread that writes this rank's triggers and reads those of the others."""

    def __init__(
        self, backend: Backend, *, attempt: Attempt, rank: int, report: Callable[..., None], is_successor: bool = False
    ) -> None:
        """Start the thread. The successor of a killed writer also reads the triggers of its predecessor."""
        self._backend = backend
        self._attempt = attempt
        self._rank = rank
        self._report = report
        size = attempt.launch.world_size
        self._least_seconds = poll_seconds(size)
        self.seconds = self._least_seconds
        """Current time between two polls, which depends on how fast the store answers."""
        self._is_only_rank = size == 1
        self._ignores_own = not is_successor
        self._outbox: dict[str, tuple[Trigger, int]] = {}
        """The triggers to write and their numbers, by the names of the documents."""
        self._is_due = False
        self._num_in: defaultdict[int, int] = defaultdict(int)
        self._numbers: dict[TriggerKind, int] = {}
        self._known: set[str] = set()
        self._new_triggers: deque[Trigger] = deque()
        self._changed = threading.Condition()
        self._poll_lock = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._watch, name="ranktape-triggers", daemon=True)
        self._thread.start()

    def post(self, trigger: Trigger) -> None:
        """Report a trigger of this rank to all ranks, in the background.

        A trigger for which nothing is stored replaces the previous one of its kind. It is written at the next poll.
        """
        number = None if trigger.is_stored else self._numbers.get(trigger.kind)
        if number is None:
            number = self._num_in[trigger.iteration]
            self._num_in[trigger.iteration] += 1
        if not trigger.is_stored:
            self._numbers[trigger.kind] = number
        name = trigger_path("", trigger.iteration, trigger.rank, number=number).rpartition("/")[2]
        self._known.add(name)
        with self._changed:
            self._outbox[name] = trigger, number
            self._is_due |= trigger.is_stored
            self._changed.notify_all()

    def new_triggers(self) -> list[Trigger]:
        """The triggers of other ranks that were found since the last call."""
        triggers = []
        while self._new_triggers:
            triggers.append(self._new_triggers.popleft())
        return triggers

    def last_poll(self, *, seconds: float) -> None:
        """Poll once more and write the remaining triggers; failures are retried for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while not self._write_and_poll() and time.monotonic() < deadline:
            time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))

    def stop(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(MAX_POLL_SECONDS)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._is_due, timeout=self.seconds)
                if self._is_over:
                    return
            began = time.monotonic()
            is_well = self._write_and_poll()
            took = time.monotonic() - began
            if is_well:
                self.seconds = min(MAX_POLL_SECONDS, max(self._least_seconds, _SHARE * took))
            else:
                self.seconds = min(MAX_POLL_SECONDS, max(_RETRY_SECONDS, 2 * self.seconds))
                time.sleep(_RETRY_SECONDS)

    def _write_and_poll(self) -> bool:
        """Write the remaining triggers and read new ones; returns whether the store allowed both."""
        with self._poll_lock:
            try:
                while self._outbox:
                    name, (trigger, number) = next(iter(self._outbox.items()))
                    write_trigger(self._backend, attempt=self._attempt, trigger=trigger, number=number)
                    with self._changed:
                        if self._outbox[name][0] is trigger:
                            del self._outbox[name]
                with self._changed:
                    self._is_due = any(trigger.is_stored for trigger, _ in self._outbox.values())
                if not (self._is_only_rank and self._ignores_own):
                    names = list_triggers(self._backend, self._attempt) - self._known
                    triggers = read_triggers(self._backend, self._attempt, names)
                    self._new_triggers.extend(
                        trigger for trigger in triggers if trigger.rank != self._rank or not self._ignores_own
                    )
                    self._ignores_own = True
                    self._known |= names
            except StorageError as error:
                self._report(notice=f"triggers cannot be exchanged with the other ranks yet: {error}")
                return False
            except RanktapeError as error:
                self._report(problem=f"the triggers of this run cannot be read: {error}")
                return False
            return True
