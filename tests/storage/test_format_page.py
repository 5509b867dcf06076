"""Does docs/format.md say enough to read a run? Here is a reader that was written from it, without ranktape."""

from __future__ import annotations

import ast
import json
import math
import re
import struct
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import google_crc32c
import numpy as np
import pytest
from numcodecs import zstd  # for the one thing that Python's standard library cannot do before 3.14

from ranktape.analyze.numerics.histograms.block_counts import unpack_blocks
from ranktape.storage.format.catalogue import COLUMNS
from ranktape.storage.format.layout import TensorSite
from ranktape.storage.records.run import open_run

GOLDEN = Path(__file__).parent.parent / "golden"
RUNS = {"restarted": 66, "modes": 22, "blocks": 16}
"""The records in each golden run."""
STATISTICS = (
    *("num_elements", "num_finite", "sum", "moment_2", "moment_3", "moment_4", "sum_magnitudes"),
    *("minimum", "maximum", "absmax"),
)
SIZES = {"bool": 1, "bfloat16": 2, "complex64": 8, "complex128": 16}
STAMP = re.compile(rb'"ranktape_checksum": ?"crc32c:([0-9a-f]{8})"')


@dataclass
class PlainRecord:
    """A record as the page describes it."""

    columns: dict[str, Any]
    attributes: dict[str, Any]
    values: bytes


class PlainRun:
    """A run, read with json, struct, zipfile and CRC-32C."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        assert self.document("")["attributes"]["ranktape_schema"] == 1

    def document(self, path: str) -> dict[str, Any]:
        """A document, compared with its checksum."""
        key = f"{path}/zarr.json" if path else "zarr.json"
        data = (self.folder / key).read_bytes()
        match = STAMP.search(data)
        if match is not None:
            blank = data[: match.start(1)] + b"00000000" + data[match.end(1) :]
            assert int(match[1], 16) == google_crc32c.value(f"{key}\n".encode() + blank), key
        return dict(json.loads(data))

    def commits(self) -> list[tuple[str, int]]:
        """Every attempt's complete iterations, the earliest attempt first."""
        names = [path.name for path in self.folder.iterdir() if (path / "zarr.json").exists()]
        matches = [match for match in map(re.compile(r"attempt_(\d+)(-[0-9a-f]+)?").fullmatch, names) if match]
        attempts = [match[0] for match in sorted(matches, key=lambda match: (int(match[1]), match[0]))]
        commits = [(attempt, self.folder.glob(f"{attempt}/iterations/iter_*/zarr.json")) for attempt in attempts]
        return [(attempt, int(path.parent.name[5:])) for attempt, paths in commits for path in paths]

    def records(self, attempt: str, iteration: int) -> list[PlainRecord]:
        """The records of a complete iteration."""
        path = f"{attempt}/iterations/iter_{iteration:08d}"
        document = self.document(path)
        assert document["attributes"]["complete"] is True
        columns = self.columns(self.array(path, document))
        num_records = len(columns["iteration"])
        assert num_records == document["attributes"]["num_records"]
        assert sum(columns["nbytes"]) == document["attributes"]["nbytes"]
        rows = [{name: column[row] for name, column in columns.items()} for row in range(num_records)]
        return [self.record(attempt, row) for row in rows]

    def record(self, attempt: str, row: dict[str, Any]) -> PlainRecord:
        """A record, with the attributes and the values in the array that its row of the catalogue names."""
        group = f"{attempt}/rank_{row['rank']:05d}/iter_{row['iteration']:08d}"
        site = row["site"] if "site" in row else row["path"].removeprefix(f"{group}/")
        stack, index = row.get("stack", ""), row.get("index", -1)
        path = f"{group}/{stack or site}"
        document = self.document(path)
        attributes = document["attributes"]
        if stack:
            attributes = {**attributes["common"], **attributes["captures"][index]}
        values = self.array(path, document, slice_of_first=index if stack else None)
        assert f"crc32c:{google_crc32c.value(values):08x}" == attributes["checksum"]
        assert len(values) == attributes["nbytes"]
        return PlainRecord(columns={**row, "site": site}, attributes=attributes, values=values)

    def array(self, path: str, document: dict[str, Any], *, slice_of_first: int | None = None) -> bytes:
        """The bytes of an array, or of one slice along its first axis."""
        shape = document["shape"]
        if 0 in shape:
            assert not (self.folder / path / ".".join(["c", *"0" * len(shape)])).exists()
            return b""
        data = (self.folder / path / ".".join(["c", *"0" * len(shape)])).read_bytes()
        codec = document["codecs"][0]
        size = item_nbytes(document["data_type"])
        if codec["name"] != "sharding_indexed":
            return chunk(data, document["codecs"], nbytes=size * math.prod(shape))
        inner = codec["configuration"]["chunk_shape"]
        (axis,) = [axis for axis, (extent, part) in enumerate(zip(shape, inner, strict=True)) if extent != part] or [0]
        count = shape[axis]
        index, crc = data[-16 * count - 4 : -4], data[-4:]
        assert struct.unpack("<I", crc)[0] == google_crc32c.value(index)
        entries = list(struct.iter_unpack("<QQ", index))
        chunks = [
            chunk(data[start : start + nbytes], codec["configuration"]["codecs"], nbytes=size * math.prod(inner))
            for start, nbytes in entries
        ]
        if slice_of_first is not None:
            assert axis == 0
            return chunks[slice_of_first]
        before = math.prod(shape[:axis])
        row = len(chunks[0]) // before
        return b"".join(part[place * row : (place + 1) * row] for place in range(before) for part in chunks)

    def columns(self, data: bytes) -> dict[str, list[Any]]:
        """The columns of a catalogue."""
        with zipfile.ZipFile(BytesIO(data)) as archive:
            members = {name.removesuffix(".npy"): npy(archive.read(name)) for name in archive.namelist()}
        columns: dict[str, list[Any]] = {}
        for name, values in members.items():
            if name.startswith("codes:"):
                table = json.loads(bytes(members[f"table:{name[6:]}"]))
                columns[name[6:]] = [table[code] for code in values]
            elif not name.startswith("table:"):
                columns[name] = values
        return columns


