"""Is the training unchanged by capture, and is what was recorded what the training computed?

Gradients and outputs are computed again from the recorded inputs: that proves values, pairing and
microbatch at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ranktape.capture import Capture
from ranktape.storage import Record, Records, open_run
from tests.capture.models import LENGTH, NUM_TENSORS, WIDTH, Training, train

TRAININGS = {
    "plain": Training(),
    "accumulation": Training(microbatches=4),
    "autocast": Training(autocast=True, microbatches=2),
    "checkpoint": Training(reentrant=False, microbatches=2),
    "reentrant checkpoint": Training(reentrant=True, microbatches=2),
}


@pytest.fixture(scope="module", params=TRAININGS)
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, Path, bool]:
    """A training, the run it was captured into, and whether its losses and weights were those without capture."""
    training = TRAININGS[request.param]
    url = tmp_path_factory.mktemp("runs") / "run"
    plain_losses, plain_model = train(training)
    losses, model = train(training, capture=Capture(url, start=1, every=2, min_iterations=2))
    pairs = zip(plain_model.parameters(), model.parameters(), strict=True)
    is_equal = losses == plain_losses and all(torch.equal(*pair) for pair in pairs)
    return training, url, is_equal


@pytest.mark.support(framework="PyTorch", parallelism="one process", features=("unchanged",))
def test_losses_and_weights_are_equal_bit_for_bit(captured: tuple[Training, Path, bool]) -> None:
    assert captured[2]


def test_every_tensor_of_every_microbatch_is_there_once(captured: tuple[Training, Path, bool]) -> None:
    training, url, _ = captured
    run = open_run(url)
    assert run.iterations == [1, 3]
    for iteration in run.iterations:
        records = run.select(iteration=iteration)
        # The weights of a step are recorded with its first microbatch.
        num_weights = len(records.select(tensor_name="weight"))
        assert num_weights == 13
        assert len(records) == training.microbatches * (NUM_TENSORS - num_weights) + num_weights
        assert sorted(set(records.column("microbatch"))) == list(range(training.microbatches))
        assert len(set(records.column("counter"))) == len(records)
        assert set(records.column("call")) == {0}
    assert all(not status.silent_sites for status in run.status())


@pytest.mark.support(framework="PyTorch", parallelism="one process", features=("linear",))
def test_linear_layers_compute_again_to_what_was_recorded(captured: tuple[Training, Path, bool]) -> None:
    training, url, _ = captured
    records = open_run(url).select(layer_type="linear")
    checked = 0
    for keys, group in records.group_by(["iteration", "module", "microbatch"]):
        tensors = by_name(group)
        weight = by_name(records.select(**{**keys, "microbatch": 0}))["weight"]
        output = tensors["output"]
        dtype = output.dtype
        inputs = tensors["input"].to(dtype)
        torch.testing.assert_close(F.linear(inputs, weight.to(dtype)), output)
        grad = tensors["grad_output"].flatten(0, 1)
        expected = (grad.mT @ inputs.flatten(0, 1)).float()
        torch.testing.assert_close(tensors["grad_weight"].float(), expected, rtol=2e-2, atol=1e-5)
        if "grad_input" in tensors:
            expected = (tensors["grad_output"] @ weight.to(dtype)).float()
            torch.testing.assert_close(tensors["grad_input"].float(), expected, rtol=2e-2, atol=1e-5)
        checked += 1
    assert checked == 2 * 13 * training.microbatches


@pytest.mark.support(framework="PyTorch", parallelism="one process", features=("attention",))
def test_attention_computes_again_to_what_was_recorded(captured: tuple[Training, Path, bool]) -> None:
    training, url, _ = captured
    checked = 0
    for _, group in open_run(url).select(layer_type="attention").group_by(["iteration", "module", "microbatch"]):
        tensors = by_name(group)
        inputs = [tensors[name].requires_grad_() for name in ("query", "key", "value")]
        output = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True)
        torch.testing.assert_close(output, tensors["output"])
        grads = torch.autograd.grad(output, inputs, tensors["grad_output"])
        for name, grad in zip(("query", "key", "value"), grads, strict=True):
            torch.testing.assert_close(grad, tensors[f"grad_{name}"])
        checked += 1
    assert checked == 2 * 2 * training.microbatches


def test_identities(captured: tuple[Training, Path, bool]) -> None:
    training, url, _ = captured
    run = open_run(url)
    compute = "bfloat16" if training.autocast else "float32"
    record = only(run.select(iteration=1, module="layers.1.up", tensor_name="input", microbatch=0))
    assert (record.layer_type, record.layer_idx, record.component) == ("linear", 1, "linear")
    assert (record.operation, record.phase) == ("forward", "pre")
    assert (record.shape, record.layout) == ((3, LENGTH, WIDTH), "BTH")
    assert (record.sample_dim, record.batch_size) == (0, 3)
    assert (record.dtype, record.compute_dtype) == (compute, compute)
    assert record.quant_type == ("bf16" if training.autocast else "fp32")
    grad = only(run.select(iteration=1, module="layers.1.up", tensor_name="grad_output", microbatch=0))
    assert (grad.operation, grad.phase, grad.dtype) == ("backward", "pre", compute)
    weight = only(run.select(iteration=1, module="layers.1.up", tensor_name="weight"))
    assert (weight.dtype, weight.compute_dtype) == ("float32", compute)
    assert (weight.sample_dim, weight.layout, weight.overflow.per_sample) == (None, "OI", None)
    query = only(run.select(iteration=1, module="layers.0.attention", tensor_name="query", microbatch=0))
    assert (query.layer_type, query.layer_idx, query.component) == ("attention", 0, "FA")
    assert (query.layout, query.sample_dim, query.dtype) == ("BHTD", 0, compute)
    assert query.read(sample=2).tobytes() == query.read()[2].tobytes()
    values = query.tensor().float()
    assert query.overflow.absmax == values.abs().max().item()
    assert query.overflow.zero.count == int((values == 0).sum())
    assert query.overflow.per_sample is not None
    assert query.overflow.per_sample["nan"] == [0, 0, 0]


def by_name(records: Records) -> dict[str, torch.Tensor]:
    """The values, by the tensors' names, of records that have one of each."""
    tensors = {record.tensor_name: record.tensor() for record in records}
    assert len(tensors) == len(records)
    return tensors


def only(records: Records) -> Record:
    """The one record of a selection."""
    assert len(records) == 1
    return records[0]
