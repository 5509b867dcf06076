"""Is a compiled model recorded inside of its graphs as it is as written, and does it compute what it does without?"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from ranktape.capture.hooks.states import get_layer_hidden_states
from ranktape.storage import open_run
from tests.capture.compiled_models import (
    TOKENS,
    VOCABULARY,
    WIDTH,
    Block,
    Model,
    Step,
    Trained,
    as_written,
    by_blocks,
    in_place,
    stepping,
    tensors,
    train,
    whole,
    whole_step,
    with_compiled_autograd,
)
from tests.capture.hugging_face import tiny
from tests.exhaustive import exhaustive, exhaustive_but
from tests.optional import needs

# dynamo meets deprecated parts of torch itself, and imports them again.
pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass(frozen=True, slots=True)
class Way:
    """A way of compiling a model."""

    compile: Callable[[Model], Step]
    make: Callable[[], Model] = Model
    lengths: tuple[int, ...] = (8, 8, 8, 8)
    num_extra: int = 1
    """Compilations that a capture adds."""
    options: dict[str, Any] = field(default_factory=dict)


checkpointed = functools.partial(Model, is_checkpointed=True)


class Rows(Block):
    """A decoder layer with a product with some rows of a parameter, and one row of another."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / WIDTH)
        self.stack = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(F.linear(F.linear(hidden, self.rows[WIDTH : 2 * WIDTH]), self.stack[1]))


class Broken(Rows):
    """One that dynamo does not compile, in a compiled model: its graph breaks in a loop."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(1):
            torch._dynamo.graph_break()
            hidden = F.scaled_dot_product_attention(hidden, hidden.sin(), hidden.cos())
        return super().forward(hidden)


class Changing(Block):
    """A decoder layer that changes in place what a product was given, or may be made to."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2, TOKENS, WIDTH))
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.fixed(self.state)
        self.state.add_(1)
        drawn = self.state.sin()
        hidden = hidden + self.fixed(drawn)
        return super().forward(hidden + drawn.index_put((torch.arange(1),), torch.zeros(1, TOKENS, WIDTH)))


def odd() -> Model:
    model = Model()
    rows = Rows()
    rows.up.register_forward_hook(lambda _module, _given, output: output * 2)
    model.blocks = nn.ModuleList([rows, Broken(), Changing()])
    return model


def in_parts(model: Model) -> Step:
    return stepping(model, torch.compile(model))


WAYS = {
    "torch.compile(model)": Way(whole),
    "blocks": Way(by_blocks),
    "between graphs": Way(in_parts, odd, num_extra=3),
    "a checkpoint inside": Way(whole, checkpointed),
    "in a checkpoint": Way(by_blocks, checkpointed),
    "model.compile()": Way(in_place),
    "compiled autograd": Way(with_compiled_autograd, num_extra=2),
    "whole step": Way(whole_step),
    "dynamic shapes": Way(functools.partial(whole, dynamic=True), lengths=(8, 6, 5, 8)),
    "reduce-overhead": Way(functools.partial(whole, mode="reduce-overhead")),
    "max-autotune": Way(functools.partial(whole, mode="max-autotune")),
}
_CORE = ("torch.compile(model)", "between graphs")
_LONG = pytest.mark.exhaustive("as the others, compiled in other ways")
NAMES = [name if name in _CORE else pytest.param(name, marks=_LONG) for name in WAYS]


@pytest.mark.parametrize("name", NAMES)
@exhaustive_but("torch.compile(model)", reason="one way to compile is in make test")
def test_what_is_recorded_and_computed(name: str, tmp_path: Path) -> None:
    way = WAYS[name]
    shared: dict[str, Any] = {"make": way.make, "lengths": way.lengths}
    train(as_written, tmp_path / "eager", **shared)
    plain = train(way.compile, **shared)
    seen = train(way.compile, tmp_path / "graph", **shared)
    assert not counters["inductor"]["fxgraph_cache_bypass"], "inductor keeps graphs with taps as all others"
    assert seen.equals(plain)
    assert seen.num_graphs[-1] == plain.num_graphs[-1] + way.num_extra
    assert seen.num_graphs[1] == seen.num_graphs[-1], "nothing is compiled after the first captured iteration"
    eager, graph = tensors(tmp_path / "eager"), tensors(tmp_path / "graph")
    assert graph.keys() == eager.keys()
    for key, value in eager.items():
        np.testing.assert_allclose(graph[key], value, rtol=1e-3, atol=1e-5 * max(1.0, float(np.abs(value).max())))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {}),
        (torch.bfloat16, {"select": "layer_type=embedding"}),
        (torch.bfloat16, {"layers": "all"}),
    ],
    ids=str,
)
@exhaustive("make test has float32")
def test_low_precision_is_recorded_rounded_and_computed_as_without(
    dtype: torch.dtype, options: dict[str, Any], tmp_path: Path
) -> None:
    seen = train(whole, tmp_path / "run", dtype=dtype, **options)
    assert seen.equals(train(whole, dtype=dtype))
    train(as_written, tmp_path / "eager", dtype=dtype, **options)
    assert tensors(tmp_path / "run").keys() == tensors(tmp_path / "eager").keys()
    assert not any(status.silent_sites for status in open_run(tmp_path / "run").status())


