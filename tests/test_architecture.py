"""The imports point one way and in no circle, and every file and every class has a name of its own.

    storage <- capture, storage <- analyze, all <- launch

Read from the source with `ast`, wherever the import stands: at the top, in a function, under TYPE_CHECKING, relative
or absolute, or as text for importlib. The second half measures what stays light when it is imported.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imported import Import, imports, module_of, package_of, reached, targets

PACKAGE = Path(__file__).parents[1] / "ranktape"

MAY_IMPORT = {
    "storage": {"storage"},
    "capture": {"capture", "storage"},
    "analyze": {"analyze", "storage"},
    "launch": {"launch", "storage", "capture", "analyze"},
}
"""The whole of the package's top level, and the folders that each may import."""

EXCEPTIONS = {("capture", "ranktape.analyze.numerics")}
"""Single folders across a closed border: the writer counts and adds up values with the kernels that analysis uses."""

SHARED = {
    *("ranktape.errors", "ranktape.fields", "ranktape.yaml_file"),
    *("ranktape.__version__", "ranktape.__file__", "ranktape._version", "ranktape.lazy_names"),
}
"""What every folder may take from the top of the package; its public names are for users."""

NUMERICS = ("analyze", "numerics")
NUMERICS_MAY_IMPORT = {
    "ranktape.errors",
    "ranktape.yaml_file",  # recipes are files of users
    "ranktape.analyze.numerics",
    *(f"ranktape.storage.format.{leaf}" for leaf in ("dtypes", "record_info", "statistics")),
}
"""It knows arrays, and of storage the plain types that stored values have; no run, no record, no view."""

LEGACY = ("analyze", "legacy")
LEGACY_DOORS = {
    "__init__.py",
    "analyze/options.py",
    "analyze/questions/listed_tensors.py",
    "analyze/questions/sweep_command.py",
    "analyze/sources.py",
    "analyze/views/plots/bars.py",
    "launch/exchange.py",
}
"""Files through which the wing for legacy tools is entered; without them it could be taken away."""

ALLOWED_AT_TOP = {
    "__init__.py": {"ranktape"},
    "_version.py": {"ranktape._version"},
    "lazy_names.py": {"ranktape.lazy_names"},
    "errors.py": {"ranktape.errors"},
    "fields.py": {"ranktape.fields"},
    "yaml_file.py": {"ranktape.errors"},
}
"""What the files beside the folders may import."""

TORCH_IN_STORAGE = "to_torch"
"""The one place in storage that may import torch."""

TORCH_AT_TOP = {
    "analyze/numerics/quantization/quantized_layers.py",
    "analyze/numerics/quantization/quantized_product.py",
}
"""Files of analyze that define classes of torch's, and are imported where there are tensors or models already."""

HOMELESS_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "misc"}
"""If it has no name, it has no home yet."""


ROOMS = {
    "storage": ("places", "query", "format", "records", "recording", "maintenance"),
    "analyze": ("numerics", "engine", "comparison", "replays", "questions", "findings", "views"),
}
"""Folders inside a folder; each may import those before it."""

CLIMBS = {
    ("analyze.questions", "analyze.findings"),
}
"""Folders that still import a later one. The list only gets shorter."""

CIRCLES: list[set[str]] = []
"""Modules that still import each other. The list only gets shorter."""

CLASS_NAMES_TWICE: set[str] = set()
"""Names of classes that still stand for two things. The list only gets shorter."""


def violations(package: Path) -> list[str]:
    """What is wrong in the tree of the package, one line each with file and line; empty when all is well."""
    found = [
        f"{entry.name}: only {', '.join(MAY_IMPORT)} stand beside {', '.join(ALLOWED_AT_TOP)}"
        for entry in sorted(package.iterdir())
        if entry.name not in {*MAY_IMPORT, *ALLOWED_AT_TOP, "py.typed", "__pycache__"}
    ]
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if HOMELESS_NAMES & {*place.with_suffix("").parts}:
            found.append(f"{place}: a name that says nothing")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not ast.get_docstring(tree):
            found.append(f"{place}: no docstring that says what it gives")
        dotted = ".".join([package.name, *place.parent.parts])
        found += [
            f"{place}:{item.line}: {wrong}"
            for item in imports(tree, package=dotted)
            if (wrong := _wrong_import(place, item))
        ]
    return found


