"""The elements and the scales that make up a quantised tensor.

A scheme is a format of elements and the group of elements that shares a scale. One row for each; a new one is one row.
"""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass

from ranktape.analyze.numerics.formats import FORMATS, Format, parse_format
from ranktape.errors import UsageError


class Scaling(enum.StrEnum):
    """Which elements share a scale."""

    NONE = "none"
    """None: every element is rounded as it is."""
    TENSOR = "tensor"
    """All of the tensor."""
    CHANNEL = "channel"
    """All with the same index along an axis."""
    BLOCK = "block"
    """A run of neighbours along an axis; the last one may be shorter."""


class Recipe(enum.IntEnum):
    """Whose way of computing the scales of NVFP4: `nvfp4` says how each does it."""

    TRANSFORMER_ENGINE = 0
    MODELOPT = 1
    TORCHAO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A way to store a tensor in few bits."""

    name: str
    """The word in options, tables and plots."""
    element: Format
    """What the elements are rounded to."""
    scaling: Scaling
    """Which elements share a scale."""
    block_size: int = 0
    """Elements in a block; 0 without blocks."""
    scale: Format | None = None
    """What the scales of blocks are stored in: e8m0 is a power of two; None without blocks."""
    recipe: Recipe | None = None
    """Of NVFP4, how its scales are computed; None for all others."""

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the scales of the blocks have a float32 scale of their own, as in NVFP4."""
        return self.recipe is not None


MX_BLOCK_SIZE = 32
"""OCP microscaling formats 1.0, 5.2."""

NVFP4_BLOCK_SIZE = 16
"""NVIDIA's NVFP4: e4m3 scales for blocks of 16, one float32 scale for the tensor."""


def _nvfp4(name: str, recipe: Recipe) -> Scheme:
    return Scheme(
        name=name,
        element=FORMATS["nvfp4"],
        scaling=Scaling.BLOCK,
        block_size=NVFP4_BLOCK_SIZE,
        scale=FORMATS["fp8_e4m3"],
        recipe=recipe,
    )


def _mx(element: str) -> Scheme:
    return Scheme(
        name=f"mx{element}",
        element=FORMATS[element],
        scaling=Scaling.BLOCK,
        block_size=MX_BLOCK_SIZE,
        scale=FORMATS["e8m0"],
    )


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        *map(_mx, ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1", "int8")),
        _nvfp4("nvfp4", Recipe.TRANSFORMER_ENGINE),
        _nvfp4("nvfp4_modelopt", Recipe.MODELOPT),
        _nvfp4("nvfp4_torchao", Recipe.TORCHAO),
    )
}
"""The schemes with blocks, by name; any format without blocks is a scheme too."""

ALIASES = {"mxfp8": "mxfp8_e4m3", "mxfp6": "mxfp6_e2m3", "mxfp4": "mxfp4_e2m1"}
"""The element format that a name without one stands for."""


def parse_scheme(name: str) -> Scheme:
    """The scheme of that name; of the name of a format its elements without scales.

    `mxfp8`, `mxfp6` and `mxfp4` are those with e4m3, e2m3 and e2m1 elements.

    Raises:
        UsageError: there is none; the message lists the nearest ones, of schemes and of formats.
    """
    if not isinstance(name, str):
        raise UsageError(f"format {name!r} is not a name: give one such as mxfp8_e4m3, nvfp4 or hif8")
    scheme = SCHEMES.get(ALIASES.get(name, name))
    if scheme is not None:
        return scheme
    with_blocks = [*SCHEMES, *ALIASES]
    if name.startswith(("mx", "nv")):
        nearest = difflib.get_close_matches(name, with_blocks, n=3, cutoff=0.5) or with_blocks
        raise UsageError(f"format {name!r} is not known: did you mean {' or '.join(nearest)}?")
    element = parse_format(name, besides=with_blocks)
    return Scheme(name=element.name, element=element, scaling=Scaling.NONE)
