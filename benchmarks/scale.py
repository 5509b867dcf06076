"""What do a reader and the coordinator pay for a run of 1,000 ranks, 1,000 records and 10 iterations?

The catalogues of such a run are generated: the columns are drawn, everything from there on is the way of a real run
(the packing and merging of catalogues, iteration commits, attempt and rank documents, markers). Values are left out.
Each measurement is a process of its own, whose peak memory is its own.

    python benchmarks/scale.py --ranks 100 --records 100 --iterations 4
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ranktape.storage.format import layout
from ranktape.storage.format.arrays import write_blob
from ranktape.storage.format.attempt import Attempt, Launch, read_attempts
from ranktape.storage.format.catalogue import merge_catalogues
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.documents import document_checksum, write_group
from ranktape.storage.format.progress import open_iteration, write_verdict
from ranktape.storage.format.record_info import TALLY_KINDS
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.places.urls import open_backend
from ranktape.storage.query.columns import StringColumn
from ranktape.storage.recording.start import begin_attempt
from ranktape.storage.recording.writer import RankWriter
from ranktape.storage.records.record import Record
from ranktape.storage.records.run import RunReader, open_run
from tests.runs import describe, write_run

if TYPE_CHECKING:
    from ranktape.storage.places.backend import Backend
    from ranktape.storage.query.columns import Column

RECORDS_PER_LAYER = 10
SHAPES = ("[4,1024,4096]", "[4,1024,16384]", "[4096,4096]", "[4096]", "[4,32,1024,128]")
NUMELS = tuple(int(np.prod(json.loads(shape))) for shape in SHAPES)
NUM_PROCESSES = 2
LAYER = 0
SECONDS_LAYER, MEGABYTES_LAYER, SECONDS_ITERATION, OBJECTS_READ = 20, 4000, 3, 3
NO_COUNTS = {kind: [0] * 4 for kind in TALLY_KINDS}
TENSORS = ("input", "weight", "output", "grad_output", "grad_input")
SAME_TEXTS = {
    "layer_type": "linear",
    "layer_stack": "",
    "operation": "forward",
    "phase": "pre",
    "component": "linear",
    "quant_type": "mxfp8",
    "dtype": "bfloat16",
    "compute_dtype": "bfloat16",
    "layout": "",
    "keep": "values",
    "mode": "train",
    "placement": "null",
    "metadata": "null",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    ranks: int
    records: int
    """Of one rank in one iteration."""
    iterations: int

    def __str__(self) -> str:
        return f"{self.ranks:,} ranks x {self.records:,} records x {self.iterations} iterations"


@functools.cache
def _site_texts(num_records: int) -> dict[str, list[str]]:
    """The names of the modules and sites of one rank."""
    modules = [f"layers.{number // RECORDS_PER_LAYER}.{number // len(TENSORS) % 2}" for number in range(num_records)]
    names = [f"{module},linear,{TENSORS[number % len(TENSORS)]},m0,c0" for number, module in enumerate(modules)]
    return {"module": modules, "site": names}


class Rows:
    """The drawn records of some ranks in one iteration, as columns."""

    def __init__(self, size: Size, *, iteration: int, ranks: range) -> None:
        self.num_rows = len(ranks) * size.records
        self._size = size
        self._iteration = iteration
        self._ranks = ranks
        self._random = np.random.default_rng([iteration, ranks.start])
        self._record = np.tile(np.arange(size.records), len(ranks))
        self._rank = np.repeat(np.arange(ranks.start, ranks.stop), size.records)

    def column(self, name: str) -> Column:
        """One value for each record."""
        text = self._text(name)
        if text is not None:
            return text
        extremes = ("overflow.minimum", "overflow.maximum", "overflow.absmax")
        if name in extremes:
            values = self._random.standard_normal(self.num_rows) * (-10, 10, 12)[extremes.index(name)]
            return values.astype(ml_dtypes.bfloat16).astype(np.float64)
        numbers: dict[str, Any] = {
            "rank": self._rank,
            "iteration": self._iteration,
            "layer_idx": self._record // RECORDS_PER_LAYER,
            "counter": self._record,
            "index": self._record // len(SHAPES),
            "sample_dim": np.where(self._is_sampled(), 0.0, np.nan),
            "batch_size": np.where(self._is_sampled(), 4.0, np.nan),
            "numel": np.array(NUMELS)[self._record % len(SHAPES)],
            "nbytes": 2 * np.array(NUMELS)[self._record % len(SHAPES)],
            "timestamp": 1.7e9 + self._iteration + self._random.random(self.num_rows),
            "overflow.zero.count": self._random.poisson(0.3, self.num_rows),
        }
        dtype = {"checksum": np.uint32, "sample_dim": np.float64, "batch_size": np.float64, "timestamp": np.float64}
        if name == "checksum":
            return self._random.integers(0, 1 << 32, self.num_rows, dtype=np.uint32)
        return np.full(self.num_rows, numbers.get(name, 0), dtype=dtype.get(name, np.int64))

    def _is_sampled(self) -> np.ndarray[Any, Any]:
        return np.asarray(self._record % len(SHAPES) != SHAPES.index("[4096,4096]"))

    def _text(self, name: str) -> StringColumn | None:
        if name in SAME_TEXTS:
            return self._chosen(np.zeros(self.num_rows), [SAME_TEXTS[name]])
        sites = _site_texts(self._size.records)
        ids = (json.dumps([4 * rank + place for place in range(4)]) for rank in self._ranks)
        chosen: dict[str, Callable[[], StringColumn]] = {
            "module": lambda: self._chosen(self._record, sites["module"]),
            "site": lambda: self._chosen(self._record, sites["site"]),
            "tensor_name": lambda: self._chosen(self._record % len(TENSORS), list(TENSORS)),
            "shape": lambda: self._chosen(self._record % len(SHAPES), list(SHAPES)),
            "stack": lambda: self._chosen(self._record % len(SHAPES), [f"stack_{shape}" for shape in SHAPES]),
            "sample_ids": lambda: self._chosen(self._rank - self._ranks.start, list(ids)),
            "overflow.per_sample": self._per_sample,
        }
        return chosen[name]() if name in chosen else None

    def _per_sample(self) -> StringColumn:
        """One record in twenty has counts of its own, the rest has none."""
        own = 1 + self.num_rows // 20
        texts = [json.dumps({**NO_COUNTS, "zero": [number, 0, 1, 2]}) for number in range(own)]
        codes = self._random.integers(0, 20 * own, self.num_rows)
        return self._chosen(np.where(codes < own, codes, 0), texts)

    def _chosen(self, codes: np.ndarray[Any, Any], table: list[str]) -> StringColumn:
        return StringColumn(codes=codes.astype(np.uint32), table=table)


def begin(url: str, size: Size) -> tuple[Backend, Attempt]:
    """The run with an attempt and the documents of all ranks, and no iteration."""
    backend = open_backend(url)
    launch = Launch(launch_id="scale", restart=0, world_size=size.ranks)
    options = {"min_iterations": size.iterations}
    attempt = begin_attempt(backend, launch=launch, options=options, environment={}, resume=False, overwrite=True)
    for rank in range(size.ranks):
        RankWriter(backend, attempt=attempt, rank=rank, environment={})
    return backend, attempt


def write_merged(url: str, path: str, size: Size, iteration: int) -> int:
    """The iteration commit and the markers of one iteration, without the ranks' own commits; the catalogue's size."""
    backend = open_backend(url)
    data = merge_catalogues([Rows(size, iteration=iteration, ranks=range(size.ranks)).column])
    attributes = {"complete": True, "iteration": iteration, "num_records": size.ranks * size.records}
    write_blob(backend, layout.iteration_path(path, iteration), data, attributes=attributes)
    write_group(backend, layout.opened_path(path, iteration), {})
    for rank in range(size.ranks):
        write_group(
            backend, layout.marker_path(path, iteration, rank, layout.Mark.COMMITTED), {"num_records": size.records}
        )
    return len(data)


def write_ranks(url: str, path: str, size: Size, iteration: int, ranks: range) -> None:
    """What some ranks commit of an iteration, without tensors."""
    backend = open_backend(url)
    for rank in ranks:
        data = merge_catalogues([Rows(size, iteration=iteration, ranks=range(rank, rank + 1)).column])
        write_blob(backend, layout.catalogue_path(path, rank, iteration), data, attributes={})
        commit = write_group(backend, layout.rank_iteration_path(path, rank, iteration), {"complete": True})
        words = {"num_records": size.records, "nbytes": 0, "silent_sites": {}, "commit": document_checksum(commit)}
        write_group(backend, layout.marker_path(path, iteration, rank, layout.Mark.COMMITTED), words)


def generate(url: str, size: Size) -> str:
    """A run with all its iteration commits; says how large they are."""
    started = time.monotonic()
    _, attempt = begin(url, size)
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        work = [pool.submit(write_merged, url, attempt.path, size, number) for number in range(size.iterations)]
    nbytes = sum(job.result() for job in work) / (size.ranks * size.records * size.iterations)
    return f"generated in {time.monotonic() - started:.0f} s, {nbytes:.1f} bytes per record in the store"


def generate_ranks(url: str, size: Size) -> str:
    """A run in which all ranks have committed one iteration that is not merged yet."""
    started = time.monotonic()
    _, attempt = begin(url, size)
    bounds = [size.ranks * number // NUM_PROCESSES for number in range(NUM_PROCESSES + 1)]
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        shares = [range(*pair) for pair in itertools.pairwise(bounds)]
        for job in [pool.submit(write_ranks, url, attempt.path, size, 0, share) for share in shares]:
            job.result()
    return f"generated in {time.monotonic() - started:.0f} s"


def write_values(url: str, size: Size, rank: int) -> None:
    """All that one rank records, of tensors of 8 values."""
    backend = open_backend(url)
    writer = RankWriter(backend, attempt=read_attempts(backend)[-1], rank=rank, environment={})
    array = np.arange(8, dtype=np.float32)
    info = describe(array, rank=rank)
    for iteration in range(size.iterations):
        for number in range(size.records):
            place: dict[str, Any] = {
                "module": f"layers.{number // RECORDS_PER_LAYER}.{number % RECORDS_PER_LAYER}",
                "counter": number,
            }
            samples: dict[str, Any] = {"sample_dim": 0, "sample_ids": list(range(8))} if number % 2 else {}
            writer.write(array + number, info=dataclasses.replace(info, iteration=iteration, **place, **samples))
        writer.commit(iteration, expected=[], silent_sites={})
    writer.close(reason="the training ended")


def generate_values(url: str, size: Size) -> str:
    """A whole run with the values of all records, closed."""
    started = time.monotonic()
    backend, attempt = begin(url, size)
    for iteration in range(size.iterations):
        open_iteration(backend, attempt=attempt, iteration=iteration)
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        for job in [pool.submit(write_values, url, size, rank) for rank in range(size.ranks)]:
            job.result()
    for iteration in range(size.iterations):
        finish_iteration(backend, attempt=attempt, iteration=iteration)
    write_verdict(backend, attempt=attempt)
    return f"generated in {time.monotonic() - started:.0f} s"


def timed(work: Callable[[], int]) -> dict[str, float]:
    """How many records it went through, and how long that took."""
    started = time.monotonic()
    return {"records": work(), "total": time.monotonic() - started}


def check_all(url: str) -> int:
    """Check a run; nothing is wrong with it."""
    report = check_run(open_backend(url))
    assert not report.findings
    return report.num_records


def read_layer(url: str, iteration: int | None) -> dict[str, float]:
    """Open a run, select one layer, take a field of all its records and what is known of a hundred of them."""
    started = time.monotonic()
    run = open_run(url)
    opened = time.monotonic()
    records = run.select(layer_idx=LAYER) if iteration is None else run.select(layer_idx=LAYER, iteration=iteration)
    selected = time.monotonic()
    largest = float(records.column("overflow.absmax").max())
    taken = time.monotonic()
    infos = [record.info for record in records[:: max(1, len(records) // 100)]]
    assert largest > 0
    assert {info.layer_idx for info in infos} == {LAYER}
    ended = time.monotonic()
    times = {"open": opened - started, "select": selected - opened, "field": taken - selected}
    return {"records": len(records), **times, "identities": ended - taken, "total": ended - started}


def merge(url: str) -> dict[str, float]:
    """Commit an iteration as its coordinator does."""
    backend = open_backend(url)
    attempt = read_attempts(backend)[-1]
    started = time.monotonic()
    finish_iteration(backend, attempt=attempt, iteration=0)
    return {"total": time.monotonic() - started}


MEASUREMENTS: dict[str, Callable[[str], dict[str, float]]] = {
    "layer": lambda url: read_layer(url, None),
    "iteration": lambda url: read_layer(url, 0),
    "merge": merge,
    "check": lambda url: timed(lambda: check_all(url)),
    "identities": lambda url: timed(lambda: len([record.info for record in open_run(url).select()])),
    "frame": lambda url: timed(lambda: len(open_run(url).select().to_pandas())),
}


def measure(what: str, url: str) -> dict[str, float]:
    """What a measurement says, made in a process of its own; with the most memory that it took, in MB."""
    command = [sys.executable, __file__, "--measure", what, url]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(answer.stdout))


class Counted:
    """A backend that remembers which objects are asked for."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.keys: list[str] = []

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._backend, name)
        if not callable(verb):
            return verb

        def counted(key: str, *rest: Any, **options: Any) -> Any:
            self.keys.append(key)
            return verb(key, *rest, **options)

        return counted


