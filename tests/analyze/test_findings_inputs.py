"""Findings are true of tensors of every kind: spoiled, sharded, reduced, imported, few and many."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.findings.find import find
from ranktape.analyze.findings.finding import Finding, Severity
from ranktape.analyze.findings.replicas import replica_differs
from ranktape.analyze.findings.survey import Survey
from ranktape.analyze.findings.thresholds import MAX_MEASURED_COPIES
from ranktape.analyze.identity import role_of
from ranktape.analyze.legacy.open import open_source
from ranktape.analyze.questions.findings import findings
from ranktape.capture.writing.counting import reduce_to
from tests.analyze.faulty_runs import Place, Sizes, faulty_run
from tests.analyze.pt_files import legacy_file
from tests.analyze.runs import Tensor, describe_tensor, store

Array = np.ndarray[Any, Any]
RNG_SEED = 3


def found_in(folder: Path, tensors: list[Tensor], **options: Any) -> list[Finding]:
    """What is found in a run of those tensors."""
    return find(store(folder, tensors).select(), engine=Engine(use_cache=False), **options)


def normal(*shape: int, seed: int = RNG_SEED, dtype: Any = np.float32) -> Array:
    """Ordinary values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_nan_spreads_from_where_it_begins(tmp_path: Path) -> None:
    def fault(place: Place, tensor: Array) -> Array:
        if place[:2] == (10, 1) and place[2:] == (1, "output"):
            tensor = tensor.copy()
            tensor[2, 3, 4] = np.nan
        return tensor

    findings = find(faulty_run(tmp_path, fault, sizes=Sizes(iterations=(0, 10))).select())
    assert len(findings) == 1
    found = findings[0]
    assert (found.kind, found.severity, found.where["rank"], found.where["layer_idx"]) == ("nan", Severity.HIGH, 1, 1)
    assert (found.where["iteration"], found.where["tensor_name"]) == (10, "output")
    assert "1 of 1536 elements" in found.evidence
    assert found.consequences[0].startswith("layers.2.linear input on rank 1 has NaN")


def test_infinities_of_every_kind(tmp_path: Path) -> None:
    spoiled, beyond, mask = normal(4, 8), normal(4, 8), normal(4, 8)
    spoiled[0, 0], beyond[1, 1] = -np.inf, 3.4e38
    mask[2] = -np.inf
    tensors = [
        # On ranks of their own: none of them follows from another.
        describe_tensor(spoiled, tensor_name="input", rank=0),
        describe_tensor(beyond, tensor_name="other", rank=1, compute_dtype="bfloat16"),
        describe_tensor(mask, tensor_name="attention_mask", rank=2),
        describe_tensor(np.full((4, 8), 448, dtype=ml_dtypes.float8_e4m3fn), tensor_name="cut", rank=3),
    ]
    findings = {one.where["tensor_name"]: one for one in found_in(tmp_path, tensors)}
    assert (findings["input"].kind, findings["input"].severity) == ("inf", Severity.HIGH)
    assert (findings["other"].kind, findings["other"].severity) == ("overflow", Severity.HIGH)
    assert "bfloat16" in findings["other"].title
    assert (findings["attention_mask"].kind, findings["attention_mask"].severity) == ("inf", Severity.LOW)
    assert (findings["cut"].kind, findings["cut"].severity) == ("overflow", Severity.MEDIUM)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3), dtype=np.float32),
        np.array(1.5, dtype=np.float32),
        np.array([True, False]),
        np.arange(64).reshape(8, 8),
        normal(1),
        normal(4, 4) + 1j * normal(4, 4, seed=4),
    ],
)
def test_what_has_nothing_wrong(tmp_path: Path, array: Array) -> None:
    assert found_in(tmp_path, [describe_tensor(array)], with_channels=True) == []


def test_no_records_no_findings(tmp_path: Path) -> None:
    assert find(store(tmp_path, [describe_tensor(normal(4))]).select()[:0]) == []


