"""`ranktape collect`: trains a script once in each precision, ends each training when enough is stored, and compares.

The trainings run one after the other on this machine, under torchrun or as one process. Each is recorded into its own
run below a common directory or URL. Its output is in a log next to the run.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import click

from ranktape.analyze.console import say
from ranktape.analyze.group import RanktapeCommand
from ranktape.errors import CaptureError, CheckFoundError, RunExistsError, RunNotFoundError, UsageError, expect_least
from ranktape.launch.options import Quantization, capture_arguments, capture_options
from ranktape.launch.place import read_options, shown

if TYPE_CHECKING:
    from ranktape.analyze.table import Table
    from ranktape.storage import Records
    from ranktape.storage.places.backend import Backend

DEMO = ("--nproc-per-node", "2", "-m", "ranktape.launch.demo_train")
"""The training if no script is given."""

PYTHON = "python"
"""The first word of the command line of a training in one process, without torchrun."""

NUM_ITERATIONS = 3
"""Default number of iterations that each run guarantees."""

RECORD = "collect.json"
"""The file next to the runs that contains the command that made them."""

END_SECONDS = 60.0
"""Longest time that a training may take to exit after SIGTERM. torchrun gives its ranks 30 s."""

PRODUCTS = ("output", "grad_input", "grad_weight")
"""The results of linear layers by which runs are compared."""

_LOOK_SECONDS = 0.5
_TAIL_LINES = 15

_OWN = ("stop_when_stored", "resume", "overwrite", "quant_type", "first_iteration", "record_last", "trigger")
"""The settings of a capture that are not options, because this command sets them."""


@click.command(
    name="collect",
    cls=RanktapeCommand,
    context_settings={"allow_interspersed_args": False, "max_content_width": 100},
)
@click.option(
    "--quant",
    metavar="RECIPES",
    required=True,
    help="The precisions, with commas between them; the others are compared with the first: bf16,mxfp8,mxfp4,hifp8.",
)
@click.option("--quant-attention", is_flag=True, help="Quantise attention by the recipes, too.")
@click.option("--output", metavar="URL", default="runs/collect", show_default=True, help="Where the runs are recorded.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=float,
    default=300.0,
    show_default=True,
    help="Longest time of each training; what is stored then is kept.",
)
@click.option(
    "--min-records",
    metavar="N",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Records that each run must have.",
)
@click.option("--overwrite", is_flag=True, help="Train those again that are stored already.")
@click.argument("words", metavar="[-- TORCHRUN_OPTIONS | python SCRIPT ARGUMENTS]", nargs=-1, type=click.UNPROCESSED)
@capture_options(without=_OWN, defaults={"min_iterations": NUM_ITERATIONS})
def command(
    quant: str,
    *,
    quant_attention: bool,
    output: str,
    timeout: float,
    min_records: int,
    overwrite: bool,
    words: tuple[str, ...],
    **values: Any,
) -> None:
    """Train a script, unmodified, once in each precision, and compare what was recorded.

    Everything after -- is passed to torchrun: its options, the script and its arguments. 'python', a script and its
    arguments run one process without torchrun; without anything the demo is trained. A training ends when its
    guaranteed iterations are stored. If the first training fails, the others are not started. Run the command again to
    resume.
    """
    expect_least(1, timeout=timeout)
    quantizations = _quantizations(quant, has_attention=quant_attention)
    before, script = split_words(words or DEMO)
    _check(values, script)
    place = _Place(output.rstrip("/"), read_options(values.get("storage_options")))
    place.claim([*(["--quant-attention"] if quant_attention else []), *before, *script], overwrite=overwrite)
    values["min_iterations"] = values.get("min_iterations") or NUM_ITERATIONS
    problems: dict[str, str] = {}
    has_failed = False
    for number, one in enumerate(quantizations, start=1):
        head = f"[{one.tag}, {number} of {len(quantizations)}]"
        num_stored, problem, is_dead = place.num_stored(one.tag), "", False
        if num_stored is not None and num_stored >= values["min_iterations"] and not overwrite:
            say(f"{head} is stored already in {shown(place.url_of(one.tag))} (--overwrite trains it again)")
        else:
            call = _launch(before, script, place.url_of(one.tag), one, values, overwrite=num_stored is not None)
            problem, is_dead = place.train(one.tag, call, head=head, timeout=timeout)
        if lack := place.lacks(one.tag, values["min_iterations"], min_records):
            problems[one.tag] = problem or lack
            has_failed |= is_dead
            if is_dead and number == 1:
                # A mistake of the script fails in every precision, and the others could not be compared.
                if rest := quantizations[1:]:
                    say(f"{', '.join(other.tag for other in rest)}: not trained, because the first training failed")
                break
    place.compare([one.tag for one in quantizations])
    if text := "; ".join(f"{tag}: {problem}" for tag, problem in problems.items()):
        raise (CaptureError if has_failed else CheckFoundError)(text)


def _quantizations(quant: str, *, has_attention: bool) -> list[Quantization]:
    found: dict[str, Quantization] = {}
    for word in map(str.strip, quant.split(",")):
        one = Quantization.of_options(word, attention=has_attention) if word else None
        if one is None:
            raise UsageError(f"--quant {quant!r:.80} names nothing at one place: give names, as bf16,mxfp8")
        if one.tag in found:
            raise UsageError(f"--quant {quant!r:.80} names {one.tag} twice: name it once")
        found[one.tag] = one
    return list(found.values())


def _check(values: Mapping[str, Any], script: Sequence[str]) -> None:
    """Check the settings and the script before anything is trained.

    Raises:
        UsageError: a setting or the script is not valid.
    """
    from ranktape.capture.settings.config import given_settings
    from ranktape.capture.settings.options import CaptureOptions
    from ranktape.launch.script import Script

    CaptureOptions(**given_settings(values))
    is_module = script[0] == "-m"
    Script(name=script[is_module], arguments=(), is_module=is_module).check()


def _launch(
    before: Sequence[str],
    script: Sequence[str],
    url: str,
    quantization: Quantization,
    values: Mapping[str, Any],
    *,
    overwrite: bool,
) -> list[str]:
    """The command line of one training."""
    own = ["--capture", url, *quantization.options, "--stop-when-stored", *(["--overwrite"] if overwrite else [])]
    return [*launcher_words(before), *own, *capture_arguments(values), *script]


def launcher_words(before: Sequence[str]) -> list[str]:
    """The first words of a command line that records: Python, torchrun with its options, and the launcher.

    If the options start with `python`, torchrun is left out.
    """
    if before[:1] == (PYTHON,):
        launcher = list(before[1:])
    else:
        is_placed = any(word.startswith(("--standalone", "--rdzv", "--nnodes", "--master")) for word in before)
        launcher = ["-m", "torch.distributed.run", *([] if is_placed else ["--standalone"]), *before]
    return [sys.executable, *launcher, "-m", "ranktape.launch"]


@dataclass(frozen=True, slots=True)
class _Place:
    """The directory or URL of the runs, their logs and the report."""

    url: str
    options: dict[str, Any] | None

    @property
    def backend(self) -> Backend:
        from ranktape.storage.places.urls import open_backend

        return open_backend(self.url, storage_options=self.options)

    def url_of(self, tag: str) -> str:
        """The URL of one run."""
        return f"{self.url}/{tag}"

    def claim(self, words: list[str], *, overwrite: bool) -> None:
        """Write the file with the command of the runs.

        Raises:
            RunExistsError: there are runs of another command, and `overwrite` is false.
        """
        from ranktape.storage.maintenance.runs import find_runs

        try:
            before = json.loads(self.backend.get(RECORD) or b"{}").get("command")
        except (ValueError, AttributeError):
            before = None
        # A previous command that has stored nothing, for example because of a mistake, is ignored.
        if before and before != words and not overwrite:
            runs = find_runs(self.url, storage_options=self.options, max_depth=1)
            if any(run.iterations for run in runs):
                raise RunExistsError(
                    f"{shown(self.url)} holds the trainings of another command ({shlex.join(map(str, before))}): add "
                    f"--overwrite to train anew, or choose another --output"
                )
        self.backend.put(RECORD, [json.dumps({"command": words}, indent=2).encode()])

    def records(self, tag: str) -> Records:
        """The records of one run."""
        from ranktape.storage import open_run

        return open_run(self.url_of(tag), storage_options=self.options).select()

    def num_stored(self, tag: str) -> int | None:
        """Number of complete iterations of a run; None if there is no run."""
        from ranktape.storage import open_run

        try:
            return len(open_run(self.url_of(tag), storage_options=self.options).iterations)
        except RunNotFoundError:
            return None

    def lacks(self, tag: str, min_iterations: int, min_records: int) -> str:
        """What is missing in a run; empty if nothing is."""
        if (self.num_stored(tag) or 0) < min_iterations:
            return "its guaranteed iterations are not stored"
        num = len(self.records(tag))
        why = f"{num} of {min_records} records are stored: select more, or raise --min-iterations"
        return "" if num >= min_records else why

    def train(self, tag: str, command: Sequence[str], *, head: str, timeout: float) -> tuple[str, bool]:
        """Train in one precision.

        Returns:
            What went wrong, empty if nothing did, and whether the training itself failed.
        """
        is_remote = "://" in self.url
        folder = Path(tempfile.mkdtemp(prefix="ranktape-") if is_remote else self.url)
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{tag}.log"
        say(f"{head} trains; its output is in {log}")
        began, known = time.monotonic(), 0
        with log.open("wb") as output, _training(command, output) as process:
            is_over = False
            while not is_over and time.monotonic() < began + timeout:
                is_over = process.poll() is not None
                if (complete := self.num_stored(tag) or 0) > known:
                    say(f"{head} {complete} iterations are complete")
                known = complete
                time.sleep(0 if is_over else _LOOK_SECONDS)
        if is_remote:
            self.backend.put(log.name, [log.read_bytes()])
        problem, is_dead = "", is_over and process.returncode != 0
        if is_dead:
            problem = f"the training ended with exit code {process.returncode}"
            say(_tail(log))
        elif not is_over:
            problem = f"after {timeout:g} s the training was ended; what was stored is kept (--timeout gives more)"
        say(f"{head} {problem or f'done in {time.monotonic() - began:.0f} s'}")
        return problem, is_dead

    def losses(self, tag: str) -> list[tuple[int, float]]:
        """The steps and losses that a training printed, in ascending order of steps."""
        text = (self.backend.get(f"{tag}.log") or b"").decode(errors="replace")
        found: dict[int, float] = {}
        for line in text.splitlines():
            loss, step = _LOSS.search(line), _STEP.search(line)
            if loss is not None:
                # Several ranks may print the same step; the first one counts.
                found.setdefault(int(step[1]) if step is not None else len(found), float(loss[1]))
        return sorted(found.items())

    def compare(self, tags: Sequence[str]) -> None:
        """Print a table, and write the report on all runs with records, which starts with that table."""
        from ranktape.analyze import write_report
        from ranktape.analyze.table import write_table
        from ranktape.analyze.views.report.model import Comparison
        from ranktape.storage.records.records import unite

        runs = {tag: self.records(tag) for tag in tags if self.num_stored(tag)}
        runs = {tag: records for tag, records in runs.items() if len(records)}
        if not runs:
            return
        first = next(iter(runs))
        found = {tag: _sqnr_of(runs[first], records) for tag, records in runs.items() if tag != first}
        losses = {tag: self.losses(tag) for tag in runs}
        table = _summary(runs, found, losses)
        write_table(table)
        comparison = Comparison(
            table=table,
            said=f"SQNR in dB of each product against {first}, in the first iteration that both recorded; the colours "
            f"change at {TARGET_SQNR:g} dB. Errors accumulate through the layers: 'ranktape analyze replay' gives each "
            "product alone.",
            sqnr={(*site, tag): value for tag, one in found.items() for site, value in one.items()},
            target_sqnr=TARGET_SQNR,
            losses=losses,
        )
        is_remote = "://" in self.url
        page = Path(tempfile.mkdtemp(prefix="ranktape-") if is_remote else self.url) / "report.html"
        urls = ", ".join(map(self.url_of, runs))
        write_report(unite(runs) if len(runs) > 1 else runs[first], output=page, url=urls, comparison=comparison)
        if is_remote:
            self.backend.put(page.name, [page.read_bytes()])
        say(f"open it in a browser: {page.resolve().as_uri()}")


TARGET_SQNR = 18.0
"""The SQNR at which the colours of the report change, in dB; the same as the first target in `docs/replay.md`."""

_LOSS = re.compile(r"\bloss\b[^0-9+\-.naif]*([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))\b")
_STEP = re.compile(r"\b(?:step|iter(?:ation)?)\b\D{0,3}(\d+)")


def _sqnr_of(first: Records, records: Records) -> dict[tuple[str, str], float]:
    """The median SQNR over calls and ranks, in dB, for each module and product, in the first common iteration."""
    from ranktape.analyze import compare

    common = set(first.column("iteration").tolist()) & set(records.column("iteration").tolist())
    wanted = f"iteration == {min(common, default=-1)} and layer_type == 'linear' and tensor_name in {list(PRODUCTS)}"
    sides = first.where(wanted), records.where(wanted)
    if not all(map(len, sides)):
        return {}
    pair = "quant_type=" + ":".join(side.column("quant_type").tolist()[0] for side in sides)
    found: dict[tuple[str, str], list[float]] = {}
    for row in compare(*sides, pair=pair, allow_unmatched=True, distances=False, in_order=True).records():
        if row["sqnr"] is not None:
            found.setdefault((row["module"], row["tensor_name"]), []).append(row["sqnr"])
    return {site: statistics.median(values) for site, values in found.items()}


def _summary(
    runs: Mapping[str, Records],
    found: Mapping[str, Mapping[tuple[str, str], float]],
    losses: Mapping[str, Sequence[tuple[int, float]]],
) -> Table:
    """A table with one row for each training. Columns with equal values are left out, and counts become notes."""
    from ranktape.analyze.table import Column, Kind, Table

    first = next(iter(runs))
    last = max(set.intersection(*({step for step, _ in points} for points in losses.values())), default=None)
    rows = []
    for tag, records in runs.items():
        sqnr = found.get(tag, {})
        site = min(sqnr, key=sqnr.__getitem__, default=None)
        worst = (None, "") if site is None else (sqnr[site], f"{site[1]} of {site[0]}")
        counts = len(set(records.column("iteration").tolist())), len(records)
        loss = None if last is None else dict(losses[tag])[last]
        rows.append((tag, *counts, statistics.median(sqnr.values()) if sqnr else None, *worst, loss))
    notes = [f"SQNR: median over products of linear layers against {first}, first common iteration"]
    silent = [tag for tag, points in losses.items() if not points]
    if last is not None:
        notes.append(f"loss: at step {last}, the last that all have printed")
    elif silent:
        notes.append(f"no loss: {', '.join(silent)} printed no line such as 'step 10 loss 2.345'")
    else:
        notes.append("no loss: there is no step at which all have printed one")
    columns = (
        Column(name="quant_type", kind=Kind.TEXT),
        Column(name="iterations", kind=Kind.INTEGER),
        Column(name="records", kind=Kind.INTEGER),
        Column(name="sqnr", kind=Kind.FLOAT, unit="dB", head="SQNR"),
        Column(name="worst_sqnr", kind=Kind.FLOAT, unit="dB", head="worst"),
        Column(name="worst", kind=Kind.TEXT, head="worst product"),
        Column(name="loss", kind=Kind.FLOAT),
    )
    same = [place for place in range(1, len(columns)) if len({row[place] for row in rows}) == 1]
    if len(rows) > 1:
        notes += [f"{columns[place].name} of each: {rows[0][place]:,}" for place in same if place in {1, 2}]
    shown = [place for place in range(len(columns)) if place not in same]
    return Table(
        title=f"what differs from {first}",
        columns=tuple(columns[place] for place in shown),
        rows=tuple(tuple(row[place] for place in shown) for row in rows),
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _training(command: Sequence[str], output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a training in a separate session; at the end of the block, it and all its ranks are ended."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    # If this process gets SIGTERM, for example from `timeout` or a scheduler, it ends the training too.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield process
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def split_words(words: Sequence[str], *, own: Collection[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split a command line into the options of torchrun, and the script with its arguments (-m before a module).

    For `python [options] script`, the first part is `python` and its options. `own` are the options of the command; an
    error for an unknown option suggests the nearest of them.

    Raises:
        UsageError: torchrun would not accept the command line, or there is no script.
    """
    given = list(words[1:] if words[:1] == ("torchrun",) else words)
    if not given:
        raise UsageError("no script is given: after -- give the options of torchrun, the script and its arguments")
    if re.fullmatch(r"python[\d.]*", Path(given[0]).name):
        return _split_python(given)
    from torch.distributed.run import determine_local_world_size, get_args_parser

    def fail(message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        near = difflib.get_close_matches(unknown[1], own, n=1) if unknown else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"torchrun would not take {shlex.join(given):.200}: {message}{hint}")

    parser = get_args_parser()
    parser.error = fail  # type: ignore[method-assign]  # its own ends the process
    parsed = parser.parse_args(given)
    try:
        determine_local_world_size(parsed.nproc_per_node)
    except ValueError as error:
        fail(str(error))
    if parsed.no_python:
        raise UsageError("--no-python is not for what is recorded: give a script, or -m and a module")
    before = given[: len(given) - 1 - len(parsed.training_script_args)]
    if parsed.module:
        before = [word for word in before if word not in {"-m", "--module"}]
    return tuple(before), (*(["-m"] if parsed.module else []), parsed.training_script, *parsed.training_script_args)


def _split_python(given: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split a command line of Python as in `split_words`."""
    start = 1
    while start < len(given) and given[start].startswith("-") and given[start] != "-m":
        start += 2 if given[start] in {"-X", "-W"} else 1
    script = tuple(given[start:])
    if "-c" in given[:start] or not script or script == ("-m",):
        raise UsageError(
            f"{shlex.join(given):.200} runs no script: give python, a script or -m and a module, its arguments"
        )
    return (PYTHON, *given[1:start]), script


def _tail(log: Path) -> str:
    """The last lines of a log before torchrun's own messages, preceded by ranktape's errors in earlier lines."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    ends = (place for place, line in enumerate(lines) if re.match(r"[EW]\d{4} .*torch/distributed/elastic/", line))
    own = lines[: next(ends, len(lines))]
    errors = [line for line in own[:-_TAIL_LINES] if line.startswith("ranktape: error: ")]
    return "\n".join(f"    {line}" for line in [*errors, *own[-_TAIL_LINES:]])
