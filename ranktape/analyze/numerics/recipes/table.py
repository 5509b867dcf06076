"""The recipes that come with the package, one row each, with their sources."""

from __future__ import annotations

import dataclasses

from ranktape.analyze.numerics.recipes.recipe import HighPrecision, OperandRecipe, ProductRecipe, Recipe, products_of

_BF16 = OperandRecipe(scheme="bf16")

_MXFP8 = OperandRecipe(scheme="mxfp8_e4m3", scale_rule="rceil")

_MXFP4_DRAWN = OperandRecipe(scheme="mxfp4_e2m1", scale_rule="rceil", prescale=3 / 4, rounding="stochastic")
"""An operand without clamping, and therefore without bias (arXiv 2502.20586, algorithm 2)."""


_DEEPSEEK_WIDE = HighPrecision(modules=("*.gate", "*.router"), outside=True)


def _deepseek(*, scale_format: str | None = None, scale_rule: str | None = None) -> dict[str, ProductRecipe]:
    row = OperandRecipe(
        scheme="fp8_e4m3", scaling="block", block_size=128, scale_format=scale_format, scale_rule=scale_rule
    )
    return products_of(row, weight=dataclasses.replace(row, block_size=(128, 128)))


def _nvidia(*, four_over_six: bool = False) -> dict[str, ProductRecipe]:
    row = OperandRecipe(scheme="nvfp4", four_over_six=four_over_six)
    return products_of(
        row,
        weight=dataclasses.replace(row, block_size=(16, 16)),
        grad_output=dataclasses.replace(row, rounding="stochastic"),
        rotations={"grad_weight": (16, 0)},
    )


RECIPES: dict[str, Recipe] = {
    row.name: row
    for row in (
        Recipe(
            name="bf16",
            source="the upper half of IEEE 754-2019 binary32: what recipes are measured against",
            products=products_of(_BF16),
        ),
        Recipe(
            name="fp8_tensor",
            source="OCP 8-bit floating point 1.0; e4m3 forward, e5m2 gradients of arXiv 2209.05433, current scaling of "
            "TransformerEngine's Float8CurrentScaling",
            products=products_of(
                OperandRecipe(scheme="fp8_e4m3", scaling="tensor"),
                grad_output=OperandRecipe(scheme="fp8_e5m2", scaling="tensor"),
            ),
        ),
        Recipe(
            name="fp8_deepseek",
            source="arXiv 2412.19437, 3.3: e4m3 everywhere, a float32 scale for each 1 x 128 of input and gradient and "
            "each 128 x 128 of a weight, gates and head in bf16",
            products=_deepseek(scale_format="fp32"),
            high_precision=_DEEPSEEK_WIDE,
        ),
        Recipe(
            name="fp8_deepseek_ue8m0",
            source="as fp8_deepseek, with scales rounded up to powers of two: scale_fmt ue8m0 of DeepSeek-V3.1",
            products=_deepseek(scale_rule="rceil"),
            high_precision=_DEEPSEEK_WIDE,
        ),
        Recipe(
            name="int8_token",
            source="a scale for each row of an operand: torchao's Int8MixedPrecisionTrainingConfig; of tokens as in "
            "arXiv 2206.01861",
            products=products_of(OperandRecipe(scheme="int8", scaling="channel")),
        ),
        Recipe(
            name="hif8",
            source="arXiv 2409.16626, elements; one scale for a tensor, as fake_quant_ops of Charles2530 trains",
            products=products_of(OperandRecipe(scheme="hif8", scaling="tensor")),
        ),
        Recipe(
            name="mxfp8",
            source="OCP microscaling formats 1.0; e4m3 everywhere and scales rounded up as in arXiv 2506.08027",
            products=products_of(_MXFP8),
        ),
        Recipe(
            name="mxfp8_e5m2_grad",
            source="as mxfp8, with e5m2 gradients: Format.HYBRID of TransformerEngine's MXFP8BlockScaling",
            products=products_of(_MXFP8, grad_output=OperandRecipe(scheme="mxfp8_e5m2", scale_rule="rceil")),
        ),
        Recipe(
            name="mxfp6",
            source="OCP microscaling formats 1.0; e3m2 everywhere, the wider of its two 6-bit formats",
            products=products_of(OperandRecipe(scheme="mxfp6_e3m2")),
        ),
        Recipe(
            name="mxfp4",
            source="OCP microscaling formats 1.0, with the scale rule even, which clamps less than floor",
            products=products_of(OperandRecipe(scheme="mxfp4_e2m1", scale_rule="even")),
        ),
        Recipe(
            name="mxfp4_rht_sr",
            source="arXiv 2502.20586: stochastic rounding behind Hadamard matrices of 64 in both products of the "
            "backward pass, bf16 forward",
            products=products_of(_MXFP4_DRAWN, rotations={"grad_input": (64, 0), "grad_weight": (64, 1)})
            | {"output": products_of(_BF16)["output"]},
        ),
        Recipe(
            name="nvfp4",
            source="NVIDIA's NVFP4 with nothing added: blocks of 16, e4m3 scales and a float32 one for the tensor",
            products=products_of(OperandRecipe(scheme="nvfp4")),
        ),
        Recipe(
            name="nvfp4_nvidia",
            source="arXiv 2509.25149: 16 x 16 for weights, stochastic gradients, Hadamard matrices of 16 for "
            "grad_weight, the first 2 and last 8 of 62 blocks and the head in bf16",
            products=_nvidia(),
            high_precision=HighPrecision(first_layers=0.032, last_layers=0.129, outside=True),
        ),
        Recipe(
            name="nvfp4_4over6",
            source="arXiv 2512.02010: each block of nvfp4_nvidia with the better of two scales; the last 4 of 24 "
            "layers and the head in bf16 as in the 340M configuration of its authors' program fouroversix",
            products=_nvidia(four_over_six=True),
            high_precision=HighPrecision(last_layers=0.167, outside=True),
        ),
    )
}
"""All shipped recipes, by name."""

ALIASES = {"hifp8": "hif8"}
"""Other common names of recipes."""
