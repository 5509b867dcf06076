"""Do the usage examples of the legacy tools' documents run as they stand, and can be read afterwards?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.analyze.legacy import ExportForm, export_records
from ranktape.storage import open_run
from tests.analyze.pt_files import save
from tests.exhaustive import exhaustive
from tests.launch.processes import errors, python, torchrun

GIVEN = """
import torch
from ranktape.capture import get_tensor_saver, save_attention_tensors, save_linear_tensors, save_tensor

query, key, value, output = (torch.randn(2, 4, 8) for _ in range(4))
input, weight = torch.randn(2, 8), torch.randn(8, 8)
"""
"""What the examples take for granted."""

BASIC = """
# save pre-FA tensor
save_attention_tensors(
    query=query, key=key, value=value,
    quant_type="hifp8",
    operation="forward",
    layer_idx=0,
    phase="pre",
    component="FA"
)

# save post-FA tensor
save_tensor(
    tensor=output,
    layer_type="attention",
    operation="forward",
    quant_type="hifp8",
    tensor_name="output",
    layer_idx=0,
    phase="post",
    component="FA"
)
"""

ADVANCED = """
# save pre-linear tensor
save_linear_tensors(
    input_tensor=input, weight=weight,
    quant_type="hifp8",
    operation="forward",
    layer_idx=1,
    phase="pre",
    component="linear"
)

# save post-linear tensor
save_tensor(
    tensor=output,
    layer_type="linear",
    operation="forward",
    quant_type="hifp8",
    tensor_name="output",
    layer_idx=1,
    phase="post",
    component="linear"
)
"""


NAMES = [
    "20250908_095220_0001_attention_L0_forward_pre_FA_hifp8_query.pt",
    "20250908_095220_0002_attention_L0_forward_pre_FA_hifp8_key.pt",
    "20250908_095220_0003_attention_L0_forward_pre_FA_hifp8_value.pt",
    "20250908_095220_0004_attention_L0_forward_post_FA_hifp8_output.pt",
    "20250908_095220_0005_linear_L1_forward_pre_linear_hifp8_input.pt",
    "20250908_095220_0006_linear_L1_forward_pre_linear_hifp8_weight.pt",
    "20250908_095220_0007_linear_L1_forward_post_linear_hifp8_output.pt",
    "20250908_095220_0008_linear_L1_backward_pre_linear_hifp8_input.pt",
    "20250908_095220_0009_linear_L1_backward_pre_linear_hifp8_weight.pt",
    "20250908_095220_0010_linear_L1_backward_post_linear_hifp8_output.pt",
]
"""The files that the document on names lists."""

STATISTICS = """
import torch

# load the statistics
stats = torch.load('test_layers/full_model/statistics.pt')

# look at all layers
for layer_name in sorted(stats.keys()):
    stat = stats[layer_name]
    print(f"{layer_name}: Mean={stat['mean']:.6f}, Std={stat['std']:.6f}, "
          f"NaN={stat['has_nan']}, Inf={stat['has_inf']}")
"""

ONE_LAYER = """
import torch

# load the output of layer 30
layer_30 = torch.load('test_layers/full_model/layer_30_output.pt')

print(f"Shape: {layer_30.shape}")
print(f"Mean: {layer_30.float().mean():.6f}")
print(f"Std: {layer_30.float().std():.6f}")
print(f"Has NaN: {torch.isnan(layer_30).any()}")
"""

NEIGHBOURS = """
import torch

# load two neighbouring layers
layer_30 = torch.load('test_layers/full_model/layer_30_output.pt')
layer_31 = torch.load('test_layers/full_model/layer_31_output.pt')

# the differences
diff = (layer_31 - layer_30).abs()
print(f"Max diff: {diff.max():.6f}")
print(f"Mean diff: {diff.mean():.6f}")
"""

AGAINST_A_REFERENCE = """
import torch

