"""Are functions seen whatever holds them, and is nothing else changed: bits, modes of the training, compilations?"""

from __future__ import annotations

import functools
import inspect
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, has_torch_function
from torch.utils.checkpoint import checkpoint

from ranktape.capture import Capture, FunctionRole, register_role, unregister_role
from ranktape.capture.hooks.hook import MODE, Hook
from ranktape.storage import Run, open_run
from tests.capture.role_models import BATCH, LENGTH, WIDTH, Multihead, Task, train_twice
from tests.capture.verify import verify_run

HELD: dict[str, Any] = {"linear": F.linear, "partial": functools.partial(F.linear)}


class Holding(nn.Module):
    """Multiplies by functions that lists, dictionaries, partial functions and local names hold."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        for name in ("first", "second", "third", "fourth"):
            self.register_parameter(name, nn.Parameter(torch.randn(WIDTH, WIDTH)))
        self.functions = [F.linear]

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import linear

        hidden = HELD["linear"](self.before(hidden), self.first)
        hidden = HELD["partial"](hidden, self.second)
        return linear(self.functions[0](hidden, self.third), self.fourth)


@pytest.fixture(autouse=True)
def no_mode_is_left() -> Iterator[None]:
    yield
    assert not _get_current_function_mode_stack()
    assert MODE.hooks is None


def modules_of(run: Run, **choice: Any) -> set[str]:
    return set(run.select(**choice).column("module"))


def test_functions_are_seen_whatever_holds_them(tmp_path: Path) -> None:
    trained = train_twice(Task(make=Holding), tmp_path / "run")
    assert trained.is_equal
    assert modules_of(trained.run) == {"before", "first", "second", "third", "fourth"}
    assert verify_run(trained.run) == Counter(output=10, grad_weight=10, grad_input=8)


def by_operator(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ module.own  # type: ignore[no-any-return]


def by_method(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden.matmul(module.own.t())


def by_mm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return torch.mm(hidden.flatten(0, 1), module.own).unflatten(0, (BATCH, LENGTH))  # type: ignore[no-any-return]


def by_addmm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return torch.addmm(module.bias, hidden.flatten(0, 1), module.own).unflatten(0, (BATCH, LENGTH))  # type: ignore[no-any-return]


class Multiplying(nn.Module):
    """Multiplies with a parameter of its own, in a way, beside a linear layer."""

    def __init__(self, way: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.way = way

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.way(self, self.before(hidden))


@pytest.mark.parametrize("way", [by_operator, by_method, by_mm, by_addmm])
def test_products_with_a_parameter_are_records_of_a_linear_layer(
    way: Callable[[Any, torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    trained = train_twice(Task(make=lambda: Multiplying(way)), tmp_path / "run")
    assert trained.is_equal
    records = trained.run.select(iteration=0, module="own")
    names = {"input", "weight", "output", "grad_output", "grad_input", "grad_weight"}
    assert set(records.column("tensor_name")) == names | ({"bias", "grad_bias"} if way is by_addmm else set())
    assert set(records.select(tensor_name="weight").column("layout")) == {"IO"}
    assert verify_run(trained.run) == Counter(output=4, grad_weight=4, grad_input=2)
    weight = records.select(tensor_name="weight")[0].tensor()
    assert weight.shape == (WIDTH, WIDTH)


class Batched(nn.Module):
    """Multiplies the groups of a batch with a weight of their own each."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(BATCH, WIDTH, 2 * WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = torch.bmm(hidden, hidden.transpose(1, 2))  # of two activations
        return torch.bmm(scores @ hidden, self.experts)


def test_batched_products_are_those_with_a_parameter_alone(tmp_path: Path) -> None:
    trained = train_twice(Task(make=Batched), tmp_path / "run")
    assert trained.is_equal
    records = trained.run.select(iteration=0)
    assert modules_of(trained.run) == {"experts"}
    values = {name: records.select(tensor_name=name)[0].tensor() for name in ("input", "weight", "output")}
    assert torch.equal(torch.bmm(values["input"], values["weight"]), values["output"])


