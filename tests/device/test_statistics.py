"""Are the statistics that are taken on the device those of the values, and does a flight recorder work by them?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ranktape.analyze.numerics.histograms.histogram import measure
from ranktape.analyze.numerics.histograms.moments import statistics_of
from ranktape.capture import Capture, save_tensor
from ranktape.capture.staging.ring_file import Slot, SlotKind
from ranktape.capture.tensors.taking import statistics_on_device
from ranktape.capture.writing.counting import device_nbytes, staged_record
from ranktape.storage import open_run
from ranktape.storage.format.dtypes import numpy_dtype
from ranktape.storage.format.live import TriggerKind
from ranktape.storage.format.statistics import STATISTICS, Statistics
from tests.device.accelerator import Accelerator
from tests.device.models import NUM_STEPS, Training

SPECIAL: dict[str, list[float]] = {
    "finite": [],
    "zeros": [0.0, -0.0],
    "subnormal": [1e-39, -1e-39],
    "nan": [torch.nan],
    "inf": [torch.inf],
    "all": [torch.nan, torch.inf, -torch.inf, 0.0, 1e-39],
}


def header_of(tensor: torch.Tensor, sample_dim: int | None) -> dict[str, Any]:
    names = ("module", "layer_type", "operation", "phase", "component", "quant_type", "tensor_name", "layout")
    numbers = {"iteration": 0, "layer_idx": 0, "microbatch": 0, "call": 0, "counter": 0, "timestamp": 0.0}
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {
        **dict.fromkeys(names, "linear"),
        **numbers,
        "operation": "forward",
        "layer_stack": "",
        "mode": "train",
        "dtype": dtype,
        "compute_dtype": dtype,
        "shape": list(tensor.shape),
        "sample_dim": sample_dim,
        "sample_ids": None,
        "batch_size": None,
        "placement": None,
        "metadata": None,
        "taken": "device",
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "sample_dim"), [((4, 7, 50), 0), ((4, 7, 50), 1), ((3, 5000), None), ((), None), ((6,), 0)]
)
@pytest.mark.parametrize("special", SPECIAL)
def test_they_are_those_of_the_values(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], sample_dim: int | None, special: str
) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 1).to(dtype)
    values = torch.tensor(SPECIAL[special][: tensor.numel()], dtype=dtype)
    tensor.view(-1)[: len(values)] = values
    taken = statistics_on_device(tensor.to(device), sample_dim=sample_dim).cpu()
    assert taken.numel() == device_nbytes(1 if sample_dim is None else shape[sample_dim])
    payload = memoryview(bytearray(taken.numpy().tobytes()))
    slot = Slot(kind=SlotKind.TENSOR, header=header_of(tensor, sample_dim), payload=payload, end=0)
    vector, info = staged_record(slot, rank=0, attempt=0)
    array = tensor.reshape(-1).view(torch.uint8).numpy().view(numpy_dtype(info.dtype)).reshape(shape)
    assert info.overflow == measure(array, sample_dim=sample_dim)
    found, expected = Statistics.from_vector(vector), statistics_of(array)
    known = [name not in {"moment_3", "moment_4"} for name in STATISTICS]
    np.testing.assert_allclose(found.to_vector()[known], expected.to_vector()[known], rtol=1e-5, atol=1e-5)
    assert found.skewness is None
    assert found.kurtosis is None


def test_a_large_mean_takes_nothing_from_small_differences(device: torch.device) -> None:
    weight = 1 + 1e-3 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    counts_and_values = statistics_on_device(weight.to(device), sample_dim=None).cpu()
    variance = counts_and_values[-24:].view(torch.float32)[3]
    assert variance.item() == pytest.approx(weight.double().var(correction=0).item(), rel=1e-3)


def test_a_recorder_holds_a_model_larger_than_its_ring(sim: Accelerator, tmp_path: Path) -> None:
    training = Training("sim:0", batch=300)
    waits: list[dict[str, int]] = []
    with (
        sim.watching() as watched,
        Capture(tmp_path / "run", record_last=2, trigger=["absmax > 448"], host_budget_nbytes=1 << 20),
    ):
        losses = training.run(after_step=lambda: waits.append(watched.here))
        assert waits[0] == waits[-1]
        with torch.no_grad():
            training.model.get_parameter("layers.1.up.weight").fill_(1000)
        training.run()
    assert torch.equal(losses.cpu(), Training("cpu", batch=300).run())
    run = open_run(tmp_path / "run")
    triggers = [one for one in run.triggers() if one.kind is TriggerKind.METRIC]
    assert triggers[0].iteration == NUM_STEPS
    assert "layers.1.up" in triggers[0].text
    records = run.select(iteration=NUM_STEPS)
    assert {record.keep for record in records} >= {"statistics"}
    (weight,) = run.select(iteration=NUM_STEPS, module="layers.1.up", tensor_name="weight")
    assert weight.overflow.absmax == 1000


def test_statistics_are_taken_on_the_device_where_nothing_else_is_kept(device: torch.device, tmp_path: Path) -> None:
    tensor = torch.arange(1000.0).view(2, 500)
    with Capture(tmp_path / "run", manual=True, keep="statistics") as capture:
        save_tensor(tensor.to(device), "mine", "forward", "none", "x")
        capture.step()
    (record,) = open_run(tmp_path / "run").select()
    statistics = record.statistics()
    assert record.keep == "statistics"
    assert statistics.maximum == 999
    assert statistics.mean == pytest.approx(499.5)
    assert statistics.std == pytest.approx(np.arange(1000.0).std(), rel=1e-5)
    assert statistics.kurtosis is None
