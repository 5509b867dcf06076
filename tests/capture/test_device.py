"""Do tensors of a CUDA device arrive as those of the host do?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ranktape.capture import Capture, save_tensor
from ranktape.storage import open_run
from tests.capture.models import NUM_TENSORS, Net


@pytest.mark.gpu
def test_a_training_on_a_device(tmp_path: Path) -> None:
    losses = []
    for capture in (None, Capture(tmp_path / "run", min_iterations=2)):
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if capture is not None:
            capture.__enter__()
        for _ in range(3):
            loss = model(torch.randn(3, 5, 16, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if capture is not None:
            assert capture.close().met
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:]))
    records = open_run(tmp_path / "run").select()
    assert len(records) == 2 * NUM_TENSORS
    for _, group in records.select(layer_type="linear").group_by(["iteration", "module"]):
        tensors = {record.tensor_name: record.tensor() for record in group}
        torch.testing.assert_close(tensors["input"] @ tensors["weight"].T, tensors["output"], rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_what_changes_after_it_was_recorded(tmp_path: Path) -> None:
    with Capture(tmp_path / "run", manual=True) as capture:
        for number in range(50):
            tensor = torch.full((1 << 20,), number, device="cuda", dtype=torch.int32)
            save_tensor(tensor, "mine", "forward", "none", "counted")
            tensor.fill_(-1)
        capture.step()
    for record in open_run(tmp_path / "run").select():
        assert (record.read() == record.call).all()
