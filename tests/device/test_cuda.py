"""Does the device path hold on CUDA itself: values, waits, graphs, errors and kills that no simulation can prove?"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranktape.capture import Capture, save_tensor
from ranktape.capture.staging.ring_file import Counter
from ranktape.storage import Run, open_run
from ranktape.storage.format.live import TriggerKind
from tests.device.models import NUM_STEPS, Training
from tests.launch.processes import CHECKOUT

pytestmark = pytest.mark.gpu

DEVICE = "cuda"

BUDGET_NBYTES = 64 << 20

PROGRAM = f"""
import os, signal, time, torch
from ranktape.capture import Capture
from tests.device.models import Training

if __name__ == "__main__":
    training, steps = Training("{DEVICE}"), []

    def after_step():
        steps.append(1)
        if len(steps) == 3:
            {{fault}}

    with Capture(os.environ["RUN"], host_budget_nbytes={BUDGET_NBYTES}, {{options}}):
        training.run(after_step=after_step)
"""


def plain(after_step: Callable[[], object] = lambda: None) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    """The losses of a training, and of each step what torch's own hooks see of its linear layers."""
    training, steps, step = Training(DEVICE), list[dict[str, torch.Tensor]](), dict[str, torch.Tensor]()

    def watch(name: str, layer: nn.Module) -> None:
        def forward(_: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
            step[f"{name} input"], step[f"{name} output"] = args[0].detach().clone(), output.detach().clone()
            step[f"{name} weight"] = layer.get_parameter("weight").detach().clone()

        def backward(_: nn.Module, grad_inputs: Any, grad_outputs: tuple[torch.Tensor]) -> None:
            step[f"{name} grad_output"] = grad_outputs[0].detach().clone()
            if grad_inputs[0] is not None:
                step[f"{name} grad_input"] = grad_inputs[0].detach().clone()

        layer.register_forward_hook(forward)
        layer.register_full_backward_hook(backward)

    for name, module in training.model.named_modules():
        if isinstance(module, nn.Linear):
            watch(name, module)

    def end() -> None:
        steps.append(dict(step))
        step.clear()
        after_step()

    return training.run(after_step=end), steps


def records_of(run: Run, iteration: int) -> dict[str, torch.Tensor]:
    records = run.select(iteration=iteration, layer_type="linear")
    return {f"{record.module} {record.tensor_name}": record.tensor() for record in records}


@pytest.mark.usefixtures("way")
def test_records_are_what_torchs_own_hooks_see(tmp_path: Path) -> None:
    losses, steps = plain()
    training = Training(DEVICE)
    with Capture(tmp_path / "run", min_iterations=NUM_STEPS, host_budget_nbytes=BUDGET_NBYTES):
        found = training.run()
    assert torch.equal(found, losses)
    run = open_run(tmp_path / "run")
    assert [status.state for status in run.status()] == NUM_STEPS * ["complete"]
    for iteration, step in enumerate(steps):
        records = records_of(run, iteration)
        assert step.keys() <= records.keys()
        for name, expected in step.items():
            assert torch.equal(records[name], expected.cpu()), (iteration, name)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("options", [{"min_iterations": NUM_STEPS}, {"record_last": 2}], ids=["capture", "recorder"])
def test_the_training_thread_never_waits(options: dict[str, Any], tmp_path: Path) -> None:
    Training(DEVICE).run()  # the first calls of the libraries wait
    training = Training(DEVICE)
    with Capture(tmp_path / "run", host_budget_nbytes=BUDGET_NBYTES, **options) as capture:
        try:
            # The first captured step pins memory. A wait of the capture would cost it a record.
            training.run(after_step=lambda: torch.cuda.set_sync_debug_mode("error"))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        capture.trigger("the end")
    complete = [status for status in open_run(tmp_path / "run").status() if status.state == "complete"]
    assert len(complete) >= 2
    assert all(status.num_missing == 0 for status in complete)


@pytest.mark.usefixtures("way")
def test_the_last_tensors_reach_the_writer_without_a_further_call(tmp_path: Path) -> None:
    training = Training(DEVICE)
    with Capture(tmp_path / "run", min_iterations=NUM_STEPS, host_budget_nbytes=BUDGET_NBYTES) as capture:
        training.run()
        torch.cuda.synchronize()
        time.sleep(0.1)
        ring = capture._process.ring
        assert ring._reserved == ring.counter(Counter.PUBLISHED)


@pytest.mark.usefixtures("way")
def test_a_tensor_beyond_the_budget_of_clones(tmp_path: Path) -> None:
    with Capture(tmp_path / "run", manual=True, host_budget_nbytes=1 << 30) as capture:
        tensor = torch.arange(75 << 20, device=DEVICE, dtype=torch.int32)
        save_tensor(tensor, "mine", "forward", "none", "large")
        tensor.fill_(-1)
        capture.step()
    (record,) = open_run(tmp_path / "run").select()
    assert torch.equal(record.tensor(), torch.arange(75 << 20, dtype=torch.int32))


@pytest.mark.usefixtures("way")
def test_tensors_of_side_streams(tmp_path: Path) -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    with Capture(tmp_path / "run", manual=True, host_budget_nbytes=BUDGET_NBYTES) as capture:
        for number in range(40):
            with torch.cuda.stream(streams[number % 4]):
                tensor = torch.full((1 << 17,), float(number), device=DEVICE)
                for _ in range(20):
                    tensor.add_(1)
                save_tensor(tensor, "mine", "forward", "none", "streamed")
                tensor.fill_(-1)
        capture.step()
    records = open_run(tmp_path / "run").select()
    assert len(records) == 40
    assert all((record.read() == record.call + 20).all() for record in records)


@pytest.mark.usefixtures("way")
def test_a_graph_stays_valid(tmp_path: Path) -> None:
    layer, x = nn.Linear(64, 64, device=DEVICE), torch.ones(8, 64, device=DEVICE)
    with Capture(tmp_path / "run", min_iterations=1, manual=True, host_budget_nbytes=BUDGET_NBYTES) as capture:
        large = torch.ones(1 << 22, device=DEVICE)
        for _ in range(4):
            save_tensor(large, "mine", "forward", "none", "under way")
        with torch.no_grad():
            layer(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = layer(x)
                save_tensor(output, "mine", "forward", "none", "in the graph")
            x.fill_(2)
            graph.replay()
            assert torch.allclose(output, layer(x))
        capture.step()
    names = [record.tensor_name for record in open_run(tmp_path / "run").select(layer_type="mine")]
    assert names == 4 * ["under way"]


def test_captures_one_after_another_leave_nothing_registered(tmp_path: Path) -> None:
    for number in range(3):
        training = Training(DEVICE)
        with Capture(tmp_path / str(number), min_iterations=NUM_STEPS, host_budget_nbytes=BUDGET_NBYTES):
            training.run()
        torch.ones(5, device=DEVICE).sum().item()  # raises what CUDA kept as its last error
        assert len(open_run(tmp_path / str(number)).iterations) == NUM_STEPS


@pytest.mark.filterwarnings("ignore")  # dynamo meets deprecated parts of torch itself
def test_a_compiled_model_trains_as_without_and_is_recorded(tmp_path: Path) -> None:
    def train() -> torch.Tensor:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(DEVICE)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        model.compile()
        for number in range(NUM_STEPS):
            loss = model(torch.full((16, 64), 0.1 * number, device=DEVICE)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)

    with Capture(tmp_path / "run", min_iterations=NUM_STEPS, host_budget_nbytes=BUDGET_NBYTES):
        found = train()
    torch.testing.assert_close(found, train(), rtol=1e-3, atol=1e-5)
    names = {f"{one.module} {one.tensor_name}" for one in open_run(tmp_path / "run").select(iteration=1)}
    assert {f"{layer} {name}" for layer in "02" for name in ("input", "weight", "output", "grad_output")} <= names


def test_gradients_under_a_fused_optimizer_with_a_scaler(tmp_path: Path) -> None:
    model = nn.Linear(8, 8, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    grads = []
    with Capture(tmp_path / "run", min_iterations=2, with_master=True, host_budget_nbytes=BUDGET_NBYTES):
        for _ in range(2):
            with torch.autocast(DEVICE, dtype=torch.float16):
                loss = model(torch.ones(4, 8, device=DEVICE)).square().mean()
            scaler.scale(loss).backward()
            assert model.weight.grad is not None
            grads.append(model.weight.grad.clone() / 1024)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    run = open_run(tmp_path / "run")
    for iteration, expected in enumerate(grads):
        (record,) = run.select(iteration=iteration, tensor_name="reduced_grad_weight")
        assert torch.equal(record.tensor(), expected.cpu())


def run_program(folder: Path, *, fault: str, options: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    program, url = folder / "program.py", folder / "run"
    program.write_text(PROGRAM.format(fault=fault, options=options))
    path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "RUN": str(url)}
    command = [sys.executable, str(program)]
    result = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    return result, url


def test_an_assert_on_the_device_is_the_users_and_the_recorder_stores(tmp_path: Path) -> None:
    fault = "training.model.embed(torch.full((2, 6), 10**6, device='cuda')); torch.cuda.synchronize()"
    result, url = run_program(tmp_path, fault=fault, options="record_last=2")
    assert result.returncode == 1
    assert "device-side assert" in result.stderr
    run = open_run(url)
    assert [trigger.kind for trigger in run.triggers()] == [TriggerKind.EXCEPTION]
    assert len({record.iteration for record in run.select()}) >= 2


def test_what_was_staged_is_stored_after_a_kill(tmp_path: Path) -> None:
    fault = "torch.cuda.synchronize(); time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)"
    result, url = run_program(tmp_path, fault=fault, options="min_iterations=4")
    assert result.returncode == -9
    deadline, states = time.monotonic() + 20, list[str]()
    while time.monotonic() < deadline:
        states = [str(status.state) for status in open_run(url).status()] if url.exists() else []
        if states.count("complete") >= 2:
            break
        time.sleep(0.2)
    assert states[:2] == ["complete", "complete"]
    _, steps = plain()
    for iteration in range(2):
        records = records_of(open_run(url), iteration)
        assert all(torch.equal(records[name], expected.cpu()) for name, expected in steps[iteration].items())
