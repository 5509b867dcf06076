"""All that a folder of layer outputs says of itself comes in with it, and goes out again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.analyze.legacy import ExportForm, export_records, import_folder, open_folder
from ranktape.analyze.legacy.payload import MAX_LISTED
from ranktape.errors import DataError
from ranktape.storage import Records, open_run
from tests.analyze.pt_files import save
from tests.analyze.runs import describe_tensor, store

SAID: dict[str, Any] = {
    "prompt": "What is it?",
    "input_ids": torch.arange(32).reshape(1, 32),
    "attention_mask": torch.ones(1, 32, dtype=torch.bool),
    "logits": torch.tensor([[1.5, float("-inf"), float("nan")]]).bfloat16(),
    "config": {"layers": 2, "rope": [1.0, 2.0], "none": None},
}


def recorded(folder: Path, said: dict[str, Any]) -> Path:
    """A folder as the recorder of layer outputs left it."""
    for name in ("embedding", "layer_1", "layer_2"):
        save(folder / f"{name}_output.pt", torch.randn(1, 4, 8).bfloat16())
    statistics = {name: {"mean": 0.5, "has_nan": False} for name in ("embedding", "layer_1", "layer_2")}
    save(folder / "statistics.pt", statistics)
    save(folder / "metadata.pt", {**said, "statistics": statistics})
    return folder


def again(records: Records, folder: Path) -> dict[str, Any]:
    """What the exported folder says of itself, as torch reads it."""
    export_records(records, folder, form=ExportForm.LAYERS)
    found: dict[str, Any] = torch.load(folder / "metadata.pt", weights_only=True)
    # Nothing is written twice.
    assert export_records(records, folder, form=ExportForm.LAYERS).num_written == 0
    return found


@pytest.mark.parametrize("is_imported", [False, True])
def test_every_word_comes_out_again(tmp_path: Path, is_imported: bool) -> None:  # noqa: FBT001
    folder = open_folder(recorded(tmp_path / "files", SAID))
    records = folder.select()
    if is_imported:
        import_folder(folder, str(tmp_path / "run"))
        records = open_run(tmp_path / "run").select()
    found = again(records, tmp_path / "again")
    for name, word in SAID.items():
        if isinstance(word, torch.Tensor):
            assert found[name].dtype == word.dtype
            assert torch.equal(found[name].float().nan_to_num(9.0), word.float().nan_to_num(9.0))
            assert found[name].shape == word.shape
        else:
            assert found[name] == word
    assert found["statistics"] == {
        name: {"mean": 0.5, "has_nan": False} for name in ("embedding", "layer_1", "layer_2")
    }


def test_what_is_large_is_named(tmp_path: Path) -> None:
    large = torch.zeros(MAX_LISTED + 1, dtype=torch.int64)
    many = {f"t{number}": torch.full((MAX_LISTED,), 1 / 3, dtype=torch.float64) for number in range(40)}
    records = open_folder(recorded(tmp_path, {"large": large, **many})).select()
    words = records[0].metadata["folder"]["metadata"]  # type: ignore[index]  # there are words
    assert words["large"] == f"tensor int64[{MAX_LISTED + 1}]"
    assert words["t0"]["values"] == [1 / 3] * MAX_LISTED
    assert words["t39"] == f"tensor float64[{MAX_LISTED}]"


def test_a_run_comes_back_as_it_was(tmp_path: Path) -> None:
    tensors = []
    for layer in (-1, 0, 1):
        tags: dict[str, Any] = {
            "layer_type": "embedding" if layer < 0 else "hidden",
            "layer_idx": layer,
            "phase": "post",
        }
        tags |= {"tensor_name": "output", "iteration": 7, "rank": 0, "microbatch": 2, "call": 1, "mode": "eval"}
        tags |= {
            "quant_type": "mxfp8",
            "compute_dtype": "bfloat16",
            "sample_dim": 1,
            "sample_ids": ["a", 7],
            "layout": "TBH",
        }
        tags |= {"timestamp": 12.5, "counter": layer + 1, "batch_size": 2, "metadata": {"loss": 0.5}}
        tensors.append(describe_tensor(np.full((3, 2, 4), layer, dtype=np.float32), **tags))
    run = store(tmp_path / "run", tensors)
    export_records(run.select(), tmp_path / "files", form=ExportForm.LAYERS)
    folder = open_folder(tmp_path / "files")
    assert folder.iterations == [7]
    found = [record.info.to_json() for record in folder.select()]
    for before, after in zip(run.select(), found, strict=True):
        assert after["metadata"].pop("folder")["statistics"]["mean"] == before.layer_idx
        assert after == before.info.to_json()


def test_what_an_earlier_export_says_of_all_outputs_is_taken(tmp_path: Path) -> None:
    said = {"iteration": 7, "rank": 3, "microbatch": 1, "call": 2, "quant_type": "hifp8", "num_outputs": 3}
    records = open_folder(recorded(tmp_path, said)).select()
    assert {(r.iteration, r.rank, r.microbatch, r.call, r.quant_type) for r in records} == {(7, 3, 1, 2, "hifp8")}
    assert records[0].metadata["folder"]["metadata"]["num_outputs"] == 3  # type: ignore[index]  # there are words


@pytest.mark.parametrize(
    "said", [{"iteration": -1, "rank": "x", "call": 1e9}, {"ranktape": 3}, {"ranktape": {"layer_1_output": []}}]
)
def test_what_no_record_can_hold_is_no_field(tmp_path: Path, said: dict[str, Any]) -> None:
    records = open_folder(recorded(tmp_path, said)).select()
    assert {(r.iteration, r.rank, r.call) for r in records} == {(0, 0, 0)}


def test_samples_that_are_not_in_the_tensor_are_refused(tmp_path: Path) -> None:
    own = {"layer_1_output": {"sample_dim": 0, "sample_ids": [1, 2, 3]}}
    with pytest.raises(DataError, match="names 3 samples of a tensor of 1"):
        open_folder(recorded(tmp_path, {"ranktape": own})).select().column("sample_ids")


def test_the_list_says_what_the_folder_says(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["ls", str(recorded(tmp_path, {**SAID, "note": "x" * 99, "evil": "\x1b[2J"}))])
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if line.startswith("metadata.pt: "))
    assert "prompt What is it?, input_ids int64[1, 32], attention_mask bool[1, 32]" in line
    assert f"note {'x' * 60}..., " in line
    assert "\x1b" not in line
