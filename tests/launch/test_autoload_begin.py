"""At which forward does a capture by RANKTAPE_CAPTURE=URL begin, of compiled, traced, frozen and other models?"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ranktape.storage import open_run
from tests.exhaustive import exhaustive, exhaustive_but
from tests.launch.processes import Ended, errors, own_lines, python
from tests.launch.test_autoload import RUN, run_script
from tests.launch.test_runner import LAUNCH, write_script


@pytest.mark.parametrize(
    "compiled",
    [
        "model = torch.compile(model, backend='eager')",
        pytest.param("model.compile(backend='eager')", marks=exhaustive("it takes the way of its neighbours")),
        "model[2].compile(backend='eager')",
    ],
)
@exhaustive_but("model = torch.compile(model, backend='eager')", reason="one way to compile is in make test")
def test_a_compiled_model_is_recorded_from_its_first_iteration(compiled: str, tmp_path: Path) -> None:
    lines = write_script(tmp_path).read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("optimizer ="))
    source = "\n".join([*lines[:at], compiled, *lines[at:]])
    (tmp_path / "train.py").write_text(source)
    plain = python("-W", "error", "train.py", cwd=tmp_path)
    ended = python("-W", "error", "train.py", cwd=tmp_path, env={**RUN, "RANKTAPE_MIN_ITERATIONS": "3"})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == plain.stdout
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1, 2]
    # Two layers; the input of the first needs no gradient.
    assert len(run.select(iteration=0)) == 8 + 7
    assert [line for line in ended.stderr.splitlines() if "Warning" in line] == []


COMPILED_STEP = """
    import torch

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager", fullgraph=True)
    def loss_of(batch):
        return model(batch).square().mean()

    for step in range(3):
        loss_of(torch.ones(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained", model.weight.sum().item().hex())
"""


def test_a_whole_graph_stays_whole_while_the_training_is_awaited(tmp_path: Path) -> None:
    ended = run_script(tmp_path, COMPILED_STEP)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("trained")
    assert len(open_run(tmp_path / "run").select(tensor_name="weight")) == 1


def test_transformations_and_evaluation_do_not_begin_it(tmp_path: Path) -> None:
    source = """
        import torch
        from torch import nn

        nn.Dropout(0.5)(torch.ones(3))
        nn.Linear(3, 3).eval()(torch.ones(3))
        with torch.no_grad():
            nn.Linear(3, 3)(torch.ones(3))
        print("evaluated")
    """
    ended = run_script(tmp_path, source)
    assert (ended.returncode, ended.stdout) == (0, "evaluated\n")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("ranktape: nothing was recorded: models ran, but none in training mode: ")
    assert "RANKTAPE_SELECT mode=eval records inference" in line
    assert not (tmp_path / "run").exists()


ASKED = """
    import torch
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Linear(3, 3)
    torch.jit.trace(model, torch.ones(2, 3))
    torch.export.export(model, (torch.ones(2, 3),))
    with FakeTensorMode():
        nn.Linear(3, 3)(torch.ones(2, 3))
    print("asked")
"""


def test_a_model_that_is_only_traced_or_asked_for_shapes_does_not_begin_it(tmp_path: Path) -> None:
    ended = run_script(tmp_path, ASKED)
    assert (ended.returncode, ended.stdout) == (0, "asked\n"), ended.stderr
    assert own_lines(ended) == []
    assert not (tmp_path / "run").exists()


INFERENCE = """
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, 4)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))

        def forward(self, tokens):
            state = self.embedding(tokens)
            for layer in self.layers:
                state = layer(state)
            return state

    model = Model().eval()
    with torch.inference_mode():
        for _ in range(2):
            model(torch.tensor([[1, 2, 3]]))
    print("inferred")
"""


@pytest.mark.parametrize("settings", [{"RANKTAPE_LAYERS": "all"}, {"RANKTAPE_SELECT": "mode=eval"}])
def test_a_pass_of_inference_begins_it_where_such_passes_are_asked_for(
    settings: dict[str, str], tmp_path: Path
) -> None:
    ended = run_script(tmp_path, INFERENCE, RANKTAPE_MIN_ITERATIONS="2", **settings)
    assert (ended.returncode, ended.stdout) == (0, "inferred\n"), ended.stderr
    assert errors(ended) == []
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1]
    kind = "hidden" if "RANKTAPE_LAYERS" in settings else "linear"
    assert len(run.select(layer_type=kind, tensor_name="output", mode="eval")) == 2 * 3


FROZEN = """
    import torch
    from torch import nn

    class Deep(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.parts = nn.ModuleList([Deep(depth - 1), Deep(depth - 1)] if depth else [nn.Linear(2, 2)])

        def forward(self, state):
            for part in self.parts:
                state = part(state)
            return state

    asked = []
    walk = nn.Module.named_modules
    def counted(module, *words, **named):
        asked.append(module)
        return walk(module, *words, **named)

    tree = Deep(7).requires_grad_(False)
    tree(torch.ones(1, 2))
    nn.Module.named_modules = counted
    tree(torch.ones(1, 2))
    print(len(asked))
    nn.Module.named_modules = walk
    tree.parts[1].requires_grad_(True)
    tree(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(tree.parameters(), lr=0.1).step()
"""


def test_a_frozen_tree_is_asked_once_for_a_forward_and_begins_when_it_learns(tmp_path: Path) -> None:
    ended = run_script(tmp_path, FROZEN)
    assert ended.returncode == 0, ended.stderr
    # No module is walked through by torch's generators, which call one another.
    assert int(ended.stdout) == 0
    run = open_run(tmp_path / "run")
    assert run.iterations == [0]
    assert len(run.select(tensor_name="grad_weight")) == 2**6
    assert len(run.select(tensor_name="weight")) == 2**7


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