def _wrong_import(place: Path, item: Import) -> str | None:
    owner = place.parts[0]
    if _is_within(item.target, "torch"):
        return _wrong_torch(place, item)
    if not _is_within(item.target, "ranktape"):
        return None
    if place.parts[:2] == NUMERICS and not any(_is_within(item.target, name) for name in NUMERICS_MAY_IMPORT):
        return f"analyze/numerics may not import {item.target}"
    is_stranger = place.parts[:2] != LEGACY and str(place) not in LEGACY_DOORS
    if is_stranger and _is_within(item.target, "ranktape.analyze.legacy"):
        return f"only {', '.join(sorted(LEGACY_DOORS))} may import {item.target}"
    allowed = ALLOWED_AT_TOP.get(owner) or {
        *SHARED,
        *(f"ranktape.{folder}" for folder in MAY_IMPORT.get(owner, ())),
        *(module for folder, module in EXCEPTIONS if folder == owner),
    }
    if not any(_is_within(item.target, name) for name in allowed):
        return f"{owner} may not import {item.target}"
    return None


def _wrong_torch(place: Path, item: Import) -> str | None:
    folder = place.parts[0]
    if folder == "storage" and item.is_runtime and item.scope != TORCH_IN_STORAGE:
        return f"storage imports torch only in {TORCH_IN_STORAGE}"
    if folder == "analyze" and item.is_runtime and not item.scope and str(place) not in TORCH_AT_TOP:
        return "analyze imports torch only inside functions"
    return None


def _is_within(target: str, name: str) -> bool:
    return target == name or target.startswith(name + ".")


def test_the_tree_keeps_the_rules() -> None:
    assert violations(PACKAGE) == []


def arrows(package: Path) -> dict[str, set[str]]:
    """What each module imports of the package, wherever the import stands; text for importlib does not count."""
    sources = {module_of(path, package.parent): path for path in package.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for module, path in sources.items():
        inside = package_of(path, package.parent)
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        statements = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        reached_for = {target for node in statements for target in targets(node, package=inside)} - SHARED
        near = {target if target in sources else target.rpartition(".")[0] for target in reached_for}
        found[module] = near & set(sources) - {module}
    return found


def circles(package: Path) -> set[frozenset[str]]:
    """Groups of modules each of which imports each other one, in the end."""
    direct = arrows(package)
    ends = {module: reached([module], direct) for module in direct}
    return {
        frozenset(other for other in ends[module] if module in ends[other])
        for module in direct
        if module in ends[module]
    }


def class_names(package: Path) -> dict[str, list[str]]:
    """Of each name of a class the modules that define it."""
    found: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module_of(path, package.parent))
    return found


def climbs(package: Path) -> set[tuple[str, str]]:
    """Pairs of inner folders of which the first imports the second, and stands before it."""
    heights = {f"{owner}.{room}": place for owner, rooms in ROOMS.items() for place, room in enumerate(rooms)}
    found = set()
    for module, imported in arrows(package).items():
        for target in imported:
            lower, upper = (".".join(name.split(".")[1:3]) for name in (module, target))
            is_one_house = lower.partition(".")[0] == upper.partition(".")[0]
            if is_one_house and {lower, upper} <= set(heights) and heights[lower] < heights[upper]:
                found.add((lower, upper))
    return found


def test_no_folder_imports_a_later_one_but_those_named() -> None:
    assert climbs(PACKAGE) - CLIMBS == set()


def test_a_planted_climb_is_found(tmp_path: Path) -> None:
    for place, source in {
        "engine/run": "from ranktape.analyze.views.heat import draw",
        "views/heat": "draw = 1",
    }.items():
        path = tmp_path / "ranktape" / "analyze" / f"{place}.py"
        path.parent.mkdir(parents=True)
        path.write_text(source, encoding="utf-8")
    assert climbs(tmp_path / "ranktape") == {("analyze.engine", "analyze.views")}


def test_no_modules_import_each_other_but_those_named() -> None:
    assert [sorted(one) for one in circles(PACKAGE) if not any(one <= known for known in CIRCLES)] == []


