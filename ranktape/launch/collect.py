"""`ranktape collect`: trains a script once in each precision, ends each training when enough is stored, and compares.

One training after the other on this machine, by torchrun or as one process, each recorded into a run of its own below
one place; what the trainings print is in a log beside each run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import click

from ranktape.analyze.console import say
from ranktape.errors import CaptureError, CheckFoundError, RunExistsError, RunNotFoundError, UsageError
from ranktape.launch.options import capture_arguments, capture_options
from ranktape.launch.place import read_options, shown

if TYPE_CHECKING:
    from ranktape.launch.collected import Collected
    from ranktape.launch.quantization import Quantization
    from ranktape.storage.maintenance.runs import RunSummary
    from ranktape.storage.places.backend import Backend

DEMO = ("--nproc-per-node", "2", "-m", "ranktape.launch.demo_train")
"""What is trained where no script is given."""

PYTHON = "python"
"""First word of the command line of a training in one process, without torchrun."""

NUM_ITERATIONS = 3
"""Iterations that each run guarantees."""

RECORD = "collect.json"
"""The file beside the runs that says what they are of."""

END_SECONDS = 60.0
"""How long a training that is told to end may take: torchrun gives its ranks 30."""

_LOOK_SECONDS = 0.5
_TAIL_LINES = 15
_OF_TORCHRUN = re.compile(r"[EW]\d{4} .*torch/distributed/elastic/")
_LOSS = re.compile(r"\bloss\b[\"']?\s*[:=]?\s*[\"']?(-?[0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?|nan|-?inf)", re.IGNORECASE)

_OWN = (*("stop_when_stored", "resume", "overwrite", "quant_type", "first_iteration", "record_last", "trigger"),)
"""Settings of a capture that this command decides on."""


@click.command(name="collect", context_settings={"allow_interspersed_args": False, "max_content_width": 100})
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
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Longest time of each training; what is stored then is kept.",
)
@click.option(
    "--min-records", type=click.IntRange(min=1), default=10, show_default=True, help="Records that each run must have."
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

    What stands behind -- is what torchrun would be given: its options, the script, the script's arguments; or 'python',
    the script and its arguments, for one process without torchrun. Without it the demo is trained. A training ends as
    soon as its guaranteed iterations are stored. If the first training fails, the others are not begun. Called again,
    only those trainings are done that are missing. Exit code 3: not everything was stored that was asked for.
    """
    plan = _Plan.of(quant, has_attention=quant_attention, output=output, words=words, values=values)
    plan.check(overwrite=overwrite)
    done: list[Collected] = []
    for number, quantization in enumerate(plan.quantizations, start=1):
        head = f"[{quantization.tag}, {number} of {len(plan.quantizations)}]"
        done.append(plan.collect(quantization, head=head, timeout=timeout, overwrite=overwrite))
        if number == 1 and done[0].has_failed:
            # A mistake of the script fails in every precision; and there is nothing to compare the others with.
            if rest := plan.quantizations[1:]:
                say(f"{', '.join(one.tag for one in rest)}: not trained, because the first training failed")
            break
    done = [_judged(one, min_records=min_records, options=plan.options) for one in done]
    _finish(done, plan)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is to be trained, and where it is recorded."""

    quantizations: tuple[Quantization, ...]
    output: str
    before: tuple[str, ...]
    """The options of torchrun; `python` and its options for one process without torchrun."""
    script: tuple[str, ...]
    """The script and its arguments, or -m and a module."""
    values: dict[str, Any]
    """The settings of the captures."""
    folder: Path
    """Where logs and the page are written; those of runs in an object store are copied there."""

    @classmethod
    def of(
        cls, quant: str, *, has_attention: bool, output: str, words: Sequence[str], values: Mapping[str, Any]
    ) -> _Plan:
        from ranktape.launch.quantization import Quantization

        found: dict[str, Quantization] = {}
        for word in map(str.strip, quant.split(",")):
            one = Quantization.of_words(word, None, has_attention=has_attention) if word else None
            if one is None:
                raise UsageError(f"--quant {quant!r:.80} names nothing at one place: give names, as bf16,mxfp8")
            if one.tag in found:
                raise UsageError(f"--quant {quant!r:.80} names {one.tag} twice: name it once")
            found[one.tag] = one
        before, script = split_words(words or DEMO)
        # Beside the runs, not in them: all that is in a run is Zarr.
        is_remote = "://" in output
        return cls(
            quantizations=tuple(found.values()),
            output=output.rstrip("/"),
            folder=Path(tempfile.mkdtemp(prefix="ranktape-") if is_remote else output),
            before=before,
            script=script,
            values={**values, "min_iterations": values.get("min_iterations") or NUM_ITERATIONS},
        )

    @property
    def options(self) -> dict[str, Any] | None:
        """Those of the store."""
        return read_options(self.values.get("storage_options"))

    @property
    def words(self) -> list[str]:
        """What two collections must have in common to be one."""
        has_attention = any(one.has_attention for one in self.quantizations)
        return [*(["--quant-attention", "--"] if has_attention else []), *self.before, *self.script]

    @functools.cached_property
    def place(self) -> Backend:
        """What the runs lie below."""
        from ranktape.storage.places.urls import open_backend

        return open_backend(self.output, storage_options=self.options)

    def keep(self, path: Path) -> str:
        """Copy a file of the folder to where the runs are, and return where it is."""
        if "://" not in self.output:
            return str(path)
        self.place.put(path.name, [path.read_bytes()])
        return f"{shown(self.output)}/{path.name}"

    def check(self, *, overwrite: bool) -> None:
        """Say what cannot work before anything is trained, and note what the runs are of.

        Raises:
            UsageError: a setting is not allowed, or the script is missing.
            RunExistsError: the place holds the trainings of another command.
        """
        from ranktape.capture.settings.config import given_settings
        from ranktape.capture.settings.options import CaptureOptions
        from ranktape.launch.script import Script

        CaptureOptions(**given_settings(self.values))
        is_module = self.script[0] == "-m"
        Script(name=self.script[is_module], arguments=(), is_module=is_module).check()
        before = _command_in(self.place.get(RECORD))
        # A command that has stored nothing, as one with a mistake in it, is not in the way.
        if before and before != self.words and not overwrite and any(run.iterations for run in self._runs()):
            raise RunExistsError(
                f"{shown(self.output)} holds the trainings of another command ({shlex.join(before)}): add --overwrite "
                "to train anew, or choose another --output"
            )
        self.place.put(RECORD, [json.dumps({"command": self.words}, indent=2).encode()])

    def _runs(self) -> list[RunSummary]:
        from ranktape.storage.maintenance.runs import find_runs

        return find_runs(self.output, storage_options=self.options, max_depth=1)

    def url_of(self, quantization: Quantization) -> str:
        return f"{self.output}/{quantization.tag}"

    def collect(self, quantization: Quantization, *, head: str, timeout: float, overwrite: bool) -> Collected:
        """Train in one precision, unless that is stored already."""
        from ranktape.launch.collected import Collected

        url = self.url_of(quantization)
        is_stored = _is_stored(url, options=self.options, min_iterations=self.values["min_iterations"])
        log = self.folder / f"{quantization.tag}.log"
        if is_stored and not overwrite:
            say(f"{head} is stored already in {shown(url)} (--overwrite trains it again)")
            return Collected(
                quant_type=quantization.tag, url=url, is_met=True, losses=_losses(self.place.get(log.name))
            )
        command = self._command(quantization, overwrite=overwrite or is_stored is not None)
        say(f"{head} trains; its output is in {log}")
        started = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output, _training(command, output) as process:
            is_late = not self._wait(process, url, head=head, until=started + timeout)
        code = process.returncode
        kept = self.keep(log)
        is_met = bool(_is_stored(url, options=self.options, min_iterations=self.values["min_iterations"]))
        problem = ""
        if is_late:
            problem = f"after {timeout:g} s the training was ended; what was stored is kept (--timeout gives more)"
        elif code != 0:
            problem = f"the training ended with exit code {code}"
            say(_tail(log))
        where = "" if kept == str(log) else f"; its output is in {kept}"
        say(f"{head} {problem or f'done in {time.monotonic() - started:.0f} s'}{where}")
        return Collected(
            quant_type=quantization.tag,
            url=url,
            is_met=is_met,
            problem=problem,
            has_failed=not is_late and code != 0 and not is_met,
            losses=_losses(log.read_bytes()),
        )

    def _command(self, quantization: Quantization, *, overwrite: bool) -> list[str]:
        before = list(self.before)
        if before[:1] == [PYTHON]:
            launcher = before[1:]
        else:
            launcher = ["-m", "torch.distributed.run", *before]
            if not any(word.startswith(("--standalone", "--rdzv", "--nnodes", "--master")) for word in before):
                launcher.insert(2, "--standalone")
        return [
            *(sys.executable, *launcher, "-m", "ranktape.launch"),
            *("--capture", self.url_of(quantization), *quantization.options, "--stop-when-stored"),
            *(["--overwrite"] if overwrite else []),
            *capture_arguments(self.values),
            *self.script,
        ]

    def _wait(self, process: subprocess.Popen[bytes], url: str, *, head: str, until: float) -> bool:
        """Report the iterations that are stored until the training has ended; whether it has, in time."""
        from ranktape.storage import open_run

        known = 0
        while True:
            is_over = process.poll() is not None
            # A run that is not there yet, or that is deleted for the new one, is no mistake.
            with contextlib.suppress(RunNotFoundError):
                complete = len(open_run(url, storage_options=self.options).iterations)
                if complete > known:
                    say(f"{head} {complete} of {self.values['min_iterations']} guaranteed iterations complete")
                known = complete
            if is_over or time.monotonic() >= until:
                return is_over
            time.sleep(_LOOK_SECONDS)


@contextlib.contextmanager
def _training(command: Sequence[str], output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A training in a session of its own; at the end of the block it has ended, with all its ranks."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    # A collection that is told to end, as by `timeout` or a scheduler, leaves no training behind.
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


def split_words(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The options of torchrun, and the script with its arguments (-m before a module), of one command line.

    Of `python [options] script` the first part is `python` and its options.

    Raises:
        UsageError: torchrun, or Python, would not take it.
    """
    given = list(words[1:] if words[0] == "torchrun" else words)
    if not given:
        raise UsageError("behind -- stands what torchrun would be given: its options, the script and its arguments")
    if re.fullmatch(r"python[\d.]*", Path(given[0]).name):
        return _split_python(given)
    from torch.distributed.run import get_args_parser

    def fail(message: str) -> NoReturn:
        raise UsageError(f"torchrun would not take {shlex.join(given):.200}: {message}")

    parser = get_args_parser()
    parser.error = fail  # type: ignore[method-assign]  # its own ends the process
    parsed = parser.parse_args(given)
    if parsed.no_python:
        raise UsageError("--no-python is not for what is recorded: give a script, or -m and a module")
    before = given[: len(given) - 1 - len(parsed.training_script_args)]
    if parsed.module:
        before = [word for word in before if word not in {"-m", "--module"}]
    return tuple(before), (*(["-m"] if parsed.module else []), parsed.training_script, *parsed.training_script_args)


