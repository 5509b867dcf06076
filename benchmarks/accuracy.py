"""Does quantising give the errors that others published?

Signal-to-noise ratios (10 log10 of the sum of x squared over the sum of squared errors) and mean squared errors of
independent random numbers, beside what papers and other implementations say of the same. Blocks of 32, of 16 for
NVFP4; what is drawn is the same for everybody (numpy's default_rng(0)). The bars: 0.1 dB, 1 % for the mean squared
error of NVFP4; papers that do not say how their scales follow from the maximum get 4 %.

accuracy.py [--samples N]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ranktape.analyze.numerics.quantization.quantizer import quantize

Values = NDArray[np.float32]

SEED = 0
BLOCK_SIZE = 32

DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "N(0,1)": lambda bits, size: bits.standard_normal(size),
    "Laplace": lambda bits, size: bits.laplace(size=size),
    "t(4)": lambda bits, size: bits.standard_t(4, size=size),
}

INT_VS_FP = "arXiv 2510.25602, Fig. 4b, rotated Llama-3.1-8B tensors"
QUARTET_2 = "arXiv 2601.22813, Table 1"
QUARTET = "arXiv 2505.14669, Table 2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A figure that somebody published of N(0, 1), and how ours is had."""

    source: str
    """Where."""
    scheme: str
    """In our words."""
    options: dict[str, Any]
    """Of `quantize`."""
    published: float
    """The figure."""
    tolerance: float
    """How far ours may be: in dB, or relative for a mean squared error."""
    is_mse: bool = False
    """Whether the figure is a mean squared error; a ratio in dB otherwise."""


ANCHORS = (
    Anchor(source=INT_VS_FP, scheme="mxfp8_e4m3", options={"scale_rule": "rceil"}, published=31.51, tolerance=0.1),
    Anchor(source=INT_VS_FP, scheme="mxfp6_e2m3", options={"scale_rule": "rceil"}, published=31.03, tolerance=0.1),
    Anchor(source=INT_VS_FP, scheme="mxfp4_e2m1", options={"scale_rule": "rceil"}, published=18.79, tolerance=0.1),
    Anchor(source=INT_VS_FP, scheme="nvfp4", options={}, published=20.35, tolerance=0.1),
    Anchor(source=QUARTET_2, scheme="nvfp4", options={}, published=9.0e-3, tolerance=0.01, is_mse=True),
    Anchor(
        source=QUARTET,
        scheme="mxfp4_e2m1",
        options={"scale_rule": "rceil"},
        published=1.37e-2,
        tolerance=0.04,
        is_mse=True,
    ),
    Anchor(
        source=QUARTET,
        scheme="mxfp4_e2m1",
        options={"scale_rule": "rceil", "rounding": "stochastic", "seed": SEED},
        published=2.77e-2,
        tolerance=0.04,
        is_mse=True,
    ),
)

RULES = ("floor", "even", "rceil", "ceil")

MX_SCHEMES = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8")

KNOWN: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("N(0,1)", "mxfp8_e4m3"): (30.65, 31.18, 31.52, 31.52, 32.40),
    ("N(0,1)", "mxfp8_e5m2"): (25.36, 25.54, 25.54, 25.54, 26.40),
    ("N(0,1)", "mxfp6_e3m2"): (25.36, 25.54, 25.54, 25.54, 26.40),
    ("N(0,1)", "mxfp6_e2m3"): (30.94, 30.99, 30.96, 28.77, 32.31),
    ("N(0,1)", "mxfp4_e2m1"): (18.79, 19.03, 18.76, 16.82, 19.90),
    ("N(0,1)", "mxint8"): (41.66, None, 41.61, 35.64, 45.43),
    ("Laplace", "mxfp8_e4m3"): (29.99, 30.83, 31.54, 31.54, 33.01),
    ("Laplace", "mxfp4_e2m1"): (17.94, 18.15, 17.59, 15.39, 19.78),
    ("t(4)", "mxfp8_e4m3"): (29.84, 30.72, 31.54, None, None),
    ("t(4)", "mxfp4_e2m1"): (17.64, 17.79, 17.13, None, None),
}
"""What reference implementations (microxcaling, torchao and a table in float64) gave for the same numbers: for each of
`RULES` and for a float32 scale in dB; None where it was not measured."""

