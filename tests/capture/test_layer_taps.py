"""Do taps on layers give the same lists in eager and compiled models, exported programs and traced modules?"""

from __future__ import annotations

import copy
import functools
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from ranktape.capture import Capture, get_layer_hidden_states, tap_layers
from ranktape.errors import UsageError
from tests.capture import compiled_models
from tests.capture.compiled_models import VOCABULARY, WIDTH
from tests.capture.hugging_face import tiny
from tests.optional import needs

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # dynamo and torch.jit meet deprecated parts of torch itself
    pytest.mark.alone,  # dynamo counts for the whole process what it has compiled
]

NUM_LAYERS, LENGTH = 3, 6
Model = functools.partial(compiled_models.Model, number=NUM_LAYERS)


def expected(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """What enters the layers, and what each gives, computed by hand."""
    states = [model.embedding(tokens) + model.position(torch.arange(tokens.shape[1]))]
    for block in model.blocks:
        states.append(block(states[-1]))
    return states


def held() -> list[torch.Tensor]:
    states = get_layer_hidden_states()
    assert states is not None
    return states


def are_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH))


Make = Callable[[Any, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]


def saved_and_loaded(model: Any, tokens: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, (tokens,)), buffer)
    return torch.export.load(io.BytesIO(buffer.getvalue())).module()


def traced_saved_and_loaded(model: Any, tokens: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, tokens), buffer)
    return torch.jit.load(io.BytesIO(buffer.getvalue()))  # type: ignore[no-any-return]


EXACT: dict[str, Make] = {
    "eager": lambda model, _: model,
    "torch.compile": lambda model, _: torch.compile(model, backend="aot_eager", fullgraph=True),
    "torch.export": lambda model, tokens: torch.export.export(model, (tokens,)).module(),
    "torch.export(strict=True)": lambda model, tokens: torch.export.export(model, (tokens,), strict=True).module(),
    "torch.export, loaded": saved_and_loaded,
    "torch.jit.trace": torch.jit.trace,
    "torch.jit.trace, loaded": traced_saved_and_loaded,
}
"""Ways to run a model that compute what eager code does, bit for bit."""


@pytest.mark.parametrize("way", EXACT)
def test_the_list_and_the_result_are_those_of_the_model(way: str, tokens: torch.Tensor) -> None:
    model = Model().eval()
    with torch.no_grad():
        output, wanted = model(tokens), expected(model, tokens)
        with tap_layers(model):
            called = EXACT[way](model, tokens)
            model(torch.zeros_like(tokens))  # what comes out is not what the making of it left
            assert torch.equal(called(tokens), output)
            assert are_equal(held(), wanted)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("is_training", [False, True])
def test_inductor_gives_the_same_bits_with_taps_before_and_after_the_first_compilation(
    tokens: torch.Tensor, *, is_training: bool
) -> None:
    model = Model(number=2)

    def step(called: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        with torch.set_grad_enabled(is_training):
            output = called(tokens)
        if is_training:
            output.square().mean().backward()
        return [output.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]

    called = torch.compile(model, fullgraph=True)
    plain = step(called)
    for _ in range(2):
        with tap_layers(model):
            tapped = step(called)
        assert are_equal(tapped, plain)
        assert [state.shape for state in held()] == [(2, LENGTH, WIDTH)] * 3
        torch.testing.assert_close(held(), expected(model, tokens))
        assert are_equal(step(called), plain)
    assert num_graphs() == 2, "one with taps and one without, each compiled once"
    torch._dynamo.reset()
    with tap_layers(model):
        assert are_equal(step(torch.compile(model, fullgraph=True)), plain)
        assert len(held()) == 3


def test_layers_of_one_class_share_their_compilations(tokens: torch.Tensor) -> None:
    model = Model(number=12).eval()  # more than dynamo compiles of one function before it gives up (8)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        output, wanted = model(tokens), expected(model, tokens)
        assert num_graphs() == 1
        for _ in range(20):
            with tap_layers(model):
                assert torch.equal(model(tokens), output)
                assert are_equal(held(), wanted)
            assert torch.equal(model(tokens), output)
    assert num_graphs() == 3, "beside the first: a layer with a tap, and one in which the pass begins"


def test_lengths_that_change_are_compiled_once(tokens: torch.Tensor) -> None:
    model = Model().eval()
    called = torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), tap_layers(model, layers=[1]):
        for length in (3, 4, 5):
            called(tokens[:, :length])
            assert [state.shape[1] for state in held()] == [length, length]
    assert num_graphs() == 1


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_recomputation_adds_nothing(tokens: torch.Tensor, *, is_compiled: bool) -> None:
    model = Model(is_checkpointed=True)
    with tap_layers(model):
        called = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        output = called(tokens)
        output.sum().backward()
    assert are_equal(held(), expected(model, tokens))


@pytest.mark.parametrize("way", EXACT)
def test_two_threads_that_run_one_model_have_each_a_list(way: str, tokens: torch.Tensor) -> None:
    model = Model().eval()
    both = threading.Barrier(2, timeout=60)
    with tap_layers(model), torch.no_grad():
        called = EXACT[way](model, tokens)
        called(tokens)
        batches = [torch.full_like(tokens, place) for place in range(2)]
        wanted = [expected(model, batch) for batch in batches]

        def run(place: int) -> bool:
            same = []
            for _ in range(20):
                with torch.no_grad():
                    both.wait()
                    called(batches[place])
                same.append(are_equal(held(), wanted[place]))
            return all(same)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(run, range(2))) == [True, True]


