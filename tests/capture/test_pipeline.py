"""Under pipeline schedules, has each tensor the stage and the microbatch that it belongs to?

Two real ranks over gloo. What a stage receives is what the one before has sent, on another rank: that proves the
microbatch of both; the gradients are computed again from the recorded inputs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from ranktape.capture import Capture
from ranktape.storage import Record, Records, Run, open_run
from tests.capture import parallel_models
from tests.capture.parallel_models import OPTIONS, Recipe
from tests.capture.programs import pipeline_models
from tests.capture.programs.pipeline import BATCH, KINDS, MICROBATCHES, STEPS, WIDTH, attend
from tests.capture.verify import verify_run
from tests.exhaustive import exhaustive
from tests.launch.processes import torchrun

PROGRAM = Path(__file__).parent / "programs" / "pipeline.py"
IN_TURN = ("linear", "attention", "layer outputs", "unchanged", "assembly", "accumulation")
LINEAR = ("linear", "accumulation")
ATTENDING = (*LINEAR, "attention")
RECOMPUTING = (*ATTENDING, "checkpointing")
AT_ONCE = (*IN_TURN, "checkpointing", "autocast")
support = pytest.mark.support
PAIRED = exhaustive("make test has two models, one of them with all at once")

pytestmark = pytest.mark.distributed

HAVE_ATTENTION = {"gpipe", "1f1b"}
"""The schedules whose stages end with an attention."""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the program left: the run, what the ranks wrote, and what they said."""
    return start(tmp_path_factory.mktemp("pipeline"), "plain-all", "moe")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, of the exhaustive variants."""
    return start(tmp_path_factory.mktemp("others"), "plain", "moe-all", "llama", "llama-all", "gpt2", "gpt2-all")


def start(out: Path, *variants: str) -> Path:
    """Run the program."""
    done = torchrun(PROGRAM, out, out / "run", *variants, cwd=out)
    assert done.returncode == 0, done.stderr
    (out / "stderr").write_text(done.stderr)
    return out


@pytest.fixture(scope="module")
def run(out: Path) -> Run:
    """The run of both ranks."""
    return open_run(out / "run")


def of_kind(run: Run, kind: str, step: int) -> Records:
    """The records of one step under a schedule."""
    return run.select(iteration=list(KINDS).index(kind) * STEPS + step)


def layers(kind: str) -> list[str]:
    """The paths of all layers of the whole model, in their order."""
    num_stages = 2 * KINDS[kind][2]
    if kind in HAVE_ATTENTION:
        return [f"layers.{index}" for index in range(2 * num_stages)]
    return ["0", "2", *(f"stage{stage}.{index}" for stage in range(1, num_stages) for index in (0, 2))]


def values(records: Records, module: str, tensor_name: str) -> dict[int, torch.Tensor]:
    """A tensor of all microbatches; of a layer whose path begins with the number of its model, too."""
    found = [record for record in records.select(tensor_name=tensor_name) if _is(record, module)]
    assert sorted(record.microbatch for record in found) == list(range(MICROBATCHES))
    return {record.microbatch: record.tensor() for record in found}


def after(kind: str, output: torch.Tensor, *, is_last: bool) -> torch.Tensor:
    """What the next layer gets of a layer's output; `is_last` where that is in the next stage."""
    if kind in HAVE_ATTENTION:
        return attend(torch.tanh(output)) if is_last else torch.tanh(output)
    return output if is_last else torch.tanh(output)


def _is(record: Record, module: str) -> bool:
    # The models of later schedules are others: where names are the same, a path says which.
    parts = [part for part in record.module.split(".") if not part.startswith(("Sequential", "Checkpointed"))]
    return ".".join(parts) == module


@pytest.mark.support(framework="PyTorch", parallelism="PP", features=("unchanged",))
def test_losses_and_weights_are_equal_bit_for_bit_on_every_rank(out: Path) -> None:
    for rank in range(2):
        assert (out / f"rank{rank}").read_text() == str([True] * len(KINDS))


@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize("kind", KINDS)
def test_each_stage_receives_what_the_one_before_has_sent(run: Run, kind: str, step: int) -> None:
    records = of_kind(run, kind, step)
    torch.manual_seed(7)
    batches = [(torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)) for _ in range(step + 1)]
    sent = dict(enumerate(batches[-1][0].chunk(MICROBATCHES)))
    for number, layer in enumerate(layers(kind)):
        received = values(records, layer, "input")
        for microbatch, tensor in received.items():
            torch.testing.assert_close(tensor, sent[microbatch])
        outputs = values(records, layer, "output")
        sent = {key: after(kind, output, is_last=number % 2 == 1) for key, output in outputs.items()}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("gpipe", marks=support(framework="PyTorch", parallelism="PP", features=ATTENDING)),
        pytest.param("1f1b", marks=support(framework="PyTorch", parallelism="PP", features=RECOMPUTING)),
        pytest.param("interleaved", marks=support(framework="PyTorch", parallelism="PP", features=LINEAR)),
        pytest.param("zero bubble", marks=support(framework="PyTorch", parallelism="PP", features=LINEAR)),
    ],
)
def test_every_gradient_is_there_once_and_is_that_of_its_microbatch(run: Run, kind: str) -> None:
    for step in range(STEPS):
        records = of_kind(run, kind, step)
        num_layers = len(layers(kind))
        num_attentions = 2 * MICROBATCHES * (kind in HAVE_ATTENTION)
        expected = dict.fromkeys(("output", "grad_input", "grad_weight"), num_layers * MICROBATCHES)
        names = ("output", "grad_query", "grad_key", "grad_value")
        expected |= {f"attention {name}": num_attentions for name in names if num_attentions}
        assert verify_run(records) == expected
        # The rehearsal of the first step is not among them, and neither is anything else.
        assert len(records) == num_layers * (6 * MICROBATCHES + 2) + 8 * num_attentions
        assert set(records.column("call")) == {0}


