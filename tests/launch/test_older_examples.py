"""Do the usage examples of the older tools' documents run as they stand, and can be read afterwards?"""

from __future__ import annotations

from pathlib import Path

import torch
from click.testing import CliRunner

from ranktape.analyze.cli import cli
from ranktape.storage import open_run
from tests.launch.processes import python

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


def analyze(*words: str | Path) -> str:
    """What `ranktape analyze` answers."""
    result = CliRunner().invoke(cli, [*map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


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