class Logits(nn.Module):
    """A Hugging Face model that gives one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = tiny("Llama", num_hidden_layers=NUM_LAYERS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.llama(tokens, use_cache=False).logits  # type: ignore[no-any-return]


@needs("transformers")
@pytest.mark.parametrize("way", ["torch.compile", "torch.export", "torch.jit.trace"])
def test_a_llama_gives_the_layers_that_are_chosen(way: str, tokens: torch.Tensor) -> None:
    model: Any = Logits().eval()
    with torch.no_grad():
        output = model(tokens)
        wanted = model.llama(tokens, output_hidden_states=True).hidden_states
        with tap_layers(model, layers=[0, 1]):
            called = EXACT[way](model, tokens)
            assert torch.equal(called(tokens), output)
    assert are_equal(held(), list(wanted[:3]))


class Pair(nn.Module):
    """A layer that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.linear(hidden), None


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden, _ = layer(hidden)
        return hidden


@pytest.mark.parametrize("way", ["torch.compile", "torch.export", "torch.jit.trace"])
def test_layers_that_return_tuples_still_do(way: str) -> None:
    model: Any = Pairs()
    batch = torch.randn(2, WIDTH)
    with torch.no_grad(), tap_layers(model):
        output = EXACT[way](model, batch)(batch)
    assert torch.equal(output, model(batch))
    assert torch.equal(held()[-1], output)


class Uncopyable(torch.Tensor):
    """A tensor of a kind that refuses to be copied."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {torch.Tensor.detach, torch.Tensor.clone}:
            raise RuntimeError("this is never copied")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_what_fails_in_a_tap_is_told_and_the_model_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    model = Pairs()
    batch = torch.randn(2, WIDTH).as_subclass(Uncopyable)
    with torch.no_grad(), tap_layers(model):
        output = model(batch)
        assert get_layer_hidden_states() is None
        assert "has no list of hidden states: RuntimeError: this is never copied" in capsys.readouterr().err
        assert torch.equal(model(torch.Tensor(batch)), output.as_subclass(torch.Tensor))
        assert len(held()) == 3


def test_a_failing_operator_in_a_graph_is_told_and_the_model_goes_on(
    tokens: torch.Tensor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model().eval()

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for a copy")

    with torch.no_grad(), tap_layers(model):
        called = torch.compile(model, fullgraph=True, backend="aot_eager")
        output = called(tokens)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", fail)
            assert torch.equal(called(tokens), output)
            assert get_layer_hidden_states() is None
        assert "MemoryError: no room for a copy" in capsys.readouterr().err
        assert torch.equal(called(tokens), output)
    assert len(held()) == NUM_LAYERS + 1


def test_inside_of_a_transform_there_is_no_list(capsys: pytest.CaptureFixture[str]) -> None:
    model = Pairs()
    batch = torch.randn(3, 2, WIDTH)
    plain = torch.func.vmap(model)(batch)
    with tap_layers(model):
        assert torch.equal(torch.func.vmap(model)(batch), plain)
        assert get_layer_hidden_states() is None
        compiled = torch.compile(torch.func.vmap(lambda one: model(one)), backend="aot_eager", fullgraph=True)  # noqa: PLW0108  (dynamo cannot print a module)
        assert torch.equal(compiled(batch), plain)
        assert get_layer_hidden_states() is None
    assert "transform of torch.func" in capsys.readouterr().err


def test_a_copy_has_taps_of_its_own(tokens: torch.Tensor) -> None:
    model = Model().eval()
    with torch.no_grad(), tap_layers(model):
        other = copy.deepcopy(model)
        next(other.blocks[0].parameters()).zero_()
        other(tokens)
        assert are_equal(held(), expected(other, tokens))
        assert not torch.equal(held()[1], expected(model, tokens)[1])


def test_taps_lie_around_a_forward_of_the_layers_own(tokens: torch.Tensor) -> None:
    model = Model().eval()
    inner: Any = model.blocks[1].forward
    own: Any = lambda hidden: 2 * inner(hidden)  # noqa: E731
    model.blocks[1].forward = own
    with torch.no_grad():
        wanted = expected(model, tokens)
        with tap_layers(model):
            called = torch.compile(model, fullgraph=True, backend="aot_eager")
            called(tokens)
            assert are_equal(held(), wanted)
    assert model.blocks[1].forward is own


def test_under_a_capture_each_layer_is_in_the_list_once(tmp_path: Path, tokens: torch.Tensor) -> None:
    model = Model().eval()
    wanted = expected(model, tokens)
    with Capture(tmp_path / "run", layers="all", model=model), tap_layers(model), torch.no_grad():
        model(tokens)
        assert are_equal(held(), wanted)


def test_the_layers_that_are_asked_for_must_be_there(tokens: torch.Tensor) -> None:
    model = Model()
    with pytest.raises(UsageError, match="--layers 7 is not in the model, which has layers 0 to 2"):
        tap_layers(model, layers=[0, 7])
    with pytest.raises(UsageError, match="Linear has no stack of layers"):
        tap_layers(nn.Linear(2, 2))
    model(tokens)
    assert not any("forward" in vars(module) for module in model.modules())
