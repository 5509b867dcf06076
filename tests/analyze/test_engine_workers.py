"""Do several processes, or a cluster, give the same answers, and end as one would wish?"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from distributed import LocalCluster

from ranktape.analyze.engine import executors
from ranktape.analyze.engine.digests import digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.numerics.pieces import num_threads
from ranktape.analyze.numerics.recipes.words import parse_recipes
from ranktape.analyze.replays.replayed import replay_calls
from ranktape.errors import DataError, UsageError, WorkersError
from ranktape.storage import Run, open_run
from tests.analyze.engine_runs import (
    FirstValue,
    assert_same_digests,
    die,
    is_torch_there,
    square,
    square_all,
    threads_there,
)
from tests.analyze.replay_runs import one_call
from tests.analyze.runs import describe_tensor, model_tensors, store


@pytest.fixture(scope="module", autouse=True)
def _processes() -> Iterator[None]:
    """End what the tests of this file started."""
    yield
    executors.end_executors()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three ranks and two iterations, with samples."""
    rng = np.random.default_rng(0)
    with_samples = [
        describe_tensor(
            rng.standard_normal((4, 700)).astype(ml_dtypes.bfloat16),
            rank=rank,
            layer_idx=9,
            sample_dim=0,
            layer_type="odd",
        )
        for rank in range(3)
    ]
    tensors = [*model_tensors(num_ranks=3, iterations=(0, 1)), *with_samples]
    return store(tmp_path_factory.mktemp("workers") / "run", tensors)


def test_any_number_of_workers_gives_the_same_bits(run: Run) -> None:
    alone, other = [list(digests(run.select(), engine=Engine(workers=workers, use_cache=False))) for workers in (1, 3)]
    assert len(alone) == len(run.select())
    assert_same_digests(other, alone)


def test_workers_keep_what_they_counted_and_need_no_torch(run: Run) -> None:
    # Those of an earlier test may have multiplied with torch.
    executors.end_executors()
    first = list(digests(run.select(), engine=Engine(workers=2)))
    assert len(list(Path(run.url).glob("analysis/*/*/*/*/*/*.counts"))) == 6
    assert_same_digests(list(digests(run.select())), first)
    assert not any(Engine(workers=2).map(is_torch_there, range(4)))
    assert list(Engine(workers=2).map(square, range(50), sizes=[1 << 24] * 50)) == [one * one for one in range(50)]


