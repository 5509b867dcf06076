"""Does the worst product that a replay predicts say how much loss a training in that precision costs?

For each model and learning rate one training in bf16 is recorded in three steps and replayed: for every recipe the SQNR
of each product of each layer, and two precision plans. Then each of them is trained from the same weights on the same
batches, and its loss is compared with that of bf16. No bar: this measures a claim of the documentation
(docs/precision_plans.md). One process and one thread.

precision_plans.py [--steps N] [--models NAMES] [--learning-rates LR,...] [--output DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ranktape.analyze import fake_quantize, precision_plan, replay
from ranktape.analyze.numerics.recipes.plan_file import PlannedModule, PrecisionPlan, write_plan
from ranktape.analyze.numerics.recipes.table import RECIPES as RECIPE_TABLE
from ranktape.capture import Capture
from ranktape.launch.demo_train import GPT, VOCABULARY, GPTConfig, draw_batch, read_corpus
from ranktape.storage import Records, open_run

# B = batch, T = positions, D = model width, H = heads

RECIPES = ("mxfp8", "nvfp4", "mxfp4")
TARGET_SQNR = 20
"""Of the first plan, in dB."""
TARGET_BITS = 4.6
"""Of the second plan: bits an element."""
CONTEXT = 64
BATCH_SIZE = 8
WARM_UP_STEPS = 20
LAST_STEPS = 50
"""Steps at the end whose losses are averaged."""
HELD_OUT = 64
"""Windows at the end of the text that no training sees."""


class GatedLayer(nn.Module):
    """A decoder layer as in LLaMA: RMSNorm, one projection for query, key and value, no biases, SwiGLU."""

    def __init__(self, width: int, *, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The residual stream after the layer, [B, T, D]."""
        batch, positions, width = x_BTD.shape
        parts = self.qkv(self.attention_norm(x_BTD)).view(batch, positions, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query_BHTD, key_BHTD, value_BHTD = parts.unbind()
        attended_BHTD = functional.scaled_dot_product_attention(query_BHTD, key_BHTD, value_BHTD, is_causal=True)
        x_BTD = x_BTD + self.out(attended_BHTD.transpose(1, 2).reshape(batch, positions, width))
        normed_BTD = self.mlp_norm(x_BTD)
        gated: Tensor = x_BTD + self.down(functional.silu(self.gate(normed_BTD)) * self.up(normed_BTD))
        return gated


class GatedGPT(nn.Module):
    """A decoder over bytes of gated layers, with torch's own initial weights of linear layers."""

    def __init__(self, *, layers: int = 3, width: int = 96, hidden: int = 256, heads: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        self.blocks = nn.ModuleList(GatedLayer(width, hidden=hidden, heads=heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """The logits of the next token at each position, [B, T, V]."""
        x_BTD = self.embed(tokens_BT) + self.positions[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits: Tensor = self.lm_head(self.norm(x_BTD))
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(GPTConfig(layers=2, width=128, heads=4, context=CONTEXT)),
    "gated": GatedGPT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What became of one training."""

    model: str
    learning_rate: float
    name: str
    """The recipe or the plan; fp32 and bf16 are not quantised."""
    bits: float
    """Stored bits of an element of an operand, weighted by multiply-adds."""
    worst_sqnr: float | None
    """Predicted, in dB: the worst product of any layer, over the recorded steps."""
    mean_sqnr: float | None
    """Predicted, in dB: of the mean noise-to-signal ratio of all products."""
    worst_product: str
    """Which one it is."""
    losses: list[float]
    """Of each step."""
    held_out: float
    """Loss on text that was not trained on, computed in the same precision."""
    seconds: float
    """Processor time."""


def train(
    model: nn.Module, *, learning_rate: float, steps: int, dtype: torch.dtype, run: Path | None = None
) -> tuple[list[float], float]:
    """The loss of each step and the held-out loss. All trainings see the same batches."""
    text = read_corpus()
    held_out = text[-HELD_OUT * (CONTEXT + 1) :].view(HELD_OUT, CONTEXT + 1).long()
    seen = text[: -HELD_OUT * (CONTEXT + 1)]
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / WARM_UP_STEPS, total_iters=WARM_UP_STEPS)
    losses: list[float] = []

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = model(tokens)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def all_steps() -> None:
        for _ in range(steps):
            tokens, targets = draw_batch(seen, batch_size=BATCH_SIZE, context=CONTEXT, generator=generator)
            loss = loss_of(tokens, targets)
            loss.backward()
            losses.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            warm_up.step()

    if run is None:
        all_steps()
    else:
        every = max(1, steps // 3)
        with Capture(str(run), model=model, start_at=every // 2, every=every, max_iterations=3, quant_type="bf16"):
            all_steps()
    with torch.no_grad():
        return losses, loss_of(held_out[:, :-1], held_out[:, 1:]).item()


def predicted(rows: Sequence[tuple[str, float]]) -> tuple[float, float, str]:
    """The worst SQNR, the SQNR of the mean noise-to-signal ratio, and the name of the worst product."""
    name, worst = min(rows, key=lambda row: row[1])
    noise = statistics.fmean(10 ** (-sqnr / 10) for _, sqnr in rows)
    return worst, -10 * math.log10(noise), name


def of_recipe(records: Records, recipe: str) -> tuple[float, float, str]:
    """What a replay predicts of a recipe."""
    rows = replay(records, recipe=recipe).records()
    return predicted([(f"{row['product']} of {row['module']}", row["sqnr"]) for row in rows if row["recipe"] == recipe])


def of_plan(plan: PrecisionPlan) -> tuple[float, float, str]:
    """What a plan expects of itself."""
    return predicted(
        [(f"{product} of {one.module}", sqnr) for one in plan.modules for product, sqnr in one.sqnr.items()]
    )


def control_of(plan: PrecisionPlan, records: Records) -> PrecisionPlan:
    """NVFP4 everywhere but for the layers that need it least, which get MXFP8: at least as many bits as the plan."""
    rows = replay(records, recipe=("nvfp4", "mxfp8")).records()
    sqnr: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        sqnr.setdefault((row["module"], row["recipe"]), {})[row["product"]] = row["sqnr"]

    def given(recipe: str, one: PlannedModule) -> PlannedModule:
        return replace(one, recipe=RECIPE_TABLE[recipe], sqnr=sqnr[one.module, recipe])

    best_first = sorted(plan.modules, key=lambda one: -min(sqnr[one.module, "nvfp4"].values()))
    for number in range(len(best_first) + 1):
        modules = [given("mxfp8" if place < number else "nvfp4", one) for place, one in enumerate(best_first)]
        control = PrecisionPlan(modules=tuple(modules))
        if control.mean_bits >= plan.mean_bits:
            return control
    return plan


def run_all(model_name: str, *, learning_rate: float, steps: int, output: Path) -> list[Training]:
    """All trainings of a model at a learning rate."""
    found: list[Training] = []

    def add(
        name: str,
        *,
        bits: float,
        forecast: tuple[float, float, str] | None = None,
        recipe: str | None = None,
        plan: PrecisionPlan | None = None,
        run: Path | None = None,
    ) -> None:
        torch.manual_seed(0)
        model = MODELS[model_name]()
        if recipe is not None:
            fake_quantize(model, recipe=recipe)
        if plan is not None:
            fake_quantize(model, plan=plan)
        started = time.process_time()
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        losses, held_out = train(model, learning_rate=learning_rate, steps=steps, dtype=dtype, run=run)
        worst, mean, where = forecast or (None, None, "")
        found.append(
            Training(
                model=model_name,
                learning_rate=learning_rate,
                name=name,
                bits=bits,
                worst_sqnr=worst,
                mean_sqnr=mean,
                worst_product=where,
                losses=losses,
                held_out=held_out,
                seconds=time.process_time() - started,
            )
        )
        last = statistics.fmean(losses[-LAST_STEPS:])
        print(f"{model_name} {learning_rate:g} {name}: loss {last:.3f}, {found[-1].seconds:.0f} s", flush=True)

    run = output / f"{model_name}-{learning_rate:g}"
    add("bf16", bits=16, run=run)
    add("fp32", bits=32)
    records = open_run(str(run)).select()
    plans = {
        f"plan, {TARGET_SQNR} dB": precision_plan(records, recipe=RECIPES, target_sqnr=TARGET_SQNR),
        f"plan, {TARGET_BITS} bits": precision_plan(records, recipe=RECIPES, target_bits=TARGET_BITS),
    }
    for recipe in RECIPES:
        bits = precision_plan(records, recipe=recipe, target_sqnr=-100).mean_bits
        add(recipe, bits=bits, forecast=of_recipe(records, recipe), recipe=recipe)
    plans["the same bits elsewhere"] = control_of(plans[f"plan, {TARGET_BITS} bits"], records)
    for name, plan in plans.items():
        write_plan(plan, output / f"{model_name}-{learning_rate:g}-{name.replace(', ', '-').replace(' ', '-')}.yaml")
        add(name, bits=plan.mean_bits, forecast=of_plan(plan), plan=plan)
    return found


def ranks_of(numbers: Sequence[float]) -> list[int]:
    """The place of each number in their order."""
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    return [order.index(index) for index in range(len(numbers))]


def table(trainings: Sequence[Training]) -> str:
    """The trainings of one model and learning rate as Markdown, with how well the predictions order the losses."""
    base = next(one for one in trainings if one.name == "bf16")
    lines = [
        "| training | bits | worst, mean dB | loss - bf16 | held-out | worst product |",
        "|---|---|---|---|---|---|",
    ]
    quantised: list[tuple[float, float, float]] = []
    for one in sorted(trainings, key=lambda one: -(one.worst_sqnr or math.inf)):
        pairs = zip(one.losses[-LAST_STEPS:], base.losses[-LAST_STEPS:], strict=True)
        apart = [own - other for own, other in pairs]
        mean = statistics.fmean(apart)
        error = statistics.stdev(apart) / len(apart) ** 0.5
        forecast = "" if one.worst_sqnr is None else f"{one.worst_sqnr:.1f}, {one.mean_sqnr:.1f}"
        loss = "0" if one is base else f"{mean:+.3f} \N{PLUS-MINUS SIGN} {error:.3f}"
        lines.append(
            f"| {one.name} | {one.bits:.3g} | {forecast} | {loss} | {one.held_out:.3f} | {one.worst_product} |"
        )
        if one.worst_sqnr is not None and one.mean_sqnr is not None:
            quantised.append((one.worst_sqnr, one.mean_sqnr, mean))
    worst_ranks, mean_ranks, loss_ranks = (ranks_of(column) for column in zip(*quantised, strict=True))
    by_worst, by_mean = (-statistics.correlation(column, loss_ranks) for column in (worst_ranks, mean_ranks))
    last = statistics.fmean(base.losses[-LAST_STEPS:])
    lines.append(
        f"\n{base.model}, learning rate {base.learning_rate:g}: bf16 ends at {last:.3f}; rank correlation of a better "
        f"prediction with a lower loss: worst product {by_worst:.2f}, mean {by_mean:.2f}\n"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print a table for each model and learning rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--models", default=",".join(MODELS), help="gpt, gated; with commas between")
    parser.add_argument("--learning-rates", default="1e-3,3e-3", help="of the first model; the others take the first")
    parser.add_argument("--output", type=Path, default=Path("runs/precision_plans"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    rates = [float(word) for word in options.learning_rates.split(",")]
    settings = [(name, rate) for name in options.models.split(",") for rate in rates]
    for name, rate in settings:
        if name != options.models.split(",")[0] and rate != rates[0]:
            continue
        trainings = run_all(name, learning_rate=rate, steps=options.steps, output=options.output)
        (options.output / f"{name}-{rate:g}.json").write_text(json.dumps([asdict(one) for one in trainings]))
        sys.stdout.write(table(trainings) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
