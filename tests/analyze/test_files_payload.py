"""The values of a `.pt` file are those that torch reads, and a file that is damaged or of another kind is named."""

from __future__ import annotations

import os
import random
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ranktape.analyze.legacy.payload import read_header, read_values
from ranktape.errors import DataError, StorageError
from tests.analyze.pt_files import archive, save

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int8", "int16", "int32", "int64", "bool"),
    *("uint8", "uint16", "uint32", "uint64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
NOT_READ_BY_TORCH = {name for name in DTYPES if name.startswith(("float8", "uint")) and name != "uint8"}
"""In the older form torch writes them, and refuses to read them with `weights_only`."""

LEGACY = pytest.mark.parametrize("legacy", [False, True], ids=["archive", "legacy"])
MEBIBYTE = 1 << 20


def random_bits(dtype: str, *shape: int) -> torch.Tensor:
    """Every pattern may occur, NaN of every kind among them."""
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(0, 2, shape).bool()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), dtype=torch.uint8)
    return raw.view(kind)


def raw(tensor: torch.Tensor) -> bytes:
    """Its bytes in C order."""
    plain = tensor.detach().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


@LEGACY
def test_the_bits_are_those_that_torch_reads(tmp_path: Path, legacy: bool) -> None:  # noqa: FBT001
    for dtype in DTYPES:
        base = random_bits(dtype, 4, 6)
        layouts = [base, base.t(), base[1:3, ::2], base[2, 3], base[:0], base[None, :, None], base.unfold(0, 2, 2)]
        for tensor in layouts:
            for payload in (tensor, [tensor], {"tensor": tensor, "metadata": {"rank": 3}}):
                path = save(tmp_path / "x.pt", payload, legacy=legacy)
                if legacy and dtype in NOT_READ_BY_TORCH:
                    with pytest.raises(DataError, match=f"{dtype}|damaged"):
                        read_header(path)
                    continue
                header = read_header(path)
                values = read_values(path, header)
                assert (header.dtype, header.shape, values.shape) == (dtype, tuple(tensor.shape), tuple(tensor.shape))
                assert np.ascontiguousarray(values).tobytes() == raw(tensor)
                loaded = torch.load(path, weights_only=True)
                found = loaded["tensor"] if isinstance(loaded, dict) else loaded
                theirs = found[0] if isinstance(loaded, list) else found
                assert (tuple(theirs.shape), raw(theirs)) == (header.shape, raw(tensor))


@LEGACY
def test_a_parameter_is_its_tensor(tmp_path: Path, legacy: bool) -> None:  # noqa: FBT001
    parameter = torch.nn.Parameter(torch.randn(3, 2))
    path = save(tmp_path / "x.pt", {"tensor": parameter}, legacy=legacy)
    assert read_values(path, read_header(path)).tobytes() == raw(parameter)


@LEGACY
def test_what_the_file_says_comes_as_json(tmp_path: Path, legacy: bool) -> None:  # noqa: FBT001
    said: dict[Any, Any] = {"a": [1, 2.5, None, True], "nan": float("nan"), "inf": -float("inf"), 3: "three"}
    said |= {"dtype": torch.bfloat16, "shape": torch.Size([2, 3]), "device": torch.device("cpu"), "set": {1}}
    said |= {"nested": {"tensor": torch.zeros(2, 3)}, "big": 2**70, "text": "层\n"}
    header = read_header(save(tmp_path / "x.pt", {"tensor": torch.zeros(1), "metadata": said}, legacy=legacy))
    assert header.metadata == {
        "a": [1, 2.5, None, True],
        "nan": "nan",
        "inf": "-inf",
        "3": "three",
        "dtype": "torch.bfloat16",
        "shape": [2, 3],
        "device": "cpu",
        "set": [1],
        "nested": {"tensor": "tensor float32[2, 3]"},
        "big": 2**70,
        "text": "层\n",
    }


def other_kind(kind: str) -> torch.Tensor:
    """A tensor that is no dense one of our dtypes."""
    if kind == "quantised":
        with warnings.catch_warnings(action="ignore"):  # torch wants to drop them
            return torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    if kind == "half complex":
        with warnings.catch_warnings(action="ignore"):  # torch's is experimental
            return torch.zeros(2, dtype=torch.complex32)
    if kind == "sparse":
        return torch.eye(3).to_sparse()
    return torch.zeros(2, dtype=torch.complex64).conj() if kind == "conjugated" else torch.empty(3, device="meta")


