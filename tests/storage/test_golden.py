"""Can runs of every schema that was ever written still be read, bit for bit?"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.errors import UsageError
from ranktape.storage.format.block_counts import BLOCK_AXES
from ranktape.storage.format.commit import finish_iteration
from ranktape.storage.format.progress import open_iteration
from ranktape.storage.format.record_info import Keep
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.places.urls import open_backend
from ranktape.storage.records.record import Record
from ranktape.storage.records.run import Run, open_run
from tests.runs import describe, start

GOLDEN = Path(__file__).parent.parent / "golden"

FILES = {
    "schema_1": "b4be5c3c3bac8c5a5bdd439979329783cc693950eef9eb682549fe0e781d9d20",
    "schema_2": "cb82266df3e09f46a12d5c963260f8f39dff133b377904dc535492f367b20eca",
    "schema_3": "8ca7cd3ea2681204bfe7d5c1f01de33a87129a1f3a2a2190a6979ef9fd51c2ba",
    "schema_4": "1fbfb720682c976a0dfb675960e77c925a6731500f516c0d5c1f6e32b9022fb8",
}
"""SHA-256 over the names and bytes of all files: a golden run is never written anew."""

LATEST = {"schema_1": [(0, 0), (5, 0)], "schema_2": [(0, 1), (2, 1)], "schema_3": [(0, 0)], "schema_4": [(0, 0)]}
"""Iterations and attempts that readers show where they are not asked for a certain attempt."""


def golden(name: str) -> Run:
    return open_run(GOLDEN / name)


def expected(name: str) -> list[dict[str, Any]]:
    return [{"mode": "train", **one} for one in json.loads((GOLDEN / f"{name}.json").read_text())]


def stored(record: Record) -> np.ndarray[Any, Any]:
    if record.keep == Keep.STATISTICS:
        return record.statistics().to_vector()
    return record.counts() if record.keep == Keep.HISTOGRAM else record.read()


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
    assert len({record.sample_dim for record in records}) == (2 if name == "schema_2" else 1)
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


def test_the_statuses_of_schema_1() -> None:
    run = golden("schema_1")
    statuses = [(one.iteration, one.attempt, one.state.value, one.num_records, one.nbytes) for one in run.status()]
    assert statuses == [(0, 0, "complete", 10, 9328), (5, 0, "complete", 10, 9328)]
    assert run.status()[0].silent_sites == {1: {"gone": "its hook did not fire"}}
    assert run.verdict().met
    assert run.verdict().final
    assert run.attributes["ranktape_schema"] == 1


def test_the_statuses_of_schema_2() -> None:
    run = golden("schema_2")
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
    assert run.attributes["ranktape_schema"] == 2
    assert run.attributes["environment"] == {"host": "node-0"}


def test_the_status_of_schema_3() -> None:
    run = golden("schema_3")
    (status,) = run.status()
    assert (status.iteration, status.state.value, status.committed_ranks) == (0, "complete", [0, 1])
    assert (status.num_expected, status.num_recorded, status.num_missing) == (24, 22, 2)
    assert status.silent_sites == {rank: {"gone": "its hook did not fire"} for rank in (0, 1)}
    assert run.attributes["ranktape_schema"] == 3


def test_the_columns_of_schema_1() -> None:
    records = golden("schema_1").select(iteration=5, rank=1)
    assert records.column("tensor_name").tolist() == ["scale", "codes", "empty", "input", "weight"]
    assert records.column("nbytes").tolist() == [8, 512, 0, 4096, 48]
    assert records.column("checksum").tolist() == [2212089578, 1883895340, 0, 3093591870, 1577032937]
    assert records.column("overflow.nan.count").tolist() == [0, 2, 0, 1, 0]
    assert records.column("sample_dim").tolist()[3] == 0
    assert records.column("sample_ids").tolist()[2:4] == ["null", '["a","b","c","d"]']
    assert records.column("keep").tolist() == ["values"] * 5
    assert records.column("mode").tolist() == ["train"] * 5
    assert records.column("stack").tolist() == [""] * 5
    assert records.column("index").tolist() == [-1] * 5
    assert records[4].metadata == {"note": "ü"}
    assert records[0].path.startswith("attempt_000-6df2158f/rank_00001/iter_00000005/%C2%B5%2Fodd%2Cname%20xx")


def test_the_columns_of_schema_2() -> None:
    records = golden("schema_2").select(iteration=0, attempt=0, rank=1)
    assert records.column("tensor_name").tolist() == [
        *("input", "key", "weight", "input", "input", "input", "empty", "scale", "scale", "grad_output"),
    ]
    assert records.column("nbytes").tolist() == [4096, 4096, 4224, 12, 12, 12, 0, 8, 8, 262144]
    assert records.column("index").tolist() == [-1, -1, -1, 0, 1, 2, -1, 0, 1, -1]
    assert records.column("stack").tolist()[2:5] == ["", "stack_bfloat16_2x3_BH_0", "stack_bfloat16_2x3_BH_0"]
    assert records.column("microbatch").tolist()[3:6] == [0, 1, 0]
    assert records.column("call").tolist()[3:6] == [0, 0, 1]
    checksums = [
        3778161996,
        3028913242,
        3045505417,
        2662947178,
        2642752536,
        806592901,
        0,
        516754770,
        249465330,
        3101362697,
    ]
    assert records.column("checksum").tolist() == checksums
    assert records.column("overflow.zero.count").tolist() == [2, 0, 0, 1, 1, 1, 0, 0, 1, 0]
    assert records[0].sample_ids == ["a", "b", "ü", 4]
    assert records[2].metadata == {"note": "ü"}
    assert records[3].compute_dtype == "float32"
    assert records[3].placement == {"mesh": ["tp"], "coordinates": [1], "placements": ["Shard(1)"], "shape": [2, 6]}
    assert records[3].overflow.per_sample is not None
    assert records[7].quant_type == "my/fp8"
    assert records[7].module == "µ/odd,name " + "x" * 220
    assert records[9].keep == "histogram"
    assert int(records[9].counts().sum()) == 700


def test_the_columns_of_schema_3() -> None:
    records = golden("schema_3").select(rank=1)
    assert records.column("mode").tolist() == ["train"] * 2 + ["eval"] * 2 + ["train"] * 3 + ["eval"] + ["train"] * 3
    kept = ["values"] * 4 + ["statistics"] * 3 + ["histogram"] + ["values"] * 3
    assert records.column("keep").tolist() == kept
    assert records.column("stack").tolist()[4:7] == ["stack_float64_10_1"] * 3
    assert records.column("nbytes").tolist()[4:8] == [80, 80, 80, 262144]
    assert records.column("numel").tolist()[4:8] == [2048, 12, 0, 2048]
    assert records[2].path == records[0].path + ",eval"
    assert records[9].placement == {
        "mesh": {"axes": ["tp"], "shape": [2], "ranks": [0, 1]},
        "coordinates": [1],
        "placements": ["replicate"],
        "global_shape": [2, 3],
        "offset": [0, 0],
        "partial": False,
    }


def test_the_values_of_schema_1() -> None:
    records = golden("schema_1").select(iteration=5, rank=1)
    np.testing.assert_array_equal(records.select(tensor_name="weight")[0].read(), np.arange(12.0).reshape(3, 4))
    assert records.select(tensor_name="scale")[0].read() == 2.5
    start = records.select(tensor_name="input")[0].read()[0, 0, :4]
    assert start.view(np.uint16).tolist() == [0x7FC0, 0x7F80, 0x40A0, 0x40A0]


def test_the_values_of_schema_2() -> None:
    records = golden("schema_2").select(iteration=2, rank=1)
    start = records.select(tensor_name="input", module="layers.0.query")[0].read()[0, 0, :4]
    assert start.view(np.uint16).tolist() == [0x7FC0, 0x7F80, 0x8000, 0x0000]
    stacked = [record.read()[0].view(np.uint16).tolist() for record in records.select(module="layers.*.mlp")]
    assert stacked == [[0x7FC0, 0xFF80, 0x8000]] * 3
    assert [float(record.read()) for record in records.select(tensor_name="scale")] == [3.5, -0.0]


def test_the_values_of_schema_3() -> None:
    records = golden("schema_3").select(rank=1)
    statistics = records.select(tensor_name="grad_float32")[0].statistics()
    assert (statistics.num_elements, statistics.num_finite, statistics.sum) == (12, 12, 30.0)
    assert (statistics.mean, statistics.moment_2, statistics.moment_3) == (2.5, 143.0, 0.0)
    assert (statistics.minimum, statistics.maximum, statistics.absmax) == (-3.0, 8.0, 8.0)
    assert records.select(tensor_name="grad_float16")[0].statistics().minimum is None
    assert records.select(tensor_name="grad_bfloat16")[0].statistics().num_finite == 2046
    whole = [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
    assert records.select(tensor_name="weight")[0].global_view().read().tolist() == whole
    assert records.select(tensor_name="bias")[0].global_view().read().tolist() == [[0, 1, 2], [3, 4, 5]]
    total = records.select(tensor_name="output")[0].global_view()
    assert total.is_partial
    assert total.read().tolist() == [[10, 12, 14], [16, 18, 20]]


@pytest.mark.parametrize("axis", BLOCK_AXES)
def test_the_blocks_of_schema_4_are_those_of_the_values(axis: str) -> None:
    run = golden("schema_4")
    names = ["bf16", "bf16_like", "cut", "fp16", "wide", "line", "one", "empty"]
    assert run.select(keep="histogram").column("tensor_name").tolist() == names
    for name in names:
        values = run.select(tensor_name=name, keep="values")[0].read()
        counted = run.select(tensor_name=name, keep="histogram")[0].block_counts(axis=axis)
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


@pytest.mark.parametrize("name", ["schema_2", "schema_3"])
def test_histograms_of_earlier_schemas_have_no_blocks(name: str) -> None:
    for record in golden(name).select(keep="histogram"):
        with pytest.raises(UsageError, match="no blocks along 'tokens' were counted, but single values alone"):
            record.block_counts(axis="tokens")


@pytest.mark.parametrize("name", ["schema_1", "schema_2", "schema_3"])
def test_a_run_that_is_continued_has_the_schema_of_what_continues_it(name: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / "run")
    backend, attempt, writers = start(str(tmp_path / "run"), world_size=2, resume=True)
    assert attempt.number > 0
    open_iteration(backend, attempt=attempt, iteration=7)
    for rank, writer in enumerate(writers):
        array = np.ones(3, np.float32)
        for mode in ("train", "eval"):
            writer.write(array, info=describe(array, iteration=7, rank=rank, attempt=attempt.number, mode=mode))
        writer.commit(7, expected=[], silent_sites={})
    finish_iteration(backend, attempt=attempt, iteration=7)
    run = open_run(tmp_path / "run")
    before = golden(name).attributes
    kept = {key: value for key, value in before.items() if key not in {"ranktape_schema", "ranktape_checksum"}}
    assert run.attributes | kept == run.attributes
    assert run.attributes["ranktape_schema"] == 4
    assert run.iterations == [iteration for iteration, _ in LATEST[name]] + [7]
    records = run.select()
    assert len(records.select(mode="eval", iteration=7)) == 2
    assert all(stored(record) is not None for record in records)
    assert run.attributes["first_schema"] == before["ranktape_schema"]
    report = check_run(backend, deep=True)
    assert [finding.message for finding in report.findings if finding.is_error] == []