def touched(folder: Path) -> list[tuple[str, int, int]]:
    """For a record in a stack, a large one and a sample of it: the objects and the requests that its values take."""
    url = str(folder / "read")
    large = np.ones((4, 256, 1024), dtype=np.float32)
    arrays = [large, *(np.ones((8, 8), dtype=np.float32) for _ in range(100))]
    infos = [describe(array, sample_dim=0, counter=number, call=number) for number, array in enumerate(arrays)]
    write_run(url, {0: [list(zip(arrays, infos, strict=True))]})
    records = open_run(url).select()
    found = []
    for what, row, sample in (("a record in a stack", 5, None), ("a large record", 0, None), ("a sample of it", 0, 2)):
        backend = Counted(open_backend(url))
        record = Record(records[row].info, location=records[row].location, reader=RunReader(backend))
        record.read(sample)
        found.append((what, len(set(backend.keys)), len(backend.keys)))
    return found


def show(what: str, figures: dict[str, float]) -> None:
    """One line."""
    times = ", ".join(f"{name} {value:.2f} s" for name, value in figures.items() if name not in {"records", "MB"})
    records = f"{figures['records']:,} records, " if "records" in figures else ""
    print(f"  {what}: {records}{times}, {figures['MB']:.0f} MB", flush=True)


