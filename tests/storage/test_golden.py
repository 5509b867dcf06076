"""Reads runs that were written once, bit for bit."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze.engine.values import View, read_block_histogram
from ranktape.analyze.numerics.histograms.block_counts import BLOCK_AXES, NUM_CODES
from ranktape.errors import UsageError
from ranktape.storage.format.record_info import Keep
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.places.urls import open_backend
from ranktape.storage.records.record import Record
from ranktape.storage.records.run import Run, open_run

GOLDEN = Path(__file__).parent.parent / "golden"

FILES = {
    "restarted": "2ac3c7622f7fad3954cf6695d9efcab6b85e355f566564ddfd3f8072170668ff",
    "modes": "1a0e2a92de2c42d8101a7d6b5b2818adbf7b62fd8ece19672b24948b5c689d74",
    "blocks": "7a3e2c66b5f72943a1b974ff4986ddc16e1fbba675e464afc00d0475e5ab99f5",
}
"""SHA-256 over the names and bytes of all files: a golden run is never written anew."""

LATEST = {"restarted": [(0, 1), (2, 1)], "modes": [(0, 0)], "blocks": [(0, 0)]}
"""Iterations and attempts that readers show where they are not asked for a certain attempt."""


def golden(name: str) -> Run:
    return open_run(GOLDEN / name)


def expected(name: str) -> list[dict[str, Any]]:
    return [{"mode": "train", **one} for one in json.loads((GOLDEN / f"{name}.json").read_text())]


def stored(record: Record) -> np.ndarray[Any, Any]:
    if record.keep == Keep.STATISTICS:
        return record.statistics().to_vector()
    return record.histogram()[:NUM_CODES] if record.keep == Keep.HISTOGRAM else record.read()


def digest(values: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).tobytes()).hexdigest()


@pytest.mark.parametrize("name", FILES)
def test_no_byte_has_changed(name: str) -> None:
    total = hashlib.sha256()
    for path in sorted((GOLDEN / name).rglob("*")):
        if path.is_file():
            total.update(path.relative_to(GOLDEN).as_posix().encode() + b"\n" + path.read_bytes())
    assert total.hexdigest() == FILES[name]


@pytest.mark.parametrize("name", FILES)
def test_every_value_is_read(name: str) -> None:
    attempts = [0, 1]
    records = golden(name).select(attempt=attempts)
    found = [
        {
            "iteration": record.iteration,
            "attempt": record.attempt,
            "rank": record.rank,
            "module": record.module,
            "tensor_name": record.tensor_name,
            "counter": record.counter,
            "dtype": record.dtype,
            "shape": list(record.shape),
            "keep": record.keep,
            "mode": record.mode,
            "stored": [stored(record).dtype.name, list(stored(record).shape)],
            "sha256": digest(stored(record)),
        }
        for record in records
    ]
    assert sorted(found, key=place) == sorted(expected(name), key=place)


def place(record: dict[str, Any]) -> tuple[int, ...]:
    return tuple(record[name] for name in ("iteration", "attempt", "rank", "counter"))


@pytest.mark.parametrize("name", FILES)
def test_single_samples_are_read(name: str) -> None:
    records = [record for record in golden(name).select(keep="values") if record.sample_dim is not None]
    assert len({record.sample_dim for record in records}) == (2 if name == "restarted" else 1)
    for record in records:
        assert record.sample_dim is not None
        for sample in range(record.shape[record.sample_dim]):
            whole = record.read().take(sample, axis=record.sample_dim)
            assert digest(record.read(sample=sample)) == digest(whole)


@pytest.mark.parametrize("name", FILES)
def test_the_latest_attempt_is_shown(name: str) -> None:
    run = golden(name)
    records = run.select()
    pairs = zip(records.column("iteration").tolist(), records.column("attempt").tolist(), strict=True)
    assert sorted(set(pairs)) == LATEST[name]
    assert run.iterations == [iteration for iteration, _ in LATEST[name]]


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_wrong_in_it(name: str) -> None:
    report = check_run(open_backend(str(GOLDEN / name)), deep=True)
    assert [finding.message for finding in report.findings if finding.severity == "error"] == []


def test_the_statuses_of_restarted() -> None:
    run = golden("restarted")
    statuses = [(one.iteration, one.attempt, one.state.value, one.committed_ranks) for one in run.status()]
    assert statuses == [
        (0, 0, "complete", [0, 1]),
        (0, 1, "complete", [0, 1]),
        (1, 0, "dropped", []),
        (2, 0, "partial", [0]),
        (2, 1, "complete", [0, 1]),
        (3, 0, "skipped", [0]),
        (6, 1, "partial", []),
    ]
    assert run.status()[0].silent_sites == {rank: {"gone": "its hook did not fire"} for rank in (0, 1)}
    assert run.status()[3].missing == {1: "ended before it (killed by signal 9)"}
    assert run.status()[5].missing == {1: "the ring was full"}
    assert run.verdict().message() == "minimum met: 2 of 2 guaranteed iterations are stored complete (0, 2)"
    assert run.attributes["ranktape_schema"] == 1
    assert run.attributes["environment"] == {"host": "node-0"}


def test_the_status_of_modes() -> None:
    run = golden("modes")
    (status,) = run.status()
    assert (status.iteration, status.state.value, status.committed_ranks) == (0, "complete", [0, 1])
    assert (status.num_expected, status.num_recorded, status.num_missing) == (24, 22, 2)
    assert status.silent_sites == {rank: {"gone": "its hook did not fire"} for rank in (0, 1)}
    assert run.attributes["ranktape_schema"] == 1


def test_tensors_of_several_ranks_are_put_together() -> None:
    records = golden("modes").select(rank=1)
    assert records.select(tensor_name="grad_float32")[0].statistics().mean == 2.5
    assert records.select(tensor_name="grad_float16")[0].statistics().minimum is None
    assert records[2].path == records[0].path + ",eval"
    whole = [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
    assert records.select(tensor_name="weight")[0].global_view().read().tolist() == whole
    assert records.select(tensor_name="bias")[0].global_view().read().tolist() == [[0, 1, 2], [3, 4, 5]]
    total = records.select(tensor_name="output")[0].global_view()
    assert total.is_partial
    assert total.read().tolist() == [[10, 12, 14], [16, 18, 20]]


@pytest.mark.parametrize("axis", BLOCK_AXES)
def test_the_counted_blocks_are_those_of_the_values(axis: str) -> None:
    run = golden("blocks")
    names = ["bf16", "bf16_like", "cut", "fp16", "wide", "line", "one", "empty"]
    assert run.select(keep="histogram").column("tensor_name").tolist() == names
    for name in names:
        values = run.select(tensor_name=name, keep="values")[0].read()
        record = run.select(tensor_name=name, keep="histogram")[0]
        counted = read_block_histogram(record, axis=axis, view=View.COMPUTE)
        rounded = values.astype(ml_dtypes.bfloat16) if name == "wide" else values
        lines = rounded.reshape(-1, rounded.shape[-1] if rounded.ndim else 1)
        lines = lines if axis == "features" else lines.T
        patterns = np.ascontiguousarray(lines).view(np.uint16) & 0x7FFF
        infinity = int(np.array(np.inf, rounded.dtype).view(np.uint16))
        cells: Counter[tuple[int, int]] = Counter()
        num_zero, num_spoiled = 0, 0
        for line in patterns.tolist():
            for first in range(0, len(line), 32):
                block = line[first : first + 32]
                num_zero += max(block) == 0
                num_spoiled += max(block) >= infinity
                if 0 < max(block) < infinity:
                    half, exponent = math.frexp(float(np.uint16(max(block)).view(rounded.dtype)))
                    passed = sum(4096 * half >= cut for cut in counted.cuts)
                    cells.update(((exponent - 1) << 24 | passed, magnitude) for magnitude in block)
        kinds = counted.exponents.astype(np.int64) << 24 | counted.classes
        found = zip(kinds.tolist(), counted.magnitudes.tolist(), counted.counts.tolist(), strict=True)
        assert Counter({(kind, magnitude): number for kind, magnitude, number in found}) == cells
        assert (counted.zero_blocks, counted.spoiled_blocks) == (num_zero, num_spoiled)
        assert (counted.nan, counted.inf) == (int((patterns > infinity).sum()), int((patterns == infinity).sum()))


@pytest.mark.parametrize("name", ["restarted", "modes"])
def test_histograms_of_patterns_alone_have_no_blocks(name: str) -> None:
    for record in golden(name).select(keep="histogram"):
        with pytest.raises(UsageError, match="no blocks along 'tokens' were counted, but single values alone"):
            read_block_histogram(record, axis="tokens", view=View.COMPUTE)