def test_a_model_that_runs_eagerly_where_that_was_asked_for(tmp_path: Path) -> None:
    seen = train(whole, tmp_path / "run", compiled="eager")
    assert seen.num_graphs == [1] * 4
    train(as_written, tmp_path / "eager")
    eager, run = tensors(tmp_path / "eager"), tensors(tmp_path / "run")
    assert run.keys() == eager.keys()


class Noisy(Block):
    """A decoder layer with a product of random numbers, which inductor draws in its own way: no tap finds them."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + self.out(torch.rand_like(hidden))  # type: ignore[no-any-return]


def with_noise() -> Model:
    model = Model()
    model.blocks[1] = Noisy()
    return model


@exhaustive("make test has graphs with taps")
def test_what_a_graph_without_taps_does_not_record_is_missing_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train(by_blocks, make=with_noise)
    seen = train(by_blocks, tmp_path / "run", make=with_noise)
    assert seen.equals(plain)
    assert seen.num_graphs == [2] + [4] * 3
    why = "its compiled graph takes no taps: TapError: the compiler has replaced rand"
    assert why in capsys.readouterr().err
    train(as_written, tmp_path / "eager", make=with_noise)
    found = tensors(tmp_path / "run").keys()
    missing = tensors(tmp_path / "eager").keys() - found
    assert {module.split(".")[1] for module, *_ in missing} == {"1"}, "the other layer's graph has its taps"
    assert {"weight", "bias"} <= {names[5] for names in found if names[0].startswith("blocks.1.")}
    for status in open_run(tmp_path / "run").status():
        assert status.num_missing == len({names[:6] for names in missing}), "each once, of all calls"
        assert {site.split()[0] for site in status.silent_sites[0]} == {module for module, *_ in missing}
        assert all(why in reason for reason in status.silent_sites[0].values())


class Doubling(nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(given)


def with_a_layer_of_its_own() -> Model:
    model = Model()
    model.blocks[0].up.__class__ = Doubling
    return model


def test_what_graphs_do_not_show_is_recorded_eagerly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = train(whole, tmp_path / "run", make=with_a_layer_of_its_own)
    assert seen.num_graphs == [1] * 4
    assert "graphs do not show layers of the class Doubling" in capsys.readouterr().err
    train(as_written, tmp_path / "eager", make=with_a_layer_of_its_own)
    assert tensors(tmp_path / "run").keys() == tensors(tmp_path / "eager").keys()


class PositionedBlock(Block):
    """A decoder layer that is given the positions of the tokens before what it changes."""

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden + positions[:, None])


class AtPositions(Model):
    """A GPT of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PositionedBlock() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, positions = self.embedding(ids), torch.arange(ids.shape[1])
        for block in self.blocks:
            hidden = block(positions, hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "options"), [(Model, {"layers": "all"}), (AtPositions, {"select": "layer_type=hidden"})]
)
@exhaustive("make test records layers eagerly")
def test_what_layers_give_is_recorded_and_held_without_their_products(
    make: Callable[[], Model], options: dict[str, Any], tmp_path: Path
) -> None:
    held: list[list[torch.Tensor] | None] = []

    def holding(model: Model) -> Step:
        step = whole(model)

        def hold(ids: torch.Tensor) -> torch.Tensor:
            loss = step(ids)
            held.append(get_layer_hidden_states())
            return loss

        return hold

    seen = train(holding, tmp_path / "run", make=make, **options)
    assert seen.equals(train(whole, make=make))
    assert seen.num_graphs == [1] + [2] * 3
    train(as_written, tmp_path / "eager", make=make, **options)
    found = tensors(tmp_path / "run")
    assert found.keys() == tensors(tmp_path / "eager").keys()
    given = [value for key, value in sorted(found.items(), key=lambda one: one[0][2]) if key[3] == "forward"]
    assert held[1] is not None
    # What enters the first layer is one of them.
    assert [tuple(one.shape) for one in held[1]] == [given[0].shape] * 3
    assert all(np.array_equal(*pair) for pair in zip(held[1][-len(given) :], given, strict=True))


