"""What a model does on purpose (experts without tokens, adapters, masks, shards) is no fault, and hides none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ranktape.analyze import View, overflow, stats, trace, trend
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.findings.find import find
from ranktape.analyze.findings.finding import Finding, Severity
from ranktape.analyze.questions.findings import findings as findings_question
from ranktape.analyze.views.report.page import model_of
from tests.analyze.compared import normal
from tests.analyze.faulty_runs import Fault, Place, Sizes, cast, faulty_run
from tests.analyze.runs import Tensor, describe_tensor, store
from tests.exhaustive import exhaustive_but

Array = np.ndarray[Any, Any]


def found_in(folder: Path, tensors: list[Tensor]) -> list[Finding]:
    """What is found in a run of those tensors, recorded in that order."""
    numbered = [
        describe_tensor(array, **_identity(info, counter=counter)) for counter, (array, info) in enumerate(tensors)
    ]
    return find(store(folder, numbered).select(), engine=Engine(use_cache=False))


def _identity(info: Any, **fields: Any) -> dict[str, Any]:
    names = ("iteration", "rank", "microbatch", "layer_idx", "module", "operation", "tensor_name", "placement")
    return {name: getattr(info, name) for name in names} | fields


@pytest.mark.parametrize("seed", range(2))
@exhaustive_but("1", reason="one seed is in make test")
def test_one_of_two_ranks_is_a_power_of_two_larger(tmp_path: Path, seed: int) -> None:
    """Exactly at the smallest factor that is told, where the last bit of a logarithm decides."""
    tensors = [
        describe_tensor(
            normal(8, 8, seed=100 * seed + layer) * np.float32(4 if (rank, layer % 7) == (1, 3) else 1),
            rank=rank,
            layer_idx=layer,
            tensor_name="query",
        )
        for rank in range(2)
        for layer in range(20)
    ]
    findings = found_in(tmp_path, tensors)
    assert {one.kind for one in findings} == {"rank_differs"}
    assert findings[0].where["layer_idx"] in {3, 10, 17}
    # Where it is not clear which of the two is wrong, both are named, and not one by chance.
    assert all(one.where.get("ranks", one.where.get("rank")) in (1, [0, 1]) for one in findings)


def experts(*, tokens: tuple[int, int]) -> list[Tensor]:
    """One expert in each of three layers; that of the second is sent so many tokens on the two ranks."""
    tensors = []
    for rank in range(2):
        for layer in range(3):
            count = tokens[rank] if layer == 1 else 8
            fields = {"rank": rank, "layer_idx": layer, "module": f"layers.{layer}.experts.0"}
            inputs, grads = normal(count, 16, seed=layer + 10 * rank), normal(count, 16, seed=50 + layer + 10 * rank)
            tensors += [
                describe_tensor(inputs, **fields),
                describe_tensor(inputs.T @ grads, tensor_name="grad_weight", operation="backward", **fields),
            ]
    return tensors


def test_an_expert_without_tokens_has_no_gradient(tmp_path: Path) -> None:
    assert found_in(tmp_path / "one", experts(tokens=(0, 8))) == []
    (unused,) = found_in(tmp_path / "none", experts(tokens=(0, 0)))
    assert (unused.kind, unused.severity, unused.where["module"]) == ("zero", Severity.LOW, "layers.1.experts.0")
    assert "no token was sent to this module" in unused.title
    # It had tokens, and its gradient is lost all the same.
    lost = [
        (array * np.float32(0) if info.tensor_name == "grad_weight" and info.layer_idx == 1 else array, info)
        for array, info in experts(tokens=(8, 8))
    ]
    assert [one.kind for one in found_in(tmp_path / "lost", lost)] == ["gradient_underflow"]


def mixture(*, sent: tuple[int, int, int]) -> list[Tensor]:
    """Three experts of one layer, which are sent so many tokens in each of two iterations."""
    return [
        describe_tensor(
            array,
            iteration=iteration,
            layer_idx=0,
            module=f"layers.0.experts.{number}",
            tensor_name=name,
            operation="backward" if name == "grad_weight" else "forward",
        )
        for iteration in range(2)
        for number, count in enumerate(sent)
        for name, array in (
            ("input", normal(count, 16, seed=number)),
            ("output", normal(count, 16, seed=number)),
            ("grad_weight", normal(count, 16, seed=number).T @ normal(count, 16, seed=9)),
        )
    ]


def test_one_expert_of_several_without_tokens(tmp_path: Path) -> None:
    """The other experts of its layer have values, and its gradient is zero: it computed nothing."""
    assert found_in(tmp_path / "all", mixture(sent=(5, 6, 7))) == []
    (finding,) = found_in(tmp_path / "two", mixture(sent=(5, 0, 7)))
    assert (finding.kind, finding.severity, finding.where["module"]) == ("zero", Severity.LOW, "layers.0.experts.1")
    assert finding.evidence == "2 records of iterations 0, 1, all of them empty"


def test_a_microbatch_without_labels_has_no_gradient(tmp_path: Path) -> None:
    def passes(*silent: tuple[int, int]) -> list[Tensor]:
        """Two iterations of two microbatches, of which some have no gradient in any layer."""
        return [
            describe_tensor(
                normal(8, 16, seed=layer) * np.float32(name == "input" or (iteration, microbatch) not in silent),
                iteration=iteration,
                microbatch=microbatch,
                layer_idx=layer,
                tensor_name=name,
                operation="backward" if name == "grad_output" else "forward",
            )
            for iteration in range(2)
            for microbatch in range(2)
            for name in ("input", "grad_output")
            for layer in range(3)
        ]

    (finding,) = found_in(tmp_path / "one", passes((1, 0)))
    assert (finding.kind, finding.severity) == ("zero", Severity.LOW)
    assert "are all zero in 1 of 4 backward passes: no loss reached any layer" in finding.title
    assert finding.evidence.endswith("microbatch 0, iteration 1, rank 0")
    assert finding.command.endswith("stats RUN --tensor-name 'grad_*' --by iteration,rank,microbatch --metric absmax")
    # Where no pass of an iteration has a gradient, nobody learned from it.
    (finding,) = found_in(tmp_path / "iteration", passes((1, 0), (1, 1)))
    assert (finding.kind, finding.severity) == ("gradient_underflow", Severity.MEDIUM)
    assert "as is every gradient of iteration 1: no loss reached them, or all underflowed" in finding.title
    assert "other layers is not" not in " ".join((finding.title, *finding.alike, *finding.consequences))


@pytest.mark.parametrize(("num_iterations", "severity"), [(1, "low"), (2, "medium"), (3, "high")])
def test_a_rank_without_a_gradient_in_every_iteration(tmp_path: Path, num_iterations: int, severity: str) -> None:
    """Labels may be missing by chance, but not each time."""

    def fault(place: Place, tensor: Array) -> Array:
        return np.zeros_like(tensor) if place[1] == 1 and place[3].startswith("grad") else tensor

    (finding,) = found_by(tmp_path, fault, iterations=range(num_iterations))
    assert (finding.kind, finding.severity) == ("zero", severity)
    assert finding.title.endswith("in every iteration of rank 1, microbatch 0") == (severity != "low")


def test_an_empty_cache_keeps_no_gradient_away(tmp_path: Path) -> None:
    def passes(iteration: int) -> list[Tensor]:
        values = normal(8, 16, seed=iteration)
        return [
            describe_tensor(
                array,
                iteration=iteration,
                layer_idx=layer,
                tensor_name=name,
                operation="backward" if name == "grad_output" else "forward",
            )
            for layer in range(4)
            for name, array in (
                ("input", values),
                ("past_key", values[:0]),
                ("grad_output", values * np.float32(layer != 2)),
            )
        ]

    (finding,) = found_in(tmp_path, [*passes(0), *passes(1)])
    assert (finding.kind, finding.severity, finding.where["layer_idx"]) == ("gradient_underflow", Severity.HIGH, 2)


@pytest.mark.parametrize("since", [0, 2])
def test_the_weight_of_one_layer_is_all_zero(tmp_path: Path, since: int) -> None:
    """Its bias may keep the output from being zero."""

    def weights(name: str, *zero: int) -> list[Tensor]:
        return [
            describe_tensor(
                normal(16, 16, seed=layer) * np.float32(1 if layer not in zero or iteration < since else 0),
                iteration=iteration,
                layer_idx=layer,
                tensor_name=name,
            )
            for iteration in range(4)
            for layer in range(5)
        ]

    (finding,) = found_in(tmp_path / "weight", weights("weight", 2))
    assert (finding.kind, finding.severity, finding.where["layer_idx"]) == ("zero", Severity.MEDIUM, 2)
    # Biases, and the second matrices of adapters, begin so in all layers.
    assert len(found_in(tmp_path / "all", weights("bias", *range(5)))) == (since > 0)


def adapter(*, zero_in: tuple[int, ...]) -> list[Tensor]:
    """What comes out of an adapter, and its gradient, in three iterations, of which in some both are zero."""
    return [
        describe_tensor(
            normal(8, 16, seed=iteration + layer) * np.float32(iteration not in zero_in),
            iteration=iteration,
            layer_idx=layer,
            tensor_name=name,
            operation="backward" if name == "grad_output" else "forward",
        )
        for iteration in (0, 1, 2)
        for layer in range(3)
        for name in ("output", "grad_output")
    ]


def test_an_adapter_begins_with_zeros(tmp_path: Path) -> None:
    findings = found_in(tmp_path / "first", adapter(zero_in=(0,)))
    assert [(one.kind, one.severity) for one in findings] == [("zero", Severity.LOW)]
    later = found_in(tmp_path / "later", adapter(zero_in=(2,)))
    assert {one.kind for one in later} == {"zero", "gradient_underflow"}
    assert {one.severity for one in later} == {Severity.MEDIUM}
    again = found_in(tmp_path / "again", adapter(zero_in=(0, 2)))
    assert {one.severity for one in again if one.kind == "zero"} == {Severity.MEDIUM}


def masked(*, layers: int = 3) -> list[Tensor]:
    """Masks and the scores that they were added to."""
    mask = np.triu(np.full((8, 8), -np.inf, dtype=np.float32), k=1)
    return [
        describe_tensor(array, layer_idx=layer, tensor_name=name)
        for layer in range(layers)
        for name, array in (("attention_mask", mask), ("scores", normal(4, 8, 8, seed=layer) + mask))
    ]


def test_masks_are_the_cause_of_nothing(tmp_path: Path) -> None:
    findings = found_in(tmp_path / "masks", masked())
    assert {(one.kind, one.severity) for one in findings} == {("inf", Severity.LOW)}
    spoiled = masked()
    array, info = spoiled[3]
    assert (info.tensor_name, info.layer_idx) == ("scores", 1)
    array[0, 7, 0] = np.nan
    findings = found_in(tmp_path / "nan", spoiled)
    assert (findings[0].kind, findings[0].severity, findings[0].where["layer_idx"]) == ("nan", Severity.HIGH, 1)
    array[0, 7, 0] = -np.inf
    findings = found_in(tmp_path / "more", spoiled)
    assert findings[0].severity is Severity.HIGH


def test_masks_overflow_to_no_question(tmp_path: Path) -> None:
    tensors = [describe_tensor(array, **_identity(info), sample_dim=0) for array, info in masked()]
    records = store(tmp_path, tensors).select()
    assert records.column("overflow.total").min() > 0, "the catalogue counts every infinity"
    for options in ({}, {"format": "fp8_e4m3"}, {"format": "mxfp8"}, {"by": ["tensor_name"]}, {"per_sample": True}):
        table = overflow(records, **options)
        assert set(table.column("severity")) == {"none"}, options
        # Of one finite value the rule of its block cuts off a little.
        assert sum(table.column("overflow.total")) == (options == {"format": "mxfp8"}), options
        assert any(table.column("overflow.inf.count")), options
        assert "in 6 records, -Inf belongs to an additive mask and does not count as overflow" in table.notes
    (begins,) = [row for row in overflow(records, first=True).records() if row["kind"] == "overflow"]
    assert begins["affected"] == 0
    checked = overflow(records).check("overflow.total == 0 and overflow.nan.count == 0 and severity == 'none'")
    assert not checked.rows
    assert not findings_question(records).check("severity == 'low'").rows
    names = ["overflow.ratio", "overflow.lower.count", "overflow.inf.count"]
    for table in (
        stats(records, metric=names),
        stats(records, metric=names, by=["layer_idx"]),
        stats(records, metric=names, per_sample=True),
        trend(records, metric=names[:1], by=["tensor_name"]),
        trace(records, metric=names),
    ):
        known = [column.name for column in table.columns]
        for name in {*names[:2], "first"} & set(known):
            assert not any(table.column(name)), (table.title, name)
    model = model_of(records, view=View.COMPUTE)
    columns = {one["name"]: one["column"] for one in model.data["metrics"]}
    assert columns["overflow.ratio"] == columns["overflow.lower.ratio"] == {"type": "same", "value": 0.0}


def test_scores_beside_their_mask_are_masked_and_others_overflow(tmp_path: Path) -> None:
    """Padding differs from iteration to iteration: what is the same in mask and scores tells."""
    tensors = []
    for iteration in range(2):
        mask = np.zeros((4, 1, 8), dtype=np.float32)
        mask[iteration:, :, 3 + iteration :] = -np.inf
        scores = normal(4, 8, 8, seed=iteration) + mask
        other = scores.copy()
        other[0, 0, 0] = -np.inf
        for name, array in (("attention_mask", mask), ("scores", scores), ("other", other)):
            tensors.append(describe_tensor(array, iteration=iteration, tensor_name=name))
    rows = overflow(store(tmp_path, tensors).select()).records()
    found = {(row["iteration"], row["tensor_name"]): row["severity"] for row in rows}
    assert {key for key, severity in found.items() if severity == "high"} == {(0, "other"), (1, "other")}


@pytest.mark.parametrize(
    ("name", "shares", "severity"),
    [
        ("scores", (16, 16), "none"),
        ("scores", (16,), "high"),
        ("scores", (16, 15), "high"),
        ("scores", (1, 1), "high"),
        ("hidden", (16, 16), "high"),
    ],
)
def test_scores_without_their_mask_are_masked_if_a_large_share_is_alike_in_several_layers(
    tmp_path: Path, name: str, shares: tuple[int, ...], severity: str
) -> None:
    tensors = []
    for layer, share in enumerate(shares):
        scores = normal(4, 64, seed=layer)
        scores[:, :share] = -np.inf
        tensors.append(describe_tensor(scores, layer_idx=layer, tensor_name=name))
    assert overflow(store(tmp_path, tensors).select()).column("severity") == [severity] * len(shares)


@pytest.mark.parametrize("name", ["output", "hidden_states", "attn_output"])
@exhaustive_but("attn_output", reason="one name is in make test")
def test_a_channel_that_is_infinite_in_every_record_is_no_mask(tmp_path: Path, name: str) -> None:
    tensors = []
    for iteration in range(3):
        output = normal(4, 8, 16, seed=iteration)
        output[..., 3] = -np.inf  # a sixteenth, as a bias that has overflowed gives in each step
        tensors.append(describe_tensor(output, iteration=iteration, tensor_name=name))
    assert set(overflow(store(tmp_path / "run", tensors).select()).column("severity")) == {"high"}
    (found,) = found_in(tmp_path / "found", tensors)
    assert (found.kind, found.severity) == ("inf", Severity.HIGH)


def test_scores_that_are_infinite_everywhere_are_no_mask(tmp_path: Path) -> None:
    scores = np.full((4, 8), -np.inf, dtype=np.float32)
    tensors = [describe_tensor(scores, iteration=iteration, tensor_name="scores") for iteration in range(3)]
    assert set(overflow(store(tmp_path, tensors).select()).column("severity")) == {"high"}


@pytest.mark.parametrize(("factor", "kinds"), [(25, []), (4096, ["rank_differs"])])
def test_a_shard_may_have_the_large_channels(tmp_path: Path, factor: int, kinds: list[str]) -> None:
    tensors = []
    for rank in range(4):
        for layer in range(4):
            array = normal(8, 16, seed=4 * layer + rank)
            array[3] *= factor if (rank, layer) == (0, 2) else 1
            placement = {
                "mesh": {"axes": ["tp"], "shape": [4], "ranks": [0, 1, 2, 3]},
                "coordinates": [rank],
                "placements": ["shard(0)"],
                "global_shape": [32, 16],
                "offset": [8 * rank, 0],
                "partial": False,
            }
            tensors.append(
                describe_tensor(array, rank=rank, layer_idx=layer, tensor_name="weight", placement=placement)
            )
    assert [one.kind for one in found_in(tmp_path, tensors)] == kinds


def gradients_times(factors: Callable[[Place], Array | float], *, name: str = "grad_output", layer: int = 2) -> Fault:
    """A gradient of a layer times factors, a number or one for each sample; by that of the last one all others are."""

    def fault(place: Place, tensor: Array) -> Array:
        if place[2:] != (layer, name):
            return tensor
        return np.asarray(tensor.astype(np.float64) * factors(place)).astype(tensor.dtype)

    return fault


def found_by(folder: Path, fault: Fault, **sizes: Any) -> list[Finding]:
    """What is found in a run with a fault."""
    return find(faulty_run(folder, fault, sizes=Sizes(**sizes)).select(), engine=Engine(use_cache=False))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@exhaustive_but("2", reason="two ranks are in make test")
def test_the_gradient_of_one_sample_has_a_tail(tmp_path: Path, num_ranks: int) -> None:
    """A rare text is 2^8 above the others, and so is what ranks with it and without add up for the weight."""

    def factors(place: Place) -> Array | float:
        return np.where(np.arange(6) == 3, 2.0**8, 1.0)[:, None, None] if place[:2] == (10, 0) else 1.0

    assert found_by(tmp_path, gradients_times(factors), num_ranks=num_ranks) == []


def test_all_samples_of_a_rank_have_none(tmp_path: Path) -> None:
    findings = found_by(tmp_path, gradients_times(lambda place: 2.0**8 if place[1] == 2 else 1.0), num_ranks=4)
    assert {(one.kind, one.severity, one.where["rank"]) for one in findings} == {("rank_differs", Severity.HIGH, 2)}


def test_a_gradient_begins_to_learn(tmp_path: Path) -> None:
    def factors(place: Place) -> float:
        return 2.0**8 if place[0] == 20 else 1.0

    assert found_by(tmp_path, gradients_times(factors, name="grad_weight", layer=0)) == []


def test_tokens_without_a_loss_have_no_gradient(tmp_path: Path) -> None:
    """Of the last layer all but one token, as in a model that classifies by the first."""

    def fault(place: Place, tensor: Array) -> Array:
        changed = tensor.copy()
        if place[2:] == (3, "grad_output"):
            changed[:, 1:] = 0
        return changed

    findings = found_by(tmp_path, fault, num_layers=4)
    assert [(one.kind, one.severity) for one in findings] == [("zero", Severity.LOW)]
    assert findings[0].title.startswith(
        "layers.3.linear grad_output on all ranks is 87.5 % zeros without signs of rounding"
    )


@pytest.mark.parametrize(
    ("dtype", "scale", "severity"),
    [(ml_dtypes.float8_e5m2, 1.0, Severity.HIGH), (ml_dtypes.float8_e4m3fn, 150.0, Severity.MEDIUM)],
)
def test_what_a_format_flushed_but_for_a_few_is_no_matter_of_tokens(
    tmp_path: Path, dtype: Any, scale: float, severity: Severity
) -> None:
    """The smallest number of a format says so; that of one with a scale of its own may be any."""
    findings = found_by(tmp_path, cast(dtype, layers=[3], scale=scale), num_layers=6, gradient=1e-6, num_ranks=1)
    assert [(one.kind, one.severity) for one in findings] == [("gradient_underflow", severity)]
    assert "without signs of rounding" not in " ".join((findings[0].title, *findings[0].consequences))


@pytest.mark.parametrize("name", ["bias", "attention_mask"])
def test_zeros_of_a_bias_or_a_mask_hide_no_rounding(tmp_path: Path, name: str) -> None:
    tensors = []
    for layer in range(5):
        grads = normal(64, 32, seed=layer) * np.float32(1e-3)
        rounded = grads.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) if layer == 2 else grads
        tensors += [
            describe_tensor(normal(64, 32, seed=9), layer_idx=layer),
            describe_tensor(np.zeros(32, dtype=np.float32), layer_idx=layer, tensor_name=name),
            describe_tensor(rounded, layer_idx=layer, tensor_name="grad_output", operation="backward"),
        ]
    first, *others = found_in(tmp_path, tensors)
    assert (first.kind, first.severity, first.where["layer_idx"]) == ("gradient_underflow", Severity.HIGH, 2)
    assert all(one.severity is Severity.LOW and one.where["tensor_name"] == name for one in others)


def test_what_a_block_format_flushed_may_be_rounding(tmp_path: Path) -> None:
    """Each block of 32 has a scale of its own, so that no smallest number is common to them."""

    def fault(place: Place, tensor: Array) -> Array:
        if place[2:] != (3, "grad_output"):
            return tensor
        values = tensor.astype(np.float64) * 2.0 ** (np.arange(8)[:, None] % 8 * 3)
        values *= np.where(np.random.default_rng(1).random(values.shape) < 0.8, 2.0**-20, 1.0)
        scales = 2.0 ** np.floor(np.log2(abs(values).max(axis=-1, keepdims=True)))
        rounded = (values / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return np.asarray(rounded * scales).astype(tensor.dtype)

    findings = found_by(tmp_path, fault, num_layers=6, num_ranks=1, iterations=(0,))
    first = next(one for one in findings if one.where["layer_idx"] == 3)
    assert (first.kind, first.severity) == ("gradient_underflow", Severity.MEDIUM)
    assert "all other values have at most 4 significant bits: rounding to 8 bits may have caused them" in first.title


@pytest.mark.parametrize(("num_dead", "severity"), [(11, Severity.HIGH), (6, Severity.HIGH), (1, Severity.MEDIUM)])
@exhaustive_but("6-high", "1-medium", reason="both severities are in make test")
def test_a_layer_without_a_gradient_in_most_iterations(tmp_path: Path, num_dead: int, severity: Severity) -> None:
    def fault(place: Place, tensor: Array) -> Array:
        is_dead = place[2] == 2 and place[3].startswith("grad") and place[0] < num_dead
        return np.zeros_like(tensor) if is_dead else tensor

    findings = found_by(tmp_path, fault, num_layers=5, iterations=range(12), num_ranks=1)
    assert [one.severity for one in findings] == [severity]
    assert f"is all zero in {num_dead} of 12 records, but the same gradient of other layers is not" in findings[0].title


@pytest.mark.parametrize(("iterations", "severity"), [((0,), Severity.MEDIUM), ((0, 1), Severity.HIGH)])
def test_a_layer_without_a_gradient_on_one_rank(tmp_path: Path, iterations: tuple[int, ...], severity: str) -> None:
    def fault(place: Place, tensor: Array) -> Array:
        return np.zeros_like(tensor) if place[1:3] == (1, 2) and place[3].startswith("grad") else tensor

    (finding,) = found_by(tmp_path, fault, num_layers=5, iterations=iterations, num_ranks=4)
    assert (finding.kind, finding.severity, finding.where["rank"]) == ("gradient_underflow", severity, 1)


def test_copies_of_one_value_differ_from_those_of_another(tmp_path: Path) -> None:
    """The weight of a norm is ones on one rank and zeros on the other."""
    tensors = [
        describe_tensor(array, rank=rank, layer_idx=layer, module=f"layers.{layer}.{module}", tensor_name="weight")
        for rank in range(2)
        for layer in range(4)
        for module, array in (
            ("linear", normal(8, 8, seed=layer)),
            ("norm", np.full(16, (rank, layer) != (1, 2), dtype=np.float32)),
        )
    ]
    first = found_in(tmp_path, tensors)[0]
    assert (first.kind, first.severity, first.where["module"]) == ("replica_differs", Severity.HIGH, "layers.2.norm")


def test_a_head_that_begins_with_zeros_has_one_number_in_its_gradient(tmp_path: Path) -> None:
    """Each of 16 classes is as likely as the others, and half of the tokens have no loss: nothing was rounded."""
    gradient = np.full((4, 8, 16), 1 / 16, dtype=np.float32)
    gradient[..., 3] -= 1
    gradient[:, 4:] = 0
    fields = {"module": "head", "layer_idx": -1}
    tensors = [
        describe_tensor(normal(4, 8, 16, seed=1), **fields),
        describe_tensor(gradient, tensor_name="grad_output", operation="backward", **fields),
    ]
    assert found_in(tmp_path / "loss", tensors) == []
    tensors[1] = describe_tensor(abs(gradient.clip(max=0)), tensor_name="grad_output", operation="backward", **fields)
    assert found_in(tmp_path / "mean", tensors) == []
