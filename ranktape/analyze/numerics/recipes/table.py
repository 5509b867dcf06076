"""Gives the recipes that come with the package, a row each with its source."""

from __future__ import annotations

from ranktape.analyze.numerics.recipes.recipe import OperandRecipe, Recipe, products_of

_MXFP8 = OperandRecipe(scheme="mxfp8_e4m3", scale_rule="rceil")

RECIPES: dict[str, Recipe] = {
    row.name: row
    for row in (
        Recipe(
            name="bf16",
            source="the upper half of IEEE 754-2019 binary32: what recipes are measured against",
            products=products_of(OperandRecipe(scheme="bf16")),
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
            name="int8_token",
            source="a scale for each token and each output, as in arXiv 2206.01861",
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
            source="OCP microscaling formats 1.0; e3m2 everywhere as in the trainings of arXiv 2310.10537",
            products=products_of(OperandRecipe(scheme="mxfp6_e3m2")),
        ),
        Recipe(
            name="mxfp4",
            source="OCP microscaling formats 1.0, with the scale rule even, which clamps less than floor",
            products=products_of(OperandRecipe(scheme="mxfp4_e2m1", scale_rule="even")),
        ),
        Recipe(
            name="nvfp4",
            source="NVIDIA's NVFP4 with nothing added: blocks of 16, e4m3 scales and a float32 one for the tensor",
            products=products_of(OperandRecipe(scheme="nvfp4")),
        ),
    )
}
"""Every shipped recipe, by name."""

ALIASES = {"hifp8": "hif8"}
"""Other words for a recipe that people use."""
