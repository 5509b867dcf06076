"""Does the comparison of a run with itself agree where a capture is right, and say which tensor is wrong where not?"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ranktape.analyze import fake_quantize
from ranktape.analyze.numerics.attention import ATTENTION_PRODUCTS
from ranktape.analyze.numerics.error_sums import ErrorSums
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS
from ranktape.analyze.numerics.recipes.words import parse_recipes
from ranktape.analyze.replays.replayed import Replayed, replay_calls
from ranktape.capture import Capture
from ranktape.capture.writing.counting import reduce_to
from ranktape.storage import Records, Run, open_run
from ranktape.storage.format.record_info import RecordInfo
from tests.analyze.recomputed import recompute
from tests.analyze.replay_runs import call_arrays, call_tensors, recorded_sqnr, trained
from tests.analyze.runs import Tensor, store
from tests.capture.parallel_models import OPTIONS, batch_of, make_model
from tests.exhaustive import exhaustive_but

ATTENTION = "layers.0.attention"
QUERY = "layers.0.attention.query"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two microbatches and two iterations of a transformer with two attentions, in bfloat16 under autocast."""
    return trained(tmp_path_factory.mktemp("plain"), microbatches=2, is_autocast=True)


def tensors_of(run: Run) -> list[Tensor]:
    return [(record.read(), dataclasses.replace(record.info, placement=None)) for record in run.select()]


def results(run: Run, *layer_types: str) -> Records:
    names = [*PRODUCTS, *ATTENTION_PRODUCTS]
    return run.select(layer_type=layer_types or ("linear", "attention"), tensor_name=names)


def wrong(run: Run) -> set[tuple[str, str, int, int]]:
    """Module, product, iteration and microbatch of what does not agree."""
    return {
        (one.field("module"), one.product, one.field("iteration"), one.field("microbatch"))
        for one in recompute(run.select())
        if one.agreement is not None and not one.agreement.is_agreed
    }


def reasons(run: Run) -> Counter[str]:
    return Counter(one.reason for one in recompute(run.select()))


@pytest.mark.parametrize(
    ("recipe", "least"),
    [
        ({"kind": "plain"}, 120),
        ({"kind": "plain", "is_checkpointed": True}, 120),
        ({"kind": "plain", "is_autocast": True, "is_checkpointed": True}, 50),
        ({"kind": "moe"}, 120),
        ({"kind": "moe", "is_autocast": True}, 50),
        ({"kind": "llama", "is_autocast": True}, 50),
        ({"kind": "gpt2"}, 120),
    ],
)
@exhaustive_but("recipe0-120", "recipe2-50", reason="two trainings are in make test")
def test_what_trainings_recorded_agrees(tmp_path: Path, recipe: dict[str, Any], least: float) -> None:
    run = trained(tmp_path, microbatches=2, **recipe)
    found = list(recompute(run.select()))
    assert [one for one in found if one.agreement is not None and one.agreement.deviation > 0.8] == []
    assert {one.reason for one in found} == {""}
    kinds = Counter((one.field("layer_type"), one.product) for one in found)
    assert kinds["attention", "output"] == kinds["attention", "grad_key"] == 2 * 2 * 2
    assert len(found) == len(results(run))
    replayed = replay_calls(run.select(), [])
    assert not replayed.calls.left_out
    assert set(replayed.names) == {"recorded"}
    sqnr = recorded_sqnr(replayed)
    assert set(sqnr) == set(PRODUCTS)
    # Rounding to bfloat16 costs some 55 dB, adding up in another order in float32 140.
    assert min(sqnr.values()) > least


def test_every_recorded_result_is_accounted_for_once(plain: Run) -> None:
    found = list(recompute(plain.select()))
    names = Counter((one.key, one.product) for one in found)
    assert set(names.values()) == {1}
    assert len(names) == len(results(plain))
    assert wrong(plain) == set()
    assert {one.field("module") for one in recompute(plain.select(module=QUERY, iteration=1))} == {QUERY}


Choice = Callable[[RecordInfo], bool]


