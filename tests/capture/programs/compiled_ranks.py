"""Compiled trainings on several ranks, each plain, captured, and captured where nothing is compiled.

compiled_ranks.py OUT WAY...: every rank writes the losses of each way to OUT, and each capture its run.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

from tests.capture.compiled_matrix import RECORDED, WRAPPINGS, train


def main(out: Path, ways: list[str]) -> None:
    warnings.simplefilter("ignore")  # dynamo meets deprecated parts of torch itself
    dist.init_process_group("gloo")
    for way in ways:
        wrapping = WRAPPINGS[way]
        train(wrapping, out / way / "eager", is_compiled=False, **RECORDED)
        plain = train(wrapping, None, is_compiled=True)
        captured = train(wrapping, out / way / "compiled", is_compiled=True, **RECORDED)
        document = json.dumps({"plain": plain, "captured": captured})
        (out / f"{way}.rank{dist.get_rank()}.json").write_text(document)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
