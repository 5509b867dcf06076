"""Is everything recorded once, and paired, where parts of the forward are run again in the backward pass?

One capture sees all kinds of checkpoints, an iteration each. Every block calls one layer twice, so that calls that are
exchanged in a recomputation show: each call's gradients are computed again from the recorded inputs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from ranktape.capture import Capture
from ranktape.storage import Records, Run, open_run
from tests.capture.hugging_face import tiny
from tests.capture.verify import verify_run
from tests.exhaustive import exhaustive, exhaustive_but
from tests.optional import needs

# torch warns of a reentrant checkpoint inside of another one, whose first pass has no gradients.
# The frameworks tell of what they will rename, and of what they import.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:None of the inputs have requires_grad",
        "ignore:Transformer Engine and Apex are not",
        "ignore::FutureWarning",
        "ignore::DeprecationWarning",
    ),
]

WIDTH = 8
Segment = Callable[..., Any]


class Block(nn.Module):
    """Two calls of one layer around an attention that is no module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query = self.twice(hidden).unflatten(-1, (2, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, query, query, is_causal=True).transpose(1, 2).flatten(2)
        return hidden + self.out(torch.tanh(self.twice(attended)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks, run by `segment(block, hidden)`."""

    def __init__(self, segment: Segment) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.segment = segment

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(hidden)
        for block in self.blocks:
            hidden = self.segment(block, hidden)
        return hidden


def reentrant(block: Segment, hidden: torch.Tensor) -> Any:
    return checkpoint(block, hidden, use_reentrant=True)


def non_reentrant(block: Segment, hidden: torch.Tensor) -> Any:
    return checkpoint(block, hidden, use_reentrant=False)


def without_early_stop(block: Segment, hidden: torch.Tensor) -> Any:
    with set_checkpoint_early_stop(enable=False):
        return checkpoint(block, hidden, use_reentrant=False)


def _policy(_: Any, function: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_kept = function == torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective(block: Segment, hidden: torch.Tensor) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(block, hidden, use_reentrant=False, context_fn=contexts)


def _nested(outer: Segment, inner: Segment, block: Segment, hidden: torch.Tensor) -> Any:
    # The same block twice: outside of the inner checkpoint and in it.
    return outer(lambda value: inner(block, block(value)), hidden)


class Unknown(torch.autograd.Function):
    """A checkpoint of a framework that is not known."""

    @staticmethod
    def forward(ctx: Any, function: Segment, hidden: torch.Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return function(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        [hidden] = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            output = ctx.function(hidden)
        torch.autograd.backward(output, grads[0])
        return None, hidden.grad


KINDS: dict[str, tuple[Segment, int]] = {
    "plain": (lambda block, hidden: block(hidden), 2),
    "reentrant": (reentrant, 2),
    "non-reentrant": (non_reentrant, 2),
    "without early stop": (without_early_stop, 2),
    "selective": (selective, 2),
    "reentrant in reentrant": (functools.partial(_nested, reentrant, reentrant), 4),
    "non-reentrant in reentrant": (functools.partial(_nested, reentrant, non_reentrant), 4),
    "reentrant in non-reentrant": (functools.partial(_nested, non_reentrant, reentrant), 4),
    "non-reentrant in non-reentrant": (functools.partial(_nested, non_reentrant, non_reentrant), 4),
}
"""How a block is run, and how often that calls its doubled layer."""

NUM_PASSES = 3
"""One microbatch of two forwards before their backward passes, and one of one."""


def digest_of(tensors: Iterable[torch.Tensor | None]) -> str:
    """What changes with any bit of them."""
    digest = hashlib.sha256()
    for tensor in tensors:
        assert tensor is not None
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def train(segment: Segment) -> str:
    """One iteration; a digest of its losses and gradients."""
    torch.manual_seed(0)
    model = Net(segment)
    batches = [torch.randn(2, 3, WIDTH) for _ in range(NUM_PASSES)]
    losses = [model(batch).square().mean() for batch in batches[:2]]
    losses[0].backward()
    losses[1].backward()
    last = model(batches[2]).square().mean()
    last.backward()
    return digest_of([*losses, last, *(parameter.grad for parameter in model.parameters())])


def train_unknown() -> None:
    """One iteration under a checkpoint that nobody announces; each layer runs once in a pass."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Checkpointed(block) for block in blocks))
    for _ in range(2):
        model(torch.randn(2, WIDTH)).square().mean().backward()


class Checkpointed(nn.Module):
    """A block under the checkpoint that is not known."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor) -> Any:
        return Unknown.apply(self.block, hidden)  # type: ignore[no-untyped-call]  # torch's


def llama(*, use_reentrant: bool) -> str:
    """One iteration of two microbatches of a Llama that recomputes its layers; a digest of losses and gradients."""
    torch.manual_seed(0)
    model = tiny("Llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    losses = []
    for _ in range(2):
        tokens = torch.randint(32, (2, 5))
        losses.append(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
        losses[-1].backward()
    return digest_of([*losses, *(parameter.grad for parameter in model.parameters())])


def megatron(*, keeps_output: bool) -> str:
    """One iteration under the checkpoints of Megatron-core."""
    from megatron.core.tensor_parallel.random import CheckpointFunction, CheckpointWithoutOutput

    def segment(block: Segment, hidden: torch.Tensor) -> Any:
        if keeps_output:
            return CheckpointFunction.apply(block, False, hidden)  # noqa: FBT003  (it has no keywords)
        held = CheckpointWithoutOutput(fp8=None)
        following = torch.sin(held.checkpoint(block, hidden))
        held.discard_output_and_register_recompute(following)
        return following

    return train(segment)


FRAMEWORKS: dict[str, Callable[[], str]] = {
    "llama reentrant": functools.partial(llama, use_reentrant=True),
    "llama non-reentrant": functools.partial(llama, use_reentrant=False),
    "megatron": functools.partial(megatron, keeps_output=True),
    "megatron without output": functools.partial(megatron, keeps_output=False),
}


@contextlib.contextmanager
def stand_in_for_a_gpu() -> Iterator[None]:
    """Megatron-core's checkpoints keep the random numbers of a GPU: there are none."""
    from megatron.core.tensor_parallel import random

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "_get_all_rng_states", lambda: (None, None, None))
        patch.setattr(random, "_set_all_rng_states", lambda *_: None)
        yield


def capture_each(url: Path, trainings: Mapping[str, Callable[[], str | None]]) -> Run:
    """The run of one capture, in which each training has an iteration, and is what it is without a capture."""
    plain = {kind: training() for kind, training in trainings.items()}
    with Capture(url, advance_on="step", min_iterations=len(trainings)) as capture:
        for kind, training in trainings.items():
            assert training() == plain[kind], f"{kind}: not bitwise equal"
            capture.step()
    assert capture.close().met
    return open_run(url)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    trainings = {kind: functools.partial(train, segment) for kind, (segment, _) in KINDS.items()}
    return capture_each(tmp_path_factory.mktemp("once") / "run", {**trainings, "unknown": train_unknown})


@pytest.fixture(scope="module")
def frameworks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with stand_in_for_a_gpu():
        return capture_each(tmp_path_factory.mktemp("frameworks") / "run", FRAMEWORKS)


def names_by_call(records: Records) -> dict[tuple[int, int], list[str]]:
    """The names of all tensors of each microbatch and call, without weights and biases."""
    return {
        (keys["microbatch"], keys["call"]): sorted(set(group.column("tensor_name")) - {"weight", "bias"})
        for keys, group in records.group_by(["microbatch", "call"])
    }


LINEAR = ["grad_bias", "grad_input", "grad_output", "grad_weight", "input", "output"]
ATTENTION = sorted([*(f"{grad}{name}" for grad in ("", "grad_") for name in ("query", "key", "value", "output"))])


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_has_each_value_and_each_gradient_once(run: Run, kind: str) -> None:
    records = run.select(iteration=list(KINDS).index(kind))
    for block in range(2):
        for name, part in (("twice", 1.0), ("out", 0.5), ("attention", 0.5)):
            module = f"*blocks.{block}" if name == "attention" else f"*blocks.{block}.{name}"
            own = records.select(module=module, layer_type="attention" if name == "attention" else "linear")
            num_calls = int(KINDS[kind][1] * part)
            # Two forwards came before their backward passes: they are one microbatch.
            places = [(0, call) for call in range(2 * num_calls)] + [(1, call) for call in range(num_calls)]
            names = ATTENTION if name == "attention" else LINEAR
            assert names_by_call(own) == dict.fromkeys(places, names)
            assert len(own) == len(places) * len(names) + 2 * (name != "attention")  # and the weight and the bias


@pytest.mark.support(framework="PyTorch", parallelism="one process", features=("checkpointing",))
@pytest.mark.parametrize("kind", KINDS)
@exhaustive_but("plain", "reentrant", "non-reentrant", reason="each kind alone is in make test")
def test_gradients_are_those_of_their_call(run: Run, kind: str) -> None:
    num_calls = KINDS[kind][1]
    counts = verify_run(run.select(iteration=list(KINDS).index(kind)))
    num_linear = 2 * NUM_PASSES * (num_calls + num_calls // 2)
    assert counts["grad_input"] == num_linear
    assert counts["grad_weight"] == counts["output"] == num_linear + NUM_PASSES
    assert counts["attention grad_query"] == NUM_PASSES * num_calls


@pytest.mark.support(framework="HF Llama", parallelism="one process", features=("checkpointing",))
@pytest.mark.parametrize("kind", ["llama reentrant", "llama non-reentrant"])
@needs("transformers")
@exhaustive("make test recomputes layers of its own")
def test_a_llama_that_recomputes_its_layers_has_each_tensor_once(frameworks: Run, kind: str) -> None:
    records = frameworks.select(iteration=list(FRAMEWORKS).index(kind))
    num_linears, num_layers, num_passes = 15, 2, 2
    assert verify_run(records) == {
        "output": num_passes * num_linears,
        "grad_input": num_passes * num_linears,
        "grad_weight": num_passes * num_linears,
        **{f"attention {name}": num_passes * num_layers for name in ("output", "grad_query", "grad_key", "grad_value")},
    }
    assert len(records) == num_passes * (5 * num_linears + 8 * num_layers) + num_linears
    assert set(records.column("call")) == {0}


@pytest.mark.support(framework="Megatron-core", parallelism="one process", features=("checkpointing",))
@pytest.mark.parametrize("kind", ["megatron", "megatron without output"])
@needs("megatron")
@exhaustive("make test has a checkpoint that nobody announces")
def test_a_checkpoint_of_megatron_has_each_tensor_once(frameworks: Run, kind: str) -> None:
    records = frameworks.select(iteration=list(FRAMEWORKS).index(kind))
    counts = verify_run(records)
    assert counts["grad_input"] == 2 * NUM_PASSES * 3
    assert counts["grad_weight"] == counts["output"] == 2 * NUM_PASSES * 3 + NUM_PASSES
    assert counts["attention output"] == counts["attention grad_query"] == 2 * NUM_PASSES
    for block in range(2):
        own = records.select(module=f"*blocks.{block}.twice")
        assert names_by_call(own) == dict.fromkeys([*((0, call) for call in range(4)), (1, 0), (1, 1)], LINEAR)


def test_an_unknown_checkpoint_keeps_layers_apart_that_run_once_in_a_pass(run: Run) -> None:
    records = run.select(iteration=len(KINDS))
    counts = verify_run(records)
    assert counts["grad_input"] == 2 * 4
    assert counts["grad_weight"] == counts["output"] == 2 * 5
    assert set(records.column("call")) == {0}
    assert set(records.column("microbatch")) == {0, 1}


def test_no_gradient_that_was_expected_is_missing(run: Run) -> None:
    # Of the models before: each iteration has one of its own.
    reasons = {reason for status in run.status() for reason in status.silent_sites.get(0, {}).values()}
    assert reasons <= {"its function was not called"}
    assert run.status()[0].silent_sites == {}
