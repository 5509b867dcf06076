"""Is a Megatron-core model that is split over tensor parallel ranks captured whole, and left as it was?

Real processes under torchrun, over gloo: the same model on one tensor parallel rank (and two data parallel
ones), on two, and on two with pieces of the sequence between the blocks; and one whose output layer has the weights of
its embedding.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ranktape.storage import Run, open_run
from tests.analyze.recomputed import recompute
from tests.capture.test_parallel import ROOT, assert_close, key_of, torchrun
from tests.capture.verify import recomputed, verify_run
from tests.exhaustive import exhaustive
from tests.optional import needs

PROGRAM = ROOT / "tests" / "capture" / "programs" / "megatron_model.py"
FEW = ("alone", "tp")
"""What `make test` trains."""
OTHERS = ("shared", "sequence", "checkpointed", "ddp")
MORE = exhaustive("make test has the model alone and under tensor parallelism")
NUM_LINEARS = 9
NUM_LAYERS = 2
STEPS = 2
MICROBATCHES = 2

MEGATRON = "Megatron-core"
SPLIT = ("tp", "sequence", "checkpointed")
SAME = ("unchanged",)
COMPUTED = ("linear", "attention", "accumulation", "checkpointing")
support = pytest.mark.support
pytestmark = [needs("megatron"), pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(400)]


Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Gives for a variant the folder of its start; each of the two starts happens once, when it is asked for."""

    @functools.cache
    def start(variants: tuple[str, ...]) -> Path:
        return torchrun(tmp_path_factory.mktemp("megatron") / "out", variants, num_ranks=2, program=PROGRAM)

    return lambda variant: start(FEW if variant in FEW else OTHERS)


def run_of(trained: Folders, variant: str) -> Run:
    return open_run(trained(variant) / f"{variant}.run")


@pytest.mark.parametrize(
    "variant",
    [
        "alone",
        pytest.param("shared", marks=support(framework=MEGATRON, parallelism="one process", features=SAME)),
        *(pytest.param(name, marks=support(framework=MEGATRON, parallelism="TP", features=SAME)) for name in SPLIT),
        pytest.param("ddp", marks=support(framework=MEGATRON, parallelism="DDP", features=SAME)),
    ],
)
@exhaustive("make test has torch's own tensor parallelism")
def test_the_training_is_the_same_bit_for_bit(variant: str, trained: Folders) -> None:
    for rank in range(2):
        bits = json.loads((trained(variant) / f"{variant}.rank{rank}.json").read_text())
        assert bits["captured"] == bits["plain"]
        assert bits["num_states"] == 1 + NUM_LAYERS
    run = run_of(trained, variant)
    assert run.iterations
    assert all(not any(status.silent_sites.values()) for status in run.status())


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param("alone", marks=support(framework=MEGATRON, parallelism="one process", features=("accumulation",))),
        pytest.param("ddp", marks=[MORE, support(framework=MEGATRON, parallelism="DDP", features=COMPUTED)]),
    ],
)
def test_layers_of_one_rank_compute_what_was_recorded(variant: str, trained: Folders) -> None:
    num_passes = 2 * STEPS * MICROBATCHES
    linear = dict.fromkeys(("output", "grad_weight", "grad_input"), num_passes * NUM_LINEARS)
    names = ("output", "grad_query", "grad_key", "grad_value")
    attention = {f"attention {name}": num_passes * NUM_LAYERS for name in names}
    assert verify_run(run_of(trained, variant)) == linear | attention


