"""Does RANKTAPE_CAPTURE=URL record a training whose command line is unchanged, and say how it ended?"""

from __future__ import annotations

import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

import ranktape_autoload
from ranktape.storage import open_run
from tests.exhaustive import exhaustive, exhaustive_but
from tests.launch.processes import CHECKOUT, PLAIN, Ended, errors, own_lines, python, torchrun
from tests.launch.test_runner import LAUNCH, command, contents, write_script

RUN = {"RANKTAPE_CAPTURE": "run"}
"""What a shell exports: record into the folder `run`."""


def run_script(folder: Path, source: str, *words: str, **environment: str) -> Ended:
    """Run a training script that the environment asks to record."""
    (folder / "train.py").write_text(textwrap.dedent(source))
    return python("train.py", *words, cwd=folder, env={**RUN, **environment})


ALIKE = exhaustive("it takes the way of its neighbours")


def reason_of(url: Path) -> str:
    """Why the run says that its capture ended."""
    verdict = open_run(url).verdict()
    return " ".join([*verdict.missing, verdict.message()])


# `import torch` comes first.


def test_without_a_variable_nothing_of_ours_is_imported(tmp_path: Path) -> None:
    script = "import sys, torch; print(*(name for name in sys.modules if name.startswith('ranktape')))"
    assert python("-c", script, cwd=tmp_path).stdout.split() == ["ranktape_autoload"]
    assert python("-c", script, cwd=tmp_path, env={"RANKTAPE_CAPTURE": ""}).stdout.split() == ["ranktape_autoload"]


@pytest.mark.parametrize(
    "broken",
    [
        "raise SystemExit(3)",
        pytest.param("raise ImportError('numba is not there')", marks=ALIKE),
        pytest.param("def f(:", marks=ALIKE),
        "raise BaseException('odd\\nlines')",
    ],
)
def test_a_broken_installation_does_not_break_import_torch(broken: str, tmp_path: Path) -> None:
    (tmp_path / "ranktape").mkdir()
    (tmp_path / "ranktape" / "__init__.py").write_text(broken + "\n")
    ended = python("-c", "import torch; print('fine')", cwd=tmp_path, env={**RUN, "PYTHONPATH": str(tmp_path)})
    assert (ended.returncode, ended.stdout) == (0, "fine\n")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("ranktape: error: ")
    assert line.endswith("; the training continues without a capture")


def test_a_process_without_stderr_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "ranktape").mkdir()
    (tmp_path / "ranktape" / "__init__.py").write_text("raise SystemExit(3)\n")
    script = "import sys; sys.stderr = None; import torch; print('fine')"
    ended = python("-c", script, cwd=tmp_path, env={**RUN, "PYTHONPATH": str(tmp_path)})
    assert (ended.returncode, ended.stdout) == (0, "fine\n")


