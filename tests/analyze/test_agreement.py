"""Does what a layer computed agree with its operands in every type, and does nothing else?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from ranktape.analyze.numerics.attention import ATTENTION_PRODUCTS, CAUSAL, FULL, AttentionForm, attention_products
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS
from tests.analyze.agreement import Agreement, attention_agreements, linear_agreements

Tensors = dict[str, torch.Tensor]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TOKENS, INPUTS, OUTPUTS = 300, 96, 64


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(
    dtype: torch.dtype, *, is_autocast: bool = False, is_hard: bool = False, seed: int = 0
) -> tuple[Tensors, Tensors, torch.Tensor]:
    """What a layer computed with, what it gave, and its bias; hard: means far from 0, and channels far above others."""
    x, weight = draw(TOKENS, INPUTS, seed=seed), draw(OUTPUTS, INPUTS, seed=seed + 1) / 10
    if is_hard:
        x = x + 3
        x[:, 5] *= 1000
    wide = torch.float32 if is_autocast else dtype
    leaves = [one.to(wide).requires_grad_() for one in (x, weight)]
    bias, grad = draw(OUTPUTS, seed=seed + 2).to(wide), draw(TOKENS, OUTPUTS, seed=seed + 3).to(dtype) / 1000
    with torch.autocast("cpu", dtype=dtype, enabled=is_autocast):
        output = F.linear(leaves[0], leaves[1], bias)
    output.backward(grad)
    operands = {"input": leaves[0].detach(), "weight": leaves[1].detach(), "grad_output": grad}
    grads = [one.grad for one in leaves]
    assert grads[0] is not None
    assert grads[1] is not None
    return operands, {"output": output.detach(), "grad_input": grads[0], "grad_weight": grads[1]}, bias


@pytest.mark.parametrize("is_hard", [False, True])
@pytest.mark.parametrize(
    ("dtype", "is_autocast"), [*((dtype, False) for dtype in DTYPES), (torch.bfloat16, True), (torch.float16, True)]
)
def test_what_a_linear_layer_computed_agrees(dtype: torch.dtype, is_autocast: bool, is_hard: bool) -> None:  # noqa: FBT001  (a parameter)
    operands, recorded, bias = linear(dtype, is_autocast=is_autocast, is_hard=is_hard)
    found = linear_agreements(operands, recorded, compute_dtype=dtype, bias=bias)
    assert [one.product for one in found] == list(PRODUCTS)
    assert max(one.deviation for one in found) < 0.7
    assert not any(one.is_tf32 for one in found)
    assert [one.num_elements for one in found] == [recorded[name].numel() for name in PRODUCTS]
    worst = max(one.relative_error for one in found)
    assert worst < 2 * torch.finfo(dtype).eps
    [output] = linear_agreements(operands, {"output": recorded["output"]}, compute_dtype=dtype)
    assert not output.is_agreed, "the bias is missing"


def moved(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, Tensors], None]:
    def plant(operands: Tensors, recorded: Tensors) -> None:
        of = operands if name in operands else recorded
        of[name] = change(of[name])

    return plant


FAULTS: dict[str, tuple[Callable[[Tensors, Tensors], None], set[str]]] = {
    "another microbatch": (moved("input", lambda x: draw(*x.shape, seed=9).to(x)), {"output", "grad_weight"}),
    "one token in the place of another": (moved("input", lambda x: x.roll(1, 0)), {"output", "grad_weight"}),
    "a weight of the step before": (
        moved("weight", lambda w: (w.double() + draw(*w.shape, seed=9) / 1000).to(w)),
        {"output", "grad_input"},
    ),
    "a transposed weight": (
        moved("weight", lambda w: w.T.reshape(w.shape).contiguous()),
        {"output", "grad_input"},
    ),
    "a gradient of another layer": (moved("grad_weight", lambda w: draw(*w.shape, seed=9).to(w)), {"grad_weight"}),
    "a gradient that was added up twice": (moved("grad_weight", lambda w: 2 * w), {"grad_weight"}),
    "one wrong element": (moved("output", lambda y: y.index_fill(0, torch.tensor([7]), 50.0)), {"output"}),
    "a NaN that nothing gave": (
        moved("grad_input", lambda g: g.index_fill(0, torch.tensor(3), math.nan)),
        {"grad_input"},
    ),
}


def test_what_it_did_not_compute_does_not() -> None:
    for dtype, fault in itertools.product(DTYPES, FAULTS):
        plant, touched = FAULTS[fault]
        operands, recorded, bias = linear(dtype)
        plant(operands, recorded)
        found = linear_agreements(operands, recorded, compute_dtype=dtype, bias=bias)
        assert {one.product for one in found if not one.is_agreed} == touched


def test_nan_inf_and_overflow_agree_with_themselves() -> None:
    operands, _, bias = linear(torch.float16)
    operands["input"][3, 2], operands["input"][4, 1], operands["input"][5] = math.nan, math.inf, 60000.0
    output = F.linear(operands["input"], operands["weight"], bias)
    assert output[5].isinf().any()
    [found] = linear_agreements(operands, {"output": output}, compute_dtype=torch.float16, bias=bias)
    assert found.deviation < 0.5
    output[3] = 0.0
    [found] = linear_agreements(operands, {"output": output}, compute_dtype=torch.float16, bias=bias)
    assert found.deviation == math.inf


def test_nothing_agrees_with_nothing_and_no_product_is_made_up() -> None:
    operands, recorded, bias = linear(torch.bfloat16)
    empty = {"input": operands["input"][:0], "weight": operands["weight"], "grad_output": operands["grad_output"][:0]}
    results = {"output": recorded["output"][:0], "grad_weight": torch.zeros_like(recorded["grad_weight"])}
    found = linear_agreements(empty, results, compute_dtype=torch.bfloat16, bias=bias)
    assert [(one.product, one.deviation, one.relative_error) for one in found] == [
        ("output", 0.0, 0.0),
        ("grad_weight", 0.0, 0.0),
    ]
    del operands["weight"]
    found = linear_agreements(operands, recorded, compute_dtype=torch.bfloat16)
    assert [one.product for one in found] == ["grad_weight"]


def test_operands_that_a_device_rounded_to_tf32_are_said_to_be() -> None:
    operands, _, _ = linear(torch.float32)
    x, weight = ((one.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32) for one in list(operands.values())[:2])
    [found] = linear_agreements(operands, {"output": x @ weight.T}, compute_dtype=torch.float32)
    assert found.is_agreed
    assert found.is_tf32


def test_sums_whose_parts_are_rounded_by_each_rank_agree() -> None:
    x, weight = draw(512, 1024, seed=0).bfloat16(), draw(256, 1024, seed=1).bfloat16()
    parts = [x[:, part : part + 128] @ weight[:, part : part + 128].T for part in range(0, 1024, 128)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    [found] = linear_agreements(
        {"input": x, "weight": weight}, {"output": total}, compute_dtype=torch.bfloat16, num_parts=8
    )
    assert found.is_agreed


def attention(
    dtype: torch.dtype, *, is_causal: bool, is_stepwise: bool, spread: float
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    shapes = {"query": (2, 4, 50, 32), "key": (2, 2, 50, 32), "value": (2, 2, 50, 32), "grad_output": (2, 4, 50, 32)}
    operands = {name: draw(*shape, seed=seed).to(dtype) for seed, (name, shape) in enumerate(shapes.items())}
    operands["query"] *= spread
    query, key, value = leaves = [operands[name].clone().requires_grad_() for name in ("query", "key", "value")]
    if is_stepwise:
        wide_key, wide_value = (one.repeat_interleave(2, 1) for one in (key, value))
        scores = query @ wide_key.mT * 32**-0.5
        if is_causal:
            scores = scores + torch.full((50, 50), torch.finfo(dtype).min, dtype=dtype).triu(1)
        weights = scores.softmax(-1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        output = weights @ wide_value
    else:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
    grads = torch.autograd.grad(output, leaves, operands["grad_output"])
    return operands, dict(zip(ATTENTION_PRODUCTS, (output.detach(), *grads), strict=True))


@pytest.mark.parametrize("spread", [1.0, 8.0])
@pytest.mark.parametrize("is_stepwise", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_attention_computed_agrees_and_with_another_mask_does_not(
    dtype: torch.dtype,
    is_stepwise: bool,  # noqa: FBT001  (a parameter)
    spread: float,
) -> None:
    for is_causal, form, other in ((True, CAUSAL, FULL), (False, FULL, CAUSAL)):
        operands, recorded = attention(dtype, is_causal=is_causal, is_stepwise=is_stepwise, spread=spread)
        found = attention_agreements(operands, recorded, form=form, compute_dtype=dtype)
        assert [one.product for one in found] == list(ATTENTION_PRODUCTS)
        assert max(one.deviation for one in found) < 0.5
        found = attention_agreements(operands, recorded, form=other, compute_dtype=dtype)
        assert min(one.deviation for one in found) > 1.5


def test_attention_of_other_operands_does_not_agree() -> None:
    cases: list[tuple[str, set[str]]] = [
        ("key", set(ATTENTION_PRODUCTS)),
        ("value", {"output", "grad_query", "grad_key"}),
        ("grad_output", set(ATTENTION_PRODUCTS) - {"output"}),
    ]
    for name, touched in cases:
        operands, recorded = attention(torch.bfloat16, is_causal=True, is_stepwise=False, spread=1.0)
        operands[name] = operands[name].roll(1, 2)
        found = attention_agreements(operands, recorded, form=CAUSAL, compute_dtype=torch.bfloat16)
        assert {one.product for one in found if not one.is_agreed} == touched
        assert attention_agreements(operands, {}, form=CAUSAL, compute_dtype=torch.bfloat16) == []


def test_queries_that_see_no_key_do_not_take_the_noise_of_the_others_away() -> None:
    form = AttentionForm(after=0, shift=-10)
    operands, _ = attention(torch.bfloat16, is_causal=True, is_stepwise=False, spread=1.0)
    recorded = attention_products(operands, form=form)
    found = attention_agreements(operands, recorded, form=form, compute_dtype=torch.bfloat16)
    assert max(one.deviation for one in found) < 0.15


def test_nan_in_attention_agrees_with_nan() -> None:
    operands, _ = attention(torch.bfloat16, is_causal=True, is_stepwise=False, spread=1.0)
    operands["value"][0, 0, 20] = math.nan
    query, key, value = (operands[name] for name in ("query", "key", "value"))
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def agreement() -> Agreement:
        [found] = attention_agreements(operands, {"output": output}, form=CAUSAL, compute_dtype=torch.bfloat16)
        return found

    assert agreement().is_agreed
    output[1, 0, 0] = math.nan
    assert agreement().deviation == math.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_which_rounding_leaves_nothing_agree_all_the_same(dtype: torch.dtype) -> None:
    """Values far from 0 and queries that look at all keys alike: what the softmax gives back is what it subtracts."""
    query, key, value = (
        (spread * draw(1, 2, 512, 64, seed=seed) + mean).to(dtype).requires_grad_()
        for seed, (spread, mean) in enumerate([(0.01, 0), (1, 2), (0.1, 5)])
    )
    output, grad = F.scaled_dot_product_attention(query, key, value, is_causal=True), draw(1, 2, 512, 64, seed=3)
    grads = torch.autograd.grad(output, (query, key, value), grad.to(dtype))
    recorded = dict(zip(ATTENTION_PRODUCTS, (output, *grads), strict=True))
    operands = {"query": query, "key": key, "value": value, "grad_output": grad.to(dtype)}
    found = attention_agreements(operands, recorded, form=CAUSAL, compute_dtype=dtype)
    assert max(one.relative_error for one in found) > 0.1
    assert max(one.deviation for one in found) < 0.2
