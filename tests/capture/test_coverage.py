"""Of a model that computes with weights that no hook sees, the parts are named, and the rest is a share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.storage import open_run
from tests.capture.role_models import BATCH, LENGTH, VOCABULARY, WIDTH, Task, Trained, train_twice
from tests.capture.verify import verify_run

if TYPE_CHECKING:
    import pytest


class SelfAttention(nn.Module):
    """Attention as minGPT writes it: products and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attend(hidden).chunk(3, dim=-1)
        return torch.softmax(query @ key.transpose(-2, -1), dim=-1) @ value  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """A layer with a hand-written attention, and a product with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.norm(self.attention(hidden)) @ self.gate
        return product[..., :WIDTH]


class Model(nn.Module):
    """Two such layers with an embedding before them, whose weight the output layer has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Mixed() for _ in range(2))
        self.tied = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.positions(torch.arange(LENGTH))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


class Grouped(nn.Module):
    """Experts in one product, with weights in another dtype, as large trainings compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = self.before(hidden).flatten(0, 1)
        offsets = torch.tensor([4, 4, len(tokens)], dtype=torch.int32)
        weights = self.experts.bfloat16().transpose(-2, -1)
        return torch._grouped_mm(tokens.bfloat16(), weights, offs=offsets)


def said_of(trained: Trained) -> dict[str, str]:
    [status, *_] = trained.run.status()
    return status.silent_sites.get(0, {})


def test_what_no_hook_sees_is_named_with_its_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = train_twice(Task(make=Model), tmp_path / "run")
    attend, gate, head = 2 * 3 * WIDTH * WIDTH, 2 * 2 * WIDTH * WIDTH, VOCABULARY * WIDTH
    total = attend + gate + head + LENGTH * WIDTH
    said = said_of(trained)
    assert set(said) == {"layers.*.gate (Mixed)", "layers.*.attention (SelfAttention)"}
    assert said["layers.*.gate (Mixed)"] == f"no hook sees it: {100 * gate // total} % of the model's weights"
    assert "docs/roles.md" in said["layers.*.attention (SelfAttention)"]
    text = capsys.readouterr().err
    assert f"hooks see {100 * (attend + head) // total} % of the model's weights (2 % are left out by" in text
    assert "warning: not recorded: layers.*.gate (Mixed)" in text


def test_of_attention_that_is_seen_or_not_asked_for_nothing_is_said(tmp_path: Path) -> None:
    model = nn.Sequential(SelfAttention())
    with Capture(tmp_path / "run", model=model, layer_type=("linear",), advance_on="step") as capture:
        model(torch.randn(BATCH, LENGTH, WIDTH)).sum().backward()
        capture.step()
    [status] = open_run(tmp_path / "run").status()
    assert not status.silent_sites


def test_a_model_that_comes_later_counts_from_then_on(tmp_path: Path) -> None:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Sequential(Grouped(), nn.Bilinear(WIDTH, WIDTH, WIDTH))
    hidden = torch.randn(BATCH, LENGTH, WIDTH)
    with Capture(tmp_path / "run", min_iterations=4, advance_on="step") as capture:
        for iteration in range(4):
            first(hidden).sum().backward()
            if iteration in {1, 2}:
                second[0](hidden).float().sum().backward()
                second[1](hidden, hidden).sum().backward()
            capture.step()
    [attempt] = open_run(tmp_path / "run").status()[:1]
    said = [status.silent_sites.get(0, {}) for status in open_run(tmp_path / "run").status()]
    assert attempt.state == "complete"
    assert ["weight (Bilinear)" in " ".join(one) for one in said] == [False, True, True, True]


def test_experts_in_another_dtype_are_seen(tmp_path: Path) -> None:
    trained = train_twice(Task(make=Grouped), tmp_path / "run")
    assert trained.is_equal
    assert not said_of(trained)
    assert verify_run(trained.run)["grouped grad_weight"] == 2
    [record] = trained.run.select(iteration=0, module="experts", tensor_name="grad_weight")
    assert (record.shape, str(record.dtype), record.layout) == ((3, WIDTH, WIDTH), "bfloat16", "EIO")
