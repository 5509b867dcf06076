"""Do programs that save tensors by hand find the names and arguments they know, and what they saved?"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

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
from ranktape.storage.maintenance.check import check_run
from ranktape.storage.places.urls import open_backend
from tests.launch.processes import python


@pytest.fixture(autouse=True)
def _fresh_saver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_saver, "_saver", None)


def test_the_examples_of_the_older_documents(tmp_path: Path) -> None:
    query, key, value = (torch.randn(2, 4, 8) for _ in range(3))
    with Capture(tmp_path / "run", manual=True) as capture:
        tags: dict[str, Any] = {"quant_type": "hifp8", "operation": "forward", "layer_idx": 0, "component": "FA"}
        paths = save_attention_tensors(query=query, key=key, value=value, phase="pre", **tags)
        save_tensor(tensor=query, layer_type="attention", tensor_name="output", phase="post", **tags)
        tags = {"quant_type": "mxfp8", "operation": "backward", "layer_idx": 1, "component": "linear", "phase": "pre"}
        about: dict[str, Any] = {"rank": 0, "sample_idx": 7, "metadata": {"batch": 3}}
        save_linear_tensors(input_tensor=query, weight=value, **tags, **about)
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
    with Capture(tmp_path / "run", start_at=1):
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


def run_saving(program: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose environment asks it to save into the folder `logs`."""
    variables = {"TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": str(folder / "logs"), **variables}
    return python("-c", program, cwd=folder, env=variables)


PROGRAM = """
import torch
from ranktape.capture import get_tensor_saver, save_tensor
for iteration in range(7, 10):
    get_tensor_saver().set_iteration(iteration)
    save_tensor(torch.full((3,), iteration), "linear", "forward", "bf16", "input", layer_idx=0)
"""


def test_the_environment_of_the_legacy_tools(tmp_path: Path) -> None:
    result = run_saving(PROGRAM, tmp_path, TENSOR_SAVER_ITERATION="7")
    assert result.returncode == 0, result.stderr
    run = open_run(tmp_path / "logs")
    # One iteration is guaranteed, as the legacy tools had it, and closed when the process ends.
    assert run.iterations == [7]
    assert [record.read().tolist() for record in run.select()] == [[7, 7, 7]]


@pytest.mark.parametrize("end", ["get_tensor_saver().close()", "raise ValueError", "os.kill(os.getpid(), 9)"])
def test_what_was_saved_is_there_however_the_process_ended(end: str, tmp_path: Path) -> None:
    program = f"""
import os, torch
from ranktape.capture import get_tensor_saver, save_tensor
save_tensor(torch.ones(3), "linear", "forward", "bf16", "input")
{end}
"""
    run_saving(program, tmp_path)
    run = open_run(tmp_path / "logs")
    while not run.verdict().final:  # the writer outlives a process that was killed
        time.sleep(0.05)
    run.refresh()
    assert run.iterations == [0]


def test_a_second_program_adds_to_the_first(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for value in (1, 2):
        saver = TensorSaver(save_dir=str(logs))
        saver.save_tensor(torch.full((2,), value), "linear", "forward", "bf16", "input")
        saver.close()
    run = open_run(logs)
    assert [(record.attempt, record.read().tolist()) for record in run.select()] == [(0, [1, 1]), (1, [2, 2])]
    assert len(run.select(attempt=1)) == 1
    with Capture(logs, manual=True, resume=True, min_iterations=2, start_at=1, first_iteration=1):
        save_tensor(torch.zeros(2), "linear", "forward", "bf16", "input")
    assert [(record.attempt, record.iteration) for record in open_run(logs).select()] == [(0, 0), (1, 0), (2, 1)]
    assert check_run(open_backend(logs)).findings == []


def test_each_rank_saves_for_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for rank in (3, 1, 3):
        monkeypatch.setenv("RANK", str(rank))
        saver = TensorSaver(save_dir=str(tmp_path / "logs"))
        saver.save_tensor(torch.full((2,), rank), "linear", "forward", "bf16", "input")
        saver.close()
    run = open_run(tmp_path / "logs")
    saved = sorted((record.rank, record.attempt, record.read()[0]) for record in run.select())
    assert saved == [(1, 0, 1), (3, 0, 3), (3, 1, 3)]
    assert run.verdict().met
    assert [status.expected_ranks for status in run.status()] == [[1], [3], [3]]
    assert check_run(open_backend(tmp_path / "logs")).findings == []


def test_the_iterations_in_which_something_is_saved_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANKTAPE_MIN_ITERATIONS", "3")
    saver = TensorSaver(save_dir=str(tmp_path / "logs"))
    for iteration in range(0, 60, 5):
        saver.set_iteration(iteration)
        if iteration % 10 == 0:
            saver.save_tensor(torch.zeros(2), "linear", "forward", "bf16", "input")
    saver.close()
    run = open_run(tmp_path / "logs")
    assert run.iterations == [0, 10, 20]
    assert len(run.status()) == 3


def test_a_store_that_cannot_be_written_does_not_end_the_program(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("no folder")
    saver = TensorSaver(save_dir=str(tmp_path / "logs"))
    for _ in range(2):
        assert saver.save_tensor(torch.zeros(2), "linear", "forward", "bf16", "input") is None
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("; nothing is saved")


def test_a_capture_of_the_program_takes_the_place_of_the_savers(tmp_path: Path) -> None:
    saver = TensorSaver(save_dir=str(tmp_path / "logs"))
    saver.save_tensor(torch.zeros(2), "linear", "forward", "bf16", "input")
    with Capture(tmp_path / "run") as capture:
        saver.save_tensor(torch.ones(2), "linear", "forward", "bf16", "input")
        assert Capture.current is capture
    saver.set_iteration(1)
    saver.save_tensor(torch.ones(2), "linear", "forward", "bf16", "input")
    saver.close()
    assert open_run(tmp_path / "run").iterations == [0], "no optimizer stepped, and what was saved is saved"
    assert open_run(tmp_path / "logs").iterations == [0, 1]


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