def test_zeros(tmp_path: Path) -> None:
    tensors = [
        describe_tensor(np.zeros((4, 8), dtype=np.float32), tensor_name="output", layer_idx=0),
        describe_tensor(np.zeros((4, 8), dtype=np.float32), tensor_name="bias", layer_idx=0),
        describe_tensor(np.full((4, 8), -2.5, dtype=np.float32), tensor_name="input", layer_idx=0),
        describe_tensor(np.ones((4, 8), dtype=np.float32), tensor_name="weight", layer_idx=0),
    ]
    (found,) = found_in(tmp_path, tensors)
    assert (found.kind, found.where["tensor_name"], found.severity) == ("zero", "output", Severity.LOW)


def shards(*, num_ranks: int, seed: int = 0) -> list[Tensor]:
    """What tensor parallelism holds without saying so: every rank a part of its own, and a norm that all share."""
    return [
        describe_tensor(
            normal(16, 8, seed=0 if name == "norm" else 1 + rank + 100 * layer + seed, dtype=ml_dtypes.bfloat16),
            rank=rank,
            layer_idx=layer,
            module=f"layers.{layer}.{name}",
            tensor_name="weight",
        )
        for rank in range(num_ranks)
        for layer in range(4)
        for name in ("query", "output", "norm")
    ]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shards_are_no_copies(tmp_path: Path, num_ranks: int) -> None:
    assert found_in(tmp_path, shards(num_ranks=num_ranks)) == []


def test_data_parallel_over_tensor_parallel(tmp_path: Path) -> None:
    """Ranks 0 and 2 have the same shards, 1 and 3 others: a bit of rank 3 is wrong, and two copies cannot say whose."""
    tensors = [
        (array, dataclasses.replace(info, rank=info.rank + 2 * copy))
        for copy in (0, 1)
        for array, info in shards(num_ranks=2)
    ]
    place = next(number for number, (_, info) in enumerate(tensors) if (info.rank, info.layer_idx) == (3, 2))
    changed = tensors[place][0].copy()
    changed.view(np.uint16)[0, 0] ^= 1
    tensors[place] = (changed, tensors[place][1])
    findings = found_in(tmp_path, tensors)
    assert [one.kind for one in findings] == ["replica_differs"]
    assert (findings[0].where["ranks"], findings[0].where["layer_idx"]) == ([1, 3], 2)