def test_an_archive_that_is_cut_off_is_called_so(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", torch.arange(100.0))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=r"x\.pt is damaged or truncated: it starts like an archive of torch\.save"):
        read_header(path)


@pytest.mark.parametrize("kind", ["quantised", "half complex", "sparse", "conjugated", "meta"])
@LEGACY
def test_tensors_of_other_kinds_are_refused(tmp_path: Path, kind: str, legacy: bool) -> None:  # noqa: FBT001
    with warnings.catch_warnings(action="ignore"):  # of torch's, about such tensors
        path = save(tmp_path / "x.pt", {"tensor": other_kind(kind)}, legacy=legacy)
    with pytest.raises(DataError, match=r"x\.pt cannot be read: "):
        read_header(path)


def test_what_is_no_single_tensor_is_named(tmp_path: Path) -> None:
    for payload, said in [
        ({"hidden": torch.zeros(1), "mask": 3}, "a dictionary of hidden, mask, without a tensor"),
        ({"tensor": [1, 2]}, "without a tensor"),
        ([torch.zeros(1), torch.zeros(1)], "2 values"),
        ([], "0 values"),
        ("text", "a str"),
        (None, "a NoneType"),
        ({}, "a dictionary of nothing"),
    ]:
        with pytest.raises(DataError, match=said):
            read_header(save(tmp_path / "x.pt", payload))


class measured_memory:  # noqa: N801 - a context
    """Fails if more than some MiB are allocated inside."""

    def __enter__(self) -> None:
        tracemalloc.start()

    def __exit__(self, *_: object) -> None:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 * MEBIBYTE


@LEGACY
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, legacy: bool) -> None:  # noqa: FBT001
    payload = {"tensor": torch.randn(4, 8), "metadata": {"rank": 1}}
    whole = save(tmp_path / "x.pt", payload, legacy=legacy).read_bytes()
    path = tmp_path / "cut.pt"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"cut\.pt"):
            read_header(path)


@LEGACY
def test_a_file_with_any_bit_flipped_gives_the_truth_or_an_error(tmp_path: Path, legacy: bool) -> None:  # noqa: FBT001
    tensor = torch.randn(4, 8)
    whole = save(tmp_path / "x.pt", {"tensor": tensor, "metadata": {"rank": 1}}, legacy=legacy).read_bytes()
    path, rng = tmp_path / "flipped.pt", random.Random(0)  # noqa: S311 - the same flips every time
    found = 0
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            header = read_header(path)
            values = read_values(path, header)
        except DataError:
            found += 1
            continue
        # The older form has no checksum: there, damaged values are read as they stand.
        assert legacy or header.dtype != "float32" or header.shape != (4, 8) or values.tobytes() == raw(tensor)
    assert found > 50


def test_damaged_values_in_an_archive_are_found(tmp_path: Path) -> None:
    tensor = torch.randn(64)
    path = save(tmp_path / "x.pt", tensor)
    header = read_header(path)
    whole = bytearray(path.read_bytes())
    whole[whole.index(raw(tensor)) + 17] ^= 4
    path.write_bytes(whole)
    with pytest.raises(DataError, match=r"the values in .* are damaged"):
        read_values(path, header)


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    path = save(tmp_path / "x.pt", torch.randn(1000), legacy=True)
    header = read_header(path)
    os.truncate(path, 500)
    with pytest.raises(DataError, match=r"x\.pt cannot be read: it is damaged"):
        read_values(path, header)
    save(path, torch.randn(999))
    with pytest.raises(DataError, match="has changed since it was listed"):
        read_values(path, header)


@LEGACY
def test_values_stay_what_they_were_whatever_becomes_of_the_file(tmp_path: Path, legacy: bool) -> None:  # noqa: FBT001
    tensor = torch.randn(1 << 16)
    path = save(tmp_path / "x.pt", tensor, legacy=legacy)
    values = read_values(path, read_header(path))
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert values.tobytes() == raw(tensor)
    # Were they mapped still, this process would be killed when it looks at them.
    os.truncate(path, 100)
    assert values.tobytes() == raw(tensor)
    assert not values.flags.writeable


def test_a_part_of_a_large_storage_is_read_without_the_rest(tmp_path: Path) -> None:
    whole = torch.arange(5 << 16, dtype=torch.int32)
    part = whole.view(5, -1)[1:3, 1_000:1_050:7]
    path = save(tmp_path / "x.pt", part)
    values = read_values(path, read_header(path))
    assert np.array_equal(values, part.numpy())
    base: Any = values
    while getattr(base, "base", None) is not None:
        base = base.base
    assert base.nbytes == values.nbytes


def test_archives_of_other_things_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "x.pt"
    with zipfile.ZipFile(other, "w") as file:
        file.writestr("word/document.xml", "<x/>")
    with pytest.raises(DataError, match=r"x\.pt cannot be read"):
        read_header(other)
    with pytest.raises(DataError, match=r"x\.pt cannot be read"):
        read_header(archive(other, b"\x80\x02c__torch__\nLinear\n)\x81."))


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(DataError, match="is not a file"):
        read_header(tmp_path / "pipe.pt")
    with pytest.raises(StorageError, match="No such file"):
        read_header(tmp_path / "missing.pt")
    (tmp_path / "empty.pt").touch()
    with pytest.raises(DataError, match="is empty"):
        read_header(tmp_path / "empty.pt")
    (tmp_path / "noise.pt").write_bytes(random.Random(1).randbytes(5000))  # noqa: S311
    with pytest.raises(DataError, match=r"was not written by torch\.save"):
        read_header(tmp_path / "noise.pt")
