"""Does the plan of a capture say what the capture then takes, leave nothing behind, and refuse what cannot work?"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from ranktape.capture.plans.forecast import Footprint, RankPlan, find_refusals, make_forecast, spread
from ranktape.capture.settings.options import CaptureOptions
from ranktape.errors import CaptureError, UsageError
from ranktape.launch.plan import forecast_lines
from ranktape.storage import open_run
from tests.exhaustive import exhaustive
from tests.launch.processes import errors, python, torchrun
from tests.test_schemas import SCRIPT, refused

PLAN = ("-m", "ranktape.launch.cli", "plan")

TRAIN = """
    import os, sys
    import torch
    import torch.distributed as dist

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 2048))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(int(sys.argv[1])):
        model(torch.randn(256, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a training script."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    return tmp_path


def test_the_plan_says_what_the_capture_then_takes(folder: Path) -> None:
    selected = ("--keep", "values", "--tensor-name", "*put,weight", "--every", "2", "--max-iterations", "2")
    ended = python(*PLAN, "--capture", "runs/new", "--json", *selected, "train.py", "50", cwd=folder)
    assert ended.returncode == 0, ended.stderr
    forecast = json.loads(ended.stdout)
    assert refused(forecast, SCRIPT.other_schemas()["plan"]) == []
    # The script was stopped, and what it printed is not in the way.
    assert "step 5" in ended.stderr
    assert "step 9" not in ended.stderr
    assert not (folder / "runs").exists()
    recorded = python("-m", "ranktape.launch", "--capture", "runs/new", *selected, "train.py", "4", cwd=folder)
    assert recorded.returncode == 0, recorded.stderr
    run = open_run(folder / "runs" / "new")
    status = run.status()[0]
    (rank,) = forecast["ranks"]
    footprint = rank["footprint"]
    assert forecast["iterations"] == run.iterations == [0, 2]
    assert footprint["num_tensors"] == status.num_records == rank["num_expected"] == status.num_expected
    assert footprint["nbytes"] == footprint["stored_nbytes"] == forecast["iteration_nbytes"] == status.nbytes
    assert forecast["run_nbytes"] == 2 * status.nbytes
    files = [
        path for path in (folder / "runs/new").rglob("*") if path.is_file() and "rank_00000/iter_00000000" in str(path)
    ]
    # The marker of the rank lies beside those of the other ranks.
    assert footprint["num_objects"] == len(files) + 1
    assert footprint["largest"] == "2 forward pre weight"
    assert rank["layers"] == {"linear": ["0", "2"]}
    assert rank["silent_sites"] == {}
    assert forecast["refusals"] == []
    assert rank["free_nbytes"] > 0
    for name in ("step_seconds", "captured_seconds", "store_seconds"):
        assert 0 < forecast[name] < 60


def test_what_cannot_work_is_refused_with_the_option_that_would_do(folder: Path) -> None:
    ended = python(*PLAN, "--capture", "run", "--host-budget-nbytes", str(1 << 20), "train.py", "50", cwd=folder)
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("Error: ")]
    assert "the host budget of rank 0 is 1048576: give --host-budget-nbytes 5242880" in line
    assert "cannot work: 2 forward pre weight takes" in ended.stdout
    again = python(*PLAN, "--capture", "run", "--host-budget-nbytes", "5242880", "train.py", "50", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert again.stdout.endswith("it fits\n")


ALIKE = exhaustive("the launcher refuses it too, in test_runner.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--module", "1x", "train.py", "3"), "no module matches --module 1x; nearest: 0, 1, 2"),
        (("--manual", "train.py", "9"), "save_tensor was not called"),
        (("train.py", "0"), "the script ended before a training step did"),
        pytest.param(
            ("--capture", "taken", "train.py", "3"), "there is a run at .*taken already: add --resume", marks=ALIKE
        ),
        pytest.param(("--capture", "nosuch://bucket/run", "train.py", "3"), "nosuch", marks=ALIKE),
        (("missing.py",), "no script 'missing.py'"),
    ],
    ids=["module", "by hand", "no step", "taken", "protocol", "script"],
)
def test_what_stands_in_the_way_is_one_line(words: tuple[str, ...], message: str, folder: Path) -> None:

    (folder / "taken").mkdir()
    (folder / "taken" / "zarr.json").write_text(
        '{"zarr_format": 3, "node_type": "group", "attributes": {"ranktape_schema": 1, "launch_id": "x"}}'
    )
    ended = python(*PLAN, "--capture", "run", *words, cwd=folder)
    assert ended.returncode in {1, 2}
    assert re.search(f"^Error: .*{message}", ended.stderr, re.MULTILINE), ended.stderr
    assert not (folder / "run").exists()


