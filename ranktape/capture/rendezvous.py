"""Identifies this rank, brings the ranks of a launch together, and ends their training before the same iteration.

Rank and world size come from torch.distributed if it is initialised, else from torchrun's environment. The ranks agree
on the launch's identity through the key-value store of torch.distributed. torchrun's store survives a restart of the
workers, so that a restarted launch finds its own run. Nothing here is a collective. Gloo's process groups are kept
alive until the process ends, because destroying them could block it forever.

The first rank to reach an iteration writes into that store that the iteration starts, unless rank 0 has written before
that the training ends there. All ranks obey the first of the two, so that none needs a message in time, and none waits.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import multiprocessing
import multiprocessing.util
import os
import socket
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from ranktape.errors import CaptureError, FailedElsewhereError, LateElsewhereError, LateError

_PREFIX = "ranktape"
_serials = itertools.count()
_serials_of_one_rank = itertools.count()
_TIMEOUT = timedelta(seconds=60)
_POLL_SECONDS = 0.05
_LONG_SECONDS = 10.0
_LATE = "late: "
"""Prefix of a reason why a capture does not start, if a rank was too late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The rank of this process, and its launch."""

    rank: int
    """Global rank."""
    world_size: int
    """Number of ranks."""
    num_local_ranks: int
    """Number of ranks on this host."""
    first_rank: int = 0
    """The lowest rank, which acts for all."""
    restart: int
    """Restart count of the worker group."""


def find_place() -> RankPlace:
    """The rank of this process; by default rank 0 of 1."""
    environment = {name: int(os.environ.get(name) or default) for name, default in _ENVIRONMENT.items()}
    if dist.is_available() and dist.is_initialized():
        environment |= {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    return RankPlace(
        rank=environment["RANK"],
        world_size=environment["WORLD_SIZE"],
        num_local_ranks=environment["LOCAL_WORLD_SIZE"],
        restart=environment["TORCHELASTIC_RESTART_COUNT"],
    )


def collective_seconds() -> float | None:
    """The timeout of the training's collectives, in seconds; None if it has none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001  (torch has no public way to it)
    return float(store.timeout.total_seconds())


