"""Does quantising say beforehand what it loses, and warn of it without changing anything?"""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ranktape.analyze import fake_quantize, quantize
from ranktape.analyze.numerics.formats import codes_of, decode, encode, round_to
from ranktape.analyze.numerics.formats.table import NF4
from ranktape.analyze.numerics.quantization.encoded import Losses, LossSeverity, QuantizationWarning
from ranktape.analyze.numerics.quantization.schemes import parse_scheme
from ranktape.errors import UsageError


def losses(*, num_elements: int = 1000, underflow: int = 0, flushed: int = 0, overflow: int = 0) -> Losses:
    return Losses(
        num_elements=num_elements, underflow=underflow, flushed=flushed, overflow=overflow, spoiled=0, nan=0, inf=0
    )


def test_losses_are_counted_before_rounding() -> None:
    # fp8_e4m3: smallest normal 2**-6, smallest subnormal 2**-9, largest 448, the next would be 480.
    x = np.array([0.0, 2.0**-6, 2.0**-7, 2.0**-10, 2.0**-11, 448, 464, 465, 1e9, np.nan, np.inf], dtype=np.float64)
    found = quantize(x, "fp8_e4m3", warn=False).losses
    assert (found.underflow, found.flushed, found.overflow) == (3, 2, 2)
    assert (found.num_elements, found.nan, found.inf, found.spoiled) == (11, 1, 1, 0)
    away = quantize(x, "fp8_e4m3", rounding="away", warn=False).losses
    assert (away.underflow, away.flushed, away.overflow) == (3, 1, 3)
    floor = quantize(x, "fp8_e4m3", rounding="floor", warn=False).losses
    assert (floor.underflow, floor.flushed, floor.overflow) == (3, 2, 1)


def test_losses_are_counted_after_division_by_the_scale() -> None:
    x = np.full((1, 32), 2.0**-20, dtype=np.float32)
    x[0, 0] = 1.0
    for offset, underflow, flushed, overflow in ((0, 31, 31, 0), (-3, 31, 0, 1), (-5, 31, 0, 1), (-6, 0, 0, 1)):
        found = quantize(x, "mxfp8_e4m3", scale_offset=offset, warn=False).losses
        assert (found.underflow, found.flushed, found.overflow) == (underflow, flushed, overflow)


def test_levels_begin_above_a_thousandth_and_a_hundredth() -> None:
    cases: list[tuple[int, LossSeverity]] = [
        (0, LossSeverity.NONE),
        (1, LossSeverity.NONE),
        (2, LossSeverity.MEDIUM),
        (10, LossSeverity.MEDIUM),
        (11, LossSeverity.HIGH),
    ]
    for count, level in cases:
        assert losses(underflow=count).level is level
        assert losses(overflow=count).overflow_level is level
        assert losses(num_elements=0).level is LossSeverity.NONE


def test_losses_are_one_line_for_people() -> None:
    assert str(losses(underflow=20, flushed=5, overflow=2)) == (
        "of 1000 elements: underflow 2.00% (high), 0.50% become zero; overflow 0.20% (medium)"
    )
    spoiled = Losses(num_elements=100, underflow=0, flushed=0, overflow=0, spoiled=31, nan=1, inf=0)
    assert str(spoiled).endswith("; 1 NaN, 0 Inf, 31 others in their blocks")


def test_underflow_above_a_thousandth_is_warned_of_and_changes_nothing() -> None:
    x = np.ones(1000, dtype=np.float32)
    x[:2] = 2.0**-7
    with pytest.warns(QuantizationWarning, match=r"fp8_e4m3: of 1000 elements: underflow 0.20% \(medium\)") as caught:
        found = quantize(x, "fp8_e4m3")
    assert caught[0].filename == __file__
    silent = quantize(x, "fp8_e4m3", warn=False)
    assert (found.values == silent.values).all()
    assert found.losses == silent.losses


def test_what_is_no_underflow_is_not_warned_of() -> None:
    x = np.ones(1000, dtype=np.float32)
    x[0], x[1:500] = 2.0**-7, 0.0
    x[500:600] = 1e6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quantize(x, "fp8_e4m3").losses.overflow_level is LossSeverity.HIGH


PAGE = Path(__file__).parents[2] / "docs" / "quantization.md"


def test_the_examples_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - our own page
    said = re.findall(r"print\(.*?\)  # (.*)", "".join(blocks))
    assert capsys.readouterr().out.splitlines() == said


AnyArray = np.ndarray[Any, np.dtype[Any]]

BLOCK_SIZE = 64

THRESHOLDS = (
    *(-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544, -0.23460740596055984),
    *(-0.13791173323988914, -0.045525018125772476, 0.03979014977812767, 0.1202552504837513, 0.2035212516784668),
    *(0.2920137718319893, 0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784181118011),
)
"""Above each of them bitsandbytes gives the next code: `dQuantizeNF4` of its kernels."""


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    found: ModuleType = pytest.importorskip("torch")
    return found


def normal(shape: tuple[int, ...] = (256, 256)) -> AnyArray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_values_round_where_those_of_bitsandbytes_do() -> None:
    """It has its thresholds as float32 numbers; all numbers that are not between them and the middle agree."""
    table = np.array(NF4.table)
    middles = (table[:-1] + table[1:]) / 2
    assert np.array_equal(middles.astype(np.float32), np.array(THRESHOLDS, dtype=np.float32))
    around = np.concatenate([np.nextafter(middles, -2), np.nextafter(middles, 2), np.linspace(-1.5, 1.5, 30_001)])
    assert np.array_equal(encode(around, target=NF4), np.searchsorted(middles, around))
    # A tie becomes the lower value, of either sign.
    assert encode(middles, target=NF4).tolist() == list(range(15))
    assert round_to([np.inf, -np.inf, -0.0, np.nan], target=NF4).tolist()[:3] == [1.0, -1.0, 0.0]
    assert not np.signbit(round_to(-0.01, target=NF4))
    assert np.array_equal(codes_of(decode(np.arange(16), target=NF4), target=NF4), np.arange(16))