def test_the_ranks_of_a_launch_make_one_plan(folder: Path) -> None:
    words = ("-m", "ranktape.launch.plan", "--capture", "runs/new", "--json", "train.py", "50")
    ended = torchrun(*words, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    forecast = json.loads(ended.stdout)
    assert refused(forecast, SCRIPT.other_schemas()["plan"]) == []
    assert [rank["rank"] for rank in forecast["ranks"]] == [0, 1]
    assert {rank["num_steps"] for rank in forecast["ranks"]} == {7}
    assert forecast["iteration_nbytes"] == 2 * forecast["ranks"][0]["footprint"]["stored_nbytes"] > 0
    assert not (folder / "runs").exists()
    declined = torchrun(*words[:2], "--capture", "run", "--module", "nothing", "train.py", "50", cwd=folder)
    assert declined.returncode != 0
    assert any("no module matches --module nothing" in line for line in errors(declined))


IN_A_THREAD = """
    import threading
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        for step in range(50):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
"""

OWN_CAPTURE = """
    from ranktape.capture import Capture
    with Capture("own"):
        pass
"""


def test_a_training_in_a_thread_is_stopped_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(IN_A_THREAD))
    ended = python(*PLAN, "--capture", "run", "--keep", "statistics", "train.py", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.search(r"tensors +7, \d+ B per iteration \(7 as statistics: 560 B are stored\)", ended.stdout)


def test_a_script_with_its_own_capture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(OWN_CAPTURE))
    ended = python(*PLAN, "--capture", "run", "train.py", cwd=tmp_path)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "cannot run a script that begins a capture of its own" in line


def test_a_store_that_does_not_answer_is_not_waited_for_longer_than_asked(folder: Path) -> None:
    pytest.importorskip("s3fs")
    store = ("--storage-options", '{"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"}')
    words = ("--capture", "s3://bucket/run", *store, "--store-timeout-seconds", "3", "train.py", "50")
    began = time.monotonic()
    ended = python(*PLAN, *words, cwd=folder)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    (seconds,) = re.findall(r"\(tried \d+ times in (\d+) s\)", ended.stderr)
    assert int(seconds) < 20, "30 where nothing is asked"
    assert time.monotonic() - began < 60


MB = 1_000_000


def rank_plan(**changes: Any) -> RankPlan:
    """What a rank found out that has nothing against the capture; some of it changed."""
    footprint = Footprint(
        num_tensors=10,
        nbytes=100 * MB,
        staged_nbytes=100 * MB,
        stored_nbytes=100 * MB,
        num_objects=24,
        kept={"values": 10},
        largest="layers.0.up forward post output",
        largest_nbytes=20 * MB,
    )
    own = {name: changes.pop(name) for name in list(changes) if name in Footprint.__dataclass_fields__}
    plan = RankPlan(
        rank=0,
        host="here",
        num_local_ranks=2,
        num_steps=7,
        num_layers={"linear": 2},
        layers={"linear": ["a", "b"]},
        footprint=dataclasses.replace(footprint, **own),
        num_expected=10,
        silent_sites={"b": "its module was not called"},
        coverage=None,
        silence=None,
        problem=None,
        budget_nbytes=500 * MB,
        available_nbytes=8000 * MB,
        step_seconds=0.5,
        captured_seconds=0.6,
        write_rate=100.0 * MB,
        free_nbytes=1000 * MB,
    )
    return dataclasses.replace(plan, **changes)


