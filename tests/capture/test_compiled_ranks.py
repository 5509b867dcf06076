"""Does each of two ranks of a compiled training record what it records of eager code, and change no bit?"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from ranktape.storage import open_run
from tests.capture.compiled_matrix import CAPTURED
from tests.capture.test_parallel import ROOT, torchrun

PROGRAM = ROOT / "tests" / "capture" / "programs" / "compiled_ranks.py"
WAYS = ("DDP around", "DDP inside", "FSDP2", "TP")

pytestmark = [
    pytest.mark.exhaustive("several ranks, where each records as one does"),
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the one start that trains in all ways."""
    return torchrun(tmp_path_factory.mktemp("compiled") / "out", WAYS, num_ranks=2, program=PROGRAM)


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_records_what_it_records_of_eager_code(way: str, trained: Path) -> None:
    tensors = {
        kind: Counter(
            (one.rank, one.module, one.component, one.operation, one.phase, one.tensor_name, one.shape)
            for one in open_run(trained / way / kind).select()
        )
        for kind in ("eager", "compiled")
    }
    assert {rank for rank, *_ in tensors["eager"]} == {0, 1}
    assert tensors["compiled"] == tensors["eager"]
    assert set(tensors["compiled"].values()) == {1}
    assert open_run(trained / way / "compiled").iterations == [CAPTURED]


@pytest.mark.parametrize("way", WAYS)
def test_the_losses_of_each_rank_are_those_without_a_capture(way: str, trained: Path) -> None:
    for rank in range(2):
        losses = json.loads((trained / f"{way}.rank{rank}.json").read_text())
        assert losses["captured"] == losses["plain"]
