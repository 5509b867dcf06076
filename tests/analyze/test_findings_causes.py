"""What is told as a consequence was computed from its cause, with nothing clean between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.findings.find import find
from ranktape.analyze.findings.finding import Finding, Severity
from ranktape.analyze.questions.findings import findings_table
from tests.analyze.compared import normal
from tests.analyze.faulty_runs import Array, Fault, Place, Sizes, faulty_run
from tests.analyze.runs import describe_tensor, store

BACKWARD = ("grad_output", "grad_weight", "grad_input")


def found_in(folder: Path, fault: Fault, *, skipped_steps: Collection[int] = (), **sizes: Any) -> list[Finding]:
    """What is found in a run of one rank."""
    defaults: dict[str, Any] = {"num_ranks": 1, "num_layers": 5, "iterations": range(0, 50, 10)}
    run = faulty_run(folder, fault, sizes=Sizes(**defaults | sizes), skipped_steps=skipped_steps)
    return find(run.select(), engine=Engine(use_cache=False))


def lost(values: Mapping[Place, float]) -> Fault:
    """Of each of these tensors one element; what is computed from it is lost, too."""

    def fault(place: Place, tensor: Array) -> Array:
        if place not in values:
            return tensor
        changed = tensor.copy()
        changed.flat[3] = values[place]
        return changed

    return fault


def only(values: Mapping[Place, float]) -> Fault:
    """The same, and all else is as it would be without."""
    spoil = lost(values)
    return lambda place, tensor: spoil(place, np.nan_to_num(tensor.astype(np.float64)).astype(tensor.dtype))


def begin(findings: Collection[Finding]) -> list[tuple[str, int, int, str]]:
    """Kind, iteration, layer and tensor of each finding, as it begins."""
    return [
        (one.kind, one.where["iteration"], one.where["layer_idx"], one.where["tensor_name"])
        for one in findings
        if one.severity is Severity.HIGH
    ]


def test_what_is_lost_again_after_clean_iterations_has_a_cause_of_its_own(tmp_path: Path) -> None:
    findings = found_in(tmp_path, lost({(0, 0, 4, "grad_output"): np.nan, (30, 0, 2, "grad_output"): np.nan}))
    assert begin(findings) == [("nan", 0, 4, "grad_output"), ("nan", 30, 2, "grad_output")]
    for finding, num_layers in zip(findings, (5, 3), strict=True):
        # Three gradients of each layer, of which the cause is one.
        assert len(finding.consequences) == 3 * num_layers - 1
    assert "in 1 record in all" in findings[0].evidence


def test_what_is_lost_at_the_same_place_again_is_one_finding_that_says_so(tmp_path: Path) -> None:
    values = {(iteration, 0, 3, "grad_output"): np.nan for iteration in (0, 20, 40)}
    (finding,) = found_in(tmp_path, lost(values))
    assert "again in iterations 20, 40, after clean iterations" in finding.evidence
    assert finding.where["iteration"] == 0
    assert len(finding.places) == 3
    assert len(finding.consequences) == len(set(finding.consequences)) == 3 * 4 - 1


@pytest.mark.parametrize(("name", "num_causes"), [("weight", 1), ("output", 2)])
def test_a_step_carries_what_is_lost_unless_the_weights_are_clean(tmp_path: Path, name: str, num_causes: int) -> None:
    findings = found_in(tmp_path, lost({(10, 0, 3, "grad_weight"): np.nan, (20, 0, 1, name): np.nan}))
    assert begin(findings) == [("nan", 10, 3, "grad_weight"), ("nan", 20, 1, "output")][:num_causes]


def test_a_skipped_step_carries_nothing(tmp_path: Path) -> None:
    values = {(10, 0, 3, "grad_weight"): np.nan, (20, 0, 1, "weight"): np.nan}
    findings = found_in(tmp_path, lost(values), skipped_steps=[10])
    assert begin(findings) == [("nan", 10, 3, "grad_weight"), ("nan", 20, 1, "weight")]
    assert "the gradient scaler skipped the step of iteration 10" in findings[0].evidence


def test_a_clean_layer_lies_between(tmp_path: Path) -> None:
    names = ("input", "output")
    apart = {(10, 0, layer, name): np.nan for layer in (0, 3) for name in names}
    assert begin(found_in(tmp_path / "apart", only(apart))) == [("nan", 10, 0, "input"), ("nan", 10, 3, "input")]
    through = {(10, 0, layer, name): np.nan for layer in range(4) for name in names}
    assert begin(found_in(tmp_path / "through", only(through))) == [("nan", 10, 0, "input")]
    backward = {(10, 0, layer, name): np.nan for layer in (0, 3) for name in BACKWARD}
    assert len(begin(found_in(tmp_path / "backward", only(backward)))) == 2


def dead(since: Mapping[int, int]) -> Fault:
    """The gradients of layers are zero from an iteration on; those of the others are as they were."""

    def fault(place: Place, tensor: Array) -> Array:
        is_dead = place[3] in BACKWARD and place[0] >= since.get(place[2], 1 << 30)
        return np.zeros_like(tensor) if is_dead else tensor

    return fault


def test_a_dead_gradient_explains_nothing_that_was_computed_before_it(tmp_path: Path) -> None:
    findings = found_in(tmp_path, dead({2: 0, 3: 20, 0: 20}))
    assert {(one.where["layer_idx"], len(one.consequences)) for one in findings} == {(2, 2), (3, 2), (0, 2)}
    assert all(f"layers.{one.where['layer_idx']}." in title for one in findings for title in one.consequences)


def test_what_another_microbatch_lost_is_no_cause(tmp_path: Path) -> None:
    """The gradients of the first microbatch are computed before the forward pass of the second."""
    spoiled = normal(4, 8)
    spoiled[0, 0] = np.nan
    tensors = [
        describe_tensor(
            spoiled if (microbatch, layer, name) in {(0, 1, "grad_output"), (1, 0, "output")} else normal(4, 8),
            microbatch=microbatch,
            layer_idx=layer,
            tensor_name=name,
            operation="backward" if name == "grad_output" else "forward",
            counter=counter,
        )
        for counter, (microbatch, name, layer) in enumerate(
            (microbatch, *site)
            for microbatch in range(2)
            for site in (("output", 0), ("output", 1), ("grad_output", 1), ("grad_output", 0))
        )
    ]
    findings = find(store(tmp_path, tensors).select(), engine=Engine(use_cache=False))
    assert [(one.where["layer_idx"], one.where["tensor_name"]) for one in findings] == [
        (1, "grad_output"),
        (0, "output"),
    ]


def test_gradients_that_the_optimizer_got_follow_from_what_any_rank_lost(tmp_path: Path) -> None:
    """They are the mean over all ranks and microbatches, and clipped by a norm that is NaN."""
    spoiled = normal(4, 8) * np.float32(np.nan)
    tensors = []
    for rank in range(2):
        names = [(microbatch, "grad_output") for microbatch in range(2)] + [(1, "reduced_grad_weight")]
        for counter, (microbatch, name, layer) in enumerate((*one, layer) for one in names for layer in (3, 2, 1, 0)):
            is_lost = name != "grad_output" or (rank, microbatch, layer) == (1, 0, 1)
            fields = {"tensor_name": name, "operation": "backward", "layer_idx": layer, "counter": counter}
            array = spoiled if is_lost else normal(4, 8)
            tensors.append(describe_tensor(array, rank=rank, microbatch=microbatch, **fields))
    (finding,) = find(store(tmp_path, tensors).select(), engine=Engine(use_cache=False))
    assert (finding.where["rank"], finding.where["microbatch"], finding.where["layer_idx"]) == (1, 0, 1)
    assert len(finding.consequences) == 4


def scaled_too_high(iterations: Collection[int], value: float) -> Fault:
    """In these iterations the gradient of the last layer is beyond the largest number."""
    return lost({(iteration, 0, 4, "grad_output"): value for iteration in iterations})


def test_steps_that_a_gradient_scaler_skipped_are_below_the_real_fault(tmp_path: Path) -> None:
    fault = lost(
        {(iteration, 0, 4, "grad_output"): np.inf for iteration in (0, 10, 20)} | {(40, 0, 2, "grad_output"): np.nan}
    )
    findings = found_in(tmp_path, fault, iterations=range(0, 60, 10), skipped_steps=[0, 10, 20, 40])
    assert [(one.severity, one.where["layer_idx"]) for one in findings] == [(Severity.HIGH, 2), (Severity.LOW, 4)]
    assert "the gradient scaler skipped the step of iteration 40" in findings[0].evidence
    assert findings[1].title == "layers.4.linear grad_output has Inf, as the loss scale was too high"
    assert "the gradient scaler skipped the steps of iterations 0, 10, 20" in findings[1].evidence
    assert len(findings[1].consequences) > 3 * 4


@pytest.mark.parametrize(
    ("iterations", "value", "skipped"),
    [((0, 10), np.inf, ()), ((30, 40), np.inf, (30, 40)), ((0, 10), np.nan, (0, 10))],
    ids=["no scaler", "never finite again", "no infinity"],
)
def test_what_a_smaller_scale_does_not_explain_is_high(
    tmp_path: Path, iterations: Collection[int], value: float, skipped: Collection[int]
) -> None:
    findings = found_in(tmp_path, scaled_too_high(iterations, value), skipped_steps=skipped)
    assert [one.severity for one in findings] == [Severity.HIGH]
    assert ("the gradient scaler skipped" in findings[0].evidence) == bool(skipped)


@pytest.mark.parametrize(("skipped", "severity"), [(range(0, 9, 2), "medium"), ((0, 1, 2, 8), "low")])
def test_a_loss_scale_that_never_settles_is_more_than_worth_knowing(
    tmp_path: Path, skipped: Collection[int], severity: str
) -> None:
    findings = found_in(tmp_path, scaled_too_high(skipped, np.inf), skipped_steps=skipped, iterations=range(10))
    assert [(one.kind, one.severity) for one in findings] == [("inf", severity)]
    assert ("once in thousands" in findings[0].evidence) == (severity == "medium")


def test_what_is_there_without_infinities_is_no_part_of_a_skipped_step(tmp_path: Path) -> None:
    def fault(place: Place, tensor: Array) -> Array:
        if place[2:] != (2, "grad_output"):
            return tensor
        changed = (tensor.astype(np.float64) * 2.0 ** (14 * (place[1] == 1))).astype(tensor.dtype)
        changed.flat[3] = np.inf if place[0] == 0 else changed.flat[3]
        return changed

    first, *others = found_in(tmp_path, fault, skipped_steps=[0], num_ranks=4)
    assert (first.kind, first.severity, first.where["rank"]) == ("rank_differs", Severity.HIGH, 1)
    assert (first.where["layer_idx"], first.where["tensor_name"]) == (2, "grad_output")
    assert [(one.kind, one.severity) for one in others] == [("inf", Severity.LOW)]


def test_a_module_that_was_given_clean_numbers_lost_them_itself(tmp_path: Path) -> None:
    """Of the next layer, or of another branch."""
    values = {(0, 0, layer, "output"): np.nan for layer in (1, 2)}
    assert begin(found_in(tmp_path / "forward", only(values))) == [("nan", 0, layer, "output") for layer in (1, 2)]
    values = {(0, 0, layer, "grad_weight"): np.nan for layer in (1, 2)}
    run = faulty_run(tmp_path / "backward", only(values), sizes=Sizes(num_ranks=1, num_layers=4, iterations=[0]))
    engine = Engine(use_cache=False)
    assert begin(find(run.select(), engine=engine)) == [("nan", 0, layer, "grad_weight") for layer in (2, 1)]
    # What it was given in the forward pass is not known.
    found = find(run.select(operation="backward"), engine=engine)
    assert begin(found) == [("nan", 0, 2, "grad_weight")]


def test_findings_alike_are_no_consequences(tmp_path: Path) -> None:
    """Three modules at one time, none of which is computed from another; the worst stands for them."""
    tensors = []
    for microbatch, (module, share) in enumerate({"a": 0.3, "b": 0.5, "c": 0.4}.items()):
        values = normal(100, 10)
        values.flat[: int(1000 * share)] = np.float32(1e-40)
        fields = {"module": module, "layer_idx": -1, "tensor_name": "grad_output", "operation": "backward"}
        tensors.append(describe_tensor(values, microbatch=microbatch, **fields))
    (finding,) = find(store(tmp_path, tensors).select(), engine=Engine(use_cache=False))
    assert (finding.where["module"], finding.value) == ("b", 0.5)
    assert [title.split()[0] for title in finding.alike] == ["c", "a"]
    assert len(finding.places) == 3
    assert not any("underflows" in title for title in finding.consequences)
    text = findings_table([finding], num_records=3, url="run").to_text()
    assert [line.split()[:2] for line in text.splitlines() if line.startswith(("similar", "leads to"))] == [
        ["similar", "c"],
        ["leads", "to"],
    ]


def test_a_small_underflow_does_not_head_a_large_one(tmp_path: Path) -> None:
    """Both are high, and the smaller one was computed first."""

    def fault(place: Place, tensor: Array) -> Array:
        changed = tensor.copy()
        changed[..., : {(3, "grad_output"): 10, (1, "grad_output"): 31}.get(place[2:], 0)] = 1e-40
        return changed

    findings = found_in(tmp_path, fault, iterations=[0])
    assert [one.where["layer_idx"] for one in findings if one.severity is Severity.HIGH] == [1, 3]