def test_no_class_name_exists_twice_but_those_named() -> None:
    twice = {name: modules for name, modules in class_names(PACKAGE).items() if len(modules) > 1}
    assert {name: modules for name, modules in twice.items() if name not in CLASS_NAMES_TWICE} == {}


@pytest.mark.parametrize(
    "source", ["from ranktape.storage.run import Run", "def f():\n    from . import run", "from .run import Run"]
)
def test_a_planted_circle_and_a_second_class_are_found(tmp_path: Path, source: str) -> None:
    folder = tmp_path / "ranktape" / "storage"
    folder.mkdir(parents=True)
    (folder / "run.py").write_text("from ranktape.storage.layout import path\n\nclass Run: ...\n", encoding="utf-8")
    (folder / "layout.py").write_text(f"{source}\n\nclass Run: ...\n", encoding="utf-8")
    modules = ["ranktape.storage.layout", "ranktape.storage.run"]
    assert circles(tmp_path / "ranktape") == {frozenset(modules)}
    assert class_names(tmp_path / "ranktape") == {"Run": modules}


def test_beside_the_package_stands_what_torch_calls_and_nothing_else() -> None:
    assert [path.name for path in sorted(PACKAGE.parent.glob("*.py"))] == ["ranktape_autoload.py"]
    tree = ast.parse((PACKAGE.parent / "ranktape_autoload.py").read_text(encoding="utf-8"))
    found = {item.target: item.scope for item in imports(tree, package="") if item.target != "__future__.annotations"}
    assert found == {"os": "", "sys": "", "ranktape.launch.autostart.arm": "start"}


PLANTED = {
    "storage/run.py": [
        "from ranktape.capture import Capture",
        "import ranktape.analyze.numerics.histograms.histogram",
        "from ..launch import cli",
        "from .. import analyze",
        "def f():\n    from ranktape.capture.settings.options import CaptureOptions",
        "if TYPE_CHECKING:\n    from ranktape.analyze.numerics.formats import Format",
        "importlib.import_module('ranktape.launch.cli')",
        "COMMANDS = {'demo': 'ranktape.launch.demo:command'}",
        "import torch",
        "from torch import Tensor",
        "def tensor(self):\n    import torch",
        "class Record:\n    def read(self):\n        import torch.nn",
        "from ranktape import open_run",
        "import ranktape\n\nranktape.open_run('x')",
        "import ranktape.storage.format.layout\n\nranktape.capture",
    ],
    "capture/site.py": [
        "from ranktape.analyze import overflow",
        "from ranktape.analyze.histogram import measure",
        "from ranktape.launch import cli",
        "from ranktape import analyze",
    ],
    "analyze/plot.py": [
        "from ranktape.capture import Capture",
        "import ranktape.launch.cli",
        "import torch",
        "from ranktape.analyze.legacy.files import Folder",
    ],
    "analyze/numerics/formats/table.py": [
        "from ranktape.storage import Record",
        "from ranktape.analyze.engine.values import View",
        "from ranktape.analyze import Table",
    ],
    "errors.py": ["from ranktape.storage import open_run"],
}
"""Sources that break a rule, by the file they stand in."""

ALLOWED = {
    "storage/run.py": [
        "from ranktape.errors import RanktapeError",
        "from . import layout",
        "from ranktape import __version__",
        "import ranktape\n\nranktape.__version__",
        "def to_torch(values):\n    import torch",
        "if TYPE_CHECKING:\n    import torch",
        "import torchvision_is_not_torch",
        "from ranktape.storage.format.layout import capture_path",
    ],
    "capture/site.py": [
        "from ranktape.analyze.numerics.histograms.histogram import measure",
        "from ranktape.analyze import numerics",
        "from ranktape.storage import open_run",
        "import torch",
    ],
    "analyze/plot.py": ["def read():\n    import torch", "from ranktape.storage.records.run import Run"],
    "analyze/options.py": ["from ranktape.analyze.legacy.open import open_source"],
    "analyze/legacy/open.py": ["from ranktape.analyze.legacy.files import Folder"],
    "analyze/numerics/formats/table.py": [
        "from ranktape.errors import UsageError",
        "from ranktape.storage.format.dtypes import numpy_dtype",
        "from ranktape.analyze.numerics.kernels import compiled",
    ],
    "launch/cli.py": ["from ranktape.analyze.overflow import command", "from ranktape.capture import Capture"],
    "__init__.py": ["from ranktape.capture import Capture"],
}
"""Sources that break none."""