def _split_python(given: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """As `split_words`, of a command line of Python itself."""
    start = 1
    while start < len(given) and given[start].startswith("-") and given[start] != "-m":
        start += 2 if given[start] in {"-X", "-W"} else 1
    script = tuple(given[start:])
    if "-c" in given[:start] or not script or script == ("-m",):
        raise UsageError(
            f"{shlex.join(given):.200} runs no script: give python, a script or -m and a module, its arguments"
        )
    return (PYTHON, *given[1:start]), script


def _command_in(record: bytes | None) -> list[str] | None:
    """The command that a record beside the runs names; None where there is none that can be read."""
    try:
        words = json.loads(record or b"{}").get("command")
    except (ValueError, AttributeError):
        return None
    return list(map(str, words)) if isinstance(words, list) else None


def _is_stored(url: str, *, options: Mapping[str, Any] | None, min_iterations: int) -> bool | None:
    """Whether a run holds so many complete iterations; None where there is none."""
    from ranktape.storage import open_run

    try:
        return len(open_run(url, storage_options=options).iterations) >= min_iterations
    except RunNotFoundError:
        return None


def _judged(one: Collected, *, min_records: int, options: Mapping[str, Any] | None) -> Collected:
    """With the number of records looked at, too."""
    from ranktape.storage import open_run

    if not one.is_met:
        return one
    num = len(open_run(one.url, storage_options=options).select())
    if num >= min_records:
        return one
    why = f"{num} of {min_records} records are stored: select more, or raise --min-iterations"
    return replace(one, is_met=False, problem=why)


def _finish(done: Sequence[Collected], plan: _Plan) -> None:
    """Compare what there is, and say what is missing.

    Raises:
        CaptureError: a training failed.
        CheckFoundError: less was stored than was asked for.
    """
    from ranktape.launch.collected import write_comparison

    page = plan.folder / "report.html"
    stored = [one for one in done if _is_stored(one.url, options=plan.options, min_iterations=1)]
    if stored:
        write_comparison(stored, page, storage_options=plan.options)
        if (kept := plan.keep(page)) != str(page):
            say(f"the page is in {kept}, too")
    missing = [one for one in done if not one.is_met]
    if not missing:
        return
    text = "; ".join(
        f"{one.quant_type}: {one.problem or 'its guaranteed iterations are not stored'}" for one in missing
    )
    if any(one.has_failed for one in missing):
        raise CaptureError(text)
    raise CheckFoundError(text)


def _losses(log: bytes | None) -> tuple[float, ...]:
    """The losses that a training has printed, as 'loss 2.5', 'loss: 2.5' or {'loss': '2.5'}; none without a log."""
    return tuple(float(match) for match in _LOSS.findall((log or b"").decode(errors="replace")))


def _tail(log: Path) -> str:
    """Our errors and the last lines of a training; torchrun says after them that it has failed."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    ends = (place for place, line in enumerate(lines) if _OF_TORCHRUN.match(line))
    own = lines[: next(ends, len(lines))]
    errors = [line for line in own[:-_TAIL_LINES] if line.startswith("ranktape: error: ")]
    return "\n".join(f"    {line}" for line in [*errors, *own[-_TAIL_LINES:]])
