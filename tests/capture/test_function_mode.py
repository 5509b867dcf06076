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
from ranktape.capture.hooks.owners import rows_of
from ranktape.storage import Run, open_run
from tests.capture.models import Multihead
from tests.capture.trainings import (
    BATCH,
    LENGTH,
    WIDTH,
    Made,
    Task,
    lawful,
    linear,
    only,
    parameter,
    products,
    train_twice,
)

HELD: dict[str, Any] = {"linear": F.linear, "partial": functools.partial(F.linear)}
NAMES = {"input", "weight", "output", "grad_output", "grad_input", "grad_weight"}
OWN = ("first", "second", "third", "fourth")


def holding() -> Made:
    """Multiplies by functions that lists, dictionaries, partial functions and local names hold."""

    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import linear as local

        hidden = HELD["linear"](model.before(hidden), model.first)
        hidden = HELD["partial"](hidden, model.second)
        return local(model.functions[0](hidden, model.third), model.fourth)

    return Made(run, before=linear(), functions=[F.linear], **{name: parameter() for name in OWN})


@pytest.fixture(autouse=True)
def no_mode_is_left() -> Iterator[None]:
    yield
    assert not _get_current_function_mode_stack()
    assert MODE.hooks is None


def modules_of(run: Run, **choice: Any) -> set[str]:
    return set(run.select(**choice).column("module"))


def rows(hidden: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return product(hidden.flatten(0, 1)).unflatten(0, (BATCH, LENGTH))  # type: ignore[no-any-return]


PRODUCTS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "operator": lambda model, hidden: hidden @ model.own,
    "method": lambda model, hidden: hidden.matmul(model.own.t()),
    "mm": lambda model, hidden: rows(hidden, lambda flat: torch.mm(flat, model.own)),
    "addmm": lambda model, hidden: rows(hidden, lambda flat: torch.addmm(model.bias, flat, model.own)),
}


def multiplying(way: Callable[[Any, torch.Tensor], torch.Tensor]) -> Made:
    """Multiplies with a parameter of its own, in a way, beside a linear layer."""
    run = lambda model, hidden: way(model, model.before(hidden))  # noqa: E731
    return Made(run, before=linear(), own=parameter(), bias=parameter(WIDTH))


def shared(run: Callable[..., torch.Tensor]) -> Made:
    """Two layers that have the same parameter."""
    own = parameter()
    layers = nn.ModuleList(Made(lambda layer, hidden: run(F.linear, hidden, layer.own), own=own) for _ in range(2))
    return Made(
        lambda model, hidden: model.layers[1](model.layers[0](model.before(hidden))), before=linear(), layers=layers
    )


def recomputing(*, is_reentrant: bool) -> Made:
    """Has bare products recomputed, by a checkpoint around a function that no module of ours is in."""

    def run(model: Any, hidden: torch.Tensor) -> Any:
        twice = lambda given: F.gelu(F.linear(given, model.own) @ model.own)  # noqa: E731
        return checkpoint(twice, model.before(hidden), use_reentrant=is_reentrant)

    return Made(run, before=linear(), own=parameter())


MODELS: dict[str, tuple[Callable[[], Made], dict[str, int], set[str]]] = {
    "held": (holding, products(5, 4), {"before", *OWN}),
    **{key: (functools.partial(multiplying, way), products(2, 1), {"before", "own"}) for key, way in PRODUCTS.items()},
    "shared": (
        lambda: shared(lambda function, *operands: function(*operands)),
        products(3, 2),
        {"before", "layers.0.own", "layers.1.own"},
    ),
    "shared, in a reentrant checkpoint": (
        lambda: shared(functools.partial(checkpoint, use_reentrant=True)),
        products(3, 2),
        {"before", "layers.0.own", "layers.1.own"},
    ),
    "recomputed by a reentrant checkpoint": (
        lambda: recomputing(is_reentrant=True), products(3, 2), {"before", "own"},
    ),
    "recomputed": (lambda: recomputing(is_reentrant=False), products(3, 2), {"before", "own"}),
}  # fmt: skip
"""Models that compute with functions and parameters of their own, their counts, and what is recorded of them."""


@pytest.mark.parametrize("name", MODELS)
def test_products_with_a_parameter_are_records_of_a_linear_layer(name: str, tmp_path: Path) -> None:
    make, counts, modules = MODELS[name]
    run = lawful(Task(make=make), tmp_path / "run", counts).run
    assert modules_of(run) == modules
    biased = {"bias", "grad_bias"} if name == "addmm" else set()
    for module in modules - {"before"}:
        records = run.select(iteration=0, module=module)
        assert set(records.column("tensor_name")) == NAMES | biased, module
        if name in PRODUCTS:
            assert only(records, tensor_name="weight").layout == "IO"
            assert only(records, tensor_name="weight").shape == (WIDTH, WIDTH)