# load the same layer of both
neuron_layer_30 = torch.load('test_layers/full_model/layer_30_output.pt')
gpu_layer_30 = torch.load('gpu_reference/full_model/layer_30_output.pt')

# the differences
diff = (neuron_layer_30 - gpu_layer_30).abs()
relative_diff = diff / (gpu_layer_30.abs() + 1e-8)

print(f"  Max: {diff.max():.6f}")
print(f"  Mean: {diff.mean():.6f}")

print(f"  Max: {relative_diff.max():.6f}")
print(f"  Mean: {relative_diff.mean():.6f}")

# the cosine similarity
cosine_sim = torch.nn.functional.cosine_similarity(
    neuron_layer_30.flatten(),
    gpu_layer_30.flatten(),
    dim=0
)
print(f"Cosine Similarity: {cosine_sim:.6f}")
"""

RECORDED = """
import sys
import torch
from torch import nn
from ranktape.capture import Capture, get_layer_hidden_states


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(32))

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


torch.manual_seed(0)
model = Model().eval()
inputs = {"input_ids": torch.arange(8).reshape(1, 8)}
if sys.argv[2:]:
    model.embed.weight.data *= 1.01
with Capture(sys.argv[1], layers="all"), torch.inference_mode():
    outputs = model(**inputs)
    layer_hidden_states = get_layer_hidden_states()
print(len(layer_hidden_states))
"""
"""A model whose layers are recorded, and the lines of the document that get them."""

FOLDERS = (
    *("distributions", "heatmaps", "comparisons", "statistics", "attention_analysis", "quantization_analysis"),
    *("layer_analysis", "overflow_analysis", "fp8_analysis", "bf16_analysis", "backward_analysis", "rank_analysis"),
)
"""What the document on plots has below `draw`."""


def said(program: str, *, cwd: Path) -> list[str]:
    """The lines that a program prints."""
    ended = python("-c", program, cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def analyze(*words: str | Path) -> str:
    """What `ranktape analyze` answers."""
    result = CliRunner().invoke(cli, [*map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


NUMBERED = f"""
{GIVEN}
for iteration in (7, 8, 9):
    get_tensor_saver().set_iteration(iteration)
    print(save_linear_tensors(input_tensor=input, weight=weight, quant_type="mxfp8", layer_idx=1)["input"] is not None)
"""


@pytest.mark.parametrize(
    "door", ["launcher", pytest.param("variable", marks=exhaustive("the launcher is in make test"))]
)
def test_a_program_that_only_saves_by_hand_is_recorded_where_a_capture_was_asked_for(door: str, tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(NUMBERED)
    asked = {"RANKTAPE_CAPTURE": "run", "RANKTAPE_MIN_ITERATIONS": "2"}
    words = ("-m", "ranktape.launch", "--capture", "run", "--min-iterations", "2")
    if door == "launcher":
        ended = python(*words, "saves.py", cwd=tmp_path)
    else:
        ended = python("saves.py", cwd=tmp_path, env=asked)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["True", "True", "False"]
    assert "error" not in ended.stderr
    run = open_run(tmp_path / "run")
    assert run.iterations == [7, 8]
    assert run.verdict().met
    assert [(record.iteration, record.tensor_name) for record in run.select(quant_type="mxfp8", layer_idx=1)] == [
        (iteration, name) for iteration in (7, 8) for name in ("input", "weight")
    ]


def test_what_the_launcher_was_asked_for_is_no_setting_of_a_capture_of_the_script_s_own(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(NUMBERED)
    variables = {"TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": "mine", "TENSOR_SAVER_ITERATION": "7"}
    # A flight recorder cannot save by hand.
    words = ("-m", "ranktape.launch", "--capture", "run", "--record-last", "2", "saves.py")
    ended = python(*words, cwd=tmp_path, env=variables)
    assert ended.stdout.split()[0] == "True", ended.stderr
    assert open_run(tmp_path / "mine").iterations[0] == 7
    assert not (tmp_path / "run").exists()


SAVES_AND_TRAINS = f"""
{GIVEN}
import os, sys
rank = os.environ.get("RANK", "0")
if len(sys.argv) > 1 or rank == "0":
    save_linear_tensors(input_tensor=input, weight=weight, quant_type="bf16")
