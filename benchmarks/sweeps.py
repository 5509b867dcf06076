"""How fast is a sweep, beside the ways that people have today, and how much memory does it take?

One bfloat16 tensor, 21 levels. Each way in turn, ratios of times that were taken one after the other; ours includes
the counting, and is the median of a few runs beside each run of the other. The parts and their bars:

tensor      `tensor` mode against the original tool's way (`original_sweep.py`): at least 500 times as fast on N(0,1),
            200 times on a tensor with every finite bfloat16 in it.
mx          `mx` mode against torchao's `to_mx`, `to_dtype` and the metrics in float32, in a loop: at least 60 times as
            fast. `to_mx` has no offset: the loop does the same 21 times, which costs what 21 offsets would.
rules       all four scale rules from one counting, against one rule: as near to 1 as can be.
histogram   counting a tensor that is in no cache against reading it once: adding up its bytes as 64-bit integers,
            also in no cache, and reading its file from the page cache: at most 3 times as long; the counting of
            blocks beside it.
memory      the most memory, beyond that of before, that a sweep of a 2 GiB file takes as it reads it: below 64 MB.

sweeps.py [PART...] [--size N] [--rounds N] [--levels N] [--gib N]
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.histograms.block_histogram import count_blocks
from ranktape.analyze.numerics.histograms.histogram import count_values
from ranktape.analyze.numerics.quantization.schemes import ScaleRule
from ranktape.analyze.numerics.sweeps.options import SweepMode, SweepOptions
from ranktape.analyze.numerics.sweeps.sweep import sweep_array, sweep_formats

Array = NDArray[Any]

NUM_OWN_RUNS = 5
"""Of ours beside each run of the other way."""

MIB = 1 << 20

COLD_NBYTES = 1 << 30
"""Of copies of a tensor, taken in turn, of which no cache holds the next one."""

MEMORY_CASES = (
    ("bfloat16", "fp8_e4m3", SweepMode.TENSOR),
    ("bfloat16", "mxfp8_e4m3", SweepMode.MX),
    ("bfloat16", "nvfp4", SweepMode.MX),
    ("bfloat16", "fp8_e4m3", SweepMode.CHANNEL),
    ("bfloat16", "fp8_e4m3", SweepMode.LEGACY),
    ("float32", "fp8_e4m3", SweepMode.TENSOR),
    ("float32", "mxfp8_e4m3", SweepMode.MX),
    ("float32", "fp8_e4m3", SweepMode.LEGACY),
)
"""Type, format and mode of each sweep whose memory is measured."""

SAMPLE_SECONDS = 0.001
"""How often memory is looked at."""


def gauss(size: int) -> Array:
    """N(0,1)."""
    drawn: Array = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
    return drawn.astype(ml_dtypes.bfloat16)


def all_codes(size: int) -> Array:
    """Every finite bfloat16 equally often, in a random order."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    finite = patterns[np.isfinite(patterns.view(ml_dtypes.bfloat16).astype(np.float32))]
    values: Array = np.random.default_rng(0).permutation(np.resize(finite, size * size)).view(ml_dtypes.bfloat16)
    return values.reshape(size, size)


