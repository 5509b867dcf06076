"""What does the legacy tool do, and how long does it take?

Written anew from a description of it (`ranktape/analyze/numerics/sweeps/legacy.py` tells the ways that it has):
torch operations in bfloat16 on the whole tensor, again for every level, and metrics in float32. The tests compare
the `legacy` mode with it, value by value, and `benchmarks/sweeps.py` runs against it.
Run alone it prints how long a sweep takes.

original_sweep.py [--size N] [--levels N] [--format NAME]
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalFormat:
    """The numbers that the tool works with."""

    exponent_bits: int
    """Of a code."""
    mantissa_bits: int
    """Of a code, without the implicit one."""
    maximum: float
    """Largest value."""

    @property
    def emin(self) -> int:
        return 2 - (1 << self.exponent_bits - 1)

    @property
    def emax(self) -> int:
        """As the tool has it."""
        return (1 << self.exponent_bits - 1) - 1

    @property
    def min_normal(self) -> float:
        return 2.0**self.emin

    @property
    def min_subnormal(self) -> float:
        return 2.0 ** (self.emin - self.mantissa_bits)


ORIGINAL_FORMATS = {
    "fp8_e4m3": OriginalFormat(exponent_bits=4, mantissa_bits=3, maximum=448.0),
    "fp8_e5m2": OriginalFormat(exponent_bits=5, mantissa_bits=2, maximum=57344.0),
    "fp6_e2m3": OriginalFormat(exponent_bits=2, mantissa_bits=3, maximum=7.5),
    "fp6_e3m2": OriginalFormat(exponent_bits=3, mantissa_bits=2, maximum=28.0),
    "fp4_e2m1": OriginalFormat(exponent_bits=2, mantissa_bits=1, maximum=6.0),
}

WEIGHTS = {"mse": 0.3, "cosine": 0.3, "psnr": 0.2, "mae": 0.1, "relative_error": 0.1}


def round_elements(scaled: torch.Tensor, *, row: OriginalFormat) -> torch.Tensor:
    """The values of the format, in the tensor's own type; ties away from zero."""
    magnitude = scaled.abs()
    exponent = torch.log2(torch.where(magnitude == 0, torch.ones_like(magnitude), magnitude)).floor()
    power = 2 ** exponent.clamp(min=row.emin)
    unit = 2**row.mantissa_bits
    whole = scaled.sign() * (magnitude / power * unit + 0.5).floor()
    rounded = (whole / unit * power).clamp(-row.maximum, row.maximum)
    return torch.where(scaled.isinf(), scaled, rounded)


def quantize(tensor: torch.Tensor, *, row: OriginalFormat, exponent: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A bfloat16 tensor after division by 2**`exponent`, and after rounding and multiplication."""
    scale = 2.0**exponent
    scaled = tensor / scale
    return scaled, round_elements(scaled, row=row) * scale


def count_beyond(scaled: torch.Tensor, *, row: OriginalFormat) -> dict[str, int]:
    """What the tool calls overflow, underflow and flush to zero."""
    magnitude = scaled.abs()
    is_nonzero = magnitude > 0
    return {
        "overflow": int((magnitude > row.maximum).sum()),
        "underflow": int((is_nonzero & (magnitude < row.min_subnormal)).sum()),
        "flush": int((is_nonzero & (magnitude < row.min_normal)).sum()),
    }


def measure(tensor: torch.Tensor, result: torch.Tensor) -> dict[str, float]:
    """The metrics, in float32; infinite or NaN where its squares are."""
    x, y = tensor.float(), result.float()
    error = x - y
    mse = float((error * error).mean())
    magnitude = x.abs()
    mae = float(error.abs().mean())
    return {
        "mse": mse,
        "rmse": math.sqrt(mse),
        "cosine": float((x * y).sum() / (x.norm() * y.norm())),
        "psnr": -20 * float(np.log10(math.sqrt(mse) / float(magnitude.max()))),
        "mae": mae,
        "max_abs_error": float(error.abs().max()),
        "relative_error": mae / float(magnitude.mean()) * 100,
    }


def exponents_of(tensor: torch.Tensor, *, row: OriginalFormat, num_levels: int) -> list[float]:
    """From the alignment of the largest value to that of the smallest, evenly."""
    magnitude = tensor.abs().float()
    first = math.floor(math.log2(float(magnitude.max()))) - row.emax
    last = math.floor(math.log2(float(magnitude[magnitude > 0].min()) / row.min_normal))
    exponents: list[float] = np.linspace(max(first, last), min(first, last), num_levels).tolist()
    return exponents


def original_sweep(tensor: torch.Tensor, *, format: str, num_levels: int = 21) -> list[dict[str, float]]:  # noqa: A002 - the option's name
    """One row of figures for each level; `score` is the composite one."""
    row = ORIGINAL_FORMATS[format]
    half = tensor.to(torch.bfloat16)
    rows = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for exponent in exponents_of(half, row=row, num_levels=num_levels):
            scaled, result = quantize(half, row=row, exponent=exponent)
            rows.append({"exponent": exponent} | count_beyond(scaled, row=row) | measure(half, result))
        for found, score in zip(rows, scores_of(rows), strict=True):
            found["score"] = score
    return rows


def scores_of(rows: list[dict[str, float]]) -> list[float]:
    """The composite score, 1e-10 in every denominator."""

    def placed(name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        figures = np.array([row[name] for row in rows])
        return np.asarray((figures - figures.min()) / (figures.max() - figures.min() + 1e-10))

    parts = {"cosine": np.array([row["cosine"] for row in rows]), "psnr": placed("psnr")}
    parts |= {name: 1 - placed(name) for name in ("mse", "mae", "relative_error")}
    found: list[float] = np.sum([WEIGHTS[name] * part for name, part in parts.items()], axis=0).tolist()
    return found


def main() -> None:
    """Time one sweep of N(0, 1)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the tensor")
    parser.add_argument("--levels", type=int, default=21, help="levels of the sweep")
    parser.add_argument("--format", choices=list(ORIGINAL_FORMATS), default="fp8_e4m3")
    given = parser.parse_args()
    torch.manual_seed(0)
    tensor = torch.randn(given.size, given.size).to(torch.bfloat16)
    start = time.perf_counter()
    rows = original_sweep(tensor, format=given.format, num_levels=given.levels)
    taken = time.perf_counter() - start
    best = max(rows, key=lambda row: row["score"])
    print(f"{given.size} x {given.size}, {given.format}, {given.levels} levels: {taken:.2f} s", end="; ")
    print(f"recommended exponent {best['exponent']:.2f}, MSE {best['mse']:.4g}, cosine {best['cosine']:.6f}")


if __name__ == "__main__":
    main()
