"""Are rows of numbers found again, made once, and never taken from a stranger?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.analyze.engine import engine as engine_module
from ranktape.analyze.engine.cache import VERSION
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.engine.sheet import NOTHING, KeptAnswer, Sheet, SheetForm, SheetRow, sheet_of
from ranktape.analyze.questions import sweep_command
from ranktape.analyze.questions.compare import compare
from ranktape.errors import DataError, RanktapeError
from ranktape.storage import Records, Run, open_run
from ranktape.storage.format.layout import ANALYSIS
from tests.analyze.runs import describe_tensor, store

FORM = SheetForm(name="rows", width=3, part_width=2)


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
    """Makes rows of two numbers, nothing and as many parts as the layer says; remembers what of."""

    def __init__(self, *, fails_at: int = -1) -> None:
        self.made: list[int] = []
        self._fails_at = fails_at

    def __call__(self, records: Records) -> Iterator[SheetRow | RanktapeError]:
        for record in records:
            value = int(record.read()[0])
            self.made.append(value)
            if value == self._fails_at:
                yield DataError("damaged")
            else:
                parts = np.full((record.layer_idx, 2), float(value))
                yield SheetRow([value, None, float("nan")], parts if record.layer_idx else None)


def values_of(run: Run, maker: Maker, *, engine: Engine | None = None, layers: list[int] | None = None) -> list[float]:
    records = open_run(run.url).select(**({} if layers is None else {"layer_idx": layers}))
    sheet = sheet_of(records, FORM, maker, engine=engine or Engine())
    assert sheet.numbers.shape == (len(records), 3)
    assert sheet.sizes.tolist() == [0 if place in sheet.errors else one.layer_idx for place, one in enumerate(records)]
    assert sheet.parts[:, 0].tolist() == sheet.numbers[sheet.owners, 0].tolist()
    bits = sheet.numbers.copy().view(np.int64)
    nothing = np.float64(NOTHING).view(np.int64)
    good = [place for place in range(len(records)) if place not in sheet.errors]
    assert (bits[good, 1] == nothing).all()
    assert not (bits[good, 2] == nothing).any()
    return [float(one) for one in sheet.numbers[good, 0]]


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
    sheet = sheet_of(records, FORM, Maker(fails_at=12), engine=Engine())
    assert list(sheet.errors) == [7]
    maker = Maker()
    assert len(values_of(run, maker)) == 10
    assert maker.made == [12]


@pytest.mark.parametrize("command", ["overflow", "sweep"])
def test_formats_in_another_order_are_not_counted_again(run: Run, command: str) -> None:
    rows, kept = [], []
    for formats in ("fp8_e4m3,mxfp4,nvfp4", "nvfp4,fp8_e4m3,mxfp4"):
        result = CliRunner().invoke(cli, [command, run.url, "--format", formats, "--json"])
        assert result.exit_code == 0, result.output
        rows.append(json.loads(result.stdout)["rows"])
        kept.append(sorted(Path(run.url, ANALYSIS).rglob("*.counts")))
    assert kept[0] == kept[1]
    assert sorted(map(str, rows[0])) == sorted(map(str, rows[1]))
    assert rows[0] != rows[1]


@pytest.mark.parametrize("other", [SheetForm(name="rows", width=2, part_width=2), SheetForm(name="rows", width=3)])
def test_rows_of_another_form_are_not_taken(run: Run, other: SheetForm) -> None:
    def compute(records: Records) -> Iterator[SheetRow]:
        yield from (SheetRow([1.0] * other.width) for _ in records)

    sheet_of(open_run(run.url).select(), other, compute, engine=Engine())
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
    fresh = 0
    for selected, about, expected in (
        (records, ["a"], None),
        (records, ["a"], 1),
        (records, ["a", "b"], None),
        (records, ["ab"], None),
        (records[:1], ["a"], None),
        (records, ["a", "b"], 2),
    ):
        kept = KeptAnswer([selected], about, name=FORM.cache_name)
        found = kept.find()
        if found is None:
            fresh += 1
            kept.keep(FORM.columns([SheetRow([1.0, None, 2.0]), SheetRow([fresh, None, 2.0])]))
            assert expected is None
        else:
            assert Sheet.of(found).numbers[:, 0].tolist() == [1, expected]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros((2, 3)), np.zeros((2, 3))),
        (np.array(1.5), np.array(2.0)),
        (np.array([[1.0, np.nan], [np.inf, 0.0]]), np.array([[1.0, 2.0], [np.inf, -0.0]])),
        (np.zeros((0, 4)), np.zeros((0, 4))),
        (np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(3, 2)),
        (np.array([1e-300]), np.array([-1e300])),
        (np.arange(4, dtype=np.float32), np.array([0, 1, 2, 9], dtype=np.float32)),
    ],
)
def test_a_comparison_that_was_kept_is_the_same(tmp_path: Path, a: np.ndarray, b: np.ndarray) -> None:
    runs = [store(tmp_path / name, [describe_tensor(array)]) for name, array in (("a", a), ("b", b))]
    records = [open_run(run.url).select() for run in runs]
    fresh = compare(*records, engine=Engine(use_cache=False))
    for _ in range(2):
        assert repr(compare(*records, engine=Engine()).rows) == repr(fresh.rows)
    kept = list((Path(runs[0].url) / ANALYSIS / VERSION).glob("pairs*/**/*.counts"))
    assert bool(kept) != (a.dtype == np.float64 and bool((a == 1e-300).any()))


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
    monkeypatch.setattr(sweep_command, "table_of", lambda *_, **__: pytest.fail("it was kept"))
    assert ask() == fresh
