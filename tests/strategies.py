"""Which inputs does every property test draw from?

Values are drawn as bits, so that every NaN, both zeros, subnormals and infinities are among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ranktape.storage.format.dtypes import DTYPES, DtypeRow, numpy_dtype
from ranktape.storage.format.record_info import (
    EXTREMES,
    MAX_TERM_LENGTH,
    TALLY_KINDS,
    ElementTally,
    Operation,
    Overflow,
    RecordInfo,
)

MAX_COUNT = 2**40
"""Elements of the largest tensor that is told of."""

MAX_MODULE_LENGTH = 200
"""Characters of a drawn module path."""

AWKWARD_TERMS = (
    *("..", ".", "~", " ", "'", '"', "*", "[0]", "%2F", "a/b", "a\\b", "a.pt"),
    *("a_b", "a__b", "_", "L0", "rank0", "sample1", "iter2", "forward", "\xe9", "\u5c42"),
)
"""Texts that a path, a pattern or a file name could take for something else."""


WITHOUT_TORCH = frozenset(
    {"float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"}
)
"""Element types that only other tools write."""


def dtype_names(*, only_torch: bool = False) -> st.SearchStrategy[str]:
    """Names of element types that can be stored; only those that torch has, if asked."""
    return st.sampled_from([name for name in DTYPES if not (only_torch and name in WITHOUT_TORCH)])


def shapes(*, max_dims: int = 4, max_side: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of few elements, among them scalars and those without elements."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


def special_patterns(name: str) -> list[int]:
    """Bits worth drawing often: both zeros, the ends of the exponent's range, infinities, several NaNs, all ones."""
    row = DTYPES[name]
    num_bits = element_bits(row)
    if row.numpy_dtype.kind == "b":
        return [0, 1]
    if row.is_complex:
        half = special_patterns("float32" if row.itemsize == 8 else "float64")
        return [low | high << (num_bits // 2) for low in half for high in half]
    sign = 1 << (num_bits - 1)
    numbers = {0, 1, 2, sign - 2, sign - 1}
    if row.is_floating:
        for value in (math.inf, math.nan, 1.0, 0.5):
            with np.errstate(all="ignore"):
                bits = int.from_bytes(np.array(value).astype(row.numpy_dtype).tobytes(), "little")
            numbers |= {bits - 1, bits, bits + 1}
    # The same with the other sign.
    return sorted({(number ^ flip) & (2 * sign - 1) for number in numbers for flip in (0, sign)})


def element_bits(row: DtypeRow) -> int:
    """Bits of one element that mean something."""
    prefix = row.name.partition("_")[0]
    return int(prefix.removeprefix("float")) if prefix in {"float4", "float6"} else 8 * row.itemsize


def from_patterns(patterns: Sequence[int], *, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The array of those bits."""
    dtype = numpy_dtype(name)
    data = b"".join(pattern.to_bytes(dtype.itemsize, "little") for pattern in patterns)
    return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


@st.composite
def arrays(
    draw: st.DrawFn, *, name: str | None = None, shape: tuple[int, ...] | None = None, contiguous: bool = False
) -> np.ndarray[Any, Any]:
    """Arrays of any bits of any type and shape, also transposed, reversed and strided ones."""
    drawn_name = name if name is not None else draw(dtype_names())
    drawn_shape = shape if shape is not None else draw(shapes())
    row = DTYPES[drawn_name]
    top = 1 if row.numpy_dtype.kind == "b" else (1 << element_bits(row)) - 1
    patterns = st.one_of(st.sampled_from(special_patterns(drawn_name)), st.integers(0, top))
    stretch = 1 if contiguous or not drawn_shape else draw(st.sampled_from([1, 2]))
    held = (*drawn_shape[:-1], drawn_shape[-1] * stretch) if drawn_shape else ()
    count = math.prod(held)
    array = from_patterns(draw(st.lists(patterns, min_size=count, max_size=count)), name=drawn_name, shape=held)
    if contiguous or not drawn_shape:
        return array
    strided = array[..., ::stretch]
    turned = strided[::-1] if draw(st.booleans()) else strided
    # Fortran order keeps the shape and turns the strides round.
    return np.asfortranarray(turned) if draw(st.booleans()) else turned


def raw_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """The values' bits, in C order: what two arrays must share to be equal bit for bit."""
    return np.ascontiguousarray(array).tobytes()


def terms() -> st.SearchStrategy[str]:
    """Texts that `check_term` lets pass, in any script."""
    printable = st.characters(exclude_categories=("C", "Z"), include_characters=" ")
    drawn = st.text(printable, min_size=1, max_size=MAX_TERM_LENGTH)
    return st.one_of(st.sampled_from(AWKWARD_TERMS), drawn)


def words() -> st.SearchStrategy[str]:
    """Terms as people choose them."""
    return st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,11}", fullmatch=True)


def modules() -> st.SearchStrategy[str]:
    """Dotted module paths, as models give them and as they could."""
    dotted = st.lists(st.one_of(words(), st.integers(0, 99).map(str)), max_size=6).map(".".join)
    return st.one_of(dotted, terms()).map(lambda path: path[:MAX_MODULE_LENGTH])


@st.composite
def overflows(draw: st.DrawFn, *, numel: int, num_samples: int | None) -> Overflow:
    """Counts that a tensor of so many elements could have."""
    counts = {kind: draw(st.integers(0, numel)) for kind in TALLY_KINDS}
    numbers = st.one_of(st.none(), st.floats(allow_nan=False))
    parts: dict[str, Any] = {name: draw(numbers) for name in EXTREMES}
    for kind, count in counts.items():
        parts[kind] = ElementTally(count=count, ratio=count / numel if numel else 0.0)
    return Overflow(
        **parts,
        per_sample=None
        if num_samples is None
        else {
            kind: draw(st.lists(st.integers(0, numel), min_size=num_samples, max_size=num_samples))
            for kind in TALLY_KINDS
        },
    )


@st.composite
def record_infos(draw: st.DrawFn) -> RecordInfo:
    """Records of any identity; their sizes fit together."""
    shape = draw(shapes())
    dtype = draw(dtype_names())
    sample_dim = draw(st.none() if not shape else st.one_of(st.none(), st.integers(0, len(shape) - 1)))
    num_samples = None if sample_dim is None else shape[sample_dim]
    ids = st.one_of(st.integers(), terms())
    sample_ids = st.none() if num_samples is None else st.one_of(
        st.none(), st.lists(ids, min_size=num_samples, max_size=num_samples)
    )  # fmt: skip
    small = st.integers(0, 9999)
    return RecordInfo(
        iteration=draw(st.integers(0, 10**8 - 1)),
        rank=draw(small),
        attempt=draw(st.integers(0, 99)),
        microbatch=draw(small),
        call=draw(small),
        sample_dim=sample_dim,
        sample_ids=draw(sample_ids),
        batch_size=num_samples,
        module=draw(modules()),
        layer_type=draw(terms()),
        layer_stack=draw(modules()),
        layer_idx=draw(st.integers(-1, 999)),
        operation=str(draw(st.sampled_from(list(Operation)))),
        phase=draw(terms()),
        component=draw(terms()),
        quant_type=draw(terms()),
        tensor_name=draw(terms()),
        dtype=dtype,
        shape=shape,
        layout=draw(st.sampled_from(["", "BHTD", "TBH"])),
        compute_dtype=draw(dtype_names(only_torch=True)),
        placement=draw(st.sampled_from([None, {"mesh": ["dp"], "coordinate": [1], "placements": ["Shard(dim=0)"]}])),
        metadata=draw(st.sampled_from([None, {"seed": 3, "note": "\u5c42"}])),
        overflow=draw(overflows(numel=math.prod(shape), num_samples=num_samples)),
        counter=draw(st.integers(0, MAX_COUNT)),
        timestamp=draw(st.floats(0, 1e11)),
        nbytes=math.prod(shape) * DTYPES[dtype].itemsize,
        checksum=f"crc32c:{draw(st.integers(0, 2**32 - 1)):08x}",
    )
