"""Do shipped recipes compute what other programs compute of the same operands?"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
import torch

from ranktape.analyze.numerics.quantization.operand import QuantizedOperand, quantized_operands
from ranktape.analyze.numerics.quantization.quantizer import rotation_signs
from ranktape.analyze.numerics.recipes.recipe import PRODUCTS
from ranktape.analyze.numerics.recipes.table import RECIPES
from tests.optional import needs

Products: TypeAlias = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Torchao's imports warn of what they do not find."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def layer(dtype: torch.dtype = torch.float32) -> Products:
    """The operands of a layer: one channel of the input far above the others, gradients of tokens of all sizes."""
    generator = torch.Generator().manual_seed(0)
    x_TI, weight_OI, grad_TO = (
        torch.randn(shape, generator=generator) for shape in ((256, 128), (384, 128), (256, 384))
    )
    x_TI[:, 5] *= 60
    grad_TO *= 1e-4 * torch.exp2(torch.randn(256, 1, generator=generator) * 3)
    tensors = {"input": x_TI, "weight": weight_OI / 8, "grad_output": grad_TO}
    return {name: tensor.to(dtype).float() for name, tensor in tensors.items()}


def matrices(product: str, tensors: Products) -> dict[str, torch.Tensor]:
    """The operands of a product, each with what is summed along its last dimension."""
    x_TI, weight_OI, grad_TO = tensors.values()
    return {
        "output": {"input": x_TI, "weight": weight_OI},
        "grad_input": {"grad_output": grad_TO, "weight": weight_OI.T.contiguous()},
        "grad_weight": {"grad_output": grad_TO.T.contiguous(), "input": x_TI.T.contiguous()},
    }[product]


def whole(operand: QuantizedOperand) -> torch.Tensor:
    factor = operand.factor
    return operand.values.float() * (factor[:, None] if isinstance(factor, torch.Tensor) else factor)


def replayed(recipe: str, tensors: Products) -> Products:
    found = {}
    for product, how in RECIPES[recipe].products.items():
        first, second = (whole(one) for one in quantized_operands(how, *matrices(product, tensors).values(), seed=0))
        found[product] = (first.double() @ second.double().T).float()
    return found


def _trained(module: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor, tensors: Products) -> Products:
    x_TI = tensors["input"].clone().requires_grad_()
    output_TO = module(x_TI)
    output_TO.backward(tensors["grad_output"].to(output_TO.dtype))
    assert x_TI.grad is not None
    assert weight.grad is not None
    return {"output": output_TO.detach(), "grad_input": x_TI.grad, "grad_weight": weight.grad}


def torchao_int8(tensors: Products) -> Products:
    from torchao.prototype.quantized_training import int8_mixed_precision as int8

    config = int8.Int8MixedPrecisionTrainingConfig()
    linear = int8.Int8MixedPrecisionTrainingLinear(128, 384, bias=False, config=config)
    linear.weight.data = tensors["weight"].clone()
    return _trained(linear, linear.weight, tensors)


def torchao_float8(tensors: Products) -> Products:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    plain = torch.nn.Linear(128, 384, bias=False)
    plain.weight.data = tensors["weight"].clone()
    linear = Float8Linear.from_float(plain, config=dataclasses.replace(Float8LinearConfig(), emulate=True))
    return _trained(linear, linear.weight, tensors)


def torchao_mxfp8(tensors: Products) -> Products:
    """As a mixture of a single expert, which is torchao's only MX training."""
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common import KernelPreference

    weight_OI = tensors["weight"].clone().requires_grad_()
    offsets = torch.tensor([256], dtype=torch.int32)

    def linear(x_TI: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _to_mxfp8_then_scaled_grouped_mm(
            x_TI, weight_OI.T[None], offsets, kernel_preference=KernelPreference.EMULATED
        )
        return found

    return _trained(linear, weight_OI, tensors)


TRAININGS = {
    # Of operands in bfloat16 torchao's scales of int8 are bfloat16, too.
    "int8_token": (torchao_int8, torch.float32),
    "fp8_tensor": (torchao_float8, torch.bfloat16),
    "mxfp8": (torchao_mxfp8, torch.bfloat16),
}


@needs("torchao")
@pytest.mark.parametrize("recipe", TRAININGS)
def test_the_three_products_are_those_of_a_training_of_torchao(recipe: str) -> None:
    """But for the rounding of sums, beside which a single other code shows; torchao's MX training gives bfloat16."""
    train, dtype = TRAININGS[recipe]
    tensors = layer(dtype)
    found, expected = replayed(recipe, tensors), train(tensors)
    for product in PRODUCTS:
        first, second = matrices(product, tensors).values()
        rounded = 2.0**-24 * first.shape[1] * (first.abs() @ second.abs().T)
        rounded += 2.0**-8 * expected[product].abs() if recipe == "mxfp8" else 0
        assert ((found[product] - expected[product]).abs() <= rounded).all()


def operands(recipe: str, tensors: Products) -> Iterator[tuple[str, str, torch.Tensor, QuantizedOperand]]:
    """Of all products: the product, the name of an operand, its matrix, and what the recipe makes of it."""
    for product, how in RECIPES[recipe].products.items():
        given = matrices(product, tensors)
        made = quantized_operands(how, *given.values(), seed=0)
        for (name, matrix), found in zip(given.items(), made, strict=True):
            yield product, name, matrix, found


MX = {
    # Element formats of the operands; what of torchao computes the scales.
    "mxfp8": ({}, "fp8_e4m3", "RCEIL"),
    "mxfp8_e5m2_grad": ({"grad_output": "fp8_e5m2"}, "fp8_e4m3", "RCEIL"),
    "mxfp6": ({}, "fp6_e3m2", "FLOOR"),
    "mxfp4": ({}, "fp4_e2m1", "EVEN"),
}


@needs("torchao")
@pytest.mark.parametrize("recipe", MX)
def test_operands_in_mx_are_those_of_torchao(recipe: str) -> None:
    from torchao.prototype.mx_formats import constants, mx_tensor

    words = {
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "fp6_e3m2": constants.DTYPE_FP6_E3M2,
        "fp4_e2m1": torch.float4_e2m1fn_x2,
    }
    elements, others, rule = MX[recipe]
    for _, name, matrix, found in operands(recipe, layer(torch.bfloat16)):
        word = words[elements.get(name, others)]
        mode = getattr(mx_tensor.ScaleCalculationMode, rule)
        scales, codes = mx_tensor.to_mx(matrix, word, 32, scaling_mode=mode)
        assert torch.equal(whole(found), mx_tensor.to_dtype(codes, scales, word, 32, torch.float32))


@needs("torchao")
def test_operands_in_fp8_with_one_scale_are_those_of_torchao() -> None:
    """For every significand that the largest element can have: ties of bfloat16 fall one way or the other by it."""
    from torchao.quantization import quant_primitives as primitives

    for significand in range(128, 256, 3):
        tensors = layer(torch.bfloat16)
        for matrix in tensors.values():
            matrix[0, 0] = torch.tensor(float(significand)).ldexp((matrix.abs().max() / significand).frexp().exponent)
        for product, name, matrix, found in operands("fp8_tensor", tensors):
            dtype = torch.float8_e5m2 if name == "grad_output" else torch.float8_e4m3fn
            scale = primitives._choose_scale_float8(matrix, list(matrix.shape), dtype)
            codes = primitives._quantize_affine_float8(matrix, scale, dtype)
            assert found.factor == scale, (product, name)
            assert torch.equal(found.values.float(), codes.float()), (product, name)


def test_operands_in_int8_are_divided_by_their_scales() -> None:
    for dtype in [torch.float32, torch.bfloat16]:
        for *_, matrix, found in operands("int8_token", layer(dtype)):
            scales = matrix.abs().amax(1) / 127
            assert isinstance(found.factor, torch.Tensor)
            assert torch.equal(found.factor, 64 * scales)
            assert torch.equal(found.values.float(), (matrix / scales[:, None]).round() / 64)


@needs("en_dtypes")
def test_operands_in_hif8_are_those_of_en_dtypes() -> None:
    import en_dtypes

    for *_, matrix, found in operands("hif8", layer()):
        scale = (matrix.abs().max() / 8).numpy()
        codes = (matrix.numpy() / scale).astype(en_dtypes.hifloat8)
        assert found.factor == scale
        assert torch.equal(found.values.float(), torch.from_numpy(codes.astype("float32")))


def test_operands_in_bf16_are_those_of_torch() -> None:
    for *_, matrix, found in operands("bf16", layer()):
        assert torch.equal(whole(found), matrix.to(torch.bfloat16).float())


def whole_numbers() -> Products:
    """The operands of a layer in small integers, which float32 rotates without rounding."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"input": (256, 128), "weight": (384, 128), "grad_output": (256, 384)}
    return {name: torch.randint(-99, 100, shape, generator=generator).float() for name, shape in shapes.items()}


def before(recipe: str, product: str, matrix: torch.Tensor) -> torch.Tensor:
    """The matrix as it is quantised: rotated, where the recipe does so."""
    how = RECIPES[recipe].products[product]
    if not how.rotation:
        return matrix
    signs = torch.from_numpy(rotation_signs(how.rotation, seed=how.rotation_seed)).float()
    return rotated(matrix, signs)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_nvidia"])
def test_operands_in_nvfp4_are_those_of_transformer_engine(recipe: str) -> None:
    """Bit for bit; of stochastic ones one of the two neighbours, which both occur."""
    has_tiles = recipe == "nvfp4_nvidia"
    for product, name, matrix, found in operands(recipe, whole_numbers()):
        given, tile = before(recipe, product, matrix), (16, 16) if has_tiles and name == "weight" else (1, 16)
        values, scale = nvfp4(given, tile)
        assert found.factor == scale
        if not RECIPES[recipe].products[product].operands[name].is_stochastic:
            assert torch.equal(found.values.float(), values)
            continue
        down, up = (nvfp4(given, tile, to_whole)[0] for to_whole in (torch.floor, torch.ceil))
        assert ((found.values == down) | (found.values == up)).all()
        assert 0.3 < (found.values == down)[down != up].double().mean() < 0.7


def test_scales_of_blocks_on_a_tie_are_those_of_transformer_engine() -> None:
    """Blocks whose scale lies halfway between two e4m3 numbers, but for what float32 made of it on the way."""
    how = RECIPES["nvfp4"].products["output"]
    for largest in range(28, 2800, 28):
        x_RS = torch.outer(torch.arange(15.0, 28, 2), torch.full((16,), largest / 28))
        x_RS[0] = largest
        found = quantized_operands(how, x_RS, x_RS, seed=0)[0]
        values, scale = nvfp4(x_RS)
        assert found.factor == scale
        assert torch.equal(found.values.float(), values)


def test_operands_of_four_over_six_are_those_of_its_authors() -> None:
    """Bit for bit; of stochastic blocks those of one of the two scales, drawn."""
    for product, name, matrix, found in operands("nvfp4_4over6", whole_numbers()):
        given, tile = before("nvfp4_4over6", product, matrix), (16, 16) if name == "weight" else (1, 16)
        values, scale = nvfp4_four_over_six(given, tile)
        assert found.factor == scale
        if name != "grad_output":
            assert torch.equal(found.values.float(), values)
            continue
        is_one = []
        for stretch in (1.0, 1.5):
            down, up = (nvfp4_stretched(given, tile, stretch, to_whole)[0] for to_whole in (torch.floor, torch.ceil))
            is_one.append(in_tiles((found.values == down) | (found.values == up), tile).all(1))
        assert (is_one[0] | is_one[1]).all()
        assert 0.1 < (is_one[1] & ~is_one[0]).double().mean() < 0.9


@needs("torchao")
def test_operands_in_fp8_blocks_are_those_of_torchao() -> None:
    from torchao.quantization import quant_primitives as primitives

    for _, name, matrix, found in operands("fp8_deepseek", layer()):
        scale = primitives._choose_scale_float8(matrix, [128 if name == "weight" else 1, 128])
        codes = primitives._quantize_affine_float8(matrix, scale)
        assert torch.equal(whole(found), primitives._dequantize_affine_float8(codes, scale))


def test_operands_in_fp8_blocks_with_powers_of_two_are_those_of_deepseek() -> None:
    tensors = layer()
    # Their kernel raises the scales of blocks below 1e-4.
    tensors["grad_output"] *= 2.0**20
    for _, name, matrix, found in operands("fp8_deepseek_ue8m0", tensors):
        assert torch.equal(whole(found), fp8_powers(matrix, (128 if name == "weight" else 1, 128)))


def test_drawn_operands_in_mxfp4_are_neighbours_on_the_grid_of_their_authors() -> None:
    for product, name, matrix, found in operands("mxfp4_rht_sr", layer()):
        if product == "output":
            assert torch.equal(whole(found), matrix.to(torch.bfloat16).float())
            continue
        given = before("mxfp4_rht_sr", product, matrix)
        down, up = (mxfp4_drawn(given, to_whole) for to_whole in (torch.floor, torch.ceil))
        # Dividing by 3 and multiplying by 4/3 differ in the last bit.
        is_down, is_up = (torch.isclose(whole(found), side, rtol=1e-6, atol=0) for side in (down, up))
        assert (is_down | is_up).all(), name
        assert 0.3 < is_down[down != up].double().mean() < 0.7


def test_the_mean_of_drawn_products_comes_near_the_product_as_one_over_the_root_of_their_number() -> None:
    """And that of products whose largest elements are clamped does not."""
    given = [matrix[:64] for matrix in matrices("grad_input", layer()).values()]
    exact = given[0].double() @ given[1].double().T
    drawn = RECIPES["mxfp4_rht_sr"].products["grad_input"]
    clamped = dataclasses.replace(next(iter(drawn.operands.values())), prescale=1, scale_rule="floor")
    falls = {}
    for name, how in (
        ("drawn", drawn),
        ("clamped", dataclasses.replace(drawn, operands=dict.fromkeys(drawn.operands, clamped))),
    ):
        total, errors = torch.zeros_like(exact), []
        for draw in range(64):
            one, other = quantized_operands(how, *given, seed=draw)
            total += whole(one).double() @ whole(other).double().T
            errors.append(float((total / (draw + 1) - exact).norm()))
        falls[name] = errors[3] / errors[63]
    assert falls["drawn"] == pytest.approx(4, rel=0.1)
    assert falls["clamped"] < 2


Apart: TypeAlias = tuple[torch.Tensor, float]

Rounding: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def in_tiles(x_RS: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """The elements of each tile, as rows."""
    rows, columns = tile
    return (
        x_RS.reshape(x_RS.shape[0] // rows, rows, x_RS.shape[1] // columns, columns)
        .permute(0, 2, 1, 3)
        .reshape(-1, rows * columns)
    )


def out_of_tiles(blocks_BN: torch.Tensor, tile: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """The matrix of those tiles."""
    rows, columns = tile
    return (
        blocks_BN.reshape(shape[0] // rows, shape[1] // columns, rows, columns)
        .permute(0, 2, 1, 3)
        .reshape(tuple(shape))
    )


def to_fp4(x: torch.Tensor, to_whole: Rounding = torch.round) -> torch.Tensor:
    """To nearest even, or as the steps of a magnitude are made whole, in float32; what is beyond 6 becomes 6."""
    size = x.abs().clamp(max=6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign(to_whole(size / step) * step, x)


def nvfp4(x_RS: torch.Tensor, tile: tuple[int, int] = (1, 16), to_whole: Rounding = torch.round) -> Apart:
    """`NVFP4QuantizerRef` of TransformerEngine without its rotation."""
    blocks_BN = in_tiles(x_RS.float(), tile)
    # A number over a tensor would be that number times a reciprocal.
    encode = torch.tensor(448 * 6.0) / x_RS.abs().max().float()
    scale = 1 / encode
    stored_B = (blocks_BN.abs().amax(1) * (encode * (1 / torch.tensor(6.0)))).clamp(max=448).to(torch.float8_e4m3fn)
    factor_B = 1 / (stored_B.float() * scale)
    codes_BN = to_fp4(blocks_BN * factor_B[:, None], to_whole)
    return out_of_tiles(codes_BN * stored_B.float()[:, None], tile, x_RS.shape), float(scale)


def nvfp4_stretched(
    x_RS: torch.Tensor, tile: tuple[int, int], stretch: float, to_whole: Rounding = torch.round
) -> Apart:
    """One of the two that `quantize` of github.com/mit-han-lab/fouroversix chooses from: 6 is 1, 4 is stretched 1.5."""
    blocks_BN = in_tiles(x_RS.float(), tile)
    encode = torch.tensor(256 * 6.0) / x_RS.abs().max().float()
    scale = 1 / encode
    stored_B = (blocks_BN.abs().amax(1) / 6 * encode * stretch).to(torch.float8_e4m3fn).float()
    codes_BN = to_fp4(blocks_BN * (1 / (scale * stored_B))[:, None], to_whole)
    return out_of_tiles(codes_BN * stored_B[:, None], tile, x_RS.shape), float(scale)


def nvfp4_four_over_six(x_RS: torch.Tensor, tile: tuple[int, int]) -> Apart:
    """What it chooses by the rule `mse`."""
    several = [nvfp4_stretched(x_RS, tile, stretch) for stretch in (1.0, 1.5)]
    six_BN, four_BN = (in_tiles(values, tile) for values, _ in several)
    given_BN, scale = in_tiles(x_RS.float(), tile), several[0][1]
    errors = [((values_BN * scale - given_BN) ** 2).sum(1) for values_BN in (six_BN, four_BN)]
    chosen_BN = torch.where((errors[1] < errors[0])[:, None], four_BN, six_BN)
    return out_of_tiles(chosen_BN, tile, x_RS.shape), scale


def rotated(x_RS: torch.Tensor, signs_N: torch.Tensor) -> torch.Tensor:
    """Runs of the last dimension times the signs and Sylvester's matrix over the root of its size."""
    matrix_NN = torch.ones(1, 1)
    while matrix_NN.shape[0] < signs_N.numel():
        matrix_NN = torch.cat([torch.cat([matrix_NN, matrix_NN], 1), torch.cat([matrix_NN, -matrix_NN], 1)])
    turned = x_RS.reshape(-1, signs_N.numel()) @ (signs_N[:, None] * matrix_NN / math.sqrt(signs_N.numel()))
    return turned.reshape(x_RS.shape)


def fp8_powers(x_RS: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """`act_quant` of DeepSeek-V3 with `scale_fmt` ue8m0, and `per_block_cast_to_fp8` of DeepGEMM."""
    blocks_BN = in_tiles(x_RS.float(), tile)
    scale_B = torch.exp2(torch.ceil(torch.log2(blocks_BN.abs().amax(1).clamp(min=1e-4) / 448)))
    codes_BN = (blocks_BN / scale_B[:, None]).to(torch.float8_e4m3fn).float()
    return out_of_tiles(codes_BN * scale_B[:, None], tile, x_RS.shape)


def mxfp4_drawn(x_RS: torch.Tensor, to_whole: Rounding) -> torch.Tensor:
    """`_quantize_mx` of microxcaling with `dither_scale`, which amazon-science/mxfp4-llm adds, in such a rounding."""
    blocks_BN = in_tiles(x_RS.float(), (1, 32))
    scale_B = torch.exp2(torch.floor(torch.log2(blocks_BN.abs().amax(1))) - 2)
    codes_BN = to_fp4(blocks_BN * 3 / (4 * scale_B[:, None]), to_whole)
    return out_of_tiles(codes_BN * 4 * scale_B[:, None] / 3, (1, 32), x_RS.shape)
