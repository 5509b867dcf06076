"""Does the example of inference record and export what a Hugging Face model itself calls its hidden states?"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.exhaustive import exhaustive
from tests.launch.processes import CHECKOUT, python

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
