"""Outputs are computed again from what a run holds of a layer: its input, its weight and its bias, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from ranktape.capture import Capture
from ranktape.capture.hooks.weights import CACHED
from ranktape.storage import Record, Run, open_run
from tests.capture.models import captured
from tests.capture.verify import verify_run


class Bare(nn.Module):
    """Products with parameters of its own: with a bias, with one that is computed for the call, and with a part."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = F.linear(x, self.weight, bias=self.bias)
        alone = F.linear(x, self.weight)
        part = F.linear(x, self.weight[:8], self.bias[:8])
        computed = F.linear(x, self.weight, self.bias * 2)
        return whole.sum() + alone.sum() + part.sum() + computed.square().sum()


class Attending(nn.Module):
    """Attention whose projections lie in one parameter, in parts of one, or in three."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)
        nn.init.normal_(self.attention.in_proj_bias)
        nn.init.normal_(self.attention.out_proj.bias)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = x if "kdim" not in self.options else x[..., :4]
        first, _ = self.attention(x, own, own, need_weights=False)
        second, _ = self.attention(first, own, own)
        return second.square().sum()  # type: ignore[no-any-return]


class Twice(nn.Module):
    """One layer that is called two times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x).relu()).square().sum()  # type: ignore[no-any-return]


def capture(model: nn.Module, url: Path, **options: Any) -> Run:
    run = captured(model, url, shape=(3, 4, 8), **options)
    assert_nothing_missing(run)
    return run


def assert_nothing_missing(run: Run) -> None:
    assert all(status.num_expected for status in run.status())
    assert not any(any(status.silent_sites.values()) for status in run.status())


def named(run: Run, module: str) -> dict[str, Record]:
    return {f"{record.tensor_name}{record.call or ''}": record for record in run.select(module=module, iteration=0)}


@pytest.mark.parametrize(
    ("make", "num_outputs", "num_grads"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4, bias=False), nn.Linear(4, 2)), 3, 2),
        (Bare, 4, 3),
        (Attending, 5, 5),
        (lambda: Attending(kdim=4, vdim=4), 8, 8),
        (Twice, 2, 2),
    ],
    ids=["linear", "bare", "multihead", "separate", "twice"],
)
def test_outputs_are_the_product_and_the_bias_to_the_bit(
    make: Callable[[], nn.Module], num_outputs: int, num_grads: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    run = capture(make(), tmp_path / "run")
    biases: dict[str, torch.Tensor] = {}
    weights = {record.module: record.tensor() for record in run.select(tensor_name="weight")}
    for record in sorted(run.select(operation="forward", layer_type="linear"), key=lambda one: one.counter):
        if record.tensor_name == "bias":
            biases[record.module] = record.tensor()
        if record.tensor_name == "output":
            [given] = run.select(module=record.module, tensor_name="input", call=record.call)
            is_without = record.metadata == {"without_bias": True}
            bias = None if is_without else biases[record.module]
            assert torch.equal(record.tensor(), F.linear(given.tensor(), weights[record.module], bias)), record
    assert verify_run(run)["output"] == num_outputs
    assert len(run.select(tensor_name="grad_bias")) == num_grads


def test_a_bias_is_expected_where_there_is_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    model.get_parameter("2.bias").requires_grad = False
    run = capture(model, tmp_path / "run", select={"layer_type": "linear"})
    assert {name for name in named(run, "0") if "bias" in name} == {"bias", "grad_bias"}
    assert not {name for name in named(run, "1") if "bias" in name}
    said = [named(run, name)["output"].metadata for name in "012"]
    assert said == [None, {"without_bias": True}, None]
    assert {name for name in named(run, "2") if "bias" in name} == {"bias"}
    bias = named(run, "0")["bias"]
    assert (bias.operation, bias.phase, bias.component, bias.shape, bias.sample_dim) == (
        "forward", "pre", "linear", (8,), None
    )  # fmt: skip


def test_a_bias_can_be_left_out(tmp_path: Path) -> None:
    run = capture(
        nn.Sequential(nn.Linear(8, 8)), tmp_path / "run", select={"where": "tensor_name not in ('bias', 'grad_bias')"}
    )
    assert set(named(run, "0")) == {"input", "weight", "output", "grad_output", "grad_weight"}
    assert named(run, "0")["output"].metadata is None


def test_a_bias_that_is_computed_when_it_is_read_is_the_one_that_was_added(tmp_path: Path) -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = nn.Sequential(nn.Linear(8, 8))
    own = model.get_parameter("0.bias").detach().clone()
    parametrize.register_parametrization(model[0], "bias", Doubled())
    run = capture(model, tmp_path / "run", select={"layer_type": "linear"})
    assert set(named(run, "0")) == {"input", "weight", "bias", "output", "grad_output", "grad_weight", "grad_bias"}
    assert torch.equal(named(run, "0")["bias"].tensor(), 2 * own)
    assert verify_run(run)["output"] == 1


@pytest.mark.parametrize("is_autocast", [False, True])
def test_gradients_of_biases_are_those_of_autograd(tmp_path: Path, *, is_autocast: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    with Capture(tmp_path / "run", advance_on="step") as capturing:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
            loss = model(torch.randn(3, 8)).square().mean()
        loss.backward()
        capturing.step()
    run = open_run(tmp_path / "run")
    for name in ("0", "1"):
        records = named(run, name)
        bias = model.get_parameter(f"{name}.bias")
        assert bias.grad is not None
        assert torch.equal(records["grad_bias"].tensor(), bias.grad)
        assert torch.equal(records["bias"].tensor(), bias)
    assert_nothing_missing(run)


def test_a_bias_of_another_type_than_its_weight_is_no_obstacle_under_autocast(tmp_path: Path) -> None:
    # Autocast keeps its cast of the weight, whose gradient is seen on the weight itself, but not of this bias.
    model = nn.Linear(8, 8)
    model.bias = nn.Parameter(model.bias.detach().bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = capture(nn.Sequential(model), tmp_path / "run")
    assert {"bias", "grad_bias", "grad_weight"} <= set(run.select().column("tensor_name"))


class BothWays(nn.Module):
    """Multiplies with one parameter as it is, and transposed, perhaps in a checkpoint."""

    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.shared = nn.Parameter(torch.randn(8, 8))
        self._is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        return checkpoint(self._both, hidden, use_reentrant=True) if self._is_checkpointed else self._both(hidden)

    def _both(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(hidden, self.shared)) @ self.shared


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_gradient_of_several_calls_says_that_it_is_their_sum(
    tmp_path: Path, *, is_checkpointed: bool, is_autocast: bool
) -> None:
    torch.manual_seed(0)
    model = BothWays(is_checkpointed=is_checkpointed)
    with Capture(tmp_path / "run", advance_on="step") as capturing:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
            loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        capturing.step()
    run = open_run(tmp_path / "run")
    gradients = run.select(module="shared", tensor_name="grad_weight")
    assert model.shared.grad is not None
    if is_autocast:
        [gradient] = gradients
        assert gradient.metadata == {"summed": True}
        assert torch.equal(gradient.tensor(), model.shared.grad)
        [(place, reason)] = run.status()[0].silent_sites[0].items()
        assert (place, reason) == ("shared backward post grad_weight", CACHED)
    else:
        assert [(one.metadata, one.layout) for one in gradients] == [(None, "IO"), (None, "OI")]
    assert run.select(module="first", tensor_name="grad_weight")[0].metadata is None
    verify_run(run.select(module="first"))
