"""A `.pt` file of bad faith is refused without being run, in little memory and time."""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ranktape.analyze.legacy.payload import MAX_NBYTES, read_header, read_plain
from ranktape.errors import DataError
from tests.analyze.pt_files import archive, number, save, tensor_pickle, text
from tests.analyze.test_files_payload import LEGACY, MEBIBYTE, measured_memory


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("form", ["archive", "legacy", "pickle", "metadata", "plain"])
def test_a_pickle_that_executes_is_not_run(tmp_path: Path, form: str) -> None:
    marker, path = tmp_path / "executed", tmp_path / "x.pt"
    evil: Any = Evil(marker)
    if form == "pickle":
        path.write_bytes(pickle.dumps(evil))
    else:
        payload = {"tensor": torch.zeros(2), "metadata": {"x": evil}} if form == "metadata" else evil
        save(path, payload, legacy=form == "legacy")
    with pytest.raises(DataError, match=r"x\.pt"):
        read_plain(path) if form == "plain" else read_header(path)
    assert not marker.exists()


HUGE = 10**15
DECLARED = {
    "more than the storage": tensor_pickle(shape=(HUGE,), strides=(1,), num_elements=4),
    "a storage larger than the file": tensor_pickle(shape=(HUGE,), strides=(1,), num_elements=HUGE),
    "one element many times": tensor_pickle(shape=(HUGE, HUGE), strides=(0, 0), num_elements=4),
    "an offset beyond the storage": tensor_pickle(shape=(2,), strides=(1,), num_elements=4, offset=3),
    "a stride beyond the storage": tensor_pickle(shape=(2, 2), strides=(3, 1), num_elements=4),
    "numbers that wrap around": tensor_pickle(shape=(2,), strides=(2**64,), num_elements=4),
    "a negative stride": tensor_pickle(shape=(2,), strides=(-1,), num_elements=4),
    "a negative shape": tensor_pickle(shape=(-1,), strides=(1,), num_elements=4),
    "an empty giant": tensor_pickle(shape=(0, 2**62, 2**62), strides=(1, 1, 1), num_elements=4),
    "a thousand dimensions": tensor_pickle(shape=(1,) * 1000, strides=(1,) * 1000, num_elements=4),
    "unequal lengths": tensor_pickle(shape=(2, 2), strides=(1,), num_elements=4),
    "another storage type": tensor_pickle(shape=(4,), strides=(1,), num_elements=4, storage="DoubleStorage"),
    "no storage type": tensor_pickle(shape=(4,), strides=(1,), num_elements=4, storage="float32"),
}


@pytest.mark.parametrize("what", DECLARED)
def test_what_is_declared_and_not_there_is_refused_before_memory_is_taken(tmp_path: Path, what: str) -> None:
    path = archive(tmp_path / "x.pt", DECLARED[what], data__0=bytes(16), byteorder=b"little")
    with measured_memory(), pytest.raises(DataError, match=r"x\.pt"):
        read_header(path)


def test_no_value_beyond_the_file_is_listed_of_a_folder(tmp_path: Path) -> None:
    path = archive(tmp_path / "metadata.pt", DECLARED["another storage type"], data__0=bytes(16), byteorder=b"little")
    with pytest.raises(DataError, match="fewer values than it declares"):
        read_plain(path)


CYCLE = b"\x80\x02}q\x00(" + text("metadata") + b"h\x00" + text("tensor") + b"h\x00u."
DOUBLED = b"\x80\x02]q\x00" + b"".join(b"](h\x00h\x00eq\x00" for _ in range(80))
BOMBS = {
    "a call for an array": b"\x80\x02c__builtin__\nbytearray\n" + number(2**40) + b"\x85R.",
    "a text that is not there": b"\x80\x02X\xff\xff\xff\xff.",
    "a name without an end": b"\x80\x02c" + b"a" * 1000,
    "nothing": b"",
    "no end": b"\x80\x02}",
    "an empty stack": b"\x80\x02.",
    "a mark too few": b"\x80\x02t.",
    "deep": b"\x80\x02" + b"(" * 20_000 + b"t" * 20_000 + b".",
    "a number of digits": b"\x80\x02L" + b"9" * 100_000 + b"L\n.",
    "another protocol": pickle.dumps({"a": [1]}, protocol=5),
    "long": b"\x80\x02" + b"N0" * (MAX_NBYTES // 2 + 10) + b"N.",
}


@pytest.mark.parametrize("what", BOMBS)
@LEGACY
def test_a_pickle_that_would_not_end_well_is_refused(tmp_path: Path, what: str, legacy: bool) -> None:  # noqa: FBT001
    path = tmp_path / "x.pt"
    if legacy:
        torch.save(0, path, _use_new_zipfile_serialization=False)
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.index(b"\x80\x02K\x00.")] + BOMBS[what])
    else:
        archive(path, BOMBS[what])
    with pytest.raises(DataError, match=r"x\.pt"):
        read_plain(path)


@pytest.mark.parametrize(
    "said", [b"\x80\x02]q\x00h\x00a.", DOUBLED + b"."], ids=["a list within itself", "lists of the same lists"]
)
def test_words_without_end_are_refused(tmp_path: Path, said: bytes) -> None:
    path = archive(tmp_path / "x.pt", said)
    with measured_memory(), pytest.raises(DataError, match=r"more than 100000 values or contains itself|larger than"):
        read_plain(path)


