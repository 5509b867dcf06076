"""Is the training unchanged by capture, and is what was recorded what the training computed?

Gradients and outputs are computed again from the recorded inputs: that proves values, pairing and
microbatch at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ranktape.capture import Capture
from ranktape.storage import Record, Records, open_run
from tests.capture.models import LENGTH, NUM_LINEARS, NUM_TENSORS, WIDTH, Training, train
from tests.capture.verify import verify_run

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
    losses, model = train(training, capture=Capture(url, start_at=1, every=2, min_iterations=2))
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
        assert num_weights == NUM_LINEARS
        assert len(records) == training.microbatches * (NUM_TENSORS - num_weights) + num_weights
        assert sorted(set(records.column("microbatch"))) == list(range(training.microbatches))
        assert len(set(records.column("counter"))) == len(records)
        assert set(records.column("call")) == {0}
    assert all(not status.silent_sites for status in run.status())


@pytest.mark.support(framework="PyTorch", parallelism="one process", features=("linear", "attention"))
def test_layers_compute_again_to_what_was_recorded(captured: tuple[Training, Path, bool]) -> None:
    training, url, _ = captured
    num_passes = 2 * training.microbatches
    names = ("output", "grad_query", "grad_key", "grad_value")
    assert verify_run(open_run(url)) == {
        "output": num_passes * NUM_LINEARS,
        "grad_weight": num_passes * NUM_LINEARS,
        "grad_input": num_passes * (NUM_LINEARS - 1),
        **{f"attention {name}": num_passes * 2 for name in names},
    }


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


def only(records: Records) -> Record:
    """The one record of a selection."""
    assert len(records) == 1
    return records[0]
