"""A loop under accelerate, with gradient accumulation. It knows of no recorder.

RANKTAPE_CAPTURE=runs/accelerate accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(256, 32)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :8].argmax(1)), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for features, labels in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(features), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.print(f"loss {loss.item():.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