def main(size: Size) -> None:
    """Generate, measure, print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        smaller = [
            dataclasses.replace(size, **{part: max(4, getattr(size, part) // 10)}) for part in ("ranks", "records")
        ]
        smaller.append(dataclasses.replace(size, iterations=max(1, size.iterations // 10)))
        print("one layer of a run, of all its iterations and of one:")
        for one in (size, *smaller):
            print(f"{one}: {generate(str(folder / 'run'), one)}")
            show("one layer, all iterations", measure("layer", str(folder / "run")))
            show("one layer, one iteration", measure("iteration", str(folder / "run")))
            shutil.rmtree(folder / "run")
        print(f"bars: {SECONDS_LAYER} s and {MEGABYTES_LAYER} MB for all iterations, {SECONDS_ITERATION} s for one")
        print("the coordinator commits one iteration:")
        for one in (size, *smaller[:2]):
            print(f"{dataclasses.replace(one, iterations=1)}: {generate_ranks(str(folder / 'run'), one)}")
            show("merged", measure("merge", str(folder / "run")))
            shutil.rmtree(folder / "run")
        whole = Size(ranks=8, records=max(4, size.records), iterations=64 * max(1, size.iterations // 10))
        print("every record of a run:")
        print(f"{whole}: {generate_values(str(folder / 'run'), whole)}")
        for what in ("check", "identities", "frame"):
            show(what, measure(what, str(folder / "run")))
        shutil.rmtree(folder / "run")
        print("to read the values of one record:")
        for what, objects, requests in touched(folder):
            print(f"  {what}: {objects} objects in {requests} requests")
        print(f"bar: {OBJECTS_READ} objects")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--records", type=int, default=1000, help="of one rank in one iteration")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        found = MEASUREMENTS[options.measure[0]](options.measure[1])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({**found, "MB": peak}))
    else:
        main(Size(ranks=options.ranks, records=options.records, iterations=options.iterations))
