"""What other programs make of an operand, written out from their formulas in plain torch.

Each function gives the matrix as it is multiplied, without the scale of the tensor, and that scale. Matrices have what
is summed along their last dimension; their sizes are multiples of the blocks.
"""

# Shapes: R = rows, S = what is summed, B = blocks, N = elements of a block.
# ruff: noqa: N803, N806 - the letters of a shape end the name of the tensor

from __future__ import annotations

import math
from typing import TypeAlias

import torch

Apart: TypeAlias = tuple[torch.Tensor, float]

TE_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs that TransformerEngine's random Hadamard transform has."""


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


def to_fp4(x: torch.Tensor) -> torch.Tensor:
    """To nearest even, in float32; what is beyond 6 becomes 6."""
    size = x.abs().clamp(max=6)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, x)


def nvfp4(x_RS: torch.Tensor, tile: tuple[int, int] = (1, 16)) -> Apart:
    """`NVFP4QuantizerRef` of TransformerEngine without its rotation."""
    blocks_BN = in_tiles(x_RS.float(), tile)
    # A number over a tensor would be that number times a reciprocal.
    encode = torch.tensor(448 * 6.0) / x_RS.abs().max().float()
    scale = 1 / encode
    stored_B = (blocks_BN.abs().amax(1) * (encode * (1 / torch.tensor(6.0)))).clamp(max=448).to(torch.float8_e4m3fn)
    factor_B = 1 / (stored_B.float() * scale)
    codes_BN = to_fp4(blocks_BN * factor_B[:, None])
    return out_of_tiles(codes_BN * stored_B.float()[:, None], tile, x_RS.shape), float(scale)


def nvfp4_four_over_six(x_RS: torch.Tensor, tile: tuple[int, int] = (1, 16)) -> Apart:
    """`quantize` of github.com/mit-han-lab/fouroversix with the rule `mse`."""
    blocks_BN = in_tiles(x_RS.float(), tile)
    largest = x_RS.abs().max().float()
    encode = torch.tensor(256 * 6.0) / largest
    scale = 1 / encode
    asked_B = blocks_BN.abs().amax(1) / 6 * encode
    found, errors = [], []
    for raised in (1.0, 1.5):
        stored_B = (asked_B * raised).to(torch.float8_e4m3fn).float()
        codes_BN = to_fp4(blocks_BN * (1 / (scale * stored_B))[:, None])
        found.append(codes_BN * stored_B[:, None])
        errors.append(((codes_BN * stored_B[:, None] * largest / (6 * 256) - blocks_BN) ** 2).sum(1))
    values_BN = torch.where((errors[1] < errors[0])[:, None], found[1], found[0])
    return out_of_tiles(values_BN, tile, x_RS.shape), float(scale)


def hadamard(size: int, signs: tuple[int, ...]) -> torch.Tensor:
    """The matrix with which rows are multiplied from the right: signs, and Sylvester's matrix over sqrt(size)."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.tensor(signs, dtype=torch.float32)[:, None] * (matrix / math.sqrt(size))


def fp8_block(x_RS: torch.Tensor, tile: tuple[int, int], *, has_powers: bool) -> torch.Tensor:
    """`act_quant` of DeepSeek-V3; of tiles `per_block_cast_to_fp8` of its DeepGEMM, which multiplies by reciprocals."""
    blocks_BN = in_tiles(x_RS.float(), tile)
    scale_B = blocks_BN.abs().amax(1).clamp(min=1e-4) / 448
    if has_powers:
        scale_B = torch.exp2(torch.ceil(torch.log2(scale_B)))
    codes_BN = (blocks_BN / scale_B[:, None]).to(torch.float8_e4m3fn).float()
    return out_of_tiles(codes_BN * scale_B[:, None], tile, x_RS.shape)
