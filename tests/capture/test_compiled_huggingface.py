"""Is a model of Hugging Face recorded inside of its compiled graphs, attention of its registry and all?"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.capture.compiled_models import VOCABULARY, Step, Trained, as_written, stepping, tensors, train
from tests.capture.hugging_face import tiny
from tests.exhaustive import exhaustive
from tests.optional import needs

Tensors = dict[Any, "np.ndarray[Any, Any]"]

# dynamo meets deprecated parts of torch itself, and transformers warns of its own plans
pytestmark = [needs("transformers"), pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(400)]

_LONG = pytest.mark.exhaustive("as the other, with other functions, and compiled in other ways")


class Logits(nn.Module):
    """A language model that gives logits alone."""

    def __init__(self, attention: str, *, name: str = "Llama", is_checkpointed: bool = False, **sizes: Any) -> None:
        super().__init__()
        self.inner = tiny(name, attn_implementation=attention, vocab_size=VOCABULARY, **sizes)
        if is_checkpointed:
            self.inner.activation_checkpointing_enable()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]  # transformers'


def whole(model: Any) -> Step:
    return stepping(model, torch.compile(model, fullgraph=True))


def by_layers(model: Any) -> Step:
    for layer in model.inner.model.layers:
        layer.compile(fullgraph=True)
    return stepping(model)


@pytest.mark.parametrize(
    ("attention", "way", "recompute", "dtype"),
    [
        ("sdpa", by_layers, "layers", torch.float32),
        pytest.param("sdpa", whole, "none", torch.bfloat16, marks=_LONG),
        pytest.param("eager", whole, "layers", torch.float32, marks=_LONG),
        pytest.param("eager", by_layers, "none", torch.bfloat16, marks=_LONG),
    ],
)
@exhaustive("make test compiles a model of its own in tests/capture/test_compiled_graphs.py")
def test_what_is_recorded_and_computed(
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
@exhaustive("make test compiles a model of its own in tests/capture/test_compiled_graphs.py")
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
