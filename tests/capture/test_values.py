"""The recorded values are those that the training computed with, where tensors have a past, and stored once."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from ranktape.analyze.replays.replayed import replay_calls
from ranktape.capture import Capture
from ranktape.capture.hooks.calls import CACHED
from ranktape.storage import Record, Run, open_run
from tests.analyze.recomputed import recompute
from tests.analyze.replay_runs import recorded_sqnr
from tests.capture.trainings import (
    WIDTH,
    Made,
    Task,
    Trained,
    captured,
    lawful,
    linear,
    missing,
    only,
    parameter,
    train,
    train_twice,
)
from tests.capture.verify import recomputed, verify_run
from tests.exhaustive import exhaustive_but

Step = Callable[[nn.Module, int], None]


def batch(seed: int) -> torch.Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(seed))


def both(make: Callable[[], nn.Module], step: Step, url: Path, **options: Any) -> Trained:
    """Train with and without capture: gradients and weights must be the same bits."""
    trained = train_twice(Task(make=make, step=step, options=options), url)
    assert trained.is_equal
    return trained


def one_pass(model: nn.Module, place: int) -> None:
    model(batch(place)).square().mean().backward()


def two_passes(model: nn.Module, place: int) -> None:
    for microbatch in range(2):
        one_pass(model, place + 9 * microbatch)


def two_layers() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), linear())


def reusing() -> Made:
    """Whose weights are used more than once in one autocast context: autocast casts each of them once."""

    def run(model: Any, hidden: torch.Tensor) -> Any:
        hidden = model.tied(torch.tanh(model.first(model.shared(model.shared(hidden)))))
        hidden = F.linear(torch.tanh(F.linear(hidden, model.bare)), model.bare)
        for _ in range(2):
            hidden = hidden + model.attention(hidden, hidden, hidden, need_weights=False)[0]
        return hidden + model.query(model.prompt) * model.key(model.prompt)

    layers = {name: linear(bias=name not in {"first", "tied"}) for name in ("shared", "first", "tied", "query", "key")}
    layers["tied"].weight = layers["first"].weight
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    bare = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
    return Made(run, **layers, bare=bare, prompt=parameter(5, WIDTH), attention=attention)


def step_in_autocast(model: nn.Module, place: int) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (model(batch(place)) * model(batch(place + 9))).float().square().mean()
    loss.backward()


def test_weights_that_autocast_casts_once_keep_their_gradients(tmp_path: Path) -> None:
    trained = both(reusing, step_in_autocast, tmp_path / "run")
    run, reasons = trained.run, missing(trained.run)
    names = {name: f"{name}.weight" for name in ("shared", "first", "attention.out_proj", "query")}
    names |= {"tied": "first.weight", "bare": "bare"}
    for iteration in run.iterations:
        for module, name in names.items():
            # Two passes in one graph: one gradient, which is their sum.
            record = only(run, iteration=iteration, module=module, tensor_name="grad_weight")
            assert torch.equal(record.tensor(), trained.plain[iteration][name]), module
    assert run.iterations == [0, 1]
    assert "no hook sees it" in reasons.pop("prompt (Made)")
    assert set(reasons) == {f"{name} backward post grad_input" for name in ("query", "key")}
    assert all("autocast" in reason for reason in reasons.values())


def test_a_weight_is_recorded_again_when_it_changes_within_an_iteration(tmp_path: Path) -> None:
    def step(model: nn.Module, place: int) -> None:
        weight = model.get_parameter("0.weight")
        for pass_ in range(2):
            one_pass(model, place + 9 * pass_)
            with torch.no_grad():
                weight.mul_(0.5)
        model.eval()
        with torch.no_grad():
            model(batch(place + 20))
        model.train()

    run = both(two_layers, step, tmp_path / "run", select={"mode": ("train", "eval")}).run
    assert verify_run(run)["output"] == 2 * 2 * 3
    weights = run.select(iteration=0, module="0", tensor_name="weight")
    found = {(one.mode, one.microbatch): one.tensor() for one in weights}
    assert list(found) == [("train", 0), ("train", 1), ("eval", 0)]
    assert torch.equal(found["train", 1], found["train", 0] * 0.5)
    assert torch.equal(found["eval", 0], found["train", 0] * 0.25)
    assert len(run.select(iteration=0, module="2", tensor_name="weight", mode="train")) == 1
    assert not missing(run)


def fast_weights(model: nn.Module, place: int) -> None:
    """MAML: the inner step computes weights, with which the same modules run again; two tasks."""
    slow: dict[str, torch.Tensor] = dict(model.named_parameters())
    losses = []
    for task in range(2):
        inner = functional_call(model, slow, (batch(place + 9 * task),)).square().mean()
        slopes = torch.autograd.grad(inner, list(slow.values()), create_graph=True)
        fast = {name: one - 0.5 * slope for (name, one), slope in zip(slow.items(), slopes, strict=True)}
        losses.append(functional_call(model, fast, (batch(place + 20 + task),)).square().mean())
    torch.stack(losses).sum().backward()


def average_weights(model: nn.Module, place: int) -> None:
    """A teacher's pass with other data in the same parameters, which counts no write, and back; a second of its own."""
    own = [one.data for one in model.parameters()]
    for scale in (0.9, 0.8):
        for one in model.parameters():
            one.data = one.data * scale  # the memory of the one before may be used again
        model(batch(place)).detach()
    for one, data in zip(model.parameters(), own, strict=True):
        one.data = data
    model(batch(place + 9)).square().mean().backward()


