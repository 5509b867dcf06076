"""In a model with several stacks of layers, does each record say in which of them its layer is?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranktape.capture.hooks.stacks import survey
from ranktape.storage import Run, open_run
from tests.capture.models import captured
from tests.capture.two_stacks import STACKS, capture_two_stacks

WIDTH = 8


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


class Experts(nn.Module):
    """A layer whose experts are numbered and are no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return sum((expert(hidden) for expert in self.experts), start=hidden)


class Translator(nn.Module):
    """An encoder and a decoder, of which a stage of a pipeline may have one, or a part of one."""

    def __init__(self, *, encoder: range, decoder: range) -> None:
        super().__init__()
        for name, layers in (("encoder", encoder), ("decoder", decoder)):
            part = nn.Module()
            part.layers = nn.ModuleDict({str(number): Experts() for number in layers})
            setattr(self, name, part)
        self.head = nn.Linear(WIDTH, WIDTH)


def stacks_of(model: nn.Module) -> dict[str, tuple[int, str]]:
    """For the path of each linear layer its layer and its stack."""
    return {
        place.path: (place.layer_idx, place.layer_stack)
        for place in survey(model).places
        if isinstance(place.module, nn.Linear)
    }


@pytest.fixture(scope="module", params=["t5", "whisper"])
def two_stacks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Run]:
    pytest.importorskip("transformers", reason="transformers is not installed")
    url = tmp_path_factory.mktemp("two_stacks") / request.param
    capture_two_stacks(request.param, url)
    return request.param, open_run(url)


@pytest.mark.filterwarnings("ignore")  # transformers warns of its own plans
def test_layers_of_an_encoder_and_of_a_decoder_are_told_apart(two_stacks: tuple[str, Run]) -> None:
    kind, run = two_stacks
    encoder, decoder = STACKS[kind]
    for record in run.select():
        inside = [stack for stack in (encoder, decoder) if record.module.startswith(f"{stack}.")]
        assert record.layer_stack == (inside[0] if inside else ""), record
        assert bool(inside) == (record.layer_idx >= 0)
    assert {record.layer_idx for record in run.select(layer_stack=encoder)} == {0, 1}
    assert {record.layer_idx for record in run.select(layer_stack="*decoder*")} == {0, 1, 2}
    assert len(run.select(layer_idx=0, layer_stack=encoder)) < len(run.select(layer_idx=0))
    chosen = run.select().where(f"layer_stack == '{decoder}' and layer_idx == 2")
    assert {record.module.split(".")[len(decoder.split("."))] for record in chosen} == {"2"}


def test_the_name_of_a_stack_is_the_same_on_every_stage_and_under_every_wrapper() -> None:
    whole = stacks_of(Translator(encoder=range(2), decoder=range(3)))
    assert whole["encoder.layers.1.experts.2.0"] == (1, "encoder.layers")
    assert whole["decoder.layers.1.experts.2.0"] == (1, "decoder.layers")
    assert whole["head"] == (-1, "")
    for stage in (
        Translator(encoder=range(1, 2), decoder=range(0)),
        Translator(encoder=range(0), decoder=range(2, 3)),
        Translator(encoder=range(0), decoder=range(2)),
    ):
        assert stacks_of(stage).items() <= whole.items()

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module, name: str) -> None:
            super().__init__()
            self.add_module(name, inner)

    compiled = Wrapper(Translator(encoder=range(2), decoder=range(3)), "_orig_mod")
    assert stacks_of(Wrapper(compiled, "module")) == whole


def test_a_model_in_which_no_list_is_found_takes_names_at_their_word() -> None:
    class Layer(nn.Module):
        def __init__(self, idx: int) -> None:
            super().__init__()
            self.layer_idx = idx
            self.up = nn.Linear(WIDTH, WIDTH)

    model = nn.Module()
    model.blocks = nn.Module()
    model.blocks.add_module("7", Layer(7))
    model.alone = Layer(3)
    places = {place.path: (place.layer_idx, place.layer_stack) for place in survey(model).places}
    assert places["blocks.7"] == (7, "blocks")
    assert places["alone"] == (3, "")


@pytest.mark.parametrize(
    "options",
    [{"select": ["layer_stack='decoder.*' layer_idx=0"]}, {"select": {"layer_stack": "decoder.*", "layer_idx": 0}}],
)
def test_a_capture_can_choose_a_stack_of_layers(tmp_path: Path, options: dict[str, Any]) -> None:
    class Both(Translator):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for part in (self.encoder, self.decoder):
                for layer in part.layers.values():  # type: ignore[union-attr,operator]
                    hidden = layer(hidden)
            return self.head(hidden)  # type: ignore[no-any-return]

    model = Both(encoder=range(2), decoder=range(2))
    records = captured(model, tmp_path / "run", shape=(2, WIDTH), model=model, **options).select()
    assert {(record.layer_stack, record.layer_idx) for record in records} == {("decoder.layers", 0)}
    assert all(record.module.startswith("decoder.layers.0.") for record in records)
