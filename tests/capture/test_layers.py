"""Are the outputs of the layers recorded and given out, in training and in inference, and which layers are there?"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranktape.capture import Capture, get_layer_hidden_states
from ranktape.capture.hooks.stacks import embedding_path, numbered, survey
from ranktape.errors import CaptureError, UsageError
from ranktape.storage import open_run
from tests.capture.trainings import VOCABULARY, WIDTH, Task, captured, train_twice

NUM_LAYERS = 3


class Block(nn.Module):
    """One layer, which returns a tuple as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return hidden + torch.relu(self.up(hidden)), None


class Model(nn.Module):
    """An embedding, a stack of layers and a head; keeps what went between them."""

    def __init__(self, *, reentrant: bool | None = None, keys: list[str] | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        blocks = [Block() for _ in range(NUM_LAYERS)]
        self.layers = nn.ModuleDict(dict(zip(keys, blocks, strict=True))) if keys else nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.kept: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tok_embeddings(tokens)
        self.kept = [hidden]
        blocks = self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        for block in blocks:
            if self.reentrant is None:
                hidden, _ = block(hidden)
            else:
                hidden, _ = checkpoint(block, hidden, use_reentrant=self.reentrant)
            self.kept.append(hidden)
            if hidden.requires_grad and not hidden.is_leaf:
                hidden.retain_grad()
        return self.head(hidden)  # type: ignore[no-any-return]


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 4))


@pytest.mark.support(framework="PyTorch", parallelism="one process", features=("layer outputs",))
def test_inference_records_the_chosen_layers_and_gives_them_out(tmp_path: Path) -> None:
    model = Model().eval()
    with ThreadPoolExecutor(1) as pool:  # on this one, other tests had passes of their own
        assert pool.submit(get_layer_hidden_states).result() is None
    with Capture(tmp_path / "run", layers=[0, 2], min_iterations=2, advance_on="step") as capture:
        for step in range(3):
            with torch.inference_mode():
                output = model(tokens())
                assert torch.equal(output, model.head(model.kept[-1]))
            states = get_layer_hidden_states()
            if step < 2:
                assert states is not None
                assert all(map(torch.equal, states, [model.kept[place] for place in (0, 1, 3)]))
                assert not any(state.requires_grad for state in states)
            else:
                assert states is None, "this pass was not captured"
            capture.step()
    records = open_run(tmp_path / "run").select(iteration=0)
    found = [
        (record.layer_type, record.layer_idx, record.module, record.tensor_name, record.mode) for record in records
    ]
    assert found == [
        ("embedding", -1, "tok_embeddings", "output", "eval"),
        ("hidden", 0, "layers.0", "output", "eval"),
        ("hidden", 2, "layers.2", "output", "eval"),
    ]
    assert {(record.layout, record.operation, record.phase) for record in records} == {("BTH", "forward", "post")}
    assert not any(any(status.silent_sites.values()) for status in open_run(tmp_path / "run").status())


@pytest.mark.support(framework="PyTorch", parallelism="one process", features=("layer outputs",))
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_records_every_layer_with_its_gradient(tmp_path: Path, *, reentrant: bool | None) -> None:
    task = Task(
        make=lambda: Model(reentrant=reentrant),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=tokens,
        options={"layers": True},
    )
    trained = train_twice(task, tmp_path / "run")
    assert trained.is_equal
    records = trained.run.select(iteration=1)
    assert len(records) == 2 * (NUM_LAYERS + 1)
    assert set(records.column("mode")) == {"train"}
    assert isinstance(trained.model, Model)
    for place, kept in enumerate(trained.model.kept):
        chosen = records.select(layer_idx=place - 1)
        [output] = chosen.select(tensor_name="output")
        [grad] = chosen.select(tensor_name="grad_output")
        assert torch.equal(output.tensor(), kept)
        assert grad.phase == "pre"
        if place:
            assert kept.grad is not None
            assert torch.equal(grad.tensor(), kept.grad)
    assert not any(any(status.silent_sites.values()) for status in trained.run.status())


def test_states_of_threads_are_their_own_and_go_with_the_next_pass(tmp_path: Path) -> None:
    model = Model().eval()
    batches = [torch.full((1, 4), place) for place in range(2)]
    seen: dict[int, Any] = {}
    both = threading.Barrier(2)

    def run(place: int) -> None:
        with torch.no_grad():
            model(batches[place])
        both.wait()
        seen[place] = get_layer_hidden_states()

    with Capture(tmp_path / "run", layers="all", model=model, advance_on="step") as capture:
        threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        capture.step()
    for place in range(2):
        assert torch.equal(seen[place][0], model.tok_embeddings(batches[place]))
    # Threads are gone, and their copies with them; nothing is left on the model once it has run again.
    model(batches[0])
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_two_threads_in_a_model_at_once_share_an_iteration(tmp_path: Path) -> None:
    model = Model().eval()
    both = threading.Barrier(2, timeout=60)
    model.head.register_forward_pre_hook(lambda *_: (both.wait(), None)[1])

    def run(place: int) -> list[int]:
        found = []
        for _ in range(3):
            with torch.inference_mode():
                model(torch.full((1, 4), place))
            states = get_layer_hidden_states()
            same = states is not None and torch.equal(states[0], model.tok_embeddings(torch.full((1, 4), place)))
            found.append(len(states) if states is not None and same else 0)
            both.wait()
        return found

    with Capture(tmp_path / "run", layers="all", model=model, min_iterations=3), ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[NUM_LAYERS + 1] * 3] * 2
    run_ = open_run(tmp_path / "run")
    assert run_.iterations == [0, 1, 2]
    assert len(run_.select()) == 6 * (NUM_LAYERS + 1)


