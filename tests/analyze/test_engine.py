"""Are results in order, whoever asks, and is nothing done that nobody waits for?"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import rich.console
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.analyze.engine import engine as engine_module
from ranktape.analyze.engine.engine import (
    BATCH_NBYTES,
    BATCH_RECORDS,
    Engine,
    WorkPlan,
    bytes_progress,
    next_step,
    split_by_size,
    steps,
)
from ranktape.analyze.legacy.open import open_folder
from ranktape.errors import DataError, UsageError
from ranktape.storage import Records, Run, open_run
from tests.analyze.engine_runs import FirstValue, square
from tests.analyze.pt_files import legacy_file
from tests.analyze.runs import describe_tensor, store
from tests.terminal import Terminal


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two ranks and two iterations with ten layers each; the first value names the record."""
    tensors = [
        describe_tensor(
            np.full(4, 1000 * iteration + 100 * rank + layer, np.float32),
            iteration=iteration,
            rank=rank,
            layer_idx=layer,
        )
        for iteration in (0, 1)
        for rank in (0, 1)
        for layer in range(10)
    ]
    return store(tmp_path / "run", tensors)


@pytest.fixture
def measure(tmp_path: Path) -> FirstValue:
    """A measure that says how often it was asked."""
    (tmp_path / "trace").mkdir()
    return FirstValue(trace=tmp_path / "trace")


def test_payloads_come_in_the_order_of_the_records(run: Run, measure: FirstValue) -> None:
    records = run.select(layer_idx="3,7")
    found = [float(payload["first"][0]) for payload in Engine(use_cache=False).measure(records, measure)]
    assert found == [3, 7, 103, 107, 1003, 1007, 1103, 1107]
    assert measure.num_read() == 8


def test_of_no_records_there_is_nothing(run: Run, measure: FirstValue) -> None:
    assert list(Engine().measure(run.select(layer_idx=99), measure)) == []
    assert list(Engine().map(square, [])) == []
    assert not (Path(run.url) / "analysis").exists()


@pytest.mark.parametrize("use_cache", [True, False])
def test_records_that_fail_cost_one_plan_and_no_other_record(
    run: Run, measure: FirstValue, monkeypatch: pytest.MonkeyPatch, *, use_cache: bool
) -> None:
    plans = []

    class Counted(WorkPlan):
        def __init__(self, records: Records) -> None:
            plans.append(len(records))
            super().__init__(records)

    monkeypatch.setattr(engine_module, "WorkPlan", Counted)
    failing, engine = dataclasses.replace(measure, fails_at=3), Engine(use_cache=use_cache)
    records = run.select()
    layers = records.column("layer_idx").tolist()
    for question in (1, 2):
        found = list(engine.measure_each(records, failing))
        assert [isinstance(one, DataError) for one in found] == [layer == 3 for layer in layers]
        assert plans == [len(records)] * question
        # A batch with a record that fails is measured again, one record after the other.
        num_good = len(layers) - layers.count(3)
        assert measure.num_read() <= 2 * (1 if use_cache else question) * num_good
    with pytest.raises(DataError, match="layer 3 is damaged"):
        list(engine.measure(records, failing))


def test_who_stops_asking_has_nothing_more_read(run: Run, measure: FirstValue) -> None:
    answers = Engine(use_cache=False).measure(run.select(), measure)
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert measure.num_read() == 10  # the batch of the first record


def test_tasks_are_answered_in_their_order() -> None:
    assert list(Engine().map(square, range(5))) == [0, 1, 4, 9, 16]
    assert list(Engine().map(square, [3, 4], sizes=[10, 20])) == [9, 16]


@pytest.mark.parametrize("workers", [0, -1])
def test_so_many_workers_there_are_not(run: Run, measure: FirstValue, workers: int) -> None:
    with pytest.raises(UsageError, match=rf"workers={workers} is not a number of processes"):
        list(Engine(workers=workers).measure(run.select(), measure))


def test_an_engine_that_cannot_work_is_refused_where_every_answer_is_kept(run: Run) -> None:
    for words in (["overflow", run.url], ["stats", run.url]):
        assert CliRunner().invoke(cli, words).exit_code == 0
        result = CliRunner().invoke(cli, [*words, "--scheduler", "nonsense"])
        assert result.exit_code == 2
        assert "scheduler 'nonsense' is no address of a Dask scheduler: give tcp://HOST:PORT" in result.stderr