class Bare(nn.Module):
    """Multiplies with its parameter, by a function in a checkpoint or without one."""

    def __init__(self, own: nn.Parameter, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.own, self.run = own, run

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.run(F.linear, hidden, self.own)


class Sharing(nn.Module):
    """Two layers that have the same parameter."""

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.before, own = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.layers = nn.ModuleList(Bare(own, run) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](self.before(hidden)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "run",
    [lambda function, *operands: function(*operands), functools.partial(checkpoint, use_reentrant=True)],
    ids=["plain", "reentrant checkpoint"],
)
def test_a_parameter_that_modules_share_is_recorded_under_the_one_that_computes(
    run: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    trained = train_twice(Task(make=lambda: Sharing(run)), tmp_path / "run")
    assert trained.is_equal
    names = {"input", "weight", "output", "grad_output", "grad_input", "grad_weight"}
    for module in ("layers.0.own", "layers.1.own"):
        records = trained.run.select(iteration=0, module=module)
        assert sorted(records.column("tensor_name")) == sorted(names), module
    verify_run(trained.run)


class ByHand(torch.autograd.Function):
    """A product, or an attention, whose gradients a backward of its own computes."""

    @staticmethod
    def forward(ctx: Any, way: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
        ctx.way = way
        ctx.save_for_backward(*operands)
        return way(*operands)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.enable_grad():
            operands = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            output = ctx.way(*operands)
        return None, *torch.autograd.grad(output, operands, grads[0])


class WithinFunction(nn.Module):
    """Has a bare product and attention within an `autograd.Function`, in which torch follows no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        product: Any = ByHand.apply(torch.matmul, self.before(hidden), self.own)  # type: ignore[no-untyped-call]
        heads = product.unflatten(-1, (4, -1)).transpose(1, 2)
        return ByHand.apply(F.scaled_dot_product_attention, heads, heads, heads)  # type: ignore[no-any-return, no-untyped-call]


def test_the_gradients_of_what_runs_within_an_autograd_function_are_said_to_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = train_twice(Task(make=WithinFunction), tmp_path / "run")
    assert trained.is_equal
    assert set(trained.run.select(module="own").column("tensor_name")) == {"input", "weight", "output"}
    reason = "it ran without gradients, as under torch.no_grad or in an autograd.Function"
    status = trained.run.status()[0]
    assert status.silent_sites[0] == {
        "own grad_input, grad_weight, grad_output": reason,
        "attention -1 grad_query, grad_key, grad_value, grad_output": reason,
    }
    assert status.num_missing == 7
    assert f"not recorded: own grad_input, grad_weight, grad_output: {reason}" in capsys.readouterr().err


class Recomputing(nn.Module):
    """Has bare products recomputed, by a checkpoint around a function that no module of ours is in."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.is_reentrant = is_reentrant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(  # type: ignore[no-any-return]
            lambda given: F.gelu(F.linear(given, self.own) @ self.own),
            self.before(hidden),
            use_reentrant=self.is_reentrant,
        )


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_bare_products_in_a_recomputation_have_all_their_gradients(tmp_path: Path, *, is_reentrant: bool) -> None:
    trained = train_twice(Task(make=lambda: Recomputing(is_reentrant=is_reentrant)), tmp_path / "run")
    assert trained.is_equal
    assert verify_run(trained.run) == Counter(output=6, grad_weight=6, grad_input=4)


class Leading(nn.Module):
    """Begins with a bare product."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.after(F.linear(hidden, self.own))  # type: ignore[no-any-return]


def test_models_may_be_called_in_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) + model.forward(batch) + model(batch)).square().mean()  # type: ignore[no-any-return]

    trained = train_twice(Task(make=Leading, loss=loss), tmp_path / "run")
    assert trained.is_equal
    outputs = trained.run.select(tensor_name="output")
    counts = Counter(zip(outputs.column("iteration"), outputs.column("module"), strict=True))
    assert counts == {(0, "own"): 2, (0, "after"): 3, (1, "own"): 3, (1, "after"): 3}
    assert "functions before its first module are not recorded" in capsys.readouterr().err


class Doubling(TorchFunctionMode):
    """A mode of the training's own, that changes what is multiplied."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args[0] * 2, *args[1:]) if func is F.linear else args
        return func(*given, **(kwargs or {}))


class Moded(nn.Module):
    """Enters modes in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](hidden)
        with torch.device("cpu"), Doubling():
            hidden = F.linear(hidden, self.own)
            assert isinstance(_get_current_function_mode_stack()[-1], Doubling)
        return self.layers[1](hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("around", ["nothing", "device", "mode"])
def test_modes_of_the_training_stay_in_place(tmp_path: Path, around: str) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        contexts: dict[str, Any] = {"device": torch.device("cpu"), "mode": Doubling()}
        if around not in contexts:
            return model(batch).square().mean()  # type: ignore[no-any-return]
        with contexts[around]:
            before = _get_current_function_mode_stack()
            output = model(batch)
            assert _get_current_function_mode_stack() == before
            return output.square().mean()  # type: ignore[no-any-return]

    trained = train_twice(Task(make=Moded, loss=loss), tmp_path / "run")
    assert trained.is_equal
    # What is recorded of a bare product is what was multiplied.
    record = trained.run.select(iteration=0, module="own", tensor_name="input")[0]
    before = trained.run.select(iteration=0, module="layers.0", tensor_name="output")[0]
    assert torch.equal(record.tensor(), before.tensor() * (4 if around == "mode" else 2))


@pytest.mark.parametrize("kind", ["device", "default"])
def test_a_default_device_around_a_direct_forward_is_taken_away(tmp_path: Path, kind: str) -> None:
    model, batch = Holding(), torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path / "run", min_iterations=2, strict=True):
        for _ in range(2):
            if kind == "device":
                with torch.device("meta"):
                    model.forward(batch)
            else:
                torch.set_default_device("meta")
                model.forward(batch)
                torch.set_default_device(None)
            assert torch.empty(1).device.type == "cpu"
            model.forward(batch).sum().backward()
            optimizer.step()


class Taught(nn.Module):
    """Learns from another model, which is no part of it."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.others = [teacher]
        self.taught: Any = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.taught = self.others[0](hidden)
        return self.layer(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("num_layers", [0, 2])
def test_models_beside_the_captured_one_compute_the_same_bits(
    tmp_path: Path, *, num_layers: int, is_direct: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True)
    teacher = (nn.TransformerEncoder(layer, num_layers) if num_layers else layer).eval()
    batch = torch.randn(BATCH, 10 * LENGTH, WIDTH)
    with torch.no_grad():
        plain = teacher(batch)
    model = Taught(teacher)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path / "run", model=model, min_iterations=1, strict=True):
        with torch.no_grad():
            assert torch.equal(teacher(batch), plain)
        (model.forward if is_direct else model)(batch).sum().backward()
        assert torch.equal(model.taught, plain)
        optimizer.step()
    assert torch.overrides.has_torch_function is has_torch_function


def test_an_iteration_that_ends_in_a_backward_pass_leaves_no_mode(tmp_path: Path) -> None:
    model = Holding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.before.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with Capture(tmp_path / "run", model=model, min_iterations=1, strict=True):
        for _ in range(2):
            model.forward(torch.randn(BATCH, WIDTH)).sum().backward()


class FunctionFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.after = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.after(F.linear(hidden, self.first))  # type: ignore[no-any-return]


def test_a_direct_forward_with_steps_in_its_backward_pass_leaves_no_mode_in_idle_iterations(tmp_path: Path) -> None:
    model, backward = FunctionFirst(), torch.Tensor.backward.__code__
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
    seen = []
    with Capture(tmp_path / "run", min_iterations=2, every=3, strict=True) as capture:
        for _ in range(6):
            seen.append((capture.is_recording, len(_get_current_function_mode_stack())))
            model.forward(torch.randn(BATCH, WIDTH)).sum().backward()
    assert seen == [(True, 0), (False, 0), (False, 0), (True, 1), (False, 0), (False, 0)]
    assert torch.Tensor.backward.__code__ is backward
    run = open_run(tmp_path / "run")
    # What comes before the first module was not seen in the first iteration.
    assert [modules_of(run, iteration=one, tensor_name="grad_weight") for one in (0, 3)] == [
        {"after"},
        {"first", "after"},
    ]


def test_a_forward_that_outlasts_the_iteration_leaves_its_thread_no_mode(tmp_path: Path) -> None:
    model = Holding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_inside, may_go_on = threading.Event(), threading.Event()
    stacks: list[Any] = []

    def wait(*_: Any) -> None:
        is_inside.set()
        may_go_on.wait()

    def forward() -> None:
        handle = model.before.register_forward_hook(wait)
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        handle.remove()
        optimizer.step()
        stacks.append(_get_current_function_mode_stack())

    with Capture(tmp_path / "run", model=model, min_iterations=1):
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        thread = threading.Thread(target=forward)
        thread.start()
        is_inside.wait()
        optimizer.step()
        may_go_on.set()
        thread.join()
    assert stacks == [[]]


def test_attention_in_inference_takes_the_way_it_takes_without_a_capture(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Multihead(needs_weights=False).eval()
    batch = torch.randn(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        plain = model(batch)
        with Capture(tmp_path / "run", min_iterations=1, select="mode=eval", strict=True) as capture:
            captured = model(batch)
            capture.step()
    assert torch.equal(plain, captured)


def test_an_interrupted_forward_leaves_no_mode(tmp_path: Path) -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.is_interrupted = True

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden = self.layer(hidden)
            if self.is_interrupted:
                raise KeyboardInterrupt
            return F.linear(hidden, self.layer.weight)

    model = Interrupted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(BATCH, WIDTH)
    with Capture(tmp_path / "run", min_iterations=1, strict=True):
        with pytest.raises(KeyboardInterrupt):
            model(batch)
        model.is_interrupted = False
        model(batch).sum().backward()
        optimizer.step()
        assert not _get_current_function_mode_stack()
    assert len(open_run(tmp_path / "run").select(tensor_name="grad_weight")) == 2


@pytest.mark.parametrize("place", ["hook", "suspended"])
def test_a_capture_that_a_signal_ends_while_the_mode_is_off_leaves_no_mode(tmp_path: Path, place: str) -> None:
    model = Holding()
    with Capture(tmp_path / "run", model=model) as capture:

        def interrupt(*_: Any) -> None:
            if place == "hook":
                Hook(capture.close)()
            else:
                with MODE.suspended():
                    capture.close()

        model.before.register_forward_hook(interrupt)
        model(torch.randn(BATCH, WIDTH))
        assert not _get_current_function_mode_stack()


def test_each_thread_has_a_mode_of_its_own(tmp_path: Path) -> None:
    model = Holding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path / "run", model=model, min_iterations=1, strict=True):
        thread = threading.Thread(target=lambda: model(torch.randn(BATCH, WIDTH)).sum().backward())
        thread.start()
        thread.join()
        optimizer.step()
    run = open_run(tmp_path / "run")
    assert modules_of(run, tensor_name="grad_weight") == {"before", "first", "second", "third", "fourth"}


def test_a_function_of_python_is_the_same_function_again(tmp_path: Path) -> None:
    code = F.multi_head_attention_forward.__code__
    model = nn.MultiheadAttention(WIDTH, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(LENGTH, BATCH, WIDTH)
    with Capture(tmp_path / "run", model=model, min_iterations=1, strict=True):
        model(batch, batch, batch)[0].sum().backward()
        assert F.multi_head_attention_forward.__code__ is not code
        optimizer.step()
    assert F.multi_head_attention_forward.__code__ is code


def test_a_function_of_python_keeps_its_signature(tmp_path: Path) -> None:
    """Callers such as transformers pass `window_size` only to an attention that takes it, as `inspect` says."""
    function = F.multi_head_attention_forward
    signature, names = inspect.signature(function), set(vars(function))
    model = nn.MultiheadAttention(WIDTH, 4)
    batch = torch.randn(LENGTH, BATCH, WIDTH)
    with Capture(tmp_path / "run", model=model, min_iterations=1, strict=True):
        model(batch, batch, batch)[0].sum().backward()
        assert inspect.signature(function) == signature
    assert inspect.signature(function) == signature
    assert set(vars(function)) == names


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.softmax(query @ key.transpose(-2, -1), dim=-1) @ value


def test_a_function_of_python_can_be_pickled_by_value(tmp_path: Path) -> None:
    """As launchers and loaders of data do that use cloudpickle."""
    role = FunctionRole(
        functions=(f"{__name__}.attend",), layer_type="attention", operands={"query": 0, "key": 1, "value": 2}
    )
    register_role(role)
    code, function, batch = attend.__code__, attend, torch.randn(BATCH, LENGTH, WIDTH)
    try:
        with Capture(tmp_path / "run", model=nn.Linear(WIDTH, WIDTH), min_iterations=1, strict=True):
            assert attend.__code__ is not code
            by_value = FunctionType(function.__code__, {**function.__globals__, "__name__": "__main__"}, "attend")
            pickled = cloudpickle.dumps(by_value)
            assert torch.equal(pickle.loads(pickled)(batch, batch, batch), attend(batch, batch, batch))  # noqa: S301
    finally:
        unregister_role(role)
    assert b"ranktape" not in pickled
    assert torch.equal(pickle.loads(pickled)(batch, batch, batch), attend(batch, batch, batch))  # noqa: S301
