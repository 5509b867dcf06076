"""Does a check notice that ranks which hold the same tensor recorded different values?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranktape.storage.maintenance.check import check_run
from ranktape.storage.maintenance.check_iteration import replica_key
from ranktape.storage.maintenance.finding import CheckSeverity, FindingKind
from ranktape.storage.places.urls import open_backend
from tests.runs import describe, write_run


def placed(rank: int, *, value: float, placements: list[str], **fields: Any) -> tuple[np.ndarray[Any, Any], Any]:
    """A tensor of a mesh of two ranks."""
    array = np.full((8, 8), value, np.float32)
    placement = {"mesh": [0, 1], "coordinates": [rank], "placements": placements, "global_shape": [8, 8]}
    return array, describe(array, rank=rank, placement=placement, **fields)


@pytest.mark.parametrize(
    ("values", "placements", "is_error"),
    [((1.0, 1.0), ["replicate"], False), ((1.0, 2.0), ["replicate"], True), ((1.0, 2.0), ["shard(0)"], False)],
)
def test_replicas_must_agree(
    tmp_path: Path, values: tuple[float, float], placements: list[str], *, is_error: bool
) -> None:
    parts = [[placed(rank, value=value, placements=placements)] for rank, value in enumerate(values)]
    write_run(tmp_path / "run", {0: parts})
    findings = check_run(open_backend(tmp_path / "run")).findings
    found = [one for one in findings if one.kind is FindingKind.REPLICAS]
    assert [one.is_error for one in found] == [True] * is_error
    if found:
        assert found[0].message == "replicas on ranks 0, 1 hold different values"
        assert found[0].record.startswith("layers.0.query,")


def test_weights_that_differ_between_ranks_are_a_note(tmp_path: Path) -> None:
    arrays = [np.full(8, rank, np.float32) for rank in range(2)]
    infos = [[describe(arrays[rank], rank=rank, tensor_name=name) for name in ("weight", "input")] for rank in range(2)]
    write_run(tmp_path / "run", {0: [[(arrays[rank], info) for info in infos[rank]] for rank in range(2)]})
    findings = check_run(open_backend(tmp_path / "run")).findings
    (found,) = [one for one in findings if one.kind is FindingKind.REPLICAS]
    assert found.severity is CheckSeverity.NOTE
    assert found.message.startswith("1 weights differ between ranks")


@pytest.mark.parametrize(
    ("placement", "has_copies"),
    [
        ({"placements": ["replicate"], "coordinates": [1]}, True),
        ({"placements": ["Replicate()", "Shard(dim=0)"], "coordinates": [1, 0]}, True),
        ({"placements": ["shard(0)"], "coordinates": [1]}, False),
        ({"placements": ["partial(sum)", "replicate"], "coordinates": [1, 0]}, False),
        ({"placements": ["replicate"], "coordinates": [1], "partial": True}, False),
        ({"placements": ["replicate"], "coordinates": []}, False),
        (None, False),
        ({}, False),
    ],
)
def test_which_placements_have_copies(placement: Any, *, has_copies: bool) -> None:
    key = replica_key(json.dumps(placement))
    assert (key is not None) == has_copies
    if has_copies:
        moved = {**placement, "coordinates": [7, *placement["coordinates"][1:]]}
        assert replica_key(json.dumps(moved)) == key
    if has_copies and len(placement["coordinates"]) > 1:
        elsewhere = {**placement, "coordinates": [1, 5]}
        assert replica_key(json.dumps(elsewhere)) != key
