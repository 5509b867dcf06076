"""How fast does a rank store tensors, beside a plain file, zarr's `create_array` and `torch.save`?

One thread, tensors with their identities ready, each way in turn. Ours is `RankWriter`: checksums, documents,
catalogue and commit included; a plain file has none of these, but is flushed as well. In memory (/dev/shm) where there
is such a place, so that the numbers are of the software; give another folder to measure a disk. The bars: at 1 MiB and
more at least 75 % of the bytes per second of a plain file; at 16 KiB at least 20 times as fast as `create_array`, 5
times as `torch.save`.

write_path.py [FOLDER]
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr

from ranktape.storage.format.record_info import RecordInfo
from ranktape.storage.recording.writer import RankWriter
from tests.runs import describe, start

ROUNDS = 7
MIB = 1 << 20
LARGE = ((MIB, 256), (16 * MIB, 16), (64 * MIB, 6))
"""Bytes of a tensor, and how many."""
SMALL = (16 << 10, 1000)
NUM_CREATED = 100
"""As many of the small ones go through `create_array` and `torch.save`: each costs the same."""

Tensors = list[tuple[np.ndarray[Any, Any], RecordInfo]]


def make(nbytes: int, count: int) -> Tensors:
    """Tensors of activations' form: a few samples, rows of 1,024 float32."""
    bits = np.random.default_rng(0)
    arrays = [bits.standard_normal((4, nbytes // 16384, 1024), dtype=np.float32) for _ in range(min(count, 4))]
    infos = [describe(array, sample_dim=0) for array in arrays]
    return [(arrays[number % len(arrays)], _renamed(infos[number % len(arrays)], number)) for number in range(count)]


def _renamed(info: RecordInfo, number: int) -> RecordInfo:
    document = info.to_json()
    return RecordInfo.from_json(document | {"module": f"layers.{number}.up", "layer_idx": number, "counter": number})


def plain(folder: Path, tensors: Tensors) -> None:
    for number, (array, _) in enumerate(tensors):
        with (folder / str(number)).open("wb", buffering=0) as file:
            file.write(array.data)
    # As a commit does it: all files, once they are written.
    for number in range(len(tensors)):
        with (folder / str(number)).open("rb", buffering=0) as file:
            os.fdatasync(file)


def begin(folder: Path) -> RankWriter:
    """What a rank does once, before its first iteration."""
    _, _, [writer] = start(folder / "run")
    return writer


def ours(writer: RankWriter, tensors: Tensors) -> None:
    for array, info in tensors:
        writer.write(array, info=info)
    writer.commit(0, expected=[], silent_sites={})


def create_array(folder: Path, tensors: Tensors) -> None:
    group = zarr.create_group(folder / "zarr")
    for array, info in tensors[:NUM_CREATED]:
        document = info.to_json()
        created = group.create_array(
            info.module, shape=array.shape, dtype=array.dtype, chunks=array.shape, compressors=None, attributes=document
        )
        created[...] = array


def torch_save(folder: Path, tensors: Tensors) -> None:
    for array, info in tensors[:NUM_CREATED]:
        torch.save({"tensor": torch.from_numpy(array), "info": info.to_json()}, folder / f"{info.module}.pt")


OTHERS: dict[str, Callable[[Path, Tensors], None]] = {
    "plain file": plain,
    "create_array": create_array,
    "torch.save": torch_save,
}


def seconds_of(way: str, base: Path, tensors: Tensors) -> float:
    """Wall time in a folder of its own, which is removed."""
    folder = base / "round"
    folder.mkdir()
    work = partial(ours, begin(folder)) if way == "run" else partial(OTHERS[way], folder)
    begun = time.perf_counter()
    work(tensors)
    taken = time.perf_counter() - begun
    shutil.rmtree(folder)
    return taken


def main() -> None:
    """Time the ways in turn; print medians and ratios."""
    memory = Path("/dev/shm")  # noqa: S108  # a folder with a random name is made in it
    where = sys.argv[1] if len(sys.argv) > 1 else (str(memory) if memory.is_dir() else None)
    with tempfile.TemporaryDirectory(dir=where) as name:
        base = Path(name)
        print(f"in {base.parent}, median of {ROUNDS}")
        for nbytes, count in LARGE:
            tensors = make(nbytes, count)
            pairs = [[seconds_of(way, base, tensors) for way in ("plain file", "run")] for _ in range(ROUNDS)]
            speeds = [count * nbytes / 1e6 / statistics.median(column) for column in zip(*pairs, strict=True)]
            ratio = statistics.median(file / run for file, run in pairs)
            print(f"{nbytes // MIB:3d} MiB: plain file {speeds[0]:6.0f} MB/s, run {speeds[1]:6.0f} MB/s,", end=" ")
            print(f"{ratio:.0%} of a plain file (bar: 75 %)")
        nbytes, count = SMALL
        tensors = make(nbytes, count)
        times: dict[str, list[float]] = {"run": [], "create_array": [], "torch.save": []}
        for _ in range(ROUNDS):
            for way, taken in times.items():
                taken.append(seconds_of(way, base, tensors) / (count if way == "run" else NUM_CREATED))
        print(", ".join(f"{way} {statistics.median(taken) * 1e6:.0f} us" for way, taken in times.items()), end=" ")
        print("for a tensor of 16 KiB")
        for way, bar in (("create_array", 20), ("torch.save", 5)):
            ratio = statistics.median(other / own for other, own in zip(times[way], times["run"], strict=True))
            print(f"16 KiB: {ratio:.1f} times as fast as {way} (bar: {bar})")


if __name__ == "__main__":
    main()