KNOWN_WHOLE = {
    "hif8": {"N(0,1)": 31.52, "Laplace": 31.53, "t(4)": 31.23},
    "nvfp4": {"N(0,1)": 20.44, "Laplace": 20.66, "t(4)": 20.73},
    "bf16": {"N(0,1)": 55.6},
    "fp16": {"N(0,1)": 73.65},
}
"""The same of what has no scale rule."""

BAR = 0.1
"""How far ours may be from those, in dB."""


def draw(name: str, *, samples: int) -> Values:
    """Rows of independent numbers, as float32."""
    return DISTRIBUTIONS[name](np.random.default_rng(SEED), samples).astype(np.float32).reshape(-1, 1024)


def errors_of(x: Values, result: Values) -> tuple[float, float]:
    """The signal-to-noise ratio in dB and the mean squared error."""
    exact = x.astype(np.float64)
    squared_error = (exact - result) ** 2
    return float(10 * np.log10((exact**2).sum() / squared_error.sum())), float(squared_error.mean())


def sqnr(x: Values, scheme: str, **options: Any) -> float:
    """In dB."""
    return errors_of(x, quantize(x, scheme, warn=False, **options).values)[0]


def sqnr_of_float_scales(x: Values, scheme: str) -> float:
    """With a float32 scale for each block, in dB: blocks as channels."""
    element = scheme.removeprefix("mx")
    blocks = x.reshape(-1, BLOCK_SIZE)
    return errors_of(blocks, quantize(blocks, element, scaling="channel", axis=0, warn=False).values)[0]


def print_anchors(samples: int) -> int:
    """What was published, and ours beside it; how many are further apart than allowed."""
    x = draw("N(0,1)", samples=samples)
    print("published, of N(0,1) or what is near it")
    num_missed = 0
    for anchor in ANCHORS:
        ratio, mse = errors_of(x, quantize(x, anchor.scheme, warn=False, **anchor.options).values)
        ours = mse if anchor.is_mse else ratio
        distance = abs(ours / anchor.published - 1) if anchor.is_mse else abs(ours - anchor.published)
        is_met = distance <= anchor.tolerance
        num_missed += not is_met
        unit, shown = ("MSE", f"{distance:.2%}") if anchor.is_mse else ("dB", f"{distance:.2f} dB")
        allowed = f"{anchor.tolerance:.0%}" if anchor.is_mse else f"{anchor.tolerance} dB"
        words = (anchor.scheme, *(str(value) for key, value in anchor.options.items() if key != "seed"))
        print(
            f"  {' '.join(words)}: {ours:.4g} {unit}, published {anchor.published:.4g} ({anchor.source}); "
            f"{shown} apart (bar: {allowed}){'' if is_met else ' MISSED'}"
        )
    return num_missed


def print_table(name: str, *, samples: int) -> int:
    """All schemes and scale rules, with what references gave in parentheses; how many are further than the bar."""
    x = draw(name, samples=samples)
    print(f"{name}, SQNR in dB: ours (references)")
    print("  " + " ".join(f"{head:>16}" for head in ("", *RULES, "float32 scale")))
    num_missed = 0
    for scheme in MX_SCHEMES:
        known = KNOWN.get((name, scheme), (None,) * (len(RULES) + 1))
        ours = [sqnr(x, scheme, scale_rule=rule) for rule in RULES] + [sqnr_of_float_scales(x, scheme)]
        num_missed += sum(one is not None and abs(one - own) > BAR for one, own in zip(known, ours, strict=True))
        cells = [_cell(own, one) for own, one in zip(ours, known, strict=True)]
        print("  " + " ".join(f"{cell:>16}" for cell in (scheme, *cells)))
    for scheme, by_name in KNOWN_WHOLE.items():
        own, one = sqnr(x, scheme), by_name.get(name)
        num_missed += one is not None and abs(one - own) > BAR
        print("  " + " ".join(f"{cell:>16}" for cell in (scheme, _cell(own, one))))
    return num_missed


def _cell(ours: float, known: float | None) -> str:
    return f"{ours:.2f}" if known is None else f"{ours:.2f} ({known:.2f})"


def main() -> None:
    """Print every table, and how many figures are too far from what was known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1 << 22, help="numbers to draw, a multiple of 1,024")
    samples = parser.parse_args().samples
    print(f"{samples} numbers each, block {BLOCK_SIZE}")
    num_missed = print_anchors(samples)
    for name in DISTRIBUTIONS:
        num_missed += print_table(name, samples=samples)
    print(f"{num_missed} figures are further from what was known than the bars allow")


if __name__ == "__main__":
    main()
