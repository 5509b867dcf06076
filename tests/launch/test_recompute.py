"""Does `ranktape check --recompute` count what agrees, name what does not, and say why the rest is not known?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ranktape.launch import check
from ranktape.launch.cli import cli
from ranktape.storage.maintenance.finding import FindingKind
from tests.analyze.replay_runs import call_arrays, call_tensors
from tests.analyze.runs import Tensor, store


def run_of(folder: Path, *more: Tensor) -> str:
    """A run of two ranks, two iterations and two layers; of one call the output is that of another microbatch."""
    tensors = list(more)
    for seed, (rank, iteration, layer) in enumerate(np.ndindex(2, 2, 2)):
        arrays = call_arrays(seed=seed)
        if (rank, iteration, layer) == (1, 0, 1):
            arrays["output"] = call_arrays(seed=99)["output"]
        tensors += call_tensors(arrays, rank=rank, iteration=iteration, layer_idx=layer)
    return store(folder / "run", tensors).url


def asked(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli, ["check", *words])
    return done.exit_code, done.stdout, done.stderr


def test_a_result_that_its_operands_do_not_give_is_an_error(tmp_path: Path) -> None:
    lonely = call_tensors(call_arrays(), without=["weight"], module="head", layer_idx=-1)
    url = run_of(tmp_path, *lonely)
    assert check(url).products is None
    assert asked(url)[0] == 0
    code, text, told = asked(url, "--recompute")
    assert code == 3
    assert "1 error in " in told
    [error] = [line for line in text.splitlines() if line.startswith("error: ")]
    [note] = [line for line in text.splitlines() if line.startswith("note: unchecked: ")]
    assert error.startswith(
        "error: product (attempt 0, iteration 0, rank 1): layers.1.linear output (microbatch 0, call 0) "
        "is not what its recorded operands give: relative error 1."
    )
    assert note == (
        "note: unchecked: 2 products could not be computed again: no weight was recorded (head output; head grad_input)"
    )
    assert text.endswith("products: 24 agreed, 1 disagreed, 2 unchecked)\n")


def test_programs_get_the_same(tmp_path: Path) -> None:
    url = run_of(tmp_path)
    _, text, _ = asked(url, "--recompute", "--json")
    document: dict[str, Any] = json.loads(text)
    assert document["products"] == {"agreed": 23, "disagreed": 1, "unchecked": 0}
    assert not document["sound"]
    report = check(url, recompute=True)
    assert report.to_json() == document
    [finding] = report.errors
    assert (finding.kind, finding.attempt, finding.iteration, finding.rank) == (FindingKind.PRODUCT, 0, 0, 1)


def test_each_call_is_told_of(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    check(run_of(tmp_path), recompute=True, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-8:] == [(number, 8) for number in range(1, 9)]


def test_a_product_of_operands_in_tf32_is_told(tmp_path: Path) -> None:
    arrays = call_arrays()
    x, weight = (((arrays[name].view(np.int32) + 0x1000) & ~0x1FFF).view(np.float32) for name in ("input", "weight"))
    arrays["output"] = x @ weight.T + arrays["bias"]
    code, text, _ = asked(store(tmp_path / "run", call_tensors(arrays)).url, "--recompute")
    assert code == 0
    assert "1 product agreed only as if the device had rounded float32 operands to TF32 (layers.0.line" in text


def test_a_run_without_layers_has_no_products(tmp_path: Path) -> None:
    array = np.zeros((2, 3), np.float32)
    [tensor] = call_tensors({"input": array}, layer_type="hidden", component="unknown")
    code, text, _ = asked(store(tmp_path / "run", [tensor]).url, "--recompute")
    assert code == 0
    assert text.endswith("products: 0 agreed, 0 disagreed, 0 unchecked)\n")


@pytest.mark.parametrize("name", ["zarr.json", "catalogue/c.0"])
def test_damage_is_said_once_and_ends_nothing(tmp_path: Path, name: str) -> None:
    url = run_of(tmp_path)
    for path in Path(url).glob(f"*/rank_00001/iter_00000000/{name}"):
        path.write_bytes(path.read_bytes()[:-2])
    code, text, told = asked(url, "--recompute")
    assert code == 3, told
    assert "rank_00001/iter_00000000" in text
    assert "error: size" in text or "error: damaged" in text


def test_values_that_are_damaged_are_an_error_of_their_rank(tmp_path: Path) -> None:
    url = store(tmp_path / "run", call_tensors(call_arrays()) + call_tensors(call_arrays(), rank=1)).url
    for chunk in Path(url).glob("*/rank_00001/*/stack_*/c.*"):
        chunk.write_bytes(bytes(byte ^ 0x40 for byte in chunk.read_bytes()[:64]) + chunk.read_bytes()[64:])
    assert asked(url)[0] == 0
    code, text, told = asked(url, "--recompute")
    assert code == 3
    assert "1 error in " in told
    [error] = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "unchecked: " not in text
    assert error.startswith(
        "error: damaged (attempt 0, iteration 0, rank 1): 3 products could not be computed again; the first: "
        "layers.0.linear output: "
    )
    assert "is damaged" in error
    assert text.endswith("products: 3 agreed, 0 disagreed, 3 unchecked)\n")
