"""Is what a user installs whole, typed, quick to start, and silent when it is imported?

The wheel is built and installed into an environment of its own, away from the checkout; only the dependencies are
borrowed from the environment that runs the tests.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.metadata import Metadata

import ranktape
from tests.exhaustive import exhaustive

CHECKOUT = Path(__file__).parents[1]
AUTOLOAD = "ranktape_autoload.py"
NEEDS_TRITON = "ranktape.capture.tensors.fused_statistics"
"""Imported where there is a CUDA device: Triton comes with torch's builds for CUDA, and with no other."""
FOLDERS = ("storage", "capture", "analyze", "launch")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the hatchling that is installed: no network."""
    target = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, CHECKOUT)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment in which the wheel is installed."""
    root = tmp_path_factory.mktemp("env")
    venv.create(root, symlinks=True)
    python = root / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    # A path in a .pth file comes after the environment's own packages, and its own .pth files are not read: so the
    # dependencies are found there, but not the editable install of the checkout.
    (site,) = root.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return root / "bin"


def _run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _modules(wheel: Path) -> list[str]:
    names = zipfile.ZipFile(wheel).namelist()
    sources = (name.removesuffix(".py").removesuffix("/__init__") for name in names if name.endswith(".py"))
    return _importable(source.replace("/", ".") for source in sources if not source.endswith("__main__"))


def _importable(modules: Iterable[str]) -> list[str]:
    return sorted(set(modules) - ({NEEDS_TRITON} if find_spec("triton") is None else set()))


def test_the_wheel_holds_one_package_and_what_torch_calls_with_types_and_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "ranktape/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"ranktape", AUTOLOAD, f"ranktape-{ranktape.__version__}.dist-info"}
    files = (
        path for path in (CHECKOUT / "ranktape").rglob("*") if path.is_file() and path.parent.name != "__pycache__"
    )
    in_checkout = {AUTOLOAD, *(str(path.relative_to(CHECKOUT)) for path in files)}
    assert {name for name in names if ".dist-info/" not in name} == in_checkout
    [described] = [name for name in names if name.endswith(".dist-info/METADATA")]
    metadata = Metadata.from_email(zipfile.ZipFile(wheel).read(described), validate=True)
    assert (metadata.name, str(metadata.version)) == ("ranktape", ranktape.__version__)


def _import_and_watch(modules: list[str]) -> dict[str, list[str]]:
    """Import modules and note what our own code does besides; its source is run in a process of its own."""
    import importlib
    import logging
    import os
    import signal
    import sys
    import threading

    did: list[str] = []

    def note(what: str) -> None:
        frame = sys._getframe(2)
        while frame.f_back and frame.f_globals["__name__"] in {"os", "pathlib", "subprocess", "tempfile"}:
            frame = frame.f_back
        if frame.f_globals["__name__"].startswith("ranktape"):
            did.append(f"{frame.f_globals['__name__']}:{frame.f_lineno}: {what}")

    class WatchedEnviron(dict[str, str]):
        def __getitem__(self, key: str) -> str:
            note(f"reads {key} from the environment")
            return super().__getitem__(key)

        def __contains__(self, key: object) -> bool:
            note(f"looks for {key} in the environment")
            return super().__contains__(key)

        def get(self, key: str, default: Any = None) -> Any:
            note(f"reads {key} from the environment")
            return super().get(key, default)

    def note_event(event: str, arguments: tuple[object, ...]) -> None:
        if event in {"open", "os.listdir", "os.mkdir", "os.fork", "subprocess.Popen", "socket.connect"}:
            note(f"{event}{arguments}")

    os.environ = WatchedEnviron(os.environ)  # type: ignore[assignment]  # noqa: B003 - the process ends with the test
    sys.addaudithook(note_event)
    signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    for name in modules:
        importlib.import_module(name)
    did += [f"thread {thread.name}" for thread in threading.enumerate() if thread is not threading.main_thread()]
    did += [f"handler of signal {number}" for number, was in signals.items() if signal.getsignal(number) != was]
    did += [f"logging handler {handler}" for handler in logging.root.handlers]
    return {"from": [str(sys.modules[name].__file__) for name in modules], "did": did}


