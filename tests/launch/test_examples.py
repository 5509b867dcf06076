"""Do the examples run as they stand, and are they recorded?"""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ranktape.storage import open_run
from tests.exhaustive import exhaustive, exhaustive_but
from tests.launch.processes import CHECKOUT, PLAIN, python, torchrun

EXAMPLES = CHECKOUT / "examples"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("example", "package", "num_ranks", "num_modules"),
    [
        ("hugging_face_trainer", "transformers", 1, 15),
        ("accelerate_loop", "accelerate", 2, 2),
        ("lightning_fit", "lightning", 2, 2),
        ("fsdp_and_tensor_parallel", "torch", 4, 4),
    ],
)
@exhaustive_but("accelerate_loop-accelerate-2-2", reason="one example is in make test")
def test_an_example_is_recorded_as_it_stands(
    example: str, package: str, num_ranks: int, num_modules: int, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    words = ("-m", "ranktape.launch", "--capture", "run", "--stop-when-stored", EXAMPLES / f"{example}.py")
    ended = torchrun(*words, cwd=tmp_path, num_ranks=num_ranks)
    assert ended.returncode == 0, ended.stderr
    run = open_run(tmp_path / "run")
    assert run.verdict().met
    records = run.select(layer_type="linear")
    assert set(records.column("rank").tolist()) == set(range(num_ranks))
    assert len(set(records.column("module").tolist())) == num_modules


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    ended = python("-m", "ranktape.launch", "--capture", "runs/demo", "--stop-when-stored", PLAIN, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads((EXAMPLES / "look_at_a_run.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    shown = _shown(sources)
    assert "<table" in shown[2]
    assert len(shown) == 6


def _shown(sources: list[str]) -> list[str]:
    """What a notebook would show of the last line of each cell; Jupyter itself is not installed."""
    names: dict[str, Any] = {}
    shown = []
    for source in sources:
        *lines, last = ast.parse(source).body
        assert isinstance(last, ast.Expr), "the last line of a cell is what it shows"
        exec(compile(ast.Module(lines, []), "cell", "exec"), names)  # noqa: S102  (the notebook is ours)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # noqa: S307  (as above)
        html = value._repr_html_() if hasattr(value, "_repr_html_") else None
        shown.append(html or repr(value))
    return shown


EXAMPLE = CHECKOUT / "examples" / "layer_outputs.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "files"),
    [
        pytest.param(
            "all",
            ["embedding", "layer_1", "layer_2", "layer_3", "layer_4"],
            marks=exhaustive("some layers are in make test"),
        ),
        ("0,2", ["embedding", "layer_1", "layer_3"]),
    ],
)
@exhaustive("make test has the hidden states of models of its own")
def test_the_example_gives_the_hidden_states_of_the_model(layers: str, files: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ended = python(EXAMPLE, "run", "files", "--layers", layers, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    written = sorted(path.name for path in (tmp_path / "files").iterdir())
    assert written == [*(f"{name}_output.pt" for name in files), "metadata.pt", "statistics.pt"]

    spec = importlib.util.spec_from_file_location("layer_outputs", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    states = {}
    model = example.make_model(4)
    for number, layer in enumerate(model.model.layers, start=1):
        layer.register_forward_hook(lambda _, __, output, number=number: states.update({f"layer_{number}": output}))
    with torch.inference_mode():
        model(example.PROMPT)
        states["embedding"] = model.model.embed_tokens(example.PROMPT)
    for name in files:
        exported = torch.load(tmp_path / "files" / f"{name}_output.pt", weights_only=True)
        assert torch.equal(exported, states[name]), name
    # One line for each state that was handed out, then one for each file.
    assert len(ended.stdout.splitlines()) == 2 * len(files) + 1