def test_another_backend_runs_eagerly_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = train(functools.partial(whole, backend="aot_eager"), tmp_path / "run")
    assert seen.num_graphs == [1] * 4
    assert "runs eagerly in captured iterations" in capsys.readouterr().err
    assert tensors(tmp_path / "run")


NUM_STEPS = 21
CAPTURED = tuple(range(1, NUM_STEPS, 2))
"""Every other step: 20 toggles."""
NUM_LAYERS = 12
"""More than dynamo compiles of one function before it gives up (8)."""


def compilations() -> Counter[str]:
    """What has been compiled so far: by dynamo, by AOT autograd, and by inductor or taken from its cache."""
    asked = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
    return Counter(
        frames=counters["frames"]["ok"],
        graphs=counters["stats"]["unique_graphs"],
        autograd=counters["aot_autograd"]["total"],
        inductor=sum(counters["inductor"][name] for name in asked),
    )


@dataclass(frozen=True, slots=True)
class Compiled:
    """A training, and what was compiled in its steps."""

    trained: Trained
    steps: list[Counter[str]]

    def compiled_in(self, steps: range | tuple[int, ...]) -> Counter[str]:
        """What was compiled in some steps together."""
        return sum((self.steps[step] for step in steps), Counter())


def counted(compile_: Callable[[Model], Step], url: Path | None = None, **options: Any) -> Compiled:
    """A training of some steps, of which every other is captured where there is a URL."""
    found: list[Counter[str]] = []

    def compile_counting(model: Model) -> Step:
        step = compile_(model)

        def count(ids: torch.Tensor) -> torch.Tensor:
            before = compilations()
            loss = step(ids)
            found.append(compilations() - before)
            return loss

        return count

    # A region that is compiled too often raises here, where it would run eagerly.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        trained = train(compile_counting, url, captured=CAPTURED, **options)
    return Compiled(trained, found)


LAYERS = functools.partial(Model, number=NUM_LAYERS)
CHANGING = tuple(8 - step // 2 % 4 for step in range(NUM_STEPS))
"""Tokens of each step; a length that is new comes in a plain step, and in a captured one after it."""


@pytest.mark.parametrize(
    ("compile_", "make", "lengths"),
    [
        pytest.param(by_blocks, LAYERS, None, id="each layer"),
        pytest.param(whole, LAYERS, None, id="whole, fullgraph", marks=_LONG),
        pytest.param(functools.partial(by_blocks, dynamic=True), LAYERS, CHANGING, id="dynamic, layers", marks=_LONG),
        pytest.param(functools.partial(whole, dynamic=True), Model, CHANGING, id="dynamic, whole", marks=_LONG),
        pytest.param(whole, Model, CHANGING, id="lengths that become dynamic", marks=_LONG),
        pytest.param(functools.partial(whole, mode="reduce-overhead"), Model, None, id="reduce-overhead", marks=_LONG),
        pytest.param(functools.partial(whole, mode="max-autotune"), Model, None, id="max-autotune", marks=_LONG),
        pytest.param(functools.partial(by_blocks, mode="max-autotune"), LAYERS, None, id="tuned layers", marks=_LONG),
    ],
)
@exhaustive("make test counts compilations in tests/capture/test_compiled_graphs.py")
def test_a_capture_that_comes_and_goes_compiles_each_region_once_more(
    compile_: Callable[[Model], Step], make: Callable[[], Model], lengths: tuple[int, ...] | None, tmp_path: Path
) -> None:
    shared: dict[str, Any] = {"make": make, "lengths": lengths or (8,) * NUM_STEPS}
    plain = counted(compile_, **shared)
    seen = counted(compile_, tmp_path / "run", **shared)
    wanted = plain.compiled_in(range(NUM_STEPS))
    assert wanted["graphs"], "the training is compiled"
    assert seen.compiled_in(range(0, NUM_STEPS, 2)) == wanted, "plain steps compile what they compile without a capture"
    assert seen.compiled_in(CAPTURED) <= wanted
    if lengths is None:
        assert not seen.compiled_in(range(2, NUM_STEPS)), "all is compiled with the first captured step"
    assert seen.trained.equals(plain.trained)


Tensors = dict[Any, "np.ndarray[Any, Any]"]


class Logits(nn.Module):
    """A language model that gives logits alone."""

    def __init__(self, attention: str, *, name: str = "Llama", is_checkpointed: bool = False, **sizes: Any) -> None:
        super().__init__()
        self.inner = tiny(name, attn_implementation=attention, vocab_size=VOCABULARY, **sizes)
        if is_checkpointed:
            self.inner.activation_checkpointing_enable()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]  # transformers'


