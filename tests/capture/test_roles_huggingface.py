"""Are the layers of Hugging Face's models recorded as what they computed, whichever function attends?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ranktape.capture import Capture, get_layer_hidden_states
from ranktape.storage import open_run
from tests.capture.hugging_face import NUM_LAYERS, tiny
from tests.capture.trainings import BATCH, VOCABULARY, Task, Trained, train_twice
from tests.capture.verify import verify_run
from tests.exhaustive import exhaustive, exhaustive_but
from tests.optional import needs

LENGTH = 7

# transformers warns of its own plans
pytestmark = [needs("transformers"), pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(200)]


def task(name: str, *, sizes: dict[str, Any], **options: Any) -> Task:
    return Task(
        make=lambda: tiny(name, vocab_size=VOCABULARY, **sizes),
        loss=lambda model, batch: model(input_ids=batch, labels=batch).loss,
        batch=lambda: torch.randint(VOCABULARY, (BATCH, LENGTH)),
        options=options,
    )


def is_whole(trained: Trained) -> bool:
    return not any(any(status.silent_sites.values()) for status in trained.run.status())


@pytest.mark.support(framework="HF Llama", parallelism="one process", features=("linear", "attention", "unchanged"))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@exhaustive_but("sdpa", reason="make test attends eagerly in GPT-2")
def test_llama_with_grouped_heads(tmp_path: Path, attention: str) -> None:
    sizes = {"attn_implementation": attention, "hidden_size": 32}
    trained = train_twice(task("Llama", sizes=sizes), tmp_path / "run")
    assert trained.is_equal
    assert is_whole(trained)
    counts = verify_run(trained.run)
    assert counts["output"] == counts["grad_weight"] == counts["grad_input"] == 2 * (7 * NUM_LAYERS + 1)
    names = ("output", "grad_query", "grad_key", "grad_value")
    assert {counts[f"attention {name}"] for name in names} == {2 * NUM_LAYERS}
    # Fifteen linear layers with six tensors, two attentions with eight: each once.
    records = trained.run.select(iteration=0)
    assert len(records) == 15 * 6 + 2 * 8 == len(set(zip(*map(records.column, ("module", "tensor_name")), strict=True)))
    [key] = records.select(module="model.layers.1.self_attn", tensor_name="key")
    [query] = records.select(module="model.layers.1.self_attn", tensor_name="query")
    assert query.metadata == {"dropout": 0.0, "scale": 8**-0.5} | ({"mask": "Tensor"} if attention == "eager" else {})
    [output] = records.select(module="model.layers.1.self_attn", tensor_name="output")
    assert (key.shape, key.layout, key.layer_idx, key.sample_dim) == ((BATCH, 2, LENGTH, 8), "BHTD", 1, 0)
    assert (output.shape, output.layout, output.component) == ((BATCH, LENGTH, 4, 8), "BTHD", "FA")
    assert set(records.select(module="lm_head").column("layer_idx")) == {-1}
    assert set(records.select(module="model.layers.1.*").column("layer_idx")) == {1}


@pytest.mark.support(framework="HF GPT-2", parallelism="one process", features=("linear", "attention", "unchanged"))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@exhaustive_but("eager", reason="make test attends by sdpa in Llama")
def test_gpt2_with_transposed_and_tied_weights(tmp_path: Path, attention: str) -> None:
    trained = train_twice(
        task("GPT2", sizes={"attn_implementation": attention}, select="layer_type=linear,attention,embedding"),
        tmp_path / "run",
    )
    assert trained.is_equal
    assert is_whole(trained)
    counts = verify_run(trained.run)
    assert counts["output"] == counts["grad_weight"] == counts["grad_input"] == 2 * (4 * NUM_LAYERS + 1)
    assert counts["attention output"] == counts["attention grad_key"] == 2 * NUM_LAYERS
    # The output layer has the weight of the embedding, and each its own share of the gradient.
    assert counts["embedding output"] == counts["embedding grad_weight"] == 2 * 2
    weights = trained.run.select(iteration=0, tensor_name="weight")
    layouts = {record.module: record.layout for record in weights}
    assert layouts["transformer.h.1.mlp.c_fc"] == "IO"
    assert (layouts["lm_head"], layouts["transformer.wte"]) == ("OI", "VH")
    assert set(weights.select(module="transformer.h.1.*").column("layer_idx")) == {1}
    [positions] = trained.run.select(iteration=0, module="transformer.wpe", tensor_name="input")
    assert positions.sample_dim is None


@pytest.mark.support(framework="MoE", parallelism="one process", features=("linear", "unchanged"))
def test_mixtral_with_experts_in_one_parameter(tmp_path: Path) -> None:
    trained = train_twice(task("Mixtral", sizes={"experts_implementation": "eager"}), tmp_path / "run")
    assert trained.is_equal
    verify_run(trained.run)
    modules = set(trained.run.select(iteration=0, layer_idx=1).column("module"))
    assert any(name.startswith("model.layers.1.mlp.experts.gate_up_proj[") for name in modules), modules
    assert "model.layers.1.mlp.gate" in modules
    inputs = trained.run.select(iteration=0, module="*.1.mlp.experts.gate_up_proj*", tensor_name="input")
    assert sum(record.shape[0] for record in inputs) == BATCH * LENGTH * 2


@pytest.mark.support(framework="MoE", parallelism="one process", features=("linear", "unchanged"))
def test_mixtral_with_grouped_products(tmp_path: Path) -> None:
    trained = train_twice(task("Mixtral", sizes={"experts_implementation": "grouped_mm"}), tmp_path / "run")
    assert trained.is_equal
    assert is_whole(trained)
    counts = verify_run(trained.run)
    names = ("output", "grad_input", "grad_weight")
    assert {counts[f"grouped {name}"] for name in names} == {2 * 2 * NUM_LAYERS}
    [tokens] = trained.run.select(iteration=0, module="*.1.mlp.experts.down_proj", tensor_name="input")
    assert (tokens.shape, tokens.layout, tokens.sample_dim) == ((BATCH * LENGTH * 2, 24), "TH", None)


def hidden_states(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return model(input_ids=batch, output_hidden_states=True).hidden_states  # type: ignore[no-any-return]


def check_layer_outputs(name: str, url: Path, *, embedding: str) -> None:
    torch.manual_seed(0)
    model, batch = tiny(name, vocab_size=VOCABULARY).eval(), torch.randint(VOCABULARY, (BATCH, LENGTH))
    with torch.no_grad(), Capture(url, layers=True, advance_on="step") as capture:
        expected = hidden_states(model, batch)
        states = get_layer_hidden_states()
        capture.step()
    assert states is not None
    assert len(states) == NUM_LAYERS + 1
    records = open_run(url).select()
    assert records.column("module")[0] == embedding
    assert records.column("layer_idx").tolist() == [-1, *range(NUM_LAYERS)]
    for record, state, own in zip(records, states, expected, strict=True):
        assert torch.equal(record.tensor(), state)
        # Their last one has gone through the norm at the end.
        assert record.layer_idx == NUM_LAYERS - 1 or torch.equal(state, own)


@pytest.mark.support(framework="HF Llama", parallelism="one process", features=("layer outputs",))
def test_layer_outputs_of_llama(tmp_path: Path) -> None:
    check_layer_outputs("Llama", tmp_path / "run", embedding="model.embed_tokens")


@pytest.mark.support(framework="HF GPT-2", parallelism="one process", features=("layer outputs",))
@exhaustive("make test has those of Llama")
def test_layer_outputs_of_gpt2(tmp_path: Path) -> None:
    check_layer_outputs("GPT2", tmp_path / "run", embedding="transformer.wte")