def part_of_weights(model: nn.Module, place: int) -> None:
    """The same storage read in another way."""
    weight = model.get_parameter("0.weight")
    model(batch(place)).square().mean().backward()
    weight.data = weight.data.T
    model(batch(place)).detach()
    weight.data = weight.data.T


@pytest.mark.parametrize(
    ("step", "num_weights"), [(fast_weights, [4, 4]), (average_weights, [3, 3]), (part_of_weights, [2, 1])]
)
def test_weights_that_take_turns_are_each_recorded_before_their_call(
    step: Callable[[nn.Module, int], None], num_weights: list[int], tmp_path: Path
) -> None:
    run = both(two_layers, step, tmp_path / "run").run
    outputs = run.select(tensor_name="output", operation="forward")
    assert len(outputs) == 2 * 2 * len(run.select(iteration=0, module="0", tensor_name="output"))
    for output in outputs:
        same = run.select(iteration=output.iteration, module=output.module, operation="forward")
        given = {
            one.tensor_name: one.tensor()
            for one in sorted(same, key=lambda one: one.counter)
            if one.counter < output.counter
        }
        assert torch.equal(F.linear(given["input"], given["weight"], given["bias"]), output.tensor()), output
    found = [len(run.select(iteration=0, module=name, tensor_name="weight")) for name in ("0", "2")]
    assert found == num_weights
    if step is not fast_weights:  # whose gradient of a gradient is another call
        verify_run(run)


