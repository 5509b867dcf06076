"""Does the demo learn, record and answer, and refuse what cannot work before it trains?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ranktape.errors import UsageError
from ranktape.launch.cli import cli
from ranktape.launch.demo import NUM_ITERATIONS, command, plan_capture
from ranktape.launch.demo_train import GPT, VOCABULARY, GPTConfig, read_corpus
from ranktape.storage import open_run
from tests.capture.verify import recomputed
from tests.exhaustive import exhaustive
from tests.launch.processes import python


def test_the_corpus_is_on_every_machine() -> None:
    text = bytes(read_corpus().tolist())
    assert len(text) > 100_000
    assert b"assignment" in text


def test_the_capture_fits_the_length_of_the_training() -> None:
    settings = plan_capture({"min_iterations": 3}, steps=100, quant_type="bf16")
    assert settings == {"min_iterations": 3, "start_at": 20, "every": 20, "quant_type": "bf16"}
    assert next(each for each in command.params if each.name == "min_iterations").default == NUM_ITERATIONS == 3
    short = plan_capture({"min_iterations": 3, "quant_type": "mine"}, steps=3, quant_type="bf16")
    assert short == {"min_iterations": 3, "start_at": 0, "every": 1, "quant_type": "mine"}
    with pytest.raises(UsageError, match="--steps 10 ends before iteration 10, the last of the 2 to capture: give 11 "):
        plan_capture({"min_iterations": 2, "start_at": 5, "every": 5}, steps=10, quant_type="bf16")


def test_the_model_is_causal_and_predicts_every_byte() -> None:
    torch.manual_seed(0)
    config = GPTConfig(layers=2, width=32, heads=2, context=16)
    model = GPT(config)
    tokens = torch.randint(VOCABULARY, (3, 16))
    logits = model(tokens)
    assert logits.shape == (3, 16, VOCABULARY)
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % VOCABULARY
    torch.testing.assert_close(model(changed)[:, :8], logits[:, :8])
    names = dict(model.named_modules())
    assert "layers.0.attention.query" in names
    assert "layers.1.feed_forward.down" in names


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--steps", "10", "--start-at", "10"], "--steps 10 ends before iteration"),
        (["--every", "0"], "--every 0 is not allowed"),
        (["--min-iterations", "-2"], "--min-iterations -2 is not allowed"),
        (["--dtype", "fp8"], "'fp8' is not one of 'bf16', 'fp32'"),
        (["--quant", "fp8"], "recipe 'fp8' is not known: did you mean fp8_"),
        (["--quant-plan", "missing.yaml"], "missing.yaml cannot be read"),
        (["--quant", "nvfp4", "--quant-plan", "plan.yaml"], "--quant and --quant-plan exclude each other"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_said_before_the_training(words: list[str], match: str) -> None:
    result = CliRunner().invoke(cli, ["demo", *words])
    assert result.exit_code == 2
    assert match in result.output
    assert "torchrun" not in result.output


@pytest.mark.slow
@pytest.mark.distributed
def test_the_demo_learns_records_and_answers(tmp_path: Path) -> None:
    words = ("-m", "ranktape.launch.cli", "demo", "--output", "run", "--steps", "20", "--min-iterations", "1")
    ended = python(*words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    losses = [float(line.split()[3]) for line in ended.stdout.splitlines() if line.startswith("step ")]
    assert losses[0] > 5
    assert losses[-1] < 4
    assert open_run(tmp_path / "run").iterations == [6]
    # Two ranks: of 25 linear layers three products each, of four attentions four.
    assert recomputed(open_run(tmp_path / "run")) == {"agrees": 2 * (3 * 25 + 4 * 4)}
    asked = [
        line.removeprefix("$ ranktape ").split(" run")[0] for line in ended.stdout.splitlines() if line[:2] == "$ "
    ]
    assert asked[1:] == ["status", *(f"analyze {name}" for name in ("overflow", "sweep", "findings", "plot", "report"))]
    assert "minimum met" in ended.stdout
    # A healthy training: both questions say so.
    assert "verdict: 4 none" in ended.stdout
    assert "No findings in " in ended.stdout
    for words_of in (["--format", "fp8_e4m3"], ["--format", "fp8_e5m2,hif8,mxfp8"], []):
        said = CliRunner().invoke(cli, ["analyze", "overflow", str(tmp_path / "run"), *words_of]).stdout
        assert re.fullmatch(r"verdict: \d+ none", said.splitlines()[-1]), said
    (plot,) = tmp_path.rglob("*.png")
    assert str(plot.relative_to(tmp_path)) in ended.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = tmp_path / "run-report.html"
    assert ended.stdout.splitlines()[-1] == f"open it in a browser: {report.as_uri()}"
    assert report.read_text(encoding="utf-8").lower().startswith("<!doctype html>")

    refused = python(*words, cwd=tmp_path)
    assert refused.returncode == 1
    assert "there is a run at run already: add --overwrite to delete it" in refused.stderr
    assert "torchrun" not in refused.stdout


@exhaustive("the demo without a format is in make test")
@pytest.mark.distributed
@pytest.mark.parametrize(("option", "word", "quant_type"), [("quant", "mxfp4", "mxfp4"), ("quant-plan", "p", "plan")])
def test_the_demo_learns_in_low_precision_and_the_run_says_which(
    tmp_path: Path, option: str, word: str, quant_type: str
) -> None:
    (tmp_path / "p").write_text("modules: {head: bf16, 'layers.*': mxfp4}", encoding="utf-8")
    words = ["-m", "ranktape.launch.cli", "demo", "--output", "run", "--steps", "20", f"--{option}", word]
    words += ["--min-iterations", "1", "--nproc-per-node", "1"]
    ended = python(*words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    losses = [float(line.split()[3]) for line in ended.stdout.splitlines() if line.startswith("step ")]
    assert losses[0] > 5
    assert losses[-1] < 4
    records = open_run(tmp_path / "run").select()
    assert {record.quant_type for record in records} == {quant_type}
    weight = records.select(tensor_name="weight", module="layers.0.attention.query")[0].read()
    blocks = abs(weight.astype("float32")).reshape(-1, 32)
    # Eight magnitudes, whatever the scale, and one scale for each block.
    assert max(len(set(block)) for block in blocks.tolist()) <= 8
