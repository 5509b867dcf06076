"""Does a script run as under Python alone, and what does a worker of torchrun report?"""

from __future__ import annotations

import json
import textwrap
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ranktape.errors import UsageError
from ranktape.launch.script import Script
from ranktape.launch.worker import HEAD_START_SECONDS, global_rank, report, restarts, say
from tests.exhaustive import exhaustive
from tests.launch.processes import python

DRIVER = """
import sys
from ranktape.launch.script import Script
is_module, name, *arguments = sys.argv[1:]
script = Script(name=name, arguments=tuple(arguments), is_module=is_module == "module")
script.check()
script.enter()
script.run()
"""

SCRIPTS = {
    "prints what it is": """
        import os, sys
        print(__name__, __file__, __package__, __spec__, sys.argv, sys.path[0], __builtins__)
        print(sys.modules["__main__"].__dict__ is globals(), type(__loader__).__name__, __cached__)
    """,
    "is not given our future statements": "def f(x: int): pass\nprint(f.__annotations__)",
    "pickles its own classes": """
        import pickle
        class Thing: pass
        print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
    """,
    "pickles in a thread that outlives its last line": """
        import pickle, threading, time
        class Thing: pass
        def save():
            threading.main_thread().join()
            print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
        threading.Thread(target=save).start()
    """,
    "starts processes": """
        import multiprocessing
        class Item:
            def __init__(self, value): self.value = value
        def double(item): return Item(2 * item.value)
        print("imported as", __name__, flush=True)  # a pool ends its processes by a signal
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print([item.value for item in pool.map(double, [Item(1), Item(2)])])
    """,
    "raises": """
        def inner(): raise ValueError("mine")
        inner()
    """,
    "raises from": """
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise RuntimeError("outer") from error
    """,
    "is no Python": "print('never')\nthis is not Python\n",
    "has its own excepthook": """
        import sys
        sys.excepthook = lambda kind, value, trace: print("hook", kind.__name__, trace.tb_lineno)
        raise KeyError("x")
    """,
    "exits with a number": "import sys; sys.exit(7)",
    "exits with zero": "import sys; print('done'); sys.exit(0)",
    "exits with a text": "import sys; sys.exit('no data')",
    "exits with nothing": "import sys; print('done'); sys.exit()",
    "has exit handlers": "import atexit; atexit.register(print, 'last words', __name__); print('end')",
    "is interrupted": "raise KeyboardInterrupt",
    "has an encoding": "# coding: latin-1\nprint('\\xe9' == chr(0xe9))",
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_script_behaves_as_under_python_alone(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(textwrap.dedent(SCRIPTS[case]))
    (folder / "drive.py").write_text(DRIVER)
    words = ("scripts/train.py", "--help", "--capture", "x", "--", "-m")
    alone = python(*words, cwd=tmp_path, is_forked=False)
    ours = python("scripts/drive.py", "file", *words, cwd=tmp_path, is_forked=False)
    assert ours.stdout == alone.stdout
    assert ours.returncode == alone.returncode
    # Frames of ours are there only where Python itself must end the process, by the signal.
    assert ours.stderr == alone.stderr or case == "is interrupted"


ALIKE = exhaustive("a module in a package is in make test")


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        if name == "package.train"
        else pytest.param(name, case, marks=exhaustive("one name is in make test"))
        for name in ("package.train", "package", "train")
        for case in ("prints what it is", "starts processes", "raises", "exits with a number")
        # Python imports no `package.__main__` in spawned processes: alone, that script hangs.
        if (name, case) != ("package", "starts processes")
    ],
)
def test_a_module_behaves_as_under_python_alone(case: str, name: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for path in (package / "__init__.py", tmp_path / "drive.py"):
        path.write_text(DRIVER if path.name == "drive.py" else "print('package imported')\n")
    for path in (package / "train.py", package / "__main__.py", tmp_path / "train.py"):
        # The two know their specification by different addresses and their source by different loaders.
        path.write_text(textwrap.dedent(SCRIPTS[case]).replace("__spec__,", "__spec__.name,"))
    words = (name, "--help", "-m", "x")
    alone = python("-m", *words, cwd=tmp_path, is_forked=False)
    ours = python("-m", "drive", "module", *words, cwd=tmp_path, is_forked=False)
    assert ours.stdout == alone.stdout
    assert ours.returncode == alone.returncode


@pytest.mark.parametrize(
    ("name", "is_module", "match"),
    [
        (
            "missing.py",
            False,
            r"no script 'missing.py' in .*: give the path of the training script after the options",
        ),
        (".", False, r"\. is a folder: give the training script, such as train\.py"),
        ("no_such_package.train", True, "no module named 'no_such_package': give an importable module"),
        (".train", True, "no module named ''"),
    ],
)
def test_a_missing_script_is_the_users_mistake(name: str, is_module: bool, match: str) -> None:  # noqa: FBT001
    with pytest.raises(UsageError, match=match):
        Script(name=name, arguments=(), is_module=is_module).check()


@pytest.mark.parametrize("name", ["ranktape.no_such_module", "ranktape.errors.inner", "ranktape.capture"])
def test_a_missing_submodule_is_the_users_mistake(name: str) -> None:
    script = Script(name=name, arguments=(), is_module=True)
    script.check()
    with pytest.raises(UsageError, match="no module to run named 'ranktape"):
        script.run()


def test_an_import_error_inside_a_package_is_the_scripts_own(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import not_installed_here")
    (tmp_path / "drive.py").write_text(DRIVER)
    ended = python("-m", "drive", "module", "package.train", cwd=tmp_path, is_forked=False)
    assert ended.returncode == 1
    assert "ModuleNotFoundError: No module named 'not_installed_here'" in ended.stderr


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun."""
    for name in ("RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_a_process_is_alone_on_its_last_attempt() -> None:
    assert (global_rank(), restarts()) == (0, (0, 0))


@pytest.mark.parametrize(("done", "left"), [(0, 2), (1, 1), (2, 0)])
def test_the_last_attempt_is_the_one_after_which_torchrun_gives_up(
    done: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(done))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    assert (global_rank(), restarts()) == (3, (done, left))


def test_a_report_is_one_line_and_torchrun_prints_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    report("no room:\n  give\tmore")
    captured = capsys.readouterr()
    assert captured.err == "ranktape: error: no room: give more\n"
    assert captured.out == ""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert "traceback : no room: give more\n" in str(ChildFailedError("train", {0: failure}))
    assert abs(failure.timestamp - time.time()) < 60
    assert json.loads(path.read_text())["message"]["message"] == "no room: give more"


def test_an_error_file_that_cannot_be_written_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    report("no room")
    assert capsys.readouterr().err == "ranktape: error: no room\n"


def test_other_ranks_leave_the_word_to_rank_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    started = time.monotonic()
    report("only here")
    assert time.monotonic() - started >= HEAD_START_SECONDS
    assert capsys.readouterr().err == "ranktape: error: [rank 2] only here\n"
    say("everywhere")
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("RANK")
    say("everywhere")
    assert capsys.readouterr().err == "ranktape: everywhere\n"
