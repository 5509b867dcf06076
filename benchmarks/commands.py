"""How long does each analyze command take on a run of many small records, at first and when it is asked again?

A run like that of a small GPT is made (or used again, where `--folder` holds it), and another one that differs from it
in little. Each command is a process of its own, asked twice: cold, with nothing kept, and warm. What counts is the
processor time of the process and its children: other work on the machine does not add to it. `--answers` keeps what
the commands printed, to be compared with what another version prints.

commands.py [--records N] [--folder FOLDER] [--only COMMAND] [--answers FOLDER] [--warm] [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from ranktape.storage.format.attempt import read_attempts
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.layout import ANALYSIS
from ranktape.storage.format.progress import open_iteration, write_verdict
from ranktape.storage.places.urls import open_backend
from ranktape.storage.recording.writer import RankWriter
from tests.runs import describe, start

BATCH, TOKENS, WIDTH, HEADS = 2, 8, 64, 2
LINEAR = ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")
LINEAR_SITES = (
    ("forward", "pre", "input"),
    ("forward", "pre", "weight"),
    ("forward", "post", "output"),
    ("backward", "pre", "grad_output"),
    ("backward", "post", "grad_input"),
    ("backward", "post", "grad_weight"),
)
ATTENTION_SITES = (
    *(("forward", "pre", name) for name in ("query", "key", "value")),
    ("forward", "post", "output"),
    ("backward", "pre", "grad_output"),
    *(("backward", "post", f"grad_{name}") for name in ("query", "key", "value")),
)
SITES = (
    *((module, "linear", *site) for module in LINEAR for site in LINEAR_SITES),
    *(("attn", "attention", *site) for site in ATTENTION_SITES),
)
"""Of each record of a layer: module, type of layer, operation, phase, name."""

PER_LAYER = len(SITES)
SHAPES = {
    "weight": (WIDTH, WIDTH),
    "linear": (BATCH, TOKENS, WIDTH),
    "attention": (BATCH, HEADS, TOKENS, WIDTH // HEADS),
}
NUM_PROCESSES = 2
NOISE = 1e-3
"""How far the other run is off, relatively."""

SIZES = {2_000: (2, 4, 8), 100_000: (8, 25, 16)}
"""By the number of records about: ranks, layers and iterations."""

SECONDS = {2_000: 1.5, 100_000: 10.0}
"""How long a warm command may take."""

COMMANDS = {
    "ls": ("ls",),
    "overflow": ("overflow",),
    "overflow fp8": ("overflow", "--format", "fp8_e4m3"),
    "overflow mx": ("overflow", "--format", "mxfp8_e4m3", "--scaling", "block"),
    "overflow samples": ("overflow", "--per-sample"),
    "stats": ("stats",),
    "stats by layer": ("stats", "--by", "layer_idx"),
    "distribution": ("distribution",),
    "distribution by layer": ("distribution", "--kind", "log2", "--by", "layer_idx"),
    "distribution formats": ("distribution", "--kind", "formats"),
    "sweep": ("sweep",),
    "sweep mx": ("sweep", "--format", "mxfp8_e4m3,mxfp4_e2m1"),
    "sweep by layer": ("sweep", "--by", "layer_idx"),
    "findings": ("findings",),
    "trend": ("trend",),
    "trace": ("trace", "--sample", "0"),
    "replay": ("replay",),
    "compare": ("compare", "{other}"),
    "compare by layer": ("compare", "{other}", "--by", "layer_idx"),
    "compare neighbours": ("compare", "--neighbours"),
    "check": ("overflow", "--check", "overflow.total == 0"),
    "plot": ("plot",),
    "plot all": ("plot", "--all"),
    "report": ("report",),
}
"""What is asked."""

FILES = {"plot": "plot.svg", "report": "report.html"}
"""The commands that answer with files, and the names of these."""


def write_rank(url: str, rank: int, size: tuple[int, int, int], noise: float) -> None:
    """All that one rank records."""
    backend = open_backend(url)
    writer = RankWriter(backend, attempt=read_attempts(backend)[-1], rank=rank, environment={})
    num_ranks, num_layers, num_iterations = size
    for iteration in range(num_iterations):
        for counter in range(num_layers * PER_LAYER):
            layer, place = divmod(counter, PER_LAYER)
            module, layer_type, operation, phase, name = SITES[place]
            is_parameter = name.endswith("weight")
            # Copies of parameters are the same on all ranks.
            rng = np.random.default_rng([iteration, layer, place, 0 if name == "weight" else 1 + rank])
            values = rng.standard_normal(SHAPES["weight" if is_parameter else layer_type], dtype=np.float32)
            values *= (1e-4 if name.startswith("grad") else 1.0) * (1 + layer / 8) * (1 + iteration / 50)
            if (layer, rank, iteration, name) == (num_layers // 2, num_ranks - 1, 5, "output"):
                values[0] *= 40.0
            if noise:
                values *= 1 + noise * rng.standard_normal(values.shape, dtype=np.float32)
            array = values.astype(ml_dtypes.bfloat16)
            info = describe(
                array,
                iteration=iteration,
                rank=rank,
                sample_dim=None if is_parameter else 0,
                sample_ids=None if is_parameter else [BATCH * rank + sample for sample in range(BATCH)],
                module=f"blocks.{layer}.{module}",
                layer_type=layer_type,
                layer_idx=layer,
                layer_stack="blocks",
                operation=operation,
                phase=phase,
                component="FA" if layer_type == "attention" else "linear",
                tensor_name=name,
                layout="" if is_parameter else "BHTD" if layer_type == "attention" else "BTH",
                counter=counter,
            )
            writer.write(array, info=info)
        writer.commit(iteration, expected=[], silent_sites={})
    writer.close(reason="the training ended")


def make(folder: Path, *, size: tuple[int, int, int], noise: float) -> None:
    """A run of so many ranks, layers and iterations."""
    backend, attempt, _ = start(str(folder), world_size=size[0])
    for iteration in range(size[2]):
        open_iteration(backend, attempt=attempt, iteration=iteration)
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        for job in [pool.submit(write_rank, str(folder), rank, size, noise) for rank in range(size[0])]:
            job.result()
    for iteration in range(size[2]):
        finish_iteration(backend, attempt=attempt, iteration=iteration)
    write_verdict(backend, attempt=attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a command took."""

    processor: float
    """Seconds of the process and its children."""
    wall: float
    """Seconds until it was done."""
    megabytes: float
    """The most memory of one of these processes."""
    code: int
    """What it exited with."""


