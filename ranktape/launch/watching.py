"""`ranktape watch`: shows a run coming in, on a terminal or to a script."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ranktape.analyze.command import describe
from ranktape.analyze.console import say
from ranktape.errors import CheckFoundError, RunNotFoundError, expect_least
from ranktape.launch.place import count_text, open_backend_of, shown
from ranktape.storage.format.memory import nbytes_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ranktape.analyze.questions.findings import FindingsTable
    from ranktape.storage.maintenance.watch import RankWatch, Snapshot, Watcher

RESTART_SECONDS = 30.0
"""A run that is closed without its minimum may be taken up again by a restarted worker group for so long."""

_SHORTEST_SECONDS = 0.05
"""From one look to the next: each costs the store some requests."""

_RATE_LOOKS = 10
"""Looks over which a rate is taken."""

_MAX_ROWS = 40
"""Ranks that a terminal shows; the ones that are furthest behind."""

_MAX_FINDINGS = 5
"""Findings that a terminal shows, the worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchView:
    """What is shown after one look."""

    snapshot: Snapshot
    """The run now."""
    rates: dict[int, float] = field(default_factory=dict)
    """Bytes per second of each rank, lately."""
    rate: float = 0.0
    """Bytes per second of all ranks, lately."""
    findings: FindingsTable | None = None
    """What stands out in the iterations that are complete; None where that was not asked for, or is not known yet."""


def watch(
    run: str | os.PathLike[str],
    *,
    until_complete: bool = False,
    min_records: int | None = None,
    timeout: float | None = None,
    interval: float = 2.0,
    findings: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    on_look: Callable[[WatchView], object] = lambda _: None,
) -> Snapshot:
    """Show live which ranks of RUN have committed what.

    Without a condition it ends when the run is closed. With one it exits with 0 as soon as all conditions hold, and
    with 3 when the time is up or the run is closed without them. A table that moves on a terminal, a line for each
    change in a pipe.

    Args:
        until_complete: Watch until the guaranteed minimum is stored complete.
        min_records (N): Watch until so many records are in complete iterations.
        timeout (SECONDS): Watch so long at most; also waits for RUN to appear.
        interval (SECONDS): From one look to the next.
        findings: Say what stands out, too, as 'ranktape analyze findings' does: found anew when an iteration is
            complete. The values of each are read once.
        on_look: Called with each look.

    Raises:
        CheckFoundError: the time is up, or the run is closed and what was waited for is not there.
        RunNotFoundError: there is no run, and no time was given in which it may appear.
        UsageError: a number is too small.
        RanktapeError: the store cannot be read.
    """
    from ranktape.launch.watched_findings import WatchedFindings
    from ranktape.storage.maintenance.watch import Watcher

    expect_least(1, min_records=min_records)
    expect_least(0, timeout=timeout)
    expect_least(_SHORTEST_SECONDS, interval=interval)
    has_goal = until_complete or min_records is not None
    looks: deque[Snapshot] = deque(maxlen=_RATE_LOOKS)
    closed_since: float | None = None
    with (
        open_backend_of(os.fspath(run), storage_options) as backend,
        WatchedFindings(os.fspath(run), storage_options) as found,
    ):
        lacks = ["no attempt has begun"]
        for look, now in _looks(Watcher(backend), timeout=timeout, interval=interval):
            looks.append(look)
            lacks = _missing(look, until_complete=until_complete, min_records=min_records)
            closed_since = (closed_since or now) if look.is_closed else None
            is_last = not lacks and (has_goal or closed_since is not None)
            table = found.look(look.complete, is_last=is_last) if findings else None
            on_look(_view(looks, findings=table))
            if is_last:
                return look
            if closed_since is not None and now - closed_since >= RESTART_SECONDS:
                raise CheckFoundError(f"the run at {backend.url} is closed, and {' and '.join(lacks)}")
        state = " and ".join(lacks) or "the run is not closed"
        raise CheckFoundError(f"after {timeout:g} s {state} ({backend.url})")


def _looks(watcher: Watcher, *, timeout: float | None, interval: float) -> Iterator[tuple[Snapshot, float]]:
    """The run again and again once it is there, each with the time, until the time is up."""
    deadline = None if timeout is None else time.monotonic() + timeout
    has_begun = False
    while True:
        look, now = _look(watcher, may_be_missing=deadline is not None and not has_begun), time.monotonic()
        if look is not None:
            has_begun = True
            yield look, now
        if deadline is not None and now >= deadline:
            return
        time.sleep(interval if deadline is None else max(0.0, min(interval, deadline - now)))


def _look(watcher: Watcher, *, may_be_missing: bool) -> Snapshot | None:
    """The run now; None where it is not there yet, and may be missing, or has not begun."""
    try:
        return watcher.look()
    except RunNotFoundError:
        if not may_be_missing:
            raise
        return None


def _watch(run: str, **given: Any) -> None:
    with _screen(shown(run)) as on_look:
        watch(run, on_look=on_look, **given)


command = describe(__name__, "watch").command(_watch)


def _missing(now: Snapshot, *, until_complete: bool, min_records: int | None) -> list[str]:
    """What does not hold yet."""
    found = []
    if until_complete and not now.is_met:
        found.append(f"{len(now.complete)} of {now.required} guaranteed iterations are complete")
    if min_records is not None and now.num_records < min_records:
        found.append(f"{now.num_records} of {min_records} records are in complete iterations")
    return found