def exchange(tensors: list[Tensor], is_one: Choice, is_other: Choice) -> None:
    """Let two tensors have one another's values."""
    [one], [other] = ([place for place, (_, info) in enumerate(tensors) if own(info)] for own in (is_one, is_other))
    values = tensors[one][0], tensors[other][0]
    tensors[one], tensors[other] = (values[1], tensors[one][1]), (values[0], tensors[other][1])


def at(**fields: Any) -> Choice:
    known = {"iteration": 1, "microbatch": 1, "module": QUERY} | fields
    return lambda info: all(getattr(info, name) == value for name, value in known.items())


OUTPUT, KEY, OTHER = "layers.0.attention.output", "layers.0.attention.key", "layers.1.attention"

EXCHANGED: list[tuple[Choice, Choice, set[tuple[str, str, int, int]]]] = [
    # Another microbatch.
    (
        at(tensor_name="output", microbatch=0),
        at(tensor_name="output"),
        {(QUERY, "output", 1, 0), (QUERY, "output", 1, 1)},
    ),
    # A stale weight.
    (
        at(tensor_name="weight", microbatch=0, module=OUTPUT, iteration=0),
        at(tensor_name="weight", microbatch=0, module=OUTPUT),
        {(OUTPUT, product, *place) for product in ("output", "grad_input") for place in np.ndindex(2, 2)},
    ),
    # Another layer.
    (
        at(tensor_name="grad_weight", module=KEY),
        at(tensor_name="grad_weight", module=f"{OTHER}.key"),
        {(KEY, "grad_weight", 1, 1), (f"{OTHER}.key", "grad_weight", 1, 1)},
    ),
    # Key and value.
    (
        at(tensor_name="key", module=ATTENTION),
        at(tensor_name="value", module=ATTENTION),
        {(ATTENTION, product, 1, 1) for product in ATTENTION_PRODUCTS},
    ),
    # Another microbatch of attention.
    (
        at(tensor_name="grad_output", module=OTHER, microbatch=0),
        at(tensor_name="grad_output", module=OTHER),
        {(OTHER, product, 1, batch) for product in ATTENTION_PRODUCTS[1:] for batch in (0, 1)},
    ),
]  # fmt: skip


def test_what_is_in_another_tensors_place_and_a_transposed_weight_are_found(plain: Run, tmp_path: Path) -> None:
    tensors, turned = tensors_of(plain), f"{OTHER}.query"
    expected = {(turned, product, 1, batch) for product in ("output", "grad_input") for batch in (0, 1)}
    is_turned = at(tensor_name="weight", microbatch=0, module=turned)
    tensors = [(array.T.copy() if is_turned(info) else array, info) for array, info in tensors]
    for one, other, found in EXCHANGED:
        exchange(tensors, one, other)
        expected |= found
    assert wrong(store(tmp_path / "run", tensors)) == expected


def test_what_cannot_be_compared_is_said(plain: Run, tmp_path: Path) -> None:
    without = [one for one in tensors_of(plain) if one[1].tensor_name not in {"weight", "value"}]
    assert reasons(store(tmp_path / "without", without)) == {
        "no weight was recorded": len(plain.select(layer_type="linear", tensor_name=["output", "grad_input"])),
        "no value was recorded": len(results(plain, "attention")),
        "": len(plain.select(tensor_name="grad_weight")),
    }
    said = {"is_causal": True, "dropout": 0.1}
    dropped = [
        (array, dataclasses.replace(info, metadata=said) if info.tensor_name == "query" else info)
        for array, info in tensors_of(plain)
        if info.layer_type == "attention"
    ]
    found = reasons(store(tmp_path / "dropped", dropped))
    assert found == {"it uses random dropout (0.1)": len(results(plain, "attention"))}


def test_a_mask_that_was_not_said_is_taken_from_the_output(plain: Run, tmp_path: Path) -> None:
    tensors = [(array, dataclasses.replace(info, metadata=None)) for array, info in tensors_of(plain)]
    run = store(tmp_path / "run", tensors)
    assert wrong(run) == set()
    assert set(reasons(run)) == {""}
    without = [one for one in tensors if (one[1].layer_type, one[1].tensor_name) != ("attention", "output")]
    found = reasons(store(tmp_path / "without", without))
    assert found["neither its mask nor its output, from which the mask follows, was recorded"] == 3 * 2 * 2 * 2


