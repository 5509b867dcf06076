"""Is a name that nothing of the training has told of, once, and with the nearest that there is?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranktape.capture import Capture

GRAD, PHASE = "did you mean grad_output?", "did you mean pre?"


def warnings_of(folder: Path, capfd: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    """What a capture of two steps of a small model warns of."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(folder / "run", min_iterations=2, **options):
        for _ in range(2):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    lines = capfd.readouterr().err.splitlines()
    prefix = "ranktape: warning: [rank 0] "
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tensor_name": ["input", "grad_*"], "phase": "pre", "module": ["0", "[2]"], "dtype": "float32"}, []),
        ({"tensor_name": ["input", "grad_ouput"]}, [("--tensor-name 'grad_ouput'", GRAD)]),
        ({"phase": ["post", "prre"]}, [("--phase 'prre'", PHASE)]),
        ({"component": ["linear", "fa"]}, [("--component 'fa'", "seen were linear")]),
        ({"module": ["0", "3"]}, [("--module '3'", "seen were 0, 1, 2")]),
        ({"layer_idx": "0,2,7"}, [("--layer-idx '7'", "seen were 0 to 2")]),
        ({"rank": "0,5"}, [("--rank '5'", "")]),
        ({"dtype": ["float32", "bfloat61"]}, [("--dtype 'bfloat61'", "")]),
        ({"layer_type": ["linear", "attention"]}, [("--layer-type 'attention'", "seen were linear")]),
        ({"iteration": "0-9", "call": "0,9", "microbatch": "0,9"}, []),
        ({"layer_type": "linear", "layers": None, "where": "phase in ['pre', 'prre']"}, []),
        ({"select": "tensor_name=inpt; keep=statistics"}, [("--select, rule 1: tensor_name 'inpt'", "input")]),
        ({"select": "phase=post tensor_name=weight; keep=statistics"}, [("--select, rule 1: matches nothing", "")]),
        ({"select": "tensor_name=input iteration=1; every=2"}, []),
    ],
)  # fmt: skip
def test_a_name_that_nothing_has_is_told_of_with_the_nearest(
    options: dict[str, Any], told: list[tuple[str, str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = warnings_of(tmp_path, capfd, **options)
    assert len(found) == len(told), found
    for line, (begin, end) in zip(found, told, strict=True):
        assert line.startswith(begin)
        assert end in line


def test_many_of_them_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = warnings_of(tmp_path, capfd, tensor_name=["input", *(f"nothing_{number}" for number in range(20))])
    assert len(found) == 9
    assert found[-1] == "12 more names of the selection match nothing"


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        ("values", "11 tensors, 480 B per iteration and rank (host"),
        (
            "histogram",
            "11 tensors, 11 as histogram, 240 B per iteration and rank, for which 3.604 MB are stored before co",
        ),
        ("statistics", "11 tensors, 11 as statistics, 240 B per iteration and rank, for which 880 B are stored (host"),
    ],
)
def test_what_is_stored_is_said_beside_what_is_kept_of(
    keep: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dtype = torch.float32 if keep == "values" else torch.bfloat16
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path / "run", keep=keep):
        model(torch.randn(2, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()
    assert words in capfd.readouterr().err
