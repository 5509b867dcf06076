"""Is attention that a program writes out as products and a softmax recorded, and nothing else called attention?"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranktape.analyze.cli import cli
from ranktape.capture import Capture
from ranktape.capture.hooks.written_attention import orders_of
from ranktape.storage import open_run
from tests.capture.trainings import (
    BATCH,
    LENGTH,
    WIDTH,
    Made,
    Task,
    attentions,
    captured,
    lawful,
    linear,
    missing,
    only,
    parameter,
    products,
    train_twice,
)
from tests.capture.verify import verify_run

HEADS = 4
DEPTH = WIDTH // HEADS
SCALE = DEPTH**-0.5

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of query, key and value [B, H, T, D] that returns the output in this layout."""

MASK = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def operators(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = (query @ key.transpose(-2, -1) * SCALE).masked_fill(~MASK, -math.inf)
    return F.dropout(F.softmax(scores, dim=-1), 0.0) @ value


def scaled_before(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(input=query * SCALE, other=key.mT)
    weights = torch.softmax(scores.float(), -1).to(query.dtype)
    return weights.matmul(value)


def batched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    flat = [part.flatten(0, 1) for part in (query, key, value)]
    bias = torch.zeros(LENGTH, LENGTH)
    scores = torch.baddbmm(bias, flat[0], flat[1].transpose(1, 2), alpha=SCALE)
    weights = nn.Softmax(dim=-1)(scores.unflatten(0, (-1, HEADS)).masked_fill(~MASK, -math.inf))
    return torch.bmm(weights.flatten(0, 1), flat[2]).unflatten(0, (-1, HEADS))  # type: ignore[no-any-return]


def einsum(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    tokens_first = [part.transpose(1, 2) for part in (query, key, value)]
    scores = torch.einsum("bqhd, bkhd -> bhqk", tokens_first[0], tokens_first[1]) * SCALE
    output = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=3), tokens_first[2])
    return output.transpose(1, 2)


def head_by_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    heads = zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)
    return torch.stack([torch.softmax(one @ two.mT * SCALE, -1) @ three for one, two, three in heads], dim=1)


