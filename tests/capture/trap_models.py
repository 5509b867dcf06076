"""Which trainings do the tests of traps run? Each is a way of training that recorders are known to fail on.

A training is one iteration. It returns what must be the same, bit for bit, with and without a capture.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import scaled_dot_product_attention as attend

WIDTH = 8
BATCH = 3


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


class Views(nn.Module):
    """Operands that are views of something larger, or of something smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.expanded = nn.Linear(WIDTH, WIDTH)
        self.turned = nn.Linear(BATCH, WIDTH)
        self.cut = nn.Linear(WIDTH // 2, WIDTH)
        self.strided = nn.Linear(WIDTH // 2, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.before(hidden)
        expanded = self.expanded(hidden[:1].expand(5, WIDTH)).sum()
        turned = self.turned(hidden.T).sum()
        return expanded + turned + self.cut(hidden[1:2, 2:6]).sum() + self.strided(hidden[:, ::2]).sum()  # type: ignore[no-any-return]


def views() -> str:
    return passes(Views(), *batches())


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


@dataclass(slots=True)
class Kept:
    """A model and an input that live through several iterations, as a pipeline's receive buffers do."""

    model: nn.Module
    batch: torch.Tensor


def kept() -> Kept:
    torch.manual_seed(0)
    return Kept(nn.Sequential(Kernel(), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), torch.randn(BATCH, WIDTH).requires_grad_())


KEPT: list[Kept] = []
"""Of the trainings that run one after the other."""


def first_of_kept() -> str:
    KEPT[:] = [kept()]
    return again_with_kept()


def again_with_kept() -> str:
    return passes(KEPT[0].model, KEPT[0].batch, KEPT[0].batch)


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


class Named(nn.Module):
    """Takes its input by keyword, and gives a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, hidden: torch.Tensor) -> dict[str, Any]:
        return {"rest": None, "nested": {"logits": self.outer(input=self.inner(input=hidden))}}


def dictionaries() -> str:
    model = Named()
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


def run(names: Iterable[str]) -> dict[str, str]:
    """Train; what each came to."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        found[name] = TRAININGS[name]()
    return found
