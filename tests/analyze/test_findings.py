"""A fault that was planted is the first finding, at its place, and a healthy run has none."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.findings.find import find
from ranktape.analyze.findings.finding import Finding, Severity
from tests.analyze.faulty_runs import Fault, Place, Sizes, all_faults, cast, everywhere, faulty_run, healthy
from tests.exhaustive import exhaustive_but

Array = np.ndarray[Any, Any]

RANKS = (2, 4, 8)
"""Two ranks are a case of their own: no majority says which of them is wrong."""


def group_sizes(num_ranks: int, **sizes: Any) -> Sizes:
    """Runs of many ranks are short."""
    defaults: dict[str, Any] = {"iterations": (0, 10, 20) if num_ranks <= 2 else (10,)}
    return Sizes(num_ranks=num_ranks, **defaults | sizes)


def findings_of(folder: Path, fault: Fault, sizes: Sizes) -> list[Finding]:
    """What is found in a run with a fault."""
    return find(faulty_run(folder, fault, sizes=sizes).select(), engine=Engine(use_cache=False))


def scaled(rank: int, layer: int, *, name: str = "weight", factor: float = 2.0**12, since: int = 0) -> Fault:
    """One tensor of one rank times a factor."""

    def fault(place: Place, tensor: Array) -> Array:
        is_here = place[1:] == (rank, layer, name) and place[0] >= since
        return (tensor.astype(np.float64) * factor).astype(tensor.dtype) if is_here else tensor

    return fault


def outlier(rank: int, layer: int, sample: int, *, iteration: int = 10) -> Fault:
    """One value of one sample as large as nothing else."""

    def fault(place: Place, tensor: Array) -> Array:
        if place != (iteration, rank, layer, "input"):
            return tensor
        changed = tensor.copy()
        changed[sample, 0, 0] = 20_000
        return changed

    return fault


def underflow(layer: int, *, factor: float) -> Fault:
    """The gradient of one layer times a factor, on all ranks."""
    return everywhere(layer, name="grad_output", factor=factor)


def bit(rank: int, layer: int, *, since: int = 0) -> Fault:
    """The lowest bit of one element of a weight."""

    def fault(place: Place, tensor: Array) -> Array:
        if place[1:] != (rank, layer, "weight") or place[0] < since:
            return tensor
        changed = tensor.copy()
        changed.view(np.uint16)[3, 5] ^= 1
        return changed

    return fault


def first(folder: Path, fault: Fault, **sizes: Any) -> Finding:
    """The worst finding of a run with a fault."""
    return findings_of(folder, fault, Sizes(**sizes))[0]


def place_of(finding: Finding) -> tuple[Any, ...]:
    """Rank, layer and tensor."""
    return tuple(finding.where.get(field) for field in ("rank", "layer_idx", "tensor_name"))


@pytest.mark.parametrize("num_ranks", [1, *RANKS])
@exhaustive_but("1", "4", reason="one and several ranks are in make test")
def test_a_healthy_run_has_no_findings(tmp_path: Path, num_ranks: int) -> None:
    assert findings_of(tmp_path, healthy, group_sizes(num_ranks)) == []


@pytest.mark.parametrize(("num_ranks", "layer"), [(2, 0), (2, 2), (4, 1), (8, 2)])
@exhaustive_but("2-0", "8-2", reason="two and eight ranks are in make test")
def test_a_weight_of_one_rank(tmp_path: Path, num_ranks: int, layer: int) -> None:
    findings = findings_of(tmp_path, scaled(1, layer), group_sizes(num_ranks))
    assert place_of(findings[0]) == (1, layer, "weight")
    assert (findings[0].kind, findings[0].severity) == ("rank_differs", Severity.HIGH)
    assert findings[0].binades == pytest.approx(12)
    assert "replica_differs" in findings[0].evidence
    # What follows is said by the one finding: the output, and the gradients on that rank.
    assert len(findings) == 1
    assert any("output" in title for title in findings[0].consequences)


@pytest.mark.parametrize("sizes", [{"num_layers": 1}, {"num_layers": 2, "iterations": (0,)}, {"iterations": (5,)}])
def test_a_weight_of_one_of_two_ranks_of_few_layers(tmp_path: Path, sizes: dict[str, Any]) -> None:
    found = first(tmp_path, scaled(1, 0), num_ranks=2, **sizes)
    assert (found.kind, found.where["layer_idx"], found.where["tensor_name"]) == ("rank_differs", 0, "weight")
    # One layer alone does not say which of the two is wrong, and so both are named.
    assert found.where.get("rank", found.where.get("ranks")) == ([0, 1] if sizes == {"num_layers": 1} else 1)


def test_a_weight_of_one_of_two_ranks_from_some_iteration_on(tmp_path: Path) -> None:
    found = first(tmp_path, scaled(0, 0, since=20), num_ranks=2, num_layers=1)
    assert place_of(found) == (0, 0, "weight")
    assert found.where["iteration"] == 20


@pytest.mark.parametrize(("num_ranks", "layer"), [(2, 0), (2, 2), (4, 1), (8, 2)])
@exhaustive_but("2-2", "4-1", reason="two and four ranks are in make test")
def test_one_sample(tmp_path: Path, num_ranks: int, layer: int) -> None:
    findings = findings_of(tmp_path, outlier(1, layer, 4), group_sizes(num_ranks))
    assert (findings[0].kind, findings[0].severity) == ("sample_outlier", Severity.HIGH)
    assert place_of(findings[0]) == (1, layer, "input")
    assert (findings[0].where["sample"], findings[0].where["iteration"]) == ("4", 10)
    assert findings[0].value == float(ml_dtypes.bfloat16(20_000))
    assert len(findings) == 1


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "factor", "layer"),
    [
        (2, ml_dtypes.bfloat16, 2.0**-120, 1),
        (4, np.float16, 2.0**-10, 2),
        (8, np.float32, 2.0**-200, 1),
        (2, np.float32, 0.0, 0),
    ],
)
def test_a_gradient_that_underflows(tmp_path: Path, num_ranks: int, dtype: Any, factor: float, layer: int) -> None:
    """Some of it, nearly all of it, and so that nothing is left."""
    sizes = group_sizes(num_ranks, dtype=dtype)
    findings = findings_of(tmp_path, underflow(layer, factor=factor), sizes)
    assert findings[0].kind == "gradient_underflow"
    assert findings[0].where["layer_idx"] == layer
    assert findings[0].where["tensor_name"] == "grad_output"
    assert len(findings) == 1


@pytest.mark.parametrize("layers", [range(2, 4), range(6)], ids=["some layers", "all layers"])
@pytest.mark.parametrize(
    ("dtype", "scale", "said"),
    [
        (ml_dtypes.float8_e5m2, 1.0, "at least 1.526e-05, the smallest number of fp8_e5m2"),
        (np.float16, 2.0**-8, "at least 1.526e-05"),
        # A scale that is no power of two, and rounds the numbers once more.
        (ml_dtypes.float8_e4m3fn, 150.0, "at least 1.299e-05"),
    ],
)
def test_zeros_that_a_format_made(tmp_path: Path, layers: range, dtype: Any, scale: float, said: str) -> None:
    """In all layers alike, where no layer says how many are usual, and beside others."""
    sizes = Sizes(num_ranks=1, num_layers=6, iterations=(10,), gradient=1e-5)
    run = faulty_run(tmp_path, cast(dtype, layers=layers, scale=scale), sizes=sizes)
    zeros = [(record.layer_idx, float((record.read() == 0).mean())) for record in run.select(tensor_name="grad_output")]
    # The backward pass begins with the last layer.
    first_layer, share = next((layer, zero) for layer, zero in zeros if zero > 0.1)
    findings = find(run.select(), engine=Engine(use_cache=False))
    assert [(one.kind, one.severity) for one in findings] == [("gradient_underflow", Severity.HIGH)]
    assert (findings[0].where["layer_idx"], findings[0].metric) == (first_layer, "overflow.zero.ratio")
    assert findings[0].value == pytest.approx(share)
    assert f"rounding made {100 * share:.3g} % of it zero" in findings[0].title
    assert said in findings[0].title
    assert "smallest normal" not in findings[0].title
    assert len(findings[0].consequences) >= len(layers) - 1


@pytest.mark.parametrize("layers", [[2], range(4)])
def test_a_gradient_of_nothing_but_zeros(tmp_path: Path, layers: Collection[int]) -> None:
    """Of one layer, and of all: the forward pass says that there was something to learn."""
    findings = findings_of(tmp_path, cast(np.int8, layers=layers), Sizes(num_layers=4, iterations=(10,)))
    assert [one.kind for one in findings] == ["gradient_underflow"]
    assert findings[0].where["layer_idx"] == max(layers)
    assert "is all zero" in findings[0].title


def test_a_weight_is_the_cause_of_a_worse_gradient(tmp_path: Path) -> None:
    """The fault in the weight is a factor of 32, and that of the gradient of the same module one of 4,096."""
    fault = all_faults(everywhere(2, factor=2.0**5), everywhere(2, name="grad_weight", factor=2.0**12))
    findings = findings_of(tmp_path, fault, Sizes(num_layers=6))
    assert place_of(findings[0])[1:] == (2, "weight")
    assert any("grad_weight" in title for title in findings[0].consequences)
    assert len(findings) == 1


def test_what_a_step_spreads_follows_from_what_spoiled_its_gradients(tmp_path: Path) -> None:
    """A weight that is too large, in iteration 10 an infinite gradient of it, and then no weight is a number."""

    def fault(place: Place, tensor: Array) -> Array:
        iteration, _, layer, name = place
        if (iteration, layer, name) == (10, 2, "grad_weight"):
            changed = tensor.copy()
            changed[0, 0] = np.inf
            return changed
        return tensor * np.float32(np.nan) if (iteration, name) == (20, "weight") else tensor

    findings = findings_of(tmp_path, all_faults(everywhere(2, factor=2.0**9), fault), Sizes(num_layers=6))
    assert len(findings) == 1
    assert (findings[0].kind, findings[0].where["layer_idx"], findings[0].where["tensor_name"]) == (
        "layer_differs",
        2,
        "weight",
    )
    assert sum(" weight" in title and "NaN" in title for title in findings[0].consequences) == 6


def test_a_weight_that_jumps_follows_from_the_gradient_that_exploded_before(tmp_path: Path) -> None:
    """It is updated with it; a step before, or beside a gradient of another layer behind it, is not that."""

    def updated(first: int, layer: int) -> Fault:
        def fault(place: Place, tensor: Array) -> Array:
            iteration, _, own, name = place
            is_gradient = (iteration, own) == (20, 2) and name in {"grad_output", "grad_weight"}
            is_updated = iteration >= first and (own, name) == (layer, "weight")
            factor = 2.0**13 if is_gradient else 2.0**5 if is_updated else 1.0
            return (tensor.astype(np.float64) * factor).astype(tensor.dtype)

        return fault

    def told(name: str, fault: Fault) -> list[bool]:
        """Of each finding whether it is a gradient's with a weight among what follows from it."""
        findings = findings_of(tmp_path / name, fault, Sizes(num_ranks=1, num_layers=6, iterations=range(0, 60, 10)))
        return [any(" weight " in title for title in one.consequences) for one in findings if "grad" in one.title]

    assert told("after", updated(30, 2)) == [True]
    assert not any(told("before", updated(20, 2)))
    assert not any(told("behind", updated(30, 4)))


