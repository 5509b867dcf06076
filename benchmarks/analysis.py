"""How fast is a run digested, beside plain reading of the same chunks, and with how much memory?

A run of bfloat16 records with samples is made (or used again, where `--keep` named it). Everything is timed in turn, in
processor time of one core where it is about one core, and in wall time where it is about several. Bars: the first
question, with nothing kept yet, at least half of the bytes per second and core of reading the same records with their
checksums; two workers beside one; the same on a local Dask cluster; the second question costs next to nothing. Memory
is what one process has at most beyond what it had when everything was imported.

analysis.py [--gigabytes N] [--rounds N] [--folder FOLDER] [--keep]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ranktape.analyze.engine.digests import digests
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.executors import end_executors
from ranktape.storage import Run, open_run
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.layout import ANALYSIS
from ranktape.storage.format.progress import open_iteration
from ranktape.storage.format.record_info import RecordInfo
from tests.runs import describe, start

MIB = 1 << 20
SHAPES = ((8, 512, 1024), (4, 2048, 1024), (32, 64, 1024))
"""Of records: 8, 16 and 4 MiB with samples of 1 MiB, 4 MiB and 128 KiB."""

PER_ITERATION = 64
"""Records of a rank in an iteration."""

NUM_RANKS = 2
READ_NBYTES = 4 * MIB


def make(folder: Path, *, nbytes: int) -> Run:
    """A run of at least so many bytes."""
    backend, attempt, writers = start(str(folder), world_size=NUM_RANKS)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16) for shape in SHAPES]
    documents = [describe(array, sample_dim=0).to_json() for array in arrays]
    written, iteration = 0, 0
    while written < nbytes:
        open_iteration(backend, attempt=attempt, iteration=iteration)
        for rank, writer in enumerate(writers):
            for number in range(PER_ITERATION):
                if written >= nbytes and number:
                    break
                own = {"iteration": iteration, "rank": rank, "module": f"layers.{number}.up", "layer_idx": number}
                kind = number % len(arrays)
                writer.write(arrays[kind], info=RecordInfo.from_json(documents[kind] | own | {"counter": number}))
                written += arrays[kind].nbytes
            writer.commit(iteration, expected=[], silent_sites={})
        finish_iteration(backend, attempt=attempt, iteration=iteration)
        iteration += 1
    return open_run(folder)


def forget(run: Run) -> None:
    """Remove what was counted."""
    shutil.rmtree(Path(run.url) / ANALYSIS, ignore_errors=True)


def read_records(run: Run) -> None:
    for record in run.select():
        record.read()


def read_files(run: Run) -> None:
    buffer = bytearray(READ_NBYTES)
    for path in Path(run.url).glob("attempt_*/rank_*/iter_*/*/c.*"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def question(run: Run, **options: Any) -> None:
    for _ in digests(open_run(run.url).select(), engine=Engine(**options)):
        pass


def first_question(run: Run, **options: Any) -> None:
    forget(run)
    question(run, **options)


Clock = Callable[[], float]


def seconds_of(work: Callable[[], object], *, clock: Clock) -> float:
    begin = clock()
    work()
    return clock() - begin


def in_turn(ways: dict[str, Callable[[], object]], *, rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Seconds of each way, one after the other in each round."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            taken[name].append(seconds_of(work, clock=clock))
    return taken


def print_speeds(taken: dict[str, list[float]], *, nbytes: int, beside: str, unit: str) -> None:
    for name, seconds in taken.items():
        speed = nbytes / 1e6 / statistics.median(seconds)
        ratio = statistics.median(base / own for base, own in zip(taken[beside], seconds, strict=True))
        print(f"{name}: {speed:.0f} {unit} (fastest {nbytes / 1e6 / min(seconds):.0f}), {ratio:.2f} of {beside}")


def one_core(run: Run, *, nbytes: int, rounds: int) -> None:
    ways: dict[str, Callable[[], object]] = {
        "reading files": lambda: read_files(run),
        "reading records": lambda: read_records(run),
        "first question": lambda: first_question(run),
        "first question, nothing kept": lambda: question(run, use_cache=False),
    }
    for work in ways.values():
        work()
    print("one process, processor time (bar: the first question at least 0.5 of reading records)")
    taken = in_turn(ways, rounds=rounds, clock=time.process_time)
    print_speeds(taken, nbytes=nbytes, beside="reading records", unit="MB/s of a core")
    first_question(run)
    again = min(seconds_of(lambda: question(run), clock=time.perf_counter) for _ in range(rounds))
    kept = sum(path.stat().st_size for path in (Path(run.url) / ANALYSIS).rglob("*") if path.is_file())
    each = again / len(run.select()) * 1e6
    print(f"second question: {again:.2f} s, {each:.0f} us for a record; {kept / 1e6:.1f} MB kept")


@contextmanager
def dask_cluster(num_workers: int, folder: Path) -> Iterator[str]:
    from distributed import LocalCluster

    with LocalCluster(  # type: ignore[no-untyped-call]
        n_workers=num_workers, threads_per_worker=1, dashboard_address=None, local_directory=str(folder)
    ) as cluster:
        yield cluster.scheduler_address
        end_executors()


def several(run: Run, *, nbytes: int, rounds: int, folder: Path) -> None:
    alone: dict[str, Callable[[], object]] = {"1 process": lambda: first_question(run)}

    def print_beside_one(name: str, work: Callable[[], object]) -> None:
        ways = alone | {name: work}
        for way in ways.values():
            way()  # what is started is started
        taken = in_turn(ways, rounds=rounds, clock=time.perf_counter)
        print_speeds(taken, nbytes=nbytes, beside="1 process", unit="MB/s")

    print(f"several processes, wall time, {len(os.sched_getaffinity(0))} cores")
    print_beside_one("2 workers", lambda: first_question(run, workers=2))
    end_executors()
    with dask_cluster(2, folder) as address:
        print_beside_one("Dask, 2 workers", lambda: first_question(run, scheduler=address))


def memory(run: Run) -> None:
    for name, workers in (("1 process", "1"), ("the main one of 2 workers", "2")):
        words = [sys.executable, __file__, "--child", run.url, workers]
        found = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        print(f"memory, {name}: {found.stdout.strip()}")


def in_child(url: str, workers: str) -> None:
    """Print what the first question takes at most beyond what was there before it."""
    run = open_run(url)
    # One record is digested before: what was imported, compiled or allocated for ever is not counted.
    for _ in digests(run.select()[:1], engine=Engine(use_cache=False)):
        pass
    Path("/proc/self/clear_refs").write_text("5")  # forgets the high-water mark
    before = status("VmRSS")
    first_question(run, workers=int(workers))
    print(f"{(status('VmHWM') - before) / MIB:.1f} MiB at most beyond {before / MIB:.0f} MiB")


def status(field: str) -> int:
    """Bytes, as the kernel counts them."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields[field].split()[0])


def main() -> None:
    """Make the run, time everything, remove it unless it is to be kept."""
    if sys.argv[1:2] == ["--child"]:
        in_child(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of values in the run")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is timed")
    parser.add_argument("--folder", type=Path, help="where the run is made, and found again")
    parser.add_argument("--keep", action="store_true", help="leave the run where it is")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp())
    place = folder / f"run_{given.gigabytes:g}_gb"
    try:
        run = open_run(place) if (place / "zarr.json").exists() else make(place, nbytes=int(given.gigabytes * 1e9))
        records = run.select()
        nbytes = int(records.column("nbytes").sum())
        print(f"{len(records)} bfloat16 records, {nbytes / 1e9:.2f} GB, median of {given.rounds} rounds")
        one_core(run, nbytes=nbytes, rounds=given.rounds)
        memory(run)
        several(run, nbytes=nbytes, rounds=given.rounds, folder=folder)
    finally:
        end_executors()
        if not given.keep:
            shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
