"""Is a training that is spread over ranks captured whole, and left as it was?

Real processes under torchrun, over gloo. Each start trains several variants, each without a capture and with one. What
the ranks recorded is put together and compared with a training of one process from the same seed. Some variants are
exhaustive: `FEW` in parallel_variants.py are not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ranktape.capture import Capture
from ranktape.storage import Record, Run, open_run
from tests.capture.parallel_models import (
    BATCH,
    EXPERTS,
    HEADS,
    LENGTH,
    NOT_COMPARED,
    OPTIONS,
    STEPS,
    VARIANTS,
    Recipe,
    data_rank_of,
    is_autocast,
    kind_of,
    num_microbatches_of,
    num_ranks_of,
    proving,
    started_with,
    train,
)
from tests.capture.verify import verify_run
from tests.exhaustive import exhaustive_but
from tests.launch import processes

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "capture" / "programs" / "parallel.py"

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(400)]

COMPUTED = ("linear", "attention", "unchanged", "accumulation", "checkpointing", "autocast")
"""What is proven by computing again."""

STANDING = frozenset({"weight", "bias"})
"""What is recorded once in an iteration, and what the optimizer has of its own."""

Key = tuple[str, str, str, int, int]


def torchrun(out: Path, variants: tuple[str, ...], *, num_ranks: int, program: Path = PROGRAM) -> Path:
    """Run the program; `out` is made for what it writes."""
    out.mkdir()
    done = processes.torchrun(program, out, *variants, cwd=ROOT, num_ranks=num_ranks, deadline=390)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives for a variant the folder of its start; each start happens once, when it is asked for."""
    starts: dict[tuple[str, ...], Path | None] = {}

    def folder(variant: str) -> Path:
        variants = started_with(variant)
        if variants not in starts:
            out = tmp_path_factory.mktemp("parallel") / "out"
            starts[variants] = None
            starts[variants] = torchrun(out, variants, num_ranks=num_ranks_of(variant))
        started = starts[variants]
        assert started is not None, "the start failed in the first test that asked for it"
        return started

    return folder