def test_torchs_own_switch_turns_it_off(tmp_path: Path) -> None:
    write_script(tmp_path)
    ended = python("train.py", cwd=tmp_path, env={**RUN, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert ended.stdout.startswith("trained")
    assert not (tmp_path / "run").exists()


SAVES = """
    import torch
    from ranktape.capture import get_tensor_saver, save_tensor

    model = torch.nn.Linear(4, 4)
    output = model(torch.ones(2, 4))
    save_tensor(output, "mine", "forward", "bf16", "output")
    get_tensor_saver().close()
"""


def test_the_variables_of_the_legacy_tools_record_what_hooks_see_and_what_is_saved_by_hand(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SAVES))
    variables = {"TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": "logs", "TENSOR_SAVER_ITERATION": "7"}
    for words in (("train.py",), (*LAUNCH, "train.py")):
        ended = python(*words, cwd=tmp_path, env=variables)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.count("ranktape: capturing ") == 1
    run = open_run(tmp_path / "logs")
    # No optimizer stepped; the second program added to the first.
    assert [(status.iteration, status.attempt, status.state) for status in run.status()] == [
        (7, 0, "complete"),
        (7, 1, "complete"),
    ]
    for attempt in (0, 1):
        records = run.select().select(attempt=attempt)
        assert sorted(records.column("tensor_name")) == ["bias", "input", "output", "output", "weight"]
    off = python(
        "-c", "import sys, torch; print('ranktape' in sys.modules)", cwd=tmp_path, env={"TENSOR_SAVE_ENABLED": "0"}
    )
    assert off.stdout == "False\n"


# One process: what is recorded, and how it ends.

DRAWS = """
    import random
    import numpy
    print(random.random(), numpy.random.rand(), torch.rand(1).item())
"""
"""The states of every generator of random numbers, after the training."""


def test_the_launcher_and_the_variable_record_the_same(tmp_path: Path) -> None:
    seeds = "import random, numpy\nrandom.seed(1)\nnumpy.random.seed(1)"
    write_script(tmp_path, before=seeds, after=DRAWS)
    words = ("train.py", "--help", "--capture", "other", "-m", "--", "--min-iterations=0")
    plain = python(*words, cwd=tmp_path)
    assert str(list(words)) in plain.stdout
    launched = python(*LAUNCH, "--capture", "launched", "--start-at", "1", *words, cwd=tmp_path)
    ended = python(*words, cwd=tmp_path, env={**RUN, "RANKTAPE_START_AT": "1"})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == plain.stdout == launched.stdout
    *lines, last = own_lines(launched)
    assert [line.replace("/run:", "/launched:") for line in own_lines(ended)] == lines
    assert last.startswith("ranktape: launched has 1 iteration of 1 rank, ")
    assert "ranktape status launched; ranktape analyze report launched -o report.html" in last
    assert open_run(tmp_path / "run").iterations == [1]
    assert contents(tmp_path / "run") == contents(tmp_path / "launched")
    assert not (tmp_path / "other").exists()


@exhaustive("make test records scripts by the variable")
def test_a_module_an_isolated_interpreter_and_a_command_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    write_script(tmp_path / "package")
    for url, words in {
        "module": ("-m", "package.train", "x"),
        "isolated": ("-I", "package/train.py"),
        "command": ("-c", (tmp_path / "package" / "train.py").read_text()),
    }.items():
        ended = python(*words, cwd=tmp_path, env={"RANKTAPE_CAPTURE": url})
        assert ended.returncode == 0, ended.stderr
        assert open_run(tmp_path / url).iterations == [0]


@pytest.mark.parametrize(
    ("after", "exit_code", "reason"),
    [
        ("raise ValueError('mine')", 1, "the training failed (ValueError)"),
        # The launcher alone learns of an exit code.
        ("import sys; sys.exit(7)", 7, "the training ended after 3 iterations"),
        pytest.param("import sys; sys.exit('no data left')", 1, "the training ended after 3 iterations", marks=ALIKE),
        pytest.param("import sys; sys.exit(0)", 0, "the training ended after 3 iterations", marks=ALIKE),
        pytest.param("import os; os._exit(9)", 9, "", marks=ALIKE),
        ("import signal; signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_the_exit_code_is_the_trainings_own_and_the_run_says_why_it_ended(
    after: str, exit_code: int, reason: str, tmp_path: Path
) -> None:
    write_script(tmp_path, after=after)
    ended = python("train.py", cwd=tmp_path, env={**RUN, "RANKTAPE_MIN_ITERATIONS": "9"})
    assert ended.returncode == exit_code, ended.stderr
    assert ended.stdout.startswith("trained")
    assert errors(ended) == []
    assert "ranktape/launch" not in ended.stderr
    assert command("status", tmp_path / "run", "--require-minimum").exit_code == 3
    assert open_run(tmp_path / "run").iterations == [0, 1, 2]
    assert reason in reason_of(tmp_path / "run")


def test_an_exit_that_the_script_takes_back_is_no_failure(tmp_path: Path) -> None:
    after = """
        try:
            sys.exit(3)
        except SystemExit:
            pass
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    """
    write_script(tmp_path, after=after)
    ended = python("train.py", cwd=tmp_path, env={**RUN, "RANKTAPE_START_AT": "9"})
    assert ended.returncode == 0
    assert "the training ended after 4 iterations" in reason_of(tmp_path / "run")


# Users' mistakes.


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints without a capture."""
    folder = tmp_path_factory.mktemp("plain")
    write_script(folder)
    return python("train.py", cwd=folder).stdout


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        ({"RANKTAPE_EVERY": "0"}, "RANKTAPE_EVERY"),
        pytest.param({"RANKTAPE_MIN_ITERATONS": "2"}, "RANKTAPE_MIN_ITERATIONS", marks=ALIKE),
        pytest.param({"RANKTAPE_CAPTURE": "file.txt/run"}, "file.txt/run", marks=ALIKE),
        pytest.param({"RANKTAPE_CAPTURE": "nosuch://bucket/run"}, "nosuch", marks=ALIKE),
        ({"RANKTAPE_CAPTURE": "there"}, "RANKTAPE_OVERWRITE=true"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_mistake_is_one_line_and_ends_the_training_only_if_asked(
    environment: dict[str, str], match: str, plain: str, tmp_path: Path
) -> None:
    write_script(tmp_path)
    (tmp_path / "file.txt").write_text("a file")
    if environment.get("RANKTAPE_CAPTURE") == "there":
        assert python("train.py", cwd=tmp_path, env=environment).returncode == 0
    ended = python("train.py", cwd=tmp_path, env={**RUN, **environment})
    assert (ended.returncode, ended.stdout) == (0, plain)
    (line,) = errors(ended)
    assert match in line
    assert line.endswith("; the training continues without a capture")
    assert "Traceback" not in ended.stderr

    strict = python("train.py", cwd=tmp_path, env={**RUN, **environment, "RANKTAPE_STRICT": "true"})
    assert strict.returncode in {1, 2}
    assert strict.stdout == ""
    assert len(errors(strict)) == 1, strict.stderr
    assert match in errors(strict)[0]
    assert "Traceback" not in strict.stderr


STACK = """
    import os
    import torch
    from torch import nn

    for name in {folders}:
        os.makedirs(name, exist_ok=True)
        os.chdir(name)
    model = nn.Sequential(nn.Embedding(8, 4), nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(3)]))
    model.forward = lambda tokens: model[1][2](model[1][1](model[1][0](model[0](tokens))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.tensor([[1, 2, 3]])).square().mean().backward()
        optimizer.step()
    print("trained")
"""
"""A stack of three layers."""


@exhaustive("make test has other mistakes that end no training")
def test_a_layer_that_the_model_has_not_ends_no_training_that_did_not_ask_for_it(tmp_path: Path) -> None:
    ended = run_script(tmp_path, STACK.format(folders=()), RANKTAPE_LAYERS="7")
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
    assert "Traceback" not in ended.stderr
    (line,) = [line for line in own_lines(ended) if "[rank 0] capture disabled itself" in line]
    assert "layers 0 to 2" in line
    strict = run_script(
        tmp_path, STACK.format(folders=()), RANKTAPE_LAYERS="7", RANKTAPE_STRICT="1", RANKTAPE_CAPTURE="s"
    )
    assert (strict.returncode, strict.stdout) == (1, "")
    assert "RANKTAPE_LAYERS 7 is not in the model" in strict.stderr
    launched = python(*LAUNCH, "--capture", "l", "--layers", "7", "train.py", cwd=tmp_path)
    assert (launched.returncode, launched.stdout) == (2, "")
    assert "--layers 7 is not in the model" in errors(launched)[0]


def test_paths_are_meant_from_where_the_program_began(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("min_iterations = 2\nspill_dir = 'spilled'\n")
    settings = {"RANKTAPE_CAPTURE_CONFIG": "settings.toml"}
    ended = run_script(tmp_path, STACK.format(folders=("outputs", "today")), **settings)
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1]
    assert "run" in {path.name for path in tmp_path.iterdir()}
    assert list((tmp_path / "outputs" / "today").iterdir()) == []


RANKS = """
    import os
    import torch
    import torch.distributed as dist

    if os.environ["RANK"] == "1":
        os.environ["RANKTAPE_EVERY"] = "none"
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


@pytest.mark.distributed
@exhaustive("it waits")
def test_a_rank_that_gave_up_is_not_waited_for_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(RANKS))
    began = time.monotonic()
    ended = torchrun("train.py", cwd=tmp_path, env=RUN)
    assert time.monotonic() - began < 100, ended.stderr
    assert ended.returncode == 0, ended.stderr
    assert any("[rank 1] RANKTAPE_EVERY='none'" in line for line in errors(ended)), ended.stderr
    assert "RANKTAPE_EVERY='none' is not allowed" in reason_of(tmp_path / "run")


def test_the_tests_run_what_is_in_the_checkout() -> None:
    assert Path(str(ranktape_autoload.__file__)).parent == CHECKOUT
    assert sys.version_info >= (3, 11)


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
    plain_compiled = python("-W", "error", "train.py", cwd=tmp_path)
    ended = python("-W", "error", "train.py", cwd=tmp_path, env={**RUN, "RANKTAPE_MIN_ITERATIONS": "3"})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == plain_compiled.stdout
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
def plain_compiled(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The compiled training without us."""
    folder = tmp_path_factory.mktemp("plain_compiled")
    (folder / "train.py").write_text(textwrap.dedent(COMPILED))
    return python("train.py", cwd=folder)


@pytest.mark.parametrize("door", ["launcher", "variable", "Capture"])
@exhaustive_but("launcher", reason="one door is in make test")
def test_a_compiled_training_has_the_same_graphs_and_runs_eagerly_only_where_it_is_captured(
    door: str, tmp_path: Path, plain_compiled: Ended
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
    runs, counts, loss = plain_compiled.stdout.splitlines()
    assert (runs, counts) == ("1 1 1 1", "1 {} {}")
    assert ended.stdout.splitlines() == ["0 1 0 1", counts, loss]
    assert open_run(tmp_path / "run").iterations == [0, 2]
    assert any("runs eagerly in captured iterations" in line for line in own_lines(ended)), ended.stderr


WITH_WORKERS = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self): return 12
        def __getitem__(self, index): return nn.Linear(8, 8)(torch.full((1, 8), float(index))).detach()[0] * 0 + index

    def main():
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1])
        for batch in loader:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {loss.item().hex()}\\n", end="", flush=True)

    # In one write: several processes share stdout.
    print(f"loaded as {__name__}\\n", end="", flush=True)
    if __name__ == "__main__":
        main()
"""


DOORS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "launcher": ((*LAUNCH, "--capture", "run", "--min-iterations", "3"), {}),
    "variable": ((), {**RUN, "RANKTAPE_MIN_ITERATIONS": "3"}),
}
"""The words before a script and the variables that have three of its iterations recorded."""


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("method", "num_loads"),
    [pytest.param("spawn", 2, marks=exhaustive("in make test they are forked")), ("fork", 0)],
)
@exhaustive("make test has processes that record nothing")
def test_data_workers_train_nothing_and_record_nothing(method: str, num_loads: int, door: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(WITH_WORKERS))
    plain = python("train.py", method, cwd=tmp_path)
    words, environment = DOORS[door]
    ended = python(*words, "train.py", method, cwd=tmp_path, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    assert ended.stdout.count("loaded as __mp_main__") == num_loads
    assert ended.stdout.count("step") == 3
    assert errors(ended) == []
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1, 2]
    # One linear layer, whose input needs no gradient: three values and a bias, three of their gradients.
    assert len(run.select()) == 3 * 7