class _Product(torch.autograd.Function):
    """A product with a backward pass of its own, as quantised layers have."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return F.linear(hidden, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, -2).T @ hidden.flatten(0, -2)


class OwnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (torch's name)
        return _Product.apply(input, self.weight)  # type: ignore[no-any-return, no-untyped-call]


def unusual() -> Made:
    """An embedding that writes to its weight, a linear layer with its own backward, attention with appended rows."""

    def run(model: Any, tokens: torch.Tensor) -> Any:
        hidden = model.own(model.embedding(tokens))
        hidden = hidden + model.biased(hidden, hidden, hidden)[0]
        return hidden + model.both(hidden, hidden, model.values(hidden))[0]

    return Made(
        run,
        embedding=nn.Embedding(20, WIDTH, max_norm=1.0),
        own=OwnLinear(WIDTH, WIDTH, bias=False),
        biased=nn.MultiheadAttention(WIDTH, 2, batch_first=True, add_bias_kv=True),
        both=nn.MultiheadAttention(WIDTH, 2, add_bias_kv=True, add_zero_attn=True, kdim=WIDTH, vdim=8),
        values=nn.Linear(WIDTH, 8),
    )


def test_layers_that_treat_their_operands_unusually_are_recorded_as_they_compute(tmp_path: Path) -> None:
    def step(model: nn.Module, place: int) -> None:
        model((batch(place)[..., 0].abs() * 5).long().clamp(0, 19)).square().mean().backward()

    trained = both(unusual, step, tmp_path / "run", select={"layer_type": ("linear", "attention", "embedding")})
    run = trained.run
    for iteration in run.iterations:
        for module in ("embedding", "own"):
            [record] = run.select(iteration=iteration, module=module, tensor_name="grad_weight")
            assert torch.equal(record.tensor(), trained.plain[iteration][f"{module}.weight"]), module
    counts = verify_run(run)
    assert counts["embedding output"] == counts["embedding grad_weight"] == len(run.iterations) == 2
    assert counts["attention output"] == counts["attention grad_query"] == 2 * 2
    [biased] = run.select(iteration=0, module="biased", tensor_name="key")
    [plus_zero] = run.select(iteration=0, module="both", tensor_name="value")
    # Tokens, samples, heads: after the tokens the row of the bias, then zeros.
    assert (biased.shape, plus_zero.shape) == ((6, 3, 2, 8), (5, 5, 2, 8))
    assert not plus_zero.tensor()[-1].any()
    reasons = missing(run)
    assert set(reasons) == {f"{module} grad_key, grad_value" for module in ("biased", "both")}
    assert all("a row is appended" in reason for reason in reasons.values())


class Merged(nn.Linear):
    """An adapter that is merged into the weight in each forward; the weight itself is frozen."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out)
        self.down, self.up = nn.Parameter(torch.randn(2, num_in) * 0.3), nn.Parameter(torch.randn(num_out, 2) * 0.3)
        self.weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight + self.up @ self.down, self.bias)


class Beside(Merged):
    """An adapter whose product is added to that of the layer: the input has three uses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            F.linear(x, self.weight, self.bias)
            + F.linear(F.linear(x, self.down), self.up)
            + x @ self.down.T @ self.up.T
        )


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2 + F.linear(x, self.weight * self.in_features**-0.5, self.bias * 2)


def rounded(x: torch.Tensor) -> torch.Tensor:
    step = x.detach().abs().amax(-1, keepdim=True) / 7
    return x + ((x / step).round() * step - x).detach()


class Rounded(nn.Linear):
    """Operands are rounded before the product, as in quantisation-aware training."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  (torch's name)
        return F.linear(rounded(input), rounded(self.weight), self.bias)


class Replaced(nn.Linear):
    """A forward that is put on the module, as accelerate does."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out)
        usual = self.forward
        self.forward = lambda x: usual(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)  # type: ignore[assignment,method-assign]


class Hidden(Merged):
    """The product is in a function inside of a method, run by a checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        run = functools.partial(checkpoint, lambda x: F.linear(x, self.weight * 2, self.bias), use_reentrant=False)
        return run(x)  # type: ignore[no-any-return]


OWN = {
    Hidden: {"weight", "wide_weight"},
    Merged: {"weight", "wide_weight"},
    Beside: {"weight"},
    Scaled: {"weight", "wide_weight"},
    Rounded: {"weight", "wide_weight", "input", "wide_input"},
    Replaced: {"weight"},
}
"""Classes with a forward of their own, and what is recorded of their first operands."""


def three(kind: type[nn.Linear]) -> Made:
    """Layers that have one input, so that it matters in which order its gradients are added up."""

    def run(model: Any, x: torch.Tensor) -> Any:
        hidden = model.before(x)
        return model.query(hidden) * model.key(hidden) + model.value(hidden)

    return Made(run, before=linear(), query=kind(WIDTH, WIDTH), key=kind(WIDTH, WIDTH), value=kind(WIDTH, WIDTH))