DATA: dict[str, Callable[[int], Array]] = {"N(0,1)": gauss, "all codes": all_codes}


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def paired(ours: Callable[[], object], other: Callable[[], object], *, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of both ways in turn: the median of several runs of ours beside each of the other."""
    ours()  # compiled, and its pages there
    own_times, other_times = [], []
    for _ in range(rounds):
        before = [seconds_of(ours) for _ in range(NUM_OWN_RUNS)]
        other_times.append(seconds_of(other))
        own_times.append(statistics.median([*before, *(seconds_of(ours) for _ in range(NUM_OWN_RUNS))]))
    return own_times, other_times


def print_pair(name: str, own: list[float], other: list[float], *, other_name: str, bar: str) -> None:
    ratios = sorted(one / mine for one, mine in zip(other, own, strict=True))
    print(
        f"{name}: {1e3 * statistics.median(own):.1f} ms (fastest {1e3 * min(own):.1f}), "
        f"{other_name} {statistics.median(other):.2f} s: "
        f"{statistics.median(ratios):.0f} times as fast, {ratios[0]:.0f} to {ratios[-1]:.0f} (bar: {bar})"
    )


def as_torch(array: Array) -> Any:
    import torch

    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def tensor_part(given: argparse.Namespace) -> None:
    from benchmarks.original_sweep import original_sweep

    for (data, make), bar in zip(DATA.items(), ("500", "200"), strict=True):
        array = make(given.size)
        tensor = as_torch(array)
        options = SweepOptions(num_levels=given.levels)
        own, other = paired(
            partial(sweep_array, array, format="fp8_e4m3", options=options),
            partial(original_sweep, tensor, format="fp8_e4m3", num_levels=given.levels),
            rounds=given.rounds,
        )
        print_pair(f"tensor mode, {data}", own, other, other_name="the original's way", bar=bar)


def mx_part(given: argparse.Namespace) -> None:
    import torch

    from benchmarks.original_sweep import measure

    torchao = importlib.import_module("torchao.prototype.mx_formats.mx_tensor")
    array = gauss(given.size)
    tensor = as_torch(array)
    element, block_size = torch.float8_e4m3fn, 32

    def torchao_loop() -> None:
        for _ in range(given.levels):
            scales, codes = torchao.to_mx(tensor, element, block_size)
            measure(tensor, torchao.to_dtype(codes, scales, element, block_size, torch.bfloat16))

    options = SweepOptions(mode=SweepMode.MX, num_levels=given.levels)
    own, other = paired(
        lambda: sweep_array(array, format="mxfp8_e4m3", options=options), torchao_loop, rounds=given.rounds
    )
    print_pair("mx mode, N(0,1)", own, other, other_name="torchao looped", bar="60")


def rules_part(given: argparse.Namespace) -> None:
    array = gauss(given.size)

    def sweep(rules: tuple[ScaleRule, ...]) -> None:
        counted = count_blocks(array)
        for rule in rules:
            options = SweepOptions(mode=SweepMode.MX, scale_rule=rule, num_levels=given.levels)
            sweep_formats(counted, formats=["mxfp8_e4m3"], options=options)

    own, other = paired(lambda: sweep((ScaleRule.FLOOR,)), lambda: sweep(tuple(ScaleRule)), rounds=given.rounds)
    ratio = statistics.median(four / one for four, one in zip(other, own, strict=True))
    print(
        f"four scale rules from one counting: {1e3 * statistics.median(other):.1f} ms, "
        f"one rule {1e3 * statistics.median(own):.1f} ms: {ratio:.2f} times as long"
    )


def histogram_part(given: argparse.Namespace) -> None:
    counts: dict[str, Callable[[Array], object]] = {"per tensor": count_values, "blocks": count_blocks}
    for data, make in DATA.items():
        array = make(given.size)
        copies = [array.copy() for _ in range(max(2, COLD_NBYTES // array.nbytes))]
        buffer = np.empty_like(array)
        with tempfile.TemporaryFile() as file:
            file.write(array.tobytes())
            file.flush()
            readings: dict[str, Callable[[], object]] = {
                "adding up its 64-bit words": partial(_sum_of_next, itertools.cycle(copies)),
                "reading its file from the page cache": partial(_read_file, file, buffer),
            }
            for (name, count), (reading, read) in itertools.product(counts.items(), readings.items()):
                own, other = paired(
                    partial(_count_next, count, itertools.cycle(copies)), read, rounds=max(given.rounds, 7)
                )
                ratio = statistics.median(mine / one for mine, one in zip(own, other, strict=True))
                print(
                    f"histogram {name}, {data}: {1e3 * statistics.median(own):.1f} ms, {reading} "
                    f"{1e3 * statistics.median(other):.1f} ms: {ratio:.2f} times as long"
                    f"{' (bar: 3)' if name == 'per tensor' else ''}"
                )


def _count_next(count: Callable[[Array], object], arrays: Iterator[Array]) -> None:
    count(next(arrays))


def _sum_of_next(arrays: Iterator[Array]) -> None:
    np.add.reduce(next(arrays).reshape(-1).view(np.uint64))


def _read_file(file: IO[bytes], buffer: Array) -> None:
    assert os.preadv(file.fileno(), [buffer.reshape(-1).view(np.uint8).data], 0) == buffer.nbytes


def memory_part(given: argparse.Namespace) -> None:
    rows = (int(given.gib * (1 << 30)) // 2) // 8192
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tensor"
        part = gauss(8192 // 8)
        for dtype in ("bfloat16", "float32"):
            filled = part.reshape(-1, 8192).astype(dtype if dtype == "float32" else ml_dtypes.bfloat16)
            shape = (rows if dtype == "bfloat16" else rows // 2, 8192)
            with path.open("wb") as file:
                for start in range(0, shape[0], filled.shape[0]):
                    file.write(filled[: shape[0] - start].tobytes())
            for kind, name, mode in MEMORY_CASES:
                if kind == dtype:
                    command = [sys.executable, __file__, "--child", str(path), dtype, str(shape[0]), name, mode]
                    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                    size = path.stat().st_size / (1 << 30)
                    print(f"memory, {dtype} file of {size:.2f} GiB, {name}, {mode} mode: {found.stdout.strip()}")


def sweep_in_child(path: str, dtype: str, num_rows: str, name: str, mode: str) -> None:
    """Sweep a file and print how much memory of its own the process had at most, beyond that of before."""
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(np.float32)
    options = SweepOptions(mode=SweepMode(mode))
    sweep_array(np.ones((64, 8192)).astype(kind), format=name, options=options)
    array = np.memmap(path, dtype=np.uint16 if kind.itemsize == 2 else kind, mode="r", shape=(int(num_rows), 8192))  # noqa: PLR2004
    peak, done = [own_memory()], threading.Event()
    before = peak[0]

    def watch() -> None:
        while not done.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    taken = seconds_of(lambda: sweep_array(array.view(kind), format=name, options=options))
    done.set()
    watcher.join()
    print(f"{(peak[0] - before) / MIB:.1f} MiB at most, {taken:.1f} s (bar: 64 MB)")


def own_memory() -> int:
    """Bytes of memory that is the process's own: not those of the file, which the kernel may drop."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["RssAnon"].split()[0])


PARTS = {"tensor": tensor_part, "mx": mx_part, "rules": rules_part, "histogram": histogram_part, "memory": memory_part}


def main() -> None:
    """Run the parts that were named, or all."""
    if sys.argv[1:2] == ["--child"]:
        sweep_in_child(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all unless named")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the tensor")
    parser.add_argument("--rounds", type=int, default=3, help="how often each pair is timed")
    parser.add_argument("--levels", type=int, default=21, help="levels of a sweep")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the file of which memory is measured")
    given = parser.parse_args()
    unknown = [name for name in given.parts if name not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    print(f"{given.size} x {given.size} bfloat16, {given.levels} levels, median of {given.rounds} rounds")
    for name in given.parts or PARTS:
        PARTS[name](given)


if __name__ == "__main__":
    main()
