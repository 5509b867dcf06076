"""Is a model surveyed as it is, whatever its classes name their parts, and anew where something in it changed?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.capture.hooks.stacks import ModelSurvey, stated_idx, survey
from ranktape.storage import Run, open_run
from tests.capture.hugging_face import STACKS, capture_two_stacks
from tests.capture.trainings import captured

WIDTH = 4


class Block(nn.Module):
    def __init__(self, layer_idx: int | None = None) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.up(hidden)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Three layers that tell their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(idx) for idx in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            hidden = block(hidden)
        return hidden


class Shallow(nn.Module):
    """Has something else than its stack under the name of that, as models of which a part is run have."""

    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self._modules["layers"] = nn.ModuleList(Block() for _ in range(3))

    @property
    def layers(self) -> list[nn.Module]:
        stack = self._modules["layers"]
        assert isinstance(stack, nn.ModuleList)
        return list(stack)[: self.depth]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            hidden = block(hidden)
        return hidden


def train(model: nn.Module, *, steps: int = 2, before: Callable[[int], None] = lambda _: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        before(step)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()


def places(url: Path, iteration: int) -> set[tuple[str, int]]:
    """Where the run has tensors of the linear layers, and the numbers of these."""
    records = open_run(url).select(iteration=iteration, layer_type="linear")
    return {(record.info.module, record.info.layer_idx) for record in records}


def numbers(found: ModelSurvey) -> dict[str, int]:
    return {place.path: place.layer_idx for place in found.frames}


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "found"])
def test_a_property_with_the_name_of_the_stack_is_in_nobodys_way(tmp_path: Path, *, is_given: bool) -> None:
    model = Shallow()
    options: dict[str, Any] = {"model": model} if is_given else {}
    with Capture(tmp_path / "run", select={"layer_type": ["linear", "hidden"]}, min_iterations=2, **options):
        train(model)
    assert places(tmp_path / "run", 1) == {("layers.0.up", 0), ("layers.1.up", 1)}
    outputs = open_run(tmp_path / "run").select(iteration=1, layer_type="hidden")
    assert set(outputs.column("module")) == {"layers.0", "layers.1"}


def test_a_model_that_cannot_be_surveyed_is_not_recorded_and_trains_on(tmp_path: Path) -> None:
    class Nameless(Model):
        is_open = True

        def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
            if not self.is_open:
                raise LookupError("the names are lost")
            yield from super().named_modules(*args, **kwargs)

    model = Nameless()
    weight = next(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.is_open = False
    with Capture(tmp_path / "run", min_iterations=2):
        before = weight.detach().clone()
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    assert not torch.equal(weight, before)
    assert "LookupError: the names are lost" in open_run(tmp_path / "run").disabled()[0]


def test_layers_that_get_other_numbers_have_them_from_the_next_captured_iteration_on(tmp_path: Path) -> None:
    model = Model()

    def change(step: int) -> None:
        if step == 1:
            for idx, block in enumerate(model.layers):
                block.layer_idx = idx + 10  # type: ignore[assignment]  # it is no tensor

    with Capture(tmp_path / "run", model=model, min_iterations=3):
        train(model, steps=3, before=change)
    for iteration, offset in ((0, 0), (2, 10)):
        assert places(tmp_path / "run", iteration) == {(f"layers.{idx}.up", idx + offset) for idx in range(3)}


def test_a_survey_sees_every_change_that_moves_a_stack() -> None:
    model: Any = nn.Module()
    model.small = nn.ModuleList(Block() for _ in range(2))
    model.large = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    assert survey(model).stacks[0].name == "large"
    for block in model.small:
        block.up.weight = nn.Parameter(torch.ones(100, WIDTH))
    assert survey(model).stacks[0].name == "small"

    # Layers that stand elsewhere, too: their second place is in no list of a model's modules.
    model = nn.Module()
    blocks = [Block(), Block()]
    model.first = nn.Sequential(blocks[0])
    model.layers = nn.ModuleList([*blocks, Block()])
    assert [layer.idx for layer in survey(model).stacks[0].layers] == [0, 1, 2]
    assert survey(model).stacks[0].layers[0].module is blocks[0]
    model.layers = nn.ModuleList(list(model.layers)[1:])
    assert [layer.idx for layer in survey(model).stacks[0].layers] == [0, 1]
    assert survey(model).stacks[0].layers[0].module is blocks[1]


def test_a_second_place_that_is_gone_is_no_layer_any_more() -> None:
    model: Any = nn.Module()
    shared = Block()
    model.first = shared
    model.layers = nn.ModuleDict({"0": Block(), "1": Block(), "2": shared})
    assert len(survey(model).stacks[0].layers) == 3
    del model.layers["2"]
    assert [layer.path for layer in survey(model).stacks[0].layers] == ["layers.0", "layers.1"]


def test_weights_that_are_made_later_make_a_layer() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("weight", None)

    model: Any = nn.Module()
    model.layers = nn.ModuleList(Bare() for _ in range(2))
    model.lazy = nn.ModuleList(nn.Sequential(nn.LazyLinear(WIDTH)) for _ in range(2))
    assert [stack.name for stack in survey(model).stacks] == ["lazy"], "what is not made yet has no size"
    for bare in model.layers:
        bare.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    assert [stack.name for stack in survey(model).stacks] == ["layers", "lazy"]


def test_a_number_is_found_wherever_a_module_tells_it() -> None:
    class RequestedIterations(nn.Module):
        @property
        def layer_idx(self) -> int:
            return 3

    class Relayed(nn.Module):
        def __getattr__(self, name: str) -> Any:
            return 4 if name == "layer_number" else super().__getattr__(name)

    class Broken(nn.Module):
        @property
        def layer_idx(self) -> int:
            raise ValueError("not yet")

    modules = [Block(2), RequestedIterations(), Relayed(), Broken(), nn.Linear(1, 1)]
    assert [stated_idx(module) for module in modules] == [2, 3, 3, None, None]
    model = Model()
    assert numbers(survey(model))["layers.1.up"] == 1
    model.layers[1].layer_idx = 7  # type: ignore[assignment]  # it is no tensor
    assert numbers(survey(model))["layers.1.up"] == 7


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
        for place in survey(model).frames
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
    places = {place.path: (place.layer_idx, place.layer_stack) for place in survey(model).frames}
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
