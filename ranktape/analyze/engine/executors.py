"""The workers that answer a question: this process, other processes of this machine, or those of a Dask cluster."""

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
    """The state of this process."""

    num_writing = 0
    """Number of threads that are writing an object."""
    must_end = False
    """Whether the process exits when these have finished."""
    is_worker = False
    """Whether another process started this one as a worker."""


def become_worker(environment: Mapping[str, str], num_workers: int) -> None:
    """Initialize a worker process, which exits on SIGTERM or when its parent exits.

    Args:
        environment: The parent's environment, which may have changed since the server that forks workers was started.
        num_workers: Number of workers that share the cores of the machine.
    """
    _State.is_worker = True
    os.environ.update(environment)
    # Torch reads it when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", str(share_cores(num_workers)))
    # Ctrl-C reaches every process of the terminal. Only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with_parent, args=(parent.sentinel,), daemon=True).start()


def is_worker() -> bool:
    """Whether this process is a worker of another process of this machine."""
    return _State.is_worker


@contextlib.contextmanager
def deferring_exit() -> Iterator[None]:
    """A context that SIGTERM does not interrupt. A worker that receives SIGTERM in it exits afterwards."""
    _State.num_writing += 1
    try:
        yield
    finally:
        _State.num_writing -= 1
        if _State.must_end and not _State.num_writing:
            os._exit(_EXIT_CODE)


def _exit(_number: int = 0, _frame: FrameType | None = None) -> None:
    _State.must_end = True
    if not _State.num_writing:
        os._exit(_EXIT_CODE)


