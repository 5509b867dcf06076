"""Which framework, under which parallelism, is captured in which respect, by the tests that ran?

A test says what it proves by a marker:

    @pytest.mark.support(framework="HF Llama", parallelism="DDP", features=("linear", "attention"))

Of compiled code the tests marked `compiled_support` say how many tensors of each site they recorded, of how many.

`make support` runs all of them and writes docs/support.md from those that passed; it fails where one did not, and where
a field of the matrix has neither a test nor a reason in `HOLES`. A test compares the page with the markers.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[1] / "docs" / "support.md"

FRAMEWORKS = {
    "PyTorch": "plain `torch.nn` modules, `scaled_dot_product_attention`, attention that is written out, "
    "`nn.MultiheadAttention`",
    "HF Llama": "`transformers`, grouped-query attention, `sdpa` and `eager`",
    "HF GPT-2": "`transformers`, linear layers that are `Conv1D`",
    "Megatron-core": "local spec, column and row parallel layers, core attention, its own DDP",
    "MoE": "experts with ragged numbers of tokens: linear layers (every rank has all experts, or a slice of each), \
rows of one parameter (HF Mixtral, one process)",
}

PREFACE = """Written by `make support` from the tests that ran and passed; do not edit. A field holds the number of \
tests that prove it, or a letter that is explained below. What is known not to work is in [limits.md](limits.md). \
All of it ran on CPUs. Copies off a device are proven on a simulated accelerator and on CUDA (`tests/device`); \
on NPUs and XPUs they have not run yet ([limits.md](capture.md#devices))."""

PARALLELISMS = ("one process", "DDP", "FSDP2", "TP", "FSDP2 x TP", "PP", "CP")

FEATURES = {
    "linear": "input, weight, bias, output and their gradients; outputs and gradients recomputed from the records",
    "attention": "query, key, value, output and their gradients; recomputed likewise",
    "layer outputs": "hidden states of the decoder layers and the embedding",
    "accumulation": "several microbatches in an iteration, each told apart",
    "checkpointing": "activations that are computed again: recorded once, with every gradient",
    "autocast": "computed in another dtype than the modules get",
    "unchanged": "loss and gradients equal bit for bit with capture on and off",
    "assembly": "the logical tensors rebuilt from what the ranks recorded; replicas compared",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """Fields of the matrix without a test of their own, and why."""

    reason: str
    framework: str = "*"
    parallelism: str = "*"
    feature: str = "*"

    def covers(self, field: Field) -> bool:
        """Whether the field is one of these."""
        pairs = zip(field, (self.framework, self.parallelism, self.feature), strict=True)
        return all(any(fnmatchcase(word, glob) for glob in globs.split("|")) for word, globs in pairs)


Field = tuple[str, str, str]
"""Framework, parallelism, feature."""

HOLES: tuple[Hole, ...] = (
    Hole(
        parallelism="one process",
        feature="assembly",
        reason="One process records whole tensors: there is nothing to put together.",
    ),
    Hole(
        parallelism="CP",
        reason="Not tested. torch 2.13 has no context parallelism on CPUs, and Megatron-core's needs Transformer \
Engine. What is to be expected is in [limits.md](limits.md).",
    ),
    Hole(
        framework="HF GPT-2",
        parallelism="TP|FSDP2 x TP",
        reason="Cannot be built: torch's plans of tensor parallelism refuse `Conv1D`.",
    ),
    Hole(
        framework="Megatron-core",
        feature="autocast",
        reason="Not tested. Megatron-core computes in the dtype of its weights, and does not use autocast.",
    ),
    Hole(
        framework="Megatron-core",
        parallelism="FSDP2|FSDP2 x TP",
        reason="Not tested: Megatron-core's own wrapper of FSDP2 makes a mesh of GPUs. Of its distributed optimizer, \
the usual way there, `master_weight` is refused with the reason ([limits.md](limits.md)).",
    ),
    Hole(
        framework="Megatron-core",
        parallelism="PP",
        reason="Not tested with its own schedules, which need GPUs. That the microbatch is the one which they write \
onto the layers is tested without them.",
    ),
)
"""The first that covers a field explains it."""


COMPILED_SITES = (
    "linear forward",
    "linear backward",
    "attention forward",
    "attention backward",
    "embedding forward",
    "embedding backward",
    "layer outputs forward",
    "layer outputs backward",
)
"""Kinds of layers and operations: columns of the matrix of compiled code."""

COMPILED_COLUMNS = (*COMPILED_SITES, "unchanged")
"""All of its columns."""

COMPILED = "compiled"
"""The property of a test's report that holds a row of that matrix: its name and its cells."""

COMPILED_PREFACE = """A small GPT, trained in each of these ways: how many tensors of a captured iteration each rank \
recorded, of how many where nothing is compiled, each once. **unchanged**: the losses equal, bit for bit, those of the \
same compiled training without a capture. All in float32, inside of graphs ([limits.md](limits.md))."""

YES = "yes"

CompiledRow = tuple[str, Mapping[str, str]]
"""A way of compiling, and by column what the matrix says of it."""


def fields(marker: Mapping[str, Any]) -> list[Field]:
    """The fields of the matrix that a marker names.

    Raises:
        ValueError: it names what is not in the matrix.
    """
    framework, parallelism, features = marker["framework"], marker["parallelism"], marker["features"]
    for word, known in ((framework, FRAMEWORKS), (parallelism, PARALLELISMS), *((one, FEATURES) for one in features)):
        if word not in known:
            raise ValueError(f"{word!r} is not in the matrix of support: use one of {', '.join(known)}")
    return [(framework, parallelism, feature) for feature in features]


def marked_fields(folder: Path) -> set[Field]:
    """What the markers in a folder's tests name, read from the source."""
    found: set[Field] = set()
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"pytest.mark.support", "support"}:
                words = {word.arg: _words(word.value, constants) for word in node.keywords if word.arg}
                [framework], [parallelism] = words["framework"], words["parallelism"]
                marker = {"framework": framework, "parallelism": parallelism, "features": words["features"]}
                found.update(fields(marker))
    return found


def _words(node: ast.expr, constants: Mapping[str, ast.expr]) -> list[str]:
    """The words of an expression: one of them, or a tuple, which may have others in it."""
    if isinstance(node, ast.Name):
        return _words(constants[node.id], constants)
    if isinstance(node, ast.Starred):
        return _words(node.value, constants)
    if isinstance(node, ast.Tuple):
        return [word for element in node.elts for word in _words(element, constants)]
    assert isinstance(node, ast.Constant), ast.unparse(node)
    assert isinstance(node.value, str), ast.unparse(node)
    return [node.value]


def compiled_cell(found: int, wanted: int) -> str:
    """How many tensors were recorded, of how many."""
    return f"{found} of {wanted}"


def _is_full(cell: str) -> bool:
    found, _, wanted = cell.partition(" of ")
    return cell == YES or (bool(wanted) and found == wanted)


def _compiled_lines(compiled: Iterable[CompiledRow]) -> Iterator[str]:
    """The matrix of compiled code; each field of it must be full."""
    yield from ("", "## Compiled code", COMPILED_PREFACE, "")
    yield from (f"| | {' | '.join(COMPILED_COLUMNS)} |", f"|---{'|---' * len(COMPILED_COLUMNS)}|")
    for way, cells in compiled:
        for column in COMPILED_COLUMNS:
            if not _is_full(cells[column]):
                raise ValueError(f"{way} / {column} is {cells[column]}: compiled code shows less than is written")
        yield f"| {way} | {' | '.join(cells[column] for column in COMPILED_COLUMNS)} |"


def compiled_on(text: str) -> dict[str, dict[str, str]]:
    """What a page says of compiled code, by way and column."""
    lines = text.partition("\n## Compiled code\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {way: dict(zip(COMPILED_COLUMNS, cells, strict=True)) for way, *cells in rows if way}


def page(proven: Mapping[Field, int], compiled: Iterable[CompiledRow]) -> str:
    """The page, with the number of tests that prove each field, and what was recorded of compiled code.

    Raises:
        ValueError: a field has neither a test nor a reason, or one of compiled code is not full without a reason.
    """
    used: list[Hole] = []
    lines = [
        "# What is captured from what",
        "",
        PREFACE,
        "",
        *(f"- **{name}**: {meaning}" for name, meaning in FEATURES.items()),
    ]
    for framework, meaning in FRAMEWORKS.items():
        lines += ["", f"## {framework}", f"{meaning[0].upper()}{meaning[1:]}.", ""]
        lines += [f"| | {' | '.join(PARALLELISMS)} |", f"|---{'|---' * len(PARALLELISMS)}|"]
        for feature in FEATURES:
            row = [_cell((framework, parallelism, feature), proven, used) for parallelism in PARALLELISMS]
            lines.append(f"| {feature} | {' | '.join(row)} |")
    lines += _compiled_lines(compiled)
    lines += ["", "## Why a field has no test of its own"]
    lines += [f"- **{_letter(number)}**: {hole.reason}" for number, hole in enumerate(used)]
    return "\n".join(lines) + "\n"


def _cell(field: Field, proven: Mapping[Field, int], used: list[Hole]) -> str:
    if count := proven.get(field):
        return f"{count} test{'s' if count > 1 else ''}"
    hole = next((hole for hole in HOLES if hole.covers(field)), None)
    if hole is None:
        raise ValueError(f"{' / '.join(field)} has neither a test nor a reason in HOLES")
    if hole not in used:
        used.append(hole)
    return _letter(used.index(hole))


def _letter(number: int) -> str:
    return chr(ord("a") + number)


def fields_on(text: str) -> Iterator[Field]:
    """The fields with tests on a page."""
    framework = ""
    for line in text.splitlines():
        if line.startswith("## "):
            framework = line.removeprefix("## ")
        feature, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if feature in FEATURES and len(cells) == len(PARALLELISMS):
            yield from (
                (framework, parallelism, feature)
                for parallelism, cell in zip(PARALLELISMS, cells, strict=True)
                if "test" in cell
            )


WRITING = "ranktape-support"
"""The name of the plugin, while it writes the page."""


class SupportPlugin:
    """Counts the tests that passed for each field; writes the page at the end."""

    def __init__(self) -> None:
        self._fields: dict[str, list[Field]] = {}
        self._proven: Counter[Field] = Counter()
        self._compiled: list[CompiledRow] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests that have the marker."""
        for item in items:
            markers: Iterable[pytest.Mark] = item.iter_markers("support")
            self._fields[item.nodeid] = [field for marker in markers for field in fields(marker.kwargs)]
        kept = [item for item in items if self._fields[item.nodeid] or item.get_closest_marker("compiled_support")]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has run."""
        if report.when == "call" and report.passed:
            self._proven.update(self._fields[report.nodeid])
            self._compiled += [cast("CompiledRow", value) for name, value in report.user_properties if name == COMPILED]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """All have run."""
        if exitstatus == 0 and not session.config.option.collectonly:
            PAGE.write_text(page(self._proven, self._compiled), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Given as `-p tests.support`: run what has the marker, and write the page."""
    config.pluginmanager.register(SupportPlugin(), WRITING)
