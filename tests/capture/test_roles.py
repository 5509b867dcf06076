"""Is every layer of every framework recorded as what it computed, once, and is the training the same bit for bit?

Outputs and gradients are computed again from the recorded inputs (`verify.py`).
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from ranktape.capture import CallOption, Capture, FunctionRole, ModuleRole, register_role, unregister_role
from ranktape.capture.roles.known import quantising, registered_roles, role_of
from ranktape.capture.tensors.parts import tensor_in
from ranktape.errors import UsageError
from ranktape.storage import open_run
from tests.capture.models import Multihead
from tests.capture.trainings import (
    BATCH,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Made,
    Task,
    attentions,
    lawful,
    linear,
    missing,
    only,
    parameter,
    products,
    train_twice,
)
from tests.capture.verify import recomputed, verify_run


@pytest.mark.support(framework="PyTorch", parallelism="one process", features=("linear", "attention", "unchanged"))
@pytest.mark.parametrize(
    ("needs_weights", "is_crossed", "width", "num_products"),
    [(False, False, None, 3), (True, False, None, 3), (True, True, None, 5), (True, True, 12, 6), (False, True, 12, 6)],
)
def test_multihead_attention_is_seen_with_and_without_its_weights(
    tmp_path: Path, *, needs_weights: bool, is_crossed: bool, width: int | None, num_products: int
) -> None:
    task = Task(make=lambda: Multihead(needs_weights=needs_weights, is_crossed=is_crossed, width=width))
    run = lawful(task, tmp_path / "run").run
    counts = verify_run(run)
    assert attentions(2).items() <= counts.items()
    assert counts["output"] == counts["grad_weight"] == 2 * num_products
    separate = {"attention.q_proj", "attention.k_proj", "attention.v_proj"}
    halves = {"attention.in_proj[0:16]", "attention.in_proj[16:48]"}
    names = {"attention.out_proj", *(separate if width else halves if is_crossed else {"attention.in_proj"})}
    assert names <= set(run.select(layer_type="linear").column("module"))


def adapted() -> Made:
    """A frozen layer with a trained one of low rank beside it, as PEFT's LoRA wraps it."""
    return Made(
        lambda layer, hidden: layer.base_layer(hidden) + layer.lora_B(layer.lora_A(hidden)),
        base_layer=linear().requires_grad_(requires_grad=False),
        lora_A=nn.Linear(WIDTH, 4, bias=False),
        lora_B=nn.Linear(4, WIDTH, bias=False),
    )


@pytest.mark.support(framework="PyTorch", parallelism="one process", features=("linear", "unchanged"))
def test_a_frozen_layer_has_a_grad_input_and_no_grad_weight(tmp_path: Path) -> None:
    counts = {"output": 6, "grad_weight": 4, "grad_input": 4}
    run = lawful(Task(make=lambda: nn.Sequential(adapted(), adapted())), tmp_path / "run", counts).run
    names = run.select(iteration=0, module="1.base_layer").column("tensor_name")
    assert Counter(names) == Counter(["input", "weight", "bias", "output", "grad_output", "grad_input"])


def experts() -> Made:
    """Some experts: one has most tokens, one has none, one is not called; others are slices of one parameter."""

    def run(model: Any, hidden: torch.Tensor) -> Any:
        tokens = model.before(hidden).flatten(0, 1)
        groups = (tokens[:4], tokens[4:], tokens[:0])
        joined = torch.cat([expert(group) for expert, group in zip(model.experts, groups, strict=False)])
        return F.linear(joined[:7], model.stacked[0]).sum() + F.linear(joined[7:], model.stacked[1]).sum()

    parts = nn.ModuleList(linear(bias=False) for _ in range(4))
    return Made(run, before=linear(), experts=parts, stacked=parameter(2, WIDTH, WIDTH))


@pytest.mark.support(framework="MoE", parallelism="one process", features=("linear", "unchanged"))
def test_experts_have_the_tokens_that_they_got(tmp_path: Path) -> None:
    task = Task(make=experts, loss=lambda model, batch: model(batch))
    silent = {"experts.3": "its module was not called"}
    run = lawful(task, tmp_path / "run", products(6, 5), silent=silent).run
    inputs = {one.module: one.shape[0] for one in run.select(iteration=0, tensor_name="input", module="*s*")}
    assert inputs == {"experts.0": 4, "experts.1": 11, "experts.2": 0, "stacked[0]": 7, "stacked[1]": 8}


