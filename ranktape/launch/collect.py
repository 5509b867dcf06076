"""`ranktape collect`: trains a script once in each precision, ends each training when enough is stored, and compares.

The trainings run one after the other on this machine, under torchrun or as one process. Each is recorded into its own
run below a common directory or URL. Its output is in a log next to the run.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
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
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import click

from ranktape.analyze.console import say
from ranktape.analyze.group import RanktapeCommand
from ranktape.errors import CaptureError, CheckFoundError, RunExistsError, RunNotFoundError, UsageError, expect_least
from ranktape.launch.options import Quantization, capture_arguments, capture_options
from ranktape.launch.place import count_text, read_options, shown

if TYPE_CHECKING:
    from ranktape.analyze.table import Table
    from ranktape.storage import Records, Run

DEMO = ("--nproc-per-node", "2", "-m", "ranktape.launch.demo_train")
"""The training if no script is given."""

PYTHON = "python"
"""The first word of the command line of a training in one process, without torchrun."""

NUM_ITERATIONS = 3
"""Default number of iterations that each run guarantees."""

COMMAND_FILE = "collect.json"
"""The file next to the runs that contains the command that made them."""

END_SECONDS = 60.0
"""Longest time that a training may take to exit after SIGTERM. torchrun gives its ranks 30 s."""

PRODUCTS = ("output", "grad_input", "grad_weight")
"""The results of linear layers by which runs are compared."""

TARGET_SQNR = 18.0
"""The SQNR at which the colours of the report change, in dB; the same as the first target in `docs/replay.md`."""

_POLL_SECONDS = 0.5
_TAIL_LINES = 15

_PRESET = ("stop_when_stored", "resume", "overwrite", "quant_type", "first_iteration", "record_last", "trigger")
"""The settings of a capture that are not options, because this command sets them."""


@click.command(
    name="collect", cls=RanktapeCommand, context_settings={"allow_interspersed_args": False, "max_content_width": 100}
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
    help="Longest time of each training; what it has stored by then is kept.",
)
@click.option(
    "--min-records",
    metavar="N",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Records that each run must have.",
)
@click.option("--overwrite", is_flag=True, help="Train again in the precisions that are stored already.")
@click.argument("words", metavar="[-- TORCHRUN_OPTIONS | python SCRIPT ARGUMENTS]", nargs=-1, type=click.UNPROCESSED)
@capture_options(without=_PRESET, defaults={"min_iterations": NUM_ITERATIONS})
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
    launcher, script = split_words(words or DEMO)
    min_iterations = values["min_iterations"] = values.get("min_iterations") or NUM_ITERATIONS
    _check(values, script)
    trainings = _Trainings(output.rstrip("/"), read_options(values.get("storage_options")))
    attention = ["--quant-attention"] if quant_attention else []
    trainings.claim([*attention, *launcher, *script], overwrite=overwrite)
    problems: dict[str, str] = {}
    has_failed = False
    for number, quantization in enumerate(quantizations, start=1):
        tag = quantization.tag
        label = f"[{tag}, {number} of {len(quantizations)}]"
        num_stored, problem, is_failed = trainings.num_stored(tag), "", False
        if num_stored is not None and num_stored >= min_iterations and not overwrite:
            say(f"{label} is stored already in {shown(trainings.url_of(tag))} (--overwrite trains it again)")
        else:
            options = ["--capture", trainings.url_of(tag), *quantization.options, "--stop-when-stored"]
            options += ["--overwrite"] if num_stored is not None else []
            call = [*launcher_words(launcher), *options, *capture_arguments(values), *script]
            problem, is_failed = trainings.train(tag, call, label=label, timeout=timeout)
        if missing := trainings.missing(tag, min_iterations, min_records):
            problems[tag] = problem or missing
            has_failed |= is_failed
            if is_failed and number == 1:
                # A mistake of the script fails in every precision, and the others could not be compared.
                if rest := ", ".join(other.tag for other in quantizations[1:]):
                    say(f"{rest}: not trained, because the first training failed")
                break
    trainings.compare([quantization.tag for quantization in quantizations])
    if text := "; ".join(f"{tag}: {problem}" for tag, problem in problems.items()):
        raise (CaptureError if has_failed else CheckFoundError)(text)


def _quantizations(quant: str, *, has_attention: bool) -> list[Quantization]:
    by_tag: dict[str, Quantization] = {}
    for name in map(str.strip, quant.split(",")):
        quantization = Quantization.of_options(name, attention=has_attention) if name else None
        if quantization is None:
            raise UsageError(f"--quant {quant!r:.80} has an empty name: give names, such as bf16,mxfp8")
        if quantization.tag in by_tag:
            raise UsageError(f"--quant {quant!r:.80} has {quantization.tag} twice: give it once")
        by_tag[quantization.tag] = quantization
    return list(by_tag.values())


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


def launcher_words(options: Sequence[str]) -> list[str]:
    """The first words of a command line that records: Python, torchrun with its options, and the launcher.

    If the options start with `python`, torchrun is left out.
    """
    if options[:1] == (PYTHON,):
        launcher = list(options[1:])
    else:
        has_rendezvous = any(word.startswith(("--standalone", "--rdzv", "--nnodes", "--master")) for word in options)
        launcher = ["-m", "torch.distributed.run", *([] if has_rendezvous else ["--standalone"]), *options]
    return [sys.executable, *launcher, "-m", "ranktape.launch"]


class _Trainings:
    """The trainings of one command: their runs below a directory or URL, with the logs and the report."""

    def __init__(self, url: str, storage_options: dict[str, Any] | None) -> None:
        from ranktape.storage.places.urls import open_backend

        self.url, self._options = url, storage_options
        self._backend = open_backend(url, storage_options=storage_options)
        self._is_remote = "://" in url

    @functools.cached_property
    def _folder(self) -> Path:
        """The local folder of the logs and the report; a temporary one if the URL is that of an object store."""
        folder = Path(tempfile.mkdtemp(prefix="ranktape-") if self._is_remote else self.url)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _upload(self, path: Path) -> None:
        if self._is_remote:
            self._backend.put(path.name, [path.read_bytes()])

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
            earlier = json.loads(self._backend.get(COMMAND_FILE) or b"{}").get("command")
        except (ValueError, AttributeError):
            earlier = None
        # A previous command that has stored nothing, for example because of a mistake, is ignored.
        if earlier and earlier != words and not overwrite:
            runs = find_runs(self.url, storage_options=self._options, max_depth=1)
            if any(run.iterations for run in runs):
                raise RunExistsError(
                    f"{shown(self.url)} has runs of another command ({shlex.join(map(str, earlier))}): add --overwrite "
                    f"to train again, or choose another --output"
                )
        self._backend.put(COMMAND_FILE, [json.dumps({"command": words}, indent=2).encode()])

    def _run(self, tag: str) -> Run | None:
        from ranktape.storage import open_run

        try:
            return open_run(self.url_of(tag), storage_options=self._options)
        except RunNotFoundError:
            return None

    def num_stored(self, tag: str) -> int | None:
        """Number of complete iterations of a run; None if there is no run."""
        run = self._run(tag)
        return None if run is None else len(run.iterations)

    def missing(self, tag: str, min_iterations: int, min_records: int) -> str:
        """What is missing in a run; empty if nothing is."""
        run = self._run(tag)
        if run is None or len(run.iterations) < min_iterations:
            return "its guaranteed iterations are not stored"
        num = len(run.select())
        reason = f"{num} of {min_records} records are stored: select more, or raise --min-iterations"
        return "" if num >= min_records else reason

    def train(self, tag: str, call: Sequence[str], *, label: str, timeout: float) -> tuple[str, bool]:
        """Train in one precision.

        Returns:
            A description of the problem, empty if there was none, and whether the training itself failed.
        """
        log = self._folder / f"{tag}.log"
        say(f"{label} trains; its output is in {log}")
        began, num_known = time.monotonic(), 0
        with log.open("wb") as output, _process(call, output) as process:
            is_over = False
            while not is_over and time.monotonic() < began + timeout:
                is_over = process.poll() is not None
                if (num_stored := self.num_stored(tag) or 0) > num_known:
                    say(f"{label} {count_text(num_stored, 'iteration')} complete")
                num_known = num_stored
                time.sleep(0 if is_over else _POLL_SECONDS)
        self._upload(log)
        problem, is_failed = "", is_over and process.returncode != 0
        if is_failed:
            problem = f"the training ended with exit code {process.returncode}"
            say(_tail(log))
        elif not is_over:
            problem = f"the training was ended after {timeout:g} s; what was stored is kept (raise --timeout)"
        say(f"{label} {problem or f'done in {time.monotonic() - began:.0f} s'}")
        return problem, is_failed

    def losses(self, tag: str) -> list[tuple[int, float]]:
        """The steps and losses that a training printed, in ascending order of steps."""
        text = (self._backend.get(f"{tag}.log") or b"").decode(errors="replace")
        by_step: dict[int, float] = {}
        for line in text.splitlines():
            loss, step = _LOSS.search(line), _STEP.search(line)
            if loss is not None:
                # Several ranks may print the same step; the first one counts.
                by_step.setdefault(int(step[1]) if step is not None else len(by_step), float(loss[1]))
        return sorted(by_step.items())

    def compare(self, tags: Sequence[str]) -> None:
        """Print a table, and write the report on all runs with records, which starts with that table."""
        from ranktape.analyze import write_report
        from ranktape.analyze.table import write_table
        from ranktape.analyze.views.report.model import Comparison
        from ranktape.storage.records.records import unite

        runs = {tag: records for tag in tags if (run := self._run(tag)) is not None and len(records := run.select())}
        if not runs:
            return
        first = next(iter(runs))
        sqnr = {tag: _sqnr_of(runs[first], records) for tag, records in runs.items() if tag != first}
        losses = {tag: self.losses(tag) for tag in runs}
        table = _summary(runs, sqnr, losses)
        write_table(table)
        comparison = Comparison(
            table=table,
            explanation=f"SQNR in dB of each product against {first}, in the first iteration that both recorded; the "
            f"colours change at {TARGET_SQNR:g} dB. Errors accumulate through the layers: 'ranktape analyze replay' "
            "gives the error of each product by itself.",
            sqnr={(*site, tag): value for tag, by_site in sqnr.items() for site, value in by_site.items()},
            target_sqnr=TARGET_SQNR,
            losses=losses,
        )
        page = self._folder / "report.html"
        urls = ", ".join(map(self.url_of, runs))
        write_report(unite(runs) if len(runs) > 1 else runs[first], output=page, url=urls, comparison=comparison)
        self._upload(page)
        say(f"open it in a browser: {page.resolve().as_uri()}")


_LOSS = re.compile(r"\bloss\b[^0-9+\-.naif]*([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))\b")
_STEP = re.compile(r"\b(?:step|iter(?:ation)?)\b\D{0,3}(\d+)")


def _sqnr_of(reference: Records, records: Records) -> dict[tuple[str, str], float]:
    """The median SQNR over calls and ranks, in dB, for each module and product, in the first common iteration."""
    from ranktape.analyze import compare

    common = set(reference.column("iteration").tolist()) & set(records.column("iteration").tolist())
    where = f"iteration == {min(common, default=-1)} and layer_type == 'linear' and tensor_name in {list(PRODUCTS)}"
    sides = reference.where(where), records.where(where)
    if not all(map(len, sides)):
        return {}
    pair = "quant_type=" + ":".join(side.column("quant_type").tolist()[0] for side in sides)
    by_site: dict[tuple[str, str], list[float]] = {}
    for row in compare(*sides, pair=pair, allow_unmatched=True, distances=False, in_order=True).records():
        if row["sqnr"] is not None:
            by_site.setdefault((row["module"], row["tensor_name"]), []).append(row["sqnr"])
    return {site: statistics.median(values) for site, values in by_site.items()}


def _summary(
    runs: Mapping[str, Records],
    sqnr: Mapping[str, Mapping[tuple[str, str], float]],
    losses: Mapping[str, Sequence[tuple[int, float]]],
) -> Table:
    """A table with one row for each training. Columns with equal values are left out, and counts become notes."""
    from ranktape.analyze.table import Column, Kind, Table

    first = next(iter(runs))
    last_step = max(set.intersection(*({step for step, _ in points} for points in losses.values())), default=None)
    rows = []
    for tag, records in runs.items():
        by_site = sqnr.get(tag, {})
        site = min(by_site, key=by_site.__getitem__, default=None)
        worst = (None, "") if site is None else (by_site[site], f"{site[1]} of {site[0]}")
        counts = len(set(records.column("iteration").tolist())), len(records)
        loss = None if last_step is None else dict(losses[tag])[last_step]
        rows.append((tag, *counts, statistics.median(by_site.values()) if by_site else None, *worst, loss))
    notes = [f"SQNR: median over products of linear layers against {first}, first common iteration"]
    without_loss = [tag for tag, points in losses.items() if not points]
    if last_step is not None:
        notes.append(f"loss: at step {last_step}, the last step for which all trainings printed a loss")
    elif without_loss:
        notes.append(f"no loss: {', '.join(without_loss)} printed no line such as 'step 10 loss 2.345'")
    else:
        notes.append("no loss: there is no step for which all trainings printed a loss")
    columns = (
        Column(name="quant_type", kind=Kind.TEXT),
        Column(name="iterations", kind=Kind.INTEGER),
        Column(name="records", kind=Kind.INTEGER),
        Column(name="sqnr", kind=Kind.FLOAT, unit="dB", head="SQNR"),
        Column(name="worst_sqnr", kind=Kind.FLOAT, unit="dB", head="worst"),
        Column(name="worst", kind=Kind.TEXT, head="worst product"),
        Column(name="loss", kind=Kind.FLOAT),
    )
    constant = [index for index in range(1, len(columns)) if len({row[index] for row in rows}) == 1]
    if len(rows) > 1:
        notes += [f"{columns[index].name} of each: {rows[0][index]:,}" for index in constant if index in {1, 2}]
    indices = [index for index in range(len(columns)) if index not in constant]
    return Table(
        title=f"differences from {first}",
        columns=tuple(columns[index] for index in indices),
        rows=tuple(tuple(row[index] for index in indices) for row in rows),
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _process(call: Sequence[str], output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a training in a separate session; at the end of the block, it and all its ranks are ended."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(call, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    # If this process gets SIGTERM, for example from `timeout` or a scheduler, it ends the training too.
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield process
    finally:
        signal.signal(signal.SIGTERM, handler)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def split_words(words: Sequence[str], *, known: Collection[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split a command line into the options of torchrun, and the script with its arguments (-m before a module).

    For `python [options] script`, the first part is `python` and its options. `known` are the options of the command;
    an error for an unknown option suggests the nearest of them.

    Raises:
        UsageError: torchrun would not accept the command line, or there is no script.
    """
    line = list(words[1:] if words[:1] == ("torchrun",) else words)
    if not line:
        raise UsageError("no script is given: after -- give the options of torchrun, the script and its arguments")
    if re.fullmatch(r"python[\d.]*", Path(line[0]).name):
        return _split_python(line)
    from torch.distributed.run import determine_local_world_size, get_args_parser

    def fail(message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        near = difflib.get_close_matches(unknown[1], known, n=1) if unknown else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"torchrun does not accept {shlex.join(line):.200}: {message}{hint}")

    parser = get_args_parser()
    parser.error = fail  # type: ignore[method-assign]  # its own ends the process
    parsed = parser.parse_args(line)
    try:
        determine_local_world_size(parsed.nproc_per_node)
    except ValueError as error:
        fail(str(error))
    if parsed.no_python:
        raise UsageError("--no-python cannot be recorded: give a Python script, or -m and a module")
    options = line[: len(line) - 1 - len(parsed.training_script_args)]
    if parsed.module:
        options = [word for word in options if word not in {"-m", "--module"}]
    return tuple(options), (*(["-m"] if parsed.module else []), parsed.training_script, *parsed.training_script_args)


def _split_python(line: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split a command line of Python as in `split_words`."""
    start = 1
    while start < len(line) and line[start].startswith("-") and line[start] != "-m":
        start += 2 if line[start] in {"-X", "-W"} else 1
    script = tuple(line[start:])
    if "-c" in line[:start] or not script or script == ("-m",):
        raise UsageError(
            f"{shlex.join(line):.200} runs no script: give python, a script or -m and a module, and its arguments"
        )
    return (PYTHON, *line[1:start]), script


def _tail(log: Path) -> str:
    """The last lines of a log before torchrun's own messages, preceded by ranktape's errors in earlier lines."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    starts = (index for index, line in enumerate(lines) if re.match(r"[EW]\d{4} .*torch/distributed/elastic/", line))
    printed = lines[: next(starts, len(lines))]
    errors = [line for line in printed[:-_TAIL_LINES] if line.startswith("ranktape: error: ")]
    return "\n".join(f"    {line}" for line in [*errors, *printed[-_TAIL_LINES:]])