@support(framework=MEGATRON, parallelism="one process", features=("linear", "attention", "layer outputs"))
@MORE
def test_layers_embedding_and_shared_weights(trained: Folders) -> None:
    records = run_of(trained, "shared").select(iteration=0, rank=0, microbatch=0)
    counts = verify_run(records)
    assert counts["output"] == counts["grad_input"] == counts["grad_weight"] == NUM_LINEARS
    assert counts["embedding output"] == counts["embedding grad_weight"] == 1
    assert counts["attention output"] == counts["attention grad_key"] == NUM_LAYERS
    outputs = records.select(component="hidden", tensor_name="output")
    assert [(record.module, record.layer_type, record.layer_idx, record.layout) for record in outputs] == [
        ("embedding", "embedding", -1, "TBH"),
        ("decoder.layers.0", "hidden", 0, "TBH"),
        ("decoder.layers.1", "hidden", 1, "TBH"),
    ]
    [query] = records.select(layer_idx=1, tensor_name="query")
    assert (query.module, query.layout) == ("decoder.layers.1.self_attention.core_attention", "TBHD")
    assert query.shape == (8, 3, 4, 4)
    [entered] = records.select(module="decoder.layers.0.self_attention.linear_qkv", tensor_name="input")
    assert (entered.tensor().dtype, entered.layout, entered.sample_dim) == (torch.float32, "TBH", 1)


@support(framework=MEGATRON, parallelism="TP", features=("attention", "accumulation"))
@pytest.mark.parametrize("variant", ["tp", *(pytest.param(name, marks=MORE) for name in ("sequence", "checkpointed"))])
def test_attention_of_two_ranks_computes_what_was_recorded(variant: str, trained: Folders) -> None:
    """Linear layers on two ranks give sums over ranks, or get gradients that are: those are put together below."""
    names = ("output", "grad_query", "grad_key", "grad_value")
    num_calls = 2 * STEPS * MICROBATCHES * NUM_LAYERS
    attention = run_of(trained, variant).select(layer_type="attention")
    assert verify_run(attention) == {f"attention {name}": num_calls for name in names}


@pytest.mark.parametrize("variant", ["tp", "sequence", "checkpointed"])
@exhaustive("make test has torch's own tensor parallelism")
def test_products_of_two_ranks_are_what_their_operands_give_together(variant: str, trained: Folders) -> None:
    run = run_of(trained, variant)
    assert set(recomputed(run)) == {"agrees"}
    fields = ("iteration", "microbatch", "module")
    found = {(one.product, *map(one.field, fields)) for one in recompute(run.select())}
    assert len(found) == STEPS * MICROBATCHES * (3 * NUM_LINEARS + 4 * NUM_LAYERS)


def check_assembled(trained: Folders, variant: str) -> None:
    alone = run_of(trained, "alone").select(iteration=0, rank=0)
    expected = {key_of(record): record.tensor() for record in alone if record.component != "hidden"}
    found: Counter[object] = Counter()
    records = run_of(trained, variant).select(iteration=0)
    for view in records.where('component != "hidden"').assemble():
        first = view.records[0]
        assert view.missing_ranks == (), view
        assert {record.rank for record in view.records} == {0, 1}, view
        values = view.tensor()
        if first.tensor_name in {"weight", "master_weight", "bias", "master_bias"}:
            assert torch.equal(values, expected[key_of(first)]), view
        else:
            assert_close(values, expected[key_of(first)], what=view, tolerance=1e-4)
        found[key_of(first)] += 1
    assert found == dict.fromkeys(expected, 1)


@support(framework=MEGATRON, parallelism="TP", features=("linear", "attention", "assembly", "accumulation"))
@pytest.mark.parametrize("variant", ["tp", pytest.param("sequence", marks=MORE)])
def test_what_two_ranks_recorded_is_what_one_records(variant: str, trained: Folders) -> None:
    check_assembled(trained, variant)


@support(framework=MEGATRON, parallelism="TP", features=("linear", "attention", "assembly", "checkpointing"))
@MORE
def test_what_is_computed_again_is_recorded_once(trained: Folders) -> None:
    check_assembled(trained, "checkpointed")


@support(framework=MEGATRON, parallelism="TP", features=("layer outputs",))
@pytest.mark.parametrize("variant", ["tp", *(pytest.param(name, marks=MORE) for name in ("sequence", "checkpointed"))])
def test_outputs_of_layers_are_those_of_one_rank(variant: str, trained: Folders) -> None:
    """Each rank has them all, or a piece of the sequence."""
    alone = run_of(trained, "alone").select(iteration=0, rank=0, component="hidden")
    records = run_of(trained, variant).select(iteration=0, component="hidden")
    assert len(alone) == 2 * MICROBATCHES * (NUM_LAYERS + 1)
    assert len(records) == 2 * len(alone)
    for record in alone:
        assert record.layout == "TBH"
        filters = {name: getattr(record, name) for name in ("module", "tensor_name", "microbatch")}
        parts = [records.select(rank=rank, **filters)[0].tensor() for rank in range(2)]
        if variant == "sequence":
            parts = [torch.cat(parts)]
        for part in parts:
            assert_close(part, record.tensor(), what=record, tolerance=1e-4)