def whole_logits(model: Any) -> Step:
    return stepping(model, torch.compile(model, fullgraph=True))


def by_layers(model: Any) -> Step:
    for layer in model.inner.model.layers:
        layer.compile(fullgraph=True)
    return stepping(model)


@pytest.mark.parametrize(
    ("attention", "way", "recompute", "dtype"),
    [
        ("sdpa", by_layers, "layers", torch.float32),
        pytest.param("sdpa", whole_logits, "none", torch.bfloat16, marks=_LONG),
        pytest.param("eager", whole_logits, "layers", torch.float32, marks=_LONG),
        pytest.param("eager", by_layers, "none", torch.bfloat16, marks=_LONG),
    ],
)
@needs("transformers")
@pytest.mark.timeout(400)
@exhaustive("make test compiles a model of its own")
def test_what_is_recorded_of_hugging_face_and_computed(
    attention: str, way: Any, recompute: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    make: Any = functools.partial(Logits, attention, is_checkpointed=recompute == "layers")
    shared: dict[str, Any] = {"make": make, "dtype": dtype}
    train(as_written, tmp_path / "eager", **shared)
    plain: Trained = train(way, **shared)
    seen = train(way, tmp_path / "graph", **shared)
    assert seen.equals(plain)
    assert plain.num_graphs == plain.num_graphs[:1] * 4
    assert seen.num_graphs == [plain.num_graphs[0], *[2 * plain.num_graphs[0]] * 3]
    eager, graph = tensors(tmp_path / "eager"), tensors(tmp_path / "graph")
    assert graph.keys() == eager.keys()
    attended = {key[5] for key in graph if key[1] == "attention"}
    assert attended == {prefix + name for prefix in ("", "grad_") for name in ("query", "key", "value", "output")}
    expect_close(graph, eager, tolerance=1e-3 if dtype == torch.float32 else 0.1)


def expect_close(graph: Tensors, eager: Tensors, *, tolerance: float) -> None:
    for key, value in eager.items():
        limit = tolerance * max(float(np.abs(value).max()), 1e-3)
        np.testing.assert_allclose(graph[key].astype(np.float64), value.astype(np.float64), rtol=0, atol=limit)


def by_layers_with_breaks(model: Any) -> Step:
    for layer in model.inner.model.layers:
        layer.compile()
    return stepping(model)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        # Its weights of experts are transposed for the product; in float32 that is an operator of transformers.
        ("Qwen3Moe", torch.float32),
        pytest.param("Qwen3Moe", torch.bfloat16, marks=_LONG),
        pytest.param("GptOss", torch.float32, marks=_LONG),
    ],
)
@needs("transformers")
@pytest.mark.timeout(400)
@exhaustive("make test compiles a model of its own")
def test_experts_are_recorded_in_graphs(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make: Any = functools.partial(Logits, "eager", name=name, num_hidden_layers=1)
    shared: dict[str, Any] = {"make": make, "dtype": dtype}
    train(as_written, tmp_path / "eager", **shared)
    plain = train(by_layers_with_breaks, **shared)
    seen = train(by_layers_with_breaks, tmp_path / "graph", **shared)
    assert seen.equals(plain)
    eager, graph = tensors(tmp_path / "eager"), tensors(tmp_path / "graph")
    assert graph.keys() == eager.keys()
    experts = {key for key in graph if "experts" in str(key)}
    assert {key[5] for key in experts} >= {"weight", "output", "grad_weight", "grad_output"}
    expect_close(graph, eager, tolerance=1e-3 if dtype == torch.float32 else 0.1)