def test_sizes_and_samples_are_those_of_the_microbatch(run: Run) -> None:
    size = BATCH // MICROBATCHES
    linear = run.select(layer_type="linear")
    records = [*linear.select(tensor_name="input"), *linear.select(tensor_name="grad_output")]
    assert len(records) == 2 * STEPS * MICROBATCHES * (4 + 4 + 8 + 8)
    for record in records:
        assert (record.sample_dim, record.batch_size) == (0, size)
        first = record.microbatch * size
        assert record.sample_ids == list(range(first, first + size))


def test_layers_that_are_numbered_in_each_stage_are_told_apart_and_a_person_is_told(out: Path, run: Run) -> None:
    told = (out / "stderr").read_text()
    assert told.count("[rank 1] the stages of the pipeline number their layers from 0") == 1
    names = {record.module for record in of_kind(run, "gpipe", 0)}
    assert names == {"", *(f"layers.{index}" for index in range(4))}
    assert set(of_kind(run, "gpipe", 0).select(layer_type="linear").column("layer_idx")) == {0, 1, 2, 3}


Key = tuple[str, str, int, str, int, int]


def key_of(record: Record) -> Key:
    """The same for a layer of a stage and of the whole model; what is around the layers has other names there."""
    name, stack = (re.sub(r"^(model|transformer)\.", "", path) for path in (record.module, record.layer_stack))
    name = re.sub(r"^h\.", "layers.", name)
    name = {"lm_head": "head", "embed_tokens": "embed", "wte": "embed"}.get(name, name)
    stack = {"h": "layers"}.get(stack, stack)
    return name, stack, record.layer_idx, record.tensor_name, record.microbatch, record.call


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param("plain", marks=[support(framework="PyTorch", parallelism="PP", features=IN_TURN), PAIRED]),
        pytest.param("plain-all", marks=support(framework="PyTorch", parallelism="PP", features=AT_ONCE)),
        pytest.param("moe", marks=support(framework="MoE", parallelism="PP", features=IN_TURN)),
        pytest.param("moe-all", marks=[support(framework="MoE", parallelism="PP", features=AT_ONCE), PAIRED]),
        pytest.param("llama", marks=[support(framework="HF Llama", parallelism="PP", features=IN_TURN), PAIRED]),
        pytest.param("llama-all", marks=[support(framework="HF Llama", parallelism="PP", features=AT_ONCE), PAIRED]),
        pytest.param("gpt2", marks=[support(framework="HF GPT-2", parallelism="PP", features=IN_TURN), PAIRED]),
        pytest.param("gpt2-all", marks=[support(framework="HF GPT-2", parallelism="PP", features=AT_ONCE), PAIRED]),
    ],
)
def test_two_stages_record_what_one_process_records_of_the_whole_model(
    variant: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    out = request.getfixturevalue("others" if request.node.get_closest_marker("exhaustive") else "out")
    for rank in range(2):
        bits = json.loads((out / f"{variant}.rank{rank}.json").read_text())
        assert bits["captured"] == bits["plain"]
    run = open_run(out / f"{variant}.run")
    assert run.iterations == list(range(parallel_models.STEPS))
    assert all(not any(status.silent_sites.values()) for status in run.status())

    kind, _, suffix = variant.partition("-")
    microbatches = pipeline_models.MICROBATCHES
    recipe = Recipe(kind=kind, microbatches=microbatches, is_autocast=bool(suffix))
    parallel_models.train(recipe, capture=Capture(tmp_path / "run", min_iterations=1, **OPTIONS))
    alone = open_run(tmp_path / "run").select(iteration=0)
    one_pass = verify_run(alone.select(microbatch=0))
    num_passes = parallel_models.STEPS * microbatches
    assert verify_run(run) == {what: count * num_passes for what, count in one_pass.items()}

    expected = {key_of(record): record.tensor() for record in alone}
    found = {}
    for view in run.select(iteration=0).assemble():
        assert view.missing_ranks == (), view
        [record] = view.records
        found[key_of(record)] = view.tensor()
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], msg=f"{key} differs")
