"""Do programs that save tensors by hand find the names and arguments they know?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ranktape.capture import (
    Capture,
    TensorSaver,
    get_tensor_saver,
    save_attention_tensors,
    save_linear_tensors,
    save_tensor,
    tensor_saver,
)
from ranktape.errors import UsageError
from ranktape.storage import open_run


@pytest.fixture(autouse=True)
def _fresh_saver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_saver, "_saver", None)


def test_the_examples_of_the_older_documents(tmp_path: Path) -> None:
    query, key, value = (torch.randn(2, 4, 8) for _ in range(3))
    with Capture(tmp_path / "run", manual=True) as capture:
        paths = save_attention_tensors(
            query=query,
            key=key,
            value=value,
            quant_type="hifp8",
            operation="forward",
            layer_idx=0,
            phase="pre",
            component="FA",
        )
        save_tensor(
            tensor=query,
            layer_type="attention",
            operation="forward",
            quant_type="hifp8",
            tensor_name="output",
            layer_idx=0,
            phase="post",
            component="FA",
        )
        save_linear_tensors(
            input_tensor=query,
            weight=value,
            quant_type="mxfp8",
            operation="backward",
            layer_idx=1,
            phase="pre",
            component="linear",
            rank=0,
            sample_idx=7,
            metadata={"batch": 3},
        )
        capture.step()
    run = open_run(tmp_path / "run")
    records = run.select()
    assert len(records) == 6
    by_name = {(record.layer_type, record.tensor_name): record for record in records}
    assert torch.equal(by_name["attention", "key"].tensor(), key)
    assert by_name["attention", "output"].phase == "post"
    assert by_name["attention", "query"].quant_type == "hifp8"
    weight = by_name["linear", "weight"]
    assert (weight.operation, weight.layer_idx, weight.quant_type) == ("backward", 1, "mxfp8")
    assert (weight.sample_ids, weight.metadata) == ([7], {"batch": 3})
    assert torch.equal(by_name["linear", "grad_output"].tensor(), query)
    assert sorted(paths) == ["key", "query", "value"]
    assert paths["query"] is not None
    assert paths["query"].endswith(by_name["attention", "query"].path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    with Capture(tmp_path / "run", manual=True) as capture:
        for number in range(3):
            save_tensor(torch.full((2,), number), "linear", "forward", "bf16", "input", layer_idx=4)
        capture.step()
    records = open_run(tmp_path / "run").select()
    assert records.column("call").tolist() == [0, 1, 2]
    assert [record.read().tolist() for record in records] == [[0, 0], [1, 1], [2, 2]]


def test_tensors_by_hand_stand_beside_those_of_hooks(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path / "run", start=1):
        for _ in range(3):
            output = model(torch.randn(2, 4))
            save_tensor(output, "mine", "forward", "bf16", "softmax/scores", component="my own")
            output.sum().backward()
            optimizer.step()
    records = open_run(tmp_path / "run").select()
    assert sorted(set(records.column("layer_type"))) == ["linear", "mine"]
    [mine] = records.select(layer_type="mine")
    assert (mine.tensor_name, mine.component, mine.layer_idx, mine.phase) == ("softmax/scores", "my own", -1, "unknown")


def test_nothing_happens_where_nothing_is_enabled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert save_tensor(torch.zeros(2), "linear", "forward", "bf16", "input") is None
    assert save_linear_tensors(torch.zeros(2), None, "bf16") == {"input": None}
    assert list(tmp_path.iterdir()) == []


def test_tags_are_checked(tmp_path: Path) -> None:
    with Capture(tmp_path / "run", manual=True) as capture:
        save_tensor(torch.zeros(2), "linear", "forward", "bf16", "input")
        with pytest.raises(UsageError, match="operation='sideways' is not allowed"):
            save_tensor(torch.zeros(2), "linear", "sideways", "bf16", "input")
        with pytest.raises(UsageError, match="layer_type='' is not allowed"):
            save_tensor(torch.zeros(2), "", "forward", "bf16", "input")
        with pytest.raises(UsageError, match="metadata cannot be stored"):
            save_tensor(torch.zeros(2), "linear", "forward", "bf16", "input", metadata={"x": object()})
        with pytest.warns(UserWarning, match="rank=3 was given, and this process is rank 0"):
            save_tensor(torch.zeros(2), "linear", "forward", "bf16", "input", rank=3)
        capture.step()


PROGRAM = """
import torch
from ranktape.capture import get_tensor_saver, save_tensor
for iteration in range(7, 10):
    get_tensor_saver().set_iteration(iteration)
    save_tensor(torch.full((3,), iteration), "linear", "forward", "bf16", "input", layer_idx=0)
"""


def test_the_environment_of_the_older_tools(tmp_path: Path) -> None:
    environment = {
        "TENSOR_SAVE_ENABLED": "true",
        "TENSOR_SAVE_DIR": str(tmp_path / "logs"),
        "TENSOR_SAVER_ITERATION": "7",
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
    }
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    run = open_run(tmp_path / "logs")
    # One iteration is guaranteed, as the older tools had it, and closed when the process ends.
    assert run.iterations == [7]
    assert [record.read().tolist() for record in run.select()] == [[7, 7, 7]]


def test_bad_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "maybe")
    with pytest.raises(UsageError, match="set it to true or false"):
        get_tensor_saver()
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "true")
    monkeypatch.setenv("TENSOR_SAVER_ITERATION", "seven")
    with pytest.raises(UsageError, match="TENSOR_SAVER_ITERATION='seven'"):
        get_tensor_saver()


def test_a_saver_of_its_own(tmp_path: Path) -> None:
    saver = TensorSaver(save_dir=str(tmp_path / "logs"))
    saver.set_iteration(3)
    saver.save_tensor(torch.ones(2), "linear", "forward", "bf16", "input")
    saver.set_iteration(4)
    with pytest.raises(UsageError, match="iteration 3 is past"):
        saver.set_iteration(3)
    saver.close()
    assert open_run(tmp_path / "logs").iterations == [3]
