"""Inference with a Hugging Face model: the output of the embedding and of every decoder layer, recorded and exported.

The weights are random and nothing is downloaded; `pip install transformers` is all that it needs besides ranktape.

python examples/layer_outputs.py runs/layers runs/layer_files
python examples/layer_outputs.py runs/some runs/some_files --layers 0,2
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ranktape.capture import Capture, get_layer_hidden_states

PROMPT = torch.tensor([[1, 5, 9, 2, 6, 5, 3, 5]])


def make_model(num_layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def record(url: str, *, layers: str, num_layers: int) -> None:
    """One forward pass, and what its layers gave: on this thread at once, and in the run for later."""
    model = make_model(num_layers)
    with Capture(url, layers=layers, quant_type="fp32"), torch.inference_mode():
        model(PROMPT)
        states = get_layer_hidden_states()
    assert states is not None
    for name, state in zip(["embedding", *named(layers, num_layers)], states, strict=True):
        print(f"{name:<10} {tuple(state.shape)}  mean {state.mean():+.4f}  std {state.std():.4f}")


def named(layers: str, num_layers: int) -> list[str]:
    chosen = range(num_layers) if layers == "all" else [int(layer) for layer in layers.split(",")]
    return [f"layer {layer}" for layer in chosen]


def export(url: str, folder: Path) -> None:
    """The same as files: embedding_output.pt, layer_N_output.pt (there N counts from 1), statistics.pt, metadata.pt."""
    command = ["ranktape.launch.cli", "export", url, str(folder), "--form", "layers"]
    subprocess.run([sys.executable, "-m", *command], check=True)
    for name, statistics in torch.load(folder / "statistics.pt").items():
        print(f"{name:<18} mean {statistics['mean']:+.4f}  NaN {statistics['has_nan']}  Inf {statistics['has_inf']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the run to record into")
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--layers", default="all", help="'all', or numbers from 0 with commas between them")
    parser.add_argument("--num-layers", type=int, default=4, help="decoder layers of the model")
    arguments = parser.parse_args()
    record(arguments.url, layers=arguments.layers, num_layers=arguments.num_layers)
    export(arguments.url, arguments.folder)


if __name__ == "__main__":
    main()