def test_workers_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    executors.end_executors()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = max(1, num_threads(None) // 3)
    assert set(Engine(workers=3).map(threads_there, range(6))) == {(share, str(share))}
    executors.end_executors()
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert set(Engine(workers=3).map(threads_there, range(6))) == {(share, "5")}
    executors.end_executors()


def test_workers_start_no_workers() -> None:
    assert list(Engine(workers=2).map(square_all, [[1, 2], [3]])) == [[1, 4], [9]]


def test_what_a_worker_raises_is_raised_here(run: Run, tmp_path: Path) -> None:
    measure = FirstValue(trace=tmp_path, fails_at=1)
    with pytest.raises(DataError, match="layer 1 is damaged"):
        list(Engine(workers=2, use_cache=False).measure(run.select(), measure))
    # And the same processes go on to the next question.
    assert list(Engine(workers=2).map(square, [3])) == [9]


def test_a_worker_that_is_killed_is_told_of(run: Run) -> None:
    with pytest.raises(WorkersError, match="a worker process ended: it was killed"):
        list(Engine(workers=2).map(die, range(4)))
    assert len(list(digests(run.select(), engine=Engine(workers=2, use_cache=False)))) == len(run.select())


def test_what_a_script_defines_cannot_be_sent() -> None:
    def own(number: int) -> int:
        return number

    own.__module__ = "__main__"
    assert list(Engine().map(own, [3])) == [3]
    with pytest.raises(UsageError, match="workers=2 cannot run a function that the script itself defines"):
        list(Engine(workers=2).map(own, [3]))


SCRIPT = """
import sys
from pathlib import Path
from ranktape.analyze.engine.engine import Engine
from ranktape.storage import open_run
from tests.analyze.engine_runs import FirstValue

measure = FirstValue(trace=Path(sys.argv[2]), seconds=0.05)
for _ in Engine(workers=2).measure(open_run(sys.argv[1]).select(), measure):
    pass
"""
"""Without `if __name__ == "__main__":`: workers do not run it."""


NUM_RANKS = 100
"""A batch each: more than are read before the signal comes, on a busy machine too."""


def test_ctrl_c_ends_at_once_and_the_second_run_goes_on(tmp_path: Path) -> None:
    tensors = [
        describe_tensor(np.full(4, rank, np.float32), rank=rank, layer_idx=layer)
        for rank in range(NUM_RANKS)
        for layer in range(10)
    ]
    run = store(tmp_path / "run", tensors)
    (tmp_path / "trace").mkdir()
    measure = FirstValue(trace=tmp_path / "trace")
    script = tmp_path / "question.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    # In a session of its own, as in a terminal: the signal goes to all of its processes.
    process = subprocess.Popen(
        [sys.executable, str(script), run.url, str(measure.trace)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    kept = Path(run.url) / "analysis"
    until = time.monotonic() + 60
    while len(list(kept.rglob("*.counts"))) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    asked = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert time.monotonic() - asked < 10
    assert process.returncode != 0
    assert said.rstrip().endswith("KeyboardInterrupt")
    with pytest.raises(ProcessLookupError):  # the server that forks ends with the last of them
        _wait_for_the_end(process.pid)
    assert not list(kept.rglob("*.partial"))
    num_kept = len(list(kept.rglob("*.counts")))
    assert 4 <= num_kept < NUM_RANKS
    num_read = measure.num_read()
    found = [float(payload["first"][0]) for payload in Engine().measure(open_run(run.url).select(), measure)]
    assert found == [rank for rank in range(NUM_RANKS) for _ in range(10)]
    assert measure.num_read() - num_read == 10 * (NUM_RANKS - num_kept)


def _wait_for_the_end(group: int) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        os.killpg(group, 0)
        time.sleep(0.05)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of distributed's own, when it is left
def test_a_dask_cluster_gives_the_same_bits(run: Run, tmp_path: Path) -> None:
    alone = list(digests(run.select(), engine=Engine(use_cache=False)))
    with LocalCluster(  # type: ignore[no-untyped-call]
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None, local_directory=str(tmp_path)
    ) as cluster:
        engine = Engine(scheduler=cluster.scheduler_address, use_cache=False)
        assert_same_digests(list(digests(run.select(), engine=engine)), alone)
        call, recipes = one_call(tmp_path).select(), parse_recipes("nvfp4")
        replayed, expected = (replay_calls(call, recipes, engine=one) for one in (engine, Engine(use_cache=False)))
        np.testing.assert_array_equal(replayed.exact, expected.exact)
        measure = FirstValue(trace=tmp_path, fails_at=1)
        with pytest.raises(DataError, match="layer 1 is damaged"):
            list(engine.measure(run.select(), measure))
        executors.end_executors()


def _greet(server: socket.socket, greeting: bytes) -> None:
    peer, _ = server.accept()
    with peer:
        peer.sendall(greeting)


@pytest.mark.parametrize("greeting", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["deaf", "silent", "other"])
def test_a_scheduler_that_does_not_answer_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, greeting: bytes | None
) -> None:
    monkeypatch.setattr(executors, "CONNECT_SECONDS", 1)
    with socket.socket() as taken, ThreadPoolExecutor() as pool:
        taken.bind(("127.0.0.1", 0))
        if greeting is not None:
            taken.listen()
        if greeting:
            pool.submit(_greet, taken, greeting)
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(WorkersError, match=f"no Dask scheduler answers at {address} within 1 s"):
            list(digests(run.select(), engine=Engine(scheduler=address, use_cache=False)))
        assert time.monotonic() - begin < 6


def test_what_is_no_address_is_refused(run: Run) -> None:
    for address in ["nonsense", "nonsense://x:1", "tcp://host", "tcp://:80x", ""]:
        with pytest.raises(
            UsageError, match=f"scheduler '{address}' is no address of a Dask scheduler: give tcp://HOST"
        ):
            list(digests(run.select(), engine=Engine(scheduler=address, use_cache=False)))


def test_without_dask_it_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"pip install 'ranktape\[dask\]'"):
        list(digests(run.select(), engine=Engine(scheduler="tcp://127.0.0.1:1", use_cache=False)))
