"""Of which tensors is a quantised operand, a shard or a wrapper made, and what is refused?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ranktape.capture import Capture
from ranktape.capture.source import Source, TensorRole
from ranktape.capture.tensors.parts import UnrecordableError, parts_of
from ranktape.capture.tensors.placement import Axes, describe_even, scale_placement
from ranktape.storage import open_run
from ranktape.storage.format.record_info import Operation


class Quantised(torch.Tensor):
    """A tensor as libraries hold quantised operands: without storage of its own, made of others."""

    held: dict[str, torch.Tensor]

    @staticmethod
    def __new__(cls: type[Quantised], shape: tuple[int, ...], **inner: torch.Tensor) -> Quantised:  # noqa: PYI034
        self: Quantised = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)
        self.held = inner
        for name, tensor in inner.items():
            setattr(self, name, tensor)
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.held), None

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise AssertionError(f"{function} ran: a capture must read the parts alone")


class Opaque(Quantised):
    """One that does not say what it is made of."""

    __tensor_flatten__ = None  # type: ignore[assignment]


class Tagged(torch.Tensor):
    """A dense tensor with a class of its own."""


def mx(*, codes: str = "qdata", scales: str = "scale") -> Quantised:
    values = torch.arange(64, dtype=torch.uint8).view(2, 32).view(torch.float8_e4m3fn)
    return Quantised((2, 32), **{codes: values, scales: torch.tensor([[127], [130]], dtype=torch.uint8)})


@pytest.mark.parametrize(
    ("codes", "scales", "suffixes"),
    [
        ("qdata", "scale", ["_codes", "_scales"]),
        ("_data", "_scale", ["_codes", "_scales"]),
        ("_rowwise_data", "_rowwise_scale_inv", ["_codes", "_scales"]),
        ("int_data", "scale", ["_codes", "_scales"]),
        ("qdata", "_zero_points", ["_codes", "_zero_points"]),
        ("alpha", "beta", ["_alpha", "_beta"]),
    ],
)
def test_a_quantised_operand_is_its_codes_and_its_scales(codes: str, scales: str, suffixes: list[str]) -> None:
    tensor = mx(codes=codes, scales=scales)
    parts = parts_of(tensor)
    assert [part.suffix for part in parts] == suffixes
    assert parts[0].tensor is tensor.held[codes]
    assert [part.tensor.dtype for part in parts] == [torch.float8_e4m3fn, torch.uint8]


def test_codes_and_scales_are_stored_under_the_name_of_their_operand(tmp_path: Path) -> None:
    source = Source(module="up", layer_type="linear", layer_idx=0, component="linear")
    role = TensorRole(operation=Operation.FORWARD, phase="pre", tensor_name="weight", has_samples=False)
    with Capture(tmp_path / "run", manual=True, host_budget_nbytes=32 << 20) as capture:
        capture.record(mx(), source=source, role=role)
        capture.step()
    codes, scales = open_run(tmp_path / "run").select()
    assert (codes.tensor_name, codes.dtype, codes.shape) == ("weight_codes", "float8_e4m3fn", (2, 32))
    assert (scales.tensor_name, scales.dtype, scales.shape) == ("weight_scales", "uint8", (2, 1))
    assert torch.equal(codes.tensor().view(torch.uint8), torch.arange(64, dtype=torch.uint8).view(2, 32))
    assert scales.tensor().tolist() == [[127], [130]]


def test_two_4_bit_floats_in_a_byte_are_stored_as_the_byte() -> None:
    packed = torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    [part] = parts_of(packed)
    assert part.tensor.tolist() == list(range(8))


def test_a_quantised_operand_in_a_quantised_operand_is_taken_apart_to_the_end() -> None:
    nested = Quantised((2, 32), tensor_impl=mx())
    assert [part.suffix for part in parts_of(nested)] == ["_codes", "_scales"]
    beside = Quantised((2, 32), tensor_impl=mx(), other=torch.ones(2))
    assert [part.suffix for part in parts_of(beside)] == ["_tensor_impl_codes", "_tensor_impl_scales", "_other"]


def test_a_wrapper_around_one_tensor_of_its_shape_and_dtype_is_that_tensor() -> None:
    wide = torch.randn(2, 32).bfloat16()
    for attribute in ("_data", "anything"):
        [part] = parts_of(Quantised((2, 32), **{attribute: wide}))
        assert (part.suffix, part.tensor is wide) == ("", True)
    # Of another dtype, or with scales beside it, it holds codes.
    assert [part.suffix for part in parts_of(Quantised((2, 32), _data=wide.float()))] == ["_codes"]
    assert [part.suffix for part in parts_of(Quantised((2, 32), qdata=wide, scale=wide[:, :1]))] == [
        "_codes",
        "_scales",
    ]


@pytest.mark.parametrize("name", ["MXFP8TrainingWeightWrapperTensor", "Float8TrainingWeightWrapperTensor"])
def test_the_weights_of_torchaos_training_are_wide(name: str) -> None:
    wrappers = pytest.importorskip("torchao.prototype.moe_training.tensor", reason="torchao is not installed")
    wide = torch.randn(2, 32).bfloat16()
    [part] = parts_of(getattr(wrappers, name)(wide, None))
    assert (part.suffix, torch.equal(part.tensor, wide)) == ("", True)


def test_a_tensor_with_a_class_of_its_own_is_recorded_as_it_is() -> None:
    tensor = torch.arange(3.0).as_subclass(Tagged)
    [part] = parts_of(tensor)
    assert type(part.tensor) is torch.Tensor
    assert part.tensor.tolist() == [0, 1, 2]
    assert part.tensor.data_ptr() == tensor.data_ptr()


def test_eight_bit_parameters_are_plain() -> None:
    weight = nn.Parameter(torch.ones(2, 2).to(torch.float8_e4m3fn), requires_grad=False)
    [part] = parts_of(weight)
    assert part.tensor is weight


def test_what_has_no_values_is_refused_with_the_reason() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for tensor, reason in (
        (torch.ones(2, device="meta"), "only dense tensors with values"),
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        (nested, "samples have different shapes"),
        (fake, "is being traced"),
        (Opaque((2,)), "Opaque, which does not say of which tensors it is made"),
        (torch.ones(2, dtype=torch.uint8).view(torch.bits8), "dtype bits8 cannot be stored"),
    ):
        with pytest.raises(UnrecordableError, match=reason):
            parts_of(tensor)


def test_what_a_function_transform_wraps_is_unwrapped_and_a_batched_tensor_refused() -> None:
    def unwrapped(value: torch.Tensor) -> torch.Tensor:
        [part] = parts_of(value)
        assert part.tensor.tolist() == [1, 1]
        return value.sum()

    torch.func.grad(unwrapped)(torch.ones(2))

    def batched(value: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnrecordableError, match="vmap"):
            parts_of(value)
        return value

    torch.func.vmap(batched)(torch.ones(2, 2))


@pytest.fixture
def one_rank() -> Iterator[Any]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("placement", "word"),
    [(Shard(1), "shard(1)"), (Replicate(), "replicate"), (Partial(), "partial(sum)"), (Partial("avg"), "partial(avg)")],
)
def test_a_dtensor_is_its_shard_and_its_placement(one_rank: Any, placement: Any, word: str) -> None:
    local = torch.ones(2, 3, requires_grad=True)
    [part] = parts_of(DTensor.from_local(local, one_rank, [placement]))
    assert type(part.tensor) is torch.Tensor
    assert part.tensor.tolist() == local.tolist()
    assert json.loads(part.placement or "") == {
        "mesh": {"axes": ["tp"], "shape": [1], "ranks": [0]},
        "coordinates": [0],
        "placements": [word],
        "global_shape": [2, 3],
        "offset": [0, 0],
        "partial": word.startswith("partial"),
    }


def test_the_result_of_a_collective_is_waited_for_once(one_rank: Any) -> None:
    result = funcol.all_reduce(torch.arange(3.0), "sum", one_rank)
    assert not result.completed
    [part] = parts_of(result)
    assert type(part.tensor) is torch.Tensor
    assert part.tensor.tolist() == [0, 1, 2]
    assert result.completed
    [shard] = parts_of(DTensor.from_local(result, one_rank, [Shard(0)], run_check=False))
    assert shard.tensor.tolist() == [0, 1, 2]


def test_the_codes_and_scales_of_a_shard_have_places_of_their_own(one_rank: Any) -> None:
    shard = DTensor.from_local(torch.ones(2, 32), one_rank, [Shard(0)])
    shard._local_tensor = mx()
    codes, scales = parts_of(shard)
    assert json.loads(codes.placement or "")["global_shape"] == [2, 32]
    assert json.loads(scales.placement or "")["global_shape"] == [2, 1]


def test_the_place_of_scales_follows_from_the_place_of_the_shard() -> None:
    axes = Axes(("tp",), (2,), (0, 1), (1,))
    text = describe_even(axes, ("shard(1)",), (4, 64))
    scaled = json.loads(scale_placement(text, (4, 64), (4, 2)) or "")
    assert (scaled["global_shape"], scaled["offset"]) == ([4, 4], [0, 2])
    assert scale_placement(text, (4, 64), (4,)) is None
    assert scale_placement(text, (4, 64), (3, 64)) == scale_placement(text, (4, 64), (3, 64))
    strided = json.loads(describe_even(axes, ("strided_shard(0, 2)",), (4, 8)))
    assert (strided["global_shape"], strided["offset"]) == ([8, 8], [2, 0])


def test_the_tensors_of_torchao_are_codes_and_scales() -> None:
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
    values = torch.linspace(-3, 3, 128).view(2, 64)
    tensor = mx_tensor.MXTensor.to_mx(values, torch.float8_e4m3fn, 32)
    codes, scales = parts_of(tensor)
    assert (codes.suffix, codes.tensor.dtype, scales.suffix) == ("_codes", torch.float8_e4m3fn, "_scales")
    powers = scales.tensor.view(torch.uint8).float().sub(127).exp2().view(2, 2, 1)
    again = (codes.tensor.float().view(2, 2, 32) * powers).view(2, 64)
    assert torch.equal(again, tensor.dequantize(torch.float32))


class Weight(torch.Tensor):
    """A quantised weight of a library that computes its product itself: it knows the function that is asked for."""

    codes: torch.Tensor
    scale: torch.Tensor
    is_linear: Callable[[Any], bool]

    @staticmethod
    def __new__(cls: type[Weight], codes: torch.Tensor, scale: torch.Tensor) -> Weight:  # noqa: PYI034
        self: Weight = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        self.codes, self.scale = codes, scale
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.is_linear(function):
            inputs, weight, bias = args
            return inputs @ (weight.codes.float() * weight.scale).T + bias
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(function)


TABLE = {F.linear}


def is_in_table(function: Any) -> bool:
    return function in TABLE


def is_under_its_name(function: Any) -> bool:
    return function is F.linear


@pytest.mark.parametrize("is_linear", [is_in_table, is_under_its_name])
def test_a_weight_that_computes_its_product_itself_still_does_and_is_codes_and_scales(
    tmp_path: Path, is_linear: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Weight, "is_linear", staticmethod(is_linear), raising=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1]._parameters["weight"] = Weight(  # type: ignore[assignment]  # as libraries do
        torch.arange(16, dtype=torch.int8).view(4, 4), torch.tensor(0.5)
    )
    batch = torch.randn(3, 4)
    plain = model(batch)
    with Capture(tmp_path / "run", host_budget_nbytes=32 << 20) as capture:
        seen = model(batch)
        seen.sum().backward()
        capture.step()
    assert torch.equal(seen, plain)
    run = open_run(tmp_path / "run")
    names = sorted(run.select(module="1").column("tensor_name"))
    values = ["input", "output", "weight_codes", "weight_scales"]
    assert names == ["bias", "grad_bias", "grad_input", "grad_output", *values]
    [codes] = run.select(module="1", tensor_name="weight_codes")
    assert codes.tensor().tolist() == torch.arange(16).view(4, 4).tolist()
