"""Compiles the package and its kernels once, before the tests: processes load them, where each would compile all.

`make test` runs it while mypy has the other core. A kernel that it misses is compiled by the test that needs it.
Sources are compiled whatever PYTHONDONTWRITEBYTECODE says: a training that is started without takes 0.3 s longer.
"""

from __future__ import annotations

import compileall
import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ranktape.analyze import fake_quantize, quantize
from ranktape.analyze.numerics.formats import FORMATS, Rounding
from ranktape.analyze.numerics.histograms.moments import warm_up
from ranktape.analyze.numerics.quantization.operand import quantized_operand
from ranktape.errors import UsageError

CHECKOUT = Path(__file__).parents[1]


def load(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quantize_everything() -> None:
    """Every format, along both axes, in both ways of scaling and with every rounding, as far as they go together."""
    values = np.random.default_rng(0).normal(size=(64, 64))
    for name in (*FORMATS, "mxfp8", "mxfp4", "mxint8"):
        for rounding in Rounding:
            for dtype in (np.float32, np.float64, ml_dtypes.bfloat16):
                for axis in (0, -1):
                    seed = 0 if rounding in {Rounding.STOCHASTIC, Rounding.HYBRID} else None
                    array = values.astype(dtype)
                    try:
                        quantize(array, name, axis=axis, rounding=rounding, seed=seed, warn=False)
                        fake_quantize(torch.from_numpy(array.astype(np.float32)), forward=name, axis=axis)
                    except UsageError:
                        break  # a format of scales alone, or one that is not rounded so


def quantize_operands() -> None:
    """What only operands of products need: tiles, scales of every kind, rotations and draws."""
    matrix = torch.randn(64, 64)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("nvfp4", {"four_over_six": True, "rotation": 16}),
        ("nvfp4", {"rounding": "stochastic", "seed": 0}),
        ("int8", {"scaling": "channel"}),
        ("int8", {"scaling": "block", "scale_format": "fp32"}),
        ("fp8_e4m3", {"scaling": "tensor", "rotation": 16}),
    ]
    for scheme, options in cases:
        quantized_operand(matrix, scheme, **options)
        quantize(matrix.numpy(), scheme, warn=False, **options)


def main() -> None:
    """Compile the sources, and ask every question of a small run."""
    compileall.compile_dir(CHECKOUT / "ranktape", quiet=1)
    compileall.compile_file(CHECKOUT / "ranktape_autoload.py", quiet=1)
    warm_up()
    quantize_everything()
    quantize_operands()
    script = load(CHECKOUT / "docs" / "schemas.py")
    with tempfile.TemporaryDirectory() as folder:
        urls = script.make_runs(Path(folder))
        for name, questions in script.QUESTIONS.items():
            for words in questions:
                script.ask(name, words, urls=urls)


if __name__ == "__main__":
    main()