def _watch(python: Path, modules: list[str], *, cwd: Path) -> dict[str, list[str]]:
    source = inspect.getsource(_import_and_watch)
    script = f"import json\nfrom typing import Any\n{source}\nprint(json.dumps(_import_and_watch({modules})))"
    # What torch has us do at the end of its import is not done by an import of ours.
    result: dict[str, list[str]] = json.loads(_run(python, "-c", script, cwd=cwd, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    return result


def test_every_module_of_the_wheel_imports_and_does_nothing_else(wheel: Path, installed: Path, tmp_path: Path) -> None:
    result = _watch(installed / "python", _modules(wheel), cwd=tmp_path)
    assert [path for path in result["from"] if not path.startswith(str(installed.parent))] == []
    assert result["did"] == []


@pytest.mark.parametrize(
    "planted",
    [
        "import os; os.environ.get('HOME')",
        "import os; os.getenv('HOME')",
        "import os; os.environ['PATH']",
        "from os import environ; 'HOME' in environ",
        "from pathlib import Path; Path('x').write_text('')",
        "import os; os.listdir('.')",
        "import subprocess; subprocess.run(['true'])",
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "import logging; logging.basicConfig()",
    ],
)
def test_what_a_module_does_at_import_is_noticed(tmp_path: Path, planted: str) -> None:
    (tmp_path / "ranktape_planted.py").write_text(planted + "\n", encoding="utf-8")
    assert _watch(Path(sys.executable), ["ranktape_planted"], cwd=tmp_path)["did"]


FIRST = """
import importlib, os, sys, warnings
import click, fsspec, ml_dtypes, numba, numpy, rich, torch, yaml
for name in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        os.dup2(1, 2)
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(name, type(error).__name__, error, flush=True)
        os._exit(0)
    os.wait()
"""
"""Imports each module in a process that has imported none of ours, and not zarr, for which ours wait."""


@exhaustive("zarr's imports, in which order matters, are in make test; this takes a minute and a half")
def test_each_module_can_be_imported_first_without_a_warning(tmp_path: Path) -> None:
    paths = [path.relative_to(CHECKOUT).with_suffix("") for path in (CHECKOUT / "ranktape").rglob("*.py")]
    names = _importable(".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__")
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(CHECKOUT)}
    assert _run(sys.executable, "-c", FIRST, *names, cwd=tmp_path, **environment) == ""


def test_torch_calls_what_is_installed(installed: Path, tmp_path: Path) -> None:
    script = "import sys, torch; print(sys.modules['ranktape_autoload'].__file__)"
    assert _run(installed / "python", "-c", script, cwd=tmp_path).startswith(str(installed.parent))


def test_an_editable_install_has_the_same_names(tmp_path: Path) -> None:
    script = f"from hatchling.build import build_editable; print(build_editable({str(tmp_path)!r}))"
    built = zipfile.ZipFile(tmp_path / _run(sys.executable, "-c", script, cwd=CHECKOUT).split()[-1])
    contents = {name.rpartition("/")[2]: built.read(name).decode() for name in built.namelist()}
    (paths,) = [text for name, text in contents.items() if name.endswith(".pth")]
    assert set(paths.split()) == {str(CHECKOUT)}
    assert "[torch.backends]\nranktape = ranktape_autoload:start" in contents["entry_points.txt"]


@pytest.mark.parametrize("command", ["ranktape", "python -m ranktape.analyze", "python -m ranktape.launch"])
def test_every_door_has_help(installed: Path, tmp_path: Path, command: str) -> None:
    program, *arguments = command.split()
    assert "Usage:" in _run(installed / program, *arguments, "--help", cwd=tmp_path)


def test_the_version_has_one_source(wheel: Path) -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" in project["dynamic"]
    assert wheel.name.startswith(f"ranktape-{ranktape.__version__}-")


@pytest.mark.parametrize("package", ["ranktape", *(f"ranktape.{folder}" for folder in FOLDERS)])
def test_public_names_are_the_same_for_people_and_type_checkers(package: str) -> None:
    module = importlib.import_module(package)
    shown = {
        alias.asname
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    public = set(getattr(module, "__all__", ()))
    assert public - {"__version__"} == shown
    assert public <= set(dir(module)) | {"__version__"}
    # The import system puts a file or folder into its package under its name: nothing else may have that name.
    assert not public & {path.stem for path in Path(str(module.__file__)).parent.iterdir()}
    for name in public:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing
