"""Ranks that no collective keeps together, with a flight recorder; rank 1 says once that something happened.

flight_apart.py URL STORAGE_OPTIONS FOLDER: it says so when there is a file `now`, and ends when there is one `end`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ranktape.capture import Capture

LAST = 2


def main(url: str, storage_options: str, folder: str) -> None:
    """Train."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    said = dist.get_rank() != 1
    options = {"record_last": LAST, "storage_options": json.loads(storage_options)}
    with Capture(url, model=model, **options) as capture:
        while not (Path(folder) / "end").exists():
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            if not said and (Path(folder) / "now").exists():
                said = True
                capture.trigger("the validation fell")
            optimizer.step()
            time.sleep(0.05)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