def test_calls_around_hooks_shared_modules_and_tied_weights_each_have_their_share(tmp_path: Path) -> None:
    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        twice = model.again(input=model.first(model.first.forward(hidden)))
        return F.linear(model.tied(torch.arange(LENGTH)) + twice, model.tied.weight)

    def make() -> Made:
        first = linear()
        return Made(run, first=first, again=first, tied=nn.Embedding(VOCABULARY, WIDTH))

    trained = train_twice(Task(make=make, options={"select": "layer_type=linear,embedding"}), tmp_path / "run")
    assert trained.is_equal
    records = trained.run.select(iteration=0)
    assert records.select(module="first", tensor_name="grad_weight").column("call").tolist() == [2, 1, 0]
    assert len(records.select(module="first", tensor_name="weight")) == 1
    assert "again" not in records.column("module")
    counts = verify_run(trained.run)
    assert counts["output"] == counts["grad_weight"] == 2 * 4
    assert counts["embedding grad_weight"] == 2
    for kind in ("linear", "embedding"):
        assert len(records.select(module="tied", layer_type=kind, tensor_name="grad_weight")) == 1


def helper(query: torch.Tensor, key: torch.Tensor, attend: object = F.scaled_dot_product_attention) -> torch.Tensor:
    assert callable(attend)
    return attend(query, key, key.clone())  # type: ignore[no-any-return]


class Holder(nn.Module):
    """Holds the function of attention in an attribute, in default arguments and in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.attend = F.scaled_dot_product_attention

    def forward(self, hidden: torch.Tensor, *, other: object = F.scaled_dot_product_attention) -> torch.Tensor:
        assert callable(other)
        query, key = self.query(hidden), self.key(hidden)
        held = self.attend(query, key, key.clone())
        return held + other(query, key, key.clone()) + helper(query, key)  # type: ignore[no-any-return]


def test_a_function_that_is_held_in_an_object_or_a_default_is_found_and_put_back(tmp_path: Path) -> None:
    trained = train_twice(Task(make=Holder), tmp_path / "run")
    assert trained.is_equal
    assert verify_run(trained.run)["attention output"] == 2 * 3
    assert trained.model.attend is F.scaled_dot_product_attention
    assert helper.__defaults__ == (F.scaled_dot_product_attention,)
    assert Holder.forward.__kwdefaults__ == {"other": F.scaled_dot_product_attention}


def test_one_tensor_as_several_operands_changes_no_bit(tmp_path: Path) -> None:
    """Of a function that is one node of the graph every gradient is there; of one that is not, the reason is."""

    def make(num_dims: int) -> Made:
        def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
            query = model.query(hidden)
            query = query.unsqueeze(1) if num_dims == 4 else query
            for _ in range(3):
                hidden = hidden + F.scaled_dot_product_attention(query, query, query).reshape(hidden.shape)
            return hidden

        return Made(run, query=linear())

    fused = train_twice(Task(make=lambda: make(4)), tmp_path / "fused")
    assert fused.is_equal
    assert verify_run(fused.run)["attention grad_key"] == 2 * 3
    composed = train_twice(Task(make=lambda: make(3)), tmp_path / "composed")
    assert composed.is_equal
    assert set(missing(composed.run).values()) == {"its tensor is another operand, too: one gradient for both"}


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package of that name, whose functions are torch's: what we know of the real one are names and arguments."""
    package = types.ModuleType("flash_attn")

    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:  # noqa: FBT001, FBT002
        query, key, value = (one.transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2)

    def flash_attn_qkvpacked_func(qkv: torch.Tensor, **named: bool) -> torch.Tensor:
        return package.flash_attn_func(*qkv.unbind(2), **named)  # type: ignore[no-any-return]

    def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, **named: bool) -> torch.Tensor:
        return package.flash_attn_func(q, *kv.unbind(2), **named)  # type: ignore[no-any-return]

    def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return package.flash_attn_func(q[None], k[None], v[None])[0]  # type: ignore[no-any-return]

    for function in (flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func, flash_attn_varlen_func):
        setattr(package, function.__name__, function)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    return package