Alone = Callable[[str, int], Run]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Gives the run of a training of one process, of the model of a variant, with the batches of a data rank."""
    runs: dict[Any, Run] = {}

    def run(variant: str, data_rank: int) -> Run:
        key = kind_of(variant), data_rank, is_autocast(variant)
        if key not in runs:
            url = tmp_path_factory.mktemp("alone") / "run"
            recipe = Recipe(kind=key[0], data_rank=data_rank, microbatches=2, is_autocast=key[2])
            train(recipe, capture=Capture(url, min_iterations=1, **OPTIONS))
            runs[key] = open_run(url)
        return runs[key]

    return run


def key_of(record: Record) -> Key:
    return record.module, record.operation, record.tensor_name, record.microbatch, record.call


def assert_close(found: torch.Tensor, expected: torch.Tensor, *, what: Any, tolerance: float) -> None:
    assert found.shape == expected.shape, what
    if not found.numel():  # an expert without a token
        return
    difference = (found.double() - expected.double()).abs().max()
    assert difference <= tolerance * expected.abs().max(), f"{what}: differs by {difference}"


@pytest.mark.parametrize("variant", proving(VARIANTS | NOT_COMPARED, *COMPUTED))
@exhaustive_but("ddp", "fsdp_tp", "moe-fsdp", reason="one of each kind of parallelism is in make test")
def test_the_training_is_the_same_bit_for_bit_and_its_layers_compute_what_was_recorded(
    variant: str, parallel: Callable[[str], Path], alone: Alone
) -> None:
    out = parallel(variant)
    for rank in range(num_ranks_of(variant)):
        bits = json.loads((out / f"{variant}.rank{rank}.json").read_text())
        assert bits["captured"] == bits["plain"]
    run = open_run(out / f"{variant}.run")
    assert run.iterations == list(range(STEPS))
    assert all(not any(status.silent_sites.values()) for status in run.status())
    one_pass = verify_run(alone(variant, 0).select(iteration=0, microbatch=0))
    assert one_pass["output"] > 0
    assert one_pass["attention grad_key"] > 0
    num_passes = STEPS * num_ranks_of(variant) * num_microbatches_of(variant)
    assert verify_run(run) == {what: count * num_passes for what, count in one_pass.items()}


@pytest.mark.parametrize("variant", proving(VARIANTS, "layer outputs", "assembly"))
@exhaustive_but("ddp", "fsdp_tp", "moe-fsdp", reason="one of each kind of parallelism is in make test")
def test_what_the_ranks_recorded_is_what_one_process_records(
    variant: str, parallel: Callable[[str], Path], alone: Alone
) -> None:
    run = open_run(parallel(variant) / f"{variant}.run")
    num_microbatches = num_microbatches_of(variant)
    data_ranks = sorted({data_rank_of(variant, rank) for rank in range(num_ranks_of(variant))})
    expected = {
        (data_rank, key_of(record)): record
        for data_rank in data_ranks
        for record in alone(variant, data_rank).select(iteration=0)
        if record.microbatch < num_microbatches
    }
    tolerance = 0.05 if variant == "fsdp_bf16" or is_autocast(variant) else 1e-4
    found: Counter[tuple[int, Key]] = Counter()
    added = (("forward", "master_"), ("backward", "reduced_grad_"))
    for view in run.select(iteration=0).assemble():
        first = view.records[0]
        data_rank, key = data_rank_of(variant, first.rank), key_of(first)
        assert view.missing_ranks == (), view
        values = view.tensor()
        name = first.tensor_name.rpartition("_")[2]
        if first.tensor_name in {name, f"master_{name}"} and name in STANDING:
            whole = expected[data_rank, (*key[:2], name, *key[3:])].tensor().to(values.dtype)
            assert torch.equal(values, whole), view
        elif first.tensor_name == f"reduced_grad_{name}":
            grads = [
                expected[one, (*key[:2], f"grad_{name}", microbatch, 0)].tensor()
                for one in data_ranks
                for microbatch in range(num_microbatches)
            ]
            assert_close(values, torch.stack(grads).sum(0) / len(data_ranks), what=view, tolerance=tolerance)
        else:
            assert_close(values, expected[data_rank, key].tensor(), what=view, tolerance=tolerance)
        found.update((record.rank, key_of(record)) for record in view.records)
    ranks = range(num_ranks_of(variant))
    wanted = {(rank, key) for rank in ranks for data_rank, key in expected if data_rank == data_rank_of(variant, rank)}
    wanted -= {(rank, key) for rank, key in wanted if key[2] in STANDING and key[3] > 0}
    wanted |= {
        (rank, (*key[:1], operation, prefix + key[2], 0, 0))
        for rank, key in wanted
        for operation, prefix in added
        if key[2] in STANDING
    }
    assert found == dict.fromkeys(wanted, 1)


@pytest.mark.parametrize(
    ("variant", "module", "tensor_name", "placements"),
    [
        ("ddp", "layers.0.up", "weight", ["replicate"]),
        ("ddp", "layers.0.up", "reduced_grad_weight", ["replicate"]),
        ("fsdp", "layers.0.up", "bias", ["replicate"]),
        ("fsdp", "layers.0.up", "master_bias", ["shard(0)"]),
        ("fsdp", "layers.0.up", "reduced_grad_bias", ["shard(0)"]),
        ("fsdp", "layers.0.up", "weight", ["replicate"]),
        ("fsdp_kept", "head", "weight", ["replicate"]),
        ("fsdp", "layers.0.up", "master_weight", ["shard(0)"]),
        ("fsdp", "layers.0.up", "reduced_grad_weight", ["shard(0)"]),
        ("hsdp", "layers.0.up", "weight", ["replicate", "replicate"]),
        ("hsdp", "layers.0.up", "master_weight", ["replicate", "shard(0)"]),
        ("tp", "layers.0.up", "input", ["replicate"]),
        ("tp", "layers.0.up", "weight", ["shard(0)"]),
        ("tp", "layers.0.up", "bias", ["shard(0)"]),
        ("tp", "layers.0.up", "grad_bias", ["shard(0)"]),
        ("tp", "layers.0.down", "bias", ["replicate"]),
        ("tp", "layers.0.up", "output", ["shard(2)"]),
        ("tp", "layers.0.up", "grad_output", ["shard(2)"]),
        ("tp", "layers.0.up", "grad_weight", ["shard(0)"]),
        ("tp", "layers.0.up", "grad_input", ["partial(sum)"]),
        ("tp", "layers.0.down", "output", ["partial(sum)"]),
        ("tp", "layers.0.attention", "query", ["shard(1)"]),
        ("tp", "layers.0.attention", "grad_key", ["shard(1)"]),
        ("tp_sequence", "embed", "input", ["shard(2)"]),
        ("fsdp_tp", "layers.0.up", "weight", ["replicate", "shard(0)"]),
        ("fsdp_tp", "layers.0.up", "master_weight", ["strided_shard(0, 2)", "shard(0)"]),
        ("fsdp_tp", "layers.0.up", "output", ["shard(2)"]),
        ("fsdp_tp", "embed", "weight", ["replicate"]),
        ("fsdp_tp", "layers.0.attention", "output", ["shard(1)"]),
    ],
)
def test_a_shard_says_where_it_lies(
    variant: str, module: str, tensor_name: str, placements: list[str], parallel: Callable[[str], Path]
) -> None:
    run = open_run(parallel(variant) / f"{variant}.run")
    records = run.select(iteration=0, module=module, tensor_name=tensor_name, microbatch=0)
    assert len(records) == num_ranks_of(variant)
    for record in records:
        assert record.placement is not None
        assert record.placement["placements"] == placements
        assert record.placement["partial"] == ("partial(sum)" in placements)
        size = dict(zip(record.placement["mesh"]["axes"], record.placement["mesh"]["shape"], strict=True))
        assert all(0 <= at < extent for at, extent in zip(record.placement["coordinates"], size.values(), strict=True))
    if tensor_name in {"query", "output"} and module.endswith("attention"):
        assert {record.placement["global_shape"][1] for record in records if record.placement} == {HEADS}


def test_the_gradient_of_one_rank_is_no_replica(parallel: Callable[[str], Path]) -> None:
    for variant in ("ddp", "fsdp"):
        run = open_run(parallel(variant) / f"{variant}.run")
        own, other = run.select(iteration=0, module="head", tensor_name="grad_weight", microbatch=0)
        assert own.placement is None
        assert not torch.equal(own.tensor(), other.tensor())


def test_experts_get_ragged_numbers_of_tokens_on_every_rank(parallel: Callable[[str], Path]) -> None:
    run = open_run(parallel("moe-fsdp") / "moe-fsdp.run")
    for rank in range(2):
        inputs = run.select(iteration=0, rank=rank, module="layers.*.experts.*.up", tensor_name="input")
        numbers = [record.shape[0] for record in inputs]
        assert len(numbers) == 2 * EXPERTS
        assert sum(numbers) == 2 * BATCH * LENGTH
        assert len(set(numbers)) > 2