def _cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(place, source) for place, sources in table.items() for source in sources]


def _violations_of(tmp_path: Path, place: str, source: str) -> list[str]:
    path = tmp_path / "ranktape" / place
    path.parent.mkdir(parents=True)
    path.write_text(f'"""Gives something."""\n\n{source}\n', encoding="utf-8")
    return violations(tmp_path / "ranktape")


@pytest.mark.parametrize(("place", "source"), _cases(PLANTED))
def test_a_planted_arrow_is_found(tmp_path: Path, place: str, source: str) -> None:
    found = _violations_of(tmp_path, place, source)
    assert len(found) == 1
    assert found[0].startswith(f"{place}:")


@pytest.mark.parametrize(("place", "source"), _cases(ALLOWED))
def test_an_allowed_arrow_is_not(tmp_path: Path, place: str, source: str) -> None:
    assert _violations_of(tmp_path, place, source) == []


@pytest.mark.parametrize("place", ["storage/utils.py", "misc/a.py", "plot/a.py", "extra.py", "capture/core/a.py"])
def test_a_file_without_a_home_is_found(tmp_path: Path, place: str) -> None:
    assert _violations_of(tmp_path, place, "")


def test_a_module_without_a_docstring_is_found(tmp_path: Path) -> None:
    path = tmp_path / "ranktape" / "storage" / "run.py"
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\n", encoding="utf-8")
    assert violations(tmp_path / "ranktape") == ["storage/run.py: no docstring that says what it gives"]


HEAVY = ("torch", "zarr", "numpy", "numba", "matplotlib", "rich", "fsspec", "s3fs")
"""What takes longer to import than a command may take to print its help."""

LIGHT = {
    "ranktape": HEAVY,
    "ranktape.storage": HEAVY,
    "ranktape.capture": HEAVY,
    "ranktape.analyze": HEAVY,
    "ranktape.launch.cli": HEAVY,
    "ranktape.launch.autostart": HEAVY,
    "ranktape_autoload": (*HEAVY, "ranktape"),
    "ranktape.storage.records.run": ("torch",),
    "ranktape.analyze.sources": ("torch", "zarr", "numba"),
    "ranktape.analyze.numerics.histograms.histogram": ("torch", "zarr"),
    "ranktape.analyze.numerics.histograms.block_histogram": ("torch", "zarr"),
    "ranktape.analyze.numerics.histograms.moments": ("torch", "zarr"),
    "ranktape.capture.writer": ("torch", "zarr", "click", "matplotlib", "rich"),
    "ranktape.launch.exchange": ("torch", "zarr", "numpy", "numba", "rich"),
    # What a capture needs when it begins, not where a program imports `Capture`.
    "ranktape.capture.session": (
        *("zarr", "numba", "click", "rich", "msgspec", "ml_dtypes", "fsspec", "xarray"),
        *(
            "ranktape.analyze",
            "ranktape.storage.query",
            "ranktape.storage.recording",
            "ranktape.storage.format.catalogue",
        ),
        *("ranktape.capture.hooks.model", "ranktape.capture.recorder", "ranktape.capture.roles.known"),
        *("ranktape.capture.settings.rules", "ranktape.capture.passes.clock", "ranktape.capture.starting"),
    ),
}
"""By module, what importing it may not import: `--help` is quick, the writer process small, a laptop has no torch."""


@pytest.mark.parametrize("module", LIGHT)
def test_what_is_light_stays_light(module: str) -> None:
    source = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not set(LIGHT[module]) & set(done.stdout.split())


DOORS = {
    "analyze/console.py": "escapes control codes",
    "analyze/group.py": "says what the operating system says",
    "analyze/table.py": "has escaped what is no document for programs",
    "launch/demo_train.py": "a script of its own, which prints numbers",
}
"""Files of commands that write to stdout or stderr themselves, and why they may."""

WRITERS = {"print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"}


def test_text_of_commands_goes_through_one_door() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for folder in ("analyze", "launch")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in WRITERS
    }
    assert found == set(DOORS), "write with ranktape.analyze.console.say: names in a store may be a stranger's"
