"""Do hooks that stay on from one recorded iteration to the next see what new ones would?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.storage import open_run
from tests.strategies import raw_bytes

STEPS = 9


class Model(nn.Module):
    """Products of modules and of functions, one of them with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.own = nn.Parameter(torch.randn(8, 8))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = batch
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden + nn.functional.linear(hidden, self.own)


def double(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (args[0] * 2, *args[1:])


def replace_weight(model: Any) -> None:
    model.layers[1].weight = nn.Parameter(model.layers[1].weight.detach() * 2)


def parametrize(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.layers[1])


CHANGES: dict[int, Callable[[Any], Any]] = {
    2: lambda model: model.layers[0].weight.requires_grad_(False),  # noqa: FBT003  (torch takes no keyword)
    3: lambda model: model.layers.append(nn.Linear(8, 8)),
    4: lambda model: model.layers[0].register_forward_pre_hook(double),
    5: replace_weight,
    6: lambda model: model.layers[0].weight.requires_grad_(),
    7: parametrize,
}
"""What the program does to its model before a step."""


def train(url: Path, *, changes: dict[int, Callable[[Any], Any]], **options: Any) -> list[list[int]]:
    """The keys of the first layer's hooks in each step."""
    torch.manual_seed(1)
    model = Model()
    keys = []
    with Capture(url, model=model, advance_on="step", **options) as capture:
        for step in range(STEPS):
            if step in changes:
                changes[step](model)
            keys.append(list(model.layers[0]._forward_pre_hooks))
            model(torch.randn(4, 8)).square().sum().backward()
            if step == STEPS - 1 and "record_last" in options:
                capture.trigger("the end")
            capture.step()
    return keys


def content(url: Path) -> tuple[dict[Any, bytes], list[Any]]:
    """The values of a run by what they are of, and what its commits say is missing."""
    run = open_run(url)
    values = {
        (
            record.info.iteration,
            record.info.module,
            record.info.operation,
            record.info.tensor_name,
            record.info.call,
        ): raw_bytes(record.read())
        for record in run.select()
    }
    return values, [
        (one.iteration, one.silent_sites, one.num_expected) for one in run.status() if one.iteration < STEPS
    ]


def test_a_model_that_changes_between_steps_is_recorded_as_with_new_hooks(tmp_path: Path) -> None:
    train(tmp_path / "stays", changes=CHANGES, record_last=STEPS)
    train(tmp_path / "new", changes=CHANGES, min_iterations=STEPS)
    (values, missing), (values_of_new, missing_of_new) = content(tmp_path / "stays"), content(tmp_path / "new")
    assert values.keys() == values_of_new.keys()
    assert values == values_of_new
    assert {iteration for iteration, *_ in values} == set(range(STEPS))
    assert missing == missing_of_new


def test_hooks_stay_on_while_nothing_changes_and_come_off_where_nothing_is_held(tmp_path: Path) -> None:
    keys = train(tmp_path / "all", changes={}, record_last=2)
    assert keys[1]
    assert keys[1:] == [keys[1]] * (STEPS - 1)
    keys = train(tmp_path / "some", changes={}, record_last=2, every=3)
    assert [step for step, present in enumerate(keys) if present] == [0, 3, 6]