def item_nbytes(data_type: str) -> int:
    """Bytes of an element."""
    digits = re.fullmatch(r"(?:float|u?int)(8|16|32|64)", data_type)
    return int(digits[1]) // 8 if digits else SIZES.get(data_type, 1)


def chunk(data: bytes, codecs: list[dict[str, Any]], *, nbytes: int) -> bytes:
    """The values in a plain chunk."""
    assert struct.unpack("<I", data[-4:])[0] == google_crc32c.value(data[:-4])
    values = data[:-4]
    if "zstd" in [codec["name"] for codec in codecs]:
        values = bytes(zstd.decompress(values))
    assert len(values) == nbytes
    return values


def npy(data: bytes) -> list[Any]:
    """The values of a one-dimensional npy file."""
    assert data[:8] == b"\x93NUMPY\x01\x00"
    (length,) = struct.unpack("<H", data[8:10])
    header = ast.literal_eval(data[10 : 10 + length].decode().strip())
    letters = {"i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "f4": "f", "f8": "d"}
    (count,) = header["shape"]
    return list(struct.unpack(f"<{count}{letters[header['descr'][1:]]}", data[10 + length :]))


def site_fields(site: str) -> list[str]:
    """The ten fields of a name, or eleven."""
    return [unquote(field, errors="surrogatepass") for field in site.replace("+/", "").replace("/+", "").split(",")]


def plain_statistics(values: bytes) -> dict[str, Any]:
    """The statistics of a tensor, and what follows from them, None where there is no such number."""
    numbers = dict(zip(STATISTICS, struct.unpack("<10d", values), strict=True))
    count = numbers["num_finite"]
    variance = numbers["moment_2"] / count if count else 0.0
    found = {
        **numbers,
        "variance": variance if count else math.nan,
        "skewness": numbers["moment_3"] / count / variance**1.5 if variance else math.nan,
        "kurtosis": numbers["moment_4"] / count / variance**2 if variance else math.nan,
    }
    return {name: None if math.isnan(number) else pytest.approx(number) for name, number in found.items()}


def plain_histogram(record: PlainRecord) -> tuple[list[int], list[dict[str, Any]]]:
    """The counts of a tensor's patterns, and the sections that count its blocks."""
    attributes = record.attributes
    is_wide = math.prod(attributes["shape"]) >= 1 << 32
    words = [one for (one,) in struct.iter_unpack("<Q" if is_wide else "<I", record.values)]
    place, sections = 65537, []
    for _ in range(words[65536] if len(words) > 65536 else 0):
        section: dict[str, Any] = {
            "axis": ["features", "tokens"][words[place]],
            "numbers": words[place + 1 : place + 9],
        }
        num_cuts, num_kinds, num_cells = words[place + 9 : place + 12]
        place += 12
        section["cuts"] = words[place : place + num_cuts]
        place += num_cuts
        steps = words[place + 3 * num_kinds : place + 3 * num_kinds + num_cells]
        counts = words[place + 3 * num_kinds + num_cells : place + 3 * num_kinds + 2 * num_cells]
        cells, number = [], 0
        for kind in range(place, place + 3 * num_kinds, 3):
            magnitude = 0
            for _ in range(words[kind + 2]):
                magnitude += steps[number]
                cells.append((words[kind] - 1024, words[kind + 1], magnitude, counts[number]))
                number += 1
        assert number == num_cells
        place += 3 * num_kinds + 2 * num_cells
        numbers = section["numbers"]
        total = sum(cell[3] for cell in cells) + numbers[3] + numbers[5] + numbers[6] + numbers[7]
        assert total == math.prod(attributes["shape"])
        sections.append({**section, "cells": cells})
    assert not any(words[place:])
    return words[:65536], sections


def plain_blocks(blocks: Any) -> dict[str, Any]:
    """What our reader says of a section, in the same form."""
    names = ("block_size", "num_blocks", "zero_blocks", "zero_elements", "spoiled_blocks", "spoiled", "nan", "inf")
    columns = (blocks.exponents, blocks.classes, blocks.magnitudes, blocks.counts)
    return {
        "axis": blocks.axis,
        "numbers": [getattr(blocks, name) for name in names],
        "cuts": list(blocks.cuts),
        "cells": list(zip(*(column.tolist() for column in columns), strict=True)),
    }


@pytest.mark.parametrize("name", RUNS)
def test_a_reader_written_from_the_page_reads_the_same_bits(name: str) -> None:
    plain, run = PlainRun(GOLDEN / name), open_run(GOLDEN / name)
    assert sorted({iteration for _, iteration in plain.commits()}) == run.iterations
    total = 0
    for attempt, iteration in plain.commits():
        records = run.select(iteration=iteration, attempt=int(attempt[8:11]))
        found = plain.records(attempt, iteration)
        assert len(found) == len(records)
        total += len(found)
        for ours, theirs in zip(records, found, strict=True):
            values: Any = {"values": ours.read, "histogram": ours.histogram, "statistics": ours.statistics}[ours.keep]()
            if ours.keep == "statistics":
                assert plain_statistics(theirs.values) == {
                    **{name: getattr(values, name) for name in STATISTICS},
                    **{name: getattr(values, name) for name in ("variance", "skewness", "kurtosis")},
                }
                values = values.to_vector()
            if ours.keep == "histogram":
                words, sections = plain_histogram(theirs)
                assert words == values[:65536].tolist()
                assert len(sections) == (2 if name == "blocks" else 0)
                assert sections == [plain_blocks(one) for one in unpack_blocks(values)]
            else:
                assert theirs.values == np.ascontiguousarray(values).tobytes()
            of_the_array = {"ranktape_checksum", "sample_checksums"}
            attributes = {key: value for key, value in theirs.attributes.items() if key not in of_the_array}
            assert attributes == ours.info.to_json()
            for sample, checksum in enumerate(theirs.attributes.get("sample_checksums", [])):
                one = np.ascontiguousarray(ours.read(sample=sample)).tobytes()
                assert f"crc32c:{google_crc32c.value(one):08x}" == checksum
            site = TensorSite.of(ours.info)
            assert site_fields(theirs.columns["site"]) == [
                *(site.module, site.layer_type, f"L{site.layer_idx}", site.operation, site.phase, site.component),
                *(site.quant_type, site.tensor_name, f"m{site.microbatch}", f"c{site.call}"),
                *([] if site.mode == "train" else [site.mode]),
            ]
    assert total == RUNS[name]


@pytest.mark.parametrize("name", RUNS)
def test_the_columns_are_those_of_the_page(name: str) -> None:
    plain, run = PlainRun(GOLDEN / name), open_run(GOLDEN / name)
    page = (Path(__file__).parent.parent.parent / "docs" / "format.md").read_text()
    for attempt, iteration in plain.commits():
        rows = [record.columns for record in plain.records(attempt, iteration)]
        records = run.select(iteration=iteration, attempt=int(attempt[8:11]))
        for column in rows[0]:
            np.testing.assert_array_equal(records.column(column), [row[column] for row in rows])
            assert f"`{column}`" in page or re.fullmatch(r"overflow\.\w+\.count", column)
        derived = {f"overflow.{kind}" for kind in ("total", "ratio")}
        derived |= {f"overflow.{kind}.ratio" for kind in ("upper", "lower", "underflow", "nan", "inf", "zero")}
        assert set(COLUMNS) - derived == set(rows[0])


def test_every_document_of_a_run_has_its_checksum() -> None:
    plain = PlainRun(GOLDEN / "restarted")
    paths = [path.parent.relative_to(plain.folder).as_posix() for path in plain.folder.rglob("zarr.json")]
    assert len(paths) > 100
    for path in paths:
        assert "ranktape_checksum" in plain.document("" if path == "." else path)["attributes"]


def test_a_run_that_is_written_now_is_bound_together_as_the_page_says(sound: Path) -> None:
    plain, run = PlainRun(sound), open_run(sound)
    for attempt, iteration in plain.commits():
        records = plain.records(attempt, iteration)
        values = {
            (record.info.rank, record.info.module): record.read().tobytes()
            for record in run.select(iteration=iteration)
        }
        assert {(one.columns["rank"], one.columns["module"]): one.values for one in records} == values
        group = plain.document(f"{attempt}/iterations/iter_{iteration:08d}")["attributes"]
        commits = []
        for rank in group["expected_ranks"]:
            path = f"{attempt}/rank_{rank:05d}/iter_{iteration:08d}"
            commit = plain.document(path)
            commits.append(commit["attributes"]["ranktape_checksum"])
            marker = plain.document(f"{attempt}/commits/iter_{iteration:08d}/rank_{rank:05d}.committed")
            assert {*marker["attributes"]} == {"ranktape_checksum", "commit"}
            assert marker["attributes"]["commit"] == commits[-1]
            archive = plain.array(f"{path}/catalogue", plain.document(f"{path}/catalogue"))
            assert commit["attributes"]["catalogue"] == f"crc32c:{google_crc32c.value(bytes(archive)):08x}"
            assert "consolidated_metadata" not in commit
        assert group["commits"] == commits


def test_the_page_names_every_attribute(sound: Path) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "format.md").read_text()
    for path in (*GOLDEN.rglob("zarr.json"), *sound.rglob("zarr.json")):
        for attribute in json.loads(path.read_bytes())["attributes"]:
            assert f"`{attribute}`" in page, (path, attribute)