def test_batched_products_are_those_with_a_parameter_alone(tmp_path: Path) -> None:
    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        scores = torch.bmm(hidden, hidden.transpose(1, 2))  # of two activations
        return torch.bmm(scores @ hidden, model.experts)

    trained = train_twice(Task(make=lambda: Made(run, experts=parameter(BATCH, WIDTH, 2 * WIDTH))), tmp_path / "run")
    assert trained.is_equal
    assert modules_of(trained.run) == {"experts"}
    given, weight, output = (
        only(trained.run, iteration=0, tensor_name=name).tensor() for name in ("input", "weight", "output")
    )
    assert torch.equal(torch.bmm(given, weight), output)


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


def test_the_gradients_of_what_runs_within_an_autograd_function_are_said_to_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apply: Any = ByHand.apply

    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        heads = apply(torch.matmul, model.before(hidden), model.own).unflatten(-1, (4, -1)).transpose(1, 2)
        return apply(F.scaled_dot_product_attention, heads, heads, heads)  # type: ignore[no-any-return]

    reason = "it ran without gradients, as under torch.no_grad or in an autograd.Function"
    silent = {
        "own grad_input, grad_weight, grad_output": reason,
        "attention -1 grad_query, grad_key, grad_value, grad_output": reason,
    }
    task = Task(make=lambda: Made(run, before=linear(), own=parameter()))
    trained = lawful(task, tmp_path / "run", silent=silent)
    assert set(trained.run.select(module="own").column("tensor_name")) == {"input", "weight", "output"}
    assert trained.run.status()[0].num_missing == 7
    assert f"not recorded: own grad_input, grad_weight, grad_output: {reason}" in capsys.readouterr().err


def function_first() -> Made:
    """Begins with a bare product."""
    return Made(lambda model, hidden: model.after(F.linear(hidden, model.own)), own=parameter(), after=linear())


def test_models_may_be_called_in_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) + model.forward(batch) + model(batch)).square().mean()  # type: ignore[no-any-return]

    trained = train_twice(Task(make=function_first, loss=loss), tmp_path / "run")
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


@pytest.mark.parametrize("around", ["nothing", "device", "mode"])
def test_modes_of_the_training_stay_in_place(tmp_path: Path, around: str) -> None:
    def run(model: Any, hidden: torch.Tensor) -> Any:
        hidden = model.layers[0](hidden)
        with torch.device("cpu"), Doubling():
            hidden = F.linear(hidden, model.own)
            assert isinstance(_get_current_function_mode_stack()[-1], Doubling)
        return model.layers[1](hidden)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        contexts: dict[str, Any] = {"device": torch.device("cpu"), "mode": Doubling()}
        if around not in contexts:
            return model(batch).square().mean()  # type: ignore[no-any-return]
        with contexts[around]:
            before = _get_current_function_mode_stack()
            output = model(batch)
            assert _get_current_function_mode_stack() == before
            return output.square().mean()  # type: ignore[no-any-return]

    def make() -> Made:
        return Made(run, layers=nn.ModuleList(linear() for _ in range(2)), own=parameter())

    trained = train_twice(Task(make=make, loss=loss), tmp_path / "run")
    assert trained.is_equal
    # What is recorded of a bare product is what was multiplied.
    record = only(trained.run, iteration=0, module="own", tensor_name="input")
    before = only(trained.run, iteration=0, module="layers.0", tensor_name="output")
    assert torch.equal(record.tensor(), before.tensor() * (4 if around == "mode" else 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ["device", "default"])
def test_a_default_device_around_a_direct_forward_is_taken_away(tmp_path: Path, kind: str) -> None:
    model, batch = holding(), torch.randn(BATCH, WIDTH)
    optimizer = sgd(model)
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


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("num_layers", [0, 2])
def test_models_beside_the_captured_one_compute_the_same_bits(
    tmp_path: Path, *, num_layers: int, is_direct: bool
) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True)
    teacher = (nn.TransformerEncoder(layer, num_layers) if num_layers else layer).eval()
    batch = torch.randn(BATCH, 10 * LENGTH, WIDTH)
    taught = []

    def run(model: Any, hidden: torch.Tensor) -> Any:
        with torch.no_grad():
            taught.append(teacher(hidden))
        return model.layer(hidden)

    with torch.no_grad():
        plain = teacher(batch)
    model = Made(run, layer=linear())
    optimizer = sgd(model)
    with Capture(tmp_path / "run", model=model, min_iterations=1, strict=True):
        with torch.no_grad():
            assert torch.equal(teacher(batch), plain)
        (model.forward if is_direct else model)(batch).sum().backward()
        assert torch.equal(taught[0], plain)
        optimizer.step()
    assert torch.overrides.has_torch_function is has_torch_function


def test_an_iteration_that_ends_in_a_backward_pass_leaves_no_mode(tmp_path: Path) -> None:
    model = holding()
    optimizer = sgd(model)
    model.get_parameter("before.weight").register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with Capture(tmp_path / "run", model=model, min_iterations=1, strict=True):
        for _ in range(2):
            model.forward(torch.randn(BATCH, WIDTH)).sum().backward()