def test_each_pass_of_a_generation_gives_its_own(tmp_path: Path) -> None:
    model = Model().eval()
    with Capture(tmp_path / "run", layers=[1], model=model, advance_on="step") as capture, torch.no_grad():
        for length in (4, 1, 1):
            model(torch.zeros(1, length, dtype=torch.long))
            states = get_layer_hidden_states()
            assert states is not None
            assert [state.shape[1] for state in states] == [length, length]
        capture.step()
    hidden = open_run(tmp_path / "run").select(layer_type="hidden")
    assert [record.shape[1] for record in hidden] == [4, 1, 1]
    assert len({(record.microbatch, record.call) for record in hidden}) == 3


@pytest.mark.parametrize("is_given", [False, True])
def test_a_layer_that_is_not_there_is_an_error_that_says_which_are(tmp_path: Path, *, is_given: bool) -> None:
    model = Model()
    capture = Capture(tmp_path / "run", layers=[0, 61], model=model if is_given else None)
    with pytest.raises(UsageError, match="--layers 61 is not in the model, which has layers 0 to 2"):  # noqa: SIM117
        with capture:
            model(tokens())


def test_a_model_without_a_stack_is_told_so(tmp_path: Path) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = Capture(tmp_path / "run", layers=True)
    capture.__enter__()
    model(torch.randn(2, WIDTH)).sum().backward()
    with pytest.raises(CaptureError, match="no stack of layers was found"):
        optimizer.step()
    capture.close()


def test_layers_and_linear_layers_together(tmp_path: Path) -> None:
    task = Task(
        make=lambda: Model(keys=["4", "5", "6"]),
        batch=tokens,
        options={"layers": [5], "select": "layer_type=linear"},
    )
    trained = train_twice(task, tmp_path / "run", steps=1)
    assert trained.is_equal
    records = trained.run.select()
    assert set(records.select(layer_type="hidden").column("module")) == {"layers.5"}
    assert not len(records.select(layer_type="embedding")), "a stage that does not begin with layer 0 has none"
    assert set(zip(*map(records.select(layer_type="linear").column, ("module", "layer_idx")), strict=True)) == {
        ("layers.4.up", 4), ("layers.5.up", 5), ("layers.6.up", 6), ("head", -1),
    }  # fmt: skip


def test_stacks_are_found_in_models_of_all_kinds() -> None:
    model = Model()
    [stack] = survey(model).stacks
    assert (stack.name, [layer.idx for layer in stack.layers]) == ("layers", [0, 1, 2])
    assert embedding_path(model, stack) == "tok_embeddings"
    wrapped = nn.Module()
    wrapped.module = model
    assert [layer.path for layer in survey(wrapped).stacks[0].layers] == ["layers.0", "layers.1", "layers.2"]
    [plain] = survey(nn.Sequential(*(Block() for _ in range(2))), layer_offset=8).stacks
    assert [(layer.idx, layer.path) for layer in plain.layers] == [(8, "0"), (9, "1")]
    assert survey(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))).stacks == []
    experts = nn.Module()
    experts.experts = nn.ModuleList(Block() for _ in range(4))
    assert survey(experts).stacks == []
    [seq2seq, _] = survey(nn.Transformer(WIDTH, 2, 2, 3, WIDTH, batch_first=True)).stacks
    assert (seq2seq.name, len(seq2seq.layers)) == ("decoder.layers", 3)


def test_layers_that_say_their_number_are_believed() -> None:
    blocks = [Block() for _ in range(2)]
    model = nn.Module()
    model.decoder = nn.ModuleList(blocks)
    for number, block in enumerate(blocks, start=9):
        block.layer_number = number  # type: ignore[assignment]  # as Megatron-core has it, from 1
    [stack] = survey(model, layer_offset=100).stacks
    assert [layer.idx for layer in stack.layers] == [8, 9]
    for block in blocks:
        block.layer_number = 1  # type: ignore[assignment]
    assert [layer.idx for layer in survey(model).stacks[0].layers] == [0, 1], "two layers cannot have one number"


def test_numbers_that_are_none_are_only_names() -> None:
    assert numbered("blocks.12.mlp.3") == (12, "blocks")
    for path in ("lm_head", "layers.\u0663", "layers.9999999999999999999999", "a.-1", "a.1e5", "", "a.0x1"):
        assert numbered(path) == (-1, "")


def test_hostile_names_of_modules_are_only_data(tmp_path: Path) -> None:
    names = ["..", "a/b", "../../up", "x\ny", "*", "\u202elayers", "x" * 300, "[0]"]
    model = nn.Sequential()
    for name in names:
        model._modules[name] = nn.Linear(WIDTH, WIDTH)  # no other way to have a dot in it
    run = captured(model, tmp_path / "deep" / "run", select={"layer_type": ["linear"]})
    assert run.verdict().met
    records = run.select()
    # The input of the first needs no gradient.
    assert len(records) == 8 * len(names) - 1
    assert len(set(records.column("module"))) == len(names)
    assert set(records.column("layer_idx")) == {-1}
    assert {path.name for path in tmp_path.iterdir()} == {"deep"}
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"run"}
