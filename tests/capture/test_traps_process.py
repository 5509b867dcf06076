"""Does a capture leave alone what is around the training: devices, other ranks, child processes, what calls it?"""

from __future__ import annotations

import ast
import gc
import os
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import ranktape.capture
from ranktape.capture import Capture
from ranktape.capture.rendezvous import RankPlace, Rendezvous
from ranktape.capture.staging.ring_file import Counter as Ring
from ranktape.storage import open_run
from tests.capture.models import NUM_TENSORS, Net
from tests.capture.trainings import steps

WAITING = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "unique", "_to_copy", "record_stream")
"""Operations for which the host waits until a device has computed, or that copy from it."""


class Operations(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_a_device(tmp_path: Path) -> None:
    """No value is asked for on the thread of the training: all that is added are views and copies into the ring."""
    torch.manual_seed(0)
    model = Net()
    with Operations() as plain:
        steps(model, 2)
    with Capture(tmp_path / "run", min_iterations=2), Operations() as captured:
        steps(model, 2)
    assert {name: captured.counts[name] for name in WAITING} == {name: plain.counts[name] for name in WAITING}
    added = captured.counts - plain.counts
    assert added["view"] > 0
    assert set(added) <= {"view", "detach", "alias", "copy_", "as_strided", "_unsafe_view", "view_as", "empty", "clone"}
    assert len(open_run(tmp_path / "run").select()) == 2 * NUM_TENSORS


COLLECTIVES = {name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter"))}
COLLECTIVES |= {"barrier", "monitored_barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv", "full_tensor"}
COLLECTIVES |= {"redistribute", "new_group", "wait_tensor", "synchronize", "item"}
"""What talks to other ranks, or waits for a device."""

MAY_CALL = {"device.py": {"synchronize"}, "parts.py": {"wait_tensor"}}
"""Copies from a device wait for their own events; a training has begun a reduction itself."""


def test_no_module_of_the_training_process_talks_to_other_ranks() -> None:
    root = Path(ranktape.capture.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        called = {
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        if "torch" in path.read_text(encoding="utf-8"):
            found[path.name] = called & COLLECTIVES - MAY_CALL.get(path.name, set())
    assert not {name: called for name, called in found.items() if called}


@pytest.fixture
def alone_in_a_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone_in_a_group")
@pytest.mark.filterwarnings("ignore")  # DDP warns of a group of one
def test_the_group_of_the_training_has_as_many_collectives_as_before(tmp_path: Path) -> None:
    model = DistributedDataParallel(Net())
    group: Any = dist.group.WORLD
    steps(model, 2)
    numbers = [group._get_sequence_number_for_group()]
    steps(model, 2)
    numbers.append(group._get_sequence_number_for_group())
    with Capture(tmp_path / "run", min_iterations=2):
        steps(model, 2)
    numbers.append(group._get_sequence_number_for_group())
    assert numbers[1] > numbers[0]
    assert numbers[2] - numbers[1] == numbers[1] - numbers[0]
    assert set(open_run(tmp_path / "run").select().column("module")) >= {"embed", "layers.0.up"}


def test_a_forked_process_changes_nothing_and_is_not_waited_for(tmp_path: Path) -> None:
    """Workers that load data are forked in the middle of an iteration, with the hooks on, and outlive the training."""
    model = Net()
    with Capture(tmp_path / "run", min_iterations=2) as capture:
        steps(model, 1)
        model(torch.randn(2, 4, 16)).sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            steps(model, 3)
            time.sleep(90)
            os._exit(0)
        model.zero_grad()
        steps(model, 1)
        began = time.monotonic()
        assert capture.close().met
        assert time.monotonic() - began < 45
    os.kill(child, 9)
    assert os.waitpid(child, 0)[1] == 9
    run = open_run(tmp_path / "run")
    assert run.iterations == [0, 1]
    assert len(run.select(iteration=0)) == NUM_TENSORS


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda capture: capture.trigger("the node is taken away"), id="trigger"),
        pytest.param(lambda capture: capture.step(7), id="step"),
        pytest.param(lambda _: signal.raise_signal(signal.SIGUSR1), id="signal"),
    ],
)
def test_a_forked_process_writes_nothing_into_the_ring(tmp_path: Path, act: Callable[[Capture], None]) -> None:
    """Workers that load data have the signal handlers of the training, and a scheduler signals all processes."""
    model = Net()
    with Capture(tmp_path / "run", record_last=1) as capture:
        steps(model, 1)
        ring = capture._process.ring
        names = (Ring.PUBLISHED, Ring.SIGNALS, Ring.STEP)
        before = [ring.counter(name) for name in names]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            code = 1
            try:
                act(capture)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert [ring.counter(name) for name in names] == before
        steps(model, 1)
    assert open_run(tmp_path / "run").triggers() == []


def test_a_forked_process_that_leaves_the_block_ends_nothing(tmp_path: Path) -> None:
    model = Net()
    with Capture(tmp_path / "run", min_iterations=2) as capture:
        steps(model, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            code = 1
            try:
                capture.__exit__(SystemExit, SystemExit(0), None)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        steps(model, 1)
    assert capture.close().met


def test_ranks_whose_store_has_gone_are_not_known_to_agree() -> None:
    """The one that served it may have died; that must not raise in another one's training."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in address.items():
            patch.setenv(name, value)
        meeting = Rendezvous(RankPlace(rank=0, world_size=2, num_local_ranks=2, restart=0), seconds=1)
    assert not meeting.count("silent")
    assert meeting.count("silent")
    del server
    gc.collect()
    assert not meeting.count("silent")


def test_the_writer_holds_nothing_of_the_trainings(tmp_path: Path) -> None:
    """But the console of rank 0, to say how the run ended if the trainer is killed; no signal reaches it."""
    with Capture(tmp_path / "run") as capture:
        process = capture._process._process
        assert process is not None
        assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid
        own, held = (
            [str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in (0, 1, 2)]
            for pid in (os.getpid(), process.pid)
        )
        assert held[1] == own[2]
        assert not {held[0], held[2], own[0], own[1]} & {held[1], own[2]}
        assert not {own[0], own[1]} & {held[0], held[2]} - {"/dev/null"}
        steps(Net(), 1)


class Stepping(nn.Module):
    """Ends the iteration in the middle of its own forward, in a hook of a part that is being called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.capture: Capture | None = None
        for module in (self, self.second):
            module.register_forward_pre_hook(self._step)

    def forward(self, *, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(input=self.first(input=hidden))  # type: ignore[no-any-return]

    def _step(self, *_: object) -> None:
        if self.capture is not None:
            self.capture.step()


def test_hooks_that_are_taken_off_while_their_module_is_called_break_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are called all the same, and without the keywords that they were promised."""
    torch.manual_seed(0)
    model = Stepping()
    batch = torch.randn(2, 16)
    plain = model(hidden=batch)
    with Capture(tmp_path / "run", model=model, advance_on="step", max_iterations=100) as capture:
        for stepping in (None, capture, None):
            model.capture = stepping
            found = model(hidden=batch)
            assert torch.equal(found, plain)
            found.sum().backward()
            capture.step()
    assert capture.close().met
    # A site whose hook fails is told of, and nothing more is recorded of it.
    assert "nothing more is recorded" not in capfd.readouterr().err
    outputs = open_run(tmp_path / "run").select(module="second", tensor_name="output")
    assert {0, capture.iteration - 1} <= set(outputs.column("iteration").tolist())


def test_a_step_that_is_run_again_is_another_microbatch(tmp_path: Path) -> None:
    """Megatron-core's rerun machine repeats the passes of an iteration to compare their results."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(2, 4, 16)
    with Capture(tmp_path / "run", model=model):
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
        optimizer.step()
    first, second = (
        {
            (record.module, record.tensor_name): record.checksum
            for record in open_run(tmp_path / "run").select(microbatch=microbatch)
            if record.tensor_name != "weight"
        }
        for microbatch in (0, 1)
    )
    assert first == second
    assert first


def test_a_model_that_was_given_can_be_exported_from_its_source(tmp_path: Path) -> None:
    """Without a model a hook of all modules waits for one: that is what `torch.export` cannot read then."""
    model = Net()
    batch = torch.randn(2, 4, 16)
    plain = [str(node.target) for node in torch.export.export(model, (batch,), strict=True).graph.nodes]
    with Capture(tmp_path / "run", model=model) as capture:
        exported = torch.export.export(model, (batch,), strict=True)
        steps(model, 1)
    assert [str(node.target) for node in exported.graph.nodes] == plain
    assert capture.close().met
    assert len(open_run(tmp_path / "run").select()) == NUM_TENSORS