def test_few_copies_that_differ_from_an_equal_majority_are_findings(tmp_path: Path) -> None:
    """Of a single weight without placement: more than a quarter that differ, and not just one, are shards."""
    for num_ranks in range(2, 10):
        for num_odd in range(1, num_ranks // 2 + 1):
            tensors = [
                describe_tensor(
                    normal(4, 8, seed=rank if rank < num_odd else 99), rank=rank, module="head", tensor_name="weight"
                )
                for rank in range(num_ranks)
            ]
            records = store(tmp_path / f"{num_ranks}_{num_odd}", tensors).select()
            survey = Survey(records, engine=Engine(use_cache=False))
            found = [records.column("rank")[list(one.places)].tolist() for one in replica_differs(survey)]
            is_wrong = num_ranks > 2 and (num_odd == 1 or 4 * num_odd <= num_ranks)
            assert found == ([list(range(num_odd))] if is_wrong else []), (num_ranks, num_odd)


def placed(array: Array, *, rank: int, word: str, **fields: Any) -> Tensor:
    """One of the tensors of a mesh of three ranks."""
    placement = {
        "mesh": {"axes": ["tp"], "shape": [3], "ranks": [0, 1, 2]},
        "coordinates": [rank],
        "placements": [word],
        "global_shape": [*array.shape] if word == "replicate" else [3 * array.shape[0], *array.shape[1:]],
        "offset": [0] * array.ndim if word == "replicate" else [rank * array.shape[0], *[0] * (array.ndim - 1)],
        "partial": False,
    }
    return describe_tensor(array, rank=rank, placement=placement, **fields)


@pytest.mark.parametrize("word", ["replicate", "shard(0)"])
def test_placements_say_what_is_a_copy(tmp_path: Path, word: str) -> None:
    tensors = [placed(normal(4, 8, seed=rank // 2), rank=rank, word=word, tensor_name="input") for rank in range(3)]
    findings = found_in(tmp_path, tensors)
    # Ranks 0 and 1 have the same bits.
    assert [(one.kind, one.where["rank"]) for one in findings] == (
        [("replica_differs", 2)] if word == "replicate" else []
    )


def test_the_copies_that_differed_first_are_compared_element_by_element(tmp_path: Path) -> None:
    tensors = [
        placed(normal(4, 8, seed=rank // 2), rank=rank, word="replicate", layer_idx=layer, counter=layer)
        for layer in range(MAX_MEASURED_COPIES + 2)
        for rank in range(3)
    ]
    survey = Survey(store(tmp_path, tensors).select(), engine=Engine(use_cache=False))
    found = [(one.where["layer_idx"], "of 32 elements differ" in one.evidence) for one in replica_differs(survey)]
    assert found == [(layer, layer < MAX_MEASURED_COPIES) for layer in range(MAX_MEASURED_COPIES + 2)]


def test_placements_of_a_stranger_are_not_compared_and_the_answer_says_so(tmp_path: Path) -> None:
    tensors = [describe_tensor(normal(4, 8), rank=rank, placement={"mesh": [0, 1]}) for rank in range(2)]
    table = findings(store(tmp_path, [*tensors, describe_tensor(normal(4, 8), tensor_name="output")]).select())
    assert table.rows == ()
    assert table.notes == ("the placement of 2 records cannot be read: copies of them are not compared",)


@pytest.mark.parametrize("keep", ["histogram", "statistics"])
def test_what_was_kept_is_enough_for_a_rank(tmp_path: Path, keep: str) -> None:
    tensors = []
    for rank in range(4):
        array, info = describe_tensor(
            (normal(64, 64, seed=rank) * (4096 if rank == 2 else 1)).astype(ml_dtypes.bfloat16), rank=rank, sample_dim=0
        )
        kept = reduce_to(keep, array, info=info)
        assert kept is not None
        tensors.append(kept)
    findings = found_in(tmp_path, tensors, with_channels=True)
    assert [(one.kind, one.where["rank"]) for one in findings] == [("rank_differs", 2)]


def test_a_folder_of_files(tmp_path: Path) -> None:
    for rank in range(4):
        tensor = torch.from_numpy(normal(16, 16, seed=rank) * (4096.0 if rank == 3 else 1.0))
        legacy_file(tmp_path, tensor, rank=rank, counter=rank)
    findings = find(open_source(str(tmp_path)).select())
    assert [(one.kind, one.where["rank"], one.where["layer_idx"]) for one in findings] == [("rank_differs", 3, 1)]


def test_channels(tmp_path: Path) -> None:
    array = normal(32, 64)
    array[:, 7] *= 200
    array[:, 9] = 0
    findings = found_in(tmp_path, [describe_tensor(array, iteration=one) for one in (0, 1)], with_channels=True)
    assert [(one.kind, one.where["channel"]) for one in findings] == [("channel_outlier", 7), ("zero", 9)]
    expected = np.abs(array).max(axis=0)
    assert findings[0].value == pytest.approx(expected[7])
    assert findings[0].expected == pytest.approx(np.median(expected[expected > 0]), rel=1e-2)
    assert found_in(tmp_path / "without", [describe_tensor(array)]) == []


def test_which_modules_are_the_same_in_other_layers() -> None:
    cases: list[tuple[str, int, str]] = [
        ("layers.3.mlp.up", 3, "layers.*.mlp.up"),
        # A stage of a pipeline counts its own layers.
        ("layers.1.mlp", 9, "layers.*.mlp"),
        # The expert is no layer.
        ("layers.3.experts.5.up", 3, "layers.*.experts.5.up"),
        ("stages.2.blocks.7.norm", 7, "stages.2.blocks.*.norm"),
        ("layers.03.x", 3, "layers.*.x"),
        ("layers.0.x", 0, "layers.*.x"),
        ("head", -1, "head"),
        ("heads.0", -1, "heads.0"),
        ("", 4, ""),
    ]
    for module, layer, role in cases:
        assert role_of(module, layer) == role
