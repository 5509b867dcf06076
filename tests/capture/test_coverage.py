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
        product: torch.Tensor = torch.einsum("...i,io->...o", self.norm(self.attention(hidden)), self.gate)
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


class ConvAttention(nn.Module):
    """Attention as diffusion models write it, with convolutions of width 1."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Conv1d(WIDTH, 3 * WIDTH, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attend(hidden.transpose(-2, -1)).chunk(3, dim=1)
        return torch.softmax(query.transpose(-2, -1) @ key, dim=-1) @ value.transpose(-2, -1)  # type: ignore[no-any-return]


class Uncalled(nn.Module):
    """Layers that are called, used without a call, tied to one that is called, and not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.used, self.tied, self.unused = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.tied.weight = self.called.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.einsum("...i,io->...o", self.called(hidden), self.used.weight)
        return product


class Parts(nn.Module):
    """Seven products with parameters, of different sizes, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        for number in range(7):
            setattr(self, f"part_{chr(ord('a') + number)}", nn.Parameter(torch.randn(WIDTH, WIDTH)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for number in range(7):
            hidden = torch.einsum("...i,io->...o", hidden, getattr(self, f"part_{chr(ord('a') + number)}"))
        return hidden


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


def test_a_layer_that_is_not_called_does_not_count_as_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = train_twice(Task(make=Uncalled), tmp_path / "run")
    assert trained.is_equal
    text = capsys.readouterr().err
    assert "hooks see 33 % of the model's weights (33 % are in modules that were not called)" in text
    used = "no hook sees it: its module was not called, and its weight was used without it: 33 % of the model's weights"
    assert [line for line in text.splitlines() if "warning" in line] == [
        f"ranktape: warning: not recorded: used.weight (Linear): {used}"
    ]
    not_called = "its module was not called"
    for status in trained.run.status():
        assert status.silent_sites == {
            0: {
                "used": "its module was not called, and its weight was used without it",
                "tied": not_called,
                "unused": not_called,
                "used.weight (Linear)": used,
            }
        }


def test_the_hooks_that_notice_it_go_with_the_iteration(tmp_path: Path) -> None:
    model = Uncalled()
    with Capture(tmp_path / "run", model=model, min_iterations=1, advance_on="step") as capture:
        model(torch.randn(BATCH, LENGTH, WIDTH)).sum().backward()
        assert model.used.weight._backward_hooks
        capture.step()
        assert not any(one._backward_hooks for one in model.parameters())


def test_attention_among_convolutions_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), ConvAttention(), ConvAttention())  # noqa: E731
    trained = train_twice(Task(make=make), tmp_path / "run")
    [(part, reason)] = ((part, reason) for part, reason in said_of(trained).items() if "(ConvAttention)" in part)
    assert part == "* (ConvAttention)"
    assert "docs/roles.md" in reason
    assert f"not recorded: {part}: {reason}" in capsys.readouterr().err


def test_attention_that_did_not_run_is_not_named(tmp_path: Path) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attention = nn.Linear(WIDTH, WIDTH), ConvAttention()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.first(hidden)  # type: ignore[no-any-return]

    assert not any("ConvAttention" in part for part in said_of(train_twice(Task(make=Idle), tmp_path / "run")))


def test_a_list_of_parts_that_is_cut_says_how_many_more_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = train_twice(Task(make=Parts), tmp_path / "run")
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning: not recorded" in line]
    assert len(warned) == 5 + 1
    assert warned[-1] == (
        "ranktape: warning: not recorded: 2 more parts of the model, which hold 25 % of the model's weights: "
        "'ranktape status' lists them"
    )
    assert len(said_of(trained)) == 7


def test_of_attention_that_is_seen_or_not_asked_for_nothing_is_said(tmp_path: Path) -> None:
    model = nn.Sequential(SelfAttention())
    with Capture(tmp_path / "run", model=model, select={"layer_type": ("linear",)}, advance_on="step") as capture:
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
