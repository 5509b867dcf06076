"""Gives the workers of a question: this process, others of this machine, or those of a Dask cluster."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import FrameType
from typing import Any, TypeVar, cast

from ranktape.analyze.numerics.pieces import share_cores
from ranktape.errors import UsageError, WorkersError

_EXIT_CODE = 128 + signal.SIGTERM


class _State:
    """Of this process."""

    num_writing = 0
    """Threads that write an object just now."""
    must_end = False
    """Whether it is to end after that."""
    is_worker = False
    """Whether another process started it for work."""


def become_worker(environment: Mapping[str, str], num_workers: int) -> None:
    """Make this process one that ends on SIGTERM, or when its parent does; what each worker begins with.

    Args:
        environment: That of the parent, which may have changed since the server was started that forks workers.
        num_workers: Between which the cores of the machine are divided.
    """
    _State.is_worker = True
    os.environ.update(environment)
    # That is where torch looks, when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", str(share_cores(num_workers)))
    # Ctrl-C reaches every process of the terminal: the parent alone decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_with, args=(parent.sentinel,), daemon=True).start()


def is_worker() -> bool:
    """Whether this process does work for another one of this machine."""
    return _State.is_worker


@contextlib.contextmanager
def no_leaving() -> Iterator[None]:
    """Around what must not be left half done; a worker that got SIGTERM ends behind it."""
    _State.num_writing += 1
    try:
        yield
    finally:
        _State.num_writing -= 1
        if _State.must_end and not _State.num_writing:
            os._exit(_EXIT_CODE)


def _leave(_number: int = 0, _frame: FrameType | None = None) -> None:
    _State.must_end = True
    if not _State.num_writing:
        os._exit(_EXIT_CODE)


def _leave_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    _leave()


Key = TypeVar("Key")

CONNECT_SECONDS = 10
"""How long a scheduler has to answer."""

_END_SECONDS = 2.0
"""How long workers have to end after SIGTERM, before they are killed."""

_HELD_BACK = 32
"""Keys without work that are held back at most while a piece of work before them is waited for."""

_starting = threading.Lock()

_MAX_IN_FLIGHT = 256
ADDRESS = re.compile(r"(tcp|tls|ucx|wss?)://[^\s/]+:\d{1,5}|inproc://\S+")


class Workers:
    """An executor of `concurrent.futures`; where it is lost, a `WorkersError` says so."""

    def __init__(
        self, executor: Executor, *, in_flight: int = 1, lost: tuple[type[BaseException], ...] = (), loss: str = ""
    ) -> None:
        self.executor = executor
        self.in_flight = in_flight
        """Pieces of work that may be given out before the first of them is taken back."""
        self._lost, self._loss = lost, loss

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have a function called."""
        with self._raising_loss():
            return self.executor.submit(function, *args)

    def result(self, future: Future[Any]) -> Any:
        """What a function returned, or raises what it raised."""
        with self._raising_loss():
            return future.result()

    def end(self) -> None:
        """End at once whatever is being done."""

    @contextlib.contextmanager
    def _raising_loss(self) -> Iterator[None]:
        try:
            yield
        except self._lost as error:
            self.end()
            raise WorkersError(self._loss) from error


class _ThisProcess(Executor):
    """Calls functions at once."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The result of a call."""
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Around the start of processes: Ctrl-C, which reaches them too, is held back, and no script is run by them again.

    `multiprocessing` has each process import the main module, which it finds by these two names: a script without
    `if __name__ == "__main__":` would ask its question over and over, and one read from stdin cannot be found.
    """
    with _starting:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        names: dict[str, Any] = vars(sys.modules["__main__"])
        hidden = {name: names.pop(name) for name in list(names) if name in {"__file__", "__spec__"}}
        names["__spec__"] = None
        try:
            yield
        finally:
            del names["__spec__"]
            names.update(hidden)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Processes(Workers):
    """Several processes of this machine."""

    def __init__(self, num_workers: int) -> None:
        # Neither copies the threads and locks of this process, as a plain fork does.
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["ranktape.analyze.engine.preloaded"])
        self._num_workers = num_workers
        self._pool = ProcessPoolExecutor(
            num_workers, mp_context=context, initializer=become_worker, initargs=(dict(os.environ), num_workers)
        )
        super().__init__(
            self._pool,
            in_flight=2 * num_workers,
            lost=(BrokenProcessPool,),
            loss="a worker process ended: it was killed, or there was not enough memory (give fewer --workers; what "
            "was counted so far is kept)",
        )

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Have a function called by the next process that is free.

        Raises:
            UsageError: it takes a function or an object of the script itself, which no other process imports.
            WorkersError: a process was killed.
        """
        if any(getattr(one, "__module__", "") == "__main__" for one in args):
            raise UsageError(
                f"workers={self._num_workers} cannot do what the script itself defines: put it into a module that can "
                f"be imported, or use 1 worker"
            )
        # Processes are started here; Ctrl-C waits until it is the parent's alone to answer.
        with _undisturbed():
            return super().submit(function, *args)

    def end(self) -> None:
        """Have all processes end, after the object that they are writing."""
        _processes.pop(self._num_workers, None)
        # Nothing public ends a pool before Python 3.14.
        workers = list((self._pool._processes or {}).values())  # noqa: SLF001
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        until = time.monotonic() + _END_SECONDS
        for worker in workers:
            worker.join(max(0.0, until - time.monotonic()))
            if worker.is_alive():
                worker.kill()