@exhaustive("make test has workers that record nothing")
def test_a_child_of_the_trainer_is_not_recorded_and_the_child_of_a_launcher_is(tmp_path: Path) -> None:
    write_script(tmp_path, name="child.py")
    child = "import subprocess, sys\nsubprocess.run([sys.executable, 'child.py'], check=True)"
    write_script(tmp_path, after=child)
    ended = python("train.py", cwd=tmp_path, env=RUN)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained") == 2
    assert errors(ended) == []
    assert len(open_run(tmp_path / "run").status()) == 1

    (tmp_path / "parent.py").write_text(f"import torch\n{child}\n")
    ended = python("parent.py", cwd=tmp_path, env={"RANKTAPE_CAPTURE": "launched"})
    assert ended.returncode == 0, ended.stderr
    assert open_run(tmp_path / "launched").iterations == [0]


def test_our_own_commands_and_launcher_do_not_record_where_the_variable_says(tmp_path: Path) -> None:
    write_script(tmp_path)
    exported = {"RANKTAPE_CAPTURE": "exported"}
    ended = python(*LAUNCH, "--capture", "run", "train.py", cwd=tmp_path, env=exported)
    assert ended.returncode == 0, ended.stderr
    assert errors(ended) == []
    assert open_run(tmp_path / "run").iterations == [0]
    told = python("-m", "ranktape.launch.cli", "status", "run", cwd=tmp_path, env=exported)
    assert told.returncode == 0
    assert "minimum met" in told.stdout
    assert not (tmp_path / "exported").exists()