if len(sys.argv) > 1:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input).sum().backward()
    save_linear_tensors(input_tensor=None, weight=torch.ones(3), quant_type="bf16")
    optimizer.step()
"""


def test_what_is_saved_before_and_in_a_training_is_of_its_iteration(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES_AND_TRAINS)
    ended = python("-m", "ranktape.launch", "--capture", "run", "saves.py", "train", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    names = open_run(tmp_path / "run").select(iteration=0).column("tensor_name").tolist()
    assert sorted(names) == [
        *("bias", "grad_bias", "grad_output", "grad_weight", "input", "input", "output", "weight", "weight", "weight")
    ]


@pytest.mark.distributed
def test_on_one_of_several_ranks_what_is_saved_waits_for_a_training(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES_AND_TRAINS)
    ended = torchrun("-m", "ranktape.launch", "--capture", "run", "saves.py", cwd=tmp_path)
    assert ended.returncode == 1
    [error] = errors(ended)
    assert "TENSOR_SAVE_ENABLED=true and TENSOR_SAVE_DIR in place of the launcher" in error
    assert not (tmp_path / "run").exists()


def test_what_the_examples_save_is_listed_counted_and_swept(tmp_path: Path) -> None:
    logs = tmp_path / "enhanced_tensor_logs"
    variables = {"TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": f"./{logs.name}", "TENSOR_SAVER_ITERATION": "0"}
    # Two programs save into one place; the second does not close.
    for program in (GIVEN + BASIC + "get_tensor_saver().close()\n", GIVEN + ADVANCED):
        ended = python("-c", program, cwd=tmp_path, env=variables)
        assert ended.returncode == 0, ended.stderr
    saved = open_run(logs).select()
    assert sorted(zip(saved.column("layer_type"), saved.column("tensor_name"), strict=True)) == [
        *(("attention", name) for name in ("key", "output", "query", "value")),
        *(("linear", name) for name in ("input", "output", "weight")),
    ]
    assert "7 records" in analyze("ls", logs)
    assert "attention" in analyze("overflow", logs, "--format", "fp8_e4m3", "--by", "layer_type")
    assert analyze("sweep", logs, "--elem-format", "fp8_e4m3", "--num-levels", "3", "--csv").count("\n") == 1 + len(
        saved
    )


def test_the_commands_of_the_scaling_tool_have_its_options(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for number in (1, 2, 3):
        torch.save(torch.randn(16, 32).bfloat16(), tmp_path / f"tensor{number}.pt")
    files = [tmp_path / f"tensor{number}.pt" for number in (1, 2, 3)]
    results = tmp_path / "results"
    commands: tuple[tuple[str | Path, ...], ...] = (
        (*files, "--scale-bits", "8", "--num-levels", "21"),
        (
            files[0],
            "--elem-format",
            "fp8_e5m2",
            "--max-scale-exp",
            "15",
            "--min-scale-exp",
            "-15",
            "--num-levels",
            "31",
        ),
        (files[0], "--elem-format", "fp4_e2m1", "--num-levels", "51"),
    )
    for words in commands:
        analyze("sweep", *words, "--no-plots", "--output-dir", results)
    written = {path.relative_to(results).as_posix() for path in results.rglob("*.*")}
    for name in ("tensor1", "tensor2", "tensor3"):
        assert f"{name}/mxfp_scaling_results_fp8_e4m3.txt" in written
        assert f"{name}/mxfp_scaling_test_{name}_fp8_e4m3.log" in written
    assert {f"tensor1/mxfp_scaling_results_{format_name}.txt" for format_name in ("fp8_e5m2", "fp4_e2m1")} <= written


@exhaustive("the example itself is in test_layer_outputs.py")
def test_outputs_of_layers_are_looked_at_as_in_their_document(tmp_path: Path) -> None:
    for name, words in (("test_layers", ()), ("gpu_reference", ("other",))):
        ended = python("-c", RECORDED, tmp_path / f"{name}.run", *words, cwd=tmp_path)
        assert (ended.returncode, ended.stdout) == (0, "33\n"), ended.stderr
        export_records(
            open_run(tmp_path / f"{name}.run").select(), tmp_path / name / "full_model", form=ExportForm.LAYERS
        )
    lines = said(STATISTICS, cwd=tmp_path)
    assert len(lines) == 33
    assert lines[0].startswith("embedding_output: Mean=")
    assert all(line.endswith("NaN=False, Inf=False") for line in lines)
    assert said(ONE_LAYER, cwd=tmp_path)[::3] == ["Shape: torch.Size([1, 8, 8])", "Has NaN: False"]
    maximum, mean = (float(line.rpartition(" ")[2]) for line in said(NEIGHBOURS, cwd=tmp_path))
    assert 0 < mean < maximum
    assert 0.9 < float(said(AGAINST_A_REFERENCE, cwd=tmp_path)[-1].rpartition(" ")[2]) < 1
    # The same questions, asked of the folders.
    folders = [tmp_path / name / "full_model" for name in ("test_layers", "gpu_reference")]
    assert "33 records" in analyze("ls", folders[0])
    (row,) = json.loads(analyze("compare", *folders, "--layer-idx", "29", "--json"))["rows"]
    assert row["max_abs"] == pytest.approx(
        float(said(AGAINST_A_REFERENCE, cwd=tmp_path)[0].rpartition(" ")[2]), abs=1e-6
    )
    (pair,) = json.loads(analyze("compare", folders[0], "--pair", "layer_idx=30:29", "--json"))["rows"]
    assert pair["max_abs"] == pytest.approx(maximum, abs=1e-6)


@exhaustive("make test has its files in tests/analyze/test_files_folder.py")
def test_the_files_of_the_document_on_names_are_read_compared_and_drawn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for name in NAMES:
        save(tmp_path / "enhanced_tensor_logs" / name, {"tensor": torch.randn(2, 4, 8).bfloat16()}, legacy=True)
    logs = tmp_path / "enhanced_tensor_logs"
    assert "10 records" in analyze("ls", logs)
    assert "4 pairs compared" in analyze("compare", logs, "--pair", "component=FA:linear", "--operation", "forward")
    assert "pairs compared" in analyze("compare", logs, "--pair", "phase=pre:post", "--layer-type", "attention")
    drawn = analyze("plot", logs, "--all", "--output", tmp_path / "draw").splitlines()
    assert {path.name for path in (tmp_path / "draw").iterdir() if path.is_dir()} == {*FOLDERS, "replay_analysis"}
    for folder in ("distributions", "statistics", "attention_analysis", "overflow_analysis", "backward_analysis"):
        assert any(f"draw/{folder}/" in path for path in drawn), folder
    # One batch size is nothing to compare, and weights have none.
    assert not any("batch_size" in path for path in drawn)


@exhaustive("make test has its files in tests/analyze/test_sweep_command.py")
def test_the_scaling_tool_writes_where_its_document_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.save(torch.randn(16, 32).bfloat16(), "input_tensor.pt")
    analyze("sweep", "input_tensor.pt")
    analyze("sweep", "input_tensor.pt", "--output-dir", "./results/", "--elem-format", "fp8_e4m3", "--num-levels", "31")
    for folder in ("draw/scaling_analysis/input_tensor", "results/input_tensor"):
        assert {path.name for path in (tmp_path / folder).iterdir()} == {
            "mxfp_scaling_results_fp8_e4m3.txt",
            "mxfp_scaling_test_fp8_e4m3.png",
            "mxfp_scaling_summary_fp8_e4m3.png",
            "mxfp_scaling_test_input_tensor_fp8_e4m3.log",
        }
