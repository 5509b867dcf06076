"""A training that goes on from a checkpoint is recorded from the step at which it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.storage import IterationState, open_run


class Checkpointed:
    """A training that keeps its state in a file, and begins with what it finds there."""

    def __init__(self, checkpoint: Path) -> None:
        torch.manual_seed(0)
        self._checkpoint = checkpoint
        self._model = nn.Linear(8, 8)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self.step = 0
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    @property
    def weight(self) -> torch.Tensor:
        return self._model.weight.detach().clone()

    def train(self, until: int) -> None:
        while self.step < until:
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.step))
            self._model(inputs).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.step += 1
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "step": self.step}
        torch.save(state, self._checkpoint)


def weights(url: Path) -> dict[int, torch.Tensor]:
    return {record.iteration: record.tensor() for record in open_run(url).select(tensor_name="weight")}


def test_a_run_goes_on_where_the_checkpoint_was_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = tmp_path / "run"
    undisturbed, expected = Checkpointed(tmp_path / "unused"), {}
    for step in (10, 20, 30, 40):
        undisturbed.train(step)
        expected[step] = undisturbed.weight
    first = Checkpointed(tmp_path / "checkpoint")
    with Capture(url, start=10, every=10, max_iterations=4):
        first.train(25)
    capsys.readouterr()
    second = Checkpointed(tmp_path / "checkpoint")
    with Capture(url, start=10, every=10, max_iterations=4, resume=True, first_iteration=second.step):
        second.train(45)
    assert open_run(url).iterations == [10, 20, 30, 40]
    assert "cannot be captured" not in capsys.readouterr().err
    assert all(torch.equal(found, expected[iteration]) for iteration, found in weights(url).items())


def test_what_is_past_is_not_planned_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Capture(tmp_path / "run", start=10, every=10, min_iterations=2, first_iteration=45) as capture:
        Checkpointed(tmp_path / "checkpoint").train(30)
    assert capture.close().met
    assert open_run(tmp_path / "run").iterations == [50, 60]
    said = capsys.readouterr().err
    assert "iterations 10, 20 come before --first-iteration 45 and cannot be captured: 50, 60 will be" in said


def test_by_default_the_first_step_is_the_first_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Capture(tmp_path / "run", min_iterations=3, first_iteration=100):
        Checkpointed(tmp_path / "checkpoint").train(5)
    assert open_run(tmp_path / "run").iterations == [100, 101, 102]
    assert "cannot be captured" not in capsys.readouterr().err


def test_a_step_over_wanted_iterations_skips_them(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    with Capture(tmp_path / "run", min_iterations=3, every=2) as capture:
        for following in (1, 2, 7):
            model(torch.randn(2, 8)).sum().backward()
            capture.step(following)
    skipped = open_run(tmp_path / "run").status()[-1]
    assert (skipped.iteration, skipped.state) == (4, IterationState.SKIPPED)
    assert skipped.missing == {0: "the training went from iteration 2 to 7"}
