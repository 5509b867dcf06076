"""The table of outliers says what is wrong and what stands out, by the numbers of numpy."""

from __future__ import annotations

import inspect
import json
import shlex
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.analyze.engine.engine import Engine
from ranktape.analyze.findings.find import find
from ranktape.analyze.findings.thresholds import ROBUST_Z
from ranktape.analyze.legacy.open import open_source
from ranktape.analyze.questions.outliers import outliers
from ranktape.analyze.questions.overflow import overflow
from ranktape.errors import UsageError
from ranktape.storage import Run
from tests.analyze.faulty_runs import Fault, Place, Sizes, cast, everywhere, faulty_run
from tests.analyze.pt_files import legacy_file
from tests.analyze.runs import Tensor, describe_tensor, store

Array = np.ndarray[Any, Any]
NUM_RANKS, NUM_LAYERS = 5, 6


def tensor(rank: int, layer: int) -> Array:
    """Rank 3 is far from the others in layer 2, and layer 4 from the other layers."""
    values = np.random.default_rng((rank, layer)).standard_normal((4, 8, 16)).astype(np.float32)
    return values * (300 if (rank, layer) == (3, 2) else 100 if layer == 4 else 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with one rank and one layer that stand out."""
    tensors: list[Tensor] = []
    for rank in range(NUM_RANKS):
        for layer in range(NUM_LAYERS):
            values = tensor(rank, layer)
            if (rank, layer) == (1, 0):
                values[2] *= 2000
            if rank == 0:
                values[..., 5] *= 1000 if layer == 5 else 1
            tensors.append(describe_tensor(values, rank=rank, layer_idx=layer, sample_dim=0, counter=layer))
    return store(tmp_path_factory.mktemp("run"), tensors)


def rows(run: Run, **options: Any) -> list[dict[str, Any]]:
    """The rows as dictionaries."""
    return outliers(run.select(), engine=Engine(use_cache=False), **options).records()


def test_a_rank(run: Run) -> None:
    found = [row for row in rows(run, across=["rank"]) if row["layer_idx"] == 2]
    assert [(row["kind"], row["ranks"]) for row in found] == [("rank_differs", [3])]
    figures = {
        "absmax": np.array([np.abs(tensor(rank, 2)).max() for rank in range(NUM_RANKS)]),
        "rms": np.array([np.sqrt((tensor(rank, 2).astype(np.float64) ** 2).mean()) for rank in range(NUM_RANKS)]),
    }
    expected = figures[found[0]["metric"]]
    assert found[0]["value"] == pytest.approx(expected[3], rel=1e-2)
    assert found[0]["binades"] == pytest.approx(np.log2(expected[3]) - np.median(np.log2(expected)), abs=0.02)
    assert found[0]["expected"] == pytest.approx(np.median(expected), rel=1e-2)
    assert found[0]["deviation"] == pytest.approx(found[0]["binades"] / (1.4826 * 0.25), rel=1e-2)


def test_a_layer(run: Run) -> None:
    found = rows(run, across=["layer"])
    assert [(row["kind"], row["layer_idx"]) for row in found] == [("layer_differs", 4)]
    assert found[0]["binades"] == pytest.approx(np.log2(100), abs=1)


def test_a_sample(run: Run) -> None:
    found = rows(run, across=["sample"])
    assert [(row["layer_idx"], row["ranks"], row["sample"]) for row in found] == [(0, [1], "2")]
    peers = [np.abs(tensor(rank, 0)[sample]).max() for rank in range(NUM_RANKS) for sample in range(4)]
    assert found[0]["expected"] == pytest.approx(np.median(peers), rel=2e-2)


def test_a_sample_is_called_what_the_user_calls_it(tmp_path: Path) -> None:
    """It is elsewhere in each batch, and one outlier all the same."""
    rng = np.random.default_rng(0)
    tensors = []
    for iteration in range(2):
        names = np.roll([f"id{number}" for number in range(8)], 3 * iteration).tolist()
        values = rng.standard_normal((8, 64)).astype(np.float32)
        values[names.index("id5")] *= 4096
        tensors.append(describe_tensor(values, iteration=iteration, sample_dim=0, sample_ids=names))
    found = rows(store(tmp_path, tensors), across=["sample"])
    assert [(row["sample"], row["records"]) for row in found] == [("id5", 2)]


def test_a_channel(run: Run) -> None:
    """One of five records is not half of them; of that rank alone it is."""
    assert rows(run, across=["channel"]) == []
    alone = outliers(run.select(rank=0), across=["channel"], engine=Engine(use_cache=False)).records()
    assert [(row["layer_idx"], row["channel"]) for row in alone] == [(5, 5)]


def test_a_figure_of_counts(tmp_path: Path) -> None:
    """A rank with subnormals where the others have none."""
    tensors = []
    for rank in range(4):
        values = np.random.default_rng(rank).standard_normal((32, 32)).astype(np.float32)
        if rank == 1:
            values[:4] *= 2.0**-130
        tensors.append(describe_tensor(values, rank=rank))
    table = outliers(store(tmp_path, tensors).select(), metric="overflow.underflow.ratio")
    row = table.records()[0]
    assert (row["kind"], row["ranks"], row["metric"]) == ("rank_differs", [1], "overflow.underflow.ratio")
    assert row["value"] == pytest.approx((np.abs(tensors[1][0]) < 2.0**-126).mean())
    assert row["expected"] == 0
    assert "sample and channel" in table.notes[0]


def test_causes_come_before_what_follows(run: Run) -> None:
    found = rows(run)
    causes = [row["cause"] for row in found]
    assert causes == sorted(causes)
    firsts = [row for row in found if not row["follows"]]
    assert [row["cause"] for row in firsts] == list(range(1, len(firsts) + 1))
    severities = [row["severity"] for row in firsts]
    assert severities == sorted(severities, key=["high", "medium", "low"].index)


def spoil(place: Place, tensor: Array) -> Array:
    """One NaN in every tensor of every layer."""
    changed = tensor.copy()
    changed.flat[len(place[3])] = np.nan
    return changed


def one_sample(place: Place, tensor: Array) -> Array:
    """A sample of rank 1 as large as nothing else."""
    changed = tensor.copy()
    if place == (10, 1, 2, "input"):
        changed[4] *= 4096
    return changed


@pytest.mark.parametrize(
    ("fault", "kind", "where"),
    [
        (spoil, "nan", "layers.0.linear input on all ranks"),
        (
            cast(ml_dtypes.float8_e5m2, layers=range(4)),
            "gradient_underflow",
            "layers.3.linear grad_output on all ranks",
        ),
        (everywhere(1, factor=2.0**5), "layer_differs", "layers.1.linear weight on all ranks"),
        (one_sample, "sample_outlier", "layers.2.linear input sample 4 on rank 1"),
    ],
    ids=["nan", "underflow", "weight", "sample"],
)
def test_what_the_report_says(tmp_path: Path, fault: Fault, kind: str, where: str) -> None:
    """The same causes in the same order; and the command that is named to go on with answers."""
    run = faulty_run(tmp_path, fault, sizes=Sizes(num_layers=4, iterations=(10,), gradient=1e-5))
    findings = find(run.select(), engine=Engine(use_cache=False))
    table = outliers(run.select(), engine=Engine(use_cache=False))
    causes = [row for row in table.records() if not row["follows"]]
    assert [(row["kind"], row["severity"]) for row in causes] == [(one.kind, one.severity) for one in findings]
    assert (causes[0]["kind"], causes[0]["where"]) == (kind, where)
    assert table.notes[-2:] == (
        f"worst: {findings[0].title}; {table.records()[0]['evidence']}",
        f"look closer: {findings[0].command_in(run.url)}",
    )
    words = shlex.split(table.notes[-1].removeprefix("look closer: "))
    assert words[:2] == ["ranktape", "analyze"]
    answer = CliRunner().invoke(cli, words[2:], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize("across", [[], ["rank"], ["layer"], ["sample"], ["channel"]])
def test_nan_comes_first_whatever_is_compared(tmp_path: Path, across: list[str]) -> None:
    run = faulty_run(tmp_path, spoil, sizes=Sizes(iterations=(10,)))
    found = rows(run, across=across)
    assert (found[0]["kind"], found[0]["where"]) == ("nan", "layers.0.linear input on all ranks")
    assert {row["severity"] for row in found if row["kind"] == "nan"} == {"high"}


def test_a_folder_with_a_layer_of_nan(tmp_path: Path) -> None:
    """And with tensors of several trainings side by side: which of them it is is said."""
    for layer in range(4):
        for quant_type in ("bf16", "mxfp8"):
            tensor = torch.from_numpy(np.random.default_rng(layer).standard_normal((16, 16)))
            if (layer, quant_type) == (2, "mxfp8"):
                tensor[3] = torch.nan
            legacy_file(tmp_path, tensor, layer_idx=layer, counter=layer, quant_type=quant_type)
    table = outliers(open_source(str(tmp_path)).select())
    assert [(row["kind"], row["severity"], row["layer_idx"]) for row in table.records()] == [("nan", "high", 2)]
    assert table.records()[0]["where"] == "layer 2 linear input (mxfp8)"
    by_layer = overflow(open_source(str(tmp_path)).select(), by=["layer_idx"]).records()
    assert [row["severity"] for row in by_layer] == ["none", "none", "high", "none"]


def test_a_higher_threshold_leaves_less(run: Run) -> None:
    assert len(rows(run, threshold=3.5)) > len(rows(run, threshold=12)) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"across": ["rnk"]}, "across 'rnk' is not allowed: use rank"),
        ({"metric": "absmx"}, "no metric 'absmx': use .*absmax"),
        ({"metric": "mean"}, "may be negative"),
        ({"metric": "p99"}, "may be negative"),
        ({"threshold": 0.0}, "threshold 0 is not allowed"),
        ({"threshold": float("nan")}, "threshold nan is not allowed"),
    ],
)
def test_what_is_not_allowed(run: Run, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rows(run, **options)


def test_the_command(run: Run) -> None:
    arguments = ["outliers", str(run.url).removeprefix("file://"), "--across", "rank,sample", "--json", "--no-cache"]
    answer = CliRunner().invoke(cli, arguments)
    assert answer.exit_code == 0, answer.output
    kinds = {row["kind"] for row in json.loads(answer.stdout)["rows"]}
    assert kinds == {"rank_differs", "sample_outlier"}
    refused = CliRunner().invoke(cli, [*arguments[:2], "--across", "smaple"])
    assert refused.exit_code == 2
    assert "use sample" in refused.stderr


def test_an_outlier_of_the_question_is_one_of_the_findings() -> None:
    """The number stands in the signature, too: help reads it there without importing anything."""
    assert inspect.signature(outliers).parameters["threshold"].default == ROBUST_Z
