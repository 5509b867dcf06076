"""Is every training recorded right, and left alone, in which recorders are known to fail?

One capture sees all trainings, an iteration each; a training returns what must be the same, bit for bit, with and
without a capture. `tests/README.md` has the list of traps.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import scaled_dot_product_attention as attend

from ranktape.capture import Capture, ModuleRole, register_role, unregister_role
from ranktape.storage import Records, Run, open_run
from tests.capture.trainings import Made, attentions, products
from tests.capture.verify import verify_run

# What torch says of its older ways of tracing.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

WIDTH, BATCH = 8, 3


def digest_of(*tensors: torch.Tensor | None) -> str:
    """What changes with any bit of them."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(b"none" if tensor is None else tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def end(model: nn.Module, *losses: torch.Tensor | None) -> str:
    """The losses and the gradients of a model."""
    return digest_of(*losses, *(parameter.grad for parameter in model.parameters()))


def passes(model: nn.Module, *batches: torch.Tensor) -> str:
    """Forward and backward, a microbatch each."""
    losses = []
    for batch in batches:
        losses.append(model(batch).float().square().mean())
        losses[-1].backward()
    return end(model, *losses)


def batches(number: int = 1) -> list[torch.Tensor]:
    return [torch.randn(BATCH, WIDTH) for _ in range(number)]


class WritesItsInput(nn.Linear):
    """A layer that changes what it is given."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.mul_(2))


def writes_its_input() -> str:
    return passes(nn.Sequential(nn.Linear(WIDTH, WIDTH), WritesItsInput(WIDTH, WIDTH)), *batches())


def views() -> str:
    """Operands that are views of something larger, or of something smaller."""

    def run(model: Any, hidden: torch.Tensor) -> Any:
        hidden = model.before(hidden)
        outputs = model.expanded(hidden[:1].expand(5, WIDTH)), model.turned(hidden.T), model.cut(hidden[1:2, 2:6])
        return sum(one.sum() for one in (*outputs, model.strided(hidden[:, ::2])))

    sizes = {"before": WIDTH, "expanded": WIDTH, "turned": BATCH, "cut": WIDTH // 2, "strided": WIDTH // 2}
    return passes(Made(run, **{name: nn.Linear(size, WIDTH) for name, size in sizes.items()}), *batches())


def gradient_of_a_gradient() -> str:
    """A gradient penalty."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    [batch] = batches()
    batch.requires_grad_()
    score = model(batch).sum()
    [slope] = torch.autograd.grad(score, batch, create_graph=True)
    loss = score + slope.square().sum()
    loss.backward()
    return end(model, loss, slope, batch.grad)


class Kernel(nn.Module):
    """A layer whose product is no `F.linear`: its gradient can be seen on the parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.T


KEPT: list[Any] = []
"""A model and an input that live through several iterations, as a pipeline's receive buffers do."""