class Rendezvous:
    """The ranks of one start of the worker group, connected by a key-value store."""

    def __init__(self, place: RankPlace, *, seconds: float, on_wait: Callable[[str], None] | None = None) -> None:
        """Meet the other ranks, and wait for rank 0 for at most `seconds`.

        Args:
            place: The place of this rank.
            seconds: Longest wait. If it is exceeded, no rank starts this capture, so that none records in vain.
            on_wait: Called with a message for the user on the first rank that waits for long. If None, the other ranks
                need not take part in this meeting, and are not told if it fails.

        Raises:
            CaptureError: there are other ranks, and no store to meet them in.
            LateError: rank 0 did not come in time, or came when another rank had waited too long.
        """
        self._place = place
        self._store = _find_store(place, seconds=seconds) if place.world_size > 1 else None
        if self._store is None:
            self.launch_id = f"{_new_launch_id()}-alone-{next(_serials_of_one_rank)}"
        else:
            # All ranks start captures in the same order, and a restarted process starts again with the first.
            serial = next(_serials)
            self.launch_id = f"{self._agree(self._store, serial, seconds=seconds, on_wait=on_wait)}-{serial}"
        self._decisions: dict[str, str] = {}
        self._failure_key = f"{_PREFIX}/{self.launch_id}/{place.restart}/failure"

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._place.rank

    def report_failure(self, text: str, *, is_late: bool = False) -> None:
        """Tell the other ranks that this one cannot start, or was not ready in time."""
        if self._store is not None:
            self._store.set(self._failure_key, _LATE + text if is_late else text)

    def give_up(self, text: str) -> None:
        """Tell rank 0 that this rank records nothing, so that it does not wait for this one."""
        if self._store is not None:
            self._store.set(self._key("given_up", self._place.rank), text)
            self._store.set(self._key("given_up", None), "")

    def given_up(self) -> dict[int, str]:
        """The ranks that have reported that they record nothing, each with the reason."""
        if self._store is None or not self._store.check([self._key("given_up", None)]):
            return {}
        keys = {rank: self._key("given_up", rank) for rank in range(self._place.world_size)}
        return {rank: str(self._store.get(key).decode()) for rank, key in keys.items() if self._store.check([key])}

    def wait(self, poll: Callable[[], bool], *, seconds: float) -> bool:
        """Call `poll` until it returns True or the time is over; returns whether it did.

        Raises:
            FailedElsewhereError: another rank has failed.
            LateElsewhereError: another rank was late.
        """
        deadline = time.monotonic() + seconds
        while not poll():
            if self._store is not None and self._store.check([self._failure_key]):
                text = str(self._store.get(self._failure_key).decode())
                if text.startswith(_LATE):
                    raise LateElsewhereError(text.removeprefix(_LATE))
                raise FailedElsewhereError(text)
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _agree(self, store: Store, serial: int, *, seconds: float, on_wait: Callable[[str], None] | None) -> str:
        """The launch's identity. The first rank to write that this capture starts, or that it does not, decides."""
        key = f"{_PREFIX}/{self._place.restart}/{serial}/begins"
        rank = self._place.rank
        if rank == 0:
            # The first start of a launch sets the identity, and its restarts read it.
            launch_id = store.compare_set(f"{_PREFIX}/launch_id", "", _new_launch_id()).decode()
            decision = str(store.compare_set(key, "", launch_id).decode())
            if decision.startswith(_LATE):
                raise LateError(decision.removeprefix(_LATE))
            return decision
        began, has_reported = time.monotonic(), on_wait is None
        while not store.check([key]):
            waited = time.monotonic() - began
            if waited > seconds:
                text = (
                    f"rank {rank} waited {seconds:g} s for rank 0 to begin its capture, so no rank begins one: "
                    f"give the process group a longer timeout where ranks reach their first forward so far apart"
                )
                if on_wait is None or store.compare_set(key, "", _LATE + text).decode() == _LATE + text:
                    raise LateError(text)
                break
            if on_wait is not None and not has_reported and waited > _LONG_SECONDS:
                has_reported = True
                if store.add(f"{key}/waiting", 1) == 1:
                    on_wait(f"waiting for rank 0 to begin its capture, at most {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        decision = str(store.get(key).decode())
        if decision.startswith(_LATE):
            raise LateElsewhereError(decision.removeprefix(_LATE))
        return decision

    def _key(self, name: str, rank: int | None) -> str:
        return f"{_PREFIX}/{self.launch_id}/{self._place.restart}/{name}/{'any' if rank is None else rank}"

    def bulletin(self, name: str) -> Bulletin | None:
        """The bulletin with that name, for messages to all other ranks; None if there are no others."""
        return None if self._store is None else Bulletin(self._store.clone(), key=self._key(name, None))  # type: ignore[attr-defined]  # its stub has no clone

    def count(self, name: str) -> bool:
        """Report an event on this rank, at most once; returns whether all ranks have reported it now."""
        if self._store is None:
            return True
        try:
            return bool(self._store.add(self._key(name, None), 1) == self._place.world_size)
        except dist.DistError:  # the store is gone, with the process group or the rank that served it
            return False

    def decide(self, name: str, text: str) -> str:
        """The text of the first rank that decides under this name; the given text if this rank is the first."""
        if self._store is None:
            return self._decisions.setdefault(name, text)
        return str(self._store.compare_set(self._key(name, None), "", text).decode())

    def forget(self, name: str) -> None:
        """Delete the decision under this name."""
        if self._store is None:
            self._decisions.pop(name, None)
        else:
            self._store.delete_key(self._key(name, None))


class Bulletin:
    """Messages between ranks, in order. It has its own connection, and is for one thread.

    Its functions raise `torch.distributed.DistError` if the store is gone.
    """

    def __init__(self, store: Store, *, key: str) -> None:
        self._store = store
        self._key = key
        self._own_numbers: set[int] = set()
        self._next = 1

    def post(self, text: str) -> None:
        """Send a message to the other ranks."""
        number = int(self._store.add(self._key, 1))
        self._own_numbers.add(number)
        self._store.set(f"{self._key}/{number}", text)

    def new_messages(self) -> list[str]:
        """The messages of other ranks since the last call."""
        messages = []
        while self._store.check([f"{self._key}/{self._next}"]):
            if self._next not in self._own_numbers:
                messages.append(str(self._store.get(f"{self._key}/{self._next}").decode()))
            self._next += 1
        return messages


_BEGINS, _STOPS = "begins", "stops"

_NUM_REMEMBERED = 64
"""Number of iterations behind rank 0 whose decisions are stored. A rank further behind decides the same again."""


class EndOfProcess:
    """Destroys the process groups at the exit of the process, if ranktape has ended its training."""

    def __init__(self) -> None:
        self.is_ours = False
        """Whether ranktape has ended the training."""
        self._owner = os.getpid()
        if multiprocessing.parent_process() is None:
            atexit.register(self._end_groups)
        else:  # a forked child of multiprocessing runs no `atexit` handlers
            multiprocessing.util.Finalize(None, self._end_groups, exitpriority=0)

    def _end_groups(self) -> None:
        """Destroy the groups as the end of the script would have done, unless it has done so in a `finally`."""
        if self.is_ours and os.getpid() == self._owner and dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


@functools.cache
def end_of_process() -> EndOfProcess:
    """The `EndOfProcess` of this process. If created before the script starts, it runs after the script's handlers."""
    return EndOfProcess()


class StopGate:
    """Decides before each iteration, for all ranks alike, whether the training ends there."""

    def __init__(self, rendezvous: Rendezvous, *, is_first: bool, on_failure: Callable[[str], None]) -> None:
        """Prepare at the start of a capture.

        Args:
            rendezvous: The rendezvous of the ranks.
            is_first: Whether this rank acts for all.
            on_failure: Called with the reason if the ranks cannot agree any more; this rank's training then goes on.
        """
        self._rendezvous = rendezvous
        self._is_first = is_first
        self._on_failure = on_failure
        self._stops_at: int | None = None
        self._is_open = False
        self._ending = end_of_process()

    def stops_before(self, iteration: int, *, is_wanted: bool) -> bool:
        """Whether the training ends before `iteration`. It is called once before each iteration.

        `is_wanted` is whether the training is to end; it only counts on the first rank.
        """
        if self._is_open:
            return False
        try:
            self._is_open = self._ending.is_ours = self._decide_stop(iteration, is_wanted=is_wanted and self._is_first)
        except dist.DistError as error:
            self._is_open = True
            self._on_failure(f"the training is not ended when all is stored: the ranks cannot agree any more ({error})")
        return self._ending.is_ours

    def _decide_stop(self, iteration: int, *, is_wanted: bool) -> bool:
        if is_wanted and (self._stops_at is None or self._stops_at < iteration):
            # The first iteration that no rank has reached, so that all of them will.
            self._stops_at = iteration
            while self._rendezvous.decide(_decision_name(self._stops_at), _STOPS) != _STOPS:
                self._stops_at += 1
        if self._is_first:
            self._rendezvous.forget(_decision_name(iteration - _NUM_REMEMBERED))
        return self._rendezvous.decide(_decision_name(iteration), _BEGINS) == _STOPS


def _decision_name(iteration: int) -> str:
    return f"iteration {iteration}"


_ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def _new_launch_id() -> str:
    """A name for the launch. Under torchrun, it is the same after each restart: the agent is our parent process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"{socket.gethostname()}-{uuid.uuid4().hex}"
    agent = os.getppid()
    try:
        # The start time of the agent distinguishes it from other processes with the same number.
        began = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # no /proc on this system: only the number
        began = "0"
    return f"{socket.gethostname()}-{agent}-{began}"


_servers: list[Store] = []
"""The stores that this process serves. They are kept because a server ends with its object."""


def _find_store(place: RankPlace, *, seconds: float) -> Store:
    if dist.is_available() and dist.is_initialized():
        # A separate connection, because a client that waits blocks all other calls on its connection.
        default = dist.distributed_c10d._get_default_store()  # noqa: SLF001  (torch has no public way to it)
        connection: Store = default.clone()  # type: ignore[attr-defined]  # its stub has no clone
        return connection
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
    if {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
        # The server that torch's own env:// rendezvous would start on rank 0. It is multi-tenant, so that
        # init_process_group uses it too.
        try:
            store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=place.rank == 0,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except dist.DistError as error:
            if place.rank == 0:
                raise CaptureError(f"rank 0 cannot serve the others: {error}") from error
            raise LateError(f"rank {place.rank} did not reach rank 0 within {seconds:g} s") from error
        _servers.append(store)
        return store
    raise CaptureError(
        f"this is one of {place.world_size} ranks, and there is no way to reach the others yet: start by torchrun, "
        f"or call torch.distributed.init_process_group before the capture begins"
    )


_kept_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def keep_process_groups() -> None:
    """Keep the gloo backends of all process groups alive until the process ends, with their waiting threads.

    If DDP holds the last reference to a group, torch 2.13 destroys it while it holds the GIL, and waits for gloo's
    threads. If one of them waits for the GIL, that is a deadlock (docs/limits.md).
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        return
    c10d = dist.distributed_c10d
    # Only gloo's work has thread state, for which its threads need the GIL. NCCL's threads are ended by
    # `destroy_process_group` without it. TORCH_DISTRIBUTED_DEBUG=DETAIL wraps any backend with one of gloo.
    kinds = (c10d.ProcessGroupGloo, c10d._ProcessGroupWrapper)  # type: ignore[attr-defined]  # noqa: SLF001  (private)
    for group in list(c10d._world.pg_map):  # noqa: SLF001  (nor a public way to all groups)
        if group in _kept_groups:
            continue
        _kept_groups.add(group)
        for device in group._device_types:  # noqa: SLF001  (nor to their backends)
            backend = group._get_backend(device)  # noqa: SLF001  (as above)
            if isinstance(backend, kinds):
                # Never decremented: objects in a module are destroyed when the interpreter exits, which is too early.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
