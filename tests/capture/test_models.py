"""With microbatches, checkpoints and autocast at once, is a model in one process captured whole, and left as it was?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ranktape.capture import Capture
from ranktape.storage import open_run
from tests.capture.parallel_models import OPTIONS, STEPS, Recipe, train
from tests.capture.verify import verify_run
from tests.exhaustive import exhaustive_but

MICROBATCHES = 2
ALL = ("linear", "attention", "layer outputs", "accumulation", "checkpointing", "autocast", "unchanged")

support = pytest.mark.support
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(200)]  # transformers warns of its own plans


def listening(outputs: list[torch.Tensor]) -> Callable[[Any], nn.Module]:
    """Makes a model tell what its layers return, in the order of their calls."""

    def wrap(model: Any) -> nn.Module:
        inner = getattr(model, "model", getattr(model, "transformer", model))
        for layer in getattr(inner, "layers", getattr(inner, "h", None)):  # type: ignore[union-attr]
            layer.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.detach().clone()))
        return model  # type: ignore[no-any-return]

    return wrap


@pytest.mark.parametrize(
    ("kind", "num_linears"),
    [
        pytest.param("plain", 14, marks=support(framework="PyTorch", parallelism="one process", features=ALL)),
        pytest.param("moe", 36, marks=support(framework="MoE", parallelism="one process", features=ALL)),
        pytest.param("llama", 15, marks=support(framework="HF Llama", parallelism="one process", features=ALL)),
        pytest.param("gpt2", 9, marks=support(framework="HF GPT-2", parallelism="one process", features=ALL)),
    ],
)
@exhaustive_but("gpt2-9", reason="one model is in make test")
def test_microbatches_checkpoints_and_autocast_at_once(tmp_path: Path, kind: str, num_linears: int) -> None:
    if kind in {"llama", "gpt2"}:
        pytest.importorskip("transformers", reason="transformers is not installed")
    for is_autocast in (False, True):
        url = tmp_path / f"run{is_autocast:d}"
        recipe = Recipe(kind=kind, microbatches=MICROBATCHES, is_checkpointed=True, is_autocast=is_autocast)
        plain = train(recipe, capture=None)
        assert train(recipe, capture=Capture(url, min_iterations=STEPS, **OPTIONS)) == plain
        run = open_run(url)
        assert run.iterations == list(range(STEPS))
        assert all(not any(status.silent_sites.values()) for status in run.status())
        num_passes = STEPS * MICROBATCHES
        # What the first layer of a model of vectors gets needs no gradient.
        num_grads = num_linears - (kind in {"plain", "moe"})
        names = ("output", "grad_query", "grad_key", "grad_value")
        assert verify_run(run) == {
            "output": num_passes * num_linears,
            "grad_weight": num_passes * num_linears,
            "grad_input": num_passes * num_grads,
            **{f"attention {name}": num_passes * 2 for name in names},
        }
        compute = {record.compute_dtype for record in run.select(layer_type="linear")}
        assert compute == {"bfloat16" if is_autocast else "float32"}

        expected: list[torch.Tensor] = []
        train(replace(recipe, is_checkpointed=False, wrap=listening(expected)), capture=None)
        records = run.select(layer_type="hidden", tensor_name="output")
        found = sorted(records, key=lambda record: (record.iteration, record.microbatch, record.layer_idx))
        assert len(found) == len(expected) == 2 * num_passes
        assert all(torch.equal(record.tensor(), output) for record, output in zip(found, expected, strict=True))
        assert len(run.select(layer_type="hidden", tensor_name="grad_output")) == 2 * num_passes
