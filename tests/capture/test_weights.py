"""Weights that do not change are stored once, and again when they do."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.storage import open_run


def weights(url: Path) -> list[tuple[int, str]]:
    records = open_run(url).select(tensor_name="weight")
    return [(record.iteration, record.module) for record in records]


def test_a_generation_stores_each_weight_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    with Capture(tmp_path / "run", mode="eval", min_iterations=5), torch.no_grad():
        for token in range(5):
            if token == 3:
                model.get_parameter("1.weight").mul_(2)
            model(torch.randn(1, token + 1, 8))
    assert weights(tmp_path / "run") == [(0, "0"), (0, "1"), (3, "1")]
    run = open_run(tmp_path / "run")
    assert len(run.select(tensor_name="input")) == 10
    statuses = run.status()
    # What is not stored again is not missing.
    assert [status.num_missing for status in statuses] == [0] * 5
    assert not any(status.silent_sites for status in statuses)


def test_where_iterations_are_removed_each_has_the_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    with Capture(tmp_path / "run", mode="eval", max_iterations=3, keep_last=2), torch.no_grad():
        for _ in range(3):
            model(torch.randn(1, 8))
    assert weights(tmp_path / "run") == [(1, "0"), (1, "1"), (2, "0"), (2, "1")]


def test_a_training_stores_them_in_each_iteration(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with Capture(tmp_path / "run", mode=("train", "eval"), min_iterations=3, advance_on="step") as capture:
        for _ in range(3):
            model.train()(torch.randn(2, 8)).sum().backward()
            with torch.no_grad():
                # Behind the back of autograd, which counts nothing of it.
                model.get_parameter("0.weight").data.add_(1)
                model.eval()(torch.randn(2, 8))
            capture.step()
    records = open_run(tmp_path / "run").select(tensor_name="weight")
    assert sorted((record.iteration, record.mode) for record in records) == [
        (iteration, mode) for iteration in range(3) for mode in ("eval", "train")
    ]