def lines(view: WatchView, *, before: Snapshot | None) -> list[str]:
    """What a pipe is given: a line for each change since the look before; none where nothing changed."""
    now = view.snapshot
    found = []
    if before is None or before.attempt != now.attempt:
        world, required = count_text(len(now.ranks), "rank"), count_text(now.required, "iteration")
        found.append(f"attempt {now.attempt}: {world}, {required} guaranteed")
    same_attempt = before is not None and before.attempt == now.attempt
    waiting_before = before.waiting if before is not None and same_attempt else {}
    for iteration, ranks in now.waiting.items():
        if waiting_before.get(iteration) != ranks:
            found.append(f"iteration {iteration}: committed by {_ranks_text(ranks)} ({len(ranks)} of {len(now.ranks)})")
    new = [iteration for iteration in now.complete if before is None or iteration not in before.complete]
    found += [f"iteration {iteration}: complete" for iteration in new]
    if found or (before is not None and before.is_closed != now.is_closed):
        found.append(summary(view))
    return found


def _view(looks: Sequence[Snapshot], *, findings: FindingsTable | None) -> WatchView:
    first, last = looks[0], looks[-1]
    seconds = last.seconds - first.seconds
    if seconds <= 0 or first.attempt != last.attempt:
        return WatchView(snapshot=last, findings=findings)
    before = {rank.rank: rank.nbytes for rank in first.ranks}
    rates = {rank.rank: (rank.nbytes - before.get(rank.rank, 0)) / seconds for rank in last.ranks}
    rate = (last.nbytes - first.nbytes) / seconds
    return WatchView(snapshot=last, rates=rates, rate=rate, findings=findings)


def finding_lines(now: FindingsTable | None, *, before: FindingsTable | None) -> list[str]:
    """What a pipe is given: a line for each finding that is new or became worse, and how many there are in all."""
    if now is None or now is before:
        return []
    known = set() if before is None else {_key(row) for row in before.records()}
    new = [row for row in now.records() if _key(row) not in known]
    found = [f"finding, {row['severity']}: {row['title']}; next: {row['command']}" for row in new]
    return [*found, now.title] if found or before is None or now.title != before.title else []


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What tells one finding from another over time: its numbers change with each iteration."""
    return row["severity"], row["kind"], row["where"]


def summary(view: WatchView) -> str:
    """How far the run is, in one line."""
    now = view.snapshot
    rate = f", {nbytes_text(round(view.rate))}/s" if view.rate > 0 else ""
    closed = "; closed" if now.is_closed else ""
    return (
        f"{len(now.complete)} of {now.required} guaranteed iterations complete; {now.num_records} records, "
        f"{nbytes_text(now.nbytes)}{rate}{closed}"
    )


def _ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as ranges: 0-2, 5."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    if not spans:
        return "no rank"
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


@contextlib.contextmanager
def _screen(title: str) -> Iterator[Callable[[WatchView], object]]:
    """Where a view is shown: a table that moves, or lines."""
    if not sys.stdout.isatty():
        before: list[WatchView] = []

        def write(view: WatchView) -> None:
            last = before[-1] if before else None
            told = lines(view, before=None if last is None else last.snapshot)
            for line in [*told, *finding_lines(view.findings, before=None if last is None else last.findings)]:
                say(line)
            before[:] = [view]

        yield write
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=sys.stdout), auto_refresh=False) as live:
        yield lambda view: live.update(_moving_table(view, title=title), refresh=True)


def _moving_table(view: WatchView, *, title: str) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("rank", "committed", "last", "records", "size", "rate", "state"):
        table.add_column(head, justify="left" if head == "state" else "right")
    ranks = sorted(view.snapshot.ranks, key=lambda rank: (len(rank.iterations), rank.rank))[:_MAX_ROWS]
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        table.add_row(*_cells(rank, rate=view.rates.get(rank.rank, 0.0)))
    waiting = ", ".join(
        f"{iteration} ({len(committed)} of {len(view.snapshot.ranks)} ranks)"
        for iteration, committed in view.snapshot.waiting.items()
    )
    rest = len(view.snapshot.ranks) - len(ranks)
    notes = [Text(f"and {rest} more ranks, which are further on", style="dim")] if rest else []
    if waiting:
        notes.append(Text(f"not complete: {waiting}", style="dim"))
    found = [] if view.findings is None else view.findings.lines(_MAX_FINDINGS)
    return Group(Text(title, style="italic"), table, *notes, *found, Text(summary(view)))


def _cells(rank: RankWatch, *, rate: float) -> tuple[str, ...]:
    lost = f"{count_text(rank.num_lost, 'iteration')} lost" if rank.num_lost else ""
    return (
        str(rank.rank),
        str(len(rank.iterations)),
        str(rank.iterations[-1]) if rank.iterations else "-",
        str(rank.num_records),
        nbytes_text(rank.nbytes),
        f"{nbytes_text(round(rate))}/s" if rate > 0 else "-",
        ", ".join(filter(None, ("closed" if rank.is_closed else "", lost))),
    )