def test_layers_that_quantise_are_compared_where_their_operands_were_recorded(tmp_path: Path) -> None:
    model = make_model("plain")
    fake_quantize(model, recipe="mxfp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path / "run", quant_type="mxfp8", min_iterations=1, **OPTIONS):
        model(batch_of("plain", step=0, data_rank=0, microbatch=0)).square().mean().backward()
        optimizer.step()
    found = list(recompute(open_run(tmp_path / "run").select(layer_type="linear")))
    quantised = [one for one in found if one.reason]
    assert {one.reason for one in quantised} == {"the layer quantised the operands of its gradients itself"}
    assert {one.product for one in quantised} == {"grad_input", "grad_weight"}
    outputs = [one.agreement for one in found if one.product == "output"]
    assert len(outputs) == 14
    assert all(one is not None and one.is_agreed for one in outputs)


@pytest.mark.parametrize(
    ("quant_type", "error", "reason"),
    [
        ("fp8", 0.05, "its operands are quantised inside of the layer (fp8)"),
        ("fp8", 1.0, ""),
        ("fp32", 0.05, ""),
    ],
)
def test_what_a_layer_quantises_inside_of_itself_is_no_fault_if_it_says_so(
    tmp_path: Path, quant_type: str, error: float, reason: str
) -> None:
    arrays = call_arrays()
    noise = np.random.default_rng(1).standard_normal(arrays["output"].shape).astype(np.float32)
    arrays["output"] = arrays["output"] + np.float32(error * arrays["output"].std()) * noise
    run = store(tmp_path / "run", call_tensors(arrays, quant_type=quant_type))
    [found] = (one for one in recompute(run.select()) if one.product == "output")
    assert found.reason == reason
    assert reason or (found.agreement is not None and not found.agreement.is_agreed)


def with_penalty(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A gradient penalty: the backward pass of the loss also goes through that of the slope."""
    given = batch.clone().requires_grad_()
    [slope] = torch.autograd.grad(model(given).sum(), given, create_graph=True)
    loss: torch.Tensor = model(batch).mean() + (slope.norm(dim=1) - 1).pow(2).mean()
    return loss


def packed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """What autograd saves is kept in bfloat16."""
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.bfloat16(), lambda one: one.float()):
        return model(batch).pow(2).mean()  # type: ignore[no-any-return]


def on_cpu(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Hooks of torch itself, which give back the same values."""
    with torch.autograd.graph.save_on_cpu():
        return model(batch).pow(2).mean()  # type: ignore[no-any-return]


OF_GRAPH = "a backward pass over gradients (create_graph=True) adds to those of its calls"
PACKED = "its backward pass uses tensors that saved_tensors_hooks of the training packed and unpacked"


@pytest.mark.parametrize(("loss_of", "reason"), [(with_penalty, OF_GRAPH), (packed, PACKED), (on_cpu, "")])
def test_what_a_training_computes_otherwise_is_unchecked_and_real_errors_are_found(
    tmp_path: Path, loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor], reason: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Capture(tmp_path / "run", model=model, min_iterations=2, max_iterations=2):
        for _ in range(2):
            loss_of(model, torch.randn(20, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    run = open_run(tmp_path / "run")
    assert wrong(run) == set()
    assert {OF_GRAPH, PACKED} & set(reasons(run)) == {reason} - {""}

    def doubled(name: str) -> set[tuple[str, str, int, int]]:
        is_one = at(module="0", microbatch=0, tensor_name=name)
        tensors = [(2 * array if is_one(info) else array, info) for array, info in tensors_of(run)]
        return wrong(store(tmp_path / name, tensors))

    assert ("0", "output", 1, 0) in doubled("output")
    # Without hooks of its own the training has gradients of its recorded operands, and nothing else.
    assert (("0", "grad_weight", 1, 0) in doubled("grad_weight")) == (not reason)


def test_a_mask_that_several_forms_give_where_nothing_is_finite_is_not_guessed(plain: Run, tmp_path: Path) -> None:
    tensors = [
        (np.full_like(array, np.nan) if is_nan else array, dataclasses.replace(info, metadata=None))
        for array, info in tensors_of(plain)
        for is_nan in [info.layer_type == "attention" and info.tensor_name != "grad_output"]
    ]
    run = store(tmp_path / "run", tensors)
    assert not {one for one in wrong(run) if one[0] == ATTENTION}
    assert "several masks give the finite part of its output, and its mask was not recorded" in reasons(run)


def test_damaged_values_are_a_reason_and_no_end(tmp_path: Path) -> None:
    run = store(tmp_path / "run", call_tensors(call_arrays()))
    [shard] = tmp_path.glob("run/*/*/*/stack_float32_32x8*/c.*")
    shard.write_bytes(shard.read_bytes()[:-1])
    found = {one.product: one.reason for one in recompute(run.select())}
    assert set(found) == set(PRODUCTS)
    assert all("stack_float32_32x8" in reason for reason in found.values()), found


def test_nothing_gives_nothing(plain: Run) -> None:
    assert list(recompute(plain.select().where("layer_type == 'none'"))) == []
    assert list(recompute(plain.select(tensor_name="weight"))) == []


def replayed_attention(run: Run) -> Replayed:
    return replay_calls(run.select(layer_type="attention"), parse_recipes("mxfp8,nvfp4"), has_attention=True)


def test_attention_is_replayed_with_recipes_where_it_is_asked_for(plain: Run) -> None:
    assert len(replay_calls(plain.select(layer_type="attention"), parse_recipes("mxfp8")).places) == 0
    replayed = replayed_attention(plain)
    assert replayed.calls.left_out == ()
    groups = {(one.key["product"], one.key["recipe"]): one for one in replayed.groups(["product", "recipe"])}
    assert list(groups) == [
        (product, recipe) for product in ATTENTION_PRODUCTS for recipe in ("recorded", "mxfp8", "nvfp4")
    ]
    for product in ATTENTION_PRODUCTS:
        levels = [groups[product, recipe].exact.sqnr or 0.0 for recipe in ("recorded", "mxfp8", "nvfp4")]
        assert all(level > least for level, least in zip(levels, (44, 22, 10), strict=True)), (product, levels)
        assert levels == sorted(levels, reverse=True)
        assert groups[product, "mxfp8"].num_calls == 2 * 2 * 2
        assert isinstance(groups[product, "mxfp8"].recorded, ErrorSums)


def test_attention_is_replayed_where_a_result_was_not_recorded_or_not_with_its_values(
    plain: Run, tmp_path: Path
) -> None:
    kept = {"grad_value": "statistics"}
    tensors = [
        reduce_to(kept.get(info.tensor_name, "values"), array, info=info) or (array, info)
        for array, info in tensors_of(plain)
        if info.layer_type == "attention" and info.tensor_name != "grad_key"
    ]
    groups, expected = (
        {(one.key["product"], one.key["recipe"]): one for one in replayed_attention(run).groups(["product", "recipe"])}
        for run in (store(tmp_path / "run", tensors), plain)
    )
    assert expected.keys() - groups.keys() == {("grad_key", "recorded"), ("grad_value", "recorded")}
    for (product, recipe), one in groups.items():
        assert one.exact == expected[product, recipe].exact
        is_compared = product not in {"grad_key", "grad_value"}
        assert one.recorded == (expected[product, recipe].recorded if is_compared else ErrorSums())


def test_attention_that_is_not_known_is_left_out_with_the_reason(plain: Run, tmp_path: Path) -> None:
    tensors = [
        (array, dataclasses.replace(info, metadata={"cap": 30.0}) if info.tensor_name == "query" else info)
        for array, info in tensors_of(plain)
        if info.layer_type == "attention" and info.iteration == 0
    ]
    replayed = replayed_attention(store(tmp_path / "run", tensors))
    assert len(replayed.places) == 0
    assert {one.reason for one in replayed.calls.left_out} == {"its scores are capped (cap 30.0)"}
    assert len(replayed.calls.left_out) == 2 * 2 * len(ATTENTION_PRODUCTS)
