"""Do the launcher and the variable record the same of any model, and leave a compiled training as it was?"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from ranktape.storage import open_run
from tests.exhaustive import exhaustive, exhaustive_but
from tests.launch.processes import Ended, own_lines, python
from tests.launch.test_runner import LAUNCH, contents

MODELS = """
    import torch
    from torch import nn
    from tests.capture.hugging_face import tiny

    class Together(nn.Module):
        def __init__(self):
            super().__init__()
            self.llama, self.gpt2, self.t5 = (tiny(name) for name in ("Llama", "GPT2", "T5"))
            self.encoder = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)

        def forward(self, tokens):
            losses = [model(input_ids=tokens, labels=tokens).loss for model in (self.llama, self.gpt2, self.t5)]
            hidden = self.encoder(nn.functional.one_hot(tokens, 16).float())
            return sum(losses) + hidden.square().mean()

    torch.manual_seed(0)
    model = Together()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.randint(16, (2, 5)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item().hex())
"""
"""Models of several libraries, none of which is imported when the launcher begins."""


@exhaustive("test_autoload.py compares the doors, tests/capture each of these models")
def test_both_doors_record_the_same_of_each_model_in_each_iteration(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "train.py").write_text(textwrap.dedent(MODELS))
    launched = python(*LAUNCH, "--capture", "launched", "--min-iterations", "2", "train.py", cwd=tmp_path)
    environment = {"RANKTAPE_CAPTURE": "run", "RANKTAPE_MIN_ITERATIONS": "2"}
    ended = python("train.py", cwd=tmp_path, env=environment)
    assert launched.returncode == ended.returncode == 0, launched.stderr + ended.stderr
    assert launched.stdout == ended.stdout
    assert contents(tmp_path / "launched") == contents(tmp_path / "run")
    run = open_run(tmp_path / "launched")
    for status in run.status():
        assert not any(status.silent_sites.values()), status.silent_sites
    sites: list[set[Any]] = [
        {
            (record.module, record.info.component, record.tensor_name, record.info.layout)
            for record in run.select(iteration=iteration)
        }
        for iteration in (0, 1)
    ]
    assert sites[0] == sites[1]
    assert {module.partition(".")[0] for module, *_ in sites[0]} == {"llama", "gpt2", "t5", "encoder"}


COMPILED = """
    import contextlib
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from ranktape.capture import Capture

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(16, 16)

        def forward(self, hidden):
            heads = self.query(hidden).view(2, 4, 2, 8).transpose(1, 2)
            attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
            return hidden + attended.transpose(1, 2).reshape(hidden.shape)

    def train():
        from torch._dynamo.utils import counters

        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        torch.manual_seed(0)
        ran = []

        def backend(graph, inputs):
            def run(*args):
                ran.append(graph)
                return graph(*args)
            return run

        model = torch.compile(nn.Sequential(Block(), Block()), backend=backend, fullgraph=True)
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs = []
        for step in range(4):
            ran.clear()
            loss = model(torch.randn(2, 4, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            runs.append(len(ran))
        print(*runs)
        print(counters["stats"]["unique_graphs"], dict(counters["graph_break"]), dict(counters["recompiles"]))
        print(loss.item().hex())
        dist.destroy_process_group()

    with Capture("run", every=2, min_iterations=2) if "capture" in sys.argv else contextlib.nullcontext():
        train()
"""
"""A training with DDP that is one graph; how often compiled code ran in each step, and what dynamo has counted."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The compiled training without us."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "train.py").write_text(textwrap.dedent(COMPILED))
    return python("train.py", cwd=folder)


@pytest.mark.parametrize("door", ["launcher", "variable", "Capture"])
@exhaustive_but("launcher", reason="one door is in make test")
def test_a_compiled_training_has_the_same_graphs_and_runs_eagerly_only_where_it_is_captured(
    door: str, tmp_path: Path, plain: Ended
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(COMPILED))
    if door == "launcher":
        options = ("--capture", "run", "--every", "2", "--min-iterations", "2")
        ended = python(*LAUNCH, *options, "train.py", cwd=tmp_path)
    elif door == "variable":
        environment = {"RANKTAPE_CAPTURE": "run", "RANKTAPE_EVERY": "2", "RANKTAPE_MIN_ITERATIONS": "2"}
        ended = python("train.py", cwd=tmp_path, env=environment)
    else:
        ended = python("train.py", "capture", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    runs, counts, loss = plain.stdout.splitlines()
    assert (runs, counts) == ("1 1 1 1", "1 {} {}")
    assert ended.stdout.splitlines() == ["0 1 0 1", counts, loss]
    assert open_run(tmp_path / "run").iterations == [0, 2]
    assert any("runs eagerly in captured iterations" in line for line in own_lines(ended)), ended.stderr
