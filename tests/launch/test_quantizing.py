"""Is an unmodified training quantised, however its model is wrapped, and ended where it cannot be?"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ranktape.storage import open_run
from tests.exhaustive import exhaustive
from tests.launch.processes import Ended, errors, python, torchrun

LAUNCH = ("-m", "ranktape.launch")

TRAIN = """
    import os, sys
    import torch

    torch.manual_seed(0)
    kind = sys.argv[1]
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    if kind == "quantised":
        from ranktape.analyze import fake_quantize
        fake_quantize(model, recipe="mxfp4")
    if kind in ("ddp", "fsdp", "fsdp_layers", "tp"):
        torch.distributed.init_process_group("gloo")
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    if kind.startswith("fsdp"):
        from torch.distributed.fsdp import fully_shard
        for part in (model[0], model[2]) if kind == "fsdp_layers" else ():
            fully_shard(part)
        fully_shard(model)
    if kind == "tp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if kind in ("compiled", "one_graph"):
        model = torch.compile(model, backend="eager", fullgraph=kind == "one_graph")
    if kind == "compiled_in_place":
        model.compile(backend="eager")
    if kind == "alone":
        model = torch.nn.Linear(32, 32)
    if kind == "convolution":
        model = torch.nn.Sequential(torch.nn.Conv1d(16, 16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 32)

    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    if kind == "compiled_step":
        step = torch.compile(step, backend="eager")
    with torch.no_grad():
        model(x)  # some evaluate before they train
    for _ in range(3):
        loss = step(x)
    if os.environ.get("RANK", "0") == "0":
        print("loss", loss.item().hex(), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the script is."""
    folder = tmp_path_factory.mktemp("quantizing")
    (folder / "train.py").write_text(textwrap.dedent(TRAIN))
    return folder


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[str, str]:
    """The last losses of the script as it is, quantised by its own line, and under autocast."""
    return {kind: _loss(python("train.py", kind, cwd=folder)) for kind in ("plain", "quantised", "autocast")}


def _loss(ended: Ended) -> str:
    assert ended.returncode == 0, ended.stderr
    return next(line for line in ended.stdout.splitlines() if line.startswith("loss "))


def test_a_script_that_knows_nothing_trains_and_is_recorded_as_one_that_quantises_itself(
    folder: Path, losses: dict[str, str]
) -> None:
    ended = python(*LAUNCH, "--capture", "run", "--quant", "mxfp4", "train.py", "plain", cwd=folder)
    assert _loss(ended) == losses["quantised"] != losses["plain"]
    assert "mxfp4: 2 linear layers of Sequential are quantised" in ended.stderr
    records = open_run(folder / "run").select()
    assert {record.quant_type for record in records} == {"mxfp4"}
    assert {"input", "wide_input", "weight", "wide_weight"} <= {record.tensor_name for record in records}


def test_the_variable_needs_no_launcher_and_no_capture(folder: Path, losses: dict[str, str]) -> None:
    ended = python("train.py", "plain", cwd=folder, env={"RANKTAPE_QUANT": "mxfp4"})
    assert _loss(ended) == losses["quantised"]
    environment = {"RANKTAPE_QUANT": "hifp8", "RANKTAPE_CAPTURE": "variable"}
    ended = python("train.py", "plain", cwd=folder, env=environment)
    assert _loss(ended) not in losses.values()
    assert {record.quant_type for record in open_run(folder / "variable").select()} == {"hifp8"}


@pytest.mark.parametrize("kind", ["ddp", "fsdp", pytest.param("fsdp_layers", marks=exhaustive("as fsdp"))])
def test_a_wrapped_model_is_quantised_on_every_rank(kind: str, folder: Path, losses: dict[str, str]) -> None:
    ended = torchrun(*LAUNCH, "--capture", kind, "--quant", "mxfp4", "train.py", kind, cwd=folder)
    assert _loss(ended) == losses["quantised"]
    records = open_run(folder / kind).select(tensor_name="wide_weight")
    assert {(record.rank, record.module) for record in records} == {(r, m) for r in (0, 1) for m in ("0", "2")}


@pytest.mark.parametrize("kind", ["compiled", "compiled_in_place", "compiled_step"])
def test_a_compiled_training_is_quantised(kind: str, folder: Path, losses: dict[str, str]) -> None:
    ended = python(*LAUNCH, "--quant", "mxfp4", "train.py", kind, cwd=folder)
    assert _loss(ended) == losses["quantised"]
    assert "mxfp4: nothing is recorded (--capture URL would)" in ended.stderr


def test_bf16_rounds_what_is_wider_and_leaves_the_rest(folder: Path, losses: dict[str, str]) -> None:
    rounded = python(*LAUNCH, "--quant", "bf16", "train.py", "plain", cwd=folder)
    assert _loss(rounded) not in losses.values()
    assert "bf16: 2 linear layers of Sequential are quantised" in rounded.stderr
    # Of a training in bf16 only the pass before it, outside of autocast, would be rounded.
    ended = python(*LAUNCH, "--quant", "bf16", "train.py", "autocast", cwd=folder)
    assert ended.returncode == 0, ended.stderr


def test_a_plan_names_the_recipe_of_each_layer(folder: Path, losses: dict[str, str]) -> None:
    (folder / "plan.yaml").write_text("modules: {'0': mxfp4, '2': mxfp8}")
    ended = python(*LAUNCH, "--capture", "plan", "--quant-plan", "plan.yaml", "train.py", "plain", cwd=folder)
    assert _loss(ended) not in losses.values()
    assert {record.quant_type for record in open_run(folder / "plan").select()} == {"plan"}


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (("--quant", "mxpf8"), "plain", "recipe 'mxpf8' is not known: did you mean mxfp8?"),
        (("--quant", "mxfp8", "--quant-plan", "x.yaml"), "plain", "--quant and --quant-plan exclude each other"),
        (("--quant", "mxfp8"), "one_graph", "compile without fullgraph=True"),
        (("--quant", "mxfp8"), "alone", "calls a linear layer by itself"),
        (("--quant", "mxfp8"), "convolution", "no nn.Linear was quantised"),
        (("--quant", "mxfp8"), "quantised", "are quantised already"),
        (("--quant-plan", "missing.yaml"), "plain", "missing.yaml cannot be read"),
    ],
)
def test_what_cannot_be_quantised_is_not_trained(words: tuple[str, ...], kind: str, message: str, folder: Path) -> None:
    ended = python(*LAUNCH, *words, "train.py", kind, cwd=folder)
    assert ended.returncode == 2, ended.stderr
    assert [line for line in errors(ended) if message in line], ended.stderr
    assert "loss" not in ended.stdout


def test_tensor_parallelism_is_refused_with_the_way_out(folder: Path) -> None:
    ended = torchrun(*LAUNCH, "--quant", "mxfp8", "train.py", "tp", cwd=folder)
    assert ended.returncode == 1
    assert "train without tensor parallelism, or without quantisation" in ended.stderr
    assert "loss" not in ended.stdout


def test_a_wrong_variable_ends_the_training(folder: Path) -> None:
    ended = python("train.py", "plain", cwd=folder, env={"RANKTAPE_QUANT": "mxfp9"})
    assert ended.returncode == 2
    assert "recipe 'mxfp9' is not known: did you mean mxfp8?" in ended.stderr
    assert "loss" not in ended.stdout
