"""How long does it take to compute the products of a layer again by several recipes, and what do workers add?

products    3 products of one linear layer by 6 recipes, against what they cannot do without: the three products in
            bfloat16, in torch, and one pass of quantisation over each distinct operand. At most 3 times as long.
workers     a run of many calls of smaller layers through the engine: two workers of one thread each at least 1.7 times
            as fast as one process of one thread; beside them one process that uses all cores.

All ways in turn.

replay.py [PART...] [--size N] [--tokens N] [--recipes NAMES] [--calls N] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import torch

from ranktape.analyze.engine.engine import Engine, keep_freed_memory
from ranktape.analyze.engine.executors import end_executors
from ranktape.analyze.numerics.pieces import num_threads, share_cores
from ranktape.analyze.numerics.products import replay_products
from ranktape.analyze.numerics.quantization.operand import QuantizedOperand, named_operand
from ranktape.analyze.numerics.recipes.recipe import Recipe
from ranktape.analyze.numerics.recipes.words import parse_recipes
from ranktape.analyze.replays.replayed import replay_calls
from ranktape.analyze.replays.tasks import CALL_NBYTES
from ranktape.storage import Run
from tests.analyze.replay_runs import call_arrays, call_tensors
from tests.analyze.runs import store

Tensors = dict[str, torch.Tensor]

CALL_SIZE = 1024
"""Tokens, inputs and outputs of the calls that workers replay."""


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def layer(size: int, tokens: int) -> Tensors:
    """A linear layer's operands in bfloat16, with a few outlier channels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, size, generator=generator)
    x[:, :8] *= 20
    made = {
        "input": x,
        "weight": torch.randn(size, size, generator=generator) * 0.02,
        "grad_output": torch.randn(tokens, size, generator=generator) * 1e-5,
    }
    return {name: tensor.bfloat16() for name, tensor in made.items()}


def multiplied(operands: Tensors) -> Tensors:
    """The three products in bfloat16."""
    x, weight, grad = (operands[name] for name in ("input", "weight", "grad_output"))
    return {"output": x @ weight.T, "grad_input": grad @ weight, "grad_weight": grad.T @ x}


def distinct_operands(operands: Tensors, recipes: list[Recipe]) -> list[Callable[[], QuantizedOperand]]:
    """The passes of quantisation that a replay makes, each of a distinct operand."""
    passes: dict[str, Callable[[], QuantizedOperand]] = {}

    def kept(product: Any, name: str, x: torch.Tensor, *, seed: int) -> QuantizedOperand:
        passes[f"{product} {name} {x.stride()} {seed}"] = lambda: named_operand(product, name, x, seed=seed)
        return named_operand(product, name, x, seed=seed)

    with patch("ranktape.analyze.numerics.products.named_operand", kept):
        replay_products(operands, recipes)
    return list(passes.values())


def products_part(given: argparse.Namespace) -> None:
    keep_freed_memory(CALL_NBYTES)  # as tasks of the engine do
    operands, recipes = layer(given.size, given.tokens), parse_recipes(given.recipes)
    recorded = multiplied(operands)
    passes = distinct_operands(operands, recipes)
    rows = []
    for _ in range(given.rounds):
        multiply = seconds_of(lambda: multiplied(operands))
        quantise = sum(map(seconds_of, passes))
        replay = seconds_of(lambda: replay_products(operands, recipes, recorded=recorded))
        rows.append((multiply, quantise, replay, replay / (multiply + quantise)))
    multiply, quantise, replay, ratio = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"{given.tokens} tokens, {given.size} x {given.size}, {torch.get_num_threads()} threads: {given.recipes}")
    print(f"three products in bfloat16: {multiply:.2f} s")
    print(f"quantising {len(passes)} distinct operands: {quantise:.2f} s")
    print(f"replay of {3 * len(recipes)} products: {replay:.2f} s, {ratio:.2f} times both (bar: 3)")


def run_of_calls(folder: Path, *, num_calls: int) -> Run:
    """Calls of one layer each, with what was recorded of their results."""
    generator = np.random.default_rng(0)
    tensors = []
    for layer_idx in range(num_calls):
        arrays = call_arrays(
            tokens=CALL_SIZE, inputs=CALL_SIZE, outputs=CALL_SIZE, seed=int(generator.integers(1 << 30))
        )
        narrow = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
        tensors += call_tensors(narrow, layer_idx=layer_idx, module=f"layers.{layer_idx}.up")
    return store(folder / "run", tensors)


def workers_part(given: argparse.Namespace) -> None:
    recipes = parse_recipes(given.recipes)
    cores = num_threads(None)
    with tempfile.TemporaryDirectory() as folder:
        records = run_of_calls(Path(folder), num_calls=given.calls).select()
        print(f"{given.calls} calls of {CALL_SIZE} x {CALL_SIZE} with {CALL_SIZE} tokens, {cores} cores")

        def replay(workers: int) -> float:
            return seconds_of(lambda: replay_calls(records, recipes, engine=Engine(workers=workers, use_cache=False)))

        replay(1)
        print(f"one process on all cores: {min(replay(1) for _ in range(given.rounds)):.2f} s")
        torch.set_num_threads(share_cores(cores))
        replay(2)  # both have imported torch
        rows = [(one := replay(1), two := replay(2), one / two) for _ in range(given.rounds)]
        one, two, ratio = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"one process, one thread: {one:.2f} s; two workers: {two:.2f} s, {ratio:.2f} times as fast (bar: 1.7)")
        end_executors()


PARTS = {"products": products_part, "workers": workers_part}


def main() -> None:
    """Run the parts that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all unless named")
    parser.add_argument("--size", type=int, default=4096, help="inputs and outputs of the layer")
    parser.add_argument("--tokens", type=int, default=4096, help="of the call")
    parser.add_argument(
        "--recipes", default="fp8_tensor,mxfp8,mxfp4_rht_sr,nvfp4,nvfp4_nvidia,nvfp4_4over6", help="what is computed"
    )
    parser.add_argument("--calls", type=int, default=24, help="of the run that workers replay")
    parser.add_argument("--rounds", type=int, default=3, help="how often each pair is timed")
    given = parser.parse_args()
    unknown = [name for name in given.parts if name not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    for name in given.parts or PARTS:
        PARTS[name](given)


if __name__ == "__main__":
    main()