def test_all_consequences_are_told(tmp_path: Path) -> None:
    """A report counts them, and shows the first."""

    def fault(place: Place, tensor: Array) -> Array:
        return tensor * np.float32(np.nan) if place[2:] == (0, "output") else tensor

    findings = findings_of(tmp_path, fault, Sizes(num_ranks=1, num_layers=12, iterations=(10,)))
    # Of each layer the output, and of all others the input; the weights are clean, and all gradients spoiled.
    assert [len(one.consequences) for one in findings] == [11 + 11 + 3 * 12]


def test_a_gradient_that_vanishes_above_its_smallest_number(tmp_path: Path) -> None:
    found = first(tmp_path, underflow(2, factor=2.0**-30), num_layers=5)
    assert (found.kind, found.where["layer_idx"]) == ("layer_differs", 2)
    assert found.binades == pytest.approx(-30, abs=2)


@pytest.mark.parametrize("num_ranks", RANKS)
@exhaustive_but("2", "4", reason="two and several ranks are in make test")
def test_one_bit(tmp_path: Path, num_ranks: int) -> None:
    findings = findings_of(tmp_path, bit(1, 2), group_sizes(num_ranks))
    assert len(findings) == 1
    found = findings[0]
    assert (found.kind, found.severity) == ("replica_differs", Severity.HIGH)
    assert "1 of 1,024 elements differ, by " in found.evidence
    assert "norm " in found.evidence
    assert "checksum" not in found.evidence
    assert (found.where["layer_idx"], found.where["tensor_name"]) == (2, "weight")
    # Two copies that differ do not say which of them is wrong.
    assert found.where.get("ranks" if num_ranks == 2 else "rank") == ([0, 1] if num_ranks == 2 else 1)