def test_a_direct_forward_with_steps_in_its_backward_pass_leaves_no_mode_in_idle_iterations(tmp_path: Path) -> None:
    model, backward = function_first(), torch.Tensor.backward.__code__
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
    seen = []
    with Capture(tmp_path / "run", min_iterations=2, every=3, strict=True) as capture:
        for _ in range(6):
            seen.append((capture.is_recording, len(_get_current_function_mode_stack())))
            model.forward(torch.randn(BATCH, WIDTH)).sum().backward()
    assert seen == [(True, 0), (False, 0), (False, 0), (True, 1), (False, 0), (False, 0)]
    assert torch.Tensor.backward.__code__ is backward
    run = open_run(tmp_path / "run")
    # What comes before the first module was not seen in the first iteration.
    assert modules_of(run, iteration=0, tensor_name="grad_weight") == {"after"}
    assert modules_of(run, iteration=3, tensor_name="grad_weight") == {"own", "after"}


def test_a_forward_that_outlasts_the_iteration_leaves_its_thread_no_mode(tmp_path: Path) -> None:
    model = holding()
    optimizer = sgd(model)
    is_inside, may_go_on = threading.Event(), threading.Event()
    stacks: list[Any] = []

    def wait(*_: Any) -> None:
        is_inside.set()
        may_go_on.wait()

    def forward() -> None:
        handle = model.get_submodule("before").register_forward_hook(wait)
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
    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        hidden = model.layer(hidden)
        if model.is_interrupted:
            raise KeyboardInterrupt
        return F.linear(hidden, model.layer.weight)

    model = Made(run, layer=linear(), is_interrupted=True)
    optimizer = sgd(model)
    with Capture(tmp_path / "run", min_iterations=1, strict=True):
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(BATCH, WIDTH))
        model.is_interrupted = False  # type: ignore[assignment]  # it is no tensor
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        optimizer.step()
        assert not _get_current_function_mode_stack()
    assert len(open_run(tmp_path / "run").select(tensor_name="grad_weight")) == 2


@pytest.mark.parametrize("place", ["hook", "suspended"])
def test_a_capture_that_a_signal_ends_while_the_mode_is_off_leaves_no_mode(tmp_path: Path, place: str) -> None:
    model = holding()
    with Capture(tmp_path / "run", model=model) as capture:

        def interrupt(*_: Any) -> None:
            if place == "hook":
                Hook(capture.close)()
            else:
                with MODE.suspended():
                    capture.close()

        model.get_submodule("before").register_forward_hook(interrupt)
        model(torch.randn(BATCH, WIDTH))
        assert not _get_current_function_mode_stack()


def test_each_thread_has_a_mode_of_its_own(tmp_path: Path) -> None:
    model = holding()
    optimizer = sgd(model)
    with Capture(tmp_path / "run", model=model, min_iterations=1, strict=True):
        thread = threading.Thread(target=lambda: model(torch.randn(BATCH, WIDTH)).sum().backward())
        thread.start()
        thread.join()
        optimizer.step()
    assert modules_of(open_run(tmp_path / "run"), tensor_name="grad_weight") == {"before", *OWN}


def test_a_function_of_python_is_the_same_function_again_and_keeps_its_signature(tmp_path: Path) -> None:
    """Callers such as transformers pass `window_size` only to an attention that takes it, as `inspect` says."""
    function = F.multi_head_attention_forward
    code, signature, names = function.__code__, inspect.signature(function), set(vars(function))
    model = nn.MultiheadAttention(WIDTH, 4)
    batch = torch.randn(LENGTH, BATCH, WIDTH)
    with Capture(tmp_path / "run", model=model, min_iterations=1, strict=True):
        model(batch, batch, batch)[0].sum().backward()
        assert function.__code__ is not code
        assert inspect.signature(function) == signature
        sgd(model).step()
    assert function.__code__ is code
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
        with Capture(tmp_path / "run", model=linear(), min_iterations=1, strict=True):
            assert attend.__code__ is not code
            by_value = FunctionType(function.__code__, {**function.__globals__, "__name__": "__main__"}, "attend")
            pickled = cloudpickle.dumps(by_value)
            assert torch.equal(pickle.loads(pickled)(batch, batch, batch), attend(batch, batch, batch))  # noqa: S301
    finally:
        unregister_role(role)
    assert b"ranktape" not in pickled
    assert torch.equal(pickle.loads(pickled)(batch, batch, batch), attend(batch, batch, batch))  # noqa: S301


def test_rows_of_a_weight_are_known_by_their_place_in_it() -> None:
    base = torch.empty(4, 4, 4)
    assert [rows_of(base[number], base) for number in range(4)] == [(number, None) for number in range(4)]
    parts = [(first, last) for last in range(1, 5) for first in range(last)]
    assert [rows_of(base[first:last], base) for first, last in parts] == parts
    others = [base.mT, base[::2], base[:, :2], base[0, :2], base[0].T, base.view(-1)[1:17].view(4, 4), base.view(16, 4)]
    assert [rows_of(other, base) for other in others] == [None] * len(others)
    assert rows_of(torch.empty(()), torch.empty(())) is None