def first_of_kept() -> str:
    torch.manual_seed(0)
    model = nn.Sequential(Kernel(), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    KEPT[:] = [model, torch.randn(BATCH, WIDTH).requires_grad_()]
    return again_with_kept()


def again_with_kept() -> str:
    model, batch = KEPT
    return passes(model, batch, batch)


def _in_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def other_threads() -> str:
    """The forward of one microbatch on another thread, the backward of the other."""
    model = Attending()
    first, second = batches(2)
    losses = [_in_thread(lambda: model(first).square().mean()), model(second).square().mean()]
    losses[0].backward()
    _in_thread(losses[1].backward)
    return end(model, *losses)


class Attending(nn.Module):
    """Attention by a name that was imported before anything was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query = self.query(hidden).view(1, 1, BATCH, WIDTH)
        return attend(query, 2 * query, 3 * query)


def module_with_two_names() -> str:
    """`__mp_main__` and `__main__` are one module; a replacement must not find itself."""
    sys.modules["ranktape_tests_twin"] = sys.modules[__name__]
    try:
        return passes(Attending(), *batches())
    finally:
        del sys.modules["ranktape_tests_twin"]


def outside_of_modules() -> str:
    """Functions that the training calls, and not a module."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    [batch] = batches()
    hidden = model(batch).view(1, 1, BATCH, WIDTH)
    loss = attend(hidden, 2 * hidden, hidden.exp()).square().mean()
    loss.backward()
    return end(model, loss)


def dictionaries() -> str:
    """Takes its input by keyword, and gives a dictionary."""

    def run(model: Any, *, hidden: torch.Tensor) -> dict[str, Any]:
        return {"rest": None, "nested": {"logits": model.outer(input=model.inner(input=hidden))}}

    model = Made(run, inner=nn.Linear(WIDTH, WIDTH), outer=nn.Linear(WIDTH, WIDTH))
    losses = []
    for batch in batches(2):
        losses.append(model(hidden=batch)["nested"]["logits"].square().mean())
        losses[-1].backward()
    return end(model, *losses)


def autocast() -> str:
    """The cast of a weight is kept for the whole region: the second microbatch has none of its own."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [model(batch).float().square().mean() for batch in batches(2)]
    for loss in losses:
        loss.backward()
    return end(model, *losses)


def _double(_: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (2 * args[0],)


def _triple(_: nn.Module, grads: Any, _outputs: Any) -> Any:
    return (3 * grads[0],)


def hooks_of_ones_own() -> str:
    """Hooks that change what goes in, what comes out, and gradients."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    middle = model[1]
    assert isinstance(middle, nn.Linear)
    middle.register_forward_pre_hook(_double)
    middle.register_forward_hook(lambda _module, _args, output: output + 1)
    middle.register_full_backward_hook(_triple)
    middle.weight.register_hook(lambda grad: 5 * grad)
    return passes(model, *batches())


def dropout() -> str:
    """What is drawn at random must be drawn alike."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    digest = passes(model, *batches(2))
    return digest + digest_of(torch.get_rng_state())


def wrapped() -> str:
    """Wrappers put names of their own into the paths of modules."""
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model = nn.Sequential(checkpoint_wrapper(inner), nn.Linear(WIDTH, WIDTH))
    return passes(model, *(batch.requires_grad_() for batch in batches()))


def forward_in_a_backward() -> str:
    """A gradient's hook that runs another model."""
    model, other = nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Sequential(nn.Linear(WIDTH, WIDTH))
    [batch] = batches()
    output = model(batch)
    seen = []

    def hook(grad: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen.append(other(grad))
        return grad

    output.register_hook(hook)
    loss = output.square().mean()
    loss.backward()
    return end(model, loss, *seen)


class Traced(nn.Module):
    """A model of parts, with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query = 4 * self.part(hidden).unflatten(-1, (2, -1)).transpose(0, 1).unsqueeze(0)
        return F.scaled_dot_product_attention(query, query.sin(), query.exp())


def traced() -> str:
    """A model that is made a graph of in the middle of an iteration, in every way there is."""
    model = Traced()
    [batch] = batches()
    digest = passes(model, batch)
    targets = [str(node.target) for node in torch.export.export(model, (batch,)).graph.nodes]
    targets += [str(node.target) for node in torch.fx.symbolic_trace(model).graph.nodes]
    scripted = torch.jit.trace(model, batch)
    targets += [node.kind() for node in scripted.inlined_graph.nodes()]
    return digest + str(targets) + end(model, scripted(batch))


def same_gradient_by_autograd() -> str:
    """Gradients that are asked for, and do not go into `.grad`."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    [batch] = batches()
    loss = model(batch).square().mean()
    return digest_of(loss, *torch.autograd.grad(loss, list(model.parameters())))


def clipped_in_place() -> str:
    """Gradients that are changed in place while the backward pass runs, and after it."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_negate)
    digest = passes(model, *batches(2))
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    return digest + end(model)


def _negate(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.neg_()


TRAININGS: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        writes_its_input,
        views,
        gradient_of_a_gradient,
        first_of_kept,
        again_with_kept,
        other_threads,
        module_with_two_names,
        outside_of_modules,
        dictionaries,
        autocast,
        hooks_of_ones_own,
        dropout,
        wrapped,
        forward_in_a_backward,
        traced,
        same_gradient_by_autograd,
        clipped_in_place,
    )
}
"""By the name of what is unusual."""


ORIGINAL = F.scaled_dot_product_attention
ROLE = ModuleRole(classes=(Kernel,), layer_type="linear", operands={"input": 0}, parameters={"weight": "weight"})


def run(name: str) -> str:
    """Train; what it came to."""
    torch.manual_seed(0)
    return TRAININGS[name]()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, str], dict[str, str]]:
    """The run of one capture, in which each training is an iteration; what each came to without it, and with it."""
    url = tmp_path_factory.mktemp("traps") / "run"
    register_role(ROLE)
    try:
        plain = {name: run(name) for name in TRAININGS}
        found: dict[str, str] = {}
        with Capture(url, advance_on="step", min_iterations=len(TRAININGS)) as capture:
            for name in TRAININGS:
                found[name] = run(name)
                capture.step()
    finally:
        unregister_role(ROLE)
    assert capture.close().met
    return open_run(url), plain, found


Of = Callable[[str], Records]


@pytest.fixture
def of(trained: tuple[Run, dict[str, str], dict[str, str]]) -> Of:
    """Gives the records of a training."""
    names = list(TRAININGS)
    return lambda name: trained[0].select(iteration=names.index(name))


COUNTS: dict[str, dict[str, int]] = {
    "views": products(5, 4),
    "first_of_kept": products(4),
    "again_with_kept": products(4),
    **dict.fromkeys(("dictionaries", "autocast", "dropout", "clipped_in_place"), products(4, 2)),
    "wrapped": products(2),
    "same_gradient_by_autograd": products(2, 1),
    **{name: {"output": 1, "grad_weight": 1} for name in ("forward_in_a_backward", "outside_of_modules")},
    "other_threads": {"output": 2, "grad_weight": 2} | attentions(2),
    "module_with_two_names": {"output": 1, "grad_weight": 1} | attentions(1),
    "traced": products(2, 1) | attentions(1),
}
"""How often each tensor is there, of trainings in which every layer computes what it was given."""


@pytest.mark.parametrize("name", TRAININGS)
def test_the_laws_hold(name: str, trained: tuple[Run, dict[str, str], dict[str, str]], of: Of) -> None:
    """Losses and gradients are the same bit for bit, nothing is missing, and products agree."""
    run, plain, found = trained
    assert found[name] == plain[name]
    silent = run.status()[list(TRAININGS).index(name)].silent_sites.get(0, {})
    own = {site: why for site, why in silent.items() if "was not called" not in why}  # of other trainings
    assert not own or name in {"traced", "gradient_of_a_gradient"}, own
    if name in COUNTS:
        assert verify_run(of(name)) == Counter(COUNTS[name])


def test_a_layer_that_writes_its_input_in_place_has_what_was_multiplied(of: Of) -> None:
    records = of("writes_its_input")
    [passed] = records.select(module="0", tensor_name="output")
    [taken] = records.select(module="1", tensor_name="input")
    assert torch.equal(2 * passed.tensor(), taken.tensor())
    assert verify_run(records)["grad_input"] == 1


def test_views_are_stored_as_what_they_show(of: Of) -> None:
    sizes = {record.module: (record.shape, record.nbytes) for record in of("views").select(tensor_name="input")}
    assert sizes == {
        "before": ((BATCH, WIDTH), 4 * BATCH * WIDTH),
        "expanded": ((5, WIDTH), 4 * 5 * WIDTH),
        "turned": ((WIDTH, BATCH), 4 * WIDTH * BATCH),
        "cut": ((1, WIDTH // 2), 4 * WIDTH // 2),
        "strided": ((BATCH, WIDTH // 2), 4 * BATCH * WIDTH // 2),
    }


def test_a_gradient_of_a_gradient_is_another_call(of: Of) -> None:
    records = of("gradient_of_a_gradient")
    for module in ("*.0", "*.2"):
        grads = records.select(module=module, tensor_name="grad_output")
        assert grads.column("call").tolist() == [0, 1]
        assert len(records.select(module=module, tensor_name="grad_weight")) == 1
    # The first pass is that of the score alone, whose gradient is 1.
    first = records.select(module="*.2", tensor_name="grad_output", call=0)[0].tensor()
    assert torch.equal(first, torch.ones(BATCH, 1))


def test_tensors_that_stay_collect_no_hooks(of: Of) -> None:
    for name in ("first_of_kept", "again_with_kept"):
        grads = of(name).select(tensor_name="grad_weight", module="*.0")
        assert grads.column("microbatch").tolist() == [0, 1]
    model, batch = KEPT
    for tensor in (batch, *model.parameters()):
        assert not tensor._backward_hooks
    for module in model.modules():
        assert not {*module._forward_pre_hooks, *module._forward_hooks, *module._backward_hooks}


def test_a_module_under_two_names_is_recorded_once_and_put_back(of: Of) -> None:
    assert len(of("module_with_two_names").select(layer_type="attention", tensor_name="output")) == 1
    assert attend is ORIGINAL
    assert F.scaled_dot_product_attention is ORIGINAL
    assert "ranktape_tests_twin" not in sys.modules


def test_attention_outside_of_every_module_is_not_recorded(of: Of) -> None:
    assert len(of("outside_of_modules").select(layer_type="attention")) == 0


def test_autocast_says_what_was_seen_and_what_was_computed_in(of: Of) -> None:
    records = of("autocast").select(module="*.0")
    dtypes = {
        name: sorted(set(records.select(tensor_name=name).column("dtype")))
        for name in ("input", "weight", "output", "grad_output", "grad_weight")
    }
    assert dtypes == {
        "input": ["float32"],
        "weight": ["float32"],
        "output": ["bfloat16"],
        "grad_output": ["bfloat16"],
        "grad_weight": ["float32"],
    }
    assert set(records.column("compute_dtype")) == {"bfloat16"}


def test_what_is_recorded_lies_inside_of_other_peoples_hooks(of: Of) -> None:
    records = {
        name: {record.tensor_name: record.tensor() for record in of("hooks_of_ones_own").select(module=f"*.{name}")}
        for name in "012"
    }
    first, second, third = (records[name] for name in "012")
    assert torch.equal(second["input"], 2 * first["output"])
    assert torch.equal(third["input"], second["output"] + 1)
    # A backward hook of the module stands between it and its input, a hook of the parameter behind it.
    torch.testing.assert_close(second["grad_input"], 3 * second["grad_output"] @ second["weight"])
    torch.testing.assert_close(second["grad_weight"], second["grad_output"].T @ second["input"])
    torch.testing.assert_close(first["grad_output"], 2 * second["grad_input"])


def test_the_names_of_wrappers_are_left_out(of: Of) -> None:
    assert {name.partition(".")[2] for name in of("wrapped").column("module")} == {"0.0", "1"}
