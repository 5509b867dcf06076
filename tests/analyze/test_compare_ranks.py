"""Are tensors that ranks hold in parts put together before they are compared, and copies told from each other?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranktape.analyze.questions.compare import compare
from ranktape.capture import Capture
from ranktape.errors import IncompleteTensorError, NoRecordsError
from ranktape.storage import open_run
from tests.analyze.compared import Array, changed, normal, relative, rows
from tests.analyze.runs import Tensor, describe_tensor, store
from tests.capture.parallel_models import OPTIONS, Recipe, train
from tests.capture.test_parallel import torchrun
from tests.exhaustive import exhaustive


def part(array: Array, rank: int, word: str, *, whole: Sequence[int], offset: Sequence[int], **fields: Any) -> Tensor:
    """What one of two tensor-parallel ranks holds of a tensor."""
    placement = {
        "mesh": {"axes": ["tp"], "shape": [2], "ranks": [0, 1]},
        "coordinates": [rank],
        "placements": [word],
        "global_shape": list(whole),
        "offset": list(offset),
        "partial": word.startswith("partial"),
    }
    return describe_tensor(array, rank=rank, placement=placement, **fields)


def test_tensor_parallel_shards_are_assembled(tmp_path: Path) -> None:
    weight, hidden, bias = normal(6, 8), normal(3, 4, 6, seed=1), normal(6, seed=2)
    alone = [
        describe_tensor(weight, tensor_name="weight"),
        describe_tensor(hidden, tensor_name="output", sample_dim=0),
        describe_tensor(bias, tensor_name="bias"),
    ]
    noisy = changed(alone, seed=5, by=1e-6)
    shards: list[Tensor] = []
    for rank in (0, 1):
        rows_of, columns_of = slice(3 * rank, 3 * rank + 3), slice(3 * rank, 3 * rank + 3)
        shards += [
            part(noisy[0][0][rows_of], rank, "shard(0)", whole=(6, 8), offset=(3 * rank, 0), tensor_name="weight"),
            part(noisy[1][0][..., columns_of], rank, "shard(2)", whole=(3, 4, 6), offset=(0, 0, 3 * rank),
                 tensor_name="output", sample_dim=0),
            part(noisy[2][0], rank, "replicate", whole=(6,), offset=(0,), tensor_name="bias"),
        ]  # fmt: skip
    one, two = store(tmp_path / "tp1", alone).select(), store(tmp_path / "tp2", shards).select()
    twin = store(tmp_path / "twin", changed(alone, seed=6, by=1e-6)).select()
    table = compare(one, two, noise=twin)
    found = {row["tensor_name"]: row for row in table.records()}
    for (array, _), (other, _), name in zip(alone, noisy, ("weight", "output", "bias"), strict=True):
        assert found[name]["relative_norm"] == relative(array, other)
        assert (found[name]["shape"], found[name]["b.shape"]) == (list(array.shape), list(array.shape))
        assert found[name]["b.ranks"] == [0, 1]
        # Of wide types eight bits are counted.
        assert found[name]["relative_wasserstein"] < 2**-8
    assert table.title.startswith("no divergence: 3 pairs compared, 3 differ")
    # The other way round, and against itself shard by shard: copies that are equal are compared once.
    assert compare(two, one).column("relative_norm") == pytest.approx(table.column("relative_norm"), rel=1e-4)
    own = compare(two, two)
    assert sorted(rows(own, "tensor_name", "rank", "copies")) == [
        ("bias", 0, 2), ("output", 0, 1), ("output", 1, 1), ("weight", 0, 1), ("weight", 1, 1),
    ]  # fmt: skip
    # Parts of one tensor are no copies of each other.
    assert not any("other bits" in note for note in own.notes)
    with pytest.raises(IncompleteTensorError, match="missing"):
        compare(one, two.select(rank=1))


def test_copies_that_differ_are_each_compared_and_told(tmp_path: Path) -> None:
    x = normal(5, 5)
    other = x.copy()
    other[1, 1] = np.nextafter(other[1, 1], np.float32(9))

    def replicas(*copies: Array) -> list[Tensor]:
        return [part(copy, rank, "replicate", whole=(5, 5), offset=(0, 0)) for rank, copy in enumerate(copies)]

    a, b = store(tmp_path / "a", replicas(x, x)), store(tmp_path / "b", replicas(x, other))
    table = compare(a.select(), b.select())
    assert sorted(rows(table, "rank", "differing.count", "ulp_max")) == [(0, 0, 0), (1, 1, 1)]
    assert "in 2 pairs ranks that should hold the same recorded other bits" in table.notes[0]
    # Two ranks without a word about placement against one: equal ones stand for each other, others do not.
    plain = [describe_tensor(x, rank=rank) for rank in (0, 1)]
    one = store(tmp_path / "one", plain[:1]).select()
    (row,) = compare(store(tmp_path / "two", plain).select(), one).records()
    assert (row["relative_norm"], row["copies"]) == (0, 1)
    differing = store(tmp_path / "c", [plain[0], describe_tensor(other, rank=1)]).select()
    with pytest.raises(NoRecordsError, match="no record of the first side"):
        compare(differing, one)


@exhaustive("shards that are put together are compared above, those of real ranks in test_parallel.py")
@pytest.mark.distributed
def test_a_tensor_parallel_training_against_one_of_one_process(tmp_path: Path) -> None:
    torchrun(tmp_path / "tp", ("tp",), num_ranks=2)
    train(Recipe(), capture=Capture(tmp_path / "alone", min_iterations=1, **OPTIONS))
    alone = open_run(tmp_path / "alone").select(iteration=0)
    split = open_run(tmp_path / "tp" / "tp.run").select(iteration=0)
    # Masters and reduced gradients are recorded of what is spread over ranks alone.
    table = compare(alone, split, allow_unmatched=True, tolerance=1e-5)
    assert len(table.rows) == len(alone)
    assert table.title.startswith("no divergence: ")
    assert table.notes[0].startswith("80 of 314 records of the second side")
    assert max(table.column("relative_norm")) > 0
    assert min(table.column("cosine")) > 1 - 1e-10
    # The others have no placement, and both ranks recorded the same bits.
    assert sum(ranks == [0, 1] for ranks in table.column("b.ranks")) == 100
