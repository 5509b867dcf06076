"""Are values found again, made once, and never taken for another question?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.analyze.engine import engine as engine_module
from ranktape.analyze.engine.engine import Engine, cached_joint_value, cached_record_values
from ranktape.analyze.questions import sweep_command
from ranktape.errors import DataError, RanktapeError
from ranktape.storage import Records, Run, open_run
from ranktape.storage.format.layout import ANALYSIS
from tests.analyze.runs import describe_tensor, store


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANKTAPE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    engine_module.warn_once.cache_clear()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two ranks with five layers each."""
    tensors = [
        describe_tensor(np.full(4, 10 * rank + layer, np.float32), rank=rank, layer_idx=layer)
        for rank in (0, 1)
        for layer in range(5)
    ]
    return store(tmp_path / "run", tensors)


class Maker:
    """Makes a value of JSON of each record, or of odd layers an array if asked; remembers what of."""

    def __init__(self, *, fails_at: int = -1, makes_arrays: bool = False) -> None:
        self.made: list[int] = []
        self._fails_at, self._makes_arrays = fails_at, makes_arrays

    def __call__(self, records: Records) -> Iterator[Any]:
        for record in records:
            value = int(record.read()[0])
            self.made.append(value)
            if value == self._fails_at:
                yield DataError("damaged")
            elif self._makes_arrays:
                yield np.full((record.layer_idx, 2), value + 0.1)
            else:
                yield [value, None, float("inf"), "a note" * record.layer_idx, [0.1, 2.0, 2**70]]


def values_of(run: Run, maker: Maker, *, engine: Engine | None = None, layers: list[int] | None = None) -> list[int]:
    records = open_run(run.url).select(**({} if layers is None else {"layer_idx": layers}))
    found = cached_record_values(records, maker, name="rows", engine=engine or Engine())
    for record, value in zip(records, found, strict=True):
        expected = [None, float("inf"), "a note" * record.layer_idx, [0.1, 2.0, 2**70]]
        assert isinstance(value, RanktapeError) or repr(value[1:]) == repr(expected)
    return [value[0] for value in found if not isinstance(value, RanktapeError)]


def test_arrays_are_found_as_they_were(run: Run) -> None:
    for engine in [Engine(use_cache=False), Engine()]:
        records = open_run(run.url).select()
        for _ in range(2):
            found = cached_record_values(records, Maker(makes_arrays=True), name="arrays", engine=engine)
            assert [one.tolist() for one in found] == [
                [[10 * record.rank + record.layer_idx + 0.1] * 2] * record.layer_idx for record in records
            ]


def test_rows_are_made_once(run: Run) -> None:
    maker = Maker()
    first = values_of(run, maker)
    assert first == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert values_of(run, maker) == first
    assert len(maker.made) == 10
    assert values_of(run, maker, engine=Engine(use_cache=False)) == first
    assert len(maker.made) == 20


def test_what_is_missing_alone_is_made(run: Run) -> None:
    maker = Maker()
    assert values_of(run, maker, layers=[3, 1]) == [1, 3, 11, 13]
    assert values_of(run, maker) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert maker.made == [1, 3, 11, 13, 0, 2, 4, 10, 12, 14]
    assert values_of(run, maker, layers=[4, 2]) == [2, 4, 12, 14]
    assert len(maker.made) == 10


def test_a_failure_is_not_kept(run: Run) -> None:
    records = open_run(run.url).select()
    found = cached_record_values(records, Maker(fails_at=12), name="rows", engine=Engine())
    assert [place for place, one in enumerate(found) if isinstance(one, RanktapeError)] == [7]
    maker = Maker()
    assert len(values_of(run, maker)) == 10
    assert maker.made == [12]


def test_formats_in_another_order_are_not_counted_again(run: Run) -> None:
    for command in ["overflow", "sweep"]:
        rows, kept = [], []
        for formats in ("fp8_e4m3,mxfp4,nvfp4", "nvfp4,fp8_e4m3,mxfp4"):
            result = CliRunner().invoke(cli, [command, run.url, "--format", formats, "--json"])
            assert result.exit_code == 0, result.output
            rows.append(json.loads(result.stdout)["rows"])
            kept.append(sorted(Path(run.url, ANALYSIS).rglob("*.counts")))
        assert kept[0] == kept[1]
        assert sorted(map(str, rows[0])) == sorted(map(str, rows[1]))
        assert rows[0] != rows[1]


def test_values_of_another_name_are_not_taken(run: Run) -> None:
    cached_record_values(open_run(run.url).select(), Maker(), name="others", engine=Engine())
    maker = Maker()
    assert len(values_of(run, maker)) == len(maker.made) == 10


def test_damaged_rows_are_made_again(run: Run) -> None:
    maker = Maker()
    values_of(run, maker)
    for path in (Path(run.url) / ANALYSIS).rglob("*.counts"):
        path.write_bytes(path.read_bytes()[:-1])
    values_of(run, maker)
    assert len(maker.made) == 20
    values_of(run, maker)
    assert len(maker.made) == 20


def test_an_answer_is_that_of_its_question(run: Run) -> None:
    records = open_run(run.url).select()
    numbers = itertools.count(1)
    for selected, about, expected in (
        (records, ["a"], 1),
        (records, ["a"], 1),
        (records, ["a", "b"], 2),
        (records, ["ab"], 3),
        (records[:1], ["a"], 4),
        (records, ["a", "b"], 2),
    ):
        found = cached_joint_value([selected], about, lambda: [{"number": next(numbers)}, None], name="answers")
        assert found == [{"number": expected}, None]


def test_an_answer_that_failed_is_not_kept(run: Run) -> None:
    records = open_run(run.url).select()
    answers = iter((DataError("no"), 1, 2))
    found = [cached_joint_value([records], ["a"], lambda: next(answers), name="answers") for _ in range(3)]
    assert found[1:] == [1, 1]


def test_a_sweep_of_groups_that_was_kept_is_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*options: str, layer: str = "1-4") -> str:
        words = ["sweep", run.url, "--by", "rank", "--layer-idx", layer, "--json", *options]
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    fresh = ask("--no-cache")
    assert ask() == fresh
    other = ask("--no-cache", layer="1-3")
    assert other != fresh
    assert ask(layer="1-3") == other
    monkeypatch.setattr(sweep_command, "sweep_table", lambda *_, **__: pytest.fail("it was kept"))
    assert ask() == fresh