LONG_TEXT = b"X" + struct.pack("<I", MEBIBYTE) + b"x" * MEBIBYTE
LONG_NUMBER = b"\x8a\xff" + b"\x11" * 255
LONG_LIST = b"](" + b"N" * MEBIBYTE + b"e"
TENSOR = tensor_pickle(shape=(4,), strides=(1,), num_elements=4)[2:-1]
REPEATED = {
    "a long text": LONG_TEXT + b"q\x01" + b"h\x01" * 1000,
    "a long key": b"}" + LONG_TEXT + b"q\x01Ns" + b"}h\x01Ns" * 1000,
    "a long number": LONG_NUMBER + b"q\x01" + b"h\x01" * 40_000,
}


@pytest.mark.parametrize("what", REPEATED)
def test_what_is_named_many_times_is_not_written_out(tmp_path: Path, what: str) -> None:
    said = b"](" + REPEATED[what] + b"e"
    with measured_memory(), pytest.raises(DataError, match=r"is longer than 1048576 characters"):
        json.dumps(read_plain(archive(tmp_path / "x.pt", b"\x80\x02" + said + b".")))
    beside = b"\x80\x02}(" + text("tensor") + TENSOR + text("metadata") + said + b"u."
    path = archive(tmp_path / "x.pt", beside, data__0=bytes(16))
    with measured_memory(), pytest.raises(DataError, match=r"is longer than 16777216 characters"):
        json.dumps(read_header(path).metadata)


NESTED = b"]q\x00" + b"h\x00\x86q\x00" * 24
CALLS: dict[str, bytes] = {
    "a storage of an endless name": TENSOR.replace(text("0"), NESTED),
    "a device of an endless name": b"ctorch\ndevice\n" + NESTED + b"\x85R",
    "sizes of a million": b"](" + LONG_LIST + b"\x85q\x01ctorch\nSize\nq\x02" + b"h\x02h\x01R" * 20 + b"e",
    "calls with a million arguments": (
        b"](("
        + b"N" * MEBIBYTE
        + b"tq\x01ctorch._utils\n_rebuild_parameter\nq\x02"
        + b"h\x02h\x01R" * 20
        + b"e"
    ),
    "storages of a million words": (
        b"]((" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04"
        + b"N" * MEBIBYTE + b"tq\x01" + b"h\x01Q" * 20 + b"e"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_a_call_takes_no_longer_than_its_pickle(tmp_path: Path, what: str) -> None:
    path = archive(tmp_path / "x.pt", b"\x80\x02" + CALLS[what] + b".")
    started = time.monotonic()
    with pytest.raises(DataError, match=r"x\.pt"):
        read_plain(path)
    assert time.monotonic() - started < 20


def test_sets_of_one_list_take_the_memory_of_one(tmp_path: Path) -> None:
    said = b"](" + LONG_LIST + b"\x85q\x01cbuiltins\nset\nq\x02" + b"h\x02h\x01R" * 20 + b"e"
    path = archive(tmp_path / "x.pt", b"\x80\x02" + said + b".")
    with measured_memory(), pytest.raises(DataError, match="has more than 100000 values"):
        read_plain(path)


def test_storages_of_the_older_form_are_named_by_words(tmp_path: Path) -> None:
    torch.save(torch.zeros(2), tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "x.pt").read_bytes()
    keys = whole.rindex(b"\x80\x02")
    (tmp_path / "x.pt").write_bytes(whole[:keys] + b"\x80\x02]" + NESTED + b"a." + whole[keys:])
    with measured_memory(), pytest.raises(DataError, match=r"x\.pt"):
        read_header(tmp_path / "x.pt")


@pytest.mark.parametrize("count", [32, 4000])
def test_extents_of_hundreds_of_digits_are_not_multiplied(tmp_path: Path, count: int) -> None:
    largest = b"\x8a\xfe" + b"\xff" * 253 + b"\x7f"
    shape = b"(" + largest + b"q\x02" + b"h\x02" * (count - 1) + b"t"
    strides = b"(" + b"K\x00" * count + b"t"
    pickled = tensor_pickle(shape=(), strides=(), num_elements=4).replace(b"(t(t\x89", shape + strides + b"\x89")
    path = archive(tmp_path / "x.pt", pickled, data__0=bytes(16))
    started = time.monotonic()
    with pytest.raises(DataError, match=r"x\.pt") as caught:
        read_header(path)
    assert time.monotonic() - started < 5
    assert len(str(caught.value)) < 1000


def test_a_dictionary_within_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="without a tensor"):
        read_header(archive(tmp_path / "x.pt", CYCLE))


def test_a_compressed_archive_is_not_unpacked(tmp_path: Path) -> None:
    pickle_text = tensor_pickle(shape=(1 << 26,), strides=(1,), num_elements=1 << 26)
    path = archive(tmp_path / "x.pt", pickle_text, compress=True, data__0=bytes(1 << 28))
    assert path.stat().st_size < MEBIBYTE
    with measured_memory(), pytest.raises(DataError, match="is compressed"):
        read_header(path)


def test_what_only_looks_dangerous_takes_no_memory(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pt", b"\x80\x02Nr\xff\xff\xff\x7f.")
    with measured_memory():
        assert read_plain(path) is None
