"""What is recorded of a training that uses `torch.func`, and does it compute what it would without us?

Inside of a transform a tensor stands for many, or for itself and its tangent: it has no values that could be stored,
and nothing may be put between it and the transform. What runs outside is recorded as always. `functional_call` is no
transform: the tensors that it puts in the parameters' place are what is computed with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ranktape.capture import Capture
from ranktape.storage import open_run
from tests.capture.trainings import Made

# Torch itself scripts functions where it computes forward derivatives.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")

WIDTH = 8
REASON = "it ran inside of a transform of torch.func, whose tensors are not recorded"

Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def layer_of_all() -> Made:
    """A layer whose products are a module's, a bare one's and an attention's."""

    def run(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        heads = nn.functional.linear(layer.linear(hidden), layer.bare).unsqueeze(-3)
        with sdpa_kernel(SDPBackend.MATH):  # torch transforms no other as a whole
            return nn.functional.scaled_dot_product_attention(heads, -heads, 0.5 * heads).squeeze(-3)

    return Made(run, linear=nn.Linear(WIDTH, WIDTH), bare=nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH))


def through_vjp(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    output, pull = vjp(layer, hidden)  # type: ignore[misc]
    return pull(torch.ones_like(output))[0]  # type: ignore[no-any-return]


def through_per_sample_gradients(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """As differential privacy does: a gradient of the parameters for each sample."""
    parameters: dict[str, torch.Tensor] = dict(layer.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return functional_call(layer, parameters, (sample,)).square().sum()  # type: ignore[no-any-return]

    gradients, losses = vmap(grad_and_value(loss), in_dims=(None, 0))(parameters, hidden)
    return losses + sum(one.flatten(1).square().sum(-1) for one in gradients.values())  # type: ignore[no-any-return]


def through_an_ensemble(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    parameters, buffers = stack_module_state([layer, layer])
    return vmap(lambda one, other: functional_call(layer, (one, other), (hidden,)))(parameters, buffers)  # type: ignore[no-any-return]


TRANSFORMS: dict[str, Step] = {
    "vmap": lambda layer, hidden: vmap(layer)(hidden),
    "grad": lambda layer, hidden: grad(lambda one: layer(one).sum())(hidden),  # as a penalty on it
    "jvp": lambda layer, hidden: jvp(layer, (hidden,), (torch.ones_like(hidden),))[1],
    "vjp": through_vjp,
    "jacrev": lambda layer, hidden: jacrev(lambda one: layer(one).sum(-1))(hidden),
    "per_sample_gradients": through_per_sample_gradients,
    "ensemble": through_an_ensemble,
}


def model_of(steps: dict[str, Step]) -> Made:
    """A layer for each step, which runs it in its own way."""

    def run(model: Any, hidden: torch.Tensor) -> torch.Tensor:
        outputs = (step(model.layers[name], hidden).square().mean() for name, step in steps.items())
        return torch.stack(list(outputs)).sum()

    return Made(run, layers=nn.ModuleDict({name: layer_of_all() for name in steps}))


def trained(steps: dict[str, Step], url: Path | None) -> list[torch.Tensor]:
    """The losses, gradients and parameters of a training of two steps, captured where there is a URL."""
    torch.manual_seed(0)
    model = model_of(steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    found = []
    with contextlib.nullcontext() if url is None else Capture(url, model=model, strict=True, min_iterations=2):
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 3, WIDTH))
            loss.backward()
            found += [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
            optimizer.step()
    return [*found, *(one.detach().clone() for one in model.parameters())]


def is_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_what_is_transformed_is_computed_as_without_us_and_said_to_be_missing(tmp_path: Path) -> None:
    steps: dict[str, Step] = {"nothing": lambda layer, hidden: layer(hidden), **TRANSFORMS}
    assert is_equal(trained(steps, tmp_path / "run"), trained(steps, None))
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1]
    # The module, the bare product and the attention of each.
    parts = [f"layers.{name}{part}" for name in TRANSFORMS for part in (".linear", ".bare", "")]
    for status in run.status():
        assert {place.split()[0]: reason for place, reason in status.silent_sites[0].items()} == dict.fromkeys(
            parts, REASON
        )
    assert set(run.select().column("module")) == {f"layers.nothing{part}" for part in (".linear", ".bare", "")}
    names = set(run.select(module="layers.nothing.linear").column("tensor_name"))
    assert names == {"input", "weight", "bias", "output", "grad_output", "grad_weight", "grad_bias"}


def test_what_runs_with_other_parameters_is_recorded_with_these(tmp_path: Path) -> None:
    doubled = []

    def step(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        parameters = {name: 2 * one for name, one in layer.named_parameters()}
        doubled.append(parameters["linear.weight"])
        return functional_call(layer, parameters, (hidden,))  # type: ignore[no-any-return]

    assert is_equal(trained({"doubled": step}, tmp_path / "run"), trained({"doubled": step}, None))
    run = open_run(tmp_path / "run")
    assert set(run.select().column("module")) >= {"layers.doubled", "layers.doubled.linear"}
    for iteration, weight in enumerate(doubled[: len(run.iterations)]):
        [record] = run.select(iteration=iteration, module="layers.doubled.linear", tensor_name="weight")
        assert torch.equal(torch.from_numpy(record.read()), weight.detach())
        [gradient] = run.select(iteration=iteration, module="layers.doubled.linear", tensor_name="grad_weight")
        assert gradient.read().any()


def test_a_transform_around_the_whole_model_records_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    samples = torch.randn(4, WIDTH)

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, (sample,)).sum()  # type: ignore[no-any-return]

    expected = vmap(grad(loss), in_dims=(None, 0))(parameters, samples)
    with Capture(tmp_path / "run", model=model, advance_on="step", strict=True, min_iterations=1) as capture:
        found = vmap(grad(loss), in_dims=(None, 0))(parameters, samples)
        capture.step()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert open_run(tmp_path / "run").select().column("module").size == 0


@pytest.mark.parametrize("order", ["plain first", "transform first"])
def test_a_plain_pass_beside_a_transform_is_whole(order: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    hidden = torch.randn(4, WIDTH)
    with Capture(tmp_path / "run", model=model, advance_on="step", min_iterations=1) as capture:
        if order == "plain first":
            outputs = [model(hidden), vmap(model)(hidden)]
        else:
            outputs = [vmap(model)(hidden), model(hidden)]
        torch.stack(outputs).square().mean().backward()
        capture.step()
    [status] = open_run(tmp_path / "run").status()
    assert (status.num_expected, status.num_recorded, status.num_missing) == (15, 15, 0)
    assert set(status.silent_sites[0].values()) == {f"{REASON} (other calls of it are recorded)"}


def tied(loss: Callable[..., torch.Tensor]) -> Made:
    """A language model whose output layer shares the embedding's weight, and is used in pieces by the loss."""

    def run(model: Any, ids: torch.Tensor) -> torch.Tensor:
        hidden = model.body(model.embed(ids)).flatten(0, 1)
        pieces = zip(hidden.split(2), ids.flatten().split(2), strict=True)
        return torch.stack([loss(one, model.head.weight, targets) for one, targets in pieces]).sum()

    embed, head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16, bias=False)
    head.weight = embed.weight
    return Made(run, embed=embed, body=nn.Linear(WIDTH, WIDTH), head=head)


def piece(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(nn.functional.linear(hidden, weight), ids)


class Fused(torch.autograd.Function):
    """Computes its gradients in the forward pass, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        (ctx.of_hidden, ctx.of_weight), loss = grad_and_value(piece, argnums=(0, 1))(hidden, weight, ids)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grads[0] * ctx.of_hidden, grads[0] * ctx.of_weight, None


class ByHand(torch.autograd.Function):
    """Computes its product in its forward pass, in which torch follows no gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, ids)
        return piece(hidden, weight, ids)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, ids = ctx.saved_tensors
        logits = hidden @ weight.t()
        logits_grad = grads[0] * (logits.softmax(-1) - nn.functional.one_hot(ids, logits.shape[-1])) / len(ids)
        return logits_grad @ weight, logits_grad.t() @ hidden, None


def in_checkpoint(*operands: torch.Tensor) -> torch.Tensor:
    """The weight is an argument, of which a reentrant checkpoint makes another tensor in the backward pass."""
    return torch.utils.checkpoint.checkpoint(piece, *operands, use_reentrant=True)  # type: ignore[no-any-return]


WITHOUT_GRADIENTS = "it ran without gradients, as under torch.no_grad or in an autograd.Function"


@pytest.mark.parametrize(
    ("loss", "silent"),
    [
        (piece, {}),
        (in_checkpoint, {}),
        (Fused.apply, {"head": REASON}),
        (ByHand.apply, {"head grad_weight, grad_output, grad_input": WITHOUT_GRADIENTS}),
    ],
    ids=["plain", "reentrant checkpoint", "torch.func in a function", "function"],
)
def test_a_tied_output_layer_that_a_loss_uses_in_pieces_is_recorded_as_itself_or_has_its_reason(
    loss: Any, silent: dict[str, str], tmp_path: Path
) -> None:
    found = []
    for url in (None, tmp_path / "run"):
        torch.manual_seed(0)
        model, ids = tied(loss), torch.randint(0, 16, (2, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with contextlib.nullcontext() if url is None else Capture(url, model=model, strict=True, min_iterations=1):
            model(ids).backward()
            optimizer.step()
        found.append([one.detach() for one in model.parameters()])
    assert is_equal(*found)
    run = open_run(tmp_path / "run")
    [status] = run.status()
    assert status.silent_sites.get(0, {}) == silent
    names = [record.tensor_name for record in run.select() if record.module == "head"]
    values, gradients = ["input", "weight", "output"], ["grad_input", "grad_weight", "grad_output"]
    assert set(names) == {*([] if silent.get("head") == REASON else values), *([] if silent else gradients)}
    assert names.count("grad_weight") == (0 if silent else 3)