class Cluster(Workers):
    """The workers of a Dask scheduler."""

    def __init__(self, address: str) -> None:
        self._client = _connected(address)
        self._address = address
        num_threads = sum(self._client.nthreads().values())
        if not num_threads:
            self.end()
            raise WorkersError(
                f"the Dask scheduler at {address} has no workers: start some with 'dask worker {address}'"
            )
        from distributed import KilledWorker
        from distributed.comm.core import CommClosedError

        super().__init__(
            self._client.get_executor(pure=False),
            in_flight=min(_MAX_IN_FLIGHT, 2 * num_threads),
            lost=(KilledWorker, CancelledError, CommClosedError),
            loss=f"the Dask cluster at {address} lost the work: a worker was killed, there was not enough memory, or "
            f"the scheduler went away; what was counted so far is kept",
        )

    def end(self) -> None:
        """Leave the cluster, which forgets what it was asked."""
        _clusters.pop(self._address, None)
        self._client.close()


def _connected(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError(f"--scheduler needs Dask ({error}): pip install 'ranktape[dask]'") from error
    # A client that gets no answer, or that of another service, waits beyond its deadline and is not rid of for a while.
    answer: Future[Any] = Future()
    threading.Thread(target=_ask, args=(address, answer), daemon=True).start()
    try:
        kind = answer.result(timeout=CONNECT_SECONDS).get("type")
        if kind != "Scheduler":
            raise WorkersError(f"at {address} there is a Dask {kind}, and no scheduler: check the address")
        # Dask's own types end at its doors.
        return cast("Any", Client)(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError, MemoryError) as error:
        raise WorkersError(
            f"no Dask scheduler answers at {address} within {CONNECT_SECONDS} s: start one with 'dask scheduler', or "
            f"check the address"
        ) from error


def _ask(address: str, answer: Future[Any]) -> None:
    """What the server at an address says that it is."""
    import asyncio

    from distributed.core import rpc

    async def identity() -> Any:
        async with cast("Any", rpc)(address, timeout=CONNECT_SECONDS) as server:
            return await server.identity()

    try:
        answer.set_result(asyncio.run(identity()))
    except BaseException as error:  # noqa: BLE001  # whoever waits raises it
        answer.set_exception(error)


_processes: dict[int, Processes] = {}
_clusters: dict[str, Cluster] = {}
"""What was started once and serves every question of this process."""


def workers_of(*, workers: int, scheduler: str | None) -> Workers:
    """Where the work is done; started when it is first asked for."""
    if scheduler is not None:
        if scheduler not in _clusters:
            _clusters[scheduler] = Cluster(scheduler)
            atexit.register(_clusters[scheduler].end)
        return _clusters[scheduler]
    # Workers of workers would be more processes than were asked for, and Python would wait for them for ever.
    if workers == 1 or is_worker():
        return Workers(_ThisProcess())
    if workers not in _processes:
        _processes[workers] = Processes(workers)
    return _processes[workers]


def end_executors() -> None:
    """End what was started for questions; the next question starts it again."""
    started: list[Workers] = [*_processes.values(), *_clusters.values()]
    for found in started:
        found.end()


def in_order(
    works: Iterable[tuple[Key, tuple[Any, ...] | None]], *, start: Callable[[], Workers]
) -> Generator[tuple[Key, Any], None, None]:
    """Each key with the result of its work, a function and its arguments; None where it has no work; in order.

    Workers are started when there is work. Whoever leaves early has nothing more done; Ctrl-C ends what is being done.
    """
    waiting: deque[tuple[Key, Future[Any] | None]] = deque()
    workers: Workers | None = None

    def first() -> tuple[Key, Any]:
        key, future = waiting[0]
        result = None if future is None or workers is None else workers.result(future)
        waiting.popleft()
        return key, result

    try:
        for key, work in works:
            if work is not None:
                workers = workers or start()
            waiting.append((key, None if work is None or workers is None else workers.submit(*work)))
            in_flight = 1 if workers is None else workers.in_flight
            # What needs no work is given at once, where nothing is waited for in front of it.
            while waiting and (
                waiting[0][1] is None
                or (num_working := sum(future is not None for _, future in waiting)) >= in_flight
                or len(waiting) - num_working > _HELD_BACK
            ):
                yield first()
        while waiting:
            yield first()
    except BaseException as error:
        for _, future in waiting:
            if future is not None:
                future.cancel()
        if workers is not None and isinstance(error, KeyboardInterrupt):
            workers.end()
        raise
