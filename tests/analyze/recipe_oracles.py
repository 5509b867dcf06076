"""What other programs make of an operand, written out from their formulas in plain torch.

Each function gives the matrix as it is multiplied, without the scale of the tensor, and that scale. Matrices have what
is summed along their last dimension; their sizes are multiples of the blocks.
"""

# Shapes: R = rows, S = what is summed, B = blocks, N = elements of a block.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

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
