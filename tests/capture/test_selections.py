"""Does a capture with rules store what they say, in the iterations in which they are due, and can it be read back?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ranktape.capture import Capture
from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.settings.selecting import Selecting
from ranktape.errors import CaptureError, UsageError
from ranktape.storage import Record, Run, open_run
from tests.capture.models import BATCH, WIDTH, Net, Training, captured, train
from tests.capture.test_selecting import decide

STEPS = Training(steps=5, microbatches=2, autocast=True)
RULES: list[str | dict[str, Any]] = [
    {"layer_type": "attention", "samples": "0:3:2"},
    {"tensor_name": ["weight", "grad_weight"], "keep": "statistics"},
    "module=layers.1.* operation=forward microbatch=1 keep=histogram",
    {"where": "module == 'embed' and microbatch >= 1", "samples": [1]},
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    """A run of everything, with its losses."""
    url = tmp_path_factory.mktemp("whole") / "run"
    losses, _ = train(STEPS, capture=Capture(url, min_iterations=5, start=0))
    return open_run(url), losses


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    """A run of the same training with rules, with its losses."""
    url = tmp_path_factory.mktemp("chosen") / "run"
    losses, _ = train(STEPS, capture=Capture(url, min_iterations=5, select=RULES))
    return open_run(url), losses


def name(record: Record) -> tuple[Any, ...]:
    """What a record is of."""
    info = record.info
    place = (info.iteration, info.microbatch, info.call, info.module, info.layer_type)
    return (*place, info.operation, info.phase, info.tensor_name)


def expected(run: Run) -> dict[tuple[Any, ...], tuple[Record, str]]:
    """By name what the rules take of the whole run, and the word for how."""
    found = {}
    for record in run.select():
        if record.layer_type == "attention":
            found[name(record)] = (record, "samples")
        elif record.tensor_name in {"weight", "grad_weight"}:
            found[name(record)] = (record, "statistics")
        elif record.module.startswith("layers.1.") and record.operation == "forward" and record.microbatch == 1:
            found[name(record)] = (record, "histogram")
        elif record.module == "embed" and record.microbatch >= 1:
            found[name(record)] = (record, "sample 1")
    return found


def test_what_the_rules_say_is_stored_and_nothing_else(
    whole: tuple[Run, list[str]], chosen: tuple[Run, list[str]]
) -> None:
    assert whole[1] == chosen[1]  # the losses, bit for bit
    wanted = expected(whole[0])
    records = {name(record): record for record in chosen[0].select()}
    assert set(records) == set(wanted)
    assert chosen[0].iterations == [0, 1, 2, 3, 4]
    for key, (original, how) in wanted.items():
        record = records[key]
        assert record.batch_size == original.batch_size == BATCH
        if how == "statistics":
            assert record.keep == "statistics"
            assert record.statistics().mean == pytest.approx(float(original.read().mean()), abs=1e-6)
        elif how == "histogram":
            assert record.keep == "histogram"
            assert record.histogram()[:65536].sum() == original.read().size
            assert record.shape == original.shape
        else:
            places = [0, 2] if how == "samples" else [1]
            values = original.read()
            assert record.keep == "values"
            assert record.sample_dim == original.sample_dim == 0
            assert record.sample_ids == places
            assert np.array_equal(record.read(), values[places])
            assert np.array_equal(record.read(sample=0), values[places[0]])
            assert record.nbytes * BATCH == original.nbytes * len(places)


def test_nothing_that_was_left_out_is_called_missing(chosen: tuple[Run, list[str]]) -> None:
    rows = chosen[0].status()
    assert [row.iteration for row in rows] == [0, 1, 2, 3, 4]
    assert [(str(row.state), row.silent_sites) for row in rows] == [("complete", {})] * 5


QUERIES: list[dict[str, Any]] = [
    {"layer_type": "attention"},
    {"layer_type": ["linear"], "tensor_name": "grad_*"},
    {"layer_type": "linear,attention", "tensor_name": ["grad_*, output", "weight"], "mode": "train,eval"},
    {"layer_idx": "0-0", "microbatch": 1, "phase": "pre"},
    {"layer_idx": -1},
    {"module": "layers.?.attention.*", "operation": "backward"},
    {"where": "layer_type == 'attention' and like(tensor_name, 'grad_*') or nbytes < 1000 and not call > 0"},
    {"where": "shape == '[3,5,16]' and numel == 240 and batch_size == 3 and quant_type == 'bf16'"},
    {"rank": 1},
    {"dtype": "float32", "compute_dtype": "bfloat16", "component": "FA", "mode": "train"},
    {"mode": "eval"},
]


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_selection_takes_the_records_that_the_same_query_selects(
    query: dict[str, Any], whole: tuple[Run, list[str]]
) -> None:
    filters = dict(query)
    where = filters.pop("where", None)
    found = whole[0].select(**filters)  # a mode that no pass had is no mistake
    selected = {record.counter for record in (found if where is None else found.where(where))}
    selecting = Selecting(CaptureOptions(select=[query]), rank=0)
    taken = set()
    for record in whole[0].select():
        if decide(selecting, record.info) is not None:
            taken.add(record.counter)
    assert taken == selected


def test_samples_carry_the_users_ids(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = "module=embed samples=1-2 operation=forward tensor_name=input"
    with Capture(tmp_path / "run", min_iterations=2, every=3, select=rule) as capture:
        for step in range(6):
            capture.set_sample_ids([f"{step}-{index}" for index in range(4)])
            model(torch.randn(4, 2, WIDTH)).square().mean().backward()
            optimizer.step()
    run = open_run(tmp_path / "run")
    assert [(record.iteration, record.tensor_name) for record in run.select()] == [(0, "input"), (3, "input")]
    record = run.select(iteration=3)[0]
    assert (record.sample_ids, record.shape, record.batch_size) == (["3-1", "3-2"], (2, 2, WIDTH), 4)


def test_a_selection_that_fits_nothing_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"none of \d+ tensors fits the selection: widen --select"):
        captured(Net(), tmp_path / "run", shape=(4, 2, WIDTH), select={"where": "layer_idx > 90", "module": "*"})


def test_a_kind_of_layer_that_nobody_knows_is_refused_at_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="did you mean attention"),
        Capture(tmp_path / "run", select={"layer_type": "atention"}),
    ):
        pass
    assert Capture.current is None