def test_one_rank_is_spread_over_many_that_share_hosts_and_store() -> None:
    options = CaptureOptions(host_budget_nbytes=500 * MB)
    ranks = spread([rank_plan()], num_ranks=6, num_hosts=2, options=options)
    forecast = make_forecast(ranks, options=options, iterations=[0, 1], url="run")
    assert [one.rank for one in forecast.ranks] == list(range(6))
    assert forecast.iteration_nbytes == 6 * 100 * MB
    assert forecast.host_nbytes == 3 * 500 * MB
    assert forecast.store_seconds == pytest.approx(6 * 1.0)
    assert "1.2 GB" in forecast.refusals[0]
    with pytest.raises(UsageError, match="this launch has 2 ranks of its own"):
        spread([rank_plan(), rank_plan(rank=1)], num_ranks=6, num_hosts=2, options=options)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {}, None),
        ({"largest_nbytes": 501 * MB}, {}, r"takes 501000000 bytes.* give --host-budget-nbytes 501219328"),
        ({"staged_nbytes": 600 * MB}, {}, None),
        ({"staged_nbytes": 600 * MB}, {"policy": "skip"}, r"give --host-budget-nbytes 600834048, or --policy block"),
        ({"available_nbytes": 700 * MB}, {}, r"2 ranks on here take 10+ bytes.* --host-budget-nbytes 349175808 or"),
        ({"free_nbytes": 450 * MB}, {"max_iterations": 5}, r"takes 500 MB for 5 .* give --max-iterations 4"),
        ({"free_nbytes": 450 * MB}, {"max_iterations": 50, "keep_last": 2}, None),
        ({"free_nbytes": 50 * MB}, {}, "not one fits: .* --keep statistics"),
        ({"write_rate": 1.0 * MB}, {"finish_timeout_seconds": 60}, "about 100 s .* --finish-timeout-seconds 150"),
        ({"silence": "no module matches"}, {}, "no module matches"),
        ({"problem": "the ring failed"}, {}, "would disable itself on rank 0: the ring failed"),
    ],
)  # fmt: skip
def test_each_refusal_names_an_option_and_a_value(
    changes: dict[str, Any], options: dict[str, Any], message: str | None
) -> None:

    checked = CaptureOptions(**options)
    num = checked.target_iterations
    num_stored = num if checked.keep_last is None else min(num, checked.keep_last + 1)
    found = find_refusals([rank_plan(**changes)], options=checked, num_iterations=num, num_stored=num_stored)
    assert len(found) == (message is not None), found
    assert message is None or re.search(message, found[0]), found


def test_the_slowdown_counts_what_the_store_cannot_take_in_time() -> None:
    options = CaptureOptions(max_iterations=4, every=1)
    quick = make_forecast([rank_plan()], options=options, iterations=[0, 1, 2, 3], url="x")
    assert quick.captured_slowdown == pytest.approx(0.2)
    # It all fits into the ring.
    assert quick.sustained_slowdown == pytest.approx(0.2)
    many = list(range(100))
    slow = make_forecast([rank_plan()], options=options, iterations=many, url="x")
    # A step of 0.5 s, 0.1 s for the copies, 0.4 s until the store has taken what it takes in a second.
    assert slow.sustained_slowdown == pytest.approx(1.0)
    rare = make_forecast([rank_plan()], options=options, iterations=[10 * one for one in many], url="x")
    assert rare.sustained_slowdown == pytest.approx(0.02)


def test_the_slowest_and_the_largest_of_the_ranks_count() -> None:
    ranks = [rank_plan(), rank_plan(rank=1, step_seconds=0.9, captured_seconds=1.0, staged_nbytes=300 * MB)]
    forecast = make_forecast(ranks, options=CaptureOptions(), iterations=[0], url="s3://bucket/run")
    assert (forecast.largest_rank, forecast.step_seconds, forecast.iteration_nbytes) == (1, 0.9, 200 * MB)
    lines = "\n".join(forecast_lines(forecast, verbose=True))
    assert "2 linear on rank 1, which takes most" in lines
    assert "linear: b" in lines
    assert "not recorded (its module was not called): b" in lines
    assert lines.endswith("it fits")


def test_a_training_too_short_to_time_is_planned_without_times() -> None:
    forecast = make_forecast(
        [rank_plan(step_seconds=None, captured_seconds=None, num_steps=1)],
        options=CaptureOptions(),
        iterations=[0],
        url="x",
    )
    assert forecast.captured_slowdown is None
    assert "not known: the training had only 1 step" in "\n".join(forecast_lines(forecast, verbose=False))
    with pytest.raises(CaptureError, match="--advance-on forward"):
        make_forecast([rank_plan(num_steps=0)], options=CaptureOptions(), iterations=[0], url="x")


def test_a_flight_recorder_is_told_the_memory_that_it_needs() -> None:
    options = CaptureOptions(record_last=3)
    window = list(range(5))
    small, large = (
        make_forecast([rank_plan(budget_nbytes=budget * MB)], options=options, iterations=window, url="x")
        for budget in (500, 531)
    )
    # Three, the running one, 1.1 of one for the next, and what the largest tensor may leave at the end of the ring.
    needed = small.held_nbytes
    assert needed is not None
    assert 0 <= needed - 530 * MB < 1 << 20
    assert small.sustained_slowdown == small.captured_slowdown  # it waits for no store
    lines = "\n".join(forecast_lines(small, verbose=False))
    assert "none is stored until something happens, and 5 then" in lines
    assert f"hold the iterations whole (--host-budget-nbytes {needed}): of the oldest, histograms or" in lines
    lines = "\n".join(forecast_lines(large, verbose=False))
    assert "1.062 GB per host; 530.6 MB for each rank hold the iterations whole\n" in lines
    full = make_forecast([rank_plan(free_nbytes=450 * MB)], options=options, iterations=window, url="x")
    assert "give a smaller --record-last or --record-after" in full.refusals[0]
