"""Does a capture follow the training, leave nothing behind, and say what went wrong?"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ranktape.capture import Capture
from ranktape.capture.console import Console
from ranktape.capture.hooks.hook import MODE
from ranktape.capture.settings.options import CaptureOptions
from ranktape.capture.staging.ring_file import SlotKind
from ranktape.errors import CaptureError, RunExistsError, StorageError, UsageError
from ranktape.storage import IterationState, open_run
from ranktape.storage.format.live import TriggerKind
from ranktape.storage.format.progress import RunVerdict
from tests.capture.models import Net, Training, train
from tests.capture.trainings import captured, steps
from tests.waiting import until


def num_hooks(model: nn.Module) -> int:
    """Hooks of any kind on the modules of a model and on their weights."""
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return hooks + sum(len(weight._backward_hooks or {}) for weight in model.parameters())


def test_nothing_is_attached_outside_of_captured_iterations(tmp_path: Path) -> None:
    original = F.scaled_dot_product_attention
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    with Capture(tmp_path / "run", model=model, start_at=2, every=2, min_iterations=2):
        for _ in range(7):
            seen.append((num_hooks(model) > 0, MODE.hooks is not None))
            assert F.scaled_dot_product_attention is original
            model(torch.randn(2, 4, 16)).square().mean().backward()
            optimizer.step()
    # Iteration 0 is watched from its first forward on, to say what the capture will cost; 2 and 4 are captured.
    assert seen == [(iteration in {2, 4},) * 2 for iteration in range(7)]
    assert num_hooks(model) == 0
    assert F.scaled_dot_product_attention is original


def test_a_layer_alone_is_a_model(tmp_path: Path) -> None:
    names = sorted(captured(nn.Linear(16, 16), tmp_path / "run").select().column("tensor_name"))
    assert names == ["bias", "grad_bias", "grad_output", "grad_weight", "input", "output", "weight"]


@pytest.mark.parametrize(
    ("wrap", "modules"), [(nn.Sequential, ["0", "Sequential1.0"]), (lambda layer: layer, ["", "Linear1"])]
)
def test_two_models_are_told_apart(wrap: Callable[[nn.Module], nn.Module], modules: list[str], tmp_path: Path) -> None:
    models = wrap(nn.Linear(16, 16)), wrap(nn.Linear(16, 16))
    with Capture(tmp_path / "run", advance_on="step") as capture:
        models[1](models[0](torch.randn(2, 16))).sum().backward()
        capture.step()
    records = open_run(tmp_path / "run").select(tensor_name="weight")
    assert sorted(records.column("module")) == modules


def test_two_optimizers_advance_once(tmp_path: Path) -> None:
    with Capture(tmp_path / "run", start_at=1, min_iterations=2) as capture:
        steps(Net(), 4, optimizers=2)
        assert capture.iteration == 4
    assert open_run(tmp_path / "run").iterations == [1, 2]


def test_an_optimizer_made_anew_goes_on(tmp_path: Path) -> None:
    model = Net()
    with Capture(tmp_path / "run", min_iterations=3) as capture:
        steps(model, 2)
        steps(model, 2)
        assert capture.iteration == 4
    assert open_run(tmp_path / "run").iterations == [0, 1, 2]


def test_iterations_without_an_optimizer(tmp_path: Path) -> None:
    model = Net()
    with Capture(tmp_path / "run", min_iterations=2, every=5) as capture:
        for _ in range(8):
            model(torch.randn(2, 4, 16)).sum().backward()
            capture.step()
        capture.step(11)
        for wrong in (3, 11, 2**100):
            with pytest.raises(UsageError, match=f"iteration {wrong} is not allowed: give one after the running one"):
                capture.step(wrong)
    assert open_run(tmp_path / "run").iterations == [0, 5]


def test_a_host_budget_that_the_host_does_not_have_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    capture = Capture(tmp_path / "run", host_budget_nbytes=10**15)
    with pytest.raises(CaptureError, match=r"--host-budget-nbytes 10{15} is more than .* give \d+ or less for each"):
        capture.__enter__()
    assert not (tmp_path / "run").exists()


def test_a_step_beside_an_optimizer_that_advances_the_iteration_is_ignored_with_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    with Capture(tmp_path / "run", min_iterations=3) as capture:
        for number in (1, 2, 3):
            steps(model, 1)
            capture.step()
            assert capture.iteration == number
    assert open_run(tmp_path / "run").iterations == [0, 1, 2]
    assert capsys.readouterr().err.count("capture.step() is ignored, because the optimizer's step advances") == 1


def test_the_line_of_what_is_captured_has_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds: list[dict[str, Any]] = [{}, {"record_last": 1}]
    for settings in kinds:
        with Capture(tmp_path / "a\x1b[2Jb\nc" / f"{len(settings)}", **settings):
            steps(Net(), 1)
    said = capsys.readouterr().err
    assert said.count(r"a\x1b[2Jb\nc") >= 2
    assert "\x1b" not in said
    assert all(line.startswith("ranktape: ") for line in said.splitlines()), said


def test_only_what_is_selected_is_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Capture(tmp_path / "run", select={"module": ("layers.1.*",), "layer_type": ("linear",)}):
        steps(Net(), 2)
    records = open_run(tmp_path / "run").select()
    assert set(records.column("layer_idx")) == {1}
    assert set(records.column("layer_type")) == {"linear"}
    err = capfd.readouterr().err
    assert "capturing 6 linear layers into" in err
    assert "36 tensors" in err


def test_no_match_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"no module matches --select module=layer\.0\.up; nearest: .*layers\.0\.up"):
        captured(Net(), tmp_path / "run", shape=(2, 4, 16), select={"module": ("layer.0.up",)})


def test_a_run_that_is_there(tmp_path: Path) -> None:
    url = tmp_path / "run"
    train(Training(steps=2), capture=Capture(url))
    with pytest.raises(RunExistsError, match="--resume to continue it, --overwrite to delete it"):
        train(Training(steps=2), capture=Capture(url))
    assert Capture.current is None
    train(Training(steps=3), capture=Capture(url, resume=True, min_iterations=2))
    # Iteration 0 was there already; the second attempt took the next one.
    assert [(status.iteration, status.attempt) for status in open_run(url).status()] == [(0, 0), (1, 1)]
    train(Training(steps=2), capture=Capture(url, overwrite=True))
    assert open_run(url).iterations == [0]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="choose another URL"):
        train(Training(steps=1), capture=Capture(tmp_path / "file" / "run"))


def test_a_training_that_is_too_short(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capture = Capture(tmp_path / "run", start_at=10)
    train(Training(steps=3), capture=capture)
    verdict = capture.close()
    assert not verdict.met
    assert "ended after 3 iterations, before the first captured iteration 10" in verdict.message()
    assert "lower --start-at" in verdict.message()
    assert open_run(tmp_path / "run").verdict() == verdict
    assert capfd.readouterr().err.count("0 of 1 guaranteed iterations") == 1


def test_the_reason_of_an_iteration_that_was_cut_off_is_named_once(tmp_path: Path) -> None:
    capture = Capture(tmp_path / "run", min_iterations=5)
    train(Training(steps=3), capture=capture)
    for verdict in (capture.close(), open_run(tmp_path / "run").verdict()):
        assert verdict.complete == [0, 1, 2]
        assert verdict.message().count("the training ended after 3 iterations") == 1


def test_a_training_that_stops_in_the_middle(tmp_path: Path) -> None:
    model = Net()
    with Capture(tmp_path / "run", min_iterations=2) as capture:
        steps(model, 1)
        model(torch.randn(2, 4, 16))
    assert not capture.close().met
    first, second = open_run(tmp_path / "run").status()
    assert (first.state, second.state) == (IterationState.COMPLETE, IterationState.PARTIAL)
    assert "before its optimizer stepped" in second.missing[0]


def test_a_training_that_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Capture(tmp_path / "run", min_iterations=2):
        fail()
    run = open_run(tmp_path / "run")
    assert run.iterations == [0]
    assert "the training failed (ZeroDivisionError)" in run.verdict().message()


def fail() -> None:
    """Train a step and fail."""
    steps(Net(), 1)
    raise ZeroDivisionError


def test_nothing_is_left_open(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def mapped_rings() -> int:
        return Path("/proc/self/maps").read_text().count("ranktape-ring")

    train(Training(steps=2), capture=Capture(tmp_path / "first"))
    before = descriptors()
    for number in range(3):
        train(Training(steps=2), capture=Capture(tmp_path / f"run{number}"))
    assert descriptors() == before
    assert mapped_rings() == 0


def test_samples_have_the_names_of_their_own_pass(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Capture(tmp_path / "run") as capture:
        capture.set_sample_ids(torch.tensor([7, 8]))
        loss = model(torch.randn(2, 16)).sum()
        capture.set_sample_ids(["next", "batch"])
        loss.backward()
        with pytest.raises(UsageError, match=r"sample id 1\.5 is a float"):
            capture.set_sample_ids([1.5])  # type: ignore[list-item]
        optimizer.step()
    records = open_run(tmp_path / "run").select()
    assert {(record.tensor_name, tuple(record.sample_ids or ())) for record in records} >= {
        ("grad_output", (7, 8)),
        ("input", (7, 8)),
        ("weight", ()),
    }
    assert len(records.where("like(sample_ids, '*next*')")) == 0


def test_one_capture_at_a_time(tmp_path: Path) -> None:
    with Capture(tmp_path / "run"):
        with pytest.raises(CaptureError, match="a capture is running in this process already"):
            Capture(tmp_path / "other").__enter__()
        steps(Net(), 1)


def writer_pid(capture: Capture) -> int:
    """The process that stores what the capture stages."""
    process = capture._process._process
    assert process is not None
    return process.pid


def kill_writer(capture: Capture) -> None:
    process = capture._process._process
    assert process is not None
    process.kill()
    process.wait()


def test_a_stuck_writer_does_not_end_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capture = Capture(tmp_path / "run", min_iterations=50, host_budget_nbytes=1 << 20, block_timeout_seconds=0.5)
    with capture:
        steps(Net(), 1)
        os.kill(writer_pid(capture), signal.SIGSTOP)
        began = time.monotonic()
        steps(Net(), 49)
        assert time.monotonic() - began < 20, "a full ring costs one wait, and not one for each tensor"
        os.kill(writer_pid(capture), signal.SIGCONT)
    assert not capture.close().met
    assert "capture disabled itself in iteration" in capfd.readouterr().err
    run = open_run(tmp_path / "run")
    assert run.iterations
    assert run.status()[-1].state is IterationState.PARTIAL
    assert "raise it or --host-budget-nbytes" in run.verdict().message()
    for record in run.select():
        record.read()


def test_a_killed_writer_is_followed_by_another_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capture = Capture(tmp_path / "run", min_iterations=12, host_budget_nbytes=1 << 20, block_timeout_seconds=60)
    with capture:
        steps(Net(), 3)
        kill_writer(capture)
        steps(Net(), 9)
    assert capture.close().met
    assert capfd.readouterr().err.count("the writer process ended and was started again (iteration ") == 1
    run = open_run(tmp_path / "run")
    assert run.iterations == list(range(12))
    for record in run.select():
        record.read()
    assert run.disabled() == {}
    assert "its writer was started again once (iteration 3: killed by SIGKILL" in run.troubles()[0]


def test_a_writer_that_is_killed_again_and_again_does_not_end_the_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Capture(tmp_path / "run", min_iterations=2) as capture:
        os.kill(writer_pid(capture), signal.SIGSTOP)
        steps(Net(), 1)
        for _ in range(3):
            kill_writer(capture)
            steps(Net(), 1)
        kill_writer(capture)
    assert not capture.close().met
    said = capfd.readouterr().err
    assert "the writer process ended 3 times without storing an iteration (killed by SIGKILL" in said
    for record in open_run(tmp_path / "run").select():
        record.read()


@contextlib.contextmanager
def signalled_in_a_copy(capture: Capture, act: Callable[[], Any]) -> Iterator[None]:
    """Have a signal handler act while this thread is in the middle of the recording of a tensor."""
    before = signal.signal(signal.SIGUSR2, lambda *_: act())
    try:
        with capture._process.ring._reserve_lock:
            signal.raise_signal(signal.SIGUSR2)
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.timeout(60)
def test_what_a_signal_handler_triggers_in_the_middle_of_a_tensor_is_told_at_the_next_boundary(tmp_path: Path) -> None:
    model = Net()
    with (
        Capture(tmp_path / "run", model=model, record_last=1) as capture,
        signalled_in_a_copy(capture, lambda: capture.trigger("the node is taken away")),
    ):
        steps(model, 1)
    run = open_run(tmp_path / "run")
    assert [(one.text, one.iteration) for one in run.triggers()] == [("the node is taken away", 0)]
    assert run.iterations == [0]


@pytest.mark.timeout(60)
def test_a_signal_handler_may_close_the_capture_in_the_middle_of_a_tensor(tmp_path: Path) -> None:
    model = Net()
    verdicts: list[RunVerdict] = []
    with (
        Capture(tmp_path / "run", model=model, min_iterations=2) as capture,
        signalled_in_a_copy(capture, lambda: verdicts.append(capture.close(reason="the node is taken away"))),
    ):
        steps(model, 1)
    assert [verdict.met for verdict in verdicts] == [False]
    assert open_run(tmp_path / "run").verdict().final


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_in_lock", [True, False])
def test_what_a_signal_handler_triggers_before_it_closes_in_the_middle_of_a_tensor_is_told(
    tmp_path: Path, *, is_in_lock: bool
) -> None:
    model = Net()
    with Capture(tmp_path / "run", model=model, record_last=1) as capture:
        steps(model, 2)
        ring = capture._process.ring

        def act() -> None:
            capture.trigger("the node is taken away")
            capture.close(reason="preempted")

        if is_in_lock:
            with signalled_in_a_copy(capture, act):
                pass
        else:
            slot = ring.reserve(SlotKind.TENSOR, b"{}", 64, timeout_seconds=1)
            act()  # as a handler does that runs once a long copy is over
            ring.cancel(slot)
    run = open_run(tmp_path / "run")
    assert [(one.kind, one.text) for one in run.triggers()] == [
        (TriggerKind.USER, "the node is taken away"),
        (TriggerKind.EXCEPTION, "preempted"),
    ]
    assert 1 in run.iterations


@pytest.mark.timeout(60)
def test_a_trigger_of_a_signal_handler_at_a_boundary_does_not_end_the_training(tmp_path: Path) -> None:
    model = Net()

    class Interrupted(collections.deque[Any]):
        def popleft(self) -> Any:
            if capture._unsent_triggers is self:
                capture._unsent_triggers = collections.deque(self)
                self.clear()
                capture.trigger("the node is taken away")
            return super().popleft()

    with Capture(tmp_path / "run", model=model, record_last=1) as capture:
        capture._unsent_triggers = Interrupted([{"iteration": 0, "kind": "user", "text": "the validation fell"}])
        steps(model, 1)
    texts = [one.text for one in open_run(tmp_path / "run").triggers()]
    assert texts == ["the validation fell", "the node is taken away"]


def test_settings_that_do_nothing_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = captured(Net(), tmp_path / "run", shape=(2, 4, 16), keep_last=3, compression="zstd")
    assert "--keep-last 3 deletes nothing, as capture ends after 1 iterations" in capfd.readouterr().err
    for record in run.select():
        record.read()


def test_skipping_makes_room_and_later_iterations_make_up_for_it(tmp_path: Path) -> None:
    model = Net()
    capture = Capture(tmp_path / "run", min_iterations=1, max_iterations=3, policy="skip", host_budget_nbytes=1 << 20)
    with capture:
        steps(model, 1)
        until(lambda: 0 in open_run(tmp_path / "run").iterations)
        # The writer stands still while a part of the ring is taken: the next iteration does not fit.
        os.kill(writer_pid(capture), signal.SIGSTOP)
        capture._predicted_nbytes = 1 << 20
        # Iteration 1 had begun before.
        steps(model, 2)
        capture._predicted_nbytes = 1
        os.kill(writer_pid(capture), signal.SIGCONT)
        until(lambda: steps(model) and capture._schedule.is_done)
    assert capture.close().met
    run = open_run(tmp_path / "run")
    assert len(run.iterations) == 3
    skipped = [status for status in run.status() if status.state is IterationState.SKIPPED]
    assert skipped[0].iteration == 2  # on a busy machine others may follow
    assert "of the host budget are free" in skipped[0].missing[0]
    assert run.select(iteration=2).column("iteration").size == 0


def test_a_budget_that_no_tensor_fits_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024))
    verdict = captured(model, tmp_path / "run", shape=(8, 1024), host_budget_nbytes=1 << 20).verdict()
    assert not verdict.met
    assert "raise --host-budget-nbytes" in capfd.readouterr().err
    assert "does not fit into the host budget" in verdict.message()


def test_a_ring_smaller_than_an_iteration_blocks_and_loses_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    run = captured(model, tmp_path / "run", 2, shape=(8, 256), host_budget_nbytes=1 << 20)
    assert run.verdict().met
    records = run.select()
    assert records.column("nbytes").sum() > 4 << 20
    for record in records:
        record.read()


def test_a_run_that_only_one_process_sees_is_refused() -> None:
    with pytest.raises(UsageError, match="exists inside of one process only"):
        Capture("memory://run").__enter__()
    assert Capture.current is None


def shown(text: str) -> list[str]:
    """The lines of a terminal to which that was written."""
    lines = []
    for line in text.split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return lines


def test_a_line_stands_above_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    tqdm = pytest.importorskip("tqdm", reason="tqdm is not installed").tqdm
    with tqdm(total=3, desc="training", file=sys.stderr, mininterval=0) as bar:
        bar.update()
        Console(rank=0).say("capturing")
        bar.update()
    above, below, *_ = shown(capsys.readouterr().err)
    assert above == "ranktape: capturing"
    assert below.startswith("training: ")


@pytest.mark.parametrize("rank", [0, 1])
def test_each_message_is_written_once_by_the_rank_that_it_concerns(
    capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    console = Console(rank=rank, wording=lambda text: text.replace("verdict", "result"))
    console.say("a verdict\n")
    console.warn("two\n  lines")
    for _ in range(2):
        console.pass_on({"notices": ["full"], "problem": "late"})
    for number in range(10):
        console.warn_of_site(f"site {number}")
    console.warn_of_unmatched([f"name {number}" for number in range(10)])
    for keep_last in (1, 2):
        console.warn_of(CaptureOptions(min_iterations=1, max_iterations=2, keep_last=keep_last))
    for options, planned in ((CaptureOptions(start_at=9), [9]), (CaptureOptions(), []), (CaptureOptions(), [9])):
        console.tell_of_past(options, past=range(7), planned=planned)
    for why in (None, "a hook", None, "a hook"):
        console.tell_of_compiled([3, 4], why_eager=why)
    console.end_drain()
    for second in range(12):
        console.show_drain(2000 if second < 5 else 0, "waiting" if second < 10 else "committing")
    console.end_drain()
    past = "warning: iterations 0, 1, 2, 3, 4, ... 6 come before --first-iteration 0 and cannot be captured: {} will be"
    inside = "is recorded inside of its graphs (3, 4): each is compiled once more for that"
    eager = "runs eagerly in captured iterations (3, 4), where results may differ in the last bits: a hook"
    once = [*("full", "late"), *(f"site {number}" for number in range(8))]
    once += ["further sites are disabled: 'ranktape status' names them", *(f"name {number}" for number in range(8))]
    expected = [
        *("a result\\n", "warning: two lines"),
        *(f"warning: [rank {rank}] {text}" for text in (*once, "2 more names of the selection match nothing")),
        "warning: --keep-last 2 deletes nothing, as capture ends after 2 iterations: give a larger --max-iterations",
        *(past.format("9"), past.format("none")),
        *(f"the compiled code of the training {inside}", f"another part of the compiled code {eager}"),
        *("storing captured tensors: 2 kB left", "stored; waiting for the other ranks"),
        *("committing captured iterations", "done storing"),
    ]
    if rank:
        expected = [line for line in expected if "[rank 1]" in line]
    assert capsys.readouterr().err.splitlines() == [f"ranktape: {line}" for line in expected]
