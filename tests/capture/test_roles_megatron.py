"""Are a Megatron-core model's layers, its embedding and its shared weights recorded as what they computed?

One rank, in a process of its own; what two ranks record of one model is in test_parallel_megatron.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ranktape.storage import open_run
from tests.capture.test_parallel import ROOT
from tests.capture.verify import verify_run
from tests.optional import needs

pytestmark = needs("megatron")

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from ranktape.capture import Capture, get_layer_hidden_states
from tests.capture.programs.megatron_model import stand_in_for_a_gpu

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
stand_in_for_a_gpu()
parallel_state.initialize_model_parallel()

def train(capture):
    torch.manual_seed(0)
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2,
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0)
    model = GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=32,
        max_sequence_length=8, share_embeddings_and_output_weights=True, position_embedding_type="rope")
    tokens = torch.randint(32, (3, 8))
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if capture is not None:
        capture.__enter__()
    loss = model(tokens, torch.arange(8).expand(3, 8), mask, labels=tokens).mean()
    loss.backward()
    bits = [loss.item().hex()] + [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    if capture is not None:
        capture.close()
        assert len(get_layer_hidden_states()) == 3
    return bits

plain = train(None)
captured = train(Capture(sys.argv[1], layers="all", layer_type=("linear", "attention", "embedding")))
assert plain[0] == captured[0]
assert all(torch.equal(one, other) for one, other in zip(plain[1:], captured[1:], strict=True))
"""


@pytest.mark.slow
@pytest.mark.support(
    framework="Megatron-core",
    parallelism="one process",
    features=("linear", "attention", "layer outputs", "unchanged"),
)
def test_layers_embedding_and_shared_weights(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    counts = verify_run(run)
    assert counts["output"] == counts["grad_input"] == counts["grad_weight"] == 4 * 2 + 1
    assert counts["embedding output"] == counts["embedding grad_weight"] == 1
    assert counts["attention output"] == counts["attention grad_key"] == 2
    assert not any(any(status.silent_sites.values()) for status in run.status())
    records = run.select(component="hidden", tensor_name="output")
    found = [(record.module, record.layer_type, record.layer_idx, record.layout) for record in records]
    assert found == [
        ("embedding", "embedding", -1, "TBH"),
        ("decoder.layers.0", "hidden", 0, "TBH"),
        ("decoder.layers.1", "hidden", 1, "TBH"),
    ]
    [query] = run.select(layer_idx=1, tensor_name="query")
    assert (query.module, query.layout, query.shape) == (
        "decoder.layers.1.self_attention.core_attention", "TBHD", (8, 3, 4, 4),
    )  # fmt: skip
    [entered] = run.select(module="decoder.layers.0.self_attention.linear_qkv", tensor_name="input")
    assert entered.tensor().dtype == torch.float32
    assert (entered.layout, entered.sample_dim) == ("TBH", 1)