USERS_TEST = """
    import torch

    def test_training():
        model = torch.nn.Linear(3, 3)
        model(torch.ones(2, 3)).sum().backward()
        torch.optim.SGD(model.parameters()).step()
"""


def test_the_tests_of_somebody_are_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(textwrap.dedent(USERS_TEST))
    ended = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py", cwd=tmp_path, env=RUN)
    assert ended.returncode == 0, ended.stdout
    assert not (tmp_path / "run").exists()


OWN_CAPTURE = """
    import torch
    from ranktape.capture import Capture

    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(WARM_UP):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    with Capture("own"):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    print("trained")
"""


@pytest.mark.parametrize("warm_up", [0, 1])
def test_a_capture_of_the_script_takes_the_place_of_ours(warm_up: int, tmp_path: Path) -> None:
    ended = run_script(tmp_path, OWN_CAPTURE.replace("WARM_UP", str(warm_up)), RANKTAPE_MIN_ITERATIONS="5")
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
    assert errors(ended) == []
    assert open_run(tmp_path / "own").iterations == [0]
    assert (tmp_path / "run").exists() == bool(warm_up)
    if warm_up:
        assert "the training began a capture of its own" in reason_of(tmp_path / "run")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "environment", [{"RANKTAPE_EVERY": "0"}, pytest.param({"RANKTAPE_CAPTURE": "/proc/run"}, marks=ALIKE)]
)
def test_two_ranks_say_a_mistake_once_and_train(environment: dict[str, str], tmp_path: Path) -> None:
    ended = torchrun(PLAIN, "--steps", "2", cwd=tmp_path, env={**RUN, **environment})
    assert ended.returncode == 0, ended.stderr
    assert "final loss" in ended.stdout
    assert len(errors(ended)) == 1, ended.stderr