def test_a_bit_that_falls_over_during_the_run(tmp_path: Path) -> None:
    """With two ranks and one layer, what was equal before tells that copies should be."""
    run = faulty_run(tmp_path, bit(0, 0, since=20), sizes=Sizes(num_ranks=2, num_layers=1))
    (found,) = find(run.select(), engine=Engine(use_cache=False))
    assert (found.kind, found.where["iteration"]) == ("replica_differs", 20)
    weights = [record.read() for record in run.select(tensor_name="weight", iteration=20)]
    apart = abs(weights[0][3, 5].astype(np.float64) - weights[1][3, 5].astype(np.float64))
    assert found.evidence.startswith(
        "since iteration 20, equal until iteration 10; 2 of 2 copies differ; "
        f"in iteration 20: 1 of 1,024 elements differ, by {apart:.4g} at most; norm "
    )


def test_copies_that_differ_are_compared_by_the_command_that_is_named(tmp_path: Path) -> None:
    run = faulty_run(tmp_path, bit(1, 2, since=10), sizes=Sizes(num_ranks=4))
    (found,) = find(run.select(), engine=Engine(use_cache=False))
    assert found.command == (
        "ranktape analyze compare RUN --in-order --module layers.2.linear --tensor-name weight --pair rank=0:1"
    )
    words = shlex.split(found.command_in(run.url))
    rows = json.loads(CliRunner().invoke(cli, [*words[2:], "--json"], catch_exceptions=False).stdout)["rows"]
    assert [(row["iteration"], row["differing.count"]) for row in rows] == [(0, 0), (10, 1), (20, 1)]


@pytest.mark.parametrize("num_ranks", RANKS)
@exhaustive_but("2", "8", reason="two and several ranks are in make test")
def test_two_faults(tmp_path: Path, num_ranks: int) -> None:
    fault = all_faults(scaled(1, 1), underflow(3, factor=2.0**-120), bit(0, 2), outlier(0, 0, 2))
    findings = findings_of(tmp_path, fault, group_sizes(num_ranks, num_layers=5))
    assert {(one.kind, one.where["layer_idx"]) for one in findings} == {
        ("rank_differs", 1),
        ("gradient_underflow", 3),
        ("replica_differs", 2),
        ("sample_outlier", 0),
    }