def slowly(x: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Codes and values of rows in whole blocks, one number after the other."""
    codes, values = np.empty(x.shape, dtype=np.uint8), np.empty_like(x)
    for row, start in np.ndindex(len(x), x.shape[1] // BLOCK_SIZE):
        place = row, slice(start * BLOCK_SIZE, (start + 1) * BLOCK_SIZE)
        scale = np.abs(x[place]).max() or np.float32(1.0)
        for column in range(place[1].start, place[1].stop):
            scaled = float(x[row, column] / scale)
            codes[row, column] = min(range(16), key=lambda code: (abs(NF4.table[code] - scaled), code))
            values[row, column] = np.float32(NF4.table[codes[row, column]]) * scale
    return codes, values


def test_quantize_agrees_with_a_slow_twin() -> None:
    x = normal((8, 192))
    x[2, :64] = 0.0
    found = quantize(x, "nf4", warn=False)
    codes, values = slowly(x)
    assert np.array_equal(found.codes, codes)
    assert np.array_equal(found.values.view(np.uint32), values.view(np.uint32))
    assert np.array_equal(found.scales, np.where(np.arange(24).reshape(8, 3) == 6, 1, absmax(x)))
    assert found.losses.overflow == found.losses.nan == 0
    # What becomes 0 depends on the sign: the two values beside it are not alike.
    assert found.losses.flushed == np.count_nonzero((codes == 7) & (x != 0))


def absmax(x: AnyArray) -> AnyArray:
    largest: AnyArray = np.abs(x).reshape(len(x), -1, BLOCK_SIZE).max(axis=2)
    return largest


def test_a_block_with_nan_is_nan_as_a_whole_and_has_the_codes_of_zero() -> None:
    x = normal((2, 128))
    x[0, 3], x[1, 100] = np.nan, np.inf
    found = quantize(x, "nf4", warn=False)
    assert np.isnan(found.values[0, :64]).all()
    assert np.isnan(found.values[1, 64:]).all()
    assert (found.codes[0, :64] == 7).all()
    assert np.array_equal(found.values[0, 64:], quantize(x[:1, 64:], "nf4", warn=False).values[0])
    assert quantize(np.zeros((0, 64)), "nf4").codes.shape == (0, 64)


def test_quantize_agrees_with_torchao(torch: ModuleType) -> None:
    """The codes, with all digits of the values, of which torchao has four; its scales it quantises once more."""
    name = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao")
        nf4 = importlib.import_module(name)
    x, table = torch.from_numpy(normal()), torch.tensor(NF4.table)
    assert torch.allclose(nf4.to_nf4(x[:1], BLOCK_SIZE, 1).nf4, table, rtol=0, atol=0.5e-4)
    packed = nf4.NF4Tensor.convert_to_norm_float_weight(x, x.numel() // BLOCK_SIZE, BLOCK_SIZE, table)
    codes = torch.stack([packed >> 4, packed & 15], dim=1).reshape(x.shape)
    assert torch.equal(quantize(x, "nf4", warn=False).codes, codes)


def test_every_path_gives_the_same_values(torch: ModuleType) -> None:
    from ranktape.analyze.numerics.quantization.operand import quantized_operand, quantized_operands, quantized_values
    from ranktape.analyze.numerics.recipes.recipe import OperandRecipe, ProductRecipe

    x = torch.from_numpy(normal())
    expected = quantize(x, "nf4", warn=False)
    assert torch.equal(quantized_values(x, "nf4"), expected.values)
    assert torch.equal(fake_quantize(x, forward="nf4"), expected.values)
    operand = quantized_operand(x, "nf4")
    assert torch.equal(operand.values * operand.factor, expected.values)
    tiles = quantize(x, "nf4", block_size=(16, 16), warn=False).values
    assert torch.equal(tiles.T, quantize(x.T, "nf4", block_size=(16, 16), warn=False).values)
    recipe = OperandRecipe(scheme="nf4")
    # It is multiplied as the bfloat16 numbers that it is looked up as.
    assert (recipe.bits, recipe.speed) == (4.5, 1)
    product = ProductRecipe(operands={"input": recipe, "weight": OperandRecipe()})
    assert torch.equal(quantized_operands(product, x, x, seed=0)[0].values, expected.values)


def test_what_a_table_does_not_have_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rounding": "stochastic"}, "rounding stochastic is not one of nf4"),
        ({"seed": 1}, "rounding stochastic is not one of nf4"),
        ({"rounding": "floor"}, "rounding floor is not one of nf4"),
        ({"saturate": False}, "nf4 has no infinity"),
        ({"scaling": "tensor"}, "nf4 has blocks, so scaling cannot be tensor: leave it out"),
        ({"four_over_six": True}, "nf4 has none"),
    ]
    for options, message in cases:
        with pytest.raises(UsageError, match=message):
            quantize(normal(), "nf4", **options)


def test_nothing_is_swept_or_counted_against_a_table() -> None:
    with pytest.raises(UsageError, match="'nf4' is a table of values"):
        parse_scheme("nf4")
