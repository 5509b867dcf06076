"""Are the weights that the optimizer updates, and the gradients that it gets, those of just before its step?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.storage import Record, Run, open_run

NAMES = ("0", "1")


class MasterSGD(torch.optim.SGD):
    """Updates copies in float32, and writes them into the weights; holds them where `keep` puts them."""

    def __init__(self, parameters: list[nn.Parameter], keep: Callable[[Any, nn.Parameter, nn.Parameter], None]) -> None:
        self.weights = parameters
        self.copies = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
        super().__init__(self.copies, lr=0.1)
        for parameter, copy in zip(self.weights, self.copies, strict=True):
            keep(self, parameter, copy)

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for parameter, copy in zip(self.weights, self.copies, strict=True):
                parameter.copy_(copy)
        return result

    def take_gradients(self) -> None:
        for parameter, copy in zip(self.weights, self.copies, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float() / 2


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)


def start(tmp_path: Path, **options: Any) -> Capture:
    given = {"min_iterations": 2, "host_budget_nbytes": 32 << 20, "with_master": True, **options}
    return Capture(tmp_path / "run", **given)


def only(run: Run, **filters: Any) -> Record:
    [record] = run.select(**filters)
    return record


def test_two_optimizers_are_seen_once_before_either_steps(tmp_path: Path) -> None:
    model = make_model()
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in model]
    with start(tmp_path):
        for step in range(2):
            for microbatch in range(2):
                model(torch.full((2, 4), 1.0 + step + microbatch)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1]
    for iteration in run.iterations:
        for module in NAMES:
            here = {"iteration": iteration, "module": module}
            master = only(run, **here, tensor_name="master_weight")
            assert (master.operation, master.phase, master.layer_type) == ("forward", "pre", "linear")
            assert (master.sample_dim, master.microbatch, master.placement) == (None, 0, None)
            assert torch.equal(master.tensor(), only(run, **here, tensor_name="weight").tensor())
            reduced = only(run, **here, tensor_name="reduced_grad_weight")
            assert (reduced.operation, reduced.phase) == ("backward", "post")
            first, second = run.select(**here, tensor_name="grad_weight")
            assert torch.equal(reduced.tensor(), first.tensor() + second.tensor())
    assert all(not any(status.silent_sites.values()) for status in run.status())


def keep_on_parameter(_: Any, parameter: nn.Parameter, copy: nn.Parameter) -> None:
    parameter.main_param = copy  # type: ignore[attr-defined]  # as Megatron-core does


def keep_in_state(optimizer: Any, parameter: nn.Parameter, copy: nn.Parameter) -> None:
    optimizer.state[parameter]["master_param"] = copy


@pytest.mark.parametrize("keep", [keep_on_parameter, keep_in_state])
def test_a_copy_in_higher_precision_is_the_master_weight(tmp_path: Path, keep: Callable[..., None]) -> None:
    model = make_model(torch.bfloat16)
    optimizer = MasterSGD([layer.weight for layer in model], keep)  # type: ignore[misc]
    before: list[torch.Tensor] = []
    with start(tmp_path):
        for _ in range(2):
            model(torch.ones(2, 4, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.take_gradients()
            before.append(optimizer.copies[1].detach().clone())
            optimizer.step()
            model.zero_grad()
    run = open_run(tmp_path / "run")
    for iteration, expected in enumerate(before):
        here = {"iteration": iteration, "module": "1"}
        master = only(run, **here, tensor_name="master_weight").tensor()
        weight = only(run, **here, tensor_name="weight").tensor()
        assert (master.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(master, expected)
        assert torch.equal(master.bfloat16(), weight)
        reduced = only(run, **here, tensor_name="reduced_grad_weight").tensor()
        assert torch.equal(reduced, only(run, **here, tensor_name="grad_weight").tensor().float() / 2)
    assert not torch.equal(before[0], before[1])


def test_a_flat_piece_of_a_master_weight_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = make_model()
    for layer in model:
        layer.weight.main_param_sharded = True  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with start(tmp_path):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    run = open_run(tmp_path / "run")
    assert len(run.select(tensor_name="master_weight")) == 0
    [status, _] = run.status()
    reasons = [reason for site, reason in status.silent_sites[0].items() if "master_weight" in site]
    assert reasons
    assert all("distributed optimizer" in reason for reason in reasons)


def test_a_gradient_that_was_scaled_is_seen_as_the_optimizer_gets_it(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with start(tmp_path):
        for _ in range(2):
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    run = open_run(tmp_path / "run")
    here = {"iteration": 1, "module": "1"}
    scaled = only(run, **here, tensor_name="grad_weight").tensor()
    assert torch.equal(only(run, **here, tensor_name="reduced_grad_weight").tensor(), scaled / 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fused_optimizer_unscales_in_its_kernel(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0 if dtype is torch.float32 else 1024.0)
    factors = (1.0, float("inf"), 1.0)
    with start(tmp_path, min_iterations=3):
        for factor in factors:
            optimizer.zero_grad()
            scaler.scale((model(torch.ones(2, 4, dtype=dtype)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    unscaled = model.get_parameter("1.weight").grad  # the kernel has divided it
    assert unscaled is not None
    run = open_run(tmp_path / "run")
    here = {"iteration": 2, "module": "1"}
    assert torch.equal(only(run, **here, tensor_name="reduced_grad_weight").tensor(), unscaled)
    assert [status.step_skipped_ranks for status in run.status()] == [[], [0], []]


def test_the_optimizers_view_is_not_recorded_unless_asked_for(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path / "run", min_iterations=1, host_budget_nbytes=32 << 20):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert "master_weight" not in open_run(tmp_path / "run").select().column("tensor_name")