def _exit_with_parent(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    _exit()


Key = TypeVar("Key")

CONNECT_SECONDS = 10
"""Maximum time until a scheduler answers, in seconds."""

_END_SECONDS = 2.0
"""Maximum time until workers exit after SIGTERM, in seconds. Then they are killed."""

_MAX_BUFFERED = 32
"""Maximum number of keys without work that are held back while earlier work is not finished."""

_starting = threading.Lock()

_MAX_IN_FLIGHT = 256
ADDRESS = re.compile(r"(tcp|tls|ucx|wss?)://[^\s/]+:\d{1,5}|inproc://\S+")


class Workers:
    """An executor of `concurrent.futures` that raises a `WorkersError` if it is lost."""

    def __init__(
        self, executor: Executor, *, in_flight: int = 1, errors: tuple[type[BaseException], ...] = (), message: str = ""
    ) -> None:
        self.executor = executor
        self.in_flight = in_flight
        """Number of calls that may be submitted before the result of the first is taken."""
        self._errors, self._message = errors, message

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Submit a call of a function."""
        with self._raising_loss():
            return self.executor.submit(function, *args)

    def result(self, future: Future[Any]) -> Any:
        """The result of a call. Raises what the function raised."""
        with self._raising_loss():
            return future.result()

    def end(self) -> None:
        """Stop all running calls at once."""

    @contextlib.contextmanager
    def _raising_loss(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            self.end()
            raise WorkersError(self._message) from error


class _ThisProcess(Executor):
    """An executor that runs each call immediately."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call and return its result as a future."""
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


@contextlib.contextmanager
def _starting_processes() -> Iterator[None]:
    """A context in which to start processes: SIGINT is blocked and the main module is hidden.

    `multiprocessing` makes each process import the main module, which it locates by these two names. A script without
    `if __name__ == "__main__":` would then ask its question again in each process, and one from stdin could not be
    located.
    """
    with _starting:
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        names: dict[str, Any] = vars(sys.modules["__main__"])
        hidden = {name: names.pop(name) for name in list(names) if name in {"__file__", "__spec__"}}
        names["__spec__"] = None
        try:
            yield
        finally:
            del names["__spec__"]
            names.update(hidden)
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


class Processes(Workers):
    """Several processes of this machine."""

    def __init__(self, num_workers: int) -> None:
        # Unlike a plain fork, neither method copies the threads and locks of this process.
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
            errors=(BrokenProcessPool,),
            message="a worker process ended: it was killed, or there was not enough memory (measurements so "
            "far are cached: continue with fewer --workers)",
        )

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Submit a call of a function to the next idle process.

        Raises:
            UsageError: a function or an argument is defined in the script itself, which other processes do not import.
            WorkersError: a process was killed.
        """
        if any(getattr(argument, "__module__", "") == "__main__" for argument in args):
            raise UsageError(
                f"workers={self._num_workers} cannot run a function that the script itself defines: move it to a "
                "module that can be imported, or use 1 worker"
            )
        # This call may start processes. They must ignore SIGINT before it can reach them.
        with _starting_processes():
            return super().submit(function, *args)

    def end(self) -> None:
        """Stop all processes, each after the object that it is writing."""
        _processes.pop(self._num_workers, None)
        # No public function stops the processes of a pool before Python 3.14.
        workers = list((self._pool._processes or {}).values())  # noqa: SLF001
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        deadline = time.monotonic() + _END_SECONDS
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))
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
            errors=(KilledWorker, CancelledError, CommClosedError),
            message=f"the Dask cluster at {address} lost the work: a worker was killed, there was not enough "
            "memory, or the scheduler ended; measurements so far are cached",
        )

    def end(self) -> None:
        """Close the connection. The cluster cancels the work."""
        _clusters.pop(self._address, None)
        self._client.close()


def _connected(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError(f"--scheduler needs Dask ({error}): pip install 'ranktape[dask]'") from error
    # A client that gets no answer, or one from another service, exceeds its timeout and is slow to close.
    reply: Future[Any] = Future()
    threading.Thread(target=_ask, args=(address, reply), daemon=True).start()
    try:
        kind = reply.result(timeout=CONNECT_SECONDS).get("type")
        if kind != "Scheduler":
            raise WorkersError(f"the server at {address} is a Dask {kind}, not a scheduler: check the address")
        # Dask's types are not used outside this function.
        return cast("Any", Client)(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError, MemoryError) as error:
        raise WorkersError(
            f"no Dask scheduler answers at {address} within {CONNECT_SECONDS} s: start one with 'dask scheduler', or "
            f"check the address"
        ) from error


def _ask(address: str, reply: Future[Any]) -> None:
    """Ask the server at an address for its identity."""
    import asyncio

    from distributed.core import rpc

    async def identity() -> Any:
        async with cast("Any", rpc)(address, timeout=CONNECT_SECONDS) as server:
            return await server.identity()

    try:
        reply.set_result(asyncio.run(identity()))
    except BaseException as error:  # noqa: BLE001  # the waiting thread raises it
        reply.set_exception(error)


_processes: dict[int, Processes] = {}
_clusters: dict[str, Cluster] = {}
"""The workers that were started once and are used for all questions of this process."""


def get_workers(*, workers: int, scheduler: str | None) -> Workers:
    """The workers for these options. They are started when they are first used."""
    if scheduler is not None:
        if scheduler not in _clusters:
            _clusters[scheduler] = Cluster(scheduler)
            atexit.register(_clusters[scheduler].end)
        return _clusters[scheduler]
    # A worker starts no workers: there would be more processes than requested, and Python would wait for them forever.
    if workers == 1 or is_worker():
        return Workers(_ThisProcess())
    if workers not in _processes:
        _processes[workers] = Processes(workers)
    return _processes[workers]


def end_executors() -> None:
    """Stop all workers. The next question starts them again."""
    started: list[Workers] = [*_processes.values(), *_clusters.values()]
    for workers in started:
        workers.end()


def in_order(
    works: Iterable[tuple[Key, tuple[Any, ...] | None]], *, start: Callable[[], Workers]
) -> Generator[tuple[Key, Any], None, None]:
    """Each key with the result of its work (a function and its arguments), or None if it has no work, in order.

    Workers are started when there is work. If the caller stops early, no further work is done. Ctrl-C stops the running
    work.
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
            # A key without work is returned at once if no earlier work is unfinished.
            while waiting and (
                waiting[0][1] is None
                or (num_working := sum(future is not None for _, future in waiting)) >= in_flight
                or len(waiting) - num_working > _MAX_BUFFERED
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