@pytest.mark.parametrize("kind", OWN)
@exhaustive_but("Merged", "Rounded", "Replaced", reason="three layers are in make test")
def test_of_layers_with_a_forward_of_their_own_what_multiplied_is_recorded(
    kind: type[nn.Linear], tmp_path: Path
) -> None:
    run = both(lambda: three(kind), two_passes, tmp_path / "run").run
    assert not missing(run)
    counts = verify_run(run)
    num_calls = 2 if kind is Scaled else 1
    assert counts["output"] >= 2 * 2 * (1 + 3 * num_calls)
    own = {one for one in recompute(run.select()) if not (one.agreement and one.agreement.is_agreed)}
    assert not own
    first = run.select(iteration=0, module="query", microbatch=0, operation="forward")
    assert {one.tensor_name for one in first} - {"bias", "output"} >= OWN[kind]
    torch.manual_seed(0)
    true = three(kind).get_parameter("query.weight")
    for record in first:
        if record.tensor_name == "wide_weight":
            assert torch.equal(record.tensor(), true)
            assert record.metadata == {"own_forward": True}
    # What replay computes with is what was multiplied.
    replayed = replay_calls(run.select(), [])
    assert min(recorded_sqnr(replayed).values()) > 100


class Multiplied(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias


class Doubled(nn.Linear):
    """Multiplies with another tensor than its weight, and calls no function that is known."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (2 * self.weight).T + self.bias


class Coded(nn.Linear):
    """Codes, and their scales in a buffer."""

    weight_scale: torch.Tensor

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out)
        codes = self.weight.detach().to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("weight_scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.float() * self.weight_scale).T + self.bias


@pytest.mark.parametrize(("kind", "is_agreed"), [(Multiplied, True), (Doubled, False), (Coded, False)])
def test_of_layers_that_show_no_product_the_class_is_named_and_what_disagrees_is_unchecked(
    kind: type[nn.Linear], *, is_agreed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = both(lambda: nn.Sequential(linear(), kind(WIDTH, WIDTH), kind(WIDTH, WIDTH)), one_pass, tmp_path / "run").run
    told = f"{kind.__name__} computes in a forward of its own that calls no F.linear"
    assert capsys.readouterr().err.count(told) == 1
    assert all(one.metadata == {"own_forward": True} for one in run.select(module="1", tensor_name="output"))
    assert len(run.select(tensor_name="grad_input")) == 2 * 2
    found = {
        (one.field("module"), one.reason) for one in recompute(run.select(tensor_name="output", operation="forward"))
    }
    reason = "" if is_agreed else "the class of the layer has its own forward, which may use other operands"
    assert found == {("0", ""), ("1", reason), ("2", reason)}
    reasons = missing(run)
    if kind is Coded:
        assert "(weight_scale), and only the codes are recorded" in reasons.pop("1 forward pre weight_scales")
        del reasons["2 forward pre weight_scales"]
    assert not reasons


def test_a_model_is_not_kept_after_its_capture(tmp_path: Path) -> None:
    kept: list[weakref.ref[Any]] = []

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Merged(WIDTH, WIDTH))
        kept.extend(weakref.ref(one) for one in (*model.modules(), *model.parameters()))
        return model

    train(Task(make=make, step=one_pass), Capture(tmp_path / "run"), steps=2)
    gc.collect()
    assert kept
    assert not [one() for one in kept if one() is not None]


class Added(nn.Linear):
    """Adds its bias after the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + self.bias


def test_of_a_bias_that_is_added_after_the_product_the_reason_is_said(tmp_path: Path) -> None:
    run = both(lambda: nn.Sequential(Added(WIDTH, WIDTH)), one_pass, tmp_path / "run").run
    verify_run(run)
    [(name, reason)] = missing(run).items()
    assert name == "0 bias, grad_bias"
    assert reason == "the forward of the layer gives no bias to F.linear"


class Alternating(nn.Linear):
    """Calls `F.linear` in every second call, where its code does not name it."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls % 2:
            return x @ (3 * self.weight).T + self.bias
        name = "linear"
        return getattr(F, name)(x, 2 * self.weight, self.bias)  # type: ignore[no-any-return]


def test_a_forward_that_calls_a_linear_function_in_some_calls_is_known_by_them(tmp_path: Path) -> None:
    run = both(lambda: nn.Sequential(linear(), Alternating(WIDTH, WIDTH)), two_passes, tmp_path / "run").run
    recomputed(run)
    [product] = run.select(module="1", iteration=1, microbatch=1, tensor_name="output")
    [weight] = run.select(module="1", iteration=1, microbatch=1, tensor_name="weight")
    [whole] = run.select(module="1", iteration=1, microbatch=0, tensor_name="output")
    assert whole.metadata == {"own_forward": True}
    assert not product.metadata
    [wide] = run.select(module="1", iteration=1, microbatch=1, tensor_name="wide_weight")
    assert torch.equal(weight.tensor(), 2 * wide.tensor())
    [(name, reason)] = missing(run).items()
    assert name == "1 backward post grad_input"
    assert reason.startswith("its forward calls F.linear in some calls, and did not in this one")


def test_a_forward_that_seemed_to_call_a_linear_function_lacks_one_gradient(tmp_path: Path) -> None:
    class Seeming(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.linear(x, self.weight, self.bias)  # type: ignore[no-any-return]

    run = both(lambda: nn.Sequential(linear(), Seeming(WIDTH, WIDTH)), two_passes, tmp_path / "run").run
    verify_run(run)
    grads = [(one.iteration, one.microbatch) for one in run.select(module="1", tensor_name="grad_input")]
    assert grads == [(0, 1), (1, 0), (1, 1)]
    assert len(run.select(module="1", tensor_name="grad_weight")) == 2 * 2
    [(name, reason)] = missing(run).items()
    assert name == "1 backward post grad_input"
    assert "calls no F.linear: later calls have it" in reason


def test_a_layer_that_returns_a_view_of_its_input_has_the_gradient_of_the_view(tmp_path: Path) -> None:
    true: list[torch.Tensor] = []

    def run_layer(layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        layer.loss = layer.side(hidden).square().mean()
        return hidden.view(-1, WIDTH)

    def run_model(model: Any, hidden: torch.Tensor) -> Any:
        hidden = model.embed(hidden).clone()
        view = model.layers[0](hidden)
        view.register_hook(lambda grad: true.append(grad.clone()))
        return model.layers[1](view + 1).square().mean() + hidden.sum() + model.layers[0].loss

    def make() -> Made:
        return Made(run_model, embed=linear(), layers=nn.ModuleList(Made(run_layer, side=linear()) for _ in range(2)))

    run = both(make, lambda model, place: model(batch(place)).backward(), tmp_path / "run", layers="all").run
    for iteration in (0, 1):
        record = only(run, iteration=iteration, module="layers.0", tensor_name="grad_output", layer_type="hidden")
        assert torch.equal(record.tensor(), true[iteration])


def places(url: Path, name: str = "weight") -> list[tuple[int, str]]:
    records = open_run(url).select(tensor_name=name)
    return [(record.iteration, record.module) for record in records]


def test_a_generation_stores_each_weight_and_each_bias_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    with Capture(tmp_path / "run", select={"mode": "eval"}, min_iterations=5), torch.no_grad():
        for token in range(5):
            if token == 2:
                model.get_parameter("1.bias").add_(1)
            if token == 3:
                model.get_parameter("1.weight").mul_(2)
            model(torch.randn(1, token + 1, 8))
    assert places(tmp_path / "run") == [(0, "0"), (0, "1"), (3, "1")]
    assert places(tmp_path / "run", "bias") == [(0, "0"), (0, "1"), (2, "1")]
    run = open_run(tmp_path / "run")
    assert verify_run(run)["output"] == 10
    assert len(run.select(tensor_name="input")) == 10
    statuses = run.status()
    # What is not stored again is not missing.
    assert [status.num_missing for status in statuses] == [0] * 5
    assert not any(status.silent_sites for status in statuses)


def test_a_generation_with_weights_that_take_turns_has_each_before_its_calls(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    first, second = model.get_parameter("0.weight").data, torch.randn(8, 8)
    turns = [[first], [first, second, first], [first], [second]]
    with (
        Capture(tmp_path / "run", select={"mode": "eval"}, min_iterations=4, advance_on="step") as capture,
        torch.no_grad(),
    ):
        for weights in turns:
            for weight in weights:
                model.get_parameter("0.weight").data = weight
                model(torch.randn(16, 8))
            capture.step()
    run = open_run(tmp_path / "run")
    assert [one.iteration for one in run.select(tensor_name="weight")] == [0, 1, 1, 3]
    verify_run(run)
    assert recomputed(run) == {"agrees": 6}
    assert not any(status.silent_sites for status in run.status())


def test_where_iterations_are_removed_each_has_the_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    with Capture(tmp_path / "run", select={"mode": "eval"}, max_iterations=3, keep_last=2), torch.no_grad():
        for _ in range(3):
            model(torch.randn(1, 8))
    assert places(tmp_path / "run") == [(1, "0"), (1, "1"), (2, "0"), (2, "1")]


def test_a_training_stores_them_in_each_iteration(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    with Capture(tmp_path / "run", select={"mode": ("train", "eval")}, min_iterations=3, advance_on="step") as capture:
        for _ in range(3):
            model.train()(torch.randn(2, 8)).sum().backward()
            with torch.no_grad():
                # Behind the back of autograd, which counts nothing of it.
                model.get_parameter("0.weight").data.add_(1)
                model.eval()(torch.randn(2, 8))
            capture.step()
    records = open_run(tmp_path / "run").select(tensor_name="weight")
    assert sorted((record.iteration, record.mode) for record in records) == [
        (iteration, mode) for iteration in range(3) for mode in ("eval", "train")
    ]


def test_zeros_that_have_no_memory_are_stored_as_zeros(tmp_path: Path) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path / "run", model=model, min_iterations=1, strict=True):
        model(torch._efficientzerotensor((2, WIDTH))).sum().backward()
        optimizer.step()
    [record] = open_run(tmp_path / "run").select(tensor_name="input")
    assert torch.equal(record.tensor(), torch.zeros(2, WIDTH))


# Biases.


def bare() -> Made:
    """Products with parameters of its own: with a bias, with one that is computed for the call, and with a part."""

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        whole = F.linear(x, model.weight, bias=model.bias)
        alone = F.linear(x, model.weight)
        part = F.linear(x, model.weight[:8], model.bias[:8])
        return whole.sum() + alone.sum() + part.sum() + F.linear(x, model.weight, model.bias * 2).square().sum()

    return Made(run, weight=parameter(12, WIDTH), bias=parameter(12))


def attending(**options: Any) -> Made:
    """Attention whose projections lie in one parameter, in parts of one, or in three."""

    def run(model: Any, x: torch.Tensor) -> Any:
        own = x[..., :4] if options else x
        first, _ = model.attention(x, own, own, need_weights=False)
        return model.attention(first, own, own)[0].square().sum()

    attention = nn.MultiheadAttention(WIDTH, 2, **options)
    for name in ("in_proj_bias", "out_proj.bias"):
        nn.init.normal_(attention.get_parameter(name))
    return Made(run, attention=attention)


@pytest.mark.parametrize(
    ("make", "num_outputs", "num_grads"),
    [
        (lambda: nn.Sequential(linear(), linear(bias=False), nn.Linear(WIDTH, 2)), 3, 2),
        (bare, 4, 3),
        (attending, 5, 5),
        (lambda: attending(kdim=4, vdim=4), 8, 8),
        (lambda: Made(lambda model, x: model.linear(model.linear(x).relu()), linear=linear()), 2, 2),
    ],
    ids=["linear", "bare", "multihead", "separate", "twice"],
)
def test_outputs_are_the_product_and_the_bias_to_the_bit(
    make: Callable[[], nn.Module], num_outputs: int, num_grads: int, tmp_path: Path
) -> None:
    task = Task(make=make, loss=lambda model, x: model(x).square().sum())
    run = lawful(task, tmp_path / "run", steps=1).run
    biases: dict[str, torch.Tensor] = {}
    weights = {record.module: record.tensor() for record in run.select(tensor_name="weight")}
    for record in sorted(run.select(operation="forward", layer_type="linear"), key=lambda one: one.counter):
        if record.tensor_name == "bias":
            biases[record.module] = record.tensor()
        if record.tensor_name == "output":
            given = only(run, module=record.module, tensor_name="input", call=record.call)
            bias = None if record.metadata == {"without_bias": True} else biases[record.module]
            assert torch.equal(record.tensor(), F.linear(given.tensor(), weights[record.module], bias)), record
    assert verify_run(run)["output"] == num_outputs
    assert len(run.select(tensor_name="grad_bias")) == num_grads


def named(run: Run, module: str = "0") -> dict[str, Record]:
    return {record.tensor_name: record for record in run.select(module=module, iteration=0)}


def test_a_bias_is_expected_where_there_is_one_and_can_be_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(linear(), linear(bias=False), linear())
    model.get_parameter("2.bias").requires_grad = False
    run = captured(model, tmp_path / "run", select={"layer_type": "linear"})
    assert run.status()[0].num_expected
    assert not missing(run)
    assert [{name for name in named(run, module) if "bias" in name} for module in "012"] == [
        {"bias", "grad_bias"}, set(), {"bias"},
    ]  # fmt: skip
    assert [named(run, name)["output"].metadata for name in "012"] == [None, {"without_bias": True}, None]
    bias = named(run)["bias"]
    about = (bias.operation, bias.phase, bias.component, bias.shape, bias.sample_dim)
    assert about == ("forward", "pre", "linear", (WIDTH,), None)
    select = {"where": "tensor_name not in ('bias', 'grad_bias')"}
    run = captured(nn.Sequential(linear()), tmp_path / "without", select=select)
    assert set(named(run)) == {"input", "weight", "output", "grad_output", "grad_weight"}
    assert named(run)["output"].metadata is None


def test_a_bias_that_is_computed_when_it_is_read_is_the_one_that_was_added(tmp_path: Path) -> None:
    model = nn.Sequential(linear())
    own = model.get_parameter("0.bias").detach().clone()
    parametrize.register_parametrization(model[0], "bias", Made(lambda _, bias: bias * 2))
    run = captured(model, tmp_path / "run", select={"layer_type": "linear"})
    assert set(named(run)) == {"input", "weight", "bias", "output", "grad_output", "grad_weight", "grad_bias"}
    assert torch.equal(named(run)["bias"].tensor(), 2 * own)
    assert verify_run(run)["output"] == 1
    assert not missing(run)


def test_a_bias_of_another_type_than_its_weight_is_no_obstacle_under_autocast(tmp_path: Path) -> None:
    # Autocast keeps its cast of the weight, whose gradient is seen on the weight itself, but not of this bias.
    model = linear()
    model.bias = nn.Parameter(model.bias.detach().bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = captured(nn.Sequential(model), tmp_path / "run")
    assert {"bias", "grad_bias", "grad_weight"} <= set(run.select().column("tensor_name"))


def both_ways(*, is_checkpointed: bool) -> Made:
    """Multiplies with one parameter as it is, and transposed, perhaps in a checkpoint."""

    def run(model: Any, x: torch.Tensor) -> Any:
        def twice(hidden: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = torch.tanh(F.linear(hidden, model.shared)) @ model.shared
            return product

        hidden = model.first(x)
        return checkpoint(twice, hidden, use_reentrant=True) if is_checkpointed else twice(hidden)

    return Made(run, first=linear(bias=False), shared=parameter())


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_gradient_of_several_calls_says_that_it_is_their_sum(
    tmp_path: Path, *, is_checkpointed: bool, is_autocast: bool
) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
            return model(x).float().square().mean()

    trained = train_twice(Task(make=lambda: both_ways(is_checkpointed=is_checkpointed), loss=loss), tmp_path / "run")
    assert trained.is_equal
    run = trained.run
    gradients = run.select(iteration=0, module="shared", tensor_name="grad_weight")
    if is_autocast:
        [gradient] = gradients
        assert gradient.metadata == {"summed": True}
        assert torch.equal(gradient.tensor(), trained.plain[0]["shared"])
        assert missing(run) == {"shared backward post grad_weight": CACHED}
    else:
        assert [(one.metadata, one.layout) for one in gradients] == [(None, "IO"), (None, "OI")]
    assert only(run, iteration=0, module="first", tensor_name="grad_weight").metadata is None
    verify_run(run.select(module="first"))