def ask(words: Sequence[str], *, answer: Path) -> Taken:
    """Run a command, and keep what it printed."""
    answer.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with answer.open("wb") as stdout, answer.with_suffix(".stderr").open("wb") as stderr:
        process = subprocess.Popen([sys.executable, "-m", "ranktape.analyze", *words], stdout=stdout, stderr=stderr)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Taken(
        processor=used.ru_utime + used.ru_stime,
        wall=time.monotonic() - started,
        megabytes=used.ru_maxrss / 1024,
        code=process.returncode,
    )


def words_of(name: str, *, run: Path, other: Path, answers: Path) -> list[str]:
    """The words of a command line."""
    command, *rest = (word.format(other=other) for word in COMMANDS[name])
    if command in FILES:
        file = answers / FILES[command] if name in FILES else answers / name
        return [command, str(run), *rest, "--output", str(file)]
    return [command, str(run), *rest, "--json"]


def show(name: str, taken: Sequence[Taken], *, bar: float) -> None:
    """One line of a table."""
    cells = [f"{one.processor:.2f} s" for one in taken]
    missed = " (missed)" if min(taken[-1].processor, taken[-1].wall) > bar else ""
    failed = f" EXIT {taken[-1].code}" if taken[-1].code not in {0, 3} else ""
    print(f"| {name} | {' | '.join(cells)}{missed}{failed} | {taken[-1].megabytes:.0f} MB |", flush=True)


def main() -> None:
    """Make the runs, ask everything, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, choices=list(SIZES), default=2_000, help="about so many")
    parser.add_argument("--folder", type=Path, help="where the runs are made, and found again")
    parser.add_argument("--only", action="append", choices=list(COMMANDS), help="ask nothing else; repeatable")
    parser.add_argument("--answers", type=Path, help="where what the commands print is kept")
    parser.add_argument("--warm", action="store_true", help="leave what is kept where it is")
    parser.add_argument("--rounds", type=int, default=1, help="how often the warm command is asked; the fastest counts")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp())
    answers = given.answers or folder / "answers"
    run, other = (folder / f"run_{given.records}{end}" for end in ("", "_other"))
    try:
        for place, noise in ((run, 0.0), (other, NOISE)):
            if not (place / "zarr.json").exists():
                make(place, size=SIZES[given.records], noise=noise)
        ranks, layers, iterations = SIZES[given.records]
        print(f"{ranks * layers * PER_LAYER * iterations:,} records; a warm command: {SECONDS[given.records]} s")
        print("| command | cold | warm | memory |\n|---|---|---|---|")
        for name in given.only or COMMANDS:
            words = words_of(name, run=run, other=other, answers=answers)
            file = answers / f"{name.replace(' ', '_')}.json"
            taken = []
            if not given.warm:
                for place in (run, other):
                    shutil.rmtree(place / ANALYSIS, ignore_errors=True)
                taken.append(ask(words, answer=file))
            warm = [ask(words, answer=file) for _ in range(given.rounds)]
            show(name, [*taken, min(warm, key=lambda one: one.processor)], bar=SECONDS[given.records])
    finally:
        if given.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