def attention(attend: Attend, **parts: nn.Module) -> Made:
    """Projects the input to query, key and value, attends, and projects the output."""

    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        parts = (part(hidden).unflatten(-1, (HEADS, DEPTH)).transpose(1, 2) for part in (model.q, model.k, model.v))
        return model.out(attend(*parts).transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    return Made(run, q=linear(), k=linear(), v=linear(), out=linear(), **parts)


def two_of(attend: Attend) -> nn.Module:
    return nn.Sequential(linear(), attention(attend), attention(attend))


@pytest.mark.support(framework="PyTorch", parallelism="one process", features=("attention", "unchanged"))
@pytest.mark.parametrize(
    ("attend", "calls", "scale"),
    [
        pytest.param(operators, 1, None, id="operators"),
        pytest.param(scaled_before, 1, 1.0, id="scaled_before"),
        pytest.param(batched, 1, None, id="batched"),
        pytest.param(einsum, 1, None, id="einsum"),
        pytest.param(head_by_head, HEADS, None, id="head_by_head"),
    ],
)
def test_each_way_to_write_attention_is_recorded(
    tmp_path: Path, attend: Attend, calls: int, scale: float | None
) -> None:
    trained = train_twice(Task(make=functools.partial(two_of, attend)), tmp_path / "run")
    run = trained.run
    assert trained.is_equal, "the training is not the same"
    assert not missing(run)
    counts = products(9, 8) | attentions(2 * calls)
    assert verify_run(run, scale=scale) == {name: 2 * count for name, count in counts.items()}
    records = run.select(layer_type="attention", iteration=0)
    assert Counter(records.column("module")) == {"1": 8 * calls, "2": 8 * calls}
    queries = records.select(tensor_name="query")
    assert all(query.metadata == {"written_out": True} for query in queries)
    shape = (BATCH, HEADS, LENGTH, DEPTH)
    assert all(math.prod(query.shape) * calls == math.prod(shape) for query in queries)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_recomputed_attention_is_recorded_once(*, tmp_path: Path, is_reentrant: bool) -> None:
    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(model.inner, model.first(hidden), use_reentrant=is_reentrant)  # type: ignore[no-any-return]

    task = Task(make=lambda: Made(run, first=linear(), inner=attention(operators)))
    lawful(task, tmp_path / "run", products(5, 4) | attentions(1))


def test_attention_under_autocast_has_the_dtype_of_its_products(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().square().mean()  # type: ignore[no-any-return]

    trained = train_twice(Task(make=lambda: attention(operators), loss=loss), tmp_path / "run")
    assert trained.is_equal
    query = only(trained.run, iteration=0, tensor_name="query")
    assert (query.dtype, query.compute_dtype) == ("bfloat16", "bfloat16")
    assert len(trained.run.select(iteration=0, layer_type="attention")) == 8


def test_a_parameter_that_autocast_casts_once_keeps_its_gradient(tmp_path: Path) -> None:
    """Learned queries are used twice, so that autocast adds their gradients before it casts them back."""

    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        keys = model.k(hidden)
        once = (model.queries @ keys.mT).softmax(-1) @ model.v(hidden)
        return once + (model.queries @ keys.mT.tanh()).softmax(-1) @ model.v(hidden)  # type: ignore[no-any-return]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().square().mean()  # type: ignore[no-any-return]

    make = lambda: Made(run, k=linear(), v=linear(), queries=parameter(LENGTH, WIDTH))  # noqa: E731
    trained = train_twice(Task(make=make, loss=loss), tmp_path / "run")
    assert trained.is_equal, "the training is not the same"
    names = trained.run.select(iteration=0, layer_type="attention").column("tensor_name")
    assert Counter(names)["query"] == Counter(names)["grad_key"] == 2
    reasons = {place.split()[-1]: reason for place, reason in missing(trained.run).items()}
    assert reasons["grad_query"].startswith("autocast casts it once for all its uses")


def test_a_sparse_operand_is_left_alone(tmp_path: Path) -> None:
    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        graph = torch.eye(LENGTH).to_sparse().requires_grad_()
        scores = graph @ model.first(hidden)[0]
        return torch.softmax(scores, -1) @ hidden.mT

    trained = lawful(Task(make=lambda: Made(run, first=linear())), tmp_path / "run", {"output": 1, "grad_weight": 1})
    assert not trained.run.select(layer_type="attention")


def test_generation_without_gradients_is_recorded(tmp_path: Path) -> None:
    model = attention(operators).eval()
    with torch.no_grad(), Capture(tmp_path / "run", model=model, select="mode=eval", min_iterations=1):
        model(torch.randn(BATCH, LENGTH, WIDTH))
    run = open_run(tmp_path / "run")
    assert verify_run(run)["attention output"] == 1
    assert not missing(run)


def similarity(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return value * torch.softmax(query @ key.mT, -1).mean(-1, keepdim=True)


def other_softmax(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (query @ key.mT).softmax(dim=-2) @ value


def difference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    one, two = query @ key.mT, key @ query.mT
    return (one.softmax(-1) - two.softmax(-1)) @ value


@pytest.mark.parametrize("attend", [similarity, other_softmax, difference], ids=lambda one: str(one.__name__))
def test_other_products_are_not_called_attention(tmp_path: Path, attend: Attend) -> None:
    trained = lawful(Task(make=functools.partial(attention, attend)), tmp_path / "run", products(4, 1))
    assert not trained.run.select(layer_type="attention")


def test_a_product_of_a_tensor_with_itself_is_left_alone(tmp_path: Path) -> None:
    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        square = model.first(hidden)[:, :, :LENGTH]
        return torch.softmax(square @ square, -1) @ hidden

    trained = lawful(Task(make=lambda: Made(run, first=linear())), tmp_path / "run", {"output": 1, "grad_weight": 1})
    assert not trained.run.select(layer_type="attention")


def test_an_operand_that_was_written_to_meanwhile_is_missing_with_the_reason(tmp_path: Path) -> None:
    def overwriting(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scores = query @ key.mT
        query.zero_()
        return scores.softmax(-1) @ value

    model = attention(overwriting).eval()
    with torch.no_grad(), Capture(tmp_path / "run", model=model, select="mode=eval", min_iterations=1):
        model(torch.randn(BATCH, LENGTH, WIDTH))
    run = open_run(tmp_path / "run")
    reason = "the program wrote to it before the last product of the attention"
    assert {place.split()[-1]: why for place, why in missing(run).items()} == {"query": reason}
    assert set(run.select(layer_type="attention").column("tensor_name")) == {"key", "value", "output"}


def test_attention_that_is_not_selected_is_not_recorded(tmp_path: Path) -> None:
    task = Task(make=lambda: attention(operators), options={"select": "layer_type=linear"})
    lawful(task, tmp_path / "run", products(4, 1))


@pytest.mark.parametrize("attend", [operators, scaled_before], ids=lambda one: str(one.__name__))
def test_replay_finds_the_scale_and_the_mask(tmp_path: Path, attend: Attend) -> None:
    captured(attention(attend), tmp_path / "run", shape=(BATCH, LENGTH, WIDTH))
    arguments = ["replay", str(tmp_path / "run"), "--recipe", "mxfp8", "--attention", "--json"]
    document = json.loads(CliRunner().invoke(cli, arguments).stdout)
    own = {
        row["product"]: row["sqnr"] for row in document["rows"] if (row["module"], row["recipe"]) == ("", "recorded")
    }
    assert set(own) == {"output", "grad_query", "grad_key", "grad_value"}
    assert min(own.values()) > 100, own


@pytest.mark.parametrize(
    ("equation", "orders"),
    [
        ("bhid,bhjd->bhij", ((0, 1, 2, 3), (0, 1, 3, 2), (0, 1, 2, 3))),
        ("b q h d, b k h d -> b h q k", ((0, 2, 1, 3), (0, 2, 3, 1), (0, 1, 2, 3))),
        ("bhqk,bkhd->bqhd", ((0, 1, 2, 3), (0, 2, 1, 3), (0, 2, 1, 3))),
        ("id,jd->ij", ((0, 1), (1, 0), (0, 1))),
        ("...id,...jd->...ij", None),
        ("bid,bjd", None),
        ("bi,bj->bij", None),
        ("bii,bij->bij", None),
        ("bid,bjd,bk->bij", None),
        ("bidc,bjd->bij", None),
        ("bidc,bjdc->bij", None),
        ("bhid,bhjd->hij", None),
    ],
)
def test_equations_are_read_as_products_of_matrices(equation: str, orders: object) -> None:
    assert orders_of(equation) == orders
