"""How does the demo train? Plain PyTorch: DDP, autocast, gradient accumulation; run it under torchrun."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ranktape.launch.demo_model import GPT, GPTConfig
from ranktape.launch.demo_text import read_text
from ranktape.launch.quantized_layers import QUANTIZATIONS, quantize_linears

WARM_UP_STEPS = 10
"""Steps in which the learning rate rises."""
PRINT_EVERY = 10
"""Steps between two lines of output."""


def parse_arguments() -> argparse.Namespace:
    """The command line of the demo's training script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--text", default=None)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--quant", choices=("none", *QUANTIZATIONS), default="none")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def draw_batch(text: Tensor, *, batch_size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text and the same windows one byte later, each [batch_size, context]."""
    starts = torch.randint(len(text) - context, (batch_size,), generator=generator)
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    """Train and print the loss."""
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(1 + arguments.seed * dist.get_world_size() + rank)

    config = GPTConfig()
    gpt = GPT(config)
    if arguments.quant != "none":
        quantize_linears(gpt, how=QUANTIZATIONS[arguments.quant])
    model = DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / WARM_UP_STEPS, total_iters=WARM_UP_STEPS)
    text = torch.frombuffer(bytearray(read_text(arguments.text)), dtype=torch.uint8)

    started = time.monotonic()
    losses: list[Tensor] = []
    for step in range(arguments.steps):
        for microbatch in range(arguments.micro_batches):
            tokens, targets = draw_batch(
                text, batch_size=arguments.batch_size, context=config.context, generator=generator
            )
            is_last = microbatch == arguments.micro_batches - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.dtype == "bf16"):
                    logits = model(tokens)
                loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
                (loss / arguments.micro_batches).backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warm_up.step()
        if rank == 0 and (step % PRINT_EVERY == 0 or step == arguments.steps - 1):
            # The mean since the last line: a single small batch says little.
            mean_loss = torch.stack(losses).mean().item()
            sys.stdout.write(f"step {step:4d}  loss {mean_loss:6.3f}  {time.monotonic() - started:6.1f} s\n")
            sys.stdout.flush()
            losses = []

    # gloo aborts now and then when one rank tears down while another still talks to it.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit("run this under torchrun, or use 'ranktape demo'")
    main()
