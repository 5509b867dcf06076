"""Is nothing lost in silence, mixed up or broken where a training does something unusual?

Each test stands for a defect that a reviewer once made happen.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from ranktape.capture import Capture
from ranktape.storage import open_run
from tests.capture.models import Net
from tests.capture.trainings import WIDTH, Made, Task, captured, lawful, linear, steps
from tests.exhaustive import exhaustive


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(4, 16), (4, 6, 16)])
def test_an_operation_in_place_after_a_layer_loses_no_gradient(
    tmp_path: Path, *, bias: bool, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=bias), nn.ReLU(inplace=True), nn.Linear(32, 16, bias=bias))
    with Capture(tmp_path / "run", advance_on="step") as capture:
        inputs = torch.randn(shape)
        model(inputs).square().sum().backward()
        capture.step()
    assert capture.close().met
    [grad] = open_run(tmp_path / "run").select(module="0", tensor_name="grad_output")
    assert grad.shape == (*shape[:-1], 32)
    [weight] = open_run(tmp_path / "run").select(module="0", tensor_name="grad_weight")
    expected = model.get_parameter("0.weight").grad
    assert expected is not None
    assert torch.equal(weight.tensor(), expected)
    computed = grad.tensor().reshape(-1, 32).T @ inputs.reshape(-1, 16)
    torch.testing.assert_close(computed, expected)


def test_two_backward_passes_over_one_graph_keep_both_gradients(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path / "run") as capture:
        loss = model(torch.randn(2, 16)).sum()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        optimizer.step()
    assert capture.close().met
    grads = open_run(tmp_path / "run").select(module="0", tensor_name="grad_output")
    assert grads.column("call").tolist() == [0, 1]
    assert torch.equal(2 * grads[0].tensor(), grads[1].tensor())


def test_a_gradient_that_comes_after_its_iteration_is_named_and_not_mixed_in(tmp_path: Path) -> None:
    generator, judge = nn.Linear(8, 16), nn.Linear(16, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (judge, generator)]
    with Capture(tmp_path / "run", min_iterations=2):
        for _ in range(3):
            made = generator(torch.randn(4, 8))
            judge(made.detach()).mean().backward()
            optimizers[0].step()
            judge(made).mean().backward()
            optimizers[1].step()
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1]
    for status in run.status()[1:2]:
        reasons = set(status.silent_sites[0].values())
        assert "it belongs to iteration 0, and came after that had ended" in reasons


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "parametrized", [spectral_norm, weight_norm, old_weight_norm], ids=["spectral", "weight", "old"]
)
def test_parametrized_weights_are_recorded_as_computed(
    parametrized: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    task = Task(make=lambda: nn.Sequential(parametrized(linear()), linear()))
    run = lawful(task, tmp_path / "run", steps=3).run
    assert len(run.select(tensor_name="output")) == 2 * 3
    assert len(run.select(module="0", tensor_name=["weight", "grad_weight"])) == 2 * 3


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and models still hold it
def test_modules_that_take_no_hooks_are_passed_over(tmp_path: Path) -> None:
    model = nn.Sequential(linear(), torch.jit.trace(linear(), torch.randn(2, WIDTH)), nn.LazyLinear(WIDTH))
    assert "0" in captured(model, tmp_path / "run", 2, min_iterations=1).select().column("module")


def test_an_optimizer_that_is_initialised_by_a_step_ends_no_iteration(tmp_path: Path) -> None:
    model = nn.Linear(16, 16)
    with Capture(tmp_path / "run") as capture:
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        assert capture.iteration == 0
        steps(model)
    assert open_run(tmp_path / "run").iterations == [0]


def test_a_disabled_capture_takes_its_hooks_off(tmp_path: Path) -> None:
    model = Net()
    original = F.scaled_dot_product_attention
    with Capture(tmp_path / "run", model=model, min_iterations=100) as capture:
        steps(model)
        capture._disable("the test says so")
        steps(model, 2)
        assert not any(module._forward_hooks for module in model.modules())
        assert F.scaled_dot_product_attention is original
    assert not capture.close().met


def test_a_training_that_nobody_steps_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranktape.capture.recorder.MAX_PASSES", 20)
    model = nn.Linear(16, 16)
    with Capture(tmp_path / "run") as capture:
        for _ in range(40):
            model(torch.randn(2, 16)).sum().backward()
    verdict = capture.close()
    assert not verdict.met
    assert "call capture.step() after each iteration" in verdict.message()


def test_a_pass_that_was_interrupted_leaves_no_trace(tmp_path: Path) -> None:
    calls: list[int] = []

    def run_layer(model: Any, hidden: torch.Tensor) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return model.linear(hidden)

    model = Made(run_layer, linear=linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path / "run", min_iterations=3):
        for _ in range(4):
            try:
                model(torch.randn(2, 16)).sum().backward()
            except KeyboardInterrupt:
                continue
            optimizer.step()
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1, 2]
    assert run.select(tensor_name="grad_weight").column("iteration").tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore")  # dynamo meets deprecated parts of torch itself
@exhaustive("make test steps eagerly")
def test_a_compiled_optimizer_step_ends_the_iteration(tmp_path: Path) -> None:
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    with Capture(tmp_path / "run", min_iterations=2):
        for _ in range(4):
            model(torch.randn(2, 16)).sum().backward()
            step()
    assert open_run(tmp_path / "run").iterations == [0, 1]


def test_a_second_close_after_an_interrupt_ends_at_once(tmp_path: Path) -> None:
    capture = Capture(tmp_path / "run", min_iterations=2)
    capture.__enter__()
    steps(nn.Linear(16, 16))
    process = capture._process._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        capture.close()
    verdict = capture.close()
    os.kill(process.pid, signal.SIGCONT)
    process.wait()
    assert not verdict.met
    assert "the writer goes on" in verdict.message()


@exhaustive("make test has tokens in the names of attempts")
def test_a_late_writer_of_another_launch_changes_nothing(tmp_path: Path) -> None:
    first = Capture(tmp_path / "run", min_iterations=30)
    first.__enter__()
    late = first._process._process
    assert late is not None
    os.kill(late.pid, signal.SIGSTOP)
    steps(nn.Linear(16, 16), 5)
    # The first training is gone without a word; its writer still holds what was staged.
    Capture.current = None
    first._clock.stop()
    first._hooks.detach()
    with Capture(tmp_path / "run", overwrite=True, min_iterations=3) as second:
        steps(nn.Linear(16, 16), 2)
        os.kill(late.pid, signal.SIGCONT)
        first._process.ring.finish({"reason": "killed"})
        late.wait(60)
        steps(nn.Linear(16, 16), 2)
    assert second.close().met
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1, 2]
    for record in run.select():
        record.read()
    words = first._process.ring.hear()
    assert words is not None
    assert "was replaced or deleted while it was recorded" in str(words)