@support(framework=MEGATRON, parallelism="DDP", features=("layer outputs",))
@MORE
def test_outputs_of_layers_of_each_data_parallel_rank_are_there(trained: Folders) -> None:
    alone = run_of(trained, "alone").select(iteration=0, rank=0, component="hidden")
    records = run_of(trained, "ddp").select(iteration=0, component="hidden")
    own = {key_of(record): record for record in records.select(rank=0)}
    assert own.keys() == {key_of(record) for record in alone} == {key_of(record) for record in records.select(rank=1)}
    for record in alone.select(tensor_name="output"):  # of the first rank: it has the same batches
        assert torch.equal(own[key_of(record)].tensor(), record.tensor())


@support(framework=MEGATRON, parallelism="DDP", features=("assembly",))
@MORE
def test_the_optimizer_gets_the_mean_of_what_the_data_parallel_ranks_recorded(trained: Folders) -> None:
    records = run_of(trained, "ddp").select(iteration=0)
    for name in ("weight", "master_weight", "reduced_grad_weight", "bias", "master_bias", "reduced_grad_bias"):
        views = records.select(tensor_name=name).assemble()
        assert len(views) == NUM_LINEARS - name.endswith("bias")  # the last one has none
        for view in views:
            assert [record.rank for record in view.records] == [0, 1]
            assert view.differing_replicas() == []
            if name == "reduced_grad_weight":
                grads = records.select(module=view.records[0].module, tensor_name="grad_weight")
                assert len(grads) == 2 * MICROBATCHES
                mean = torch.stack([grad.tensor() for grad in grads]).sum(0) / 2
                assert_close(view.tensor(), mean, what=view, tolerance=1e-5)


def test_weights_are_replicas_over_the_data_parallel_ranks(trained: Folders) -> None:
    records = run_of(trained, "alone").select(iteration=0, module="*.linear_fc1", tensor_name="weight")
    assert len(records) == 2 * NUM_LAYERS
    for record in records:
        assert record.placement is not None
        assert record.placement["mesh"] == {"axes": ["dp", "tp"], "shape": [2, 1], "ranks": [[0], [1]]}
        assert record.placement["placements"][0] == "replicate"
        assert record.global_view().differing_replicas() == []


def test_a_bias_that_the_layer_returns_is_said_to_be_returned(trained: Folders) -> None:
    layer = run_of(trained, "tp").select(iteration=0, rank=1, layer_idx=0)
    found = {record.module.rpartition(".")[2]: record for record in layer.select(tensor_name="bias")}
    words = {name: (record.metadata, *record.placement["placements"]) for name, record in found.items()}  # type: ignore[index]
    returned = {"returned": True}
    assert words == {
        "linear_qkv": (None, "shard(0)"),
        "linear_proj": (returned, "replicate"),
        "linear_fc1": (returned, "strided_shard(0, 2)"),
        "linear_fc2": (returned, "replicate"),
    }
    # Its gradient comes from what adds it.
    grads = layer.select(tensor_name="grad_bias").column("module")
    assert set(grads) == {"decoder.layers.0.self_attention.linear_qkv"}


def test_the_two_halves_of_a_gated_layer_are_split_each(trained: Folders) -> None:
    """Each rank has a piece of the gate and a piece of what is gated."""
    [record] = run_of(trained, "tp").select(
        iteration=0, rank=1, module="decoder.layers.0.mlp.linear_fc1", tensor_name="weight"
    )
    assert record.placement is not None
    assert record.placement["placements"] == ["strided_shard(0, 2)"]
    assert record.placement["global_shape"] == [64, 16]
    assert record.placement["offset"] == [16, 0]