def test_functions_named_as_those_of_flash_attention_are_seen_once(
    tmp_path: Path, flash_attn: types.ModuleType
) -> None:
    def run(model: Any, hidden: torch.Tensor) -> Any:
        packed = model.projection(hidden).unflatten(-1, (3, 2, WIDTH // 2))
        attended = flash_attn.flash_attn_func(*packed.unbind(2), causal=True)
        attended = attended + flash_attn.flash_attn_qkvpacked_func(packed, causal=True)
        attended = attended + flash_attn.flash_attn_kvpacked_func(packed[:, :, 0], packed[:, :, 1:], causal=True)
        return attended + flash_attn.flash_attn_varlen_func(*packed[0].unbind(1))

    task = Task(make=lambda: Made(run, projection=nn.Linear(WIDTH, 3 * WIDTH)))
    trained = train_twice(task, tmp_path / "run")
    assert trained.is_equal
    records = trained.run.select(layer_type="attention")
    assert verify_run(records.select(call=[0, 1, 2])) == attentions(2 * 3)
    query = only(records, iteration=0, call=1, tensor_name="query")
    assert (query.layout, query.shape, query.sample_dim) == ("BTHD", (BATCH, LENGTH, 2, WIDTH // 2), 0)
    assert query.metadata == {"is_causal": True}
    ragged = records.select(iteration=0, call=3)
    assert len(ragged) == 8
    assert {(record.layout, record.sample_dim) for record in ragged} == {("THD", None)}


class Kernel(nn.Module):
    """A layer that no framework knows: another name of its parameter, and a dictionary as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"rest": hidden, "out": hidden @ self.kernel.T}


def with_kernel() -> Made:
    return Made(
        lambda model, hidden: model.kernel(hidden=model.before(hidden))["out"], before=linear(), kernel=Kernel()
    )


@pytest.fixture
def roles() -> Iterator[list[ModuleRole | FunctionRole]]:
    """Roles of a test's own, which are forgotten after it."""
    registered: list[ModuleRole | FunctionRole] = []
    yield registered
    for role in registered:
        unregister_role(role)


def test_a_role_of_ones_own_is_recorded_as_all_others(
    tmp_path: Path, roles: list[ModuleRole | FunctionRole], capfd: pytest.CaptureFixture[str]
) -> None:
    own = {"operands": {"input": 0, "mask": "mask"}, "parameters": {"weight": "kernel"}, "output": "out"}
    roles += [
        ModuleRole(classes=(Kernel,), layer_type="linear", **own),  # type: ignore[arg-type]  # values of several types
        ModuleRole(classes=("tests.capture.test_roles.Kernal",), layer_type="linear"),
        FunctionRole(functions=("torch.nn.functional.no_such",), layer_type="linear"),
    ]
    for role in roles:
        register_role(role)
    silent = {"kernel forward pre mask": "its argument 'mask' was not passed"}
    lawful(Task(make=with_kernel), tmp_path / "run", products(2, 1), silent=silent)
    told = capfd.readouterr().err
    assert "the role for tests.capture.test_roles.Kernal matches no module of the model: the nearest class is" in told
    assert "the role for torch.nn.functional.no_such matches no function that is loaded" in told


def test_a_role_that_is_taken_back_is_that_of_no_module_any_more() -> None:
    role = ModuleRole(classes=(Kernel,), layer_type="linear")
    register_role(role)
    assert role_of(Kernel) is role
    unregister_role(role)
    assert role_of(Kernel) is None


def scaled(first: torch.Tensor, second: torch.Tensor, *_window: object, **_options: object) -> torch.Tensor:
    return first * second


def test_a_function_of_ones_own_is_known_by_places_or_by_names(
    tmp_path: Path, roles: list[ModuleRole | FunctionRole]
) -> None:
    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        first = model.before(hidden)
        return scaled(first, second=first.exp()) + scaled(second=first.exp(), first=first)

    role = FunctionRole(
        functions=(f"{__name__}.scaled",), layer_type="product", operands={"left": 0, "right": "second"}
    )
    roles.append(role)
    register_role(role)
    task = Task(make=lambda: Made(run, before=linear()), options={"select": "layer_type=product"})
    trained = train_twice(task, tmp_path / "run", steps=1)
    assert trained.is_equal
    for call in range(2):
        names = sorted(trained.run.select(call=call).column("tensor_name"))
        assert names == ["grad_left", "grad_output", "grad_right", "left", "output", "right"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_the_examples_of_the_documentation_give_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "roles.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(from.*?|import.*?)```", text, re.DOTALL)
    expected = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert len(examples) == len(expected) == 2
    monkeypatch.chdir(tmp_path)
    before = registered_roles()
    try:
        for example, gives in zip(examples, expected, strict=True):
            exec(compile(example, "docs/roles.md", "exec"), {"__name__": "example"})  # noqa: S102  # our own page
            assert capsys.readouterr().out == gives
    finally:
        for role in set(registered_roles()) - set(before):
            unregister_role(role)


def test_what_a_call_says_of_itself_is_in_the_metadata_of_its_first_operand(
    tmp_path: Path, roles: list[ModuleRole | FunctionRole]
) -> None:
    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = model.projection(hidden).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
        attended = F.scaled_dot_product_attention(query, key, value, None, 0.0, True)  # noqa: FBT003  (by place)
        attended = attended + F.scaled_dot_product_attention(query, key, value, mask, scale=0.5)
        return scaled(attended, 2 * hidden.unflatten(-1, (2, -1)).transpose(1, 2), (1, -1), other=torch.nan)

    options = {"window": CallOption(position=2, keyword="window"), "other": CallOption(position=None, keyword="other")}
    roles.append(
        FunctionRole(
            functions=(f"{__name__}.scaled",), layer_type="attention", operands={"left": 0, "right": 1}, options=options
        )
    )
    register_role(roles[0])
    task = Task(make=lambda: Made(run, projection=nn.Linear(WIDTH, 3 * WIDTH)))
    trained = train_twice(task, tmp_path / "run", steps=1)
    assert trained.is_equal
    records = trained.run.select(layer_type="attention")
    said = [record.metadata for record in records.select(tensor_name=["query", "left"])]
    assert said == [
        {"dropout": 0.0, "is_causal": True},
        {"mask": "Tensor", "is_causal": False, "scale": 0.5},
        {"window": [1, -1], "other": "float"},
    ]
    rest = records.select(tensor_name=["key", "output", "grad_left", "right"])
    assert all(record.metadata is None for record in rest)


def test_roles_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="options of a role: 'scale' is none: give a CallOption"):
        FunctionRole(functions=("mine.attend",), layer_type="attention", options={"scale": "scale"})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="give a tuple of types or dotted names"):
        ModuleRole(classes="mine.Linear", layer_type="linear")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"give a type, or 'package\.module\.Class'"):
        ModuleRole(classes=("Linear",), layer_type="linear")
    with pytest.raises(UsageError, match="layer_type"):
        ModuleRole(classes=(nn.Linear,), layer_type="")
    with pytest.raises(UsageError, match=r"is no role"):
        register_role(nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is no operand"):
        register_role(ModuleRole(classes=(nn.Linear,), layer_type="linear", operands={"input": -1}))
    with pytest.raises(UsageError, match=r"give 'package\.module\.function'"):
        FunctionRole(functions=("linear",), layer_type="linear")


@dataclasses.dataclass
class Output:
    """What a layer may return."""

    cache: None
    hidden: torch.Tensor


def test_the_output_is_found_in_results_of_all_kinds() -> None:
    hidden, other = torch.zeros(1), torch.ones(1)
    for result, element in [
        (hidden, None),
        ((hidden, other), None),
        ((None, [hidden]), None),
        ({"a": None, "b": hidden}, None),
        (Output(None, hidden), None),
        (Output(None, hidden), "hidden"),
        ({"x": other, "y": hidden}, "y"),
        ((other, hidden), 1),
    ]:
        assert tensor_in(result, element) is hidden
    for result, element in [((), None), (None, None), ((hidden,), 1), ({"x": hidden}, "y"), ((None, hidden), 0)]:
        assert tensor_in(result, element) is None


@pytest.mark.filterwarnings("ignore")  # torch advises to compile it
def test_flex_attention_is_seen_in_inference(tmp_path: Path) -> None:
    def run(model: Any, hidden: torch.Tensor) -> Any:
        query = model.query(hidden).unflatten(-1, (2, -1)).transpose(1, 2)
        return flex_attention(query, query, query)

    model = Made(run, query=linear()).eval()
    with torch.no_grad(), Capture(tmp_path / "run", select={"mode": ["eval"]}, advance_on="step") as capture:
        model(torch.randn(BATCH, LENGTH, WIDTH))
        capture.step()
    stored = open_run(tmp_path / "run")
    assert verify_run(stored) == Counter({"output": 1, "attention output": 1})
    assert set(stored.select(layer_type="attention").column("layout")) == {"BHTD"}


def test_a_role_is_found_by_the_dotted_name_of_a_base() -> None:
    base = type("ColumnParallelLinear", (nn.Module,), {"__module__": "megatron.core.tensor_parallel.layers"})
    derived = type("Mine", (base,), {})
    role = role_of(derived)
    assert role is not None
    assert role.layer_type == "linear"
    engine = type("Linear", (nn.Module,), {"__module__": "transformer_engine.pytorch.module.linear"})
    assert role_of(engine) is not None
    assert role_of(nn.LayerNorm) is None
    assert role_of(type("Sub", (nn.Linear,), {})) is role_of(nn.Linear)


def named(module: str, name: str, base: type = nn.Linear) -> type[Any]:
    """A class as a package has it."""
    return type(name, (base,), {"__module__": module})


def test_classes_that_quantise_inside_are_known_by_name() -> None:
    float8 = named("torchao.float8.float8_linear", "Float8Linear")
    for kind in (float8, type("Derived", (float8,), {})):
        known = quantising(kind(2, 2))
        assert known is not None
        assert (known.kind, known.to()) == ("Float8Linear", "fp8")
    layer = nn.Linear(2, 2)
    assert quantising(layer) is None
    weight = named("torchao.prototype.moe_training.tensor", "MXFP8TrainingWeightWrapperTensor", torch.Tensor)
    layer.weight = nn.Parameter(torch.randn(2, 2).as_subclass(weight))
    known = quantising(layer)
    assert known is not None
    assert (known.kind, known.to()) == ("MXFP8TrainingWeightWrapperTensor", "mxfp8")


@pytest.mark.parametrize(
    ("module", "recipe", "word"),
    [
        ("quantization", "MXFP8BlockScaling", "mxfp8"),
        ("quantization", "NVFP4BlockScaling", "nvfp4"),
        ("fp8", "DelayedScaling", "fp8"),
        ("fp8", None, ""),
    ],
)
def test_transformer_engine_says_for_each_call_to_what_it_quantises(
    module: str, recipe: str | None, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = named("transformer_engine.pytorch.module.linear", "Linear", nn.Module)()
    known = quantising(layer)
    assert known is not None
    assert not known.to()
    state = types.SimpleNamespace(
        is_fp8_enabled=lambda: recipe is not None, get_fp8_recipe=type(recipe or "DelayedScaling", (), {})
    )
    monkeypatch.setitem(
        sys.modules, f"transformer_engine.pytorch.{module}", types.SimpleNamespace(FP8GlobalStateManager=state)
    )
    assert known.to() == word


def test_the_float8_training_of_torchao_has_its_own_quant_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32), nn.Linear(32, 20)).bfloat16()
    config = float8.Float8LinearConfig(emulate=True)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "3")
    for folder, quant_type in (("own", None), ("given", "mine")):
        with Capture(tmp_path / folder, model=model, quant_type=quant_type) as capturing:
            model(torch.randn(32, 64).bfloat16()).square().mean().backward()
            capturing.step()
    run = open_run(tmp_path / "own")
    types = {(one.module, one.quant_type) for one in run.select()}
    assert types == {("0", "fp8"), ("2", "fp8"), ("3", "bf16")}
    assert len(run.select(tensor_name="grad_input")) == 2
    assert {one.quant_type for one in open_run(tmp_path / "given").select()} == {"mine"}
    assert capsys.readouterr().err.count("Float8Linear quantises operands inside of the product (fp8)") == 2
    for name in ("own", "given"):
        recomputed(open_run(tmp_path / name))


def test_the_gradient_that_a_layer_adds_up_itself_is_recorded_and_said_to_be_so(
    tmp_path: Path, roles: list[ModuleRole | FunctionRole]
) -> None:
    class Fused(nn.Module):
        gradient_accumulation_fusion = True

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.weight.main_grad = torch.full((WIDTH, WIDTH), 7.0)  # type: ignore[attr-defined]

        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
            return hidden @ self.weight.T, None

    from ranktape.capture.roles.known import main_grad

    role = ModuleRole(
        classes=(Fused,),
        layer_type="linear",
        operands={"input": 0},
        parameters={"weight": "weight"},
        output=0,
        accumulated=main_grad,
    )
    roles.append(role)
    register_role(role)
    task = Task(make=lambda: nn.Sequential(Fused()), loss=lambda model, batch: model(batch)[0].sum())
    [grad] = train_twice(task, tmp_path / "run", steps=1).run.select(tensor_name="grad_weight")
    assert grad.metadata == {"accumulated": True}
    assert torch.equal(grad.tensor(), torch.full((WIDTH, WIDTH), 7.0))