SPAWNED = """
    import os
    import torch
    import torch.distributed as dist

    def train(rank):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["PORT"])
        dist.init_process_group("gloo", rank=rank, world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        if FAILS:
            raise ValueError("mine")
        dist.barrier()
        dist.destroy_process_group()

    if __name__ == "__main__":
        torch.multiprocessing.start_processes(train, nprocs=2, start_method="METHOD")
"""


def free_port() -> str:
    """A port for the ranks of a test to meet at."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("method", "fails"), [pytest.param("spawn", False, marks=ALIKE), ("fork", False), ("fork", True)]
)
def test_processes_that_the_script_starts_as_ranks_are_recorded(method: str, fails: bool, tmp_path: Path) -> None:  # noqa: FBT001
    source = SPAWNED.replace("METHOD", method).replace("FAILS", str(fails))
    ended = run_script(tmp_path, source, PORT=free_port(), RANKTAPE_MIN_ITERATIONS="9" if fails else "2")
    assert (ended.returncode == 0) == (not fails), ended.stderr
    assert errors(ended) == []
    if not fails:
        run = open_run(tmp_path / "run")
        assert run.iterations == [0, 1]
        assert {record.rank for record in run.select()} == {0, 1}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("method", "min_iterations"), [pytest.param("spawn", 2, marks=ALIKE), ("fork", 2), ("fork", 9)]
)
@exhaustive_but("fork-2", reason="two ranks are in make test")
def test_the_launcher_records_ranks_that_the_script_starts(method: str, min_iterations: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SPAWNED).replace("METHOD", method).replace("FAILS", "False"))
    options = ("--capture", "run", "--min-iterations", str(min_iterations))
    ended = python(*LAUNCH, *options, "train.py", cwd=tmp_path, env={"PORT": free_port()})
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1]
    assert {record.rank for record in run.select()} == {0, 1}
    if min_iterations == 2:
        assert (ended.returncode, errors(ended)) == (0, []), ended.stderr
        assert "run has 2 iterations of 2 ranks" in own_lines(ended)[-1]
    else:
        assert ended.returncode == 1
        (error,) = errors(ended)
        assert "2 of 9 guaranteed iterations are stored complete" in error


@pytest.mark.distributed
@exhaustive("make test has failing ranks in tests/launch/test_autoload.py")
def test_a_rank_that_fails_is_not_held_up_by_the_others(tmp_path: Path) -> None:
    after = "import time\nif os.environ['RANK'] == '1': raise ValueError('mine')\ntime.sleep(60)"
    write_script(tmp_path, after=after)
    ended = torchrun("train.py", cwd=tmp_path, env={**RUN, "RANKTAPE_MIN_ITERATIONS": "9"})
    assert ended.returncode == 1
    assert "ValueError: mine" in ended.stderr
    assert ended.stdout.count("trained") == 2
    assert open_run(tmp_path / "run").iterations == [0, 1, 2]