def test_a_field_that_is_none_is_named_as_it_was_given(run: Run) -> None:
    for word in ("-1", "layer-idx=-1"):
        result = CliRunner().invoke(cli, ["stats", run.url, "--by", word])
        assert result.exit_code == 2
        assert f"records have no field '{word.replace('layer-', 'layer_')}'" in result.stderr
    result = CliRunner().invoke(cli, ["plot", run.url, "--by", "-1"])
    assert result.stderr.endswith("not by -1\n")
    by = [CliRunner().invoke(cli, ["stats", run.url, "--json", "--by", word]) for word in ("layer-idx", "layer_idx")]
    assert by[0].stdout == by[1].stdout


def test_batches_have_bounds() -> None:
    assert split_by_size([]) == []
    assert split_by_size([BATCH_NBYTES, 1, 1]) == [slice(0, 1), slice(1, 3)]
    assert split_by_size([0] * (BATCH_RECORDS + 1)) == [
        slice(0, BATCH_RECORDS),
        slice(BATCH_RECORDS, BATCH_RECORDS + 1),
    ]


def test_records_of_runs_and_folders_travel(run: Run, tmp_path: Path) -> None:
    import torch

    for number in range(50):
        legacy_file(tmp_path / "files", torch.full((3,), float(number)), counter=number)
    for records in (run.select(), open_folder(tmp_path / "files").select()):
        sent = pickle.dumps(list(records[:2]))
        first, second = pickle.loads(sent)  # noqa: S301  # our own
        assert first.info == records[0].info
        np.testing.assert_array_equal(second.read(), records[1].read())
        # What arrives together split_by_size what was read of the run; and of a folder, other files stay at home.
        assert len(sent) < 10_000
    arrived = [pickle.loads(pickle.dumps(record)) for record in run.select()[:2]]  # noqa: S301  # as above
    assert arrived[0]._reader is arrived[1]._reader


def test_a_terminal_shows_bytes_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with bytes_progress(3_000_000, is_shown=True, description="counting") as advance:
        with bytes_progress(5_000_000, is_shown=True, description="another question") as advance_other:
            advance_other(1_000_000)
        advance(2_000_000)
    with steps(3):
        next_step()
        next_step()
        with bytes_progress(7_000_000, is_shown=True, description="reading"):
            pass
    for words in ("counting", "another question", "1.0/5.0 MB", "2.0/3.0 MB", "2 of 3: reading"):
        assert words in terminal.getvalue()
    assert rich.console.Console(stderr=True).is_terminal


def test_a_bar_ends_at_its_total_where_counts_are_kept(
    run: Run, measure: FirstValue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte counts once, whatever was kept of an earlier question."""
    list(Engine().measure(run.select(iteration=0), measure))
    totals: list[int] = []
    seen: list[int] = []

    def bar(total: int, **_: object) -> contextlib.nullcontext[Callable[[int], None]]:
        totals.append(total)
        return contextlib.nullcontext(seen.append)

    monkeypatch.setattr("ranktape.analyze.engine.engine.bytes_progress", bar)
    list(Engine().measure(run.select(), measure))
    assert totals == [sum(seen)]
    assert min(seen) >= 0


def test_a_pipe_shows_nothing(run: Run, measure: FirstValue, capsys: pytest.CaptureFixture[str]) -> None:
    list(Engine(show_progress=True).measure(run.select(), measure))
    assert capsys.readouterr().err == ""


def test_a_selection_names_its_groups(run: Run) -> None:
    groups = run.select().groups()
    assert [places for _, places in groups] == [slice(0, 10), slice(10, 20), slice(20, 30), slice(30, 40)]
    assert [path.split("/")[1:] for path, _ in groups] == [
        ["rank_00000", "iter_00000000"],
        ["rank_00001", "iter_00000000"],
        ["rank_00000", "iter_00000001"],
        ["rank_00001", "iter_00000001"],
    ]
    assert open_run(run.url).select(layer_idx=99).groups() == []
