"""Of a model that computes with weights that no hook sees, the parts are named, and the rest is a share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.capture.hooks.coverage import Visibility, find_coverage
from ranktape.capture.passes.tracker import Frame
from ranktape.storage import open_run
from tests.capture.trainings import (
    BATCH,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Made,
    Task,
    Trained,
    lawful,
    linear,
    only,
    parameter,
    train_twice,
)

if TYPE_CHECKING:
    import pytest


def own_softmax(scores: torch.Tensor) -> torch.Tensor:
    """No function that is known."""
    powers = scores.exp()
    return powers / powers.sum(dim=-1, keepdim=True)


class SelfAttention(Made):
    """Known by its name."""


class ConvAttention(Made):
    """Known by its name."""


def self_attention() -> Made:
    """Attention with a softmax that is written out, too."""

    def run(model: Any, hidden: torch.Tensor) -> Any:
        query, key, value = model.attend(hidden).chunk(3, dim=-1)
        return own_softmax(query @ key.transpose(-2, -1)) @ value

    return SelfAttention(run, attend=nn.Linear(WIDTH, 3 * WIDTH))


def multiply(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product that no hook sees."""
    return torch.einsum("...i,io->...o", hidden, weight)


def mixed() -> Made:
    """A layer with a hand-written attention, and a product with a parameter of its own."""
    return Made(
        lambda layer, hidden: multiply(layer.norm(layer.attention(hidden)), layer.gate)[..., :WIDTH],
        attention=self_attention(),
        norm=nn.LayerNorm(WIDTH),
        gate=parameter(WIDTH, 2 * WIDTH),
    )


def tied() -> Made:
    """Two such layers with an embedding before them, whose weight the output layer has, too."""

    def run(model: Any, hidden: torch.Tensor) -> Any:
        return model.head(model.layers(hidden + model.positions(torch.arange(LENGTH))))

    words, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = words.weight
    return Made(
        run, positions=nn.Embedding(LENGTH, WIDTH), layers=nn.Sequential(mixed(), mixed()), tied=words, head=head
    )


def conv_attention() -> Made:
    """Attention as diffusion models write it, with convolutions of width 1."""

    def run(model: Any, hidden: torch.Tensor) -> Any:
        query, key, value = model.attend(hidden.transpose(-2, -1)).chunk(3, dim=1)
        return own_softmax(query.transpose(-2, -1) @ key) @ value.transpose(-2, -1)

    return ConvAttention(run, attend=nn.Conv1d(WIDTH, 3 * WIDTH, 1))


def uncalled() -> Made:
    """Layers that are called, used without a call, tied to one that is called, and not used at all."""
    layers = {name: linear(bias=False) for name in ("called", "used", "tied", "unused")}
    layers["tied"].weight = layers["called"].weight
    return Made(lambda model, hidden: multiply(model.called(hidden), model.used.weight), **layers)


def grouped() -> Made:
    """Experts in one product, with weights in another dtype, as large trainings compute them."""

    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        tokens = model.before(hidden).flatten(0, 1)
        offsets = torch.tensor([4, 4, len(tokens)], dtype=torch.int32)
        weights = model.experts.bfloat16().transpose(-2, -1)
        return torch._grouped_mm(tokens.bfloat16(), weights, offs=offsets)

    return Made(run, before=linear(), experts=parameter(3, WIDTH, WIDTH))


def said_of(trained: Trained) -> dict[str, str]:
    [status, *_] = trained.run.status()
    return status.silent_sites.get(0, {})


def test_what_no_hook_sees_is_named_with_its_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = train_twice(Task(make=tied), tmp_path / "run")
    attend, gate, head = 2 * 3 * WIDTH * WIDTH, 2 * 2 * WIDTH * WIDTH, VOCABULARY * WIDTH
    total = attend + gate + head + LENGTH * WIDTH
    said = said_of(trained)
    assert set(said) == {"layers.*.gate (Made)", "layers.*.attention (SelfAttention)"}
    assert said["layers.*.gate (Made)"] == f"no hook sees it: {100 * gate // total} % of the model's weights"
    assert "docs/roles.md" in said["layers.*.attention (SelfAttention)"]
    text = capsys.readouterr().err
    assert f"hooks see {100 * (attend + head) // total} % of the model's weights (2 % are left out by" in text
    assert "warning: not recorded: layers.*.gate (Made)" in text


def test_a_layer_that_is_not_called_does_not_count_as_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = train_twice(Task(make=uncalled), tmp_path / "run")
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
    model = uncalled()
    with Capture(tmp_path / "run", model=model, min_iterations=1, advance_on="step") as capture:
        model(torch.randn(BATCH, LENGTH, WIDTH)).sum().backward()
        assert model.get_parameter("used.weight")._backward_hooks
        capture.step()
        assert not any(one._backward_hooks for one in model.parameters())


def test_attention_among_convolutions_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make = lambda: nn.Sequential(linear(), conv_attention(), conv_attention())  # noqa: E731
    trained = train_twice(Task(make=make), tmp_path / "run")
    [(part, reason)] = ((part, reason) for part, reason in said_of(trained).items() if "(ConvAttention)" in part)
    assert part == "* (ConvAttention)"
    assert "docs/roles.md" in reason
    assert f"not recorded: {part}: {reason}" in capsys.readouterr().err


def test_attention_that_did_not_run_is_not_named(tmp_path: Path) -> None:
    make = lambda: Made(lambda model, hidden: model.first(hidden), first=linear(), attention=conv_attention())  # noqa: E731
    assert not any("(ConvAttention)" in part for part in said_of(train_twice(Task(make=make), tmp_path / "run")))


def test_a_list_of_parts_that_is_cut_says_how_many_more_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"part_{letter}" for letter in "abcdefg"]

    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        hidden = model.first(hidden)
        for name in names:
            hidden = multiply(hidden, getattr(model, name))
        return hidden

    make = lambda: Made(run, first=linear(bias=False), **{name: parameter() for name in names})  # noqa: E731
    trained = train_twice(Task(make=make), tmp_path / "run")
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning: not recorded" in line]
    assert len(warned) == 5 + 1
    assert warned[-1] == (
        "ranktape: warning: not recorded: 2 more parts of the model, which hold 25 % of the model's weights: "
        "'ranktape status' lists them"
    )
    assert len(said_of(trained)) == 7


def test_of_attention_that_is_seen_or_not_asked_for_nothing_is_said(tmp_path: Path) -> None:
    model = nn.Sequential(self_attention())
    with Capture(tmp_path / "run", model=model, select={"layer_type": ("linear",)}, advance_on="step") as capture:
        model(torch.randn(BATCH, LENGTH, WIDTH)).sum().backward()
        capture.step()
    [status] = open_run(tmp_path / "run").status()
    assert not status.silent_sites


def test_a_model_that_comes_later_counts_from_then_on(tmp_path: Path) -> None:
    first, second = linear(), nn.Sequential(grouped(), nn.Bilinear(WIDTH, WIDTH, WIDTH))
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
    run = lawful(Task(make=grouped), tmp_path / "run").run
    record = only(run, iteration=0, module="experts", tensor_name="grad_weight")
    assert (record.shape, str(record.dtype), record.layout) == ((3, WIDTH, WIDTH), "bfloat16", "EIO")


def test_a_rank_whose_shards_have_no_elements_is_seen() -> None:
    frame = Frame("layer", nn.Linear(1, 1), -1)
    frame.module.weight = nn.Parameter(torch.empty(0, 1))
    found = find_coverage([frame], visibility=lambda *_: Visibility.IDLE, attending=(), sources=())
    assert found.text() == "hooks see 100 % of the model's weights"
